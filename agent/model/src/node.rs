//! Owns the fold from processes to tenants, and the balance between ledger and NVML.
//! Refuses to average, guess or smooth: every published byte is one that a source reported.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Absence, DeviceSample, GpuId, GpuProcess, GpuSample, MemoryKind, ProcessId, Reading, Tenant, WaitClass,
    blame::{Blame, Edge, Share},
    excess::{Baselines, Excess},
    sample::{Confidence, GpuRef, Histogram, KernelSample, LedgerRow, ProcessSample, StackId},
    sharing::Sharing,
    view::{GpuView, MemoryTotals, Residual, TenantView},
    wait::class_of,
};

/// What the host room found: whose a process is, what a kernel stack means.
#[derive(Clone, Copy, Debug)]
pub struct Names<'a> {
    pub by_process: &'a BTreeMap<ProcessId, Tenant>,
    /// For NVML's lists, which know PIDs only.
    pub by_pid: &'a BTreeMap<u32, Tenant>,
    pub classes: &'a BTreeMap<StackId, WaitClass>,
}

/// What one step produced.
#[derive(Clone, Debug)]
pub struct Step {
    pub gpus: Vec<GpuView>,
    pub tenants: Vec<TenantView>,
    /// Processes whose final figures are in the accounts now: the kernel side may forget them.
    pub retired: BTreeSet<ProcessId>,
    /// Whose waits were whose doing, since the agent started and in this step alone.
    pub blame: BTreeMap<Edge, Share>,
    pub fresh_blame: BTreeMap<Edge, Share>,
    /// Shares of the blame that were folded for want of room.
    pub blame_folded: u64,
}

/// Every tenant's account since the agent started.
#[derive(Debug, Default)]
pub struct Node {
    accounts: BTreeMap<Tenant, Account>,
    blame: Blame,
    /// When the residuals were last computed: the time of the NVML poll they belong to.
    reconciled: Option<Duration>,
}

#[derive(Debug, Default)]
struct Account {
    ended: Totals,
    residual: BTreeMap<GpuId, Residual>,
    peaks: BTreeMap<(GpuRef, MemoryKind), u64>,
    /// As published: a better baseline must not make a counter fall.
    excess: Excess,
    ended_excess: Excess,
    seen: Duration,
}

/// Counters that only grow.
#[derive(Clone, Debug, Default)]
struct Totals {
    memory: BTreeMap<(GpuRef, MemoryKind), MemoryTotals>,
    operations: BTreeMap<(GpuRef, crate::Operation), u64>,
    failures: BTreeMap<(GpuRef, crate::Operation, crate::CudaError), u64>,
    latency: BTreeMap<crate::Operation, Histogram>,
    waits: BTreeMap<WaitClass, Histogram>,
}

impl Totals {
    fn add(&mut self, process: &ProcessSample, classes: &BTreeMap<StackId, WaitClass>) {
        for row in &process.ledger {
            // What an ended process still held died with it.
            let died = if process.ended.is_some() { row.live } else { 0 };
            let totals = self.memory.entry((row.gpu.clone(), row.kind)).or_default();
            totals.live += row.live - died;
            totals.allocated += row.allocated;
            totals.freed += row.freed + died;
            totals.allocations += row.allocations;
            totals.frees += row.frees;
        }
        for row in &process.calls {
            *self.operations.entry((row.gpu.clone(), row.operation)).or_default() += row.calls;
        }
        for row in &process.failures {
            *self.failures.entry((row.gpu.clone(), row.operation, row.error)).or_default() += row.count;
        }
        for row in &process.latency {
            self.latency.entry(row.operation).or_default().add(&row.histogram);
        }
        for row in &process.waits {
            let class = class_of(classes, row.stack);
            self.waits.entry(class).or_default().add(&row.histogram);
        }
    }
}

impl Account {
    /// The excess of ended and live processes. What was published before is not taken back.
    fn judge(&mut self, processes: &[&ProcessSample], baselines: &Baselines) {
        let mut now = self.ended_excess;
        for process in processes {
            now.add(baselines.excess(&process.effort));
        }
        self.excess.time_ns = self.excess.time_ns.max(now.time_ns);
        self.excess.calls = self.excess.calls.max(now.calls);
        self.excess.unjudged = now.unjudged;
    }
}

