//! Owns what tenants may take of each GPU, by who says so: MPS clients' own words, and the cgroups' `dmem`.
//! Refuses to believe a process further than NVML confirms it: one that is no MPS client has declared something, no more.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use cotenant_host::Host;
use cotenant_kernel::Reader;
use cotenant_model::{
    DeviceSample, GpuId, ProcessId, Tenant,
    limit::{Device, MPS_VARIABLE, mps_limits, of_client, region_place, tighter},
    sample::{GpuRef, KernelSample, ProcessSample},
    verdict::{Limit, LimitScope, LimitSource},
    view::TenantView,
    xid::PciAddress,
};

/// Between two looks at the cgroups.
const EVERY: Duration = Duration::from_secs(2);

/// What a process said of itself, once.
#[derive(Debug)]
struct Word {
    device: Device,
    bytes: u64,
    gpu: Option<GpuId>,
}

/// A process as far as limits go.
#[derive(Debug, Default)]
struct Known {
    words: Vec<Word>,
    /// In the unified hierarchy; only where the kernel has `dmem`.
    cgroup: Option<String>,
}

/// One cgroup's device memory by GPU.
#[derive(Debug, Default)]
struct Group {
    used: BTreeMap<GpuId, u64>,
    /// The tightest of its own limit and those above it.
    limits: BTreeMap<GpuId, Limit>,
}

#[derive(Debug)]
pub(crate) struct Limits {
    host: Host,
    has_dmem: bool,
    processes: BTreeMap<ProcessId, Known>,
    groups: BTreeMap<String, Group>,
    read: Option<Duration>,
    by_process: BTreeMap<ProcessId, BTreeMap<GpuId, Limit>>,
}

impl Limits {
    pub(crate) fn new(host: Host) -> Self {
        Self {
            has_dmem: host.has_dmem(),
            host,
            processes: BTreeMap::new(),
            groups: BTreeMap::new(),
            read: None,
            by_process: BTreeMap::new(),
        }
    }

    /// Looks at processes that are new, and now and then at the cgroups.
    pub(crate) fn advance(
        &mut self,
        kernel: &KernelSample,
        device: &DeviceSample,
        (reader, only): (Option<&Reader>, Option<&GpuId>),
        now: Duration,
    ) {
        let there: BTreeSet<ProcessId> = kernel.processes.iter().map(|process| process.id).collect();
        self.processes.retain(|id, _| there.contains(id));
        self.by_process.clear();
        for process in &kernel.processes {
            if !process.calls_driver() {
                continue;
            }
            if !self.processes.contains_key(&process.id) && process.ended.is_none() {
                let known = self.look(process.tgid);
                self.processes.insert(process.id, known);
            }
            let Some(known) = self.processes.get_mut(&process.id) else { continue };
            for word in &mut known.words {
                if word.gpu.is_none() {
                    word.gpu = place(word, process.id, device, (reader, only));
                }
                if let Some(gpu) = &word.gpu {
                    let limit =
                        of_client(word.bytes, Some(held(process, gpu)), is_client(device, gpu, process));
                    self.by_process.entry(process.id).or_default().insert(gpu.clone(), limit);
                }
            }
        }
        if self.has_dmem && self.read.is_none_or(|read| now.saturating_sub(read) >= EVERY) {
            self.read = Some(now);
            self.read_groups(device);
        }
    }

    fn look(&self, pid: u32) -> Known {
        let said = self.host.says(pid, &[MPS_VARIABLE]);
        let limits = said.first().map(|(_, value)| mps_limits(value)).unwrap_or_default();
        let words = limits.into_iter().map(|(device, bytes)| Word { device, bytes, gpu: None }).collect();
        let cgroup = if self.has_dmem { self.host.unified_cgroup(pid).ok().flatten() } else { None };
        Known { words, cgroup }
    }

