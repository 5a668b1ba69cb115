//! Owns reading the maps into a [`KernelSample`], and clearing what ended processes leave behind.
//! Refuses folding to tenants and any figure that the maps do not hold.

use std::collections::{BTreeMap, BTreeSet};

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray};
use cotenant_abi::{
    CallKey, Context, ContextLedger, ContextLedgerKey, END_EXEC, FailureKey, GPU_ORDINAL, GPU_UNKNOWN,
    HostCalls, Latency, Ledger, LedgerKey, Loss, MAX_GPUS, MemoryKind, Note, Operation, OrdinalKey,
    PointerKey, Pool, PoolKey, Process, Recent, Settings,
};
use cotenant_model::{
    CudaError, GpuId, ProcessId,
    sample::{
        CallRow, Confidence, End, FailureRow, GpuRef, Histogram, KernelSample, LatencyRow, LedgerRow,
        MapFill, PoolRow, ProcessSample,
    },
};

use crate::{
    KernelError, MapSizes,
    maps::{Table, take},
    raw::Raw,
    recent,
    rows::{Rows, WriteOff, WriteOffs},
    waits::Waits,
};

/// Where the linker puts globals that start as zeroes: `HostCalls` is the only one.
const GLOBALS: &str = ".bss";

/// Every map that is read, each taken out of the object.
pub struct Reader {
    processes: Table<u64, Process>,
    ledger: Table<LedgerKey, Ledger>,
    context_ledger: Table<ContextLedgerKey, ContextLedger>,
    calls: Table<CallKey, u64>,
    failures: Table<FailureKey, u64>,
    latency: Table<CallKey, Latency>,
    contexts: Table<PointerKey, Context>,
    primaries: Table<OrdinalKey, u64>,
    ordinals: Table<OrdinalKey, u64>,
    pools: Table<PoolKey, Pool>,
    recent: Table<u64, Recent>,
    lean: Table<u64, u64>,
    rows: Rows,
    /// Taken from ledger rows when the probes of their processes were shed.
    written_off: WriteOffs,
    waits: Waits,
    host: Array<MapData, Raw<HostCalls>>,
    gpus: HashMap<MapData, [u8; 16], u64>,
    next_gpu: Array<MapData, u64>,
    settings: Array<MapData, Raw<Settings>>,
    losses: PerCpuArray<MapData, u64>,
    notes: PerCpuArray<MapData, u64>,
}

impl Reader {
    pub(crate) fn take(
        ebpf: &mut aya::Ebpf,
        entries: &BTreeMap<&'static str, u32>,
        sizes: MapSizes,
    ) -> Result<Self, KernelError> {
        let size = |name| entries.get(name).copied().unwrap_or(0);
        macro_rules! table {
            ($name:literal) => {
                Table::take(ebpf, $name, size($name))?
            };
        }
        Ok(Self {
            processes: table!("PROCESSES"),
            ledger: table!("LEDGER"),
            context_ledger: table!("CONTEXT_LEDGER"),
            calls: table!("CALLS"),
            failures: table!("FAILURES"),
            latency: table!("LATENCY"),
            contexts: table!("CONTEXTS"),
            primaries: table!("PRIMARIES"),
            ordinals: table!("ORDINALS"),
            pools: table!("POOLS"),
            recent: table!("RECENT"),
            lean: table!("LEAN"),
            rows: Rows::take(ebpf, entries, sizes)?,
            written_off: WriteOffs::new(),
            waits: Waits::take(ebpf, entries)?,
            host: plain(ebpf, GLOBALS)?,
            gpus: plain(ebpf, "GPUS")?,
            next_gpu: plain(ebpf, "NEXT_GPU")?,
            settings: plain(ebpf, "SETTINGS")?,
            losses: plain(ebpf, "LOSSES")?,
            notes: plain(ebpf, "NOTES")?,
        })
    }

