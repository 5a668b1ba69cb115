//! Owns waits inside traced calls: when a thread leaves its CPU, who wakes it, whose turn it was until then.
//! Refuses classes and names, and everything while no traced call is in flight on the host.
//!
//! Whose turn: whoever wakes a blocked thread had what it waited for since that one's own turn began, that is since
//! it was itself woken by a process or, failing that, since its call began. Before that it was the turn of whoever
//! woke the waker, and so on, [`MAX_TURNS`] back; what is older is nobody's, or the victim's own process's if every turn was.
//! An interrupt or a kernel thread ends a
//! wait without taking a turn: a holder that waits for the device goes on holding. A thread in no traced call has its
//! turn since a thread in one woke it, if one did, else since ever.
//!
//! Relies on raw tracepoints: `sched_switch(bool preempt, task *prev, task *next[, unsigned prev_state])` (the last
//! since Linux 5.18), `sched_waking(task *)`, `contention_begin(void *lock, unsigned flags)` and
//! `contention_end(void *lock, int)` (Linux 5.19); on `task_struct.{pid, __state, flags}` by this kernel's BTF.

use aya_ebpf::{
    EbpfContext,
    helpers::{
        bpf_get_current_pid_tgid, bpf_probe_read_kernel,
        generated::{bpf_get_current_task, bpf_get_stack},
    },
    macros::raw_tracepoint,
    programs::{RawTracePointContext, tracing::StackIdContext},
};
use cotenant_abi::{
    Blame, BlameKey, END_EXIT, Loss, MAX_TURNS, NO_OPERATION, Note, Settings, Thread, Turn, WAKER_DEVICE,
    WAKER_KERNEL, WAKER_PROCESS, WAKER_UNSEEN, Wait, WaitKey,
};

use crate::{
    atomic,
    calls::{frame_below, meet, now, sort_into},
    lifecycle,
    maps::{
        ANY, BLAME, ENDED, HOST, NOEXIST, PROCESS_IDS, SETTINGS, STACKS, THREADS, TURNS, WAITS, ZERO_TURNS,
        histogram, lose, note,
    },
};

const PF_EXITING: u32 = 0x4;
const PF_KTHREAD: u32 = 0x0020_0000;
/// Nanoseconds from waking to running on a host with a CPU to spare; 5,000 on an H200 host on average.
const WAKING: u64 = 50_000;
/// Nanoseconds between a thread's leaving the run queue and the hook that reports it, at most.
const JUST_BEFORE: u64 = 100_000;
const WAKER_FRAMES: usize = 32;

/// The thread, if it is in a traced call.
#[inline(always)]
fn calling(tid: u32) -> Option<*mut Thread> {
    let thread = THREADS.get_ptr_mut(&tid)?;
    // SAFETY: a live map value.
    (unsafe { (*thread).depth } > 0).then_some(thread)
}

#[inline(always)]
fn read_kernel<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address.
    match unsafe { bpf_probe_read_kernel(address as *const T) } {
        Ok(value) => Some(value),
        Err(_) => {
            lose(Loss::ReadKernel);
            None
        }
    }
}

#[raw_tracepoint(tracepoint = "sched_switch")]
pub fn sched_switch(ctx: RawTracePointContext) -> i32 {
    if HOST.in_flight() == 0 {
        return 0;
    }
    let Some(settings) = SETTINGS.get_ptr(0) else {
        return 0;
    };
    // SAFETY: a live map value.
    let settings = unsafe { &*settings };
    // The current task is the one that leaves.
    if let Some(thread) = calling(bpf_get_current_pid_tgid() as u32) {
        leave_cpu(&ctx, settings, thread);
    }
    let next: u64 = ctx.arg(2);
    if let Some(tid) = read_kernel::<u32>(next + u64::from(settings.pid_offset))
        && tid != 0
        && let Some(thread) = calling(tid)
    {
        resume(thread);
    }
    0
}

