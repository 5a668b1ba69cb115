//! Owns kills by the kernel's out-of-memory killer: one record a victim process, from what the probe, the kernel log and the
//! counters say about it. Refuses exit codes as proof: a SIGKILL without an OOM event is not an OOM kill.

use std::collections::BTreeMap;

use crate::report::LastCall;
use crate::sample::{GpuRef, LedgerRow};
use crate::{GpuId, MemoryKind, ProcessId, Tenant};

mod join;
mod log;

pub use join::{Kills, Settled};
pub use log::{KillLine, OomLine, OomSummary};

/// What ran out. `None` where this stands as an option: only the probe spoke, and it does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// A memory cgroup reached its limit.
    Memcg,
    /// The NUMA nodes that a cpuset or a memory policy allows.
    Cpuset,
    /// The whole host.
    Global,
}

impl Scope {
    pub const ALL: &'static [Self] = &[Self::Memcg, Self::Cpuset, Self::Global];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memcg => "memcg",
            Self::Cpuset => "cpuset",
            Self::Global => "global",
        }
    }
}

/// Which of the three witnesses agree that a process was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Agreement {
    /// The probe, and the log or the counters.
    Confirmed,
    ProbeOnly,
    /// The log without the probe, whatever the counters say.
    LogOnly,
    /// The probe alone, while the counter of its cgroup was read and stood still: a process that was dying already and was
    /// let at the reserves (`task_will_free_mem`). Not a kill, and not counted as one.
    Contradicted,
}

impl Agreement {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::ProbeOnly => "probe_only",
            Self::LogOnly => "log_only",
            Self::Contradicted => "contradicted",
        }
    }
}

/// Who asked for the memory that was not there. Often not the victim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trigger {
    pub tgid: u32,
    pub tenant: Option<Tenant>,
}

/// What `oom:mark_victim` and the identity captured before death say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// Monotonic.
    pub time_ns: u64,
    /// The event's `pid`: a thread of the victim, not always its leader.
    pub tid: u32,
    pub tgid: u32,
    pub process: Option<ProcessId>,
    pub comm: String,
    pub cgroup_id: u64,
    /// The memory cgroup's path, where it was known before death.
    pub cgroup: Option<String>,
    pub tenant: Option<Tenant>,
    pub trigger: Trigger,
}

/// How far one cgroup's counters moved since they were read before. Zero is a statement: read, and stood still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupKills {
    /// The reading before: what was killed earlier is not in this one.
    pub since_ns: u64,
    pub time_ns: u64,
    pub cgroup: String,
    pub kills: u64,
}

/// One process that was killed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// Monotonic.
    pub time_ns: u64,
    pub tgid: u32,
    pub tid: u32,
    pub process: Option<ProcessId>,
    pub comm: Option<String>,
    pub tenant: Option<Tenant>,
    pub scope: Option<Scope>,
    /// The cgroup whose limit was reached: the victim's own or one above it.
    pub limit_owner: Option<String>,
    pub task_cgroup: Option<String>,
    pub trigger: Option<Trigger>,
    pub agreement: Agreement,
    /// What it held on the GPUs. `None` until the caller fills it, and for a process that made no driver call.
    pub held: Option<Held>,
}

/// Kills of one cause: one shortage, all who died of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomIncident {
    pub first_ns: u64,
    pub last_ns: u64,
    pub scope: Option<Scope>,
    pub limit_owner: Option<String>,
    pub trigger: Option<Trigger>,
    /// `memory.oom.group`: the cgroup was killed as a whole.
    pub group: bool,
    /// One a process, by time; bounded by what [`Kills`] holds.
    pub kills: Vec<Kill>,
}

/// A victim's memory when it died.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Device memory, by GPU and kind.
    pub live: BTreeMap<(GpuId, MemoryKind), u64>,
    /// Device memory on a GPU that was not told.
    pub elsewhere: u64,
    /// Host memory pinned through the driver. It was charged to the host, not to the GPU.
    pub pinned: u64,
    /// Who else held memory on the same GPUs; for the caller to fill.
    pub neighbours: Vec<(GpuId, Tenant)>,
    /// The last calls that moved memory, oldest first; for the caller to fill.
    pub last_calls: Vec<LastCall>,
}

