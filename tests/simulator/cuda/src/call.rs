//! Owns a call from entry to record: initialisation, injected failures, locks and delays, the truth.
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
    Node, monotonic_ns,
    truth::{NO_GPU, Record, Writer, effect},
};

use crate::{Code, DEINITIALIZED, NOT_INITIALIZED, Outcome, UNKNOWN, driver::Driver};

/// A shorter wait is a spin: sleeping rounds up to tens of microseconds.
const SLEEP_FROM: Duration = Duration::from_micros(150);

pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) node: Node,
    pub(crate) slot: usize,
    truth: Writer,
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
    // SAFETY: registers a function without captures.
    unsafe { libc::atexit(deinitialise) };
    Some(PROCESS.get_or_init(|| Process { pid: std::process::id(), node, slot, truth }))
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
        pause(process, Duration::from_millis(100));
    }
    READY.store(true, Ordering::Release);
    record(process, Operation::Init, start, 0, &Effects::default());
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
                record(process, operation, start, code, &Effects::default());
            }
            return code;
        }
    };
    let mut effects = Effects::default();
    let held = (process.node.scale() > 0.0 && takes_lock(operation)).then(|| process.node.api().hold());
    let outcome = {
        let mut driver = driver();
        match driver.as_mut() {
            Some(driver) => driver.injected(operation).and_then(|()| work(process, driver, &mut effects)),
            None => Err(NOT_INITIALIZED),
        }
    };
    if held.is_some() {
        pause(process, duration(operation, bytes, outcome));
    }
    drop(held);
    let code = outcome.err().unwrap_or(0);
    if code != 0 {
        effects.0.clear();
    }
    record(process, operation, start, code, &effects);
    code
}

/// Changes of a thread's current context stay in user space.
fn takes_lock(operation: Operation) -> bool {
    !matches!(
        operation,
        Operation::CtxSetCurrent
            | Operation::CtxPushCurrent
            | Operation::CtxPopCurrent
            | Operation::DeviceGetUuid
    )
}

/// Calibrated: 2 MiB alloc and free 70 us, 30 GB alloc and free 75 ms, a failed request 7 ms.
fn duration(operation: Operation, bytes: u64, outcome: Outcome<()>) -> Duration {
    if outcome == Err(crate::OUT_OF_MEMORY) {
        return Duration::from_millis(7);
    }
    match operation {
        Operation::PrimaryCtxRetain | Operation::CtxCreate => Duration::from_millis(110),
        Operation::MemAllocAsync | Operation::MemFreeAsync | Operation::MemAllocFromPoolAsync => {
            Duration::ZERO
        }
        _ => Duration::from_micros(33) + Duration::from_nanos(bytes / 800),
    }
}

fn pause(process: &Process, duration: Duration) {
    let duration = duration.mul_f64(process.node.scale());
    if duration >= SLEEP_FROM {
        std::thread::sleep(duration);
    } else {
        let until = monotonic_ns() + u64::try_from(duration.as_nanos()).unwrap_or(0);
        while monotonic_ns() < until {
            std::hint::spin_loop();
        }
    }
}

fn record(process: &Process, operation: Operation, start: u64, code: Code, effects: &Effects) {
    // SAFETY: takes no argument and cannot fail.
    let thread = unsafe { libc::gettid() };
    let call = Record {
        start,
        end: monotonic_ns(),
        thread: thread.unsigned_abs(),
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
