//! Owns the node as published: GPUs, tenants and the agent's own state, ready for any exporter.
//! Refuses spelling: names, units and label syntax are the exporters' business.

use std::collections::BTreeMap;

use crate::blame::{Edge, Share};
use crate::device::{Absence, CallCost, GpuSample, LibraryFacts, Reading};
use crate::excess::Excess;
use crate::grant::GrantsView;
use crate::idle::HoldersView;
use crate::incident::Kind;
use crate::kill::Scope;
use crate::risk::Forecast;
use crate::sample::{Confidence, GpuRef, Histogram, LibraryState, MapFill};
use crate::sharing::Sharing;
use crate::verdict::Limit;
use crate::xid::XidSource;
use crate::{CudaError, GpuId, Loss, MemoryKind, Note, Operation, Tenant, WaitClass};

/// One node at one moment. Rebuilt every tick, immutable afterwards.
#[derive(Clone, Debug)]
pub struct View {
    /// Seconds since the Unix epoch at which the kernel side was read.
    pub taken_unix: f64,
    /// Seconds since the Unix epoch at which the agent started: start of every counter.
    pub started_unix: f64,
    pub gpus: Vec<GpuView>,
    pub tenants: Vec<TenantView>,
    /// Blocked time of victims by who had what they waited for.
    pub blame: BTreeMap<Edge, Share>,
    pub events: EventsView,
    /// What is to be expected of the GPUs' memory.
    pub risk: Forecast,
    /// What a scheduler granted, beside what is used.
    pub grants: GrantsView,
    /// Who holds memory and does nothing with it.
    pub holders: HoldersView,
    pub agent: AgentView,
}

#[derive(Clone, Debug)]
pub struct GpuView {
    pub sample: GpuSample,
    /// Seconds since this GPU's figures were read.
    pub age_seconds: f64,
    /// Of figures that do not come with every poll.
    pub figure_ages: BTreeMap<&'static str, f64>,
    pub sharing: Sharing,
    /// Memory the driver keeps for itself.
    pub reserved: Reading<u64>,
    /// `used − Σ process`: bytes that no listed process accounts for. R2 holds with this figure.
    pub unattributed: Reading<u64>,
    /// Why `unattributed` is not zero, when that is known.
    pub unattributed_reason: Option<&'static str>,
}

#[derive(Clone, Debug)]
pub struct TenantView {
    pub tenant: Tenant,
    pub processes: u32,
    pub confidence: Confidence,
    pub memory: BTreeMap<(GpuRef, MemoryKind), MemoryTotals>,
    /// NVML's bytes for the tenant's processes, by GPU.
    pub process_bytes: BTreeMap<GpuId, Reading<u64>>,
    /// What the tenant's pools have taken of each GPU, used or not; `None` where that is not known of one of them.
    pub pool_reserved: BTreeMap<GpuId, Option<u64>>,
    /// NVML minus ledger, by GPU, in its parts.
    pub residual: BTreeMap<GpuId, Residual>,
    pub utilization: BTreeMap<GpuId, f64>,
    pub operations: BTreeMap<(GpuRef, Operation), u64>,
    pub failures: BTreeMap<(GpuRef, Operation, CudaError), u64>,
    pub latency: BTreeMap<Operation, Histogram>,
    /// Blocked time inside driver calls.
    pub waits: BTreeMap<WaitClass, Histogram>,
    /// Estimated; never part of `waits`.
    pub excess: Excess,
    /// The tightest of each source.
    pub limits: Vec<(GpuId, Limit)>,
    /// What its cgroups count of device memory (`dmem`), by GPU.
    pub device_cgroup_bytes: BTreeMap<GpuId, u64>,
    /// What its pod's owner says of it, as far as it was asked for.
    pub notes: Vec<TenantNote>,
}

/// A label or an annotation of a tenant's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantNote {
    /// `label` or `annotation`.
    pub source: &'static str,
    pub key: String,
    pub value: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTotals {
    pub live: u64,
    pub peak: u64,
    pub allocated: u64,
    pub freed: u64,
    pub allocations: u64,
    pub frees: u64,
}

