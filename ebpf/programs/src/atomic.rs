//! Owns the BPF instructions that must be exactly these: atomics, which the target's `core` does not offer (its
//! `atomic_cas` is off), and a bound that the optimiser may not remove.
//! Refuses plain read-modify-write on shared counters: threads of one process book on several CPUs at once.
//!
//! `BPF_FETCH` and `BPF_CMPXCHG` need Linux 5.12 on x86-64 and 5.18 on arm64.

use core::arch::asm;

/// Adds without looking at the result.
///
/// # Safety
/// `target` points into a live map value and is 8-byte aligned.
#[inline(always)]
pub unsafe fn add(target: *mut u64, value: u64) {
    // SAFETY: the caller vouches for `target`; the instruction touches nothing else.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) target, in(reg) value) }
}

/// Adds and gives the value before.
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn fetch_add(target: *mut i64, value: i64) -> i64 {
    let mut before = value;
    // SAFETY: the caller vouches for `target`; the instruction touches nothing else.
    unsafe { asm!("{1} = atomic_fetch_add((u64 *)({0} + 0), {1})", in(reg) target, inout(reg) before) }
    before
}

/// Writes `new` if `target` still holds `expected`; gives what it held.
///
/// # Safety
/// As for [`add`].
#[inline(always)]
unsafe fn compare_exchange(target: *mut i64, expected: i64, new: i64) -> i64 {
    let mut held = expected;
    // SAFETY: the caller vouches for `target`; r0 is the instruction's own register for the comparand.
    unsafe { asm!("r0 = cmpxchg_64({0} + 0, r0, {1})", in(reg) target, in(reg) new, inout("r0") held) }
    held
}

/// Raises `target` to at least `value`. False when eight rivals in a row were faster.
///
/// # Safety
/// As for [`add`].
#[inline(always)]
pub unsafe fn raise(target: *mut i64, value: i64) -> bool {
    // SAFETY: the caller vouches for `target`.
    let mut held = unsafe { core::ptr::read_volatile(target) };
    for _ in 0..8 {
        if value <= held {
            return true;
        }
        // SAFETY: as above.
        let now = unsafe { compare_exchange(target, held, value) };
        if now == held {
            return true;
        }
        held = now;
    }
    false
}

/// `index & 3`, done where the verifier sees it although the compiler has proved it needless.
#[inline(always)]
pub fn below_four(index: u32) -> usize {
    let mut bounded = u64::from(index);
    // SAFETY: arithmetic on one register.
    unsafe { asm!("{0} &= 3", inout(reg) bounded) }
    bounded as usize
}

/// `index & 7`, as [`below_four`].
#[inline(always)]
pub fn below_eight(index: u64) -> usize {
    let mut bounded = index;
    // SAFETY: arithmetic on one register.
    unsafe { asm!("{0} &= 7", inout(reg) bounded) }
    bounded as usize
}

/// Bit 63, in a way that the compiler does not turn into a branch.
#[inline(always)]
pub fn top_bit(value: u64) -> u64 {
    let mut bit = value;
    // SAFETY: arithmetic on one register.
    unsafe { asm!("{0} >>= 63", inout(reg) bit) }
    bit
}

/// 1 when the values differ, without a branch.
#[inline(always)]
pub fn differ(one: i64, other: i64) -> u8 {
    let difference = (one ^ other) as u64;
    top_bit(difference | difference.wrapping_neg()) as u8
}