impl Held {
    /// Rows with nothing live say nothing.
    pub fn of(ledger: &[LedgerRow]) -> Self {
        let mut held = Self::default();
        for row in ledger.iter().filter(|row| row.live > 0) {
            match (&row.gpu, row.kind.is_device()) {
                (_, false) if matches!(row.kind, MemoryKind::HostPinned | MemoryKind::HostRegistered) => {
                    held.pinned = held.pinned.saturating_add(row.live);
                }
                (GpuRef::Known(gpu), _) => {
                    let bytes = held.live.entry((gpu.clone(), row.kind)).or_default();
                    *bytes = bytes.saturating_add(row.live);
                }
                (GpuRef::Unknown, true) => held.elsewhere = held.elsewhere.saturating_add(row.live),
                // Managed memory without a GPU is host memory for all one knows.
                (GpuRef::Unknown | GpuRef::Host, _) => {}
            }
        }
        held
    }
}

/// How a process ended, as its parent or runtime learns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Exit(u8),
    Signal(u8),
}

impl Ending {
    /// `task_struct.exit_code`: the signal in the low seven bits, else the code above them.
    pub const fn from_exit_code(raw: u32) -> Self {
        match (raw & 0x7f) as u8 {
            0 => Self::Exit((raw >> 8 & 0xff) as u8),
            signal => Self::Signal(signal),
        }
    }
}

/// Why a process is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    OomKill,
    /// 128 + n in a shell or container runtime's words.
    Signal(u8),
    Exit(u8),
}

impl Death {
    /// Between a kill and the last thread's end: an exiting CUDA process unpins its memory first.
    const DYING_NS: u64 = 120 * 1_000_000_000;

    /// Only a kill that was witnessed makes a death an OOM kill: 137 alone is any SIGKILL.
    pub fn of(tgid: u32, ended_ns: u64, ending: Ending, kills: &[Kill]) -> Self {
        let killed = kills.iter().any(|kill| {
            kill.tgid == tgid
                && kill.agreement != Agreement::Contradicted
                && ended_ns.checked_sub(kill.time_ns).is_some_and(|after| after <= Self::DYING_NS)
        });
        match ending {
            Ending::Signal(9) if killed => Self::OomKill,
            Ending::Signal(signal) => Self::Signal(signal),
            Ending::Exit(code) => Self::Exit(code),
        }
    }
}

/// Kills by tenant and scope, over restarts of the tenant's processes and containers.
#[derive(Clone, Debug, Default)]
pub struct KillCounters {
    rows: BTreeMap<(Option<Tenant>, Option<Scope>), KillCount>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillCount {
    pub kills: u64,
    pub last_ns: u64,
}

impl KillCounters {
    /// Tenants past this share one row, [`Tenant::other`].
    pub const MOST: usize = 1024;

    pub fn add(&mut self, kill: &Kill) {
        if kill.agreement == Agreement::Contradicted {
            return;
        }
        let mut key = (kill.tenant.clone(), kill.scope);
        if self.rows.len() >= Self::MOST && !self.rows.contains_key(&key) {
            key.0 = Some(Tenant::other());
        }
        let row = self.rows.entry(key).or_insert(KillCount { kills: 0, last_ns: 0 });
        row.kills += 1;
        row.last_ns = row.last_ns.max(kill.time_ns);
    }

    /// Drops the rows of tenants that are gone and had no kill since `before_ns`. A tenant that is there keeps its count.
    pub fn forget(&mut self, before_ns: u64, present: impl Fn(&Tenant) -> bool) {
        self.rows.retain(|(tenant, _), row| row.last_ns >= before_ns || tenant.as_ref().is_none_or(&present));
    }

    pub fn rows(&self) -> impl Iterator<Item = (Option<&Tenant>, Option<Scope>, KillCount)> {
        self.rows.iter().map(|((tenant, scope), count)| (tenant.as_ref(), *scope, *count))
    }
}

#[cfg(test)]
mod tests;