/// What NVML sees of a tenant beyond its ledger. Signed: drift can go either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residual {
    /// Contexts, modules and allocator rounding of processes whose ledger is complete.
    pub context: i64,
    /// What processes held before the probes came.
    pub baseline: i64,
    /// What is left: ledger above NVML, or lost events.
    pub drift: i64,
}

/// What happened, as counters.
#[derive(Clone, Debug, Default)]
pub struct EventsView {
    pub incidents: BTreeMap<Kind, u64>,
    pub open_incidents: u64,
    /// By whom it hit and what ran out; `None` where that is not known.
    pub kills: BTreeMap<(Option<Tenant>, Option<Scope>), u64>,
    /// Count and last time, in seconds since the Unix epoch.
    pub xids: BTreeMap<(Option<GpuId>, u32), (u64, f64)>,
    /// Which source told how many of them.
    pub xid_reports: BTreeMap<(Option<GpuId>, u32, XidSource), u64>,
    /// Events for which there was no room.
    pub lost: u64,
}

#[derive(Clone, Debug)]
pub struct AgentView {
    pub version: &'static str,
    pub losses: Vec<(Loss, u64)>,
    pub notes: Vec<(Note, u64)>,
    pub maps: Vec<MapFill>,
    pub libraries: Vec<LibraryState>,
    pub features: Vec<Feature>,
    /// GPUs that the host shows and NVML does not list, where that is known.
    pub missing_gpus: Option<u64>,
    pub nvml: Reading<LibraryFacts>,
    pub nvml_age_seconds: Option<f64>,
    pub nvml_calls: Vec<CallCost>,
    /// Failed NVML readings of the last poll, by reason.
    pub nvml_absences: BTreeMap<(&'static str, Absence), u64>,
    pub cpu_seconds: f64,
    pub resident_bytes: u64,
    pub tick_seconds: f64,
    pub tenants_folded: u64,
    pub blame_folded: u64,
    /// Who may hold memory that no process list names, when there is such memory. For people, not a label.
    pub holder_candidates: Vec<HolderCandidate>,
    /// What the probes of one call cost it, in seconds, when it was measured.
    pub probe_cost_seconds: Option<f64>,
    /// Libraries whose stream-ordered calls are not probed for now.
    pub probes_shed: u64,
    /// Processes whose calls are not timed for now.
    pub processes_untimed: u64,
    /// How sending to a collector goes, a row a signal. Empty when nothing is sent.
    pub otlp: Vec<OtlpView>,
    /// Pushes to Alertmanager by outcome; empty while there are none to be made.
    pub alert_pushes: Vec<(&'static str, u64)>,
}

/// One OTLP signal on its way. Items are data points, spans or log records.
#[derive(Clone, Debug, PartialEq)]
pub struct OtlpView {
    pub signal: &'static str,
    pub exported: u64,
    /// Items that will never arrive, by reason.
    pub dropped: Vec<(&'static str, u64)>,
    /// Attempts that failed, by reason.
    pub failures: Vec<(&'static str, u64)>,
    pub queued: u64,
    pub queued_bytes: u64,
    /// `None` before the first one.
    pub last_success_seconds: Option<f64>,
}

/// A process that has the driver open although no list names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderCandidate {
    pub pid: u32,
    pub comm: String,
    pub tenant: Tenant,
}

/// A capability of this host: the four words are not the same thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FeatureState {
    Active,
    /// Works, with something missing that the reason names.
    Degraded,
    /// This host cannot do it.
    Unsupported,
    /// It should work here and does not.
    Broken,
    /// Switched off by configuration.
    Disabled,
}

impl FeatureState {
    pub const ALL: &'static [Self] =
        &[Self::Active, Self::Degraded, Self::Unsupported, Self::Broken, Self::Disabled];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Degraded => "degraded",
            Self::Unsupported => "unsupported",
            Self::Broken => "broken",
            Self::Disabled => "disabled",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    pub name: &'static str,
    pub state: FeatureState,
    /// What was seen, in plain words. Shown on `/status`, not a label; the same goes for the next two.
    pub reason: String,
    /// What does not work because of it. Empty while nothing is lost.
    pub lost: String,
    /// What brings it back: a command, or what to set where.
    pub remedy: String,
}
