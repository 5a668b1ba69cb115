//! Owns the state of everything that was planned in the kernel, after the attempt or instead of one.
//! Refuses the attempt itself: what failed comes in by name.

use cotenant_host::Lockdown;
use cotenant_kernel::{Boundary, ExitRule, FLOOR, Kernel, KernelError, Plan, Waits};
use cotenant_model::view::{Feature, FeatureState};

use super::{Diagnosis, Surroundings, active, feature, is_refusal, remedied, trials::locked};
use crate::discovery::chain;

/// What was planned and could not be done.
struct Failure {
    name: &'static str,
    reason: String,
    /// Of a refusal whose cause the trials found: without the right, no other remedy helps.
    remedy: Option<String>,
}

impl Failure {
    fn of(name: &'static str, error: &KernelError, facts: &Surroundings, cause: Option<&Diagnosis>) -> Self {
        let locked = is_locked(error, facts).then(locked);
        match locked.as_ref().or(cause.filter(|_| is_refusal(error))) {
            Some(Diagnosis { missing, remedy }) => {
                let reason = format!("{missing} ({})", chain(error));
                Self { name, reason, remedy: Some(remedy.clone()) }
            }
            None => Self { name, reason: chain(error), remedy: None },
        }
    }

    fn tell(&self, name: &'static str, state: FeatureState) -> Feature {
        let feature = feature(name, state, self.reason.clone());
        match &self.remedy {
            Some(remedy) => remedied(feature, remedy.clone()),
            None => feature,
        }
    }
}

/// Lockdown takes the helpers that read kernel memory away, which the verifier answers with EINVAL: "unknown func
/// `bpf_probe_read`" on 6.1, "program of this type cannot use helper" on 6.12.
fn is_locked(error: &KernelError, facts: &Surroundings) -> bool {
    let asks = matches!(error, KernelError::Refused { verdict, .. } if verdict.contains("bpf_probe_read"));
    asks && facts.lockdown == Some(Lockdown::Confidentiality)
}

/// After the attempt; `cause` is what the trials found in the way of it, if they were made.
pub(crate) fn kernel(
    plan: &Plan,
    kernel: &Kernel,
    facts: &Surroundings,
    cause: Option<&Diagnosis>,
) -> Vec<Feature> {
    let traced = matches!(facts.tracefs, Some(Ok(())) | None);
    let version = facts.kernel.map(|kernel| (kernel.major, kernel.minor));
    // Links of many were loaded by the start; whether single ones can be made shows only when one is.
    // A kernel that is too old for probes is told as that.
    let probes = cause.filter(|_| plan.probes && !kernel.probes.links_many());
    let failure = |name, error| Failure::of(name, error, facts, cause);
    let missing: Vec<Failure> = kernel.missing.iter().map(|(name, error)| failure(name, error)).collect();
    let mut features = vec![match probes {
        Some(Diagnosis { missing, remedy }) => {
            remedied(feature("allocation_probes", FeatureState::Broken, missing.clone()), remedy.clone())
        }
        None => allocation_probes(plan, &missing, version),
    }];
    features.extend(hooks(plan, &missing, traced));
    features.push(match &kernel.watcher.blind {
        Some(error) => failure("mapping_watch", error).tell("mapping_watch", FeatureState::Degraded),
        None => active("mapping_watch", ""),
    });
    features
}

fn allocation_probes(plan: &Plan, missing: &[Failure], version: Option<(u32, u32)>) -> Feature {
    let name = "allocation_probes";
    let failed = |wanted| missing.iter().find(|failure| failure.name == wanted);
    let here =
        version.map_or_else(|| "this kernel".to_owned(), |(major, minor)| format!("Linux {major}.{minor}"));
    if !plan.probes {
        let (major, minor) = FLOOR;
        let reason = format!(
            "{here} is too old: probes on libraries need {major}.{minor} (bpf_get_attach_cookie); allocations are not seen, \
             only NVML's figures are there"
        );
        return feature(name, FeatureState::Unsupported, reason);
    }
    match (failed(name), failed("multi_uprobes")) {
        (Some(failure), _) => {
            let reason = format!("on {here}: {}", failure.reason);
            Feature { reason, ..failure.tell(name, FeatureState::Broken) }
        }
        (None, Some(failure)) => feature(
            name,
            FeatureState::Degraded,
            format!(
                "each symbol has a link of its own, and letting a library go takes seconds: {}",
                failure.reason
            ),
        ),
        (None, None) => active(name, ""),
    }
}