#[inline(always)]
fn leave_cpu(ctx: &RawTracePointContext, settings: &Settings, thread: *mut Thread) {
    let preempted = ctx.arg::<u64>(0) & 1 == 1;
    let state = if settings.state_argument == 1 {
        ctx.arg::<u64>(3) as u32
    } else {
        read_kernel(ctx.arg::<u64>(1) + u64::from(settings.state_offset)).unwrap_or(0)
    };
    // SAFETY: a live map value; until it is woken nobody else writes these.
    unsafe {
        let wait = &raw mut (*thread).wait;
        if preempted || state == 0 {
            (*wait).ready_at = now();
            return;
        }
        let left = now();
        // Two stacks may want one place. Without its innermost frame, the hook's own, a stack wants another.
        let stack =
            ctx.get_stackid(&STACKS, 0).or_else(|_| ctx.get_stackid(&STACKS, 1)).map_or(-1, |id| id as i32);
        if stack < 0 {
            lose(Loss::StackTrace);
        }
        (*wait).stack = stack;
        (*wait).woken_at = 0;
        (*wait).waker = WAKER_UNSEEN;
        (*wait).blocked_at = left;
    }
}

/// A woken thread was not on its CPU at once. Waking takes its time, which is part of what a wait costs; longer delays
/// are for want of a CPU.
///
/// # Safety
/// `wait` is in a live map value.
#[inline(always)]
unsafe fn delayed(wait: *mut Wait, delay: u64) {
    // SAFETY: the caller vouches for `wait`.
    unsafe { (*wait).runnable = (*wait).runnable.wrapping_add(delay.saturating_sub(WAKING)) };
}

/// A thread runs again.
#[inline(never)]
fn resume(thread: *mut Thread) {
    let now = now();
    // SAFETY: a live map value; its thread is about to run and has been woken.
    unsafe {
        let wait = &raw mut (*thread).wait;
        if (*wait).ready_at != 0 {
            (*wait).runnable = (*wait).runnable.wrapping_add(now.saturating_sub((*wait).ready_at));
            (*wait).ready_at = 0;
        }
        let blocked_at = (*wait).blocked_at;
        let apart = blocked_at.wrapping_sub((*wait).early).wrapping_add(JUST_BEFORE);
        if blocked_at != 0 && (*wait).woken_at == 0 && apart < 2 * JUST_BEFORE {
            // Woken between giving up its CPU and the hook that says so: it was ready all the time.
            delayed(wait, now.saturating_sub(blocked_at));
            (*wait).blocked_at = 0;
        }
        (*wait).early = 0;
        if (*wait).blocked_at != 0 {
            let woken = (*wait).woken_at;
            let end = if woken == 0 { now } else { woken };
            let waited = end.saturating_sub((*wait).blocked_at);
            (*wait).blocked = (*wait).blocked.wrapping_add(waited);
            delayed(wait, now.saturating_sub(end));
            if waited > (*wait).longest {
                (*wait).longest = waited;
                (*wait).longest_stack = (*wait).stack;
                (*wait).longest_process =
                    if (*wait).waker == WAKER_PROCESS { (*wait).turns.before[0].process } else { 0 };
            }
            book(thread, end);
            (*wait).blocked_at = 0;
        }
    }
}

/// Books a wait that ended at `end`, turn by turn.
///
/// # Safety
/// `thread` is a live map value.
#[inline(always)]
unsafe fn book(thread: *mut Thread, end: u64) {
    // SAFETY: the caller vouches for `thread`.
    let (process, wait) = unsafe { ((*thread).process, &raw const (*thread).wait) };
    // SAFETY: as above.
    let (from, stack, mode, waker) =
        unsafe { ((*wait).blocked_at, (*wait).stack, (*wait).mode, (*wait).waker) };
    let key = WaitKey { process, stack, mode, pad: [0; 3] };
    match histogram(&WAITS, &key) {
        Some(waits) => sort_into(waits, end.saturating_sub(from)),
        None => lose(Loss::WaitMapFull),
    }
    if waker == WAKER_UNSEEN {
        note(Note::WakerUnseen);
    }
    if waker != WAKER_PROCESS {
        blame(
            &BlameKey { victim: process, culprit: 0, stack, waker, pad: [0; 3] },
            end.saturating_sub(from),
            1,
        );
        return;
    }
    // SAFETY: as above; its outermost frame. Who holds what it waits for need not be in a traced call.
    unsafe {
        if (*wait).turns.before[0].process != process {
            (*frame_below(thread, 1)).shared = 1;
        }
    }
    let mut until = end;
    let mut strangers = false;
    for turn in 0..MAX_TURNS {
        // SAFETY: within the array.
        let Turn { process: culprit, since } = unsafe { (*wait).turns.before[turn] };
        if culprit == 0 {
            break;
        }
        strangers |= culprit != process;
        let start = if since > from { since } else { from };
        if until > start {
            let key = BlameKey { victim: process, culprit, stack, waker: WAKER_PROCESS, pad: [0; 3] };
            blame(&key, until - start, u64::from(turn == 0));
            until = start;
        }
        if until <= from {
            return;
        }
    }
    if !strangers {
        // The process's own threads take a lock of its own again and again, and each call is a new turn.
        let key = BlameKey { victim: process, culprit: process, stack, waker: WAKER_PROCESS, pad: [0; 3] };
        blame(&key, until - from, 0);
        return;
    }
    note(Note::TurnsTruncated);
    let key = BlameKey { victim: process, culprit: 0, stack, waker: WAKER_UNSEEN, pad: [0; 3] };
    blame(&key, until - from, 0);
}

