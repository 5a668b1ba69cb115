//! Owns what the trials of the kernel mean: a line for each facility, and the one thing that is missing.
//! Refuses guesses: two causes that cannot be told apart are both named.

use cotenant_host::{Capability, Lockdown, Rights};
use cotenant_kernel::{Trials, Tried};
use cotenant_model::view::{Feature, FeatureState};
use rustix::io::Errno;

use super::{Surroundings, active, feature, remedied};

/// Why the kernel side cannot work, and what helps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    pub(crate) missing: String,
    pub(crate) remedy: String,
}

impl Diagnosis {
    fn new(missing: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { missing: missing.into(), remedy: remedy.into() }
    }
}

/// The first thing in the way of attribution, if there is one. Without trials, as far as files say.
pub(crate) fn diagnose(facts: &Surroundings, trials: &Trials) -> Option<Diagnosis> {
    let version = facts.kernel.map_or((0, 0), |kernel| (kernel.major, kernel.minor));
    let tried = trials.bpf != Tried::NotTried;
    if tried {
        let steps = [trials.bpf, trials.map, trials.ring_buffer, trials.program];
        if let Some(errno) = steps.into_iter().find_map(refusal) {
            return Some(cause("bpf", errno, Capability::Bpf, facts, trials.bpf));
        }
        if let Some(errno) = [trials.perf, trials.perf_all].into_iter().find_map(refusal) {
            return Some(cause("perf_event_open", errno, Capability::Perfmon, facts, trials.perf));
        }
        if let (Some(errno), false) = (refusal(trials.uprobe), trials.uprobe_multi == Tried::Works) {
            return Some(single(errno, facts, trials));
        }
    } else if let Some(missing) =
        [Capability::Bpf, Capability::Perfmon].into_iter().find(|needed| !facts.may(*needed))
    {
        return Some(lacks(missing));
    }
    if version < (5, 15) || trials.attach_cookie == Some(false) {
        let missing = "attach cookies (Linux 5.15)";
        return Some(Diagnosis::new(missing, "a kernel of 5.15 or later"));
    }
    if !facts.uprobes {
        let (_, remedy) = super::words::of("uprobes");
        return Some(Diagnosis::new("uprobes (/sys/bus/event_source/devices/uprobe is not there)", remedy));
    }
    if !tried && facts.lockdown == Some(Lockdown::Confidentiality) {
        return Some(locked());
    }
    None
}

fn refusal(tried: Tried) -> Option<Errno> {
    match tried {
        Tried::Refused(errno) => Some(Errno::from_raw_os_error(errno)),
        _ => None,
    }
}

/// Why a probe on its own is refused. `PERFMON` was enough from Linux 5.8 on; since 6.16, and in the stable kernels of
/// that summer, it asks for `SYS_ADMIN` again (`perf_uprobe_event_init`). Links of many never did.
fn single(errno: Errno, facts: &Surroundings, trials: &Trials) -> Diagnosis {
    if errno == Errno::ACCESS && facts.may(Capability::Perfmon) && !facts.may(Capability::SysAdmin) {
        let Diagnosis { missing, remedy } = lacks(Capability::SysAdmin);
        return Diagnosis::new(
            format!("{missing}, which this kernel asks for every single probe"),
            format!("{remedy}; or a kernel of 6.6 or later, where links of many need it not"),
        );
    }
    cause("perf_event_open", errno, Capability::Perfmon, facts, trials.perf)
}

fn lacks(capability: Capability) -> Diagnosis {
    let name = capability.short();
    Diagnosis::new(
        format!("CAP_{name} is missing"),
        format!(
            "add {name}: securityContext.capabilities.add (Kubernetes), AmbientCapabilities=CAP_{name} (systemd), \
             --cap-add {name} (docker), or sudo"
        ),
    )
}

pub(super) fn locked() -> Diagnosis {
    let (_, remedy) = super::words::of("lockdown");
    Diagnosis::new("lockdown is at confidentiality", remedy)
}

