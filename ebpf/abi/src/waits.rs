//! Owns the layouts of waits inside traced calls: who is blocked, whose turn it was, who is to blame.
//! Refuses classes: which lock a stack means is told from its symbols in user space.

use crate::records::{TABLES, record};

/// Turns at what was waited for that are followed back; longer ago is unknown.
pub const MAX_TURNS: usize = 16;
/// Kernel stack frames kept of a blocked thread.
pub const STACK_FRAMES: u32 = 127;

record! {
    /// Whose turn it was at what a thread waits for, and since when.
    Turn[16] { process: u64, since: u64 }
}

record! {
    /// Whose turn it is and whose it was. Part of a thread, and value of `TURNS` for threads in no traced call: then
    /// it is that of the thread in one that woke them. Key: thread id.
    Turns[280] {
        process: u64,
        /// Since when it is this thread's turn: a process woke it, or its call began.
        since: u64,
        /// In `TURNS`: when the turn was passed on.
        passed_at: u64,
        /// Whose turns came before it, latest first; process 0 ends the list.
        before: [Turn; MAX_TURNS],
    }
}

pub const WAKER_UNSEEN: u8 = 0;
/// Woken by a process: `before` says whose turns they were.
pub const WAKER_PROCESS: u8 = 1;
/// By an interrupt, a timer, or on an idle CPU.
pub const WAKER_DEVICE: u8 = 2;
pub const WAKER_KERNEL: u8 = 3;

record! {
    /// How a thread in a traced call is off its CPU. Written by the thread, by whoever wakes it, and by the scheduler hooks.
    Wait[360] {
        /// Monotonic ns; 0 when not blocked.
        blocked_at: u64,
        /// 0 until somebody wakes it.
        woken_at: u64,
        /// Preempted since; 0 when not.
        ready_at: u64,
        /// Woken when it did not seem to be blocked: it may have been just about to be.
        early: u64,
        /// Sums over the thread's traced calls, in ns.
        blocked: u64,
        runnable: u64,
        turns: Turns,
        /// The longest wait of the outermost call, with its stack and the process that ended it.
        longest: u64,
        longest_process: u64,
        longest_stack: i32,
        /// Where it blocked: id in `STACKS`, negative when that failed.
        stack: i32,
        /// See `WAKER_*`.
        waker: u8,
        /// Flags of `lock:contention_begin` while it blocks, 0 when there was none.
        mode: u8,
        pad: [u8; 6],
    }
}

record! {
    /// Waits of one process at one place. Value: [`Latency`].
    WaitKey[16] { process: u64, stack: i32, mode: u8, pad: [u8; 3] }
}

record! {
    /// `culprit` is a process when `waker` is [`WAKER_PROCESS`] and it is known, else 0.
    BlameKey[24] { victim: u64, culprit: u64, stack: i32, waker: u8, pad: [u8; 3] }
}
record! { Blame[16] { waits: u64, time: u64 } }

record! {
    /// Calls of one process and operation whose sizes have as many bits.
    EffortKey[16] { process: u64, operation: u8, size_bits: u8, pad: [u8; 6] }
}
record! {
    /// Time on the CPU inside successful calls, in ns: alone on the host, and while another process's call overlapped.
    Effort[40] {
        solo_calls: u64,
        solo_time: u64,
        shared_calls: u64,
        shared_time: u64,
        /// When such a call failed last and none has succeeded since; 0: none.
        failed_at: u64,
    }
}

record! {
    /// The only entry of `HOST`.
    HostCalls[96] {
        /// Threads in a traced call.
        in_flight: i64,
        /// Traced calls begun, outermost ones only.
        entries: i64,
        /// When a thread in no traced call last woke one of another process that was in one.
        stranger_at: u64,
        /// Its process.
        stranger: u64,
        /// Rows of all processes by [`Table`], without the agent's removals.
        rows: [i64; TABLES],
    }
}
