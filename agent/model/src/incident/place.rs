//! Owns where trouble is: what two events must share to be one incident.
//! Refuses times.

use std::collections::BTreeSet;

use super::{KillNote, KillScope, Stall, WaitDelta};
use crate::verdict::{Arena, FailureRecord};
use crate::{Culprit, GpuId, Tenant, TenantKind, WaitClass};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// The driver's API lock, whatever GPUs its victims use.
    HostLock,
    Gpu(GpuId),
    /// Somewhere in the driver, on no GPU that is known.
    Driver,
    /// A memory limit.
    Memory(String),
    /// Nowhere else: what is known is only who suffers.
    Tenant(Tenant),
}

/// Memory limits are named by cgroup path, which a tenant can make long.
const LIMIT_NAME: usize = 256;

pub(super) const NODE: &str = "node";

fn of_wait(class: WaitClass, gpus: &[GpuId]) -> BTreeSet<Place> {
    if class == WaitClass::RmApiLock {
        return BTreeSet::from([Place::HostLock]);
    }
    if gpus.is_empty() {
        return BTreeSet::from([Place::Driver]);
    }
    gpus.iter().cloned().map(Place::Gpu).collect()
}

impl WaitDelta {
    pub(super) fn places(&self) -> BTreeSet<Place> {
        of_wait(self.class, &self.gpus)
    }
}

impl Stall {
    pub(super) fn places(&self) -> BTreeSet<Place> {
        of_wait(self.class, &self.gpus)
    }
}

/// The name of a limit, cut to a bounded length.
pub(super) fn limit_name(kill: &KillNote) -> Option<String> {
    match (&kill.limit_owner, kill.scope) {
        (Some(owner), _) => Some(owner.chars().take(LIMIT_NAME).collect()),
        (None, KillScope::Node) => Some(NODE.to_owned()),
        (None, _) => None,
    }
}

pub(super) fn of_kill(kill: &KillNote) -> BTreeSet<Place> {
    let gpus = kill.gpu_live.iter().filter(|(_, bytes)| *bytes > 0).map(|(gpu, _)| Place::Gpu(gpu.clone()));
    let mut places: BTreeSet<_> = gpus.chain(limit_name(kill).map(Place::Memory)).collect();
    if places.is_empty() {
        places.insert(Place::Tenant(kill.victim.clone()));
    }
    places
}

pub(super) fn of_failure(record: &FailureRecord) -> BTreeSet<Place> {
    match (record.verdict.arena, &record.gpu) {
        (Arena::Host, _) => BTreeSet::from([Place::Memory(NODE.to_owned())]),
        (_, Some(gpu)) => BTreeSet::from([Place::Gpu(gpu.clone())]),
        (_, None) => BTreeSet::from([Place::Tenant(record.tenant.clone())]),
    }
}

/// Two tenants that hurt each other, in either direction.
pub(super) type Pair = (Tenant, Tenant);

/// `None` where one of them is the folded rest: it is many tenants and ties nothing together.
pub(super) fn pair(one: &Tenant, other: &Tenant) -> Option<Pair> {
    if one.kind == TenantKind::Other || other.kind == TenantKind::Other || one == other {
        return None;
    }
    Some(if one <= other { (one.clone(), other.clone()) } else { (other.clone(), one.clone()) })
}

/// Who made a victim wait, as it stands to that victim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    Neighbour(Tenant),
    Own,
    Device,
    Kernel,
    Unknown,
}

impl Source {
    pub(super) fn of(victim: &Tenant, culprit: &Culprit) -> Self {
        match culprit {
            // The folded rest is many tenants: whether it is the same one cannot be said.
            Culprit::Tenant(tenant) if tenant == victim && tenant.kind == TenantKind::Other => Self::Unknown,
            Culprit::Tenant(tenant) if tenant == victim => Self::Own,
            Culprit::Tenant(tenant) => Self::Neighbour(tenant.clone()),
            Culprit::Device => Self::Device,
            Culprit::Kernel => Self::Kernel,
            Culprit::Unknown => Self::Unknown,
        }
    }

    pub(super) const fn neighbour(&self) -> Option<&Tenant> {
        if let Self::Neighbour(tenant) = self { Some(tenant) } else { None }
    }

    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Neighbour(tenant) => &tenant.name,
            Self::Own => "self",
            Self::Device => "device",
            Self::Kernel => "kernel",
            Self::Unknown => "unknown",
        }
    }
}