#[inline(never)]
fn blame(key: &BlameKey, time: u64, waits: u64) {
    if BLAME.get_ptr(key).is_none() {
        let _ = BLAME.insert(key, &Blame { waits: 0, time: 0 }, NOEXIST);
    }
    match BLAME.get_ptr_mut(key) {
        // SAFETY: a live map value.
        Some(row) => unsafe {
            atomic::add(&raw mut (*row).waits, waits);
            atomic::add(&raw mut (*row).time, time);
        },
        None => lose(Loss::BlameMapFull),
    }
}

#[raw_tracepoint(tracepoint = "sched_waking")]
pub fn sched_waking(ctx: RawTracePointContext) -> i32 {
    if HOST.in_flight() == 0 {
        return 0;
    }
    let Some(settings) = SETTINGS.get_ptr(0) else {
        return 0;
    };
    // SAFETY: a live map value.
    let settings = unsafe { &*settings };
    let task: u64 = ctx.arg(0);
    let Some(tid) = read_kernel::<u32>(task + u64::from(settings.pid_offset)) else {
        return 0;
    };
    let Some(victim) = calling(tid) else {
        pass_turn(&ctx, settings, tid);
        return 0;
    };
    // SAFETY: a live map value.
    let wait = unsafe { &raw mut (*victim).wait };
    // SAFETY: as above.
    unsafe {
        if (*wait).blocked_at == 0 {
            (*wait).early = now();
            return 0;
        }
        if (*wait).woken_at != 0 {
            return 0;
        }
    }
    // SAFETY: as above.
    wake(&ctx, settings, wait, unsafe { (*victim).process });
    0
}

/// A thread in a traced call wakes one that is in none, but may take what it waited for all the same: NVML's callers
/// do. So does one that dies in a call, of which nothing is left but its process.
#[inline(never)]
fn pass_turn(ctx: &RawTracePointContext, settings: &Settings, tid: u32) {
    let ids = bpf_get_current_pid_tgid();
    let (turns, dying) = match calling(ids as u32) {
        // SAFETY: a live map value.
        Some(own) => (unsafe { &raw const (*own).wait.turns }, 0),
        None => {
            if task_flags(settings) & PF_EXITING == 0 {
                return;
            }
            let tgid = (ids >> 32) as u32;
            let (Some(zero), Some(id)) = (ZERO_TURNS.get_ptr(0), ENDED.get_ptr(&tgid)) else {
                return;
            };
            // SAFETY: a live map value.
            (zero, unsafe { *id })
        }
    };
    if in_interrupt(ctx, settings) {
        return;
    }
    // SAFETY: a live map value.
    let _ = TURNS.insert(&tid, unsafe { &*turns }, ANY);
    if let Some(passed) = TURNS.get_ptr_mut(&tid) {
        // SAFETY: a live map value.
        unsafe {
            (*passed).passed_at = now();
            if dying != 0 {
                (*passed).process = dying;
            }
        }
    }
}