/// Of a host that cannot be tried: as far as its files say.
pub(crate) fn recorded(plan: &Plan, probes: Result<(), Diagnosis>) -> Vec<Feature> {
    match probes {
        Ok(()) => {
            let seen = "a recorded host: not tried";
            let mut features = vec![active("allocation_probes", seen)];
            features.extend(hooks(plan, &[], true));
            features.push(active("mapping_watch", seen));
            features
        }
        Err(diagnosis) => without_kernel("a recorded host: not tried", Some(&diagnosis)),
    }
}

/// Why what serves traced calls has none to serve, if so.
fn unserved_for(plan: &Plan, refused: Option<&Failure>) -> Option<impl Fn(&'static str) -> Feature> {
    let refused = refused.filter(|_| plan.probes);
    let idle = move |name| {
        let unsupported = || {
            let reason = "it serves allocation_probes, for which this kernel is too old";
            feature(name, FeatureState::Unsupported, reason.to_owned())
        };
        refused.map_or_else(unsupported, |failure| failure.tell(name, FeatureState::Broken))
    };
    (!plan.probes || refused.is_some()).then_some(idle)
}

/// Without `traced`, what looks unsupported may only be hidden: tracefs was not to be read.
fn hooks(plan: &Plan, missing: &[Failure], traced: bool) -> [Feature; 7] {
    const HIDDEN: &str = "tracefs cannot be read (see the feature tracefs)";
    let failed = |names: &[&str]| missing.iter().find(|failure| names.contains(&failure.name));
    let broken = |name, failure: &Failure| failure.tell(name, FeatureState::Broken);
    let hidden = |name| feature(name, FeatureState::Broken, HIDDEN.into());
    // What only serves a traced call has nothing to do where there is none.
    let idle = unserved_for(plan, failed(&["allocation_probes"]));
    let boundary = match (failed(&["boundary"]), plan.boundary) {
        _ if let Some(idle) = &idle => idle("gpu_boundary"),
        (Some(failure), _) => broken("gpu_boundary", failure),
        (None, _) if let Some(failure) = failed(&["uvm_kprobe"]) => {
            let instead = Boundary::SyscallTracepoint.as_str();
            let reason =
                format!("{instead} instead, which every ioctl of the host passes: {}", failure.reason);
            Feature { reason, ..failure.tell("gpu_boundary", FeatureState::Degraded) }
        }
        (None, Boundary::ContextOnly) if !traced => {
            feature("gpu_boundary", FeatureState::Degraded, HIDDEN.into())
        }
        (None, Boundary::ContextOnly) => feature(
            "gpu_boundary",
            FeatureState::Degraded,
            "no kprobes and no syscalls tracepoint, or kernel.syscall_tracepoint = false".into(),
        ),
        (None, boundary) => active("gpu_boundary", boundary.as_str()),
    };
    let life = match (failed(&["process_exit", "process_exec"]), plan.exit) {
        _ if let Some(idle) = &idle => idle("process_life"),
        (Some(failure), _) if !traced => {
            let reason = format!("{HIDDEN}: {}", failure.reason);
            Feature { reason, ..broken("process_life", failure) }
        }
        (Some(failure), _) => broken("process_life", failure),
        (None, ExitRule::Leader) => feature(
            "process_life",
            FeatureState::Degraded,
            "no group_dead field and no BTF: a process counts as gone when its main thread is".into(),
        ),
        (None, _) => active("process_life", ""),
    };
    let unmap = match (failed(&["unmap_return"]), plan.unmap) {
        _ if let Some(idle) = &idle => idle("vmm_unmap"),
        (Some(failure), _) => broken("vmm_unmap", failure),
        (None, false) => feature("vmm_unmap", FeatureState::Unsupported, "no bpf_loop (Linux 5.17)".into()),
        (None, true) => active("vmm_unmap", ""),
    };
    let waits = match (failed(&["sched_switch", "sched_waking"]), plan.waits) {
        _ if let Some(idle) = &idle => idle("waits"),
        (Some(failure), _) => broken("waits", failure),
        (None, None) => feature(
            "waits",
            FeatureState::Unsupported,
            "no /sys/kernel/btf/vmlinux, so the layout of a task is not known (or waits.enabled = false)"
                .into(),
        ),
        (None, Some(Waits { interrupts: None, .. })) => Feature {
            lost: "the classes of waits; an interrupt may be taken for the process that it interrupted"
                .into(),
            ..remedied(
                feature(
                    "waits",
                    FeatureState::Degraded,
                    "/proc/kallsyms shows no addresses (needs CAP_SYSLOG, and kernel.kptr_restrict at 0 or 1)".into(),
                ),
                "sysctl kernel.kptr_restrict=1, and give the agent CAP_SYSLOG",
            )
        },
        (None, Some(_)) => active("waits", ""),
    };
    let mode = match (failed(&["contention_begin", "contention_end"]), plan.waits) {
        _ if let Some(idle) = &idle => idle("lock_mode"),
        (Some(failure), _) => broken("lock_mode", failure),
        (None, Some(Waits { contention: true, .. })) => active("lock_mode", ""),
        (None, _) if !traced => hidden("lock_mode"),
        (None, _) => feature(
            "lock_mode",
            FeatureState::Unsupported,
            "no lock:contention_begin (Linux 5.19), or no waits".into(),
        ),
    };
    // A victim is reported when it exits.
    let kills = match (failed(&["mark_victim", "process_exit"]), plan.kills) {
        (Some(failure), _) => broken("oom_kills", failure),
        (None, None) if !traced => hidden("oom_kills"),
        (None, None) => {
            feature("oom_kills", FeatureState::Unsupported, "no oom:mark_victim under tracefs".into())
        }
        (None, Some(_)) => active("oom_kills", ""),
    };
    let xid = match (failed(&["xid"]), plan.xid) {
        (Some(failure), _) => broken("xid_tracepoint", failure),
        (None, None) => feature(
            "xid_tracepoint",
            FeatureState::Unsupported,
            "no nvidia:nvidia_dev_xid under tracefs when the agent started".into(),
        ),
        (None, Some(_)) => active("xid_tracepoint", ""),
    };
    [boundary, life, unmap, waits, mode, kills, xid]
}

