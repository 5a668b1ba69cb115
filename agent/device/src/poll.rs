//! Owns one poll: which questions are asked of which GPU, in which order, with which fallbacks.
//! Refuses time: deadlines, intervals and opening anew belong to the supervisor.

mod figures;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cotenant_model::device::{DeviceMemory, LibraryFacts};
use cotenant_model::{Absence, GpuId, GpuProcess, GpuSample, Reading};

use crate::cadence::{Cadence, Paced, Spent, Terms};
use crate::config::NvmlConfig;
use crate::desk::Desk;
use crate::nvml::{Answer, Fault, Handle, List, ListVersion, MemoryRow, MemoryVersion, Nvml, Text};
use crate::processes::{self, NOT_AVAILABLE};
use crate::state::Outcome;

/// More GPUs or MIG slots than this are not believed.
const MAX_GPUS: u32 = 256;
const MAX_SLOTS: u32 = 64;

/// What one poll leaves for the next.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// What has answered once, by function and GPU: a refusal after that means the handles went bad.
    answered: BTreeSet<(&'static str, u32)>,
    /// NVML's time of the newest utilisation sample seen.
    seen: BTreeMap<GpuId, u64>,
    facts: Option<LibraryFacts>,
    /// The GPUs of the library as it is open now, by index.
    places: BTreeMap<u32, Place>,
    /// Each GPU as the last poll that came through left it: what is not due is taken from here.
    last: BTreeMap<GpuId, GpuSample>,
    listed: BTreeMap<GpuId, Listed>,
    cadence: Cadence,
}

impl Memory {
    /// The library was opened anew: no handle of before is good.
    pub(crate) fn opened(&mut self) {
        self.facts = None;
        self.places.clear();
    }
}

/// What is where.
#[derive(Clone, Debug)]
struct Place {
    device: Handle,
    id: GpuId,
}

/// What the lists of one GPU were.
#[derive(Debug, Default)]
struct Listed {
    compute: BTreeSet<u32>,
    /// Lists that nobody was in, or that there are not.
    empty: BTreeSet<Paced>,
    /// Processes that were found to be MPS servers.
    servers: BTreeSet<u32>,
}

/// Key of `answered` for questions to the library itself.
const LIBRARY: u32 = u32::MAX;

pub(crate) fn poll(
    nvml: &dyn Nvml,
    desk: &Desk,
    config: &NvmlConfig,
    memory: &mut Memory,
    held_back: u32,
) -> (Outcome, Duration) {
    let terms = Terms { interval: config.effective_interval(), held_back };
    let inside = Duration::ZERO;
    let mut round = Round { nvml, desk, config, memory, terms, inside, trouble: None, abandoned: false };
    round.run();
    let outcome = match (round.abandoned, round.trouble) {
        (true, _) => Outcome::Abandoned,
        (false, Some(reason)) => Outcome::Trouble(reason),
        (false, None) => Outcome::Polled,
    };
    (outcome, round.inside)
}

/// The same GPU with every figure replaced by `reason`.
pub(crate) fn forget(gpu: &GpuSample, reason: Absence) -> GpuSample {
    let kept = GpuSample {
        name: gpu.name.clone(),
        pci: gpu.pci.clone(),
        ..GpuSample::absent(gpu.id.clone(), gpu.index, reason)
    };
    GpuSample { parent: gpu.parent.clone(), ..kept }
}

/// Handle, (GPU instance, compute instance), UUID.
type Instance = (Handle, (u32, u32), GpuId);

struct Round<'a> {
    nvml: &'a dyn Nvml,
    desk: &'a Desk,
    config: &'a NvmlConfig,
    memory: &'a mut Memory,
    terms: Terms,
    inside: Duration,
    trouble: Option<Absence>,
    abandoned: bool,
}

