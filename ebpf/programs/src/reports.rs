//! Owns what is worth a record of its own: failed allocations with who held the GPU then, and slow calls.
//! Refuses storms: a process reports at most once in [`PAUSE`]; the rest is counted.
//!
//! `bpf_for_each_map_elem` needs Linux 5.13.

use core::ffi::c_void;

use aya_ebpf::helpers::{bpf_get_current_pid_tgid, generated::bpf_for_each_map_elem};
use cotenant_abi::{
    Action, ByteRule, Cookie, EVENT_FAILED, EVENT_RETRIED, EVENT_SLOW, Failed, Frame, Holder,
    LEDGER_DEVICE_KINDS, Ledger, LedgerKey, MAX_HOLDERS, Note, Retried, Slow, Thread,
};

use crate::{
    atomic,
    calls::now,
    effort,
    maps::{EVENTS, LEDGER, PROCESSES, SETTINGS, emit, lose, note},
};

/// Nanoseconds between two reports of one process.
const PAUSE: u64 = 10_000_000;
/// The return code that says that memory was refused. Others are counted, and wrong arguments are nobody's fault.
const OUT_OF_MEMORY: u32 = 2;

/// Bytes that a call asks for or gives back, 0 when that is not among its arguments.
#[inline(always)]
pub fn bytes_of(frame: &Frame) -> u64 {
    if frame.stashed == 1 {
        return frame.stash.bytes;
    }
    let rule = Cookie(frame.cookie).rule();
    let [_, argument, width, height, ..] = frame.arguments;
    if rule == ByteRule::Argument as u8 {
        argument
    } else if rule == ByteRule::Argument32 as u8 {
        argument & 0xffff_ffff
    } else if rule == ByteRule::Pitch as u8 {
        width.wrapping_mul(height)
    } else {
        0
    }
}

/// Whether a process may report now, whose last report of that kind was at `reported_at`.
///
/// # Safety
/// `reported_at` is in a live map value.
#[inline(always)]
unsafe fn may_report(reported_at: *mut u64) -> bool {
    let now = now();
    // SAFETY: the caller vouches for it; two threads at once may both report.
    unsafe {
        if now.wrapping_sub(*reported_at) < PAUSE {
            return false;
        }
        *reported_at = now;
    }
    true
}

#[inline(never)]
fn may_report_failure(process: u64) -> bool {
    // SAFETY: a live map value.
    PROCESSES
        .get_ptr_mut(&process)
        .is_some_and(|entry| unsafe { may_report(&raw mut (*entry).failure_reported_at) })
}

#[inline(never)]
fn may_report_slow(process: u64) -> bool {
    // SAFETY: a live map value.
    PROCESSES
        .get_ptr_mut(&process)
        .is_some_and(|entry| unsafe { may_report(&raw mut (*entry).slow_reported_at) })
}

/// What a walk over the ledger gathers.
#[repr(C)]
struct Census {
    gpu: u32,
    /// 1 when a GPU is not known by its index to a process that holds memory.
    unplaced: u32,
    process: u64,
    total: u64,
    own: u64,
    holders: [Holder; MAX_HOLDERS],
}

#[inline(never)]
extern "C" fn visit(_: *mut c_void, key: *const LedgerKey, row: *const Ledger, census: *mut c_void) -> i64 {
    let census = census.cast::<Census>();
    // SAFETY: the helper hands a key and a value of `LEDGER`, and the pointer it was given.
    unsafe {
        let LedgerKey { process, gpu, kind, .. } = *key;
        let live = (*row).live;
        if live <= 0 || LEDGER_DEVICE_KINDS >> (kind & 31) & 1 == 0 {
            return 0;
        }
        (*census).unplaced |= u32::from(gpu >> 7);
        if u32::from(gpu) != (*census).gpu {
            return 0;
        }
        let bytes = live as u64;
        (*census).total = (*census).total.wrapping_add(bytes);
        if process == (*census).process {
            (*census).own = (*census).own.wrapping_add(bytes);
        }
        // Drops through the list, without a branch: the smallest falls out. A process has a row a kind, so it may
        // stand here twice.
        let mut left = Holder { process, bytes };
        for place in 0..MAX_HOLDERS {
            let held = (*census).holders[place];
            // Both are below 2^63: the difference is negative when `left` is larger.
            let swap = atomic::top_bit(held.bytes.wrapping_sub(left.bytes)).wrapping_neg();
            let (processes, sizes) = ((held.process ^ left.process) & swap, (held.bytes ^ left.bytes) & swap);
            (*census).holders[place] =
                Holder { process: held.process ^ processes, bytes: held.bytes ^ sizes };
            left = Holder { process: left.process ^ processes, bytes: left.bytes ^ sizes };
        }
    }
    0
}

