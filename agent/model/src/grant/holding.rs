//! Owns which tenant holds how much of which GPU, put together from device lists, annotations and reservations.
//! Refuses use: what a pod does is not asked here.

use std::collections::{BTreeMap, BTreeSet};

use super::{Declared, Grant, GrantState, GrantedDevice, JobFacts, RequestSource, Resource, job};
use crate::{GpuId, Tenant, TenantKind};

/// What the host room found out about grants.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Whether kubelet ever answered: before that, nothing is known about anybody's grants.
    pub answered: bool,
    pub grants: &'a [Grant],
    /// UIDs of the pods with a cgroup; `None` where they could not be listed.
    pub live: Option<&'a BTreeSet<String>>,
    /// Every live pod has a name.
    pub all_named: bool,
    /// The GPUs behind `/dev/nvidiaN`.
    pub minors: &'a BTreeMap<u32, GpuId>,
    /// What the sandboxes of running pods say.
    pub declared: &'a [Declared],
    /// Resources that count as GPUs beside `nvidia.com/*`.
    pub resources: &'a [String],
    /// Of a batch system, beside or without Kubernetes.
    pub jobs: JobFacts<'a>,
}

/// To whom something may be granted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holder {
    /// A pod, and one of its containers or any.
    Pod { namespace: String, pod: String, container: Option<String> },
    /// A job of Slurm's.
    Job(String),
}

impl Holder {
    pub(super) fn pod(namespace: &str, pod: &str) -> Self {
        Self::Pod { namespace: namespace.to_owned(), pod: pod.to_owned(), container: None }
    }

    pub(super) fn of(tenant: &Tenant) -> Option<Self> {
        match tenant.kind {
            kind if kind.is_kubernetes() => Some(Self::Pod {
                namespace: tenant.namespace.clone()?,
                pod: tenant.pod.clone()?,
                container: tenant.container.clone(),
            }),
            TenantKind::Slurm => Some(Self::Job(tenant.name.strip_prefix("slurm:")?.to_owned())),
            _ => None,
        }
    }

    pub(super) fn tenant(&self) -> Tenant {
        match self {
            Self::Pod { namespace, pod, container } => Tenant {
                namespace: Some(namespace.clone()),
                pod: Some(pod.clone()),
                container: container.clone(),
                ..Tenant::plain(TenantKind::Pod, &format!("{namespace}/{pod}"))
            },
            Self::Job(job) => Tenant::plain(TenantKind::Slurm, job),
        }
    }

    /// Of all its containers.
    pub(super) fn whole(&self) -> Self {
        match self {
            Self::Pod { namespace, pod, .. } => Self::pod(namespace, pod),
            Self::Job(_) => self.clone(),
        }
    }

    /// Whether one may be the other: a container that is not known may be any of its pod.
    pub(super) fn meets(&self, other: &Self) -> bool {
        let any = |holder: &Self| matches!(holder, Self::Pod { container: None, .. });
        if any(self) || any(other) { self.whole() == other.whole() } else { self == other }
    }

    pub(super) fn is_reserved(&self) -> bool {
        matches!(self, Self::Pod { namespace, .. } if is_reserved(namespace))
    }
}

/// Shares of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Holding {
    pub(super) holder: Holder,
    /// `None`: a claim whose device is not a UUID.
    pub(super) gpu: Option<GpuId>,
    pub(super) resource: String,
    pub(super) shares: u64,
    /// A part of the GPU that NVML lists under a UUID of its own.
    pub(super) instance: bool,
    /// The device is nobody else's, so all its memory was asked for.
    pub(super) whole: bool,
    pub(super) state: GrantState,
}

