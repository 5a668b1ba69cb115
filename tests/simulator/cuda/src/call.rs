//! Owns a call from entry to record: initialisation, injected failures, the truth. What it waits for is `turn`'s.
//! Refuses to record before the outcome is known.

use std::{
    cell::RefCell,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cotenant_abi::{MemoryKind, Operation};
use cotenant_sim_state::{
    Node, monotonic_ns, own_pid, own_thread, ran, start_time,
    truth::{NO_GPU, Record, Writer, effect, waits},
};

use crate::{
    Code, DEINITIALIZED, INVALID_VALUE, NOT_INITIALIZED, Outcome, UNKNOWN,
    driver::Driver,
    turn::{self, Cost, Delay, Locks, Needs},
};

pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) node: Node,
    pub(crate) slot: usize,
    truth: Writer,
    pub(crate) waits: waits::Writer,
}

static PROCESS: OnceLock<Process> = OnceLock::new();
static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);
static READY: AtomicBool = AtomicBool::new(false);
static ENDED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The stack of current contexts of this thread.
    pub(crate) static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// What a call did to the ledger, to be recorded with its outcome.
#[derive(Clone, Copy)]
pub(crate) struct Effect {
    pub(crate) sign: u8,
    pub(crate) kind: MemoryKind,
    pub(crate) gpu: Option<usize>,
    pub(crate) bytes: u64,
    pub(crate) address: u64,
    pub(crate) entries: u32,
}

/// What a call leaves behind: the first effect is its own, the rest came with it.
#[derive(Default)]
pub(crate) struct Effects(pub(crate) Vec<Effect>);

impl Effects {
    pub(crate) fn credit(&mut self, kind: MemoryKind, gpu: Option<usize>, bytes: u64, address: u64) {
        self.0.push(Effect { sign: effect::CREDIT, kind, gpu, bytes, address, entries: 1 });
    }

    pub(crate) fn debit(
        &mut self,
        kind: MemoryKind,
        gpu: Option<usize>,
        bytes: u64,
        address: u64,
        entries: u32,
    ) {
        self.0.push(Effect { sign: effect::DEBIT, kind, gpu, bytes, address, entries });
    }
}

fn driver() -> MutexGuard<'static, Option<Driver>> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn deinitialise() {
    ENDED.store(true, Ordering::Relaxed);
}

fn join() -> Option<&'static Process> {
    if let Some(process) = PROCESS.get() {
        return Some(process);
    }
    let node = Node::open()
        .inspect_err(|error| eprintln!("SIMULATED libcuda: {error}; this library is for tests only"))
        .ok()?;
    let slot = node.join()?;
    let truth = Writer::create(node.directory()).ok()?;
    let waits = waits::Writer::create(node.directory(), start_time(own_pid())?).ok()?;
    // SAFETY: registers a function without captures.
    unsafe { libc::atexit(deinitialise) };
    Some(PROCESS.get_or_init(|| Process { pid: std::process::id(), node, slot, truth, waits }))
}

/// `cuInit`.
pub(crate) fn initialise() -> Code {
    let start = monotonic_ns();
    let Some(process) = join() else { return UNKNOWN };
    if process.pid != std::process::id() {
        // A fork child cannot use its parent's driver.
        return NOT_INITIALIZED;
    }
    let first = {
        let mut driver = driver();
        let first = driver.is_none();
        if first {
            *driver = Some(Driver::new(&process.node));
        }
        first
    };
    if first {
        Cost::init().pay(process, Operation::Init, None);
    }
    READY.store(true, Ordering::Release);
    record(process, Operation::Init, (start, 0), 0, &Effects::default());
    0
}

/// The process, once initialised.
pub(crate) fn process() -> Outcome<&'static Process> {
    let process = PROCESS.get().ok_or(NOT_INITIALIZED)?;
    if !READY.load(Ordering::Acquire) || process.pid != std::process::id() {
        return Err(NOT_INITIALIZED);
    }
    if ENDED.load(Ordering::Relaxed) {
        return Err(DEINITIALIZED);
    }
    Ok(process)
}

