//! Owns incidents: waits, failures, kills and faults that belong together, as one thing with a name, victims and culprits.
//! Refuses words (see `explain`), and refuses to call a tenant's own waits or the hardware's a neighbour's fault.
//!
//! What belongs together: what concerns the same GPU, or the host-wide lock, or the same pair of tenants, or the same memory
//! limit, with no quiet period in between. What opens one: see [`Rules`]. Everything is bounded; what found no place is counted.
//!
//! The JSON shape of an [`Incident`] is part of the HTTP interface. Keys are `snake_case`, times are Unix seconds, durations
//! seconds, sizes bytes, shares 0 to 1; `null` or an absent key means unknown, never zero. Keys may be added, not renamed:
//! `id`, `kind`, `state`, `start_unix`, `last_unix`, `end_unix`, `host_lock`, `gpus[]`, `memory_limits[]`,
//! `victims[]` (`tenant`, `blocked_seconds`, `neighbour_seconds`, `observed_seconds`, `blocked_share`, `peak_share`, `waits`,
//! `longest_seconds`, `failures`, `near_misses`, `largest_refused_bytes`, `killed_processes`, `gpu_bytes_at_death`, `xids`,
//! `stalled_seconds`, `stalled_now`), `culprits[]` (`tenant`, `blocked_seconds`, `wait_share`, `memory_share`, `held_bytes`,
//! `grew_bytes`, `holds_stalled`), `wait_shares` (`neighbours`, `self`, `device`, `kernel`, `unknown`), `memory_shares`
//! (`neighbours`, `self`, `other_causes`, `unknown`), `evidence[]` (tagged by `evidence`), `timeline[]`, `chains[]`,
//! `actions[]` (`action`, `tenant`, `gpu`, `words`), `warnings[]` (`memory`: `gpu` with `gpu`, `limit` with `tenant`, `host`;
//! `raised_unix`, `lead_seconds`, `severity`, `risk`, `driver`, `driver_right`, `victims[]`, `victim_right`), `merged[]`,
//! `unlisted`.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::verdict::{FailureRecord, Sizes, Verdict};
use crate::{GpuId, Operation, Tenant, WaitClass};

mod action;
mod case;
mod json;
mod observation;
mod place;
mod pressure;
mod store;
mod timeline;
mod view;
mod warned;

pub use action::{Action, Remedy};
pub use observation::{CallNote, KillNote, KillScope, Movement, Observation, Stall, WaitDelta, XidNote};
pub use store::{Changes, Incidents, Losses};
pub use timeline::{Chain, Step};
pub use warned::{Scarce, Warned, WarningNote};

/// When an incident opens, stays and closes, and how much is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Neighbour-made waits are looked at over this long.
    pub window_seconds: f64,
    /// Neighbours that block a victim for this part of the window or more open an incident...
    pub open_share: f64,
    /// ...when it is this long at least.
    pub open_seconds: f64,
    /// At this part of the window or more an open incident stays open.
    pub keep_share: f64,
    /// With nothing for this long it closes. What comes later is another incident.
    pub quiet_seconds: f64,
    /// A wait that has lasted this long opens an incident though it has not ended.
    pub stall_seconds: f64,
    /// How far before a failure the growth of others can be its cause.
    pub lookback_seconds: f64,
    /// Smaller changes of live bytes are not kept on the timeline.
    pub movement_bytes: u64,
    /// Incidents kept, open and closed.
    pub capacity: usize,
    /// Victims and culprits listed in an incident; the rest is summed as `other`.
    pub listed: usize,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            window_seconds: 10.0,
            open_share: 0.05,
            open_seconds: 0.05,
            keep_share: 0.01,
            quiet_seconds: 30.0,
            stall_seconds: 5.0,
            lookback_seconds: 60.0,
            movement_bytes: 256 << 20,
            capacity: 256,
            listed: 16,
        }
    }
}

/// When it was opened, in Unix seconds, and a sequence number of this agent: `1764494553-7`. Never reused, also across restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IncidentId {
    pub start: u64,
    pub sequence: u64,
}

