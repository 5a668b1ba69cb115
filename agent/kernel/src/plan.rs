//! Owns the decision what to attach on this host, as a pure function of facts.
//! Refuses to look at the host itself.

use std::time::Duration;

use cotenant_abi::{EXIT_BY_FIELD, EXIT_BY_LEADER, EXIT_BY_SIGNAL_LIVE};

/// `bpf_get_attach_cookie` for uprobes.
pub const FLOOR: (u32, u32) = (5, 15);

/// What the host offers, read by the `host` room.
#[allow(clippy::struct_excessive_bools, reason = "facilities that are there or not, each for itself")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    pub kernel: (u32, u32),
    /// `/sys/bus/event_source/devices/kprobe` exists.
    pub kprobes: bool,
    /// `uvm_unlocked_ioctl_entry` is in kallsyms.
    pub uvm_symbol: bool,
    /// `syscalls:sys_enter_ioctl` exists under tracefs.
    pub ioctl_tracepoint: bool,
    /// Offset of `group_dead` in `sched_process_exit`.
    pub group_dead_offset: Option<u32>,
    /// Offsets of `task_struct.signal` and `signal_struct.live` from BTF.
    pub signal_live: Option<(u32, u32)>,
    pub task: Option<TaskOffsets>,
    /// Kernel text that runs in interrupt context only: start and length, 0 and 0 for none.
    pub interrupts: Option<[[u64; 2]; 2]>,
    /// `lock:contention_begin` exists.
    pub contention: bool,
    /// Offset of `pid` in `oom:mark_victim`.
    pub victim_offset: Option<u32>,
    pub xid: Option<XidOffsets>,
}

/// Where the fields of `nvidia:nvidia_dev_xid` are. The strings stand behind words that say where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XidOffsets {
    pub code: u32,
    pub device: u32,
    pub message: u32,
}

/// Offsets in `task_struct`, from BTF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskOffsets {
    pub pid: u32,
    /// `__state`, before Linux 5.14 `state`.
    pub state: u32,
    pub flags: u32,
}

/// What the configuration allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// `syscalls:*` tracepoints put every system call of the host on its slow path.
    pub syscall_tracepoint: bool,
    /// Scheduler hooks, for waits and blame.
    pub waits: bool,
    /// Calls from this long on are reported one by one.
    pub slow: Option<Duration>,
}

/// How waits are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits {
    pub task: TaskOffsets,
    /// `sched_switch` hands over the state of the thread that leaves.
    pub state_argument: bool,
    /// Without it, an interrupt that wakes a tenant is taken for the process that it interrupted.
    pub interrupts: Option<[[u64; 2]; 2]>,
    pub contention: bool,
}

/// How the GPU of an allocation is learned, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    Kprobe,
    SyscallTracepoint,
    ContextOnly,
}

impl Boundary {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Kprobe => "kprobe on uvm_unlocked_ioctl_entry",
            Self::SyscallTracepoint => "tracepoint syscalls:sys_enter_ioctl",
            Self::ContextOnly => "context tracking only",
        }
    }
}

/// How the last thread's death is told from any thread's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitRule {
    Field {
        offset: u32,
    },
    SignalLive {
        signal: u32,
        live: u32,
    },
    /// The leader's exit is taken for the process's: wrong for a program whose main thread ends first.
    Leader,
}

impl ExitRule {
    pub(crate) const fn tag(self) -> u8 {
        match self {
            Self::Field { .. } => EXIT_BY_FIELD,
            Self::SignalLive { .. } => EXIT_BY_SIGNAL_LIVE,
            Self::Leader => EXIT_BY_LEADER,
        }
    }
}

#[allow(clippy::struct_excessive_bools, reason = "each is used or not, for itself")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub boundary: Boundary,
    /// The tracepoint may serve where the kprobe turns out not to.
    pub boundary_else: bool,
    pub exit: ExitRule,
    /// Uprobes carry cookies. Without them nothing that serves a traced call is attached either.
    pub probes: bool,
    /// `cuMemUnmap` spans need `bpf_loop`.
    pub unmap: bool,
    /// One link holds every symbol of a library that one program serves.
    pub multi: bool,
    pub waits: Option<Waits>,
    /// Offset of the victim in `oom:mark_victim`.
    pub kills: Option<u32>,
    /// Faults are announced by tracepoint.
    pub xid: Option<XidOffsets>,
    pub slow: Option<Duration>,
}

