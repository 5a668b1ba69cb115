//! Owns every map, and the counting of what could not be done.
//! Refuses per-CPU scratch that is written: uprobe programs can be preempted by one another (Linux 6.0 and later).

use core::cell::UnsafeCell;

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, RingBuf, StackTrace},
};
use cotenant_abi::{
    Blame, BlameKey, CallKey, Chunk, Context, ContextLedger, ContextLedgerKey, Effort, EffortKey, FailureKey,
    Handle, HostCalls, Latency, Ledger, LedgerKey, Loss, Mapping, Note, OrdinalKey, Physical, Pointer,
    PointerKey, Pool, PoolKey, Process, Recent, Settings, Swept, TABLES, Thread, Turns, Victim, WaitKey,
};

use crate::atomic;

/// Capacities are the defaults; the agent sets its own at load.
#[map]
pub static SETTINGS: Array<Settings> = Array::with_max_entries(1, 0);
#[map]
pub static PROCESS_IDS: HashMap<u32, u64> = HashMap::with_max_entries(8192, 0);
#[map]
pub static PROCESSES: HashMap<u64, Process> = HashMap::with_max_entries(16_384, 0);
#[map]
pub static THREADS: HashMap<u32, Thread> = HashMap::with_max_entries(16_384, 0);
#[map]
pub static POINTERS: HashMap<PointerKey, Pointer> = HashMap::with_max_entries(262_144, 0);
#[map]
pub static HANDLES: HashMap<PointerKey, Handle> = HashMap::with_max_entries(65_536, 0);
#[map]
pub static PHYSICALS: HashMap<PointerKey, Physical> = HashMap::with_max_entries(65_536, 0);
#[map]
pub static MAPPINGS: HashMap<PointerKey, Mapping> = HashMap::with_max_entries(65_536, 0);
#[map]
pub static CONTEXTS: HashMap<PointerKey, Context> = HashMap::with_max_entries(16_384, 0);
#[map]
pub static PRIMARIES: HashMap<OrdinalKey, u64> = HashMap::with_max_entries(16_384, 0);
/// GPU index by process and CUDA ordinal, learned from the driver.
#[map]
pub static ORDINALS: HashMap<OrdinalKey, u64> = HashMap::with_max_entries(16_384, 0);
#[map]
pub static LEDGER: HashMap<LedgerKey, Ledger> = HashMap::with_max_entries(32_768, 0);
#[map]
pub static CONTEXT_LEDGER: HashMap<ContextLedgerKey, ContextLedger> = HashMap::with_max_entries(32_768, 0);
#[map]
pub static CALLS: HashMap<CallKey, u64> = HashMap::with_max_entries(65_536, 0);
#[map]
pub static FAILURES: HashMap<FailureKey, u64> = HashMap::with_max_entries(16_384, 0);
/// Key: [`CallKey`] with `gpu` 0.
#[map]
pub static LATENCY: HashMap<CallKey, Latency> = HashMap::with_max_entries(32_768, 0);
#[map]
pub static GPUS: HashMap<[u8; 16], u64> = HashMap::with_max_entries(cotenant_abi::MAX_GPUS, 0);
#[map]
pub static NEXT_GPU: Array<u64> = Array::with_max_entries(1, 0);
/// Libraries found to share their code with another attached one.
#[map]
pub static SHADOWED: HashMap<u32, u32> = HashMap::with_max_entries(1024, 0);
#[map]
pub static LOSSES: PerCpuArray<u64> = PerCpuArray::with_max_entries(cotenant_abi::LOSSES, 0);
#[map]
pub static NOTES: PerCpuArray<u64> = PerCpuArray::with_max_entries(cotenant_abi::NOTES, 0);
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(256 * 1024, 0);

/// Key: where a thread of a process was blocked. Value: how long.
#[map]
pub static WAITS: HashMap<WaitKey, Latency> = HashMap::with_max_entries(16_384, 0);
#[map]
pub static BLAME: HashMap<BlameKey, Blame> = HashMap::with_max_entries(65_536, 0);
#[map]
pub static EFFORT: HashMap<EffortKey, Effort> = HashMap::with_max_entries(65_536, 0);
/// Ids of processes whose last thread is on its way out: what it lets go it lets go after its end was seen.
#[map]
pub static ENDED: LruHashMap<u32, u64> = LruHashMap::with_max_entries(4096, 0);
#[map]
pub static TURNS: LruHashMap<u32, Turns> = LruHashMap::with_max_entries(4096, 0);
#[map]
pub static STACKS: StackTrace = StackTrace::with_max_entries(8192, 0);
/// Threads that were chosen to die for memory. Key: thread id. One that was ending already when it was chosen is
/// never reported, so the oldest must be able to go.
#[map]
pub static VICTIMS: LruHashMap<u32, Victim> = LruHashMap::with_max_entries(4096, 0);

#[map]
pub static CHUNKS: HashMap<PointerKey, Chunk> = HashMap::with_max_entries(65_536, 0);
#[map]
pub static POOLS: HashMap<PoolKey, Pool> = HashMap::with_max_entries(16_384, 0);
/// Written by the agent alone.
#[map]
pub static SWEPT: HashMap<u64, Swept> = HashMap::with_max_entries(16_384, 0);
/// Processes of which calls are counted and booked, but not timed: their probes have become dear. Written by the agent.
#[map]
pub static LEAN: HashMap<u64, u64> = HashMap::with_max_entries(16_384, 0);
#[map]
pub static RECENT: HashMap<u64, Recent> = HashMap::with_max_entries(16_384, 0);