impl IncidentId {
    pub fn parse(text: &str) -> Option<Self> {
        let (start, sequence) = text.split_once('-')?;
        Some(Self { start: start.parse().ok()?, sequence: sequence.parse().ok()? })
    }
}

impl fmt::Display for IncidentId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.start, self.sequence)
    }
}

impl Serialize for IncidentId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What an incident is called: by the worst thing in it. Ordered from harmless to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Only cleanup faults that follow from something outside the incident.
    XidEcho,
    /// Refused, then granted at the same size.
    NearMiss,
    NoisyNeighbour,
    /// Somebody has been stuck in one wait for long.
    Stall,
    AllocationFailure,
    OomKill,
    Xid,
}

impl Kind {
    pub const ALL: &'static [Self] = &[
        Self::XidEcho,
        Self::NearMiss,
        Self::NoisyNeighbour,
        Self::Stall,
        Self::AllocationFailure,
        Self::OomKill,
        Self::Xid,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::XidEcho => "xid_echo",
            Self::NearMiss => "near_miss",
            Self::NoisyNeighbour => "noisy_neighbour",
            Self::Stall => "stall",
            Self::AllocationFailure => "allocation_failure",
            Self::OomKill => "oom_kill",
            Self::Xid => "xid",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Open,
    Closed,
}

/// One incident as it is now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Incident {
    pub id: IncidentId,
    pub kind: Kind,
    pub state: State,
    pub start_unix: f64,
    /// The last thing that kept it open.
    pub last_unix: f64,
    /// `None` while it is open.
    pub end_unix: Option<f64>,
    /// The driver's API lock is in it: one for all GPUs of the host.
    pub host_lock: bool,
    pub gpus: Vec<GpuId>,
    /// Memory limits concerned: a cgroup, or `node`.
    pub memory_limits: Vec<String>,
    /// Worst first.
    pub victims: Vec<Victim>,
    /// Neighbours only, top culprit first.
    pub culprits: Vec<Blame>,
    /// Where the victims' blocked time went. `None` without waits.
    pub wait_shares: Option<WaitShares>,
    /// Whose fault the refusals were. `None` without refusals.
    pub memory_shares: Option<MemoryShares>,
    pub evidence: Vec<Evidence>,
    /// Who grew and who shrank on these GPUs, before and during, by time.
    pub timeline: Vec<Step>,
    /// A refusal, and the growth of others before it.
    pub chains: Vec<Chain>,
    pub actions: Vec<Action>,
    /// Warnings of the forecast's that stood when memory ran out, by whose.
    pub warnings: Vec<Warned>,
    /// Incidents that turned out to be this one.
    pub merged: Vec<IncidentId>,
    pub unlisted: Unlisted,
}

impl Incident {
    /// Seconds from its start to its end, or to the last thing seen.
    pub fn seconds(&self) -> f64 {
        (self.end_unix.unwrap_or(self.last_unix) - self.start_unix).max(0.0)
    }

    /// Whether a tenant of this name is in it, on either side.
    pub fn concerns(&self, tenant: &str) -> bool {
        self.victims.iter().map(|victim| &victim.tenant).any(|who| who.name == tenant)
            || self.culprits.iter().map(|culprit| &culprit.tenant).any(|who| who.name == tenant)
    }
}

/// What a tenant suffered. Times are summed over threads.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Victim {
    pub tenant: Tenant,
    /// In driver calls, whoever was the cause.
    pub blocked_seconds: f64,
    /// Of that, by neighbours.
    pub neighbour_seconds: f64,
    /// Wall time over which the waits were counted. `None` without waits.
    pub observed_seconds: Option<f64>,
    /// `neighbour_seconds` by wall time. Above 1 when several threads waited at once.
    pub blocked_share: Option<f64>,
    /// The worst window.
    pub peak_share: Option<f64>,
    pub waits: u64,
    pub longest_seconds: Option<f64>,
    /// Refusals with no grant of that size since.
    pub failures: u64,
    pub near_misses: u64,
    pub largest_refused_bytes: Option<u64>,
    pub killed_processes: u64,
    pub gpu_bytes_at_death: Option<u64>,
    pub xids: u64,
    /// The longest wait that was seen going on.
    pub stalled_seconds: Option<f64>,
    pub stalled_now: bool,
}