/// Without the kernel side: every one of its features is broken for the same reason.
pub(crate) fn without_kernel(reason: &str, diagnosis: Option<&Diagnosis>) -> Vec<Feature> {
    [
        "allocation_probes",
        "gpu_boundary",
        "process_life",
        "vmm_unmap",
        "waits",
        "lock_mode",
        "oom_kills",
        "xid_tracepoint",
        "mapping_watch",
    ]
    .map(|name| match diagnosis {
        Some(Diagnosis { missing, remedy }) => {
            // The error in full once.
            let seen =
                if name == "allocation_probes" { format!("{missing} ({reason})") } else { missing.clone() };
            remedied(feature(name, FeatureState::Broken, seen), remedy.clone())
        }
        None => feature(name, FeatureState::Broken, reason.to_owned()),
    })
    .into()
}

#[cfg(test)]
mod tests {
    use cotenant_kernel::{Choices, HostFacts, TaskOffsets, decide};

    use super::*;

    fn plan(facts: &HostFacts) -> Plan {
        decide(facts, Choices { syscall_tracepoint: true, waits: true, slow: None })
    }

    fn state(features: &[Feature], name: &str) -> FeatureState {
        features.iter().find(|feature| feature.name == name).map(|feature| feature.state).expect(name)
    }

    #[test]
    fn c74_without_btf_probes_run_and_waits_say_why_they_do_not() {
        let facts = HostFacts { kernel: (6, 18), group_dead_offset: Some(8), ..HostFacts::default() };
        let features = recorded(&plan(&facts), Ok(()));
        assert_eq!(state(&features, "allocation_probes"), FeatureState::Active);
        assert_eq!(state(&features, "process_life"), FeatureState::Active);
        assert_eq!(state(&features, "waits"), FeatureState::Unsupported);
        let waits = features.iter().find(|feature| feature.name == "waits").expect("waits");
        assert!(waits.reason.contains("btf") && waits.lost.contains("who waits") && !waits.remedy.is_empty());
    }

