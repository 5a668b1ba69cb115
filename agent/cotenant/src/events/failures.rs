//! Owns the facts of a failed allocation, as they were when it failed, and how many failures there were.
//! Refuses the verdict: that is the model's.
//!
//! The kernel counts every failure and reports some, with who held the GPU then. The count is what is told; a report is
//! the word on one of them. Both travel by different ways, so a report may come a tick before or after its count.

mod overheads;

use std::collections::{BTreeMap, BTreeSet};

use cotenant_host::{Host, HostMemory};
use cotenant_model::{
    CudaError, DeviceSample, GpuId, MemoryKind, Operation, ProcessId, Tenant, TenantKind,
    report::{FailedCall, RetriedCall},
    sample::{GpuRef, KernelSample, LedgerRow},
    verdict::{Arena, Ask, Failures, Fold, Limit, LimitScope, LimitSource, Success},
};

use super::{Clock, Tick, history::History, roll::Roll};
use overheads::Overheads;

/// Ticks for which a failure waits for a first report on any of its kind.
const PATIENCE: u32 = 2;

type Key = (ProcessId, Operation);

/// Refusals of memory to one process by one operation.
#[derive(Default)]
struct Account {
    /// How many were told.
    told: u64,
    /// What was reported last.
    last: Option<(f64, Box<Ask>)>,
    waited: u32,
}

/// What came through the ring, in its order.
pub(super) enum Word {
    Failed { at: f64, key: Key, ask: Box<Ask> },
    Retried { process: ProcessId, success: Success },
}

impl Word {
    const fn process(&self) -> ProcessId {
        match self {
            Self::Failed { key: (process, _), .. } | Self::Retried { process, .. } => *process,
        }
    }
}

pub(super) struct Asks {
    host: Host,
    pub(super) records: Failures,
    overheads: Overheads,
    accounts: BTreeMap<Key, Account>,
    /// Words that came before their count: a process's wait together, for their order matters.
    early: Vec<Word>,
}

impl Asks {
    pub(super) fn new(host: Host) -> Self {
        Self {
            host,
            records: Failures::new(Fold::default()),
            overheads: Overheads::default(),
            accounts: BTreeMap::new(),
            early: Vec::new(),
        }
    }
}

/// Who held a GPU.
struct Census {
    /// The largest.
    holders: Vec<(ProcessId, u64)>,
    total: u64,
    own: u64,
    at_failure: bool,
}

impl Census {
    /// As it was when the call failed. The kernel knows a GPU by what each process said of it before; where that is not
    /// the same word for all, it misses some, and the ledger as it is now is the next best.
    fn of(call: &FailedCall, gpu: &GpuId, kernel: &KernelSample) -> Self {
        if call.total > 0 && call.complete {
            let FailedCall { holders, total, own, .. } = call;
            return Self { holders: holders.clone(), total: *total, own: *own, at_failure: true };
        }
        let mut census = Self { holders: Vec::new(), total: 0, own: 0, at_failure: true };
        for process in kernel.processes.iter().filter(|process| process.ended.is_none()) {
            let here = |row: &&LedgerRow| {
                row.kind.is_device() && row.live > 0 && row.gpu == GpuRef::Known(gpu.clone())
            };
            let bytes: u64 = process.ledger.iter().filter(here).map(|row| row.live).sum();
            if bytes > 0 {
                census.holders.push((process.id, bytes));
                census.total += bytes;
                census.own += if process.id == call.process { bytes } else { 0 };
                census.at_failure = false;
            }
        }
        census
    }

    /// What is held by none of the listed ones: the list is short, the sum is not.
    fn unlisted(&self, asking: ProcessId) -> u64 {
        let sum = |own: bool| -> u64 {
            let rows = self.holders.iter().filter(|(id, _)| own == (*id == asking));
            rows.map(|(_, bytes)| bytes).sum()
        };
        self.total.saturating_sub(sum(false)).saturating_sub(self.own.max(sum(true)))
    }
}

/// What the pools of a tenant keep on a GPU and do not use. `None` where no pool's size is known.
fn cached(tenant: &Tenant, gpu: &GpuId, tick: &Tick<'_>) -> Option<u64> {
    let own = tick.kernel.processes.iter().filter(|process| {
        process.ended.is_none() && tick.tenants.get(&process.id).is_some_and(|known| known == tenant)
    });
    let idle = own.filter_map(|process| {
        let kept: u64 = process.pools.iter().filter(|row| row.gpu == *gpu).filter_map(|row| row.bytes).sum();
        let used = |row: &&LedgerRow| row.kind == MemoryKind::Pool && row.gpu == GpuRef::Known(gpu.clone());
        let used: u64 = process.ledger.iter().filter(used).map(|row| row.live).sum();
        (kept > 0).then(|| kept.saturating_sub(used))
    });
    idle.reduce(u64::saturating_add)
}

