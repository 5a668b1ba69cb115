//! Owns the count of rows in the maps that live memory fills, and clearing those of the dead.
//! Refuses to write what the programs count with: what it removes it says in counters of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use cotenant_abi::{
    Chunk, Handle, HostCalls, Mapping, MemoryKind, Physical, Pointer, PointerKey, Process, Swept, TABLES,
    Table as Counted,
};
use cotenant_model::{ProcessId, sample::MapFill};

use crate::{KernelError, MapSizes, maps::Table};

/// A sweep takes at most this share of the time.
const SHARE: u32 = 100;
/// Contexts that come and go leave pointers behind without any process ending.
const ALWAYS: Duration = Duration::from_mins(1);
const INTERVAL: Duration = Duration::from_secs(10);

/// What the agent took from a ledger row because it can no longer know that it lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WriteOff {
    pub(crate) bytes: u64,
    pub(crate) rows: u64,
}

/// By process, GPU code and kind.
pub(crate) type WriteOffs = BTreeMap<(u64, u8, u8), WriteOff>;

pub(crate) struct Rows {
    sizes: MapSizes,
    pointers: Table<PointerKey, Pointer>,
    handles: Table<PointerKey, Handle>,
    physicals: Table<PointerKey, Physical>,
    mappings: Table<PointerKey, Mapping>,
    chunks: Table<PointerKey, Chunk>,
    swept: Table<u64, Swept>,
    /// Removed by the agent, of all processes. The programs' settings have them too.
    removed: [u64; TABLES],
    swept_at: Instant,
    cost: Duration,
    stale: bool,
}

impl Rows {
    pub(crate) fn take(
        ebpf: &mut aya::Ebpf,
        entries: &BTreeMap<&'static str, u32>,
        sizes: MapSizes,
    ) -> Result<Self, KernelError> {
        let size = |name| entries.get(name).copied().unwrap_or(0);
        Ok(Self {
            sizes,
            pointers: Table::take(ebpf, "POINTERS", size("POINTERS"))?,
            handles: Table::take(ebpf, "HANDLES", size("HANDLES"))?,
            physicals: Table::take(ebpf, "PHYSICALS", size("PHYSICALS"))?,
            mappings: Table::take(ebpf, "MAPPINGS", size("MAPPINGS"))?,
            chunks: Table::take(ebpf, "CHUNKS", size("CHUNKS"))?,
            swept: Table::take(ebpf, "SWEPT", size("SWEPT"))?,
            removed: [0; TABLES],
            swept_at: Instant::now(),
            cost: Duration::ZERO,
            stale: false,
        })
    }

    pub(crate) fn removed(&self) -> [u64; TABLES] {
        self.removed
    }

    /// How full each map is. A row that comes or goes while this is read may be missed.
    pub(crate) fn fill(&self, host: &HostCalls) -> impl Iterator<Item = MapFill> {
        Counted::ALL.iter().map(|table| {
            let at = *table as usize;
            let rows = u64::try_from(host.rows[at]).unwrap_or(0).saturating_sub(self.removed[at]);
            MapFill { name: table.as_str(), entries: rows, capacity: self.sizes.rows(*table).into() }
        })
    }

    /// Forgets what is known of processes that are gone.
    pub(crate) fn retire(&mut self, ended: &BTreeSet<ProcessId>) -> Result<(), KernelError> {
        for process in ended {
            self.swept.remove(process.0)?;
        }
        self.stale |= !ended.is_empty();
        Ok(())
    }

    pub(crate) fn due(&self) -> bool {
        let due = INTERVAL.max(self.cost * SHARE);
        self.stale && self.swept_at.elapsed() >= due || self.swept_at.elapsed() >= due.max(ALWAYS)
    }