    #[test]
    fn c77_each_kernel_loses_what_it_has_not() {
        let of = |kernel, contention| {
            let task = Some(TaskOffsets::default());
            recorded(&plan(&HostFacts { kernel, task, contention, ..HostFacts::default() }), Ok(()))
        };
        let old = of((5, 15), false);
        assert_eq!(state(&old, "vmm_unmap"), FeatureState::Unsupported);
        assert_eq!(state(&old, "lock_mode"), FeatureState::Unsupported);
        assert_eq!(state(&old, "process_life"), FeatureState::Degraded);
        let new = of((6, 1), true);
        assert_eq!(state(&new, "vmm_unmap"), FeatureState::Active);
        assert_eq!(state(&new, "lock_mode"), FeatureState::Active);
    }

    #[test]
    fn c72_what_was_refused_is_told_its_cause_and_remedy_and_what_failed_otherwise_its_own() {
        // As in a pod: there is a filter too, which lets the call through.
        let rights = Some(cotenant_host::Rights::of(1 << 38 | 1 << 39, true, false));
        let facts = Surroundings { rights, ..Surroundings::default() };
        let cause = Diagnosis { missing: "paranoid is 4".into(), remedy: "sysctl".into() };
        let plan = plan(&HostFacts { kernel: (6, 18), victim_offset: Some(8), ..HostFacts::default() });
        let kills = |kind: std::io::ErrorKind| {
            let error = KernelError::Wait(kind.into());
            let failure = Failure::of("mark_victim", &error, &facts, Some(&cause));
            let all = hooks(&plan, &[failure], true);
            let kills = all.into_iter().find(|feature| feature.name == "oom_kills").expect("oom_kills");
            assert_eq!(kills.state, FeatureState::Broken, "{kills:?}");
            kills
        };
        let refused = kills(std::io::ErrorKind::PermissionDenied);
        assert!(refused.reason.starts_with("paranoid is 4 (") && refused.remedy == "sysctl", "{refused:?}");
        assert!(kills(std::io::ErrorKind::NotFound).remedy.contains("tracefs"));
    }

    /// As Linux 6.1 and 6.12 said it (tests/kernels).
    #[test]
    fn c72_a_program_that_lockdown_refuses_names_lockdown() {
        let of = |lockdown, verdict: &str| {
            let facts = Surroundings { lockdown: Some(lockdown), ..Surroundings::default() };
            let source = std::io::ErrorKind::InvalidInput.into();
            let error = KernelError::Refused { name: "ioctl_enter", verdict: verdict.into(), source };
            Failure::of("boundary", &error, &facts, None)
        };
        for verdict in
            ["program of this type cannot use helper bpf_probe_read#4", "unknown func bpf_probe_read#4"]
        {
            let failure = of(Lockdown::Confidentiality, verdict);
            assert!(failure.reason.starts_with("lockdown is at confidentiality"), "{}", failure.reason);
            assert!(failure.reason.contains(verdict) && failure.remedy.is_some());
            assert!(of(Lockdown::Integrity, verdict).remedy.is_none());
        }
        assert!(of(Lockdown::Confidentiality, "R1 invalid mem access").remedy.is_none());
    }

    #[test]
    fn c73_one_cause_is_named_by_everything_that_falls_with_it() {
        let diagnosis =
            Diagnosis { missing: "a seccomp filter refuses bpf".into(), remedy: "allow it".into() };
        for feature in without_kernel("EPERM", Some(&diagnosis)) {
            assert_eq!(feature.state, FeatureState::Broken);
            assert!(feature.reason.contains("seccomp") && feature.remedy == "allow it");
        }
    }
}