/// Why `call` was refused with `errno`; `reached` is whether it gets to the kernel at all.
fn cause(call: &str, errno: Errno, needs: Capability, facts: &Surroundings, reached: Tried) -> Diagnosis {
    let (_, filter) = super::words::of("seccomp");
    let refused = matches!(errno, Errno::PERM | Errno::ACCESS);
    if errno == Errno::NOSYS {
        return if facts.filtered() {
            Diagnosis::new(format!("a seccomp filter hides {call}"), filter)
        } else {
            Diagnosis::new(
                format!("this kernel has no {call}"),
                "a kernel with CONFIG_BPF_SYSCALL=y and CONFIG_PERF_EVENTS=y",
            )
        };
    }
    if !refused {
        let (_, remedy) = super::words::of("kernel");
        return Diagnosis::new(format!("{call} fails: {errno}"), remedy);
    }
    if facts.rights.as_ref().is_some_and(Rights::are_apart) {
        return Diagnosis::new(
            "capabilities of the host's user namespace",
            "hostUsers: true (Kubernetes), --userns=host (docker), or start it as the host's root",
        );
    }
    // A program that traces needs both.
    if let Some(missing) = [needs, Capability::Perfmon].into_iter().find(|needed| !facts.may(*needed)) {
        return lacks(missing);
    }
    if facts.filtered() && matches!(reached, Tried::Refused(_)) {
        return Diagnosis::new(format!("a seccomp filter refuses {call}"), filter);
    }
    let paranoid = facts.switches.perf_event_paranoid.unwrap_or(0);
    if needs == Capability::Perfmon && paranoid > 2 && !facts.may(Capability::SysAdmin) {
        let (_, remedy) = super::words::of("perf_event_paranoid");
        return Diagnosis::new(
            format!("kernel.perf_event_paranoid is {paranoid}, and CAP_SYS_ADMIN is missing"),
            remedy,
        );
    }
    if facts.lockdown == Some(Lockdown::Confidentiality) {
        return locked();
    }
    let version = facts.kernel.map_or((0, 0), |kernel| (kernel.major, kernel.minor));
    if version < (5, 11) && !facts.may(Capability::SysResource) {
        return Diagnosis::new(
            "memory for maps (RLIMIT_MEMLOCK)",
            "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd)",
        );
    }
    Diagnosis::new(
        format!("a security module (SELinux, AppArmor) refuses {call}, or lockdown does"),
        "ausearch -m avc -ts recent; dmesg | grep -i -e apparmor -e lockdown",
    )
}

/// A line for each facility of the kernel that the agent uses.
pub(crate) fn report(facts: &Surroundings, trials: &Trials, kprobes: bool, tracepoint: bool) -> Vec<Feature> {
    let line = |name, tried| told(name, tried, facts, trials);
    let cookies = helper("attach_cookies", trials.attach_cookie, facts, (5, 15));
    let bpf_loop = helper("bpf_loop", trials.bpf_loop, facts, (5, 17));
    let mut lines = if trials.bpf == Tried::NotTried {
        let uprobes = if facts.uprobes {
            active("uprobes", "by the kernel's files")
        } else {
            feature("uprobes", FeatureState::Unsupported, "none, by the kernel's files".into())
        };
        vec![cookies, uprobes, helper("uprobe_multi", None, facts, (6, 6)), bpf_loop]
    } else {
        vec![
            line("bpf", first(&[trials.bpf, trials.map, trials.program])),
            line("ring_buffer", trials.ring_buffer),
            line("perf_events", first(&[trials.perf, trials.perf_all])),
            cookies,
            uprobes(facts, trials),
            many(facts, trials),
            bpf_loop,
            line("raw_tracepoints", trials.raw_tracepoint),
        ]
    };
    lines.push(match (kprobes, tracepoint) {
        (true, _) => active("kprobes", ""),
        (false, true) => active("kprobes", "none; the tracepoint syscalls:sys_enter_ioctl serves instead"),
        (false, false) => {
            feature("kprobes", FeatureState::Unsupported, "none, and no syscalls tracepoint".into())
        }
    });
    lines
}

fn first(trials: &[Tried]) -> Tried {
    trials.iter().copied().find(|tried| *tried != Tried::Works).unwrap_or(Tried::Works)
}

fn told(name: &'static str, tried: Tried, facts: &Surroundings, trials: &Trials) -> Feature {
    match tried {
        Tried::Works => active(name, "tried, works"),
        Tried::Silent => {
            feature(name, FeatureState::Broken, "accepted, and then the probe did not fire".into())
        }
        Tried::Refused(errno) => {
            let errno = Errno::from_raw_os_error(errno);
            let (call, needs, reached) = match name {
                "perf_events" => ("perf_event_open", Capability::Perfmon, trials.perf),
                _ => ("bpf", Capability::Bpf, trials.bpf),
            };
            let Diagnosis { missing, remedy } = cause(call, errno, needs, facts, reached);
            remedied(feature(name, FeatureState::Broken, format!("{missing} ({errno})")), remedy)
        }
        Tried::NotTried => match diagnose(facts, trials) {
            Some(Diagnosis { missing, remedy }) => {
                remedied(feature(name, FeatureState::Broken, format!("not tried: {missing}")), remedy)
            }
            None => feature(name, FeatureState::Broken, "could not be tried on this program itself".into()),
        },
    }
}

