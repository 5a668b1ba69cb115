//! Owns every map, and the counting of what could not be done.
//! Refuses per-CPU scratch that is written: uprobe programs can be preempted by one another (Linux 6.0 and later).

use aya_ebpf::{
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf},
};
use cotenant_abi::{
    CallKey, Context, ContextLedger, ContextLedgerKey, Event, FailureKey, Handle, Latency, Ledger, LedgerKey,
    Loss, Mapping, Note, OrdinalKey, Physical, Pointer, PointerKey, Process, Settings, Thread,
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

/// Zeroes to insert from: too large for the 512-byte stack. Never written.
#[map]
pub static ZERO_THREAD: Array<Thread> = Array::with_max_entries(1, 0);
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
pub fn emit(event: Event) {
    match EVENTS.reserve::<Event>(0) {
        Some(mut slot) => {
            slot.write(event);
            slot.submit(0);
        }
        None => lose(Loss::RingFull),
    }
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
