//! Owns the layouts of map keys, map values and ring events, and the reasons for which something is lost.
//! Refuses padding: every byte has a name, so that keys compare and the agent reads no junk.

use crate::{operation::named, waits::Wait};

/// Traced calls that may be nested in one thread. Deeper ones are counted as lost.
pub const MAX_DEPTH: usize = 4;
/// Contexts kept on one thread's stack of current contexts.
pub const MAX_CONTEXTS: usize = 4;
/// GPUs that the kernel side can tell apart on one node (MIG instances included).
pub const MAX_GPUS: u32 = 64;
/// Latency buckets: bucket `i` holds durations below `2^(i + LATENCY_SHIFT)` ns; the last one is open.
pub const LATENCY_BUCKETS: usize = 27;
/// The first bucket ends at 2^8 ns = 256 ns, the last closed one at 2^33 ns = 8.6 s.
pub const LATENCY_SHIFT: u32 = 8;
/// Mappings that one `cuMemUnmap` may span; the rest is counted as lost. 160 GB in 20 MiB pieces is 8,192.
pub const MAX_UNMAP_SPAN: u32 = 16_384;

/// The GPU of a ledger row: a known index, an ordinal of that process, or nothing.
pub const GPU_UNKNOWN: u8 = 0xff;
/// Set when the low bits are a CUDA ordinal of that process, to be resolved by the agent.
pub const GPU_ORDINAL: u8 = 0x80;

named! {
    /// Why something was not booked. Index of the per-CPU `LOSSES` array.
    Loss {
        ThreadMapFull = 0 => "thread_map_full",
        ProcessMapFull = 1 => "process_map_full",
        PointerMapFull = 2 => "pointer_map_full",
        HandleMapFull = 3 => "handle_map_full",
        MappingMapFull = 4 => "mapping_map_full",
        ContextMapFull = 5 => "context_map_full",
        LedgerMapFull = 6 => "ledger_map_full",
        CallMapFull = 7 => "call_map_full",
        LatencyMapFull = 8 => "latency_map_full",
        FailureMapFull = 9 => "failure_map_full",
        RingFull = 10 => "ring_full",
        NestedTooDeep = 11 => "nested_too_deep",
        ReturnWithoutEntry = 12 => "return_without_entry",
        EntryWithoutReturn = 13 => "entry_without_return",
        ReadUser = 14 => "read_user_failed",
        ReadKernel = 15 => "read_kernel_failed",
        PeakContended = 16 => "peak_contended",
        UnmapTruncated = 17 => "unmap_truncated",
        GpuTableFull = 18 => "gpu_table_full",
        WaitMapFull = 19 => "wait_map_full",
        BlameMapFull = 20 => "blame_map_full",
        EffortMapFull = 21 => "effort_map_full",
        StackTrace = 22 => "stack_trace_failed",
        VictimMapFull = 23 => "victim_map_full",
        /// A process had as many rows as it may have beside the others: see [`Table`].
        Quota = 24 => "quota",
        RecentMapFull = 25 => "recent_map_full",
        /// Processes whose stream-ordered calls were not seen because their probes were too dear. Counted by the agent.
        ProbesShed = 26 => "probes_shed",
    }
}

named! {
    /// Facts about the workload, not losses: index of the per-CPU `NOTES` array.
    Note {
        /// A successful free of a pointer the ledger does not know (allocated before the agent came).
        UnmatchedFree = 0 => "unmatched_free",
        /// An allocation returned a pointer that was still live: its free was not seen.
        ReplacedPointer = 1 => "replaced_pointer",
        /// The driver call ran inside another traced call that booked the same pointer.
        NestedDuplicate = 2 => "nested_duplicate",
        /// The same code was attached through two files that share one inode underneath.
        DuplicateAttachment = 3 => "duplicate_attachment",
        /// The kernel boundary and the current context named different GPUs.
        GpuDisagreement = 4 => "gpu_disagreement",
        /// A GPU UUID seen at the kernel boundary that NVML does not list.
        ForeignUuid = 5 => "foreign_uuid",
        /// Probe entries seen; with the calibrated trap cost, the agent's cost to its tenants.
        ProbeHits = 6 => "probe_hits",
        /// UVM ioctls read at the kernel boundary.
        BoundaryHits = 7 => "boundary_hits",
        /// A call returned in a thread that had entered it before the probes came.
        LateReturn = 8 => "late_return",
        /// A blocked thread ran again and nobody was seen to wake it.
        WakerUnseen = 9 => "waker_unseen",
        /// Failed allocations that came too fast to be reported one by one; they are counted all the same.
        FailureUnreported = 10 => "failure_unreported",
        /// Slow calls that came too fast to be reported one by one.
        SlowCallUnreported = 11 => "slow_call_unreported",
        /// A wait that lasted longer than the turns that are followed back.
        TurnsTruncated = 12 => "turns_truncated",
    }
}