    /// Tells the kernel side which GPUs exist. Afterwards no other UUID is believed.
    pub fn know_gpus(&mut self, gpus: &[GpuId]) -> Result<(), KernelError> {
        let name = "GPUS";
        let failed = |source| KernelError::Map { name, source };
        let uuids: BTreeSet<[u8; 16]> = gpus.iter().filter_map(GpuId::uuid).collect();
        let mut taken = BTreeSet::new();
        let known: Vec<_> = self.gpus.iter().filter_map(Result::ok).collect();
        for (uuid, index) in known {
            if uuids.contains(&uuid) {
                taken.insert(index);
            } else {
                // Learned from a tenant before NVML answered: it may be anything.
                self.gpus.remove(&uuid).map_err(failed)?;
            }
        }
        for uuid in uuids {
            if self.gpus.get(&uuid, 0).is_ok() {
                continue;
            }
            let Some(free) = (0..u64::from(MAX_GPUS)).find(|index| !taken.contains(index)) else { break };
            self.gpus.insert(uuid, free, 0).map_err(failed)?;
            taken.insert(free);
        }
        let next = taken.last().map_or(0, |last| last + 1);
        self.next_gpu.set(0, next, 0).map_err(failed)?;
        self.settle(|settings| settings.uuids_closed = u8::from(!gpus.is_empty()))
    }