/// Whether the call takes memory of a GPU, or makes a context there, which takes some as well.
#[inline(always)]
fn takes_memory(action: u8) -> bool {
    action == Action::Allocate as u8
        || action == Action::HandleCreate as u8
        || action == Action::ContextCreate as u8
        || action == Action::PrimaryRetain as u8
}

/// A call came back with an error.
#[inline(never)]
pub fn failed(process: u64, frame: *const Frame, gpu: u8, code: u32) {
    // SAFETY: the caller's frame is a live map value.
    let frame = unsafe { &*frame };
    let cookie = Cookie(frame.cookie);
    if code != OUT_OF_MEMORY || !takes_memory(cookie.action()) {
        return;
    }
    if let Some(row) = effort::row(process, cookie.operation(), bytes_of(frame)) {
        // SAFETY: a live map value.
        unsafe { (*row).failed_at = now() };
    }
    if !may_report_failure(process) {
        note(Note::FailureUnreported);
        return;
    }
    let mut census = Census {
        gpu: u32::from(gpu),
        unplaced: u32::from(gpu >> 7),
        process,
        total: 0,
        own: 0,
        holders: [Holder { process: 0, bytes: 0 }; MAX_HOLDERS],
    };
    // SAFETY: the callback has the signature the helper wants and `census` outlives the walk.
    unsafe {
        bpf_for_each_map_elem(
            (&raw const LEDGER).cast_mut().cast(),
            visit as *mut c_void,
            (&raw mut census).cast(),
            0,
        );
    }
    let Some(mut slot) = EVENTS.reserve::<Failed>(0) else {
        lose(cotenant_abi::Loss::RingFull);
        return;
    };
    // Field by field: a whole record is put together on the stack first, and the three frames on it here have 512 bytes
    // together, each rounded up to 32 by kernels such as 6.1.
    let record = slot.as_mut_ptr();
    // SAFETY: reserved for a `Failed`, and every field is written before it is submitted.
    unsafe {
        (*record).tag = EVENT_FAILED;
        (*record).tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
        (*record).process = process;
        (*record).at = now();
        (*record).requested = bytes_of(frame);
        (*record).total = census.total;
        (*record).code = code;
        (*record).operation = cookie.operation();
        (*record).gpu = gpu;
        (*record).unplaced = census.unplaced as u8;
        (*record).pad = 0;
        (*record).own = census.own;
        (*record).holders = census.holders;
    }
    slot.submit(0);
}

/// A call succeeded whose like had failed.
#[inline(never)]
pub fn retried(process: u64, operation: u8, bytes: u64, gpu: u8) {
    let Some(row) = effort::row(process, operation, bytes) else {
        return;
    };
    // SAFETY: a live map value; two threads at once may both report.
    let failed_at = unsafe { (*row).failed_at };
    // SAFETY: as above.
    unsafe { (*row).failed_at = 0 };
    emit(Retried {
        tag: EVENT_RETRIED,
        tgid: (bpf_get_current_pid_tgid() >> 32) as u32,
        process,
        at: now(),
        bytes,
        failed_at,
        operation,
        gpu,
        pad: [0; 6],
    });
}

/// An outermost call came back after `duration` ns.
#[inline(never)]
pub fn slow(thread: *const Thread, frame: *const Frame, gpu: u8, code: u32, duration: u64) {
    let Some(settings) = SETTINGS.get(0) else {
        return;
    };
    if settings.slow == 0 || duration < settings.slow {
        return;
    }
    // SAFETY: both point into one live map value that only this thread writes.
    let (process, wait, frame) = unsafe { ((*thread).process, &(*thread).wait, &*frame) };
    if !may_report_slow(process) {
        note(Note::SlowCallUnreported);
        return;
    }
    let ids = bpf_get_current_pid_tgid();
    emit(Slow {
        tag: EVENT_SLOW,
        tgid: (ids >> 32) as u32,
        process,
        start: frame.start,
        duration,
        blocked: frame.blocked,
        runnable: frame.runnable,
        bytes: bytes_of(frame),
        longest: wait.longest,
        longest_process: wait.longest_process,
        longest_stack: wait.longest_stack,
        tid: ids as u32,
        operation: Cookie(frame.cookie).operation(),
        gpu,
        shared: effort::disturbed(process, frame),
        pad: 0,
        code,
    });
}
