//! Owns what a batch system granted its jobs: devices by UUID, by NVML's index or by device node.
//! Refuses a job's own word: its environment is its to write.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    GrantState,
    holding::{Holder, Holding},
};
use crate::GpuId;

/// What Slurm calls them; the name of a resource has to come from somewhere.
const RESOURCE: &str = "gres/gpu";

/// A GPU as a batch system names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobDevice {
    /// A GPU or a MIG device by its UUID.
    Uuid(GpuId),
    /// By NVML's order, as DCGM numbers them.
    Index(u32),
    /// By the number of its device node, which is not the index.
    Node(u32),
}

/// What one job was granted on this node; nothing is an answer as well.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobGrant {
    pub job: String,
    pub devices: BTreeSet<JobDevice>,
}

/// What the host room found out about jobs.
#[derive(Clone, Copy, Debug)]
pub struct JobFacts<'a> {
    /// The site says of every job what it was granted: who is not among `grants` was granted nothing.
    pub answered: bool,
    pub grants: &'a [JobGrant],
    /// Jobs that are there; `None` where that could not be told.
    pub live: Option<&'a BTreeSet<String>>,
    /// The GPUs behind `/dev/nvidiaN`.
    pub minors: &'a BTreeMap<u32, GpuId>,
}

impl JobFacts<'static> {
    /// Of a node without a batch system.
    pub const NONE: Self = Self { answered: false, grants: &[], live: None, minors: &BTreeMap::new() };
}

impl JobFacts<'_> {
    pub(super) fn tells_of(&self, job: &str) -> bool {
        self.answered || self.grants.iter().any(|grant| grant.job == job)
    }
}

impl JobGrant {
    pub(super) fn state(&self, live: Option<&BTreeSet<String>>) -> GrantState {
        match live {
            None => GrantState::Unknown,
            Some(live) if live.contains(&self.job) => GrantState::Held,
            Some(_) => GrantState::Stale,
        }
    }
}

/// One a GPU, however often and by whatever name it is granted.
pub(super) fn holdings(
    grant: &JobGrant,
    facts: JobFacts<'_>,
    indexes: &BTreeMap<u32, GpuId>,
) -> Vec<Holding> {
    let gpus: BTreeMap<Option<GpuId>, bool> = grant
        .devices
        .iter()
        .map(|device| match device {
            JobDevice::Uuid(gpu) => (Some(gpu.clone()), false),
            // With MIG, the job's part is on the GPU that its number names.
            JobDevice::Index(index) => (indexes.get(index).cloned(), true),
            JobDevice::Node(minor) => (facts.minors.get(minor).cloned(), true),
        })
        .collect();
    let holding = |(gpu, instance)| Holding {
        holder: Holder::Job(grant.job.clone()),
        gpu,
        resource: RESOURCE.to_owned(),
        shares: 1,
        instance,
        // Shards and MPS shares of a GPU are granted in the same form.
        whole: false,
        state: grant.state(facts.live),
    };
    gpus.into_iter().map(holding).collect()
}
