//! Owns a traced call from entry to return: threads, frames, counts, failures, latency.
//! Refuses to book anything before the return code, and to trust that every entry has a return.
//!
//! Relies on: uprobe attach cookies (Linux 5.15), the C calling convention of libcuda's exports.

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        generated::{bpf_get_attach_cookie, bpf_ktime_get_ns},
    },
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use cotenant_abi::{
    CallKey, Cookie, EVENT_DUPLICATE_LIBRARY, EVENT_PROCESS_SEEN, Event, FailureKey, Frame, GPU_UNKNOWN,
    LATENCY_BUCKETS, LATENCY_SHIFT, Latency, Loss, MAX_DEPTH, NO_OPERATION, Note, Operation, Process, TABLES,
    Thread,
};

use crate::{
    atomic, contexts, effort, ledger,
    maps::{
        ANY, CALLS, FAILURES, HOST, LATENCY, LEAN, NOEXIST, PROCESS_IDS, PROCESSES, SETTINGS, SHADOWED,
        THREADS, ZERO_THREAD, count, emit, histogram, lose, note,
    },
    recent, reports,
};

#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
fn cookie_of<C: EbpfContext>(ctx: &C) -> Cookie {
    // SAFETY: the context is the one this program was called with.
    Cookie(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) })
}

#[inline(always)]
fn stack_pointer(ctx: &ProbeContext) -> u64 {
    // SAFETY: the context of a uprobe program is a `pt_regs`, readable as a whole.
    #[cfg(bpf_target_arch = "x86_64")]
    unsafe {
        (*ctx.regs).rsp
    }
    // SAFETY: as above.
    #[cfg(bpf_target_arch = "aarch64")]
    unsafe {
        (*ctx.regs).sp
    }
}

/// The frame of a thread at `depth - 1`.
///
/// # Safety
/// `thread` is a live map value and `depth` is 1 to [`MAX_DEPTH`].
#[inline(always)]
pub unsafe fn frame_below(thread: *mut Thread, depth: u32) -> *mut Frame {
    const { assert!(MAX_DEPTH == 4) };
    let index = atomic::below_four(depth.wrapping_sub(1));
    // SAFETY: the index is within the array.
    unsafe { (&raw mut (*thread).frames).cast::<Frame>().add(index) }
}

/// First contact of a process with the driver, or with somebody who waits for it ([`NO_OPERATION`]).
#[inline(never)]
pub fn meet(tgid: u32, operation: u8) -> u64 {
    if let Some(known) = PROCESS_IDS.get_ptr(&tgid) {
        // SAFETY: a live map value.
        return unsafe { *known };
    }
    let first_seen = now();
    // Unique for one PID unless it execs twice within 16 us; wraps after 208 days.
    let id = u64::from(tgid) << 40 | (first_seen >> 14) & ((1 << 40) - 1);
    if PROCESS_IDS.insert(&tgid, &id, NOEXIST).is_err() {
        // A sibling thread was first, or the map is full.
        return match PROCESS_IDS.get_ptr(&tgid) {
            // SAFETY: a live map value.
            Some(known) => unsafe { *known },
            None => {
                lose(Loss::ProcessMapFull);
                0
            }
        };
    }
    // SAFETY: a helper without arguments.
    let cgroup_id = unsafe { bpf_get_current_cgroup_id() };
    let process = Process {
        first_seen,
        ended: 0,
        cgroup_id,
        sole_context: 0,
        tgid,
        uid: bpf_get_current_uid_gid() as u32,
        first_operation: operation,
        end_reason: 0,
        many_contexts: 0,
        pad: 0,
        lost: 0,
        comm: bpf_get_current_comm().unwrap_or([0; 16]),
        in_flight: 0,
        entries: 0,
        failure_reported_at: 0,
        slow_reported_at: 0,
        rows: [0; TABLES],
    };
    if PROCESSES.insert(&id, &process, ANY).is_err() {
        lose(Loss::ProcessMapFull);
        let _ = PROCESS_IDS.remove(&tgid);
        return 0;
    }
    emit(Event {
        tag: EVENT_PROCESS_SEEN,
        tgid,
        process: id,
        at: first_seen,
        cgroup_id,
        first: 0,
        second: 0,
    });
    id
}