impl Node {
    /// One tick. `now` and `device.taken` are times since the agent started.
    pub fn advance(
        &mut self,
        kernel: &KernelSample,
        device: &DeviceSample,
        names: Names<'_>,
        now: Duration,
        retention: Duration,
    ) -> Step {
        let mut retired = BTreeSet::new();
        let mut live: BTreeMap<Tenant, Vec<&ProcessSample>> = BTreeMap::new();
        let baselines = Baselines::of(kernel);
        for process in &kernel.processes {
            if !process.calls_driver() {
                // Known for having woken somebody: a culprit may be, a GPU tenant is not.
                if process.ended.is_some() {
                    retired.insert(process.id);
                }
                continue;
            }
            let Some(tenant) = names.by_process.get(&process.id) else { continue };
            let account = self.accounts.entry(tenant.clone()).or_default();
            account.seen = now;
            raise_peaks(&mut account.peaks, &process.ledger);
            if process.ended.is_some() {
                account.ended.add(process, names.classes);
                account.ended_excess.add(baselines.excess(&process.effort));
                retired.insert(process.id);
            } else {
                live.entry(tenant.clone()).or_default().push(process);
            }
        }
        let owners = Owners::of(device, names.by_pid);
        if self.reconciled != Some(device.taken) {
            self.reconciled = Some(device.taken);
            self.reconcile(device, &owners, kernel);
        }
        for tenant in owners.tenants() {
            self.accounts.entry(tenant.clone()).or_default().seen = now;
        }
        let fresh_blame = self.blame.advance(kernel, names.by_process, names.classes, now, retention);
        self.accounts.retain(|_, account| now.saturating_sub(account.seen) <= retention);
        let views = self
            .accounts
            .iter_mut()
            .map(|(tenant, account)| {
                let processes = live.get(tenant).map_or(&[][..], Vec::as_slice);
                account.judge(processes, &baselines);
                view_of(tenant, account, processes, &owners, names.classes)
            })
            .collect();
        let gpus = device.gpus.iter().map(|gpu| gpu_view(gpu, now, device.taken)).collect();
        Step {
            gpus,
            tenants: views,
            retired,
            blame: self.blame.edges().clone(),
            fresh_blame,
            blame_folded: self.blame.folded,
        }
    }

    /// NVML minus ledger, process by process, at the time of an NVML poll.
    fn reconcile(&mut self, device: &DeviceSample, owners: &Owners<'_>, kernel: &KernelSample) {
        for account in self.accounts.values_mut() {
            account.residual.clear();
        }
        let by_pid: BTreeMap<u32, &ProcessSample> =
            kernel.processes.iter().filter(|process| process.ended.is_none()).map(|p| (p.tgid, p)).collect();
        for gpu in &device.gpus {
            let Ok(processes) = &gpu.processes else { continue };
            for process in processes {
                let (Ok(bytes), Some(tenant)) = (process.bytes, owners.owner(process)) else { continue };
                let account = self.accounts.entry(tenant).or_default();
                let residual = account.residual.entry(gpu.id.clone()).or_default();
                let bytes = signed(bytes);
                let Some(known) = by_pid.get(&process.pid) else {
                    residual.baseline += bytes;
                    continue;
                };
                let difference = bytes - signed(device_bytes(known, &gpu.id));
                match known.confidence {
                    Confidence::Complete if difference >= 0 => residual.context += difference,
                    Confidence::JoinedLate if difference >= 0 => residual.baseline += difference,
                    _ => residual.drift += difference,
                }
            }
        }
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Live device bytes of a process on one GPU: the kinds that NVML counts as the process's.
fn device_bytes(process: &ProcessSample, gpu: &GpuId) -> u64 {
    process
        .ledger
        .iter()
        .filter(|row| row.kind.is_device() && row.gpu == GpuRef::Known(gpu.clone()))
        .map(|row| row.live)
        .sum()
}

fn raise_peaks(peaks: &mut BTreeMap<(GpuRef, MemoryKind), u64>, ledger: &[LedgerRow]) {
    for row in ledger {
        let peak = peaks.entry((row.gpu.clone(), row.kind)).or_default();
        *peak = (*peak).max(row.peak);
    }
}

/// Whose the processes in NVML's lists are.
struct Owners<'a> {
    by_pid: &'a BTreeMap<u32, Tenant>,
    bytes: BTreeMap<Tenant, BTreeMap<GpuId, Reading<u64>>>,
    utilization: BTreeMap<Tenant, BTreeMap<GpuId, f64>>,
}

impl<'a> Owners<'a> {
    fn of(device: &DeviceSample, by_pid: &'a BTreeMap<u32, Tenant>) -> Self {
        let mut owners = Self { by_pid, bytes: BTreeMap::new(), utilization: BTreeMap::new() };
        for gpu in &device.gpus {
            for process in gpu.processes.iter().flatten() {
                let Some(tenant) = owners.owner(process) else { continue };
                let sum = owners.bytes.entry(tenant).or_default().entry(gpu.id.clone()).or_insert(Ok(0));
                *sum = match (*sum, process.bytes) {
                    (Ok(sum), Ok(bytes)) => Ok(sum + bytes),
                    // A part that is unknown makes the sum unknown.
                    (Err(reason), _) | (_, Err(reason)) => Err(reason),
                };
            }
            for process in gpu.process_utilization.iter().flatten() {
                if let Some(tenant) = by_pid.get(&process.pid) {
                    let of_tenant = owners.utilization.entry(tenant.clone()).or_default();
                    *of_tenant.entry(gpu.id.clone()).or_default() += process.sm;
                }
            }
        }
        owners
    }

