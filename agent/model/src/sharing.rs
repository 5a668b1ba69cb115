//! Owns how each GPU is shared, and what says so: MIG and compute mode, MPS, grants, who was on it together.
//! Refuses to take silence for exclusivity: a GPU that nobody was seen on is `unknown`.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::device::ComputeMode;
use crate::grant::{Grant, GrantedDevice, Physical, Resource};
use crate::{DeviceSample, GpuId, GpuProcess, GpuSample, Tenant};

/// What was seen longer ago says nothing about now, and what was seen for as long says something.
const WINDOW: Duration = Duration::from_mins(10);
/// Tenants that are told apart on one GPU.
const MOST: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// One at a time.
    Exclusive,
    /// Several, each with the whole GPU for a while.
    TimeSliced,
    /// Several at once through an MPS server.
    Mps,
    /// Cut into instances; each is a device with a mode of its own.
    Mig,
    Unknown,
}

impl Mode {
    pub const ALL: &'static [Self] =
        &[Self::Exclusive, Self::TimeSliced, Self::Mps, Self::Mig, Self::Unknown];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::TimeSliced => "time_sliced",
            Self::Mps => "mps",
            Self::Mig => "mig",
            Self::Unknown => "unknown",
        }
    }
}

/// What a mode was told from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Basis {
    MigMode,
    /// A server or clients in NVML's lists.
    MpsLists,
    ComputeMode,
    /// What the kubelet granted.
    Grants,
    /// Who was on it, over ten minutes.
    Processes,
    /// Nothing says it yet.
    Nothing,
}

impl Basis {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MigMode => "mig_mode",
            Self::MpsLists => "mps_lists",
            Self::ComputeMode => "compute_mode",
            Self::Grants => "grants",
            Self::Processes => "processes",
            Self::Nothing => "nothing",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    pub mode: Mode,
    pub basis: Basis,
    /// Tenants on it within the last ten minutes, the MPS server apart.
    pub tenants: usize,
}

impl Sharing {
    pub const UNKNOWN: Self = Self { mode: Mode::Unknown, basis: Basis::Nothing, tenants: 0 };

    /// For people.
    pub fn words(self) -> String {
        let mode = match self.mode {
            Mode::Exclusive => "is used by one at a time",
            Mode::TimeSliced => {
                "is time-sliced: its tenants take turns, and nothing keeps their memory apart"
            }
            Mode::Mps => "is shared by MPS: its tenants run at once, behind one server",
            Mode::Mig => "is cut into MIG instances, which share the driver's locks but no memory",
            Mode::Unknown => "is shared in a way that nothing tells yet",
        };
        let basis = match self.basis {
            Basis::MigMode => "by its MIG mode",
            Basis::MpsLists => "by NVML's list of MPS clients",
            Basis::ComputeMode => "by its compute mode",
            Basis::Grants => "by what the kubelet granted",
            Basis::Processes => "by who was on it in the last ten minutes",
            Basis::Nothing => return mode.to_owned(),
        };
        format!("{mode} ({basis}; {} tenants seen)", self.tenants)
    }
}

/// How a GPU was granted, replicas of it or the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Granted {
    Whole,
    Shares,
}

/// By GPU or MIG device. Pods that only hold a GPU for others say nothing.
pub fn granted(grants: &[Grant]) -> BTreeMap<GpuId, Granted> {
    let mut granted = BTreeMap::new();
    for grant in grants.iter().filter(|grant| !grant.is_reservation()) {
        let shared = match Resource::parse(&grant.resource, &[]) {
            // Memory in parts is asked of a GPU that others may be on.
            Some(Resource::Shared | Resource::Memory) => true,
            Some(Resource::Mig { shared, .. }) => shared,
            Some(Resource::Gpu) | None => false,
        };
        for device in &grant.devices {
            let GrantedDevice::Known(id) = device else { continue };
            let (Physical::Gpu(gpu) | Physical::Mig(gpu)) = &id.physical else { continue };
            // An instance named by its parent says nothing about the parent as a whole.
            if id.gpu_instance.is_some() {
                continue;
            }
            let how = if shared || id.replica.is_some() { Granted::Shares } else { Granted::Whole };
            let known = granted.entry(gpu.clone()).or_insert(how);
            *known = (*known).max(how);
        }
    }
    granted
}

