//! Owns what a call waits for: the process's own lock, the driver's kernel locks, the device; and the truth of it.
//! Refuses all of it at scale 0, except what a test injected.
//!
//! Changes of memory and contexts take the API lock alone, and their GPU's lock. Mappings take the API lock with
//! others of their kind, so that those of one GPU wait for that GPU's lock. Pools that grow count as changes; else pools
//! and current contexts stay in user space. Host memory has no GPU.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use cotenant_abi::{MemoryKind, Operation};
use cotenant_sim_state::{
    Held, LockName, Mode, Nap, Sleep, Turn, Waited, asleep, monotonic_ns, own_pid,
    truth::{Class, effect},
};

use crate::{
    OUT_OF_MEMORY, Outcome,
    call::{Effects, Process},
    driver::Driver,
};

/// From here on, pages must be scrubbed before they are handed out.
const SCRUBBED: u64 = 1 << 30;
/// The longest single wait for scrubbing.
const SCRUB: Duration = Duration::from_millis(4);

/// The driver's lock around everything that threads of one process share. First come, first served.
pub(crate) struct UserLock {
    next: AtomicU64,
    /// The ticket whose turn it is. Its low half is the futex.
    serving: AtomicU64,
    /// When each turn ended, by ticket.
    ended: [AtomicU64; 64],
}

pub(crate) struct UserHeld(&'static UserLock, u64);

static USER: UserLock = UserLock {
    next: AtomicU64::new(0),
    serving: AtomicU64::new(0),
    ended: [const { AtomicU64::new(0) }; 64],
};

impl UserLock {
    fn word(&self) -> *const AtomicU32 {
        let low = usize::from(cfg!(target_endian = "big"));
        // SAFETY: the low half of a live `AtomicU64`, aligned and inside it.
        unsafe { (&raw const self.serving).cast::<AtomicU32>().add(low) }
    }

    fn futex(&self, operation: i32, value: u32, ticket: u64) {
        // Each waiter has a bit: only the next in turn is woken, as long as no more than 32 wait.
        let bit = 1u32 << (ticket % 32);
        // SAFETY: a futex word that lives for ever; there is no timeout.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word(),
                operation | libc::FUTEX_PRIVATE_FLAG,
                value,
                std::ptr::null::<libc::timespec>(),
                std::ptr::null::<u32>(),
                bit,
            );
        }
    }

    fn hold(&'static self) -> (UserHeld, Option<Waited>) {
        let wanted = monotonic_ns();
        // Sequentially consistent here and at the release: one of the two sees the other.
        let ticket = self.next.fetch_add(1, Ordering::SeqCst);
        let held = UserHeld(self, ticket);
        if self.serving.load(Ordering::SeqCst) == ticket {
            return (held, None);
        }
        let nap = Nap::begin();
        loop {
            let serving = self.serving.load(Ordering::SeqCst);
            if serving == ticket {
                break;
            }
            // The kernel compares 32 bits.
            let seen = u32::try_from(serving & u64::from(u32::MAX)).unwrap_or(0);
            self.futex(libc::FUTEX_WAIT_BITSET, seen, ticket);
        }
        let acquired = monotonic_ns();
        let ended = self.ended[place(ticket.wrapping_sub(1))].load(Ordering::Acquire);
        let told = Turn { pid: own_pid(), thread: 0, from: nap.begun(), to: ended };
        let told = if ended > nap.begun() { vec![told] } else { Vec::new() };
        let (blocked, turns) = asleep(told, nap.begun(), nap.slept(), acquired);
        let spun = nap.begun() - wanted;
        (held, Some(Waited { wanted, spun, blocked, acquired, turns }))
    }
}

fn place(ticket: u64) -> usize {
    usize::try_from(ticket % 64).unwrap_or(0)
}

impl Drop for UserHeld {
    fn drop(&mut self) {
        let Self(lock, ticket) = *self;
        lock.ended[place(ticket)].store(monotonic_ns(), Ordering::Release);
        lock.serving.store(ticket + 1, Ordering::SeqCst);
        if lock.next.load(Ordering::SeqCst) > ticket + 1 {
            lock.futex(libc::FUTEX_WAKE_BITSET, i32::MAX.unsigned_abs(), ticket + 1);
        }
    }
}

/// Waits until no other thread of this process is in a call.
pub(crate) fn enter(process: &Process, operation: Operation) -> UserHeld {
    let (held, waited) = USER.hold();
    if let Some(waited) = waited {
        process.waits.lock(Class::UserspaceLock, Some(operation), None, &waited);
    }
    held
}

/// Which kernel locks a call takes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    api: Option<Mode>,
    gpu: Option<usize>,
}

impl Needs {
    pub(crate) fn of(driver: &Driver, operation: Operation, bytes: u64) -> Self {
        let gpu = driver.current().ok().map(|(_, context)| context.gpu);
        match operation {
            Operation::Init
            | Operation::DeviceGetUuid
            | Operation::CtxSetCurrent
            | Operation::CtxPushCurrent
            | Operation::CtxPopCurrent
            | Operation::MemFreeAsync => Self::default(),
            Operation::MemAllocAsync | Operation::MemAllocFromPoolAsync if !driver.pool_grows(bytes) => {
                Self::default()
            }
            Operation::MemMap | Operation::MemUnmap | Operation::MemSetAccess => {
                Self { api: Some(Mode::Shared), gpu }
            }
            Operation::MemHostAlloc
            | Operation::MemAllocHost
            | Operation::MemFreeHost
            | Operation::MemHostRegister
            | Operation::MemHostUnregister => Self { api: Some(Mode::Exclusive), gpu: None },
            _ => Self { api: Some(Mode::Exclusive), gpu },
        }
    }

