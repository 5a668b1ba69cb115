//! Owns the decision what to attach on this host, as a pure function of facts.
//! Refuses to look at the host itself.

use cotenant_abi::{EXIT_BY_FIELD, EXIT_BY_LEADER, EXIT_BY_SIGNAL_LIVE};

/// What the host offers, read by the `host` room.
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
}

/// What the configuration allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// `syscalls:*` tracepoints put every system call of the host on its slow path.
    pub syscall_tracepoint: bool,
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub boundary: Boundary,
    pub exit: ExitRule,
    /// `cuMemUnmap` spans need `bpf_loop`.
    pub unmap: bool,
    /// One link holds every symbol of a library that one program serves.
    pub multi: bool,
}

pub fn decide(facts: &HostFacts, choices: Choices) -> Plan {
    let boundary = if facts.kprobes && facts.uvm_symbol {
        Boundary::Kprobe
    } else if facts.ioctl_tracepoint && choices.syscall_tracepoint {
        Boundary::SyscallTracepoint
    } else {
        Boundary::ContextOnly
    };
    let exit = match (facts.group_dead_offset, facts.signal_live) {
        (Some(offset), _) => ExitRule::Field { offset },
        (None, Some((signal, live))) => ExitRule::SignalLive { signal, live },
        (None, None) => ExitRule::Leader,
    };
    Plan { boundary, exit, unmap: facts.kernel >= (5, 17), multi: facts.kernel >= (6, 6) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: Choices = Choices { syscall_tracepoint: true };

    fn facts() -> HostFacts {
        HostFacts {
            kernel: (6, 18),
            kprobes: true,
            uvm_symbol: true,
            ioctl_tracepoint: true,
            group_dead_offset: Some(32),
            signal_live: Some((2000, 8)),
        }
    }

    #[test]
    fn a_kprobe_is_preferred_because_it_costs_other_system_calls_nothing() {
        assert_eq!(decide(&facts(), ALLOWED).boundary, Boundary::Kprobe);
    }

    #[test]
    fn without_kprobes_or_without_the_module_the_tracepoint_serves() {
        for facts in [HostFacts { kprobes: false, ..facts() }, HostFacts { uvm_symbol: false, ..facts() }] {
            assert_eq!(decide(&facts, ALLOWED).boundary, Boundary::SyscallTracepoint);
            let forbidden = Choices { syscall_tracepoint: false };
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
    fn unmap_spans_need_bpf_loop() {
        assert!(!decide(&HostFacts { kernel: (5, 15), ..facts() }, ALLOWED).unmap);
        assert!(decide(&HostFacts { kernel: (5, 17), ..facts() }, ALLOWED).unmap);
    }

    #[test]
    fn links_of_many_symbols_need_linux_6_6() {
        assert!(!decide(&HostFacts { kernel: (6, 5), ..facts() }, ALLOWED).multi);
        assert!(decide(&HostFacts { kernel: (6, 6), ..facts() }, ALLOWED).multi);
    }
}