pub fn decide(facts: &HostFacts, choices: Choices) -> Plan {
    let probes = facts.kernel >= FLOOR;
    let tracepoint = facts.ioctl_tracepoint && choices.syscall_tracepoint;
    let boundary = if !probes {
        Boundary::ContextOnly
    } else if facts.kprobes && facts.uvm_symbol {
        Boundary::Kprobe
    } else if tracepoint {
        Boundary::SyscallTracepoint
    } else {
        Boundary::ContextOnly
    };
    let exit = match (facts.group_dead_offset, facts.signal_live) {
        (Some(offset), _) => ExitRule::Field { offset },
        (None, Some((signal, live))) => ExitRule::SignalLive { signal, live },
        (None, None) => ExitRule::Leader,
    };
    let waits = facts.task.filter(|_| probes && choices.waits).map(|task| Waits {
        task,
        state_argument: facts.kernel >= (5, 18),
        interrupts: facts.interrupts,
        contention: facts.contention,
    });
    Plan {
        boundary,
        boundary_else: boundary == Boundary::Kprobe && tracepoint,
        exit,
        probes,
        unmap: facts.kernel >= (5, 17),
        multi: facts.kernel >= (6, 6),
        waits,
        kills: facts.victim_offset,
        xid: facts.xid,
        slow: choices.slow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: Choices = Choices { syscall_tracepoint: true, waits: true, slow: None };

    fn facts() -> HostFacts {
        HostFacts {
            kernel: (6, 18),
            kprobes: true,
            uvm_symbol: true,
            ioctl_tracepoint: true,
            group_dead_offset: Some(32),
            signal_live: Some((2000, 8)),
            task: Some(TaskOffsets { pid: 1, state: 2, flags: 3 }),
            interrupts: None,
            contention: true,
            victim_offset: Some(8),
            xid: None,
        }
    }

    #[test]
    fn c107_faults_are_announced_where_the_driver_has_the_event() {
        assert_eq!(decide(&facts(), ALLOWED).xid, None);
        let offsets = XidOffsets { code: 12, device: 8, message: 16 };
        assert_eq!(decide(&HostFacts { xid: Some(offsets), ..facts() }, ALLOWED).xid, Some(offsets));
    }

    #[test]
    fn a_kprobe_is_preferred_because_it_costs_other_system_calls_nothing() {
        let plan = decide(&facts(), ALLOWED);
        assert_eq!((plan.boundary, plan.boundary_else), (Boundary::Kprobe, true));
        let forbidden = decide(&facts(), Choices { syscall_tracepoint: false, ..ALLOWED });
        assert_eq!((forbidden.boundary, forbidden.boundary_else), (Boundary::Kprobe, false));
    }

    #[test]
    fn without_kprobes_or_without_the_module_the_tracepoint_serves() {
        for facts in [HostFacts { kprobes: false, ..facts() }, HostFacts { uvm_symbol: false, ..facts() }] {
            assert_eq!(decide(&facts, ALLOWED).boundary, Boundary::SyscallTracepoint);
            let forbidden = Choices { syscall_tracepoint: false, ..ALLOWED };
            assert_eq!(decide(&facts, forbidden).boundary, Boundary::ContextOnly);
        }
    }

    #[test]
    fn c60_the_exit_rule_falls_from_field_to_btf_to_leader() {
        assert_eq!(decide(&facts(), ALLOWED).exit, ExitRule::Field { offset: 32 });
        let older = HostFacts { group_dead_offset: None, ..facts() };
        assert_eq!(decide(&older, ALLOWED).exit, ExitRule::SignalLive { signal: 2000, live: 8 });
        let oldest = HostFacts { signal_live: None, ..older };
        assert_eq!(decide(&oldest, ALLOWED).exit, ExitRule::Leader);
    }

    #[test]
    fn c77_below_the_floor_only_what_needs_no_traced_call_is_attached() {
        let old = decide(&HostFacts { kernel: (5, 10), ..facts() }, ALLOWED);
        assert!(!old.probes && old.waits.is_none());
        assert_eq!(old.boundary, Boundary::ContextOnly);
        assert_eq!(old.kills, Some(8));
        assert!(decide(&HostFacts { kernel: FLOOR, ..facts() }, ALLOWED).probes);
    }

    #[test]
    fn unmap_spans_need_bpf_loop() {
        assert!(!decide(&HostFacts { kernel: (5, 15), ..facts() }, ALLOWED).unmap);
        assert!(decide(&HostFacts { kernel: (5, 17), ..facts() }, ALLOWED).unmap);
    }

    #[test]
    fn links_of_many_symbols_need_linux_6_6() {
        assert!(!decide(&HostFacts { kernel: (6, 5), ..facts() }, ALLOWED).multi);
        assert!(decide(&HostFacts { kernel: (6, 6), ..facts() }, ALLOWED).multi);
    }

    #[test]
    fn c74_waits_need_the_layout_of_a_task_and_nothing_else() {
        assert!(
            decide(&facts(), ALLOWED).waits.is_some_and(|waits| waits.state_argument && waits.contention)
        );
        assert_eq!(decide(&HostFacts { task: None, ..facts() }, ALLOWED).waits, None);
        assert_eq!(decide(&facts(), Choices { waits: false, ..ALLOWED }).waits, None);
        let older = HostFacts { kernel: (5, 15), contention: false, ..facts() };
        assert!(
            decide(&older, ALLOWED).waits.is_some_and(|waits| !waits.state_argument && !waits.contention)
        );
    }
}