/// Everything that is held, reservations by themselves included. `indexes`: NVML's order of the GPUs.
pub(super) fn holdings(facts: Facts<'_>, indexes: &BTreeMap<u32, GpuId>) -> Vec<Holding> {
    let mut held: Vec<Holding> =
        facts.grants.iter().flat_map(|grant| of_grant(grant, facts, indexes)).collect();
    let reserved = reservations(&held, facts.declared);
    for declared in facts.declared.iter().filter(|declared| !is_reserved(&declared.namespace)) {
        let pod = Holder::pod(&declared.namespace, &declared.pod);
        // HAMi's scheduler decides; the ids that kubelet picked for its plugin are any free ones.
        let decided: BTreeSet<&GpuId> = declared
            .requests
            .iter()
            .filter(|request| request.source == RequestSource::Hami)
            .filter_map(|request| request.gpu.as_ref())
            .collect();
        let containers: BTreeSet<&Holder> =
            held.iter().map(|holding| &holding.holder).filter(|holder| holder.meets(&pod)).collect();
        // Of several containers it does not say which.
        let holder =
            if let [only] = Vec::from_iter(&containers)[..] { (**only).clone() } else { pod.clone() };
        let template = held.iter().find(|holding| holding.holder.meets(&pod)).cloned();
        if let Some(template) = template.filter(|_| !decided.is_empty()) {
            held.retain(|holding| !holding.holder.meets(&pod));
            held.extend(decided.into_iter().map(|gpu| Holding {
                holder: holder.clone(),
                gpu: Some(gpu.clone()),
                shares: 1,
                instance: false,
                whole: false,
                ..template.clone()
            }));
        }
        for (gpu, resource) in declared.groups.iter().filter_map(|group| reserved.get(group)).flatten() {
            held.push(Holding {
                holder: pod.clone(),
                gpu: Some(gpu.clone()),
                resource: resource.clone(),
                shares: 1,
                instance: false,
                whole: false,
                state: GrantState::Held,
            });
        }
    }
    held.extend(facts.jobs.grants.iter().flat_map(|grant| job::holdings(grant, facts.jobs, indexes)));
    held
}

pub(super) fn is_reserved(namespace: &str) -> bool {
    super::RESERVATIONS.contains(&namespace)
}

fn of_grant(grant: &Grant, facts: Facts<'_>, indexes: &BTreeMap<u32, GpuId>) -> Vec<Holding> {
    let state = grant.state(facts.live, facts.all_named);
    let holder = Holder::Pod {
        namespace: grant.namespace.clone(),
        pod: grant.pod.clone(),
        container: Some(grant.container.clone()),
    };
    let resource = Resource::parse(&grant.resource, facts.resources);
    let memory = resource == Some(Resource::Memory);
    let shared = matches!(
        resource,
        None | Some(Resource::Shared | Resource::Memory | Resource::Mig { shared: true, .. })
    );
    let mut by_gpu: BTreeMap<Option<GpuId>, Holding> = BTreeMap::new();
    for device in &grant.devices {
        // gpushare's ids are counters of memory: which GPU they are on says nothing.
        let claimed = device.claimed(facts.minors, indexes);
        let part = claimed.as_ref().is_some_and(|(_, part)| *part);
        let gpu = device
            .gpu(|minor| facts.minors.get(&minor).cloned())
            .or_else(|| claimed.map(|(gpu, _)| gpu))
            .filter(|_| !memory);
        let holding = by_gpu.entry(gpu.clone()).or_insert_with(|| Holding {
            holder: holder.clone(),
            gpu,
            resource: grant.resource.clone(),
            shares: 0,
            instance: false,
            whole: !shared,
            state,
        });
        holding.shares += 1;
        if let GrantedDevice::Known(id) = device {
            holding.instance |= id.gpu_instance.is_some();
            holding.whole &= id.replica.is_none() && id.gpu_instance.is_none();
        } else {
            holding.instance |= part;
            holding.whole = false;
        }
    }
    by_gpu.into_values().collect()
}

/// The GPUs of each group, from the pods that hold them for it.
fn reservations(held: &[Holding], declared: &[Declared]) -> BTreeMap<String, BTreeSet<(GpuId, String)>> {
    let mut reserved: BTreeMap<String, BTreeSet<(GpuId, String)>> = BTreeMap::new();
    for declared in declared.iter().filter(|declared| is_reserved(&declared.namespace)) {
        let pod = Holder::pod(&declared.namespace, &declared.pod);
        let of_pod = held.iter().filter(|holding| holding.holder.whole() == pod);
        for holding in of_pod {
            let Some(gpu) = &holding.gpu else { continue };
            for group in &declared.groups {
                let of_group = reserved.entry(group.clone()).or_default();
                of_group.insert((gpu.clone(), holding.resource.clone()));
            }
        }
    }
    reserved
}