    /// Clears pointers and handles of processes and contexts that are gone.
    ///
    /// Rows are read before the lists that judge them, so that a row of a process or context born under way is
    /// never judged by a list that is too old to know it.
    pub(crate) fn sweep(
        &mut self,
        contexts: impl FnOnce() -> Result<BTreeSet<u64>, KernelError>,
        processes: impl FnOnce() -> Result<Vec<(u64, Process)>, KernelError>,
    ) -> Result<(), KernelError> {
        let begun = Instant::now();
        let pointers = self.pointers.rows()?;
        let handles = self.handles.rows()?;
        let physicals = self.physicals.rows()?;
        let mappings = self.mappings.rows()?;
        let chunks = self.chunks.rows()?;
        let contexts = contexts()?;
        let processes = processes()?;
        let alive: BTreeSet<u64> = processes.iter().map(|(id, _)| *id).collect();
        // An address of a dead context may come back to life while we look; only a map that fills is worth that, or a
        // process that comes near its quota.
        let filling = pointers.len() as u64 > self.pointers.capacity() / 2;
        let near = u64::from(self.sizes.pointers) * u64::from(self.sizes.share) / cotenant_abi::WHOLE / 4;
        let crowded: BTreeSet<u64> = processes
            .iter()
            .filter(|(_, process)| {
                process.rows[Counted::Pointers as usize] > i64::try_from(near).unwrap_or(0)
            })
            .map(|(id, _)| *id)
            .collect();
        self.stale = false;
        for (key, pointer) in pointers {
            let orphan = pointer.context != 0 && !contexts.contains(&pointer.context);
            let alive = alive.contains(&key.process);
            if !alive || orphan && (filling || crowded.contains(&key.process)) {
                let gone = self.pointers.remove(key)?;
                self.note(key.process, Counted::Pointers, gone, alive)?;
            }
        }
        for (key, _) in handles.into_iter().filter(|(key, _)| !alive.contains(&key.process)) {
            let gone = self.handles.remove(key)?;
            self.note(key.process, Counted::Handles, gone, false)?;
        }
        for (key, _) in physicals.into_iter().filter(|(key, _)| !alive.contains(&key.process)) {
            let gone = self.physicals.remove(key)?;
            self.note(key.process, Counted::Physicals, gone, false)?;
        }
        for (key, _) in mappings.into_iter().filter(|(key, _)| !alive.contains(&key.process)) {
            let gone = self.mappings.remove(key)?;
            self.note(key.process, Counted::Mappings, gone, false)?;
        }
        for (key, _) in chunks.into_iter().filter(|(key, _)| !alive.contains(&key.process)) {
            let gone = self.chunks.remove(key)?;
            self.note(key.process, Counted::Chunks, gone, false)?;
        }
        self.swept_at = Instant::now();
        self.cost = begun.elapsed();
        Ok(())
    }

    /// Removes the pool pointers of these processes: their frees may not have been seen. Gives what that takes from
    /// their ledgers.
    pub(crate) fn write_off(&mut self, processes: &BTreeSet<ProcessId>) -> Result<WriteOffs, KernelError> {
        let mut offs = WriteOffs::new();
        for (key, pointer) in self.pointers.rows()? {
            if pointer.kind == MemoryKind::Pool as u8
                && processes.contains(&ProcessId(key.process))
                && self.pointers.remove(key)?
            {
                self.note(key.process, Counted::Pointers, true, true)?;
                let off = offs.entry((key.process, pointer.gpu, pointer.kind)).or_default();
                off.bytes += pointer.bytes;
                off.rows += 1;
            }
        }
        Ok(offs)
    }

    /// A row is gone by the agent's hand. Of a process that lives its quota has to know.
    fn note(&mut self, process: u64, table: Counted, gone: bool, alive: bool) -> Result<(), KernelError> {
        if !gone {
            return Ok(());
        }
        self.removed[table as usize] += 1;
        if alive {
            let mut swept = self.swept.get(process)?.unwrap_or(Swept { rows: [0; TABLES] });
            swept.rows[table as usize] += 1;
            self.swept.put(process, swept)?;
        }
        Ok(())
    }
}
