//! Owns the end of threads and processes, and exec.
//! Refuses to take a thread's exit for its process's.
//!
//! Relies on `sched:sched_process_exit` (pid at 24; `group_dead` by its format file, Linux 6.16 and later) and
//! `sched:sched_process_exec` (pid at 12, old_pid at 16); else on `task_struct.signal` and `signal_struct.live`
//! at offsets resolved from this kernel's BTF.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_probe_read_kernel, generated::bpf_get_current_task},
    macros::tracepoint,
    programs::TracePointContext,
};
use cotenant_abi::{
    END_EXEC, END_EXIT, EVENT_PROCESS_ENDED, EXIT_BY_FIELD, EXIT_BY_SIGNAL_LIVE, Event, Loss, Settings,
};

use crate::{
    calls::{abandon, now},
    kills,
    maps::{ANY, ENDED, PROCESS_IDS, PROCESSES, SETTINGS, THREADS, emit, lose},
};

/// A process is no more, or another program from now on.
#[inline(never)]
pub fn end(tgid: u32, reason: u8) {
    let Some(id) = PROCESS_IDS.get_ptr(&tgid) else {
        return;
    };
    // SAFETY: a live map value.
    let id = unsafe { *id };
    let _ = ENDED.insert(&tgid, &id, ANY);
    let _ = PROCESS_IDS.remove(&tgid);
    let at = now();
    let mut cgroup_id = 0;
    if let Some(process) = PROCESSES.get_ptr_mut(&id) {
        // SAFETY: a live map value.
        unsafe {
            (*process).end_reason = reason;
            (*process).ended = at;
            cgroup_id = (*process).cgroup_id;
        }
    }
    emit(Event {
        tag: EVENT_PROCESS_ENDED,
        tgid,
        process: id,
        at,
        cgroup_id,
        first: u32::from(reason),
        second: 0,
    });
}

fn last_thread(ctx: &TracePointContext, settings: &Settings, tid: u32, tgid: u32) -> bool {
    if settings.exit_rule == EXIT_BY_FIELD {
        // SAFETY: the agent took the offset from this tracepoint's format file.
        return unsafe { ctx.read_at::<u8>(settings.group_dead_offset as usize) }.unwrap_or(0) != 0;
    }
    if settings.exit_rule == EXIT_BY_SIGNAL_LIVE {
        // SAFETY: offsets come from this kernel's BTF; the helper checks the addresses.
        let live = unsafe {
            let task = bpf_get_current_task();
            bpf_probe_read_kernel((task + u64::from(settings.signal_offset)) as *const u64).and_then(
                |signal| bpf_probe_read_kernel((signal + u64::from(settings.live_offset)) as *const i32),
            )
        };
        return match live {
            Ok(live) => live == 0,
            Err(_) => {
                lose(Loss::ReadKernel);
                tid == tgid
            }
        };
    }
    tid == tgid
}

/// A thread is gone, with whatever call it was in.
#[inline(never)]
fn forget(tid: u32) {
    if let Some(thread) = THREADS.get_ptr(&tid) {
        // SAFETY: a live map value.
        let (process, depth) = unsafe { ((*thread).process, (*thread).depth) };
        if depth > 0 {
            abandon(process);
        }
        let _ = THREADS.remove(&tid);
    }
}

#[tracepoint]
pub fn process_exit(ctx: TracePointContext) -> u32 {
    let ids = bpf_get_current_pid_tgid();
    let (tid, tgid) = (ids as u32, (ids >> 32) as u32);
    kills::report(tid, tgid);
    forget(tid);
    if PROCESS_IDS.get_ptr(&tgid).is_none() {
        return 0;
    }
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    if last_thread(&ctx, settings, tid, tgid) {
        end(tgid, END_EXIT);
    }
    0
}

#[tracepoint]
pub fn process_exec(ctx: TracePointContext) -> u32 {
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    if PROCESS_IDS.get_ptr(&tgid).is_none() {
        return 0;
    }
    // SAFETY: the record of this tracepoint is longer than 20 bytes.
    let old = unsafe { ctx.read_at::<u32>(16) }.unwrap_or(tgid);
    forget(old);
    forget(tgid);
    end(tgid, END_EXEC);
    0
}