named! {
    /// Maps that live memory fills. Each process has a quota of their rows. Index of the arrays that count these.
    Table {
        Pointers = 0 => "POINTERS",
        Handles = 1 => "HANDLES",
        Physicals = 2 => "PHYSICALS",
        Mappings = 3 => "MAPPINGS",
        Chunks = 4 => "CHUNKS",
    }
}

/// Length of the arrays: a power of two, for the programs bound indices by a mask.
pub const TABLES: usize = 8;
const _: () = assert!(Table::ALL.len() <= TABLES);
/// `Settings::row_share` is in this many parts.
pub const WHOLE: u64 = 1024;
/// Calls that are remembered of each process.
pub const RECENT_CALLS: usize = 8;

/// Entries of the `LOSSES` array.
pub const LOSSES: u32 = Loss::ALL.len() as u32;
/// Entries of the `NOTES` array.
pub const NOTES: u32 = Note::ALL.len() as u32;

macro_rules! record {
    ($(#[$doc:meta])* $name:ident[$size:literal] { $($(#[$fdoc:meta])* $field:ident: $ty:ty),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),+ }
        const _: () = assert!(core::mem::size_of::<$name>() == $size);
        impl $name {
            /// Its name and where each field lies, to be held against a built object.
            pub const LAYOUT: (&'static str, &'static [(&'static str, usize)]) =
                (stringify!($name), &[$((stringify!($field), core::mem::offset_of!($name, $field))),+]);
        }
    };
}
pub(crate) use record;

record! {
    /// One process that has called the driver. Key of `PROCESSES`: its id.
    Process[160] {
        /// Boot-clock-free monotonic ns of the first traced call.
        first_seen: u64,
        /// Monotonic ns at which the last thread died or the program was replaced; 0 while alive.
        ended: u64,
        cgroup_id: u64,
        /// Handle of the first context of this process, 0 if none; used when a thread's own is unknown.
        sole_context: u64,
        tgid: u32,
        uid: u32,
        /// The first operation seen: `cuInit` means that nothing was missed before.
        first_operation: u8,
        /// See [`END_EXIT`] and [`END_EXEC`].
        end_reason: u8,
        /// More than one context was created, so `sole_context` says nothing.
        many_contexts: u8,
        pad: u8,
        /// Successful allocations that found no room in a map.
        lost: u32,
        comm: [u8; 16],
        /// Threads of this process that are in a traced call.
        in_flight: i64,
        /// Traced calls begun, outermost ones only.
        entries: i64,
        /// When a failure, and when a slow call, of this process was last reported through the ring; it is not to fill it.
        failure_reported_at: u64,
        slow_reported_at: u64,
        /// Rows by [`Table`], as the programs inserted and removed them; the agent's removals are in [`Swept`].
        rows: [i64; TABLES],
    }
}

/// `first_operation` of a process that has not called the driver: it woke somebody who did.
pub const NO_OPERATION: u8 = 0xff;
pub const END_EXIT: u8 = 1;
pub const END_EXEC: u8 = 2;

record! {
    /// A live pointer or array handle. Key: [`PointerKey`].
    Pointer[32] {
        bytes: u64,
        booked_at: u64,
        context: u64,
        gpu: u8,
        kind: u8,
        pad: [u8; 6],
    }
}

record! { PointerKey[16] { process: u64, address: u64 } }

record! {
    /// Rows of a process that the agent has removed, by [`Table`]. Only the agent writes it. Key: the process.
    Swept[64] { rows: [u64; TABLES] }
}

record! {
    /// A call that moves memory, as it returned.
    RecentCall[24] {
        at: u64,
        /// 0 when its arguments do not say.
        bytes: u64,
        code: u32,
        operation: u8,
        gpu: u8,
        pad: [u8; 2],
    }
}

record! {
    /// The last calls of a process that move memory. Key: the process.
    Recent[200] {
        /// Calls so far; the latest one is at `next - 1`, modulo [`RECENT_CALLS`].
        next: i64,
        calls: [RecentCall; RECENT_CALLS],
    }
}

record! {
    /// Physical memory made by `cuMemCreate` or imported. Key: [`PointerKey`] with the physical id as address.
    Physical[24] {
        bytes: u64,
        /// Handles that name it (create, retain, import) plus mappings that hold it.
        references: u64,
        gpu: u8,
        kind: u8,
        pad: [u8; 6],
    }
}

record! {
    /// A mapped range. Key: [`PointerKey`].
    Mapping[16] { bytes: u64, physical: u64 }
}

record! {
    /// A handle and how often it was created, retained or imported. Key: [`PointerKey`].
    Handle[16] { count: u64, physical: u64 }
}

record! {
    /// Key: [`PointerKey`] with the context handle as address.
    Context[24] {
        /// Unique id: a handle value may come back after destruction.
        id: u64,
        references: u64,
        ordinal: u32,
        gpu: u8,
        pad: [u8; 3],
    }
}

record! { OrdinalKey[16] { process: u64, ordinal: u64 } }

record! { LedgerKey[16] { process: u64, gpu: u8, kind: u8, pad: [u8; 6] } }

record! {
    /// Bytes of one kind on one GPU of one process.
    Ledger[48] {
        live: i64,
        peak: i64,
        allocated: u64,
        freed: u64,
        allocations: u64,
        frees: u64,
    }
}

record! { ContextLedgerKey[24] { process: u64, context: u64, gpu: u8, kind: u8, pad: [u8; 6] } }
record! { ContextLedger[16] { live: i64, count: i64 } }

record! { CallKey[16] { process: u64, operation: u8, gpu: u8, pad: [u8; 6] } }
record! { FailureKey[16] { process: u64, operation: u8, gpu: u8, pad: [u8; 2], code: u32 } }

record! {
    Latency[232] {
        count: u64,
        sum: u64,
        buckets: [u64; LATENCY_BUCKETS],
    }
}

record! {
    /// One traced call in flight.
    Frame[144] {
        cookie: u64,
        start: u64,
        stack: u64,
        arguments: [u64; 6],
        /// The entry taken out of the pointer map while a free is in flight.
        stash: Pointer,
        /// 1 when `stash` holds an entry.
        stashed: u8,
        /// The GPU named at the kernel boundary during this call.
        gpu: u8,
        /// No traced call is around this one.
        outermost: u8,
        /// A call of another process overlapped.
        shared: u8,
        /// KiB mapped at the kernel boundary during this call.
        mapped_kib: u32,
        /// Until the return: the thread's `blocked` and `runnable` at entry. From then on: what the call took of them.
        blocked: u64,
        runnable: u64,
        /// Calls that other processes had begun at entry.
        others: i64,
        /// The address range that the driver made last during this call, 0 for none.
        ranged: u64,
    }
}

record! {
    /// Memory that a pool has taken from its GPU. Key: [`PointerKey`] with the address where it is mapped.
    Chunk[24] {
        bytes: u64,
        /// [`Pool::epoch`] when it was taken.
        epoch: u64,
        gpu: u8,
        pad: [u8; 7],
    }
}

record! { PoolKey[16] { process: u64, gpu: u8, pad: [u8; 7] } }

record! {
    /// What the pools of a process have taken from one GPU.
    Pool[24] {
        bytes: i64,
        /// Counts up when everything goes at once, with the device's context.
        epoch: u64,
        /// Something happened of which is not known what it does to pools: the bytes mean nothing.
        unsure: u64,
    }
}

record! {
    /// What one thread is doing. Key of `THREADS`: its id in the initial PID namespace.
    Thread[984] {
        process: u64,
        depth: u32,
        contexts_depth: u32,
        contexts: [u64; MAX_CONTEXTS],
        wait: Wait,
        frames: [Frame; MAX_DEPTH],
    }
}

/// Offsets and switches found by the agent on this host, the only entry of `SETTINGS`.
pub const EXIT_BY_FIELD: u8 = 1;
pub const EXIT_BY_SIGNAL_LIVE: u8 = 2;
pub const EXIT_BY_LEADER: u8 = 3;

record! {
    Settings[240] {
        /// The agent's own process: its calls into the driver are not traced.
        own_tgid: u32,
        /// How the last thread's death is told: one of `EXIT_BY_*`.
        exit_rule: u8,
        /// True when a UUID that is not in `GPUS` is not to be added.
        uuids_closed: u8,
        pad: [u8; 2],
        /// Offset of `group_dead` in `sched_process_exit`, when the kernel has it (6.16 and later).
        group_dead_offset: u32,
        /// Offsets of `task_struct.signal` and `signal_struct.live`, from BTF.
        signal_offset: u32,
        live_offset: u32,
        /// Offsets in `task_struct`, from BTF.
        pid_offset: u32,
        state_offset: u32,
        flags_offset: u32,
        /// `sched_switch` hands the state of the thread that leaves as its fourth argument (Linux 5.18).
        state_argument: u8,
        pad2: [u8; 3],
        /// Offset of `pid` in `oom:mark_victim`.
        victim_offset: u32,
        /// Kernel text that runs in interrupt context only: start and length.
        interrupts: [[u64; 2]; 2],
        /// Calls from this long on are reported, in ns; 0: none.
        slow: u64,
        /// Rows of each [`Table`].
        row_limits: [u64; TABLES],
        /// Rows of all processes that the agent has removed, by [`Table`].
        swept: [u64; TABLES],
        /// Of what others leave, the part that one process may take: parts of [`WHOLE`].
        row_share: u64,
        /// Some processes are in `LEAN`.
        lean: u64,
        /// Offsets in `nvidia:nvidia_dev_xid`: of `error_code`, and of the words that say where its strings are.
        xid_code: u32,
        xid_device: u32,
        xid_message: u32,
        /// Probes on stream-ordered calls come or go: for a moment returns have no entries.
        shedding: u32,
    }
}