impl Asks {
    /// Learns from an NVML poll that was not seen before.
    pub(super) fn calibrate(&mut self, device: &DeviceSample, kernel: &KernelSample) {
        self.overheads.learn(device, kernel);
    }

    pub(super) fn failed(
        &self,
        call: &FailedCall,
        gpu: Option<GpuId>,
        tick: &Tick<'_>,
        (history, roll): (&History, &Roll),
        clock: Clock,
    ) -> Option<Word> {
        let tenant = roll.of(call.process)?;
        let ask = Box::new(self.ask(call, gpu, tenant, tick, (history, roll)));
        Some(Word::Failed { at: clock.unix_of(call.at), key: (call.process, call.operation), ask })
    }

    fn ask(
        &self,
        call: &FailedCall,
        gpu: Option<GpuId>,
        tenant: &Tenant,
        tick: &Tick<'_>,
        (history, roll): (&History, &Roll),
    ) -> Ask {
        let mut ask = Ask::new(tenant.clone(), call.operation, call.error);
        ask.requested = call.requested;
        ask.process = Some(call.process);
        // Pinned host memory is the host's: what is known of the GPU says nothing about it.
        if Arena::of(call.operation) == Some(Arena::Host) {
            return self.ask_host(ask, call, tick);
        }
        let Some(gpu) = gpu else { return ask };
        let census = Census::of(call, &gpu, tick.kernel);
        let ended = |id: ProcessId| {
            let process = tick.kernel.processes.iter().find(|process| process.id == id);
            process.is_some_and(|process| process.ended_at != 0 && process.ended_at < call.at)
        };
        let mut holders: BTreeMap<Tenant, u64> = BTreeMap::new();
        let mut own_processes: BTreeMap<ProcessId, u64> = BTreeMap::new();
        let mut dead = 0;
        for (id, bytes) in &census.holders {
            if ended(*id) {
                // The driver took its memory back; the ledger is cleared a little later.
                dead += bytes;
                continue;
            }
            let unknown = || Tenant::plain(TenantKind::Unknown, "gone");
            let holder = roll.of(*id).cloned().unwrap_or_else(unknown);
            if holder == *tenant {
                *own_processes.entry(*id).or_default() += bytes;
            } else {
                *holders.entry(holder).or_default() += bytes;
            }
        }
        let unlisted = census.unlisted(call.process);
        if unlisted > 0 {
            *holders.entry(Tenant::other()).or_default() += unlisted;
        }
        own_processes.insert(call.process, census.own);
        let own: u64 = own_processes.values().sum();
        ask.own_live = Some(own);
        ask.own_cached = cached(tenant, &gpu, tick);
        ask.own_processes = own_processes.into_iter().collect();
        let mut held = holders.clone();
        held.insert(tenant.clone(), own);
        if let Some(mut growth) = history.growth_to(&gpu, &held) {
            ask.own_growth = growth.remove(tenant);
            ask.growth = Some(growth.into_iter().collect());
        }
        let mut holders: Vec<_> = holders.into_iter().collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        ask.holders = Some(holders);
        if let Some(memory) =
            tick.device.gpus.iter().find(|known| known.id == gpu).and_then(|known| known.memory.ok())
        {
            ask.capacity = Some(memory.total);
            ask.reserved = memory.reserved;
            if let Some(overhead) = self.overheads.of(&gpu) {
                let ledger = census.total.saturating_sub(dead);
                ask.free = Some(memory.total.saturating_sub(overhead).saturating_sub(ledger));
                ask.free_age_seconds = census.at_failure.then_some(0.0);
            }
        }
        let limits: Vec<_> = tick.limits.of(call.process, &gpu).collect();
        ask.gpu = Some(gpu);
        ask.under(limits)
    }

    /// As it is now, up to a tick after the failure.
    fn ask_host(&self, mut ask: Ask, call: &FailedCall, tick: &Tick<'_>) -> Ask {
        if let Ok(HostMemory { total, available }) = self.host.memory() {
            (ask.capacity, ask.free) = (Some(total), Some(available));
        }
        let mut pinned: BTreeMap<Tenant, u64> = BTreeMap::new();
        for process in tick.kernel.processes.iter().filter(|process| process.ended.is_none()) {
            let bytes: u64 = process.ledger.iter().filter(|row| row.kind.is_host()).map(|row| row.live).sum();
            let Some(tenant) = tick.tenants.get(&process.id).filter(|_| bytes > 0) else { continue };
            *pinned.entry(tenant.clone()).or_default() += bytes;
        }
        ask.own_live = Some(pinned.remove(&ask.tenant).unwrap_or(0));
        let mut holders: Vec<_> = pinned.into_iter().collect();
        holders.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        ask.holders = Some(holders);
        let cgroup = self.host.memory_cgroup(call.tgid).ok().flatten();
        let limit = cgroup.and_then(|cgroup| self.host.memory_limit(&cgroup)).map(|limit| Limit {
            bytes: limit.bytes,
            source: LimitSource::Cgroup,
            scope: LimitScope::Tenant,
            used: Some(limit.used),
        });
        ask.under(limit)
    }