/// What a neighbour did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Blame {
    pub tenant: Tenant,
    /// Of the victims' time.
    pub blocked_seconds: f64,
    /// Of all the time the victims were blocked, by whomever. `None` without waits.
    pub wait_share: Option<f64>,
    /// Of the refusals. `None` without refusals.
    pub memory_share: Option<f64>,
    /// What it held at the last refusal.
    pub held_bytes: Option<u64>,
    /// How that had changed over the window before the last refusal.
    pub grew_bytes: Option<i64>,
    /// Victims that are stuck behind it now.
    pub holds_stalled: u64,
}

/// Parts of the blocked time; their sum is 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WaitShares {
    pub neighbours: f64,
    /// The victim's own threads and processes.
    #[serde(rename = "self")]
    pub own: f64,
    pub device: f64,
    pub kernel: f64,
    pub unknown: f64,
}

/// Parts of the refusals; their sum is 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryShares {
    pub neighbours: f64,
    #[serde(rename = "self")]
    pub own: f64,
    /// Fragmentation, limits, larger than the device.
    pub other_causes: f64,
    pub unknown: f64,
}

/// One line of what was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "evidence", rename_all = "snake_case")]
pub enum Evidence {
    Wait(WaitEvidence),
    Stall(StallEvidence),
    Failure(FailureEvidence),
    Kill(KillEvidence),
    Xid(XidEvidence),
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaitEvidence {
    pub victim: Tenant,
    /// The neighbour's name, `self`, `device`, `kernel` or `unknown`.
    pub culprit: String,
    pub class: WaitClass,
    pub seconds: f64,
    pub waits: u64,
    pub longest_seconds: Option<f64>,
    /// Of the victim's blocked time.
    pub share: f64,
    /// By wall time.
    pub wall_share: Option<f64>,
    /// Kernel symbols at blocking, innermost first.
    pub stack: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StallEvidence {
    pub victim: Tenant,
    pub class: WaitClass,
    pub since_unix: f64,
    pub seconds: f64,
    /// A name, `self`, `device`, `kernel`; `unknown` when nobody was seen.
    pub holder: String,
    pub ongoing: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailureEvidence {
    pub record: u64,
    pub victim: Tenant,
    pub gpu: Option<GpuId>,
    #[serde(serialize_with = "json::operation")]
    pub operation: Operation,
    /// The `cuda.h` name.
    pub error: &'static str,
    pub count: u64,
    pub near_misses: u64,
    pub recovered: bool,
    pub first_unix: f64,
    pub last_unix: f64,
    pub sizes: Option<Sizes>,
    pub verdict: Verdict,
}

impl FailureEvidence {
    fn of(record: &FailureRecord) -> Self {
        Self {
            record: record.id,
            victim: record.tenant.clone(),
            gpu: record.gpu.clone(),
            operation: record.operation,
            error: record.error.name(),
            count: record.count,
            near_misses: record.near_misses,
            recovered: record.recovered,
            first_unix: record.first_unix,
            last_unix: record.last_unix,
            sizes: record.sizes,
            verdict: record.verdict.clone(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KillEvidence {
    pub victim: Tenant,
    pub at_unix: f64,
    pub scope: KillScope,
    pub limit_owner: Option<String>,
    pub trigger: Option<Tenant>,
    pub processes: u64,
    pub gpu_live: Vec<GpuBytes>,
    pub host_pinned: Option<u64>,
    /// The last calls that moved memory, oldest first.
    pub last_calls: Vec<CallNote>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuBytes {
    pub gpu: GpuId,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct XidEvidence {
    pub gpu: GpuId,
    pub code: u32,
    pub tenant: Option<Tenant>,
    pub echo: bool,
    pub count: u64,
    pub first_unix: f64,
    pub last_unix: f64,
}

/// What happened in this incident and is not in its lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Unlisted {
    /// Victims beyond those listed.
    pub victims: u64,
    pub culprits: u64,
    /// Times that a row was summed into `other` because there were more tenants than are told apart.
    pub rows: u64,
    pub evidence: u64,
    pub timeline: u64,
}

#[cfg(test)]
mod tests;
