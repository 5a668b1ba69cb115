//! Owns kills for memory: whom the kernel chose, who had asked, and what the chosen one was when it died.
//! Refuses to take the current task for the victim, or the event's thread id for a process.
//!
//! Relies on `oom:mark_victim`: `pid`, a thread id, at the offset its format file gives (8 on every kernel so far);
//! and on the chosen thread ending by itself: `sched_process_exit` runs in it, with its process and its cgroup.

use aya_ebpf::{
    helpers::{
        bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_get_current_uid_gid,
        generated::bpf_get_current_cgroup_id,
    },
    macros::tracepoint,
    programs::TracePointContext,
};
use cotenant_abi::{EVENT_KILLED, Killed, Loss, Victim};

use crate::{
    calls::now,
    maps::{ANY, PROCESS_IDS, SETTINGS, VICTIMS, emit, lose},
};

#[tracepoint]
pub fn mark_victim(ctx: TracePointContext) -> u32 {
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    // SAFETY: the agent took the offset from this tracepoint's format file.
    let Ok(tid) = (unsafe { ctx.read_at::<u32>(settings.victim_offset as usize) }) else {
        lose(Loss::ReadKernel);
        return 0;
    };
    let victim = Victim {
        marked_at: now(),
        // SAFETY: a helper without arguments.
        trigger_cgroup_id: unsafe { bpf_get_current_cgroup_id() },
        trigger: (bpf_get_current_pid_tgid() >> 32) as u32,
        pad: 0,
    };
    if VICTIMS.insert(&tid, &victim, ANY).is_err() {
        lose(Loss::VictimMapFull);
    }
    0
}

/// A mark this old is of another thread, which had the same id and was ending already when it was chosen.
const STALE: u64 = 120_000_000_000;

/// The current thread ends: reported if it was chosen.
#[inline(always)]
pub fn report(tid: u32, tgid: u32) {
    let Some(victim) = VICTIMS.get_ptr(&tid) else {
        return;
    };
    // SAFETY: a live map value.
    let Victim { marked_at, trigger_cgroup_id, trigger, .. } = unsafe { *victim };
    let _ = VICTIMS.remove(&tid);
    let ended_at = now();
    if ended_at.wrapping_sub(marked_at) > STALE {
        return;
    }
    emit(Killed {
        tag: EVENT_KILLED,
        tgid,
        // SAFETY: a live map value.
        process: PROCESS_IDS.get_ptr(&tgid).map_or(0, |id| unsafe { *id }),
        marked_at,
        ended_at,
        // SAFETY: a helper without arguments.
        cgroup_id: unsafe { bpf_get_current_cgroup_id() },
        tid,
        uid: bpf_get_current_uid_gid() as u32,
        trigger,
        pad: 0,
        trigger_cgroup_id,
        comm: bpf_get_current_comm().unwrap_or([0; 16]),
    });
}