#[inline(always)]
fn wake(ctx: &RawTracePointContext, settings: &Settings, wait: *mut Wait, victim: u64) {
    let ids = bpf_get_current_pid_tgid();
    let at = now();
    let waker = if ids == 0 || in_interrupt(ctx, settings) {
        WAKER_DEVICE
    } else {
        let flags = task_flags(settings);
        if flags & PF_KTHREAD != 0 {
            WAKER_KERNEL
        } else {
            take_turn(wait, ids, at, flags & PF_EXITING, victim);
            WAKER_PROCESS
        }
    };
    // SAFETY: a live map value; a thread that is being woken for the first time has one waker.
    unsafe {
        (*wait).waker = waker;
        (*wait).woken_at = at;
    }
}

/// The current process hands its turn to a waiting thread.
#[inline(never)]
fn take_turn(wait: *mut Wait, ids: u64, at: u64, exiting: u32, victim: u64) {
    let (tid, tgid) = (ids as u32, (ids >> 32) as u32);
    // SAFETY: a live map value, by the caller.
    let turns = unsafe { &raw mut (*wait).turns };
    // SAFETY: live map values; indices are within the arrays.
    unsafe {
        if let Some(own) = calling(tid) {
            let from = &raw const (*own).wait.turns;
            for place in 1..MAX_TURNS {
                (*turns).before[place] = (*from).before[place - 1];
            }
            (*turns).before[0] = Turn { process: (*from).process, since: (*from).since };
        } else {
            let known = match PROCESS_IDS.get_ptr(&tgid) {
                None if exiting != 0 => ENDED.get_ptr(&tgid),
                known => known,
            };
            let process = match known {
                Some(known) => *known,
                None => {
                    let met = meet(tgid, NO_OPERATION);
                    if exiting != 0 {
                        // Its exit has been heard already: nothing would end it, and the next with this PID would be it.
                        lifecycle::end(tgid, END_EXIT);
                    }
                    met
                }
            };
            if process != victim {
                HOST.meet_stranger(process, at);
            }
            (*turns).before[0] = Turn { process, since: 0 };
            (*turns).before[1].process = 0;
            if let Some(from) = TURNS.get_ptr(&tid) {
                for place in 2..MAX_TURNS {
                    (*turns).before[place] = (*from).before[place - 2];
                }
                (*turns).before[1] = Turn { process: (*from).process, since: (*from).since };
                (*turns).before[0].since = (*from).passed_at;
            }
        }
        (*turns).since = at;
    }
}

#[inline(always)]
fn task_flags(settings: &Settings) -> u32 {
    // SAFETY: a helper without arguments.
    let task = unsafe { bpf_get_current_task() };
    read_kernel(task + u64::from(settings.flags_offset)).unwrap_or(0)
}

/// Whether what runs now has interrupted the current task, which then has nothing to do with it.
#[inline(never)]
fn in_interrupt(ctx: &RawTracePointContext, settings: &Settings) -> bool {
    let mut frames = [0u64; WAKER_FRAMES];
    let [[entry, entry_bytes], [soft, soft_bytes]] = settings.interrupts;
    let size = size_of_val(&frames) as u32;
    // SAFETY: the helper writes at most `size` bytes.
    let written = unsafe { bpf_get_stack(ctx.as_ptr(), (&raw mut frames).cast(), size, 0) };
    if written < 0 {
        lose(Loss::StackTrace);
        return false;
    }
    for address in frames {
        if address.wrapping_sub(entry) < entry_bytes || address.wrapping_sub(soft) < soft_bytes {
            return true;
        }
    }
    false
}

#[raw_tracepoint(tracepoint = "contention_begin")]
pub fn contention_begin(ctx: RawTracePointContext) -> i32 {
    if HOST.in_flight() == 0 {
        return 0;
    }
    if let Some(thread) = calling(bpf_get_current_pid_tgid() as u32) {
        // SAFETY: a live map value; this thread is running.
        unsafe { (*thread).wait.mode = ctx.arg::<u64>(1) as u8 };
    }
    0
}

#[raw_tracepoint(tracepoint = "contention_end")]
pub fn contention_end(_: RawTracePointContext) -> i32 {
    if HOST.in_flight() == 0 {
        return 0;
    }
    if let Some(thread) = calling(bpf_get_current_pid_tgid() as u32) {
        // SAFETY: as above.
        unsafe { (*thread).wait.mode = 0 };
    }
    0
}