#[inline(always)]
fn thread_of(tid: u32, tgid: u32, operation: u8) -> Option<*mut Thread> {
    if let Some(thread) = THREADS.get_ptr_mut(&tid) {
        return Some(thread);
    }
    let process = meet(tgid, operation);
    if process == 0 {
        return None;
    }
    if let Some(entry) = PROCESSES.get_ptr_mut(&process) {
        // SAFETY: a live map value; siblings that come at once name calls of the same moment.
        unsafe {
            if (*entry).first_operation == NO_OPERATION {
                (*entry).first_operation = operation;
            }
        }
    }
    // SAFETY: ZERO_THREAD has exactly one entry and nobody writes it.
    let zero = unsafe { &*ZERO_THREAD.get_ptr(0)? };
    if THREADS.insert(&tid, zero, NOEXIST).is_err() {
        lose(Loss::ThreadMapFull);
        ledger::mark_lost(process);
        return None;
    }
    let thread = THREADS.get_ptr_mut(&tid)?;
    // SAFETY: a live map value that only this thread touches.
    unsafe { (*thread).process = process };
    Some(thread)
}

/// A thread's outermost call begins. Gives how many calls other processes have begun so far, and in the sign
/// whether one of theirs is in flight: then it is negative.
#[inline(never)]
fn begin(process: u64, first: bool) -> i64 {
    let Some(entry) = PROCESSES.get_ptr_mut(&process) else {
        return 0;
    };
    if first {
        HOST.count_thread(1);
    }
    HOST.count_entry();
    // SAFETY: a live map value.
    let (own_in_flight, own_entries) = unsafe {
        let in_flight = atomic::fetch_add(&raw mut (*entry).in_flight, i64::from(first)) + i64::from(first);
        (in_flight, atomic::fetch_add(&raw mut (*entry).entries, 1) + 1)
    };
    let others = HOST.entries() - own_entries;
    if HOST.in_flight() > own_in_flight { -1 - others } else { others }
}

/// A thread's outermost call has returned. Gives how many calls other processes have begun so far.
#[inline(never)]
fn end(process: u64) -> i64 {
    // As in `begin`: without its process a call was not counted.
    let Some(entry) = PROCESSES.get_ptr_mut(&process) else {
        return 0;
    };
    HOST.count_thread(-1);
    // SAFETY: a live map value.
    let own = unsafe {
        atomic::fetch_add(&raw mut (*entry).in_flight, -1);
        (*entry).entries
    };
    HOST.entries() - own
}

/// A thread died inside a traced call.
#[inline(never)]
pub fn abandon(process: u64) {
    end(process);
}

/// Opens a frame. `None` when the call is not to be followed; why is counted.
#[inline(always)]
pub fn enter(ctx: &ProbeContext) -> Option<(*mut Thread, *mut Frame)> {
    let ids = bpf_get_current_pid_tgid();
    let (tid, tgid) = (ids as u32, (ids >> 32) as u32);
    // SAFETY: a live map value.
    if unsafe { (*SETTINGS.get_ptr(0)?).own_tgid } == tgid {
        return None;
    }
    note(Note::ProbeHits);
    let cookie = cookie_of(ctx);
    let thread = thread_of(tid, tgid, cookie.operation())?;
    let stack = stack_pointer(ctx);
    // SAFETY: `thread` is a live map value that only this thread touches.
    let mut depth = unsafe { (*thread).depth };
    let first = depth == 0;
    // Frames above this stack pointer belong to calls that never returned (longjmp, a lost return probe).
    for _ in 0..MAX_DEPTH {
        if depth == 0 {
            break;
        }
        // SAFETY: 1 <= depth <= MAX_DEPTH.
        let top = unsafe { &*frame_below(thread, depth) };
        if top.stack > stack {
            break;
        }
        let held = Cookie(top.cookie);
        if top.stack == stack && held.symbol() == cookie.symbol() && held.library() != cookie.library() {
            return shadow(held.library(), cookie.library());
        }
        if top.stack == stack && held.symbol() != cookie.symbol() {
            // A tail call into another traced function: nested, on the same stack pointer.
            break;
        }
        lose(Loss::EntryWithoutReturn);
        // SAFETY: a live map value.
        ledger::mark_lost(unsafe { (*thread).process });
        depth -= 1;
    }
    if depth as usize >= MAX_DEPTH {
        lose(Loss::NestedTooDeep);
        // SAFETY: a live map value.
        ledger::mark_lost(unsafe { (*thread).process });
        return None;
    }
    depth += 1;
    // SAFETY: 1 <= depth <= MAX_DEPTH; the frame is ours until the call returns.
    let frame = unsafe {
        (*thread).depth = depth;
        frame_below(thread, depth)
    };
    // SAFETY: as above.
    unsafe {
        (*frame).cookie = cookie.0;
        (*frame).stack = stack;
        (*frame).stashed = 0;
        (*frame).gpu = GPU_UNKNOWN;
        (*frame).mapped_kib = 0;
        (*frame).ranged = 0;
        (*frame).blocked = (*thread).wait.blocked;
        (*frame).runnable = (*thread).wait.runnable;
        (*frame).arguments = [
            ctx.arg(0).unwrap_or(0),
            ctx.arg(1).unwrap_or(0),
            ctx.arg(2).unwrap_or(0),
            ctx.arg(3).unwrap_or(0),
            ctx.arg(4).unwrap_or(0),
            ctx.arg(5).unwrap_or(0),
        ];
        let start = now();
        (*frame).start = start;
        (*frame).outermost = 0;
        if depth == 1 {
            let others = begin((*thread).process, first);
            (*frame).outermost = 1;
            (*frame).shared = atomic::top_bit(others as u64) as u8;
            (*frame).others = if others < 0 { -1 - others } else { others };
            let wait = &raw mut (*thread).wait;
            (*wait).turns.since = start;
            (*wait).turns.process = (*thread).process;
            (*wait).turns.before[0].process = 0;
            (*wait).longest = 0;
            (*wait).longest_process = 0;
            (*wait).longest_stack = -1;
            (*wait).mode = 0;
            (*wait).blocked_at = 0;
            (*wait).ready_at = 0;
            (*wait).early = 0;
        }
    }
    Some((thread, frame))
}