    /// The programs only read their settings.
    fn settle(&mut self, change: impl FnOnce(&mut Settings)) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { name: "SETTINGS", source };
        let Raw(mut settings) = self.settings.get(&0, 0).map_err(failed)?;
        change(&mut settings);
        self.settings.set(0, Raw(settings), 0).map_err(failed)
    }

    /// Whose calls are counted and booked, but not timed.
    pub fn spare(&mut self, processes: &BTreeSet<ProcessId>) -> Result<(), KernelError> {
        self.lean.retain(|id, _| processes.contains(&ProcessId(*id)))?;
        for process in processes {
            self.lean.put(process.0, 1)?;
        }
        self.settle(|settings| settings.lean = u64::from(!processes.is_empty()))
    }

    /// Probes on stream-ordered calls are about to come or go, or have settled.
    pub fn expect_shedding(&mut self, expected: bool) -> Result<(), KernelError> {
        self.settle(|settings| settings.shedding = expected.into())
    }

    /// The stream-ordered calls of these processes are not seen, or were not: what their pools hold is not known.
    pub fn write_off(&mut self, processes: &BTreeSet<ProcessId>) -> Result<(), KernelError> {
        for (place, off) in self.rows.write_off(processes)? {
            let sum = self.written_off.entry(place).or_default();
            sum.bytes += off.bytes;
            sum.rows += off.rows;
        }
        let removed = self.rows.removed();
        self.settle(|settings| settings.swept = removed)
    }

    /// Every process that called the driver, ended ones included until [`Reader::retire`].
    ///
    /// `only` is the node's only GPU, if it has just one: then an unresolved ordinal can be no other.
    pub fn read(&mut self, only: Option<&GpuId>) -> Result<KernelSample, KernelError> {
        let gpus = Gpus::read(self, only)?;
        let mut samples: BTreeMap<u64, ProcessSample> = BTreeMap::new();
        let processes = self.processes.rows()?;
        for &(id, ref process) in &processes {
            samples.insert(id, sample_of(id, process));
        }
        let ledger = self.ledger.rows()?;
        let mut folded: BTreeMap<(u64, GpuRef, MemoryKind), LedgerRow> = BTreeMap::new();
        for (key, value) in &ledger {
            let Some(kind) = MemoryKind::from_tag(key.kind) else { continue };
            let gpu = gpus.resolve(key.process, key.gpu, kind.is_host());
            let off = self.written_off.get(&(key.process, key.gpu, key.kind)).copied().unwrap_or_default();
            add_ledger(
                folded.entry((key.process, gpu.clone(), kind)).or_insert_with(|| empty_row(gpu, kind)),
                value,
                off,
            );
        }
        for ((process, ..), row) in folded {
            if let Some(sample) = samples.get_mut(&process) {
                sample.ledger.push(row);
            }
        }
        for (key, pool) in self.pools.rows()? {
            if let (GpuRef::Known(gpu), Some(sample)) =
                (gpus.resolve(key.process, key.gpu, false), samples.get_mut(&key.process))
            {
                let bytes = u64::try_from(pool.bytes).ok().filter(|_| pool.unsure == 0);
                sample.pools.push(PoolRow { gpu, bytes });
            }
        }
        let mut calls: BTreeMap<(u64, GpuRef, Operation), u64> = BTreeMap::new();
        let call_rows = self.calls.rows()?;
        for (key, count) in &call_rows {
            let Some(operation) = Operation::from_tag(key.operation) else { continue };
            let gpu = gpus.resolve(key.process, key.gpu, false);
            *calls.entry((key.process, gpu, operation)).or_default() += count;
        }
        for ((process, gpu, operation), calls) in calls {
            if let Some(sample) = samples.get_mut(&process) {
                sample.calls.push(CallRow { gpu, operation, calls });
            }
        }
        let mut failures: BTreeMap<(u64, GpuRef, Operation, u32), u64> = BTreeMap::new();
        let failure_rows = self.failures.rows()?;
        for (key, count) in &failure_rows {
            let Some(operation) = Operation::from_tag(key.operation) else { continue };
            let gpu = gpus.resolve(key.process, key.gpu, false);
            *failures.entry((key.process, gpu, operation, key.code)).or_default() += count;
        }
        for ((process, gpu, operation, code), count) in failures {
            if let Some(sample) = samples.get_mut(&process) {
                sample.failures.push(FailureRow { gpu, operation, error: CudaError(code), count });
            }
        }
        let latency_rows = self.latency.rows()?;
        for (key, value) in &latency_rows {
            let Some(operation) = Operation::from_tag(key.operation) else { continue };
            if let Some(sample) = samples.get_mut(&key.process) {
                let histogram = Histogram { count: value.count, sum_ns: value.sum, buckets: value.buckets };
                sample.latency.push(LatencyRow { operation, histogram });
            }
        }
        let fill = |name, entries, capacity| MapFill { name, entries, capacity };
        let (stacks, [waits, blame, effort]) = self.waits.read(&mut samples)?;
        let Raw(host) = self.host.get(&0, 0).map_err(|source| KernelError::Map { name: GLOBALS, source })?;
        let in_flight = u64::try_from(host.in_flight).unwrap_or(0);
        let (stalls, at_work) = if in_flight > 0 { self.waits.stalls()? } else { Default::default() };
        let mut maps = vec![
            fill(self.processes.name(), processes.len() as u64, self.processes.capacity()),
            fill(self.ledger.name(), ledger.len() as u64, self.ledger.capacity()),
            fill(self.calls.name(), call_rows.len() as u64, self.calls.capacity()),
            fill(self.failures.name(), failure_rows.len() as u64, self.failures.capacity()),
            fill(self.latency.name(), latency_rows.len() as u64, self.latency.capacity()),
            waits,
            blame,
            effort,
        ];
        maps.extend(self.rows.fill(&host));
        for (id, _) in processes.iter().filter(|(_, process)| process.ended != 0) {
            if let (Some(recent), Some(sample)) = (self.recent.get(*id)?, samples.get_mut(id)) {
                sample.last_calls = recent::calls(&recent, |code| gpus.resolve(*id, code, false));
            }
        }
        Ok(KernelSample {
            processes: samples.into_values().collect(),
            stacks,
            in_flight,
            stalls,
            at_work,
            losses: totals(&self.losses, "LOSSES", Loss::ALL, |loss| *loss as u32)?,
            notes: totals(&self.notes, "NOTES", Note::ALL, |note| *note as u32)?,
            maps,
            libraries: Vec::new(),
        })
    }

    /// What a GPU code in a report means.
    pub fn gpu(&self, process: ProcessId, code: u8, only: Option<&GpuId>) -> Result<GpuRef, KernelError> {
        Ok(Gpus::read(self, only)?.resolve(process.0, code, false))
    }

    /// Which GPU a process calls this. The only GPU can be no other than the first.
    pub fn gpu_of_ordinal(
        &self,
        process: ProcessId,
        ordinal: u32,
        only: Option<&GpuId>,
    ) -> Result<GpuRef, KernelError> {
        let code = u8::try_from(ordinal).ok().filter(|ordinal| ordinal & GPU_ORDINAL == 0);
        let Some(code) = code.map(|ordinal| ordinal | GPU_ORDINAL).filter(|code| *code != GPU_UNKNOWN) else {
            return Ok(GpuRef::Unknown);
        };
        Ok(Gpus::read(self, only.filter(|_| ordinal == 0))?.resolve(process.0, code, false))
    }

    /// Forgets processes whose final figures have been taken.
    pub fn retire(&mut self, ended: &BTreeSet<ProcessId>) -> Result<(), KernelError> {
        self.waits.retire(ended)?;
        if !ended.is_empty() {
            let alive = |process: u64| !ended.contains(&ProcessId(process));
            self.ledger.retain(|key, _| alive(key.process))?;
            self.context_ledger.retain(|key, _| alive(key.process))?;
            self.calls.retain(|key, _| alive(key.process))?;
            self.failures.retain(|key, _| alive(key.process))?;
            self.latency.retain(|key, _| alive(key.process))?;
            self.contexts.retain(|key, _| alive(key.process))?;
            self.primaries.retain(|key, _| alive(key.process))?;
            self.ordinals.retain(|key, _| alive(key.process))?;
            self.pools.retain(|key, _| alive(key.process))?;
            for id in ended {
                self.processes.remove(id.0)?;
                self.recent.remove(id.0)?;
                self.lean.remove(id.0)?;
            }
            self.written_off.retain(|(process, ..), _| alive(*process));
            self.rows.retire(ended)?;
        }
        if self.rows.due() {
            let (contexts, processes) = (&self.contexts, &self.processes);
            self.rows.sweep(
                || Ok(contexts.rows()?.into_iter().map(|(_, context)| context.id).collect()),
                || processes.rows(),
            )?;
            let removed = self.rows.removed();
            self.settle(|settings| settings.swept = removed)?;
        }
        Ok(())
    }
}