/// What a version says where nothing could be asked.
fn helper(name: &'static str, there: Option<bool>, facts: &Surroundings, since: (u32, u32)) -> Feature {
    let version = facts.kernel.map_or((0, 0), |kernel| (kernel.major, kernel.minor));
    let seen = if there.is_some() { "asked" } else { "by the kernel's version" };
    if there.unwrap_or(version >= since) {
        active(name, seen)
    } else {
        feature(name, FeatureState::Unsupported, format!("none, {seen} (Linux {}.{})", since.0, since.1))
    }
}

/// Where links of many work, nothing needs a single one.
fn uprobes(facts: &Surroundings, trials: &Trials) -> Feature {
    match refusal(trials.uprobe) {
        Some(errno) if trials.uprobe_multi == Tried::Works => active(
            "uprobes",
            format!("links of many work; a single probe is refused ({errno}) and not needed"),
        ),
        Some(errno) => {
            let Diagnosis { missing, remedy } = single(errno, facts, trials);
            remedied(feature("uprobes", FeatureState::Broken, format!("{missing} ({errno})")), remedy)
        }
        None => told("uprobes", trials.uprobe, facts, trials),
    }
}

/// Older kernels do without.
fn many(facts: &Surroundings, trials: &Trials) -> Feature {
    let version = facts.kernel.map_or((0, 0), |kernel| (kernel.major, kernel.minor));
    match trials.uprobe_multi {
        Tried::Refused(_) if version < (6, 6) => {
            feature("uprobe_multi", FeatureState::Unsupported, "none (Linux 6.6)".into())
        }
        tried => told("uprobe_multi", tried, facts, trials),
    }
}

#[cfg(test)]
mod tests {
    use cotenant_host::{KernelVersion, Switches};

    use super::*;

    const EPERM: i32 = 1;
    const EACCES: i32 = 13;
    const ENOSYS: i32 = 38;

    fn host(effective: u64, seccomp: u32) -> Surroundings {
        Surroundings {
            kernel: Some(KernelVersion { major: 6, minor: 1, patch: 0 }),
            uprobes: true,
            rights: Some(Rights::of(effective, seccomp == 2, false)),
            ..Surroundings::default()
        }
    }

    fn works() -> Trials {
        Trials {
            bpf: Tried::Works,
            map: Tried::Works,
            ring_buffer: Tried::Works,
            program: Tried::Works,
            perf: Tried::Works,
            perf_all: Tried::Works,
            uprobe: Tried::Works,
            uprobe_multi: Tried::Works,
            raw_tracepoint: Tried::Works,
            attach_cookie: Some(true),
            bpf_loop: Some(true),
        }
    }

    fn missing(facts: &Surroundings, trials: Trials) -> String {
        diagnose(facts, &trials).map(|diagnosis| diagnosis.missing).unwrap_or_default()
    }

    #[test]
    fn nothing_is_missing_where_everything_works() {
        assert_eq!(diagnose(&host(u64::MAX, 2), &works()), None);
        let wrong = |line: &Feature| super::super::bad(line.state);
        assert!(!report(&host(u64::MAX, 0), &works(), true, true).iter().any(wrong));
    }