/// One inode attached through two files (overlayfs): the second is told to go, its hits do not count.
#[inline(never)]
fn shadow<T>(stays: u32, goes: u32) -> Option<T> {
    note(Note::DuplicateAttachment);
    if SHADOWED.get_ptr(&goes).is_none() && SHADOWED.insert(&goes, &stays, NOEXIST).is_ok() {
        emit(Event {
            tag: EVENT_DUPLICATE_LIBRARY,
            tgid: 0,
            process: 0,
            at: now(),
            cgroup_id: 0,
            first: goes,
            second: stays,
        });
    }
    None
}

/// Whether a return may lack its entry: probes on such calls come or go at this moment.
#[inline(always)]
fn expected(operation: u8) -> bool {
    let streamed = operation == Operation::MemAllocAsync as u8
        || operation == Operation::MemAllocFromPoolAsync as u8
        || operation == Operation::MemFreeAsync as u8;
    streamed && SETTINGS.get(0).is_some_and(|settings| settings.shedding != 0)
}

/// Closes the frame of a returning call and gives it with its 32-bit return code.
#[inline(always)]
pub fn leave(ctx: &RetProbeContext) -> Option<(*mut Thread, *mut Frame, u32)> {
    let ids = bpf_get_current_pid_tgid();
    let (tid, tgid) = (ids as u32, (ids >> 32) as u32);
    let cookie = cookie_of(ctx);
    let Some(thread) = THREADS.get_ptr_mut(&tid) else {
        // SAFETY: a live map value.
        if unsafe { (*SETTINGS.get_ptr(0)?).own_tgid } != tgid {
            note(Note::LateReturn);
        }
        return None;
    };
    // SAFETY: a live map value that only this thread touches.
    let mut depth = unsafe { (*thread).depth };
    let mut found = false;
    for _ in 0..MAX_DEPTH {
        if depth == 0 {
            break;
        }
        // SAFETY: 1 <= depth <= MAX_DEPTH.
        let frame = unsafe { frame_below(thread, depth) };
        // SAFETY: as above.
        if unsafe { (*frame).cookie } == cookie.0 {
            found = true;
            break;
        }
        if SHADOWED.get_ptr(&cookie.library()).is_some() {
            return None;
        }
        depth -= 1;
    }
    if !found {
        if SHADOWED.get_ptr(&cookie.library()).is_none() {
            if expected(cookie.operation()) {
                note(Note::LateReturn);
            } else {
                lose(Loss::ReturnWithoutEntry);
            }
            // SAFETY: a live map value.
            ledger::mark_lost(unsafe { (*thread).process });
        }
        return None;
    }
    // SAFETY: 1 <= depth <= MAX_DEPTH.
    let frame = unsafe { frame_below(thread, depth) };
    // SAFETY: both point into one live map value that only this thread touches.
    unsafe { close(thread, frame, depth - 1) };
    Some((thread, frame, ctx.ret::<u64>() as u32))
}

