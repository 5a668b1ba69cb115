//! Owns what the incidents are told each tick.
//! Refuses judgement: these are rows as counted, with the verdicts that came with them.

use super::WarningNote;
use crate::verdict::FailureRecord;
use crate::{Culprit, GpuId, Operation, Tenant, WaitClass};

/// Everything that happened over one period.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observation {
    /// Seconds since the Unix epoch at the end of the period. For display; it may step.
    pub at_unix: f64,
    /// Length of the period in seconds by a clock that does not step.
    pub elapsed: f64,
    pub waits: Vec<WaitDelta>,
    /// Waits that are still going on.
    pub stalls: Vec<Stall>,
    /// Records that are new or have changed, in their present state.
    pub failures: Vec<FailureRecord>,
    pub kills: Vec<KillNote>,
    pub xids: Vec<XidNote>,
    pub movements: Vec<Movement>,
    /// Warnings that stand, as of the last forecast.
    pub warnings: Vec<WarningNote>,
}

/// What one culprit made one victim wait in the period.
#[derive(Clone, Debug, PartialEq)]
pub struct WaitDelta {
    pub victim: Tenant,
    pub culprit: Culprit,
    pub class: WaitClass,
    /// The GPUs concerned; empty where only the host's lock is.
    pub gpus: Vec<GpuId>,
    /// Summed over threads, so it can exceed the period.
    pub seconds: f64,
    pub waits: u64,
    /// The longest single wait in seconds, where it is known.
    pub longest: Option<f64>,
    /// Kernel symbols at blocking, innermost first, where they are known.
    pub stack: Vec<String>,
}

/// A thread that has not come back from its wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    pub victim: Tenant,
    pub class: WaitClass,
    pub gpus: Vec<GpuId>,
    pub since_unix: f64,
    /// `None`: not known.
    pub holder: Option<Culprit>,
}

/// Who killed: the limit that was hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KillScope {
    /// A memory cgroup was full.
    Cgroup,
    /// The host was.
    Node,
    /// A NUMA policy or cpuset was.
    Numa,
    Unknown,
}

impl KillScope {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Node => "node",
            Self::Numa => "numa",
            Self::Unknown => "unknown",
        }
    }
}

/// One kernel OOM kill. A group kill is one note with several processes.
#[derive(Clone, Debug, PartialEq)]
pub struct KillNote {
    pub at_unix: f64,
    pub victim: Tenant,
    pub scope: KillScope,
    /// The cgroup whose limit was hit. Kills under one limit belong together.
    pub limit_owner: Option<String>,
    /// Who asked for the memory that was not there. Not the victim as a rule.
    pub trigger: Option<Tenant>,
    pub processes: u64,
    /// Live bytes by GPU at death. Empty: it held none, or it is not known.
    pub gpu_live: Vec<(GpuId, u64)>,
    pub host_pinned: Option<u64>,
    /// The last calls that moved memory, oldest first.
    pub last_calls: Vec<CallNote>,
}

/// A driver call before a death.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct CallNote {
    /// Before the kernel chose the process. Negative: after that.
    pub seconds_before: f64,
    #[serde(serialize_with = "super::json::operation")]
    pub operation: Operation,
    /// `None` where the arguments do not say.
    pub bytes: Option<u64>,
    /// 0 is success.
    pub code: u32,
    pub gpu: Option<GpuId>,
}

/// One GPU fault.
#[derive(Clone, Debug, PartialEq)]
pub struct XidNote {
    pub at_unix: f64,
    pub gpu: GpuId,
    pub code: u32,
    pub tenant: Option<Tenant>,
    /// Follows from another fault: another process's cleanup, not a fault of its own.
    pub echo: bool,
}

/// What a tenant's live bytes on a GPU did over the period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Movement {
    pub tenant: Tenant,
    pub gpu: GpuId,
    /// Negative: it gave memory back.
    pub bytes: i64,
}
