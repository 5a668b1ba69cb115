//! Owns one poll: which questions are asked of which GPU, in which order, with which fallbacks.
//! Refuses time: deadlines, intervals and opening anew belong to the supervisor.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cotenant_model::device::{DeviceMemory, ProcessUtilization};
use cotenant_model::{Absence, GpuId, GpuProcess, GpuSample, Reading};

use crate::config::NvmlConfig;
use crate::desk::Desk;
use crate::nvml::{Answer, Fault, Figure, Handle, List, ListVersion, MemoryRow, MemoryVersion, Nvml, Text};
use crate::processes::{self, NOT_AVAILABLE};
use crate::state::Outcome;

/// Each `PCIe` figure blocks for 20 ms in the driver.
const PCIE_EVERY: u64 = 6;
/// More GPUs or MIG slots than this are not believed.
const MAX_GPUS: u32 = 256;
const MAX_SLOTS: u32 = 64;

/// What one poll leaves for the next.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    polls: u64,
    /// What has answered once, by function and GPU: a refusal after that means the handles went bad.
    answered: BTreeSet<(&'static str, u32)>,
    /// NVML's time of the newest utilisation sample seen.
    seen: BTreeMap<GpuId, u64>,
    pcie: BTreeMap<GpuId, (Reading<f64>, Reading<f64>)>,
}

/// Key of `answered` for questions to the library itself.
const LIBRARY: u32 = u32::MAX;

pub(crate) fn poll(
    nvml: &dyn Nvml,
    desk: &Desk,
    config: &NvmlConfig,
    memory: &mut Memory,
) -> (Outcome, Duration) {
    memory.polls += 1;
    let mut round =
        Round { nvml, desk, config, memory, inside: Duration::ZERO, trouble: None, abandoned: false };
    round.run();
    let outcome = match (round.abandoned, round.trouble) {
        (true, _) => Outcome::Abandoned,
        (false, Some(reason)) => Outcome::Trouble(reason),
        (false, None) => Outcome::Polled,
    };
    (outcome, round.inside)
}

/// A sample with nothing read.
pub(crate) fn blank(id: GpuId, index: u32, reason: Absence) -> GpuSample {
    GpuSample {
        id,
        index,
        name: String::new(),
        pci: String::new(),
        parent: None,
        memory: Err(reason),
        processes: Err(reason),
        process_utilization: Err(reason),
        utilization: Err(reason),
        memory_bandwidth_utilization: Err(reason),
        power_watts: Err(reason),
        energy_joules: Err(reason),
        temperature_celsius: Err(reason),
        pcie_transmit_bytes_per_second: Err(reason),
        pcie_receive_bytes_per_second: Err(reason),
        clocks_event_reasons: Err(reason),
        ecc_corrected: Err(reason),
        ecc_uncorrected: Err(reason),
        mig_enabled: Err(reason),
    }
}