    /// Pools that only pass their own memory around take no time worth it.
    pub(crate) fn is_none(self) -> bool {
        self.api.is_none()
    }

    pub(crate) fn gpu(self) -> Option<usize> {
        self.gpu
    }
}

/// The kernel locks of one call; the GPU's goes first.
pub(crate) struct Locks<'a> {
    _gpu: Option<Held<'a>>,
    _api: Option<Held<'a>>,
}

impl<'a> Locks<'a> {
    pub(crate) fn take(process: &'a Process, operation: Operation, needs: Needs) -> Self {
        let hold = |name, mode, class, gpu| {
            // The files are the node's own; without them there is no driver.
            let Ok((held, waited)) = process.node.hold(name, mode) else { std::process::abort() };
            if let Some(waited) = waited {
                process.waits.lock(class, Some(operation), gpu, &waited);
            }
            held
        };
        let api = needs.api.map(|mode| hold(LockName::Api, mode, Class::RmApiLock, None));
        let gpu = needs.gpu.map(|gpu| hold(LockName::Gpu(gpu), Mode::Exclusive, Class::GpuLock, Some(gpu)));
        Self { _gpu: gpu, _api: api }
    }
}

/// What a call spends: on its processor, and waiting for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    busy: Duration,
    scrub: Duration,
    device: Duration,
}

impl Cost {
    /// Calibrated: 2 MiB alloc and free 70 us; 30 GB alloc and free 76 ms, 43 of them scrubbing; a failed request 7 ms.
    pub(crate) fn of(operation: Operation, bytes: u64, outcome: Outcome<()>, effects: &Effects) -> Self {
        let call = Duration::from_micros(33);
        if outcome == Err(OUT_OF_MEMORY) {
            return Self { busy: call, scrub: Duration::from_millis(7), ..Self::default() };
        }
        if matches!(operation, Operation::PrimaryCtxRetain | Operation::CtxCreate) {
            return Self { busy: call, device: Duration::from_millis(110), ..Self::default() };
        }
        let moved = |sign: u8| -> u64 {
            let on_device = |of: &&crate::call::Effect| {
                of.sign == sign && of.gpu.is_some() && of.kind.is_device() && of.kind != MemoryKind::Pool
            };
            effects.0.iter().filter(on_device).map(|of| of.bytes).sum()
        };
        let (taken, given) = (bytes.max(moved(effect::CREDIT)), moved(effect::DEBIT));
        let taking = Duration::from_nanos(taken / 600);
        let giving = Duration::from_nanos(given / 1_400);
        if taken < SCRUBBED || operation == Operation::MemAllocManaged {
            return Self { busy: call + taking + giving, ..Self::default() };
        }
        Self { busy: call + taking / 5 + giving, scrub: taking * 4 / 5, ..Self::default() }
    }

    pub(crate) fn init() -> Self {
        Self { device: Duration::from_millis(100), ..Self::default() }
    }

    pub(crate) fn pay(self, process: &Process, operation: Operation, gpu: Option<usize>) {
        let scaled = |duration: Duration| duration.mul_f64(process.node.scale());
        busy(scaled(self.busy));
        let mut scrub = scaled(self.scrub);
        while !scrub.is_zero() {
            let piece = scrub.min(SCRUB);
            sleep(process, operation, gpu, Sleep::Reclaim, piece);
            scrub -= piece;
        }
        let device = scaled(self.device);
        if !device.is_zero() {
            sleep(process, operation, gpu, Sleep::Device, device);
        }
    }
}

/// What a test wants a call to spend besides.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Delay {
    Busy(Duration),
    Asleep(Sleep, Duration),
}

impl Delay {
    /// 0 busy, then as `Sleep::ALL`.
    pub(crate) fn new(kind: u32, duration: Duration) -> Option<Self> {
        let Some(sleep) = kind.checked_sub(1) else { return Some(Self::Busy(duration)) };
        Sleep::ALL.get(sleep as usize).map(|sleep| Self::Asleep(*sleep, duration))
    }

    pub(crate) fn pay(self, process: &Process, operation: Operation, gpu: Option<usize>) {
        match self {
            Self::Busy(duration) => busy(duration),
            Self::Asleep(kind, duration) => sleep(process, operation, gpu, kind, duration),
        }
    }
}

fn busy(duration: Duration) {
    let until = monotonic_ns() + u64::try_from(duration.as_nanos()).unwrap_or(0);
    while monotonic_ns() < until {
        std::hint::spin_loop();
    }
}

fn sleep(process: &Process, operation: Operation, gpu: Option<usize>, kind: Sleep, duration: Duration) {
    let (from, to) = kind.wait(duration);
    process.waits.sleep(kind.into(), Some(operation), gpu, from, to);
}