impl Round<'_> {
    fn run(&mut self) {
        let nvml = self.nvml;
        let mut placed = BTreeSet::new();
        // A library does not change its version while it is open.
        let facts = match self.memory.facts.clone() {
            Some(facts) => Ok(facts),
            None => self.ask(LIBRARY, "nvmlSystemGetDriverVersion", || nvml.facts()),
        };
        self.memory.facts = facts.as_ref().ok().cloned();
        self.desk.draft(|draft| draft.library = facts.map_err(|fault| fault.absence()));
        match self.ask(LIBRARY, "nvmlDeviceGetCount_v2", || nvml.count()) {
            Ok(count) => {
                for index in 0..count.min(MAX_GPUS) {
                    self.gpu(index, &mut placed);
                }
                // What NVML no longer lists is gone; what it lists and could not name was kept above.
                self.desk.draft(|draft| draft.gpus.retain(|gpu| placed.contains(&gpu.id)));
                self.memory.last.retain(|gpu, _| placed.contains(gpu));
                self.memory.listed.retain(|gpu, _| placed.contains(gpu));
                self.memory.cadence.retain(|gpu| placed.contains(gpu));
            }
            Err(fault) => {
                let reason = fault.absence();
                self.desk.draft(|draft| {
                    draft.library = Err(reason);
                    draft.gpus.iter_mut().for_each(|gpu| *gpu = forget(gpu, reason));
                });
            }
        }
    }

    /// One call: timed by the desk, and watched for answers that mean the handles are no good.
    fn ask<T>(&mut self, index: u32, function: &'static str, call: impl FnOnce() -> Answer<T>) -> Answer<T> {
        let answer = self.desk.call(function, &mut self.inside, call);
        match &answer {
            Ok(_) => {
                self.memory.answered.insert((function, index));
            }
            Err(Fault::Abandoned) => self.abandoned = true,
            Err(fault) => {
                let certain = matches!(
                    fault,
                    Fault::GpuLost | Fault::Uninitialized | Fault::DriverNotLoaded | Fault::VersionMismatch
                );
                let after_success = matches!(fault, Fault::Unknown | Fault::NoPermission)
                    && self.memory.answered.contains(&(function, index));
                if (certain || after_success) && self.trouble.is_none() {
                    tracing::debug!(function, index, %fault, "NVML's handles look stale");
                    self.trouble = Some(fault.absence());
                }
            }
        }
        answer
    }

    fn gpu(&mut self, index: u32, placed: &mut BTreeSet<GpuId>) {
        let at = match self.identify(index, placed) {
            Ok(place) => place,
            Err(fault) => return self.keep_listed(index, fault.absence(), placed),
        };
        let Place { device, id } = at;
        if self.memory_and_processes(device, index, &id) == Err(Absence::GpuLost) {
            // What it said before says nothing about it now.
            self.memory.places.remove(&index);
            self.memory.last.remove(&id);
            self.memory.cadence.forget(&id);
        }
        let mig = self.figures(device, index, &id);
        match mig {
            Ok(true) => self.instances(device, index, &id, placed),
            Ok(false) | Err(Absence::NotSupported | Absence::SymbolMissing) => {}
            // Not known this time: what was cut from it stays listed, without figures.
            Err(reason) => self.keep_listed(index, reason, placed),
        }
    }

    /// Which GPU is at `index`, in the draft with its name.
    fn identify(&mut self, index: u32, placed: &mut BTreeSet<GpuId>) -> Answer<Place> {
        let nvml = self.nvml;
        let begun = (Instant::now(), self.inside);
        let known = self.memory.places.get(&index).cloned();
        if let Some(known) =
            known.filter(|known| !self.memory.cadence.due(Paced::Identity, &known.id, begun.0))
        {
            self.place(&known.id, index, placed);
            let last = self.memory.last.get(&known.id).map(|last| (last.name.clone(), last.pci.clone()));
            self.set(&known.id, |gpu| {
                gpu.parent = None;
                (gpu.name, gpu.pci) =
                    last.unwrap_or_else(|| (std::mem::take(&mut gpu.name), std::mem::take(&mut gpu.pci)));
            });
            return Ok(known);
        }
        let device = self.ask(index, "nvmlDeviceGetHandleByIndex_v2", || nvml.device(index))?;
        let id = self.ask(index, Text::Uuid.function(), || nvml.text(device, Text::Uuid))?;
        let id = GpuId::from_nvml(&id);
        self.place(&id, index, placed);
        let name = self.ask(index, Text::Name.function(), || nvml.text(device, Text::Name));
        let pci = self.ask(index, Text::Pci.function(), || nvml.text(device, Text::Pci));
        let failed = name.as_ref().err().or(pci.as_ref().err()).map(Fault::absence);
        self.set(&id, |gpu| {
            gpu.parent = None;
            gpu.name = name.unwrap_or_else(|_| std::mem::take(&mut gpu.name));
            gpu.pci = pci.unwrap_or_else(|_| std::mem::take(&mut gpu.pci));
        });
        let spent = Spent { at: begun.0, cost: self.inside.saturating_sub(begun.1), failed };
        self.memory.cadence.read(Paced::Identity, &id, spent, self.terms);
        let place = Place { device, id };
        self.memory.places.insert(index, place.clone());
        Ok(place)
    }

    /// GPUs and instances at `index` that this poll could not reach stay, each figure with the reason.
    fn keep_listed(&self, index: u32, reason: Absence, placed: &mut BTreeSet<GpuId>) {
        self.desk.draft(|draft| {
            for gpu in draft.gpus.iter_mut().filter(|gpu| gpu.index == index) {
                if placed.insert(gpu.id.clone()) {
                    *gpu = forget(gpu, reason);
                }
            }
        });
    }

    fn memory_and_processes(&mut self, device: Handle, index: u32, at: &GpuId) -> Reading<()> {
        let memory = self.memory(device, index);
        self.set(at, |gpu| gpu.memory = memory);
        let total = memory.ok().map(|memory| memory.total);
        let processes = self.processes(device, index, at, total);
        let listed: u64 = processes.iter().flatten().filter_map(|process| process.bytes.ok()).sum();
        self.set(at, |gpu| gpu.processes = processes);
        // The list is younger than the memory figure: what was allocated in between is in the one only.
        if memory.is_ok_and(|memory| memory.used < listed) {
            let again = self.memory(device, index);
            self.set(at, |gpu| gpu.memory = again);
        }
        memory.map(|_| ())
    }

    fn memory(&mut self, device: Handle, index: u32) -> Reading<DeviceMemory> {
        let nvml = self.nvml;
        let mut answer = Err(Fault::SymbolMissing);
        for version in [MemoryVersion::V2, MemoryVersion::V1] {
            answer = self.ask(index, version.function(), || nvml.memory(device, version));
            if !matches!(answer, Err(Fault::SymbolMissing | Fault::NotSupported | Fault::InvalidArgument)) {
                break;
            }
        }
        believe(answer.map_err(|fault| fault.absence())?)
    }

    fn processes(
        &mut self,
        device: Handle,
        index: u32,
        at: &GpuId,
        total: Option<u64>,
    ) -> Reading<Vec<GpuProcess>> {
        if !self.config.host_pid_namespace {
            return Err(Absence::ForeignPidNamespace);
        }
        let compute = self.list(device, index, List::Compute, total)?;
        let pids: BTreeSet<u32> = compute.iter().map(|row| row.pid).collect();
        let listed = self.memory.listed.entry(at.clone()).or_default();
        // Whoever comes to the other lists mostly shows here as well: MPS clients do, and their server.
        let changed = listed.compute != pids;
        listed.servers.retain(|pid| pids.contains(pid));
        listed.compute = pids;
        let (known, servers) = (listed.empty.clone(), listed.servers.clone());
        let mut lists = vec![(List::Compute, compute)];
        for (list, what) in [(List::Graphics, Paced::EmptyGraphics), (List::Mps, Paced::EmptyMps)] {
            let begun = Instant::now();
            if !changed && known.contains(&what) && !self.memory.cadence.due(what, at, begun) {
                continue;
            }
            let before = self.inside;
            let rows = match self.list(device, index, list, total) {
                // The device or the library has no such processes.
                Err(Absence::NotSupported | Absence::SymbolMissing) => Ok(Vec::new()),
                answer => answer,
            };
            let cost = self.inside.saturating_sub(before);
            let spent = Spent { at: begun, cost, failed: rows.as_ref().err().copied() };
            self.memory.cadence.read(what, at, spent, self.terms);
            if let Some(listed) = self.memory.listed.get_mut(at) {
                listed.empty.remove(&what);
                if rows.as_ref().is_ok_and(Vec::is_empty) {
                    listed.empty.insert(what);
                }
            }
            lists.push((list, rows?));
        }
        let merged = processes::merge(&lists, &servers, &self.config.processes);
        if let Some(listed) = self.memory.listed.get_mut(at) {
            listed.servers = merged.iter().filter(|process| process.mps_server).map(|p| p.pid).collect();
        }
        Ok(merged)
    }

    fn list(
        &mut self,
        device: Handle,
        index: u32,
        list: List,
        total: Option<u64>,
    ) -> Reading<Vec<processes::Row>> {
        let nvml = self.nvml;
        let config = self.config;
        // A process that ends between NVML's answer and the check is gone from a second answer.
        let mut second_try = false;
        loop {
            let mut answer = Err(Fault::SymbolMissing);
            let mut used = ListVersion::V3;
            for version in ListVersion::ALL {
                used = version;
                answer = self.ask(index, version.function(list), || nvml.processes(device, list, version));
                if !matches!(answer, Err(Fault::SymbolMissing)) {
                    break;
                }
            }
            let raw = answer.map_err(|fault| fault.absence())?;
            let rows = processes::decode(&raw, used, total, &*config.processes.exists);
            if rows.is_ok() || second_try {
                return rows;
            }
            second_try = true;
        }
    }

    /// Every slot is tried: the count is how many there can be, and free slots lie between taken ones.
    fn instances(&mut self, device: Handle, index: u32, parent: &GpuId, placed: &mut BTreeSet<GpuId>) {
        let nvml = self.nvml;
        let slots = match self.ask(index, "nvmlDeviceGetMaxMigDeviceCount", || nvml.mig_slots(device)) {
            Ok(slots) => slots.min(MAX_SLOTS),
            Err(fault) => return self.keep_listed(index, fault.absence(), placed),
        };
        let mut taken = BTreeSet::new();
        for slot in 0..slots {
            match self.instance(device, index, slot) {
                Ok(Some((instance, ids, id))) if taken.insert(ids) => {
                    self.fill_instance(instance, index, &id, parent, placed);
                }
                Ok(_) => {}
                Err(fault) => self.keep_listed(index, fault.absence(), placed),
            }
        }
    }

    /// The instance in `slot`; `None` for a free slot and for a stale handle.
    fn instance(&mut self, device: Handle, index: u32, slot: u32) -> Answer<Option<Instance>> {
        let nvml = self.nvml;
        let found = self.ask(index, "nvmlDeviceGetMigDeviceHandleByIndex", || nvml.mig_device(device, slot));
        let Some(instance) = none_if_free(found)? else { return Ok(None) };
        let parent =
            self.ask(index, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", || nvml.mig_parent(instance));
        if none_if_free(parent)? != Some(device) {
            return Ok(None);
        }
        let ids = self.ask(index, "nvmlDeviceGetGpuInstanceId", || nvml.mig_ids(instance));
        let Some(ids) = none_if_free(ids)? else { return Ok(None) };
        let uuid = self.ask(index, Text::Uuid.function(), || nvml.text(instance, Text::Uuid));
        let Some(uuid) = none_if_free(uuid)? else { return Ok(None) };
        Ok(Some((instance, ids, GpuId::from_nvml(&uuid))))
    }

    fn fill_instance(
        &mut self,
        instance: Handle,
        index: u32,
        id: &GpuId,
        parent: &GpuId,
        placed: &mut BTreeSet<GpuId>,
    ) {
        let nvml = self.nvml;
        self.place(id, index, placed);
        let name = self.ask(index, Text::Name.function(), || nvml.text(instance, Text::Name));
        self.desk.draft(|draft| {
            let pci = draft.gpus.iter().find(|gpu| gpu.id == *parent).map(|gpu| gpu.pci.clone());
            if let Some(gpu) = draft.gpus.iter_mut().find(|gpu| gpu.id == *id) {
                // Per-instance gauges are not to be had from NVML, and a 0 would look idle.
                *gpu = GpuSample {
                    name: name.unwrap_or_else(|_| std::mem::take(&mut gpu.name)),
                    pci: pci.unwrap_or_default(),
                    parent: Some(parent.clone()),
                    memory: Err(Absence::NotYet),
                    processes: Err(Absence::NotYet),
                    ..GpuSample::absent(id.clone(), index, Absence::NotSupported)
                };
            }
        });
        // Lost or not, the parent has said so.
        let _ = self.memory_and_processes(instance, index, id);
    }

    /// Puts the GPU into the draft, its figures not yet read.
    fn place(&self, id: &GpuId, index: u32, placed: &mut BTreeSet<GpuId>) -> GpuId {
        placed.insert(id.clone());
        self.desk.draft(|draft| match draft.gpus.iter_mut().find(|gpu| gpu.id == *id) {
            Some(gpu) => gpu.index = index,
            None => draft.gpus.push(GpuSample::absent(id.clone(), index, Absence::NotYet)),
        });
        id.clone()
    }

    fn set(&self, id: &GpuId, change: impl FnOnce(&mut GpuSample)) {
        self.desk.draft(|draft| {
            if let Some(gpu) = draft.gpus.iter_mut().find(|gpu| gpu.id == *id) {
                change(gpu);
            }
        });
    }
}

fn none_if_free<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(Fault::NotFound | Fault::InvalidArgument) => Ok(None),
        Err(fault) => Err(fault),
    }
}

fn believe(row: MemoryRow) -> Reading<DeviceMemory> {
    if [row.total, row.used, row.free].contains(&NOT_AVAILABLE) {
        return Err(Absence::NotAvailable);
    }
    if row.total == 0 || row.used > row.total || row.free > row.total {
        return Err(Absence::Implausible);
    }
    let reserved = row.reserved.filter(|reserved| *reserved <= row.total);
    Ok(DeviceMemory { total: row.total, used: row.used, free: row.free, reserved })
}
