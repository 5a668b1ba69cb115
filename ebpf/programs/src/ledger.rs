//! Owns the arithmetic of bytes: what is live, peak, allocated and freed, by process, GPU and kind.
//! Refuses to let a balance go below zero through us: every decrement has its own increment behind it.

use cotenant_abi::{ContextLedger, ContextLedgerKey, Ledger, LedgerKey, Loss, Process};

use crate::{
    atomic,
    maps::{CONTEXT_LEDGER, LEDGER, NOEXIST, PROCESSES, lose},
};

#[inline(always)]
fn ledger_of(key: &LedgerKey) -> Option<*mut Ledger> {
    if let Some(ledger) = LEDGER.get_ptr_mut(key) {
        return Some(ledger);
    }
    let zero = Ledger { live: 0, peak: 0, allocated: 0, freed: 0, allocations: 0, frees: 0 };
    let _ = LEDGER.insert(key, &zero, NOEXIST);
    LEDGER.get_ptr_mut(key)
}

/// Marks a process whose ledger is no longer exact.
#[inline(never)]
pub fn mark_lost(process: u64) {
    if let Some(entry) = PROCESSES.get_ptr_mut(&process) {
        let entry: *mut Process = entry;
        // SAFETY: a live map value; a lost increment among threads still leaves it non-zero.
        unsafe { (*entry).lost = (*entry).lost.saturating_add(1) };
    }
}

/// Bytes come to life. False when they could not be booked with their context: a free is then not to ask for it.
#[inline(never)]
pub fn credit(process: u64, context: u64, gpu: u8, kind: u8, bytes: u64) -> bool {
    let Some(ledger) = ledger_of(&LedgerKey { process, gpu, kind, pad: [0; 6] }) else {
        lose(Loss::LedgerMapFull);
        mark_lost(process);
        return false;
    };
    // SAFETY: a live map value.
    unsafe {
        let live = atomic::fetch_add(&raw mut (*ledger).live, bytes as i64).wrapping_add(bytes as i64);
        if !atomic::raise(&raw mut (*ledger).peak, live) {
            lose(Loss::PeakContended);
        }
        atomic::add(&raw mut (*ledger).allocated, bytes);
        atomic::add(&raw mut (*ledger).allocations, 1);
    }
    if context != 0 {
        let key = ContextLedgerKey { process, context, gpu, kind, pad: [0; 6] };
        if CONTEXT_LEDGER.get_ptr(&key).is_none() {
            let _ = CONTEXT_LEDGER.insert(&key, &ContextLedger { live: 0, count: 0 }, NOEXIST);
        }
        match CONTEXT_LEDGER.get_ptr_mut(&key) {
            // SAFETY: a live map value.
            Some(held) => unsafe {
                atomic::fetch_add(&raw mut (*held).live, bytes as i64);
                atomic::fetch_add(&raw mut (*held).count, 1);
            },
            None => {
                lose(Loss::LedgerMapFull);
                mark_lost(process);
                return false;
            }
        }
    }
    true
}

#[inline(always)]
fn debit_ledger(process: u64, gpu: u8, kind: u8, bytes: u64, entries: u64) {
    let Some(ledger) = LEDGER.get_ptr_mut(&LedgerKey { process, gpu, kind, pad: [0; 6] }) else {
        return;
    };
    // SAFETY: a live map value.
    unsafe {
        atomic::fetch_add(&raw mut (*ledger).live, (bytes as i64).wrapping_neg());
        atomic::add(&raw mut (*ledger).freed, bytes);
        atomic::add(&raw mut (*ledger).frees, entries);
    }
}

/// Bytes die by an explicit free. False, and nothing done, when their context took them along before.
#[inline(never)]
pub fn debit(process: u64, context: u64, gpu: u8, kind: u8, bytes: u64) -> bool {
    if context != 0 {
        let key = ContextLedgerKey { process, context, gpu, kind, pad: [0; 6] };
        let Some(held) = CONTEXT_LEDGER.get_ptr_mut(&key) else {
            return false;
        };
        // SAFETY: a live map value.
        unsafe {
            atomic::fetch_add(&raw mut (*held).live, (bytes as i64).wrapping_neg());
            atomic::fetch_add(&raw mut (*held).count, -1);
        }
    }
    debit_ledger(process, gpu, kind, bytes, 1);
    true
}

/// Everything of one kind that a context held on one GPU dies with it.
#[inline(never)]
pub fn debit_context(process: u64, context: u64, gpu: u8, kind: u8) {
    let key = ContextLedgerKey { process, context, gpu, kind, pad: [0; 6] };
    let Some(held) = CONTEXT_LEDGER.get_ptr(&key) else {
        return;
    };
    // SAFETY: a live map value.
    let (live, entries) = unsafe { ((*held).live, (*held).count) };
    let _ = CONTEXT_LEDGER.remove(&key);
    if entries > 0 {
        debit_ledger(process, gpu, kind, live as u64, entries as u64);
    }
}
