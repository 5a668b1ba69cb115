//! Owns why an allocation failed: the facts of one failed ask, and the judgement on them.
//! Refuses guesses: an unknown fact is absent, and a verdict that would need it is `unknown` and names it.

use serde::Serialize;

use crate::{CudaError, GpuId, Operation, ProcessId, Tenant};

mod failures;
mod judge;

pub use failures::{FailureRecord, Failures, Fold, NearMiss, Sizes, Success};
pub use judge::judge;

/// Holders and growers that a verdict names.
pub const NAMED: usize = 8;

/// What a failing operation wanted memory from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Arena {
    /// Physical memory of a GPU.
    Device,
    /// A context: device memory too, but the driver does not say how much.
    Context,
    /// Pinned host memory. No GPU and no GPU neighbour is the cause.
    Host,
    /// Managed memory: backed by the host and larger than the device if need be.
    Managed,
    /// Address space, mappings, imports: no physical memory of its own.
    Mapping,
}

impl Arena {
    /// `None` for operations that take no memory; their return codes are somebody else's subject.
    pub const fn of(operation: Operation) -> Option<Self> {
        Some(match operation {
            Operation::MemAlloc
            | Operation::MemAllocPitch
            | Operation::MemAllocAsync
            | Operation::MemAllocFromPoolAsync
            | Operation::MemCreate
            | Operation::ArrayCreate
            | Operation::Array3DCreate
            | Operation::MipmappedArrayCreate => Self::Device,
            Operation::CtxCreate | Operation::PrimaryCtxRetain => Self::Context,
            Operation::MemHostAlloc | Operation::MemAllocHost | Operation::MemHostRegister => Self::Host,
            Operation::MemAllocManaged => Self::Managed,
            Operation::MemAddressReserve
            | Operation::MemMap
            | Operation::MemSetAccess
            | Operation::MemPoolCreate
            | Operation::MemPoolImportPointer
            | Operation::MemImportFromShareableHandle
            | Operation::IpcOpenMemHandle => Self::Mapping,
            _ => return None,
        })
    }
}

/// True where a return code means that memory was refused. Everything else has another cause: 1 and 801 are wrong
/// arguments or features, 800 is how `PyTorch` probes handle types, 4 is how every program's exit looks.
pub const fn is_memory_failure(operation: Operation, error: CudaError) -> bool {
    error.0 == CudaError::OUT_OF_MEMORY.0 && Arena::of(operation).is_some()
}

/// The facts of one failed ask, as they were when it failed. For operations on pinned host memory `capacity`, `reserved`,
/// `free`, `own_*`, `holders` and `limit` are the host's (`MemTotal`, `MemAvailable`, pinned bytes, cgroup limit).
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    pub tenant: Tenant,
    pub operation: Operation,
    pub error: CudaError,
    pub requested: Option<u64>,
    pub gpu: Option<GpuId>,
    /// All bytes of the device (of the MIG instance where it is one).
    pub capacity: Option<u64>,
    /// What the driver keeps of `capacity` for itself.
    pub reserved: Option<u64>,
    pub free: Option<u64>,
    /// How long before the failure `free` was read. `None`: not known, so taken as old.
    pub free_age_seconds: Option<f64>,
    /// The tenant's live bytes there, all its processes.
    pub own_live: Option<u64>,
    /// What its pools keep and do not use.
    pub own_cached: Option<u64>,
    /// The process that asked.
    pub process: Option<ProcessId>,
    /// The tenant's live bytes there by process. Empty: not known.
    pub own_processes: Vec<(ProcessId, u64)>,
    /// How the tenant's own bytes changed over the window, to the moment of the refusal: growing segments ask piece by
    /// piece, and the refused one is small.
    pub own_growth: Option<i64>,
    /// Bytes there by tenant, physical ones only. `None`: not known. The asking tenant is skipped if it is in it.
    pub holders: Option<Vec<(Tenant, u64)>>,
    pub limit: Option<Limit>,
    /// How the bytes of others changed over the window. `None`: not known.
    pub growth: Option<Vec<(Tenant, i64)>>,
    /// The same size was then granted.
    pub retried: Option<NearMiss>,
}

impl Ask {
    /// An ask of which nothing else is known.
    pub fn new(tenant: Tenant, operation: Operation, error: CudaError) -> Self {
        Self {
            tenant,
            operation,
            error,
            requested: None,
            gpu: None,
            capacity: None,
            reserved: None,
            free: None,
            free_age_seconds: None,
            own_live: None,
            own_cached: None,
            process: None,
            own_processes: Vec::new(),
            own_growth: None,
            holders: None,
            limit: None,
            growth: None,
            retried: None,
        }
    }
}