    #[test]
    fn c72_one_errno_has_many_causes_and_one_is_named() {
        let bpf = Trials { bpf: Tried::Refused(EPERM), ..Trials::default() };
        let perf = Trials { perf_all: Tried::Refused(EACCES), ..works() };
        let without = |capability: Capability| !(1_u64 << capability as u8 | 1 << 21);
        assert_eq!(missing(&host(without(Capability::Bpf), 0), bpf), "CAP_BPF is missing");
        assert_eq!(missing(&host(without(Capability::Perfmon), 0), perf), "CAP_PERFMON is missing");
        assert_eq!(missing(&host(u64::MAX, 2), bpf), "a seccomp filter refuses bpf");
        let refused = Trials { perf: Tried::Refused(EPERM), perf_all: Tried::Refused(EPERM), ..works() };
        assert_eq!(missing(&host(u64::MAX, 2), refused), "a seccomp filter refuses perf_event_open");
        // The filter lets perf_event_open through: it is not the filter's doing.
        let mut paranoid = host(!(1 << 21), 2);
        paranoid.switches = Switches { perf_event_paranoid: Some(4), ..Switches::default() };
        assert_eq!(missing(&paranoid, perf), "kernel.perf_event_paranoid is 4, and CAP_SYS_ADMIN is missing");
        let mut locked = host(u64::MAX, 0);
        locked.lockdown = Some(Lockdown::Confidentiality);
        assert_eq!(missing(&locked, perf), "lockdown is at confidentiality");
        assert!(missing(&host(u64::MAX, 0), bpf).contains("security module"));
        let hidden = Trials { bpf: Tried::Refused(ENOSYS), ..Trials::default() };
        assert_eq!(missing(&host(u64::MAX, 2), hidden), "a seccomp filter hides bpf");
        assert_eq!(missing(&host(u64::MAX, 0), hidden), "this kernel has no bpf");
    }

    #[test]
    fn c72_single_probes_ask_for_more_than_perfmon_and_links_of_many_do_not() {
        let facts = host(!(1 << 21), 0);
        let state = |trials: &Trials| {
            let lines = report(&facts, trials, true, true);
            lines.into_iter().find(|line| line.name == "uprobes").expect("uprobes")
        };
        let new = Trials { uprobe: Tried::Refused(EACCES), ..works() };
        assert_eq!((missing(&facts, new), state(&new).state), (String::new(), FeatureState::Active));
        let old = Trials { uprobe_multi: Tried::Refused(22), ..new };
        assert!(missing(&facts, old).starts_with("CAP_SYS_ADMIN is missing"));
        let line = state(&old);
        assert!(line.state == FeatureState::Broken && line.reason.contains("CAP_SYS_ADMIN"), "{line:?}");
    }

    #[test]
    fn c72_a_program_refused_for_want_of_perfmon_is_no_security_module() {
        let facts = host(!(1 << 21 | 1 << 38), 0);
        let trials = Trials { program: Tried::Refused(EPERM), ..works() };
        assert_eq!(missing(&facts, trials), "CAP_PERFMON is missing");
    }

    #[test]
    fn old_kernels_ask_for_locked_memory() {
        let mut facts = host(1 << 21, 0);
        facts.kernel = Some(KernelVersion { major: 5, minor: 4, patch: 0 });
        let trials = Trials { bpf: Tried::Works, map: Tried::Refused(EPERM), ..Trials::default() };
        assert!(missing(&facts, trials).contains("RLIMIT_MEMLOCK"));
    }

    #[test]
    fn c77_a_kernel_without_cookies_or_uprobes_says_so() {
        let mut facts = host(u64::MAX, 0);
        let without = Trials { attach_cookie: Some(false), uprobe: Tried::NotTried, ..works() };
        assert!(missing(&facts, without).contains("5.15"));
        facts.uprobes = false;
        assert!(missing(&facts, works()).contains("uprobe"));
        let lines = report(&facts, &Trials { bpf_loop: Some(false), ..works() }, false, false);
        let state = |name| lines.iter().find(|line| line.name == name).map(|line| line.state);
        assert_eq!(state("bpf_loop"), Some(FeatureState::Unsupported));
        assert_eq!(state("kprobes"), Some(FeatureState::Unsupported));
        let old = Trials { uprobe_multi: Tried::Refused(22), ..works() };
        let lines = report(&host(u64::MAX, 0), &old, true, true);
        let multi = lines.iter().find(|line| line.name == "uprobe_multi").map(|line| line.state);
        assert_eq!(multi, Some(FeatureState::Unsupported));
    }

    #[test]
    fn a_recorded_host_is_diagnosed_by_its_files() {
        assert_eq!(missing(&host(u64::MAX, 0), Trials::default()), "");
        assert_eq!(missing(&host(0, 0), Trials::default()), "CAP_BPF is missing");
    }

    #[test]
    fn a_probe_that_stays_silent_is_broken() {
        let silent = Trials { uprobe: Tried::Silent, ..works() };
        let lines = report(&host(u64::MAX, 0), &silent, true, true);
        let uprobes = lines.iter().find(|line| line.name == "uprobes").expect("uprobes");
        assert!(uprobes.state == FeatureState::Broken && uprobes.reason.contains("did not fire"));
    }
}
