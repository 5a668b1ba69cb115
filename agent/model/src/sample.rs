//! Owns what the kernel side reported at one moment, by process.
//! Refuses tenants and names: those come from the host and meet the sample in `view`.

use std::collections::{BTreeMap, BTreeSet};

use crate::{CudaError, GpuId, Loss, MemoryKind, Note, Operation, ProcessId, report::LastCall};

/// Where a row's memory is, as far as the kernel side could tell.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuRef {
    Known(GpuId),
    /// Host memory: no GPU.
    Host,
    Unknown,
}

/// Whether a process's ledger can be trusted to the byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Confidence {
    /// Every call since `cuInit` was seen.
    Complete,
    /// The process ran before the probes: what it held then is unknown.
    JoinedLate,
    /// Something of this process was lost (a full map).
    EventsLost,
}

impl Confidence {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::JoinedLate => "joined_late",
            Self::EventsLost => "events_lost",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Exit,
    Exec,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSample {
    pub id: ProcessId,
    pub tgid: u32,
    pub uid: u32,
    pub cgroup_id: u64,
    pub comm: String,
    /// Monotonic ns.
    pub first_seen: u64,
    pub ended: Option<End>,
    /// Monotonic ns; 0 while it lives.
    pub ended_at: u64,
    pub confidence: Confidence,
    /// The first call seen was one that comes before any memory: a context's creation, a device's UUID. If the agent
    /// also saw the process map the driver, nothing that is booked was missed, `cuInit` or not.
    pub before_memory: bool,
    /// The last calls that moved memory, oldest first. Only of a process that has ended.
    pub last_calls: Vec<LastCall>,
    /// What its pools have taken, where the kernel boundary shows it.
    pub pools: Vec<PoolRow>,
    pub ledger: Vec<LedgerRow>,
    pub calls: Vec<CallRow>,
    pub failures: Vec<FailureRow>,
    pub latency: Vec<LatencyRow>,
    pub waits: Vec<WaitRow>,
    pub blame: Vec<BlameRow>,
    pub effort: Vec<EffortRow>,
}

impl ProcessSample {
    /// False for a process that is known only because it woke one that waited in the driver.
    pub fn calls_driver(&self) -> bool {
        !self.calls.is_empty()
    }
}

/// A kernel stack, as long as the agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    /// `None` for the negative id of a stack that could not be taken.
    pub fn new(id: i32) -> Option<Self> {
        u32::try_from(id).ok().map(Self)
    }
}

/// How a kernel lock was wanted, where the kernel says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockMode {
    Read,
    Write,
    /// A lock without readers.
    Exclusive,
    /// Not on a lock that announces contention.
    None,
}

impl LockMode {
    /// By the `LCB_F_*` flags of `lock:contention_begin`.
    pub fn from_flags(flags: u8) -> Self {
        match flags {
            0 => Self::None,
            flags if flags & 2 != 0 => Self::Read,
            flags if flags & 4 != 0 => Self::Write,
            _ => Self::Exclusive,
        }
    }
}

/// Waits of a process at one place in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitRow {
    pub stack: Option<StackId>,
    pub mode: LockMode,
    pub histogram: Histogram,
}

/// A thread that is blocked inside a driver call and has not been woken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StallRow {
    pub process: ProcessId,
    pub stack: Option<StackId>,
    pub blocked_ns: u64,
}

/// Who ended waits, or had what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Waker {
    Process(ProcessId),
    Device,
    Kernel,
    Unseen,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlameRow {
    pub waker: Waker,
    pub stack: Option<StackId>,
    pub waits: u64,
    pub time_ns: u64,
}

/// Time on the CPU inside successful calls of one operation whose sizes have as many bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EffortRow {
    pub operation: Operation,
    pub size_bits: u8,
    /// Nobody else was in a call.
    pub solo_calls: u64,
    pub solo_ns: u64,
    /// A call of another process overlapped.
    pub shared_calls: u64,
    pub shared_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerRow {
    pub gpu: GpuRef,
    pub kind: MemoryKind,
    pub live: u64,
    pub peak: u64,
    pub allocated: u64,
    pub freed: u64,
    pub allocations: u64,
    pub frees: u64,
}