    fn owner(&self, process: &GpuProcess) -> Option<Tenant> {
        if process.mps_server {
            return Some(Tenant::mps_server());
        }
        self.by_pid.get(&process.pid).cloned()
    }

    fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.bytes.keys()
    }
}

fn view_of(
    tenant: &Tenant,
    account: &mut Account,
    processes: &[&ProcessSample],
    owners: &Owners<'_>,
    classes: &BTreeMap<StackId, WaitClass>,
) -> TenantView {
    let mut totals = account.ended.clone();
    for process in processes {
        totals.add(process, classes);
    }
    // A tenant of several processes peaks at least where its sum was seen, and where each of them was.
    for (place, memory) in &mut totals.memory {
        let peak = account.peaks.entry(place.clone()).or_default();
        *peak = (*peak).max(memory.live);
        memory.peak = *peak;
    }
    // NVML lists somebody of whom no call was seen: what it holds came before the agent.
    let unseen = processes.is_empty() && owners.bytes.contains_key(tenant);
    let without = if unseen { Confidence::JoinedLate } else { Confidence::Complete };
    let confidence = processes.iter().map(|process| process.confidence).max().unwrap_or(without);
    TenantView {
        tenant: tenant.clone(),
        processes: u32::try_from(processes.len()).unwrap_or(u32::MAX),
        confidence,
        memory: totals.memory,
        process_bytes: owners.bytes.get(tenant).cloned().unwrap_or_default(),
        pool_reserved: pools(processes),
        residual: account.residual.clone(),
        utilization: owners.utilization.get(tenant).cloned().unwrap_or_default(),
        operations: totals.operations,
        failures: totals.failures,
        latency: totals.latency,
        waits: totals.waits,
        excess: account.excess,
        limits: Vec::new(),
        device_cgroup_bytes: BTreeMap::new(),
        notes: Vec::new(),
    }
}

/// What pools have taken is known of a process that was seen from its beginning and whose pools use no more than that.
fn pools(processes: &[&ProcessSample]) -> BTreeMap<GpuId, Option<u64>> {
    let mut reserved: BTreeMap<GpuId, Option<u64>> = BTreeMap::new();
    for process in processes {
        let used = |gpu: &GpuId| -> u64 {
            let rows = process.ledger.iter().filter(|row| row.kind == MemoryKind::Pool);
            rows.filter(|row| row.gpu == GpuRef::Known(gpu.clone())).map(|row| row.live).sum()
        };
        let complete = process.confidence == Confidence::Complete;
        for row in &process.pools {
            let known = row.bytes.filter(|bytes| complete && *bytes >= used(&row.gpu));
            let sum = reserved.entry(row.gpu.clone()).or_insert(Some(0));
            *sum = sum.zip(known).map(|(sum, bytes)| sum + bytes);
        }
        // Pools that take their memory in a way that was not seen.
        for row in process.ledger.iter().filter(|row| row.kind == MemoryKind::Pool && row.live > 0) {
            let GpuRef::Known(gpu) = &row.gpu else { continue };
            if !process.pools.iter().any(|pool| pool.gpu == *gpu) {
                reserved.insert(gpu.clone(), None);
            }
        }
    }
    reserved
}

/// R2: what is published as used, reserved, attributed and unattributed adds up, or is not published.
fn gpu_view(sample: &GpuSample, now: Duration, taken: Duration) -> GpuView {
    let reserved = sample.memory.and_then(|memory| memory.reserved.ok_or(Absence::SymbolMissing));
    let mut reason = None;
    let unattributed = match (&sample.memory, &sample.processes) {
        (Ok(memory), Ok(processes)) => {
            let known: u64 = processes.iter().filter_map(|process| process.bytes.ok()).sum();
            if processes.iter().any(|process| process.bytes.is_err()) {
                reason = Some("process_bytes_unknown");
            } else if processes.is_empty() && memory.used > 0 {
                reason = Some("no_process_visible");
            }
            memory.used.checked_sub(known).ok_or(Absence::Implausible)
        }
        (Err(absence), _) | (_, Err(absence)) => Err(*absence),
    };
    GpuView {
        sample: sample.clone(),
        age_seconds: now.saturating_sub(taken).as_secs_f64(),
        figure_ages: sample
            .read
            .iter()
            .map(|(figure, read)| (*figure, now.saturating_sub(*read).as_secs_f64()))
            .collect(),
        sharing: Sharing::UNKNOWN,
        reserved,
        unattributed,
        unattributed_reason: reason,
    }
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