fn plain<M>(ebpf: &mut aya::Ebpf, name: &'static str) -> Result<M, KernelError>
where
    M: TryFrom<Map, Error = MapError>,
{
    M::try_from(take(ebpf, name)?).map_err(|source| KernelError::Map { name, source })
}

fn totals<T: Copy>(
    array: &PerCpuArray<MapData, u64>,
    name: &'static str,
    all: &[T],
    index: impl Fn(&T) -> u32,
) -> Result<Vec<(T, u64)>, KernelError> {
    all.iter()
        .map(|reason| {
            let cells = array.get(&index(reason), 0).map_err(|source| KernelError::Map { name, source })?;
            Ok((*reason, cells.iter().sum()))
        })
        .collect()
}

/// What GPU codes mean at this moment.
struct Gpus {
    by_index: BTreeMap<u8, GpuId>,
    by_ordinal: BTreeMap<(u64, u64), u8>,
    only: Option<GpuId>,
}

impl Gpus {
    fn read(reader: &Reader, only: Option<&GpuId>) -> Result<Self, KernelError> {
        let mut by_index = BTreeMap::new();
        for row in &reader.gpus {
            let (uuid, index) = row.map_err(|source| KernelError::Map { name: "GPUS", source })?;
            by_index.insert(u8::try_from(index).unwrap_or(GPU_UNKNOWN), GpuId::from_uuid(uuid));
        }
        let by_ordinal = reader
            .ordinals
            .rows()?
            .into_iter()
            .map(|(key, index)| ((key.process, key.ordinal), u8::try_from(index).unwrap_or(GPU_UNKNOWN)))
            .collect();
        Ok(Self { by_index, by_ordinal, only: only.cloned() })
    }

    fn resolve(&self, process: u64, code: u8, host: bool) -> GpuRef {
        if host {
            return GpuRef::Host;
        }
        let index = if code != GPU_UNKNOWN && code & GPU_ORDINAL != 0 {
            self.by_ordinal.get(&(process, u64::from(code & !GPU_ORDINAL))).copied()
        } else {
            Some(code)
        };
        index
            .and_then(|index| self.by_index.get(&index))
            .or(self.only.as_ref())
            .map_or(GpuRef::Unknown, |gpu| GpuRef::Known(gpu.clone()))
    }
}

fn sample_of(id: u64, process: &Process) -> ProcessSample {
    let comm = process.comm.split(|byte| *byte == 0).next().unwrap_or_default();
    let confidence = if process.lost > 0 {
        Confidence::EventsLost
    } else if process.first_operation == Operation::Init as u8 {
        Confidence::Complete
    } else {
        Confidence::JoinedLate
    };
    let early =
        [Operation::Init, Operation::PrimaryCtxRetain, Operation::CtxCreate, Operation::DeviceGetUuid];
    let before_memory =
        Operation::from_tag(process.first_operation).is_some_and(|operation| early.contains(&operation));
    let end = if process.end_reason == END_EXEC { End::Exec } else { End::Exit };
    ProcessSample {
        id: ProcessId(id),
        tgid: process.tgid,
        uid: process.uid,
        cgroup_id: process.cgroup_id,
        comm: String::from_utf8_lossy(comm).into_owned(),
        first_seen: process.first_seen,
        ended: (process.ended != 0).then_some(end),
        ended_at: process.ended,
        confidence,
        before_memory,
        last_calls: Vec::new(),
        pools: Vec::new(),
        ledger: Vec::new(),
        calls: Vec::new(),
        failures: Vec::new(),
        latency: Vec::new(),
        waits: Vec::new(),
        blame: Vec::new(),
        effort: Vec::new(),
    }
}

fn add_ledger(row: &mut LedgerRow, value: &Ledger, off: WriteOff) {
    // Read while it moves: a free may be seen before its allocation. Never below zero (C13).
    let live = u64::try_from(value.live).unwrap_or(0);
    // What was written off may have died with its context meanwhile, in the programs' own account.
    let off = WriteOff { bytes: off.bytes.min(live), ..off };
    row.live += live - off.bytes;
    // Rows fold when a GPU was booked by its ordinal first: their peaks may lie apart, so this is at least.
    row.peak = row.peak.max(u64::try_from(value.peak).unwrap_or(0));
    row.allocated += value.allocated;
    row.freed += value.freed + off.bytes;
    row.allocations += value.allocations;
    row.frees += (value.frees + off.rows).min(value.allocations.max(value.frees));
}

fn empty_row(gpu: GpuRef, kind: MemoryKind) -> LedgerRow {
    LedgerRow { gpu, kind, live: 0, peak: 0, allocated: 0, freed: 0, allocations: 0, frees: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus() -> Gpus {
        let id = GpuId::from_uuid([7; 16]);
        Gpus { by_index: BTreeMap::from([(3, id)]), by_ordinal: BTreeMap::from([((1, 0), 3)]), only: None }
    }

    #[test]
    fn an_ordinal_is_never_taken_for_an_index() {
        let known = GpuRef::Known(GpuId::from_uuid([7; 16]));
        assert_eq!(gpus().resolve(1, 3, false), known);
        assert_eq!(gpus().resolve(1, GPU_ORDINAL, false), known);
        assert_eq!(gpus().resolve(1, GPU_ORDINAL | 3, false), GpuRef::Unknown);
        assert_eq!(gpus().resolve(2, GPU_ORDINAL, false), GpuRef::Unknown);
        assert_eq!(gpus().resolve(1, GPU_UNKNOWN, false), GpuRef::Unknown);
        assert_eq!(gpus().resolve(1, 3, true), GpuRef::Host);
    }

    #[test]
    fn on_a_node_with_one_gpu_nothing_is_unknown() {
        let only = GpuId::from_uuid([9; 16]);
        let gpus = Gpus { only: Some(only.clone()), ..gpus() };
        assert_eq!(gpus.resolve(2, GPU_UNKNOWN, false), GpuRef::Known(only));
    }

    #[test]
    fn c13_a_balance_caught_in_motion_is_never_an_underflow() {
        let mut row = empty_row(GpuRef::Unknown, MemoryKind::Device);
        add_ledger(
            &mut row,
            &Ledger { live: -4096, peak: 0, allocated: 0, freed: 4096, allocations: 0, frees: 1 },
            WriteOff::default(),
        );
        assert_eq!(row.live, 0);
    }

    #[test]
    fn c67_what_is_written_off_counts_as_freed_and_no_more_than_lives() {
        let ledger =
            |live, freed| Ledger { live, peak: 9, allocated: 9, freed, allocations: 9, frees: freed };
        let off = WriteOff { bytes: 4, rows: 4 };
        let mut row = empty_row(GpuRef::Unknown, MemoryKind::Pool);
        add_ledger(&mut row, &ledger(6, 3), off);
        assert_eq!((row.live, row.freed, row.frees), (2, 7, 7));
        // Their context died, and took them along.
        let mut row = empty_row(GpuRef::Unknown, MemoryKind::Pool);
        add_ledger(&mut row, &ledger(0, 9), off);
        assert_eq!((row.live, row.freed, row.frees), (0, 9, 9));
    }
}
