//! Owns the state of everything that was planned in the kernel, after the attempt or instead of one.
//! Refuses the attempt itself: what failed comes in by name.

use cotenant_host::Rights;
use cotenant_kernel::{Boundary, ExitRule, FLOOR, Kernel, KernelError, Plan, Waits};
use cotenant_model::view::{Feature, FeatureState};

use super::{Diagnosis, active, feature, remedied, told};
use crate::discovery::chain;

/// After the attempt; `probes` is why nothing can be attached although everything was loaded.
pub(crate) fn kernel(
    plan: &Plan,
    kernel: &Kernel,
    version: Option<(u32, u32)>,
    rights: Option<&Rights>,
    traced: bool,
    probes: Option<&Diagnosis>,
) -> Vec<Feature> {
    let said = |error: &KernelError| rights.map_or_else(|| chain(error), |rights| told(error, rights));
    let missing: Vec<(&'static str, String)> =
        kernel.missing.iter().map(|(name, error)| (*name, said(error))).collect();
    let mut features = vec![match probes {
        Some(Diagnosis { missing, remedy }) => {
            remedied(feature("allocation_probes", FeatureState::Broken, missing.clone()), remedy.clone())
        }
        None => allocation_probes(plan, &missing, version),
    }];
    features.extend(hooks(plan, &missing, traced));
    features.push(match &kernel.watcher.blind {
        Some(error) => feature("mapping_watch", FeatureState::Degraded, said(error)),
        None => active("mapping_watch", ""),
    });
    features
}

fn allocation_probes(
    plan: &Plan,
    missing: &[(&'static str, String)],
    version: Option<(u32, u32)>,
) -> Feature {
    let name = "allocation_probes";
    let failed = |wanted| missing.iter().find(|(name, _)| *name == wanted).map(|(_, reason)| reason);
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
        (Some(reason), _) => feature(name, FeatureState::Broken, format!("on {here}: {reason}")),
        (None, Some(reason)) => feature(
            name,
            FeatureState::Degraded,
            format!("each symbol has a link of its own, and letting a library go takes seconds: {reason}"),
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
fn unserved_for(plan: &Plan, refused: Option<String>) -> Option<(FeatureState, String)> {
    if plan.probes {
        return refused.map(|reason| (FeatureState::Broken, reason));
    }
    let reason = "it serves allocation_probes, for which this kernel is too old";
    Some((FeatureState::Unsupported, reason.to_owned()))
}

/// Without `traced`, what looks unsupported may only be hidden: tracefs was not to be read.
fn hooks(plan: &Plan, missing: &[(&'static str, String)], traced: bool) -> [Feature; 7] {
    const HIDDEN: &str = "tracefs cannot be read (see the feature tracefs)";
    let failed = |names: &[&str]| {
        missing.iter().find(|(missing, _)| names.contains(missing)).map(|(_, reason)| reason.clone())
    };
    let broken = |name, reason| feature(name, FeatureState::Broken, reason);
    // What only serves a traced call has nothing to do where there is none.
    let idle = unserved_for(plan, failed(&["allocation_probes"]));
    let unserved = |name, (state, reason): &(FeatureState, String)| feature(name, *state, reason.clone());
    let boundary = match (failed(&["boundary"]), plan.boundary) {
        _ if let Some(idle) = &idle => unserved("gpu_boundary", idle),
        (Some(reason), _) => broken("gpu_boundary", reason),
        (None, _) if let Some(reason) = failed(&["uvm_kprobe"]) => feature(
            "gpu_boundary",
            FeatureState::Degraded,
            format!(
                "{} instead, which every ioctl of the host passes: {reason}",
                Boundary::SyscallTracepoint.as_str()
            ),
        ),
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
        _ if let Some(idle) = &idle => unserved("process_life", idle),
        (Some(reason), _) if !traced => broken("process_life", format!("{HIDDEN}: {reason}")),
        (Some(reason), _) => broken("process_life", reason),
        (None, ExitRule::Leader) => feature(
            "process_life",
            FeatureState::Degraded,
            "no group_dead field and no BTF: a process counts as gone when its main thread is".into(),
        ),
        (None, _) => active("process_life", ""),
    };
    let unmap = match (failed(&["unmap_return"]), plan.unmap) {
        _ if let Some(idle) = &idle => unserved("vmm_unmap", idle),
        (Some(reason), _) => broken("vmm_unmap", reason),
        (None, false) => feature("vmm_unmap", FeatureState::Unsupported, "no bpf_loop (Linux 5.17)".into()),
        (None, true) => active("vmm_unmap", ""),
    };
    let waits = match (failed(&["sched_switch", "sched_waking"]), plan.waits) {
        _ if let Some(idle) = &idle => unserved("waits", idle),
        (Some(reason), _) => broken("waits", reason),
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
        _ if let Some(idle) = &idle => unserved("lock_mode", idle),
        (Some(reason), _) => broken("lock_mode", reason),
        (None, Some(Waits { contention: true, .. })) => active("lock_mode", ""),
        (None, _) if !traced => broken("lock_mode", HIDDEN.into()),
        (None, _) => feature(
            "lock_mode",
            FeatureState::Unsupported,
            "no lock:contention_begin (Linux 5.19), or no waits".into(),
        ),
    };
    // A victim is reported when it exits.
    let kills = match (failed(&["mark_victim", "process_exit"]), plan.kills) {
        (Some(reason), _) => broken("oom_kills", reason),
        (None, None) if !traced => broken("oom_kills", HIDDEN.into()),
        (None, None) => {
            feature("oom_kills", FeatureState::Unsupported, "no oom:mark_victim under tracefs".into())
        }
        (None, Some(_)) => active("oom_kills", ""),
    };
    let xid = match (failed(&["xid"]), plan.xid) {
        (Some(reason), _) => broken("xid_tracepoint", reason),
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
    fn c73_one_cause_is_named_by_everything_that_falls_with_it() {
        let diagnosis =
            Diagnosis { missing: "a seccomp filter refuses bpf".into(), remedy: "allow it".into() };
        for feature in without_kernel("EPERM", Some(&diagnosis)) {
            assert_eq!(feature.state, FeatureState::Broken);
            assert!(feature.reason.contains("seccomp") && feature.remedy == "allow it");
        }
    }
}
