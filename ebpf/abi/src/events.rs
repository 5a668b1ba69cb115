//! Owns the layouts of what travels through the ring: rare facts, each with a tag as its first word.
//! Refuses one record a call: what comes too fast is counted, not sent.

use crate::records::record;

/// Largest holders that are reported with a failed allocation.
pub const MAX_HOLDERS: usize = 8;

/// Ring event: first word of each record.
pub const EVENT_PROCESS_SEEN: u32 = 1;
pub const EVENT_PROCESS_ENDED: u32 = 2;
pub const EVENT_DUPLICATE_LIBRARY: u32 = 3;
/// A [`Failed`].
pub const EVENT_FAILED: u32 = 4;
/// A [`Killed`].
pub const EVENT_KILLED: u32 = 5;
/// A [`Slow`].
pub const EVENT_SLOW: u32 = 6;
/// A [`Retried`].
pub const EVENT_RETRIED: u32 = 7;
/// An [`XidFault`].
pub const EVENT_XID: u32 = 8;

record! { Holder[16] { process: u64, bytes: u64 } }

record! {
    /// An allocation that failed, with who held the GPU at that moment.
    Failed[184] {
        tag: u32,
        tgid: u32,
        process: u64,
        at: u64,
        requested: u64,
        /// Live device bytes on that GPU over all ledgers, ended processes included.
        total: u64,
        code: u32,
        operation: u8,
        gpu: u8,
        /// 1 when a process holds memory on a GPU that is not known by its index: then this may be less than there was.
        unplaced: u8,
        pad: u8,
        /// The failing process's own live device bytes there.
        own: u64,
        /// In no order; process 0 is no holder.
        holders: [Holder; MAX_HOLDERS],
    }
}

record! {
    /// A thread that the kernel chose to die for memory, reported when it does.
    Killed[80] {
        tag: u32,
        tgid: u32,
        /// 0 when it had never called the driver.
        process: u64,
        marked_at: u64,
        ended_at: u64,
        cgroup_id: u64,
        tid: u32,
        uid: u32,
        /// Who asked for the memory that was not there.
        trigger: u32,
        pad: u32,
        trigger_cgroup_id: u64,
        comm: [u8; 16],
    }
}

record! {
    /// A fault that the driver announced. Texts end at their first 0.
    XidFault[176] { tag: u32, code: u32, at: u64, device: [u8; 32], message: [u8; 128] }
}

record! { Victim[24] { marked_at: u64, trigger_cgroup_id: u64, trigger: u32, pad: u32 } }

record! {
    /// A call that took longer than `Settings::slow`.
    Slow[88] {
        tag: u32,
        tgid: u32,
        process: u64,
        start: u64,
        duration: u64,
        blocked: u64,
        runnable: u64,
        bytes: u64,
        /// The longest wait in it.
        longest: u64,
        longest_process: u64,
        longest_stack: i32,
        tid: u32,
        operation: u8,
        gpu: u8,
        shared: u8,
        pad: u8,
        code: u32,
    }
}

record! {
    Event[40] {
        tag: u32,
        tgid: u32,
        process: u64,
        at: u64,
        cgroup_id: u64,
        /// For [`EVENT_DUPLICATE_LIBRARY`]: the library that may go, and the one that stays.
        first: u32,
        second: u32,
    }
}

record! {
    /// A call succeeded whose like had failed before in the same process.
    Retried[48] {
        tag: u32,
        tgid: u32,
        process: u64,
        at: u64,
        bytes: u64,
        failed_at: u64,
        operation: u8,
        gpu: u8,
        pad: [u8; 6],
    }
}