/// What the scheduler hooks look at first: a global, for its address is in the instruction.
pub struct Host(UnsafeCell<HostCalls>);

// SAFETY: changed by atomic instructions only.
unsafe impl Sync for Host {}

pub static HOST: Host = Host(UnsafeCell::new(HostCalls {
    in_flight: 0,
    entries: 0,
    stranger_at: 0,
    stranger: 0,
    rows: [0; TABLES],
}));

impl Host {
    #[inline(always)]
    pub fn in_flight(&self) -> i64 {
        // SAFETY: an aligned word of a live map value.
        unsafe { core::ptr::read_volatile(&raw const (*self.0.get()).in_flight) }
    }

    #[inline(always)]
    pub fn entries(&self) -> i64 {
        // SAFETY: as above.
        unsafe { core::ptr::read_volatile(&raw const (*self.0.get()).entries) }
    }

    /// Whether a process other than `process` was met outside traced calls since `since`.
    #[inline(always)]
    pub fn met_stranger(&self, process: u64, since: u64) -> bool {
        // SAFETY: as above.
        let (at, stranger) = unsafe {
            let host = self.0.get();
            (
                core::ptr::read_volatile(&raw const (*host).stranger_at),
                core::ptr::read_volatile(&raw const (*host).stranger),
            )
        };
        at > since && stranger != process
    }

    /// Whichever CPU writes last, it is a moment ago.
    #[inline(always)]
    pub fn meet_stranger(&self, process: u64, at: u64) {
        // SAFETY: as above.
        unsafe {
            let host = self.0.get();
            core::ptr::write_volatile(&raw mut (*host).stranger, process);
            core::ptr::write_volatile(&raw mut (*host).stranger_at, at);
        }
    }

    /// A thread is in a traced call from now on (1), or no longer (-1).
    #[inline(always)]
    pub fn count_thread(&self, change: i64) {
        // SAFETY: as above.
        unsafe { atomic::fetch_add(&raw mut (*self.0.get()).in_flight, change) };
    }

    #[inline(always)]
    pub fn count_entry(&self) {
        // SAFETY: as above.
        unsafe { atomic::fetch_add(&raw mut (*self.0.get()).entries, 1) };
    }

    /// Rows come or go at `place`, which is below [`TABLES`]. Gives how many there were.
    #[inline(always)]
    pub fn count_rows(&self, place: usize, rows: i64) -> i64 {
        // SAFETY: as above.
        unsafe { atomic::fetch_add((&raw mut (*self.0.get()).rows).cast::<i64>().add(place), rows) }
    }
}

/// Zeroes to insert from: too large for the 512-byte stack. Never written.
#[map]
pub static ZERO_THREAD: Array<Thread> = Array::with_max_entries(1, 0);
#[map]
pub static ZERO_TURNS: Array<Turns> = Array::with_max_entries(1, 0);
#[map]
pub static ZERO_RECENT: Array<Recent> = Array::with_max_entries(1, 0);
#[map]
pub static ZERO_LATENCY: Array<Latency> = Array::with_max_entries(1, 0);

pub const ANY: u64 = 0;
pub const NOEXIST: u64 = 1;

#[inline(always)]
fn bump(array: &PerCpuArray<u64>, index: u32) {
    if let Some(cell) = array.get_ptr_mut(index) {
        // SAFETY: `cell` is a live map value.
        unsafe { atomic::add(cell, 1) }
    }
}

#[inline(always)]
pub fn lose(reason: Loss) {
    bump(&LOSSES, reason as u32);
}

#[inline(always)]
pub fn note(fact: Note) {
    bump(&NOTES, fact as u32);
}

#[inline(always)]
pub fn emit<T: 'static>(event: T) {
    match EVENTS.reserve::<T>(0) {
        Some(mut slot) => {
            slot.write(event);
            slot.submit(0);
        }
        None => lose(Loss::RingFull),
    }
}

/// The histogram under a key, inserted if it is new. `None`: the map is full.
#[inline(always)]
pub fn histogram<K>(map: &HashMap<K, Latency>, key: &K) -> Option<*mut Latency> {
    if let Some(known) = map.get_ptr_mut(key) {
        return Some(known);
    }
    // SAFETY: ZERO_LATENCY has exactly one entry and nobody writes it.
    let zero = unsafe { &*ZERO_LATENCY.get_ptr(0)? };
    let _ = map.insert(key, zero, NOEXIST);
    map.get_ptr_mut(key)
}

/// Adds one to a counter map, inserting it if it is new.
#[inline(always)]
pub fn count<K>(map: &HashMap<K, u64>, key: &K, full: Loss) {
    if let Some(cell) = map.get_ptr_mut(key) {
        // SAFETY: `cell` is a live map value.
        unsafe { atomic::add(cell, 1) };
        return;
    }
    if map.insert(key, &1, NOEXIST).is_ok() {
        return;
    }
    // Another CPU inserted it first, or the map is full.
    match map.get_ptr_mut(key) {
        // SAFETY: `cell` is a live map value.
        Some(cell) => unsafe { atomic::add(cell, 1) },
        None => lose(full),
    }
}