/// Memory of a GPU that the pools of a process have taken, used or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolRow {
    pub gpu: GpuId,
    /// `None`: something happened to them that is not understood.
    pub bytes: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRow {
    pub gpu: GpuRef,
    pub operation: Operation,
    pub calls: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureRow {
    pub gpu: GpuRef,
    pub operation: Operation,
    pub error: CudaError,
    pub count: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyRow {
    pub operation: Operation,
    pub histogram: Histogram,
}

/// Durations in power-of-two buckets, as the kernel keeps them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Histogram {
    pub count: u64,
    pub sum_ns: u64,
    pub buckets: [u64; cotenant_abi::LATENCY_BUCKETS],
}

impl Histogram {
    /// The upper bound of bucket `index` in seconds; the last bucket is open.
    pub fn upper_seconds(index: usize) -> f64 {
        if index + 1 >= cotenant_abi::LATENCY_BUCKETS {
            return f64::INFINITY;
        }
        #[allow(clippy::cast_possible_truncation, reason = "an index below LATENCY_BUCKETS")]
        let exponent = index as u32 + cotenant_abi::LATENCY_SHIFT;
        (1u64 << exponent) as f64 / 1e9
    }

    pub fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets) {
            *mine += theirs;
        }
    }
}

/// Everything the kernel side reported in one read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelSample {
    pub processes: Vec<ProcessSample>,
    /// Kernel stacks not seen before: return addresses, innermost first.
    pub stacks: BTreeMap<StackId, Vec<u64>>,
    /// Threads that are in a traced call now.
    pub in_flight: u64,
    /// Of them, those that have been blocked for long.
    pub stalls: Vec<StallRow>,
    /// Processes with a thread in a driver call that is not stalled, while one is.
    pub at_work: BTreeSet<ProcessId>,
    /// Cumulative since start, every reason present.
    pub losses: Vec<(Loss, u64)>,
    pub notes: Vec<(Note, u64)>,
    pub maps: Vec<MapFill>,
    pub libraries: Vec<LibraryState>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapFill {
    pub name: &'static str,
    pub entries: u64,
    pub capacity: u64,
}

/// One libcuda file under observation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryState {
    pub path: String,
    pub device: u64,
    pub inode: u64,
    pub attached: u32,
    pub missing: u32,
    pub failed: u32,
    pub processes: u32,
    /// Of these, the PIDs.
    pub pids: Vec<u32>,
    /// Its stream-ordered calls are not probed for now: they come too often.
    pub shed: bool,
    /// Why nothing is attached, if so.
    pub refused: Option<String>,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A process that has done nothing yet.
    pub(crate) fn process(id: u64) -> ProcessSample {
        ProcessSample {
            id: ProcessId(id),
            tgid: u32::try_from(id).unwrap(),
            uid: 0,
            cgroup_id: 1,
            comm: "tenant".into(),
            first_seen: 1,
            ended: None,
            ended_at: 0,
            confidence: Confidence::Complete,
            before_memory: true,
            last_calls: Vec::new(),
            pools: Vec::new(),
            ledger: Vec::new(),
            calls: Vec::new(),
            failures: Vec::new(),
            latency: Vec::new(),
            waits: Vec::new(),
            blame: Vec::new(),
            effort: Vec::new(),
        }
    }

    #[test]
    fn a_lock_is_wanted_as_the_kernel_says() {
        let modes = [0, 2, 4, 3, 32].map(LockMode::from_flags);
        assert_eq!(
            modes,
            [LockMode::None, LockMode::Read, LockMode::Write, LockMode::Read, LockMode::Exclusive]
        );
    }
}