/// What was seen of one GPU.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Since when it has been looked at.
    since: Duration,
    /// When each tenant was last on it.
    tenants: BTreeMap<Tenant, Duration>,
    /// When two tenants were last on it at once.
    together: Option<Duration>,
    mps: Option<Duration>,
}

/// What was seen of every GPU, over a while.
#[derive(Clone, Debug, Default)]
pub struct Sharers(BTreeMap<GpuId, Seen>);

impl Sharers {
    /// Looks at a poll and says how each of its GPUs is shared. `now` is since the agent's start.
    pub fn advance(
        &mut self,
        device: &DeviceSample,
        owner: impl Fn(&GpuProcess) -> Option<Tenant>,
        granted: &BTreeMap<GpuId, Granted>,
        now: Duration,
    ) -> BTreeMap<GpuId, Sharing> {
        self.0.retain(|id, _| device.gpus.iter().any(|gpu| gpu.id == *id));
        let mut told = BTreeMap::new();
        for gpu in &device.gpus {
            let seen = self.0.entry(gpu.id.clone()).or_insert_with(|| Seen { since: now, ..Seen::default() });
            seen.look(gpu, &owner, now);
            told.insert(gpu.id.clone(), seen.judge(gpu, granted.get(&gpu.id).copied(), now));
        }
        told
    }
}

impl Seen {
    fn look(&mut self, gpu: &GpuSample, owner: &impl Fn(&GpuProcess) -> Option<Tenant>, now: Duration) {
        let fresh = |at: &Duration| now.saturating_sub(*at) <= WINDOW;
        self.tenants.retain(|_, at| fresh(at));
        self.together = self.together.filter(fresh);
        self.mps = self.mps.filter(fresh);
        let Ok(processes) = &gpu.processes else { return };
        if processes.iter().any(|process| process.mps_server || process.mps_client) {
            self.mps = Some(now);
        }
        let mut there: Vec<Tenant> =
            processes.iter().filter(|process| !process.mps_server).filter_map(owner).collect();
        there.sort();
        there.dedup();
        if there.len() > 1 {
            self.together = Some(now);
        }
        for tenant in there {
            if self.tenants.len() < MOST || self.tenants.contains_key(&tenant) {
                self.tenants.insert(tenant, now);
            }
        }
    }

    /// What the driver enforces first, then what is certain, then what was granted, then what was seen.
    fn judge(&self, gpu: &GpuSample, granted: Option<Granted>, now: Duration) -> Sharing {
        let (mode, basis) = if gpu.parent.is_none() && gpu.mig_enabled == Ok(true) {
            (Mode::Mig, Basis::MigMode)
        } else if self.mps.is_some() {
            (Mode::Mps, Basis::MpsLists)
        } else if matches!(gpu.compute_mode, Ok(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread))
        {
            (Mode::Exclusive, Basis::ComputeMode)
        } else if granted == Some(Granted::Shares) {
            (Mode::TimeSliced, Basis::Grants)
        } else if self.together.is_some() {
            (Mode::TimeSliced, Basis::Processes)
        } else if granted == Some(Granted::Whole) {
            (Mode::Exclusive, Basis::Grants)
        } else if self.tenants.len() == 1 && now.saturating_sub(self.since) >= WINDOW {
            (Mode::Exclusive, Basis::Processes)
        } else {
            (Mode::Unknown, Basis::Nothing)
        };
        Sharing { mode, basis, tenants: self.tenants.len() }
    }
}

#[cfg(test)]
mod tests;