/// What a returning call leaves to its thread and to the call around it.
///
/// # Safety
/// Both are live map values that only this thread touches, and `depth` is below [`MAX_DEPTH`].
#[inline(always)]
unsafe fn close(thread: *mut Thread, frame: *mut Frame, depth: u32) {
    // SAFETY: the caller vouches for both.
    unsafe {
        (*thread).depth = depth;
        (*frame).blocked = (*thread).wait.blocked.wrapping_sub((*frame).blocked);
        (*frame).runnable = (*thread).wait.runnable.wrapping_sub((*frame).runnable);
        if depth == 0 {
            let others = end((*thread).process);
            (*frame).shared |= atomic::differ(others, (*frame).others);
            return;
        }
        // An outer call learns what an inner one saw at the kernel boundary.
        let outer = frame_below(thread, depth);
        if (*outer).gpu == GPU_UNKNOWN {
            (*outer).gpu = (*frame).gpu;
        }
        (*outer).mapped_kib = (*outer).mapped_kib.saturating_add((*frame).mapped_kib);
    }
}

/// Counts and times a call whose GPU is known by now.
#[inline(always)]
pub fn finish(thread: *const Thread, frame: *const Frame, gpu: u8, code: u32) {
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, closed) = unsafe { ((*thread).process, &*frame) };
    let operation = Cookie(closed.cookie).operation();
    let duration = now().saturating_sub(closed.start);
    record(process, operation, gpu, code);
    if code != 0 {
        reports::failed(process, frame, gpu, code);
    }
    recent::remember(process, frame, gpu, code);
    if lean(process) {
        return;
    }
    time(process, operation, duration);
    if closed.outermost == 1 {
        if code == 0 {
            let busy = duration.saturating_sub(closed.blocked).saturating_sub(closed.runnable);
            let bytes = reports::bytes_of(closed);
            if effort::record(process, operation, bytes, effort::disturbed(process, closed), busy) == 1 {
                reports::retried(process, operation, bytes, gpu);
            }
        }
        reports::slow(thread, frame, gpu, code, duration);
    }
}

/// A function of its own, with scalars only: the verifier walks it once a call, not once a path.
#[inline(never)]
fn record(process: u64, operation: u8, gpu: u8, code: u32) {
    count(&CALLS, &CallKey { process, operation, gpu, pad: [0; 6] }, Loss::CallMapFull);
    if code != 0 {
        // `CUresult` ends at 999: a library that invents codes gets one row for all of them.
        let code = if code > 999 { 0xffff } else { code };
        count(&FAILURES, &FailureKey { process, operation, gpu, pad: [0; 2], code }, Loss::FailureMapFull);
    }
}

/// Whether calls of this process are not to be timed.
#[inline(always)]
fn lean(process: u64) -> bool {
    SETTINGS.get(0).is_some_and(|settings| settings.lean != 0) && LEAN.get_ptr(&process).is_some()
}

#[inline(never)]
fn time(process: u64, operation: u8, duration: u64) {
    match histogram(&LATENCY, &CallKey { process, operation, gpu: 0, pad: [0; 6] }) {
        Some(latency) => sort_into(latency, duration),
        None => lose(Loss::LatencyMapFull),
    }
}

/// One duration more in a histogram.
#[inline(always)]
pub fn sort_into(latency: *mut Latency, duration: u64) {
    let bits = 64 - duration.leading_zeros();
    let bucket = (bits.saturating_sub(LATENCY_SHIFT) as usize).min(LATENCY_BUCKETS - 1);
    // SAFETY: a live map value; the bucket is within the array.
    unsafe {
        atomic::add(&raw mut (*latency).count, 1);
        atomic::add(&raw mut (*latency).sum, duration);
        atomic::add((&raw mut (*latency).buckets).cast::<u64>().add(bucket), 1);
    }
}

#[uprobe]
pub fn call_enter(ctx: ProbeContext) -> u32 {
    let _ = enter(&ctx);
    0
}

/// Calls that move nothing: counted and timed.
#[uretprobe]
pub fn count_return(ctx: RetProbeContext) -> u32 {
    if let Some((thread, frame, code)) = leave(&ctx) {
        // SAFETY: both point into one live map value that only this thread touches.
        let place = contexts::place(thread, unsafe { &*frame });
        finish(thread, frame, place.gpu, code);
    }
    0
}
