//! Owns rare facts that the kernel side reports one by one: failed allocations, slow calls, kills.
//! Refuses to count with them: storms are thinned in the kernel, counters are in the sample.

use crate::{CudaError, GpuId, Operation, ProcessId, sample::StackId};

/// An allocation that came back with an error, and who held the GPU at that moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCall {
    pub process: ProcessId,
    pub tgid: u32,
    /// Monotonic ns.
    pub at: u64,
    pub operation: Operation,
    pub error: CudaError,
    /// Bytes asked for, where they are among the arguments.
    pub requested: Option<u64>,
    /// Live device bytes of all ledgers on that GPU.
    pub total: u64,
    /// Of these, the failing process's own.
    pub own: u64,
    /// The largest; a process stands here once a memory kind.
    pub holders: Vec<(ProcessId, u64)>,
    /// The kernel knew every holder's GPU, so that nobody is missing from the sums.
    pub complete: bool,
}

/// A call that moved memory, as it is remembered of a process that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastCall {
    /// Monotonic ns, at its return.
    pub at: u64,
    pub operation: Operation,
    /// `None` where the arguments do not say.
    pub bytes: Option<u64>,
    /// 0 is success.
    pub error: CudaError,
    pub gpu: Option<GpuId>,
}

/// A thread that the kernel chose to die for memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KilledThread {
    /// `None` when it had never called the driver.
    pub process: Option<ProcessId>,
    pub tgid: u32,
    pub tid: u32,
    pub uid: u32,
    pub comm: String,
    pub cgroup_id: u64,
    /// Monotonic ns.
    pub marked_at: u64,
    pub ended_at: u64,
    /// The process that asked for the memory that was not there.
    pub trigger: u32,
    pub trigger_cgroup_id: u64,
}

/// A call over the threshold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowCall {
    pub process: ProcessId,
    pub tgid: u32,
    pub tid: u32,
    pub operation: Operation,
    /// 0 is success.
    pub error: CudaError,
    /// Monotonic ns.
    pub start: u64,
    pub duration_ns: u64,
    pub blocked_ns: u64,
    /// Ready to run, and no CPU.
    pub runnable_ns: u64,
    pub bytes: Option<u64>,
    /// The longest wait in it, where it was, and the process that ended it.
    pub longest_ns: u64,
    pub longest_stack: Option<StackId>,
    pub longest_culprit: Option<ProcessId>,
    /// A call of another process overlapped.
    pub shared: bool,
}

/// A call succeeded whose like had failed before in the same process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetriedCall {
    pub process: ProcessId,
    pub operation: Operation,
    /// Monotonic ns.
    pub at: u64,
    pub failed_at: u64,
    pub bytes: u64,
}