    fn read_groups(&mut self, device: &DeviceSample) {
        let places: BTreeMap<PciAddress, &GpuId> = device
            .gpus
            .iter()
            .filter(|gpu| gpu.parent.is_none())
            .filter_map(|gpu| Some((PciAddress::parse(&gpu.pci)?, &gpu.id)))
            .collect();
        let cgroups: BTreeSet<&String> =
            self.processes.values().filter_map(|known| known.cgroup.as_ref()).collect();
        let mut groups = BTreeMap::new();
        for cgroup in cgroups {
            let mut group = Group::default();
            for level in self.host.dmem(cgroup).unwrap_or_default() {
                let own = level.cgroup == cgroup.trim_matches('/');
                for (region, figures) in &level.regions {
                    let Some(gpu) = region_place(region).and_then(|place| places.get(&place)) else {
                        continue;
                    };
                    let gpu = GpuId::clone(gpu);
                    if let Some(current) = figures.current.filter(|_| own) {
                        *group.used.entry(gpu.clone()).or_default() += current;
                    }
                    if let Some(bytes) = figures.max {
                        let (source, scope) = (LimitSource::Dmem, LimitScope::Tenant);
                        let limit = Limit { bytes, source, scope, used: figures.current };
                        let known = group.limits.entry(gpu).or_insert(limit);
                        *known = tighter(*known, limit);
                    }
                }
            }
            groups.insert(cgroup.clone(), group);
        }
        self.groups = groups;
    }

    /// All that hold a process on a GPU.
    pub(crate) fn of(&self, process: ProcessId, gpu: &GpuId) -> impl Iterator<Item = Limit> {
        let own = self.by_process.get(&process).and_then(|limits| limits.get(gpu)).copied();
        let cgroup = self.processes.get(&process).and_then(|known| known.cgroup.as_ref());
        let group = cgroup.and_then(|cgroup| self.groups.get(cgroup)?.limits.get(gpu)).copied();
        own.into_iter().chain(group)
    }

    /// Puts them beside what their tenants use.
    pub(crate) fn publish(&self, tenants: &BTreeMap<ProcessId, Tenant>, views: &mut [TenantView]) {
        for view in views {
            let mine = || {
                let own = |id: &&ProcessId| tenants.get(*id) == Some(&view.tenant);
                self.processes.keys().filter(own)
            };
            let mut limits: BTreeMap<(GpuId, LimitSource, LimitScope), Limit> = BTreeMap::new();
            let of_processes = mine().filter_map(|id| self.by_process.get(id)).flatten();
            let cgroups: BTreeSet<&String> =
                mine().filter_map(|id| self.processes.get(id)?.cgroup.as_ref()).collect();
            let groups: Vec<&Group> = cgroups.iter().filter_map(|cgroup| self.groups.get(*cgroup)).collect();
            let of_groups = groups.iter().flat_map(|group| &group.limits);
            for (gpu, limit) in of_processes.chain(of_groups) {
                let known = limits.entry((gpu.clone(), limit.source, limit.scope)).or_insert(*limit);
                *known = tighter(*known, *limit);
            }
            view.limits = limits.into_iter().map(|((gpu, ..), limit)| (gpu, limit)).collect();
            view.device_cgroup_bytes.clear();
            for (gpu, bytes) in groups.iter().flat_map(|group| &group.used) {
                *view.device_cgroup_bytes.entry(gpu.clone()).or_default() += bytes;
            }
        }
    }
}

/// The GPU of which a process speaks.
fn place(
    word: &Word,
    process: ProcessId,
    device: &DeviceSample,
    (reader, only): (Option<&Reader>, Option<&GpuId>),
) -> Option<GpuId> {
    match &word.device {
        // What NVML does not list is nothing but a word.
        Device::Id(gpu) => device.gpus.iter().any(|known| known.id == *gpu).then(|| gpu.clone()),
        Device::Ordinal(ordinal) => match reader?.gpu_of_ordinal(process, *ordinal, only) {
            Ok(GpuRef::Known(gpu)) => Some(gpu),
            _ => None,
        },
    }
}

/// By the last poll: NVML lists a client in its MPS list.
fn is_client(device: &DeviceSample, gpu: &GpuId, process: &ProcessSample) -> bool {
    let here = device.gpus.iter().filter(|known| known.id == *gpu);
    let mut listed = here.flat_map(|gpu| gpu.processes.iter().flatten());
    process.ended.is_none() && listed.any(|listed| listed.pid == process.tgid && listed.mps_client)
}

fn held(process: &ProcessSample, gpu: &GpuId) -> u64 {
    let here = |gpu_ref: &GpuRef| *gpu_ref == GpuRef::Known(gpu.clone());
    process.ledger.iter().filter(|row| row.kind.is_device() && here(&row.gpu)).map(|row| row.live).sum()
}

#[cfg(test)]
mod tests;