/// What a tenant may take, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    pub bytes: u64,
    pub source: LimitSource,
    pub scope: LimitScope,
    /// What whoever enforces it counts against it. `None`: the ledger has to do.
    pub used: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSource {
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` or the MPS server's default of it.
    Mps,
    /// `memory.max` of a cgroup. Host memory only.
    Cgroup,
    /// `dmem.max` of a cgroup. Device memory, since Linux 6.14, where the GPU's driver takes part.
    Dmem,
    /// A scheduler's annotation or request. Nothing in the driver enforces it.
    Declared,
    /// The agent's own configuration. Nothing enforces it.
    Configured,
}

impl LimitSource {
    /// Whether the one who refuses memory knows this limit.
    pub const fn is_enforced(self) -> bool {
        matches!(self, Self::Mps | Self::Cgroup | Self::Dmem)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mps => "mps",
            Self::Cgroup => "cgroup",
            Self::Dmem => "dmem",
            Self::Declared => "declared",
            Self::Configured => "configured",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitScope {
    /// Each process by itself, as MPS counts its clients.
    Process,
    Tenant,
}

impl LimitScope {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Tenant => "tenant",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    /// It would have fitted if the neighbours did not hold what they hold.
    Neighbour,
    /// The tenant's own memory is in its way.
    #[serde(rename = "self")]
    Own,
    /// There was room and it was refused all the same: fragmentation, or a limit that nobody declared.
    Fragmentation,
    Limit,
    /// Larger than the device.
    Impossible,
    Unknown,
}

impl VerdictKind {
    pub const ALL: &'static [Self] =
        &[Self::Neighbour, Self::Own, Self::Fragmentation, Self::Limit, Self::Impossible, Self::Unknown];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Neighbour => "neighbour",
            Self::Own => "self",
            Self::Fragmentation => "fragmentation",
            Self::Limit => "limit",
            Self::Impossible => "impossible",
            Self::Unknown => "unknown",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Certainty {
    Low,
    Medium,
    High,
}

impl Certainty {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// The facts whose absence can leave a verdict open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingFact {
    Requested,
    Free,
    OwnHeld,
    Holders,
}

/// One step of the reasoning, with its numbers in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
pub enum Because {
    LargerThanDevice {
        requested: u64,
        usable: u64,
    },
    /// `held` is absent where it is not known and the ask alone is over the limit.
    OverLimit {
        requested: Option<u64>,
        held: Option<u64>,
        limit: Limit,
        enforced: bool,
    },
    /// The free figure was large enough.
    RoomWasFree {
        requested: u64,
        free: u64,
        age_seconds: Option<f64>,
    },
    /// By the ledgers no more can have been free, whatever figure (`told`) an older reading gave.
    AtMostFree {
        bytes: u64,
        told: Option<u64>,
    },
    /// `missing` is after rounding to whole pages.
    Shortfall {
        requested: u64,
        free: u64,
        missing: u64,
    },
    /// Without its neighbours the tenant would have had this much.
    FitsWithoutNeighbours {
        requested: u64,
        room: u64,
    },
    /// Even without its neighbours the tenant would have had only this much.
    TooLargeEvenAlone {
        requested: u64,
        room: u64,
    },
    OwnHolds {
        bytes: u64,
    },
    /// Of that, kept in the tenant's own pools without use.
    OwnCache {
        bytes: u64,
    },
    /// Of that, held by other processes of the same tenant.
    OwnSiblings {
        bytes: u64,
    },
    OwnGrew {
        bytes: u64,
    },
    NeighboursHold {
        bytes: u64,
    },
    NeighboursGrew {
        bytes: u64,
    },
    /// In use on the device, and no process that is listed holds it.
    Unattributed {
        bytes: u64,
    },
    /// A context's size is not told; this is what one takes on the hosts measured.
    ContextEstimate {
        bytes: u64,
    },
    /// Another GPU tenant cannot be the cause: the memory is the host's.
    HostMemory,
    /// Backed by the host: the size of the device is not the bound.
    BackedByHost,
    /// Takes no physical memory of its own: address space, page tables or a mapping limit ran out.
    NotPhysical,
    Missing {
        what: MissingFact,
    },
}

/// What another tenant held, and how that changed over the window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    pub tenant: Tenant,
    /// `None`: it grew, and what it holds is not known.
    pub bytes: Option<u64>,
    /// `None`: not known.
    pub grew: Option<i64>,
}

/// The judgement on one ask.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    pub kind: VerdictKind,
    pub certainty: Certainty,
    pub arena: Arena,
    pub because: Vec<Because>,
    /// The other tenants there, largest first, at most [`NAMED`].
    pub holders: Vec<Holder>,
    /// The same size was then granted.
    pub near_miss: Option<NearMiss>,
}

impl Verdict {
    /// Other tenants at fault with their shares, largest first: by growth where growth decided, else by bytes held.
    /// Empty unless the verdict is `neighbour`. The shares are of all neighbours, so their sum is at most 1.
    pub fn culprits(&self) -> Vec<(&Tenant, f64)> {
        if self.kind != VerdictKind::Neighbour {
            return Vec::new();
        }
        let grown = self
            .because
            .iter()
            .find_map(|why| if let Because::NeighboursGrew { bytes } = why { Some(*bytes) } else { None });
        let held = self
            .because
            .iter()
            .find_map(|why| if let Because::NeighboursHold { bytes } = why { Some(*bytes) } else { None });
        let weight = |holder: &Holder| match grown {
            Some(_) => holder.grew.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0),
            None => holder.bytes.unwrap_or(0),
        };
        let Some(total) = grown.or(held).filter(|bytes| *bytes > 0) else { return Vec::new() };
        let mut culprits: Vec<_> = self
            .holders
            .iter()
            .map(|holder| (&holder.tenant, weight(holder)))
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(tenant, bytes)| (tenant, bytes as f64 / total as f64))
            .collect();
        culprits.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(b.0)));
        culprits
    }
}

#[cfg(test)]
mod tests;
