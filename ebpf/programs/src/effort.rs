//! Owns what calls take of a CPU: undisturbed, which is what others are held against, and disturbed.
//! Refuses to say how much of that is contention: that is an estimate, made in `agent/model/src/excess.rs`.

use cotenant_abi::{Effort, EffortKey, Frame, Loss};

use crate::{
    atomic,
    maps::{EFFORT, HOST, NOEXIST, lose},
};

/// A process that takes the driver's locks outside traced calls is seen only when somebody sleeps for it: for so many
/// nanoseconds afterwards it is taken to be still there, spinning and spun for. Long rather than short: a call that is
/// called disturbed for nothing adds what it took beyond its baseline, which is nothing.
const STRANGER: u64 = 100_000_000;

/// 1 when another process was in a call meanwhile, or had what somebody waited for a moment before.
#[inline(always)]
pub fn disturbed(process: u64, closed: &Frame) -> u8 {
    closed.shared | u8::from(HOST.met_stranger(process, closed.start.saturating_sub(STRANGER)))
}

/// The row of calls like this one.
#[inline(always)]
pub fn row(process: u64, operation: u8, bytes: u64) -> Option<*mut Effort> {
    let size_bits = (64 - bytes.leading_zeros()) as u8;
    let key = EffortKey { process, operation, size_bits, pad: [0; 6] };
    if let Some(known) = EFFORT.get_ptr_mut(&key) {
        return Some(known);
    }
    let zero = Effort { solo_calls: 0, solo_time: 0, shared_calls: 0, shared_time: 0, failed_at: 0 };
    let _ = EFFORT.insert(&key, &zero, NOEXIST);
    let made = EFFORT.get_ptr_mut(&key);
    if made.is_none() {
        lose(Loss::EffortMapFull);
    }
    made
}

/// Time on the CPU inside a call that succeeded, apart by whether it was disturbed. 1 when such a call had
/// failed before.
#[inline(never)]
pub fn record(process: u64, operation: u8, bytes: u64, shared: u8, busy: u64) -> u64 {
    let Some(row) = row(process, operation, bytes) else {
        return 0;
    };
    // SAFETY: a live map value.
    unsafe {
        if shared == 1 {
            atomic::add(&raw mut (*row).shared_calls, 1);
            atomic::add(&raw mut (*row).shared_time, busy);
        } else {
            atomic::add(&raw mut (*row).solo_calls, 1);
            atomic::add(&raw mut (*row).solo_time, busy);
        }
        u64::from((*row).failed_at != 0)
    }
}
