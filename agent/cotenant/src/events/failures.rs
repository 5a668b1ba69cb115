//! Owns the facts of a failed allocation, as they were when it failed.
//! Refuses the verdict: that is the model's.

use std::collections::{BTreeMap, VecDeque};

use cotenant_model::{
    CudaError, DeviceSample, GpuId, Operation, ProcessId, Tenant, TenantKind,
    report::{FailedCall, RetriedCall},
    sample::{GpuRef, KernelSample},
    verdict::{Ask, Failures, Fold, Success},
};

use super::{Clock, Tick, history::History};

/// Polls from which the bytes outside every ledger are told.
const POLLS: usize = 9;

/// Bytes of a GPU that no ledger holds (contexts, modules, processes that nobody traced), poll by poll. A poll and a
/// reading of the ledger are up to a tick apart, and a burst between them is no overhead: the median says what stays.
#[derive(Default)]
struct Overheads {
    polls: BTreeMap<GpuId, VecDeque<u64>>,
    taken: Option<std::time::Duration>,
}

pub(super) struct Asks {
    pub(super) records: Failures,
    overheads: Overheads,
    /// Failures by process and operation at the last tick, and the last ask of each in this one.
    counted: BTreeMap<(ProcessId, Operation), u64>,
    last: BTreeMap<(ProcessId, Operation), (f64, u64, Ask)>,
}

impl Default for Asks {
    fn default() -> Self {
        Self {
            records: Failures::new(Fold::default()),
            overheads: Overheads::default(),
            counted: BTreeMap::new(),
            last: BTreeMap::new(),
        }
    }
}

impl Asks {
    /// Learns from an NVML poll that was not seen before.
    pub(super) fn calibrate(&mut self, device: &DeviceSample, kernel: &KernelSample) {
        if self.overheads.taken == Some(device.taken) {
            return;
        }
        self.overheads.taken = Some(device.taken);
        self.overheads.polls.retain(|gpu, _| device.gpus.iter().any(|known| known.id == *gpu));
        for gpu in &device.gpus {
            let Ok(memory) = gpu.memory else { continue };
            let ledger: u64 = kernel
                .processes
                .iter()
                .filter(|process| process.ended.is_none())
                .flat_map(|process| &process.ledger)
                .filter(|row| row.kind.is_device() && row.gpu == GpuRef::Known(gpu.id.clone()))
                .map(|row| row.live)
                .sum();
            let polls = self.overheads.polls.entry(gpu.id.clone()).or_default();
            polls.push_back(memory.total.saturating_sub(memory.free).saturating_sub(ledger));
            if polls.len() > POLLS {
                polls.pop_front();
            }
        }
    }

    pub(super) fn failed(
        &mut self,
        call: &FailedCall,
        gpu: Option<GpuId>,
        tick: &Tick<'_>,
        history: &History,
        clock: Clock,
    ) {
        let Some(tenant) = tick.tenants.get(&call.process).cloned() else { return };
        let ask = self.ask(call, gpu, tenant, tick, history);
        let at = clock.unix_of(call.at);
        self.records.failed(at, 1, &ask);
        let last = self.last.entry((call.process, call.operation)).or_insert((at, 0, ask.clone()));
        *last = (at, last.1 + 1, ask);
    }

    fn ask(
        &self,
        call: &FailedCall,
        gpu: Option<GpuId>,
        tenant: Tenant,
        tick: &Tick<'_>,
        history: &History,
    ) -> Ask {
        let mut ask = Ask::new(tenant.clone(), call.operation, call.error);
        ask.requested = call.requested;
        ask.process = Some(call.process);
        let Some(gpu) = gpu else { return ask };
        let ended = |id: ProcessId| {
            let process = tick.kernel.processes.iter().find(|process| process.id == id);
            process.is_some_and(|process| process.ended_at != 0 && process.ended_at < call.at)
        };
        let mut holders: BTreeMap<Tenant, u64> = BTreeMap::new();
        let mut own_processes: BTreeMap<ProcessId, u64> = BTreeMap::new();
        let mut dead = 0;
        for (id, bytes) in &call.holders {
            if ended(*id) {
                // The driver took its memory back; the ledger is cleared a little later.
                dead += bytes;
                continue;
            }
            let unknown = || Tenant::plain(TenantKind::Unknown, "gone");
            let holder = tick.tenants.get(id).cloned().unwrap_or_else(unknown);
            if holder == tenant {
                *own_processes.entry(*id).or_default() += bytes;
            } else {
                *holders.entry(holder).or_default() += bytes;
            }
        }
        own_processes.insert(call.process, call.own);
        ask.own_live = Some(own_processes.values().sum());
        ask.own_processes = own_processes.into_iter().collect();
        let mut holders: Vec<_> = holders.into_iter().collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        ask.holders = Some(holders);
        if let Some(memory) =
            tick.device.gpus.iter().find(|known| known.id == gpu).and_then(|known| known.memory.ok())
        {
            ask.capacity = Some(memory.total);
            ask.reserved = memory.reserved;
            if let Some(overhead) = self.overheads.of(&gpu) {
                let ledger = call.total.saturating_sub(dead);
                ask.free = Some(memory.total.saturating_sub(overhead).saturating_sub(ledger));
                ask.free_age_seconds = Some(0.0);
            }
        }
        if let Some(growth) = history.growth() {
            let here = growth.into_iter().filter(|((_, place), _)| *place == gpu);
            let (own, others): (Vec<_>, Vec<_>) = here.partition(|((holder, _), _)| *holder == tenant);
            ask.own_growth = own.first().map(|(_, bytes)| *bytes);
            ask.growth = Some(others.into_iter().map(|((holder, _), bytes)| (holder, bytes)).collect());
        }
        ask.gpu = Some(gpu);
        ask
    }

    pub(super) fn retried(&mut self, call: &RetriedCall, gpu: Option<GpuId>, tick: &Tick<'_>, clock: Clock) {
        let Some(tenant) = tick.tenants.get(&call.process).cloned() else { return };
        self.records.succeeded(&Success {
            at_unix: clock.unix_of(call.at),
            tenant,
            gpu,
            operation: call.operation,
            bytes: call.bytes,
            freed: None,
        });
    }

    /// Adds the failures that were counted in the kernel and came too fast to be reported one by one.
    pub(super) fn count(&mut self, tick: &Tick<'_>, _clock: Clock) {
        let mut counted = BTreeMap::new();
        for process in &tick.kernel.processes {
            for row in process.failures.iter().filter(|row| row.error == CudaError::OUT_OF_MEMORY) {
                *counted.entry((process.id, row.operation)).or_default() += row.count;
            }
        }
        for (key, (at, reported, ask)) in std::mem::take(&mut self.last) {
            let before = self.counted.get(&key).copied().unwrap_or(0);
            let fresh: u64 = counted.get(&key).copied().unwrap_or(before).saturating_sub(before);
            let missing = fresh.saturating_sub(reported);
            if missing > 0 && ask.error == CudaError::OUT_OF_MEMORY {
                self.records.failed(at, missing, &ask);
            }
        }
        self.counted = counted;
    }
}

impl Overheads {
    fn of(&self, gpu: &GpuId) -> Option<u64> {
        let mut polls: Vec<u64> = self.polls.get(gpu)?.iter().copied().collect();
        polls.sort_unstable();
        polls.get(polls.len() / 2).copied()
    }
}