/// The same GPU with every figure replaced by `reason`.
pub(crate) fn forget(gpu: &GpuSample, reason: Absence) -> GpuSample {
    let kept = GpuSample {
        name: gpu.name.clone(),
        pci: gpu.pci.clone(),
        ..blank(gpu.id.clone(), gpu.index, reason)
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
    inside: Duration,
    trouble: Option<Absence>,
    abandoned: bool,
}

impl Round<'_> {
    fn run(&mut self) {
        let nvml = self.nvml;
        let mut placed = BTreeSet::new();
        let facts = self.ask(LIBRARY, "nvmlSystemGetDriverVersion", || nvml.facts());
        self.desk.draft(|draft| draft.library = facts.map_err(|fault| fault.absence()));
        match self.ask(LIBRARY, "nvmlDeviceGetCount_v2", || nvml.count()) {
            Ok(count) => {
                for index in 0..count.min(MAX_GPUS) {
                    self.gpu(index, &mut placed);
                }
                // What NVML no longer lists is gone; what it lists and could not name was kept above.
                self.desk.draft(|draft| draft.gpus.retain(|gpu| placed.contains(&gpu.id)));
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
        let nvml = self.nvml;
        let named =
            self.ask(index, "nvmlDeviceGetHandleByIndex_v2", || nvml.device(index)).and_then(|device| {
                let id = self.ask(index, Text::Uuid.function(), || nvml.text(device, Text::Uuid))?;
                Ok((device, GpuId::from_nvml(&id)))
            });
        let (device, id) = match named {
            Ok(named) => named,
            Err(fault) => return self.keep_listed(index, fault.absence(), placed),
        };
        let at = self.place(&id, index, placed);
        let name = self.ask(index, Text::Name.function(), || nvml.text(device, Text::Name));
        let pci = self.ask(index, Text::Pci.function(), || nvml.text(device, Text::Pci));
        self.set(&at, |gpu| {
            gpu.parent = None;
            gpu.name = name.unwrap_or_else(|_| std::mem::take(&mut gpu.name));
            gpu.pci = pci.unwrap_or_else(|_| std::mem::take(&mut gpu.pci));
        });
        self.memory_and_processes(device, index, &at);
        let utilization = self.process_utilization(device, index, &id);
        self.set(&at, |gpu| gpu.process_utilization = utilization);
        self.gauges(device, index, &at);
        let mig = self.ask(index, "nvmlDeviceGetMigMode", || nvml.mig_enabled(device));
        self.set(&at, |gpu| gpu.mig_enabled = mig.as_ref().copied().map_err(Fault::absence));
        match mig {
            Ok(true) => self.instances(device, index, &at, placed),
            Ok(false) | Err(Fault::NotSupported | Fault::SymbolMissing) => {}
            // Not known this time: what was cut from it stays listed, without figures.
            Err(fault) => self.keep_listed(index, fault.absence(), placed),
        }
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

    fn memory_and_processes(&mut self, device: Handle, index: u32, at: &GpuId) {
        let memory = self.memory(device, index);
        self.set(at, |gpu| gpu.memory = memory);
        let total = memory.ok().map(|memory| memory.total);
        let processes = self.processes(device, index, total);
        let listed: u64 = processes.iter().flatten().filter_map(|process| process.bytes.ok()).sum();
        self.set(at, |gpu| gpu.processes = processes);
        // The list is younger than the memory figure: what was allocated in between is in the one only.
        if memory.is_ok_and(|memory| memory.used < listed) {
            let again = self.memory(device, index);
            self.set(at, |gpu| gpu.memory = again);
        }
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

    fn processes(&mut self, device: Handle, index: u32, total: Option<u64>) -> Reading<Vec<GpuProcess>> {
        if !self.config.host_pid_namespace {
            return Err(Absence::ForeignPidNamespace);
        }
        let mut lists = vec![(List::Compute, self.list(device, index, List::Compute, total)?)];
        for list in [List::Graphics, List::Mps] {
            match self.list(device, index, list, total) {
                Ok(rows) => lists.push((list, rows)),
                // The device or the library has no such processes.
                Err(Absence::NotSupported | Absence::SymbolMissing) => {}
                Err(reason) => return Err(reason),
            }
        }
        Ok(processes::merge(&lists, &self.config.processes))
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

    fn process_utilization(
        &mut self,
        device: Handle,
        index: u32,
        id: &GpuId,
    ) -> Reading<Vec<ProcessUtilization>> {
        if !self.config.host_pid_namespace {
            return Err(Absence::ForeignPidNamespace);
        }
        let nvml = self.nvml;
        let since = self.memory.seen.get(id).copied().unwrap_or(0);
        let ask = || nvml.process_utilization(device, since);
        let rows = match self.ask(index, "nvmlDeviceGetProcessUtilization", ask) {
            Ok(rows) => rows,
            // No sample since then: nobody ran.
            Err(Fault::NotFound) => Vec::new(),
            Err(fault) => return Err(fault.absence()),
        };
        if rows.iter().any(|row| row.sm_percent > 100 || row.memory_percent > 100) {
            return Err(Absence::Implausible);
        }
        let mut newest = BTreeMap::new();
        for row in rows.into_iter().filter(|row| row.timestamp > since && row.pid != 0) {
            let kept = newest.entry(row.pid).or_insert(row);
            if row.timestamp >= kept.timestamp {
                *kept = row;
            }
        }
        if let Some(latest) = newest.values().map(|row| row.timestamp).max() {
            self.memory.seen.insert(id.clone(), latest);
        }
        let share = |row: crate::nvml::UtilizationRow| ProcessUtilization {
            pid: row.pid,
            sm: f64::from(row.sm_percent) / 100.0,
            memory: f64::from(row.memory_percent) / 100.0,
        };
        Ok(newest.into_values().map(share).collect())
    }

    fn gauges(&mut self, device: Handle, index: u32, at: &GpuId) {
        let nvml = self.nvml;
        let rates = self.ask(index, "nvmlDeviceGetUtilizationRates", || nvml.utilization(device));
        let rates = rates.map_err(|fault| fault.absence()).and_then(|rates| match rates {
            (0..=100, 0..=100) => Ok(rates),
            _ => Err(Absence::Implausible),
        });
        let power = self.figure(device, index, Figure::PowerMilliwatts);
        let energy = self.figure(device, index, Figure::EnergyMillijoules);
        let temperature = self.figure(device, index, Figure::TemperatureCelsius);
        let clocks = self.figure(device, index, Figure::ClocksEventReasons);
        let corrected = self.figure(device, index, Figure::EccCorrected);
        let uncorrected = self.figure(device, index, Figure::EccUncorrected);
        let (transmit, receive) = self.pcie(device, index, at);
        self.set(at, |gpu| {
            gpu.utilization = rates.map(|(kernels, _)| f64::from(kernels) / 100.0);
            gpu.memory_bandwidth_utilization = rates.map(|(_, memory)| f64::from(memory) / 100.0);
            gpu.power_watts = power.map(|milliwatts| milliwatts as f64 / 1e3);
            gpu.energy_joules = energy.map(|millijoules| millijoules as f64 / 1e3);
            gpu.temperature_celsius = temperature.map(|celsius| celsius as f64);
            gpu.clocks_event_reasons = clocks;
            gpu.ecc_corrected = corrected;
            gpu.ecc_uncorrected = uncorrected;
            gpu.pcie_transmit_bytes_per_second = transmit;
            gpu.pcie_receive_bytes_per_second = receive;
        });
    }

    fn figure(&mut self, device: Handle, index: u32, figure: Figure) -> Reading<u64> {
        let nvml = self.nvml;
        match self.ask(index, figure.function(), || nvml.figure(device, figure)) {
            Ok(NOT_AVAILABLE) => Err(Absence::NotAvailable),
            // The 32-bit figures have their own "not available".
            Ok(value) if value == u64::from(u32::MAX) && figure.is_narrow() => Err(Absence::NotAvailable),
            Ok(value) => Ok(value),
            Err(fault) => Err(fault.absence()),
        }
    }

    fn pcie(&mut self, device: Handle, index: u32, id: &GpuId) -> (Reading<f64>, Reading<f64>) {
        if !self.config.pcie {
            return (Err(Absence::Disabled), Err(Absence::Disabled));
        }
        let known = self.memory.pcie.get(id).copied();
        if let Some(known) = known.filter(|_| !self.memory.polls.is_multiple_of(PCIE_EVERY)) {
            return known;
        }
        let mut read = |figure| self.figure(device, index, figure).map(|kilobytes| kilobytes as f64 * 1024.0);
        let both = (read(Figure::PcieTransmitKilobytes), read(Figure::PcieReceiveKilobytes));
        self.memory.pcie.insert(id.clone(), both);
        both
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
                    ..blank(id.clone(), index, Absence::NotSupported)
                };
            }
        });
        self.memory_and_processes(instance, index, id);
    }

    /// Puts the GPU into the draft, its figures not yet read.
    fn place(&self, id: &GpuId, index: u32, placed: &mut BTreeSet<GpuId>) -> GpuId {
        placed.insert(id.clone());
        self.desk.draft(|draft| match draft.gpus.iter_mut().find(|gpu| gpu.id == *id) {
            Some(gpu) => gpu.index = index,
            None => draft.gpus.push(blank(id.clone(), index, Absence::NotYet)),
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