    pub(super) fn retried(call: &RetriedCall, gpu: Option<GpuId>, roll: &Roll, clock: Clock) -> Option<Word> {
        let success = Success {
            at_unix: clock.unix_of(call.at),
            tenant: roll.of(call.process)?.clone(),
            process: call.process,
            gpu,
            operation: call.operation,
            bytes: call.bytes,
            freed: None,
        };
        Some(Word::Retried { process: call.process, success })
    }

    /// Tells what was counted since the last tick, by the words that came for it.
    pub(super) fn tell(&mut self, words: Vec<Word>, tick: &Tick<'_>, roll: &Roll, clock: Clock) {
        let again = std::mem::take(&mut self.early).into_iter().map(|word| (true, word));
        let words: Vec<(bool, Word)> = again.chain(words.into_iter().map(|word| (false, word))).collect();
        let mut reported: BTreeMap<Key, u64> = BTreeMap::new();
        for (_, word) in &words {
            if let Word::Failed { key, .. } = word {
                *reported.entry(*key).or_default() += 1;
            }
        }
        let mut fresh = self.fresh(tick.kernel);
        // What an ended process did is counted to its last.
        let alive = |id: ProcessId| {
            tick.kernel.processes.iter().any(|process| process.id == id && process.ended.is_none())
        };
        let mut ahead: BTreeSet<ProcessId> = BTreeSet::new();
        for (again, word) in words {
            let process = word.process();
            match word {
                word if ahead.contains(&process) => self.early.push(word),
                Word::Failed { at, key, ask } => {
                    let left = fresh.entry(key).or_default();
                    if *left == 0 && !again && alive(process) {
                        ahead.insert(process);
                        self.early.push(Word::Failed { at, key, ask });
                        continue;
                    }
                    // Those that came too fast to be reported one by one go first, so that the last word is the last.
                    let first = left.saturating_sub(reported.remove(&key).unwrap_or(u64::MAX));
                    let count = first + (*left - first).min(1);
                    *left -= count;
                    self.records.failed(at, count, &ask);
                    let account = self.accounts.entry(key).or_default();
                    account.told += count;
                    account.last = Some((at, ask));
                }
                Word::Retried { success, .. } => {
                    self.records.succeeded(&success);
                }
            }
        }
        for (key, count) in fresh.into_iter().filter(|(_, count)| *count > 0) {
            if !ahead.contains(&key.0) {
                self.tell_unreported(key, count, tick, roll, clock);
            }
        }
        let there = |id: ProcessId| tick.kernel.processes.iter().any(|process| process.id == id);
        self.accounts.retain(|(id, _), _| there(*id));
    }

    /// Refusals that were counted and not told, of the processes of this sample.
    fn fresh(&self, kernel: &KernelSample) -> BTreeMap<Key, u64> {
        let mut counted: BTreeMap<Key, u64> = BTreeMap::new();
        for process in &kernel.processes {
            for row in process
                .failures
                .iter()
                .filter(|row| row.error == CudaError::OUT_OF_MEMORY && Arena::of(row.operation).is_some())
            {
                *counted.entry((process.id, row.operation)).or_default() += row.count;
            }
        }
        for (key, count) in &mut counted {
            let told = self.accounts.get(key).map_or(0, |account| account.told);
            *count = count.saturating_sub(told);
        }
        counted
    }

    /// By what is known of the last one like it; without one, after a little patience, as a refusal of which only the
    /// place is known.
    fn tell_unreported(&mut self, key: Key, count: u64, tick: &Tick<'_>, roll: &Roll, clock: Clock) {
        let (id, operation) = key;
        let account = self.accounts.entry(key).or_default();
        if let Some((at, ask)) = &account.last {
            self.records.failed(*at, count, ask);
            account.told += count;
            return;
        }
        let Some(process) = tick.kernel.processes.iter().find(|process| process.id == id) else { return };
        account.waited += 1;
        if process.ended.is_none() && account.waited <= PATIENCE {
            return;
        }
        let Some(tenant) = roll.of(id) else { return };
        let mut ask = Ask::new(tenant.clone(), operation, CudaError::OUT_OF_MEMORY);
        ask.process = Some(id);
        ask.gpu = process.failures.iter().find_map(|row| match &row.gpu {
            GpuRef::Known(gpu) if row.operation == operation => Some(gpu.clone()),
            _ => None,
        });
        self.records.failed(clock.unix, count, &ask);
        account.told += count;
    }
}

#[cfg(test)]
mod tests;