/// One traced call. `bytes` is what its duration depends on.
pub(crate) fn call(
    operation: Operation,
    bytes: u64,
    work: impl FnOnce(&Process, &mut Driver, &mut Effects) -> Outcome<()>,
) -> Code {
    let start = monotonic_ns();
    let process = match process() {
        Ok(process) => process,
        Err(code) => {
            // A call that the driver refuses is a call all the same.
            if let Some(process) = PROCESS.get().filter(|process| process.pid == std::process::id()) {
                record(process, operation, (start, 0), code, &Effects::default());
            }
            return code;
        }
    };
    let mut effects = Effects::default();
    let slow = process.node.scale() > 0.0;
    let before = slow.then(ran);
    let user = slow.then(|| turn::enter(process, operation));
    let needs = if slow { driver().as_ref().map(|driver| Needs::of(driver, operation, bytes)) } else { None }
        .unwrap_or_default();
    let locks = Locks::take(process, operation, needs);
    let (outcome, delay) = {
        let mut driver = driver();
        match driver.as_mut() {
            Some(driver) => {
                let delay = driver.delayed(operation);
                (driver.injected(operation).and_then(|()| work(process, driver, &mut effects)), delay)
            }
            None => (Err(NOT_INITIALIZED), None),
        }
    };
    let gpu = needs.gpu();
    if slow && !needs.is_none() {
        Cost::of(operation, bytes, outcome, &effects).pay(process, operation, gpu);
    }
    if let Some(delay) = delay {
        delay.pay(process, operation, gpu);
    }
    drop(locks);
    let code = outcome.err().unwrap_or(0);
    if code != 0 {
        effects.0.clear();
    }
    record(process, operation, (start, before.map_or(0, |before| ran() - before)), code, &effects);
    drop(user);
    code
}

/// `since`: when the call began, and how long it has been on a processor.
fn record(process: &Process, operation: Operation, since: (u64, u64), code: Code, effects: &Effects) {
    let call = Record {
        start: since.0,
        ran: since.1,
        end: monotonic_ns(),
        thread: own_thread(),
        code: code.unsigned_abs(),
        operation: operation as u8,
        gpu: NO_GPU,
        call: 1,
        ..Record::default()
    };
    let with = |record: Record, effect: &Effect| Record {
        bytes: effect.bytes,
        address: effect.address,
        entries: effect.entries,
        kind: effect.kind as u8,
        gpu: effect.gpu.and_then(|gpu| u8::try_from(gpu).ok()).unwrap_or(NO_GPU),
        effect: effect.sign,
        ..record
    };
    let Some((own, others)) = effects.0.split_first() else {
        process.truth.append(call);
        return;
    };
    process.truth.append(with(call, own));
    for effect in others {
        process.truth.append(with(Record { call: 0, ..call }, effect));
    }
}

/// For calls that are not traced.
pub(crate) fn with_driver(work: impl FnOnce(&mut Driver) -> Outcome<()>) -> Outcome<()> {
    driver().as_mut().map_or(Err(NOT_INITIALIZED), work)
}

pub(crate) fn inject(operation: Operation, code: Code, times: u32) -> Code {
    with_driver(|driver| {
        driver.inject(operation, code, times);
        Ok(())
    })
    .err()
    .unwrap_or(0)
}

/// The next `times` calls of an operation take longer, with the locks that they hold.
pub(crate) fn delay(operation: Operation, kind: u32, milliseconds: u32, times: u32) -> Code {
    let duration = Duration::from_millis(milliseconds.into());
    let delay = Delay::new(kind, duration).ok_or(INVALID_VALUE);
    delay
        .and_then(|delay| {
            with_driver(|driver| {
                driver.delay(operation, delay, times);
                Ok(())
            })
        })
        .err()
        .unwrap_or(0)
}
