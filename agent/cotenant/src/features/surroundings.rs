//! Owns the facts about this host and this process, and what follows from each for the agent.
//! Refuses to decide while it looks, and to look while it decides.

use cotenant_host::{Capability, CgroupMode, Cluster, Host, KernelVersion, Lockdown, Rights, Switches};
use cotenant_kernel::{Trials, Tried};
use cotenant_model::view::{Feature, FeatureState};

use super::{active, feature, remedied};
use crate::discovery::chain;

/// Clock sources that are read in some tens of nanoseconds, as the kernel names them.
const FAST_CLOCKS: [&str; 6] =
    ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen", "tsc-early"];
/// Capabilities without which nothing is attributed, on a kernel that knows them.
const ESSENTIAL: [Capability; 2] = [Capability::Bpf, Capability::Perfmon];

/// Everything as it was asked.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surroundings {
    pub(crate) kernel: Option<KernelVersion>,
    pub(crate) btf: Option<Result<(), String>>,
    pub(crate) symbols: Option<Result<(), String>>,
    pub(crate) tracefs: Option<Result<(), String>>,
    pub(crate) uprobes: bool,
    pub(crate) rights: Option<Rights>,
    pub(crate) lockdown: Option<Lockdown>,
    pub(crate) switches: Switches,
    pub(crate) pid_namespace: Option<Result<bool, String>>,
    pub(crate) cgroup_namespace: Option<Result<bool, String>>,
    pub(crate) cgroups: CgroupMode,
    pub(crate) cluster: Cluster,
    pub(crate) clock: Option<String>,
}

impl Surroundings {
    pub(crate) fn may(&self, capability: Capability) -> bool {
        self.rights.as_ref().is_some_and(|rights| rights.has(capability))
    }

    pub(crate) fn filtered(&self) -> bool {
        self.rights.as_ref().is_some_and(Rights::are_filtered)
    }
}

/// Asks the host, with what the plan's facts found.
pub(crate) fn look(host: &Host, asked: &super::Asked, tracefs: Result<(), String>) -> Surroundings {
    Surroundings {
        kernel: host.kernel_version().ok(),
        btf: Some(asked.btf.clone()),
        symbols: Some(asked.symbols.clone()),
        tracefs: Some(tracefs),
        uprobes: host.has_uprobes(),
        rights: Some(if host.is_running() { host.rights() } else { host.recorded_rights() }),
        lockdown: host.lockdown(),
        switches: host.switches(),
        pid_namespace: Some(host.in_initial_pid_namespace().map_err(|error| chain(&error))),
        cgroup_namespace: Some(host.in_initial_cgroup_namespace().map_err(|error| chain(&error))),
        cgroups: host.cgroup_mode(),
        cluster: host.cluster(),
        clock: host.clock_source(),
    }
}

/// What each fact means. Of the trials counts what was tried.
pub(crate) fn judge(facts: &Surroundings, trials: &Trials) -> Vec<Feature> {
    let mut features = vec![
        kernel(facts),
        btf(facts),
        tracefs(facts),
        cgroups(facts),
        cgroup_namespace(facts),
        pid_namespace(facts),
        capabilities(facts, trials),
        seccomp(facts, trials),
        lockdown(facts),
        paranoid(facts, trials),
        symbols(facts),
        clock(facts),
    ];
    features.extend(cluster(&facts.cluster));
    features
}

fn kernel(facts: &Surroundings) -> Feature {
    let Some(KernelVersion { major, minor, patch }) = facts.kernel else {
        return feature("kernel", FeatureState::Broken, "/proc/sys/kernel/osrelease cannot be read".into());
    };
    let seen = format!("Linux {major}.{minor}.{patch}");
    if (major, minor) < (5, 15) {
        return feature("kernel", FeatureState::Unsupported, format!("{seen}; 5.15 is needed"));
    }
    active("kernel", seen)
}

fn btf(facts: &Surroundings) -> Feature {
    match &facts.btf {
        Some(Err(reason)) => feature("btf", FeatureState::Unsupported, reason.clone()),
        _ => active("btf", "/sys/kernel/btf/vmlinux"),
    }
}

fn tracefs(facts: &Surroundings) -> Feature {
    match &facts.tracefs {
        Some(Err(reason)) => feature("tracefs", FeatureState::Broken, reason.clone()),
        _ => active("tracefs", ""),
    }
}

fn cgroups(facts: &Surroundings) -> Feature {
    let seen = facts.cgroups.as_str();
    match facts.cgroups {
        CgroupMode::Absent => feature("cgroups", FeatureState::Broken, "no hierarchy is mounted here".into()),
        CgroupMode::V1 => Feature {
            lost: "the tenant of a process that ends before it was looked at, and counts of kills by cgroup"
                .into(),
            ..remedied(
                feature("cgroups", FeatureState::Degraded, "v1 only".into()),
                "boot with systemd.unified_cgroup_hierarchy=1, or mount -t cgroup2 none /sys/fs/cgroup/unified",
            )
        },
        CgroupMode::V2 | CgroupMode::Hybrid => active("cgroups", seen),
    }
}

fn cgroup_namespace(facts: &Surroundings) -> Feature {
    let name = "cgroup_namespace";
    match &facts.cgroup_namespace {
        Some(Ok(false)) if facts.may(Capability::SysAdmin) && facts.may(Capability::SysPtrace) => {
            active(name, "a private one; the agent enters the host's")
        }
        Some(Ok(false)) => feature(name, FeatureState::Degraded, "a private one".into()),
        Some(Err(reason)) => feature(name, FeatureState::Broken, reason.clone()),
        Some(Ok(true)) | None => active(name, "the host's"),
    }
}

fn pid_namespace(facts: &Surroundings) -> Feature {
    let name = "host_pid_namespace";
    match &facts.pid_namespace {
        Some(Ok(false)) => feature(name, FeatureState::Degraded, "not in the host's PID namespace".into()),
        Some(Err(reason)) => feature(name, FeatureState::Broken, reason.clone()),
        Some(Ok(true)) | None => active(name, ""),
    }
}

/// What a capability is for.
const fn purpose(capability: Capability) -> &'static str {
    match capability {
        Capability::Bpf => "loading programs (everything by tenant)",
        Capability::Perfmon => "attaching them, and watching mappings (everything by tenant)",
        Capability::SysPtrace => {
            "the libcuda files and cgroups of other users' processes, containers' among them"
        }
        Capability::DacReadSearch => {
            "files that their owners keep to themselves: libraries in containers, kubelet's"
        }
        Capability::Syslog => "classes of waits, and the kernel's log",
        Capability::CheckpointRestore => "a libcuda that was deleted while it is mapped",
        Capability::SysResource => "memory for maps (before Linux 5.11)",
        Capability::SysAdmin => {
            "single probes, which are all there are before Linux 6.6 (stable kernels ask for it since mid-2025)"
        }
    }
}

fn capabilities(facts: &Surroundings, trials: &Trials) -> Feature {
    let name = "capabilities";
    let Some(rights) = &facts.rights else { return active(name, "") };
    let version = facts.kernel.map_or((0, 0), |kernel| (kernel.major, kernel.minor));
    // Whether single probes ask for it depends on the stable release: the trial says, or it may.
    let refused = matches!(trials.uprobe, Tried::Refused(_)) && trials.uprobe_multi != Tried::Works;
    let admin = version < (5, 8) || refused;
    let wanted = |capability: &&Capability| match capability {
        Capability::SysAdmin => admin || (version < (6, 6) && trials.uprobe == Tried::NotTried),
        Capability::SysResource => version < (5, 11),
        Capability::Bpf | Capability::Perfmon => version >= (5, 8),
        // What it opens is told by library_access; little goes without it.
        Capability::CheckpointRestore => false,
        _ => true,
    };
    let wanted: Vec<Capability> = Capability::ALL.iter().filter(wanted).copied().collect();
    let missing: Vec<Capability> =
        wanted.iter().filter(|capability| !rights.has(**capability)).copied().collect();
    let names =
        |list: &[Capability]| list.iter().map(|capability| capability.short()).collect::<Vec<_>>().join(", ");
    if rights.are_apart() {
        return Feature {
            lost: "everything by tenant: what it has counts in its own user namespace only".into(),
            ..remedied(
                feature(name, FeatureState::Broken, "in a user namespace of its own".into()),
                "hostUsers: true (Kubernetes), --userns=host (docker), or start it as the host's root",
            )
        };
    }
    if missing.is_empty() {
        return active(name, names(&wanted));
    }
    let essential = missing
        .iter()
        .any(|capability| ESSENTIAL.contains(capability) || (admin && *capability == Capability::SysAdmin));
    let state = if essential { FeatureState::Broken } else { FeatureState::Degraded };
    let lost: Vec<String> =
        missing.iter().map(|missing| format!("{}: {}", missing.short(), purpose(*missing))).collect();
    let added = names(&missing);
    Feature {
        lost: lost.join("; "),
        ..remedied(
            feature(name, state, format!("missing {added}")),
            format!(
                "add {added}: securityContext.capabilities.add (Kubernetes), AmbientCapabilities= (systemd, with \
                 CAP_), --cap-add (docker), or sudo"
            ),
        )
    }
}

fn seccomp(facts: &Surroundings, trials: &Trials) -> Feature {
    let name = "seccomp";
    if !facts.filtered() {
        return active(name, "no filter");
    }
    let refused: Vec<&str> = [(trials.bpf, "bpf"), (trials.perf, "perf_event_open")]
        .into_iter()
        .filter(|(tried, _)| matches!(tried, Tried::Refused(_)))
        .map(|(_, call)| call)
        .collect();
    // A refusal without the capability may be the kernel's own.
    if refused.is_empty() || !facts.may(Capability::Bpf) || !facts.may(Capability::Perfmon) {
        return active(name, "a filter that lets the agent's calls through, as far as that was tried");
    }
    feature(name, FeatureState::Broken, format!("a filter refuses {}", refused.join(" and ")))
}

fn lockdown(facts: &Surroundings) -> Feature {
    let name = "lockdown";
    match facts.lockdown {
        None => active(name, "not shown here (securityfs is not mounted)"),
        Some(Lockdown::Confidentiality) => feature(name, FeatureState::Broken, "confidentiality".into()),
        Some(lockdown) => active(name, lockdown.as_str()),
    }
}

fn paranoid(facts: &Surroundings, trials: &Trials) -> Feature {
    let name = "perf_event_paranoid";
    let Some(level) = facts.switches.perf_event_paranoid else { return active(name, "not shown here") };
    match trials.perf_all {
        _ if level <= 2 || facts.may(Capability::SysAdmin) => active(name, level.to_string()),
        Tried::Works => active(name, format!("{level}, and this kernel still allows CAP_PERFMON")),
        Tried::Refused(_) => feature(
            name,
            FeatureState::Broken,
            format!(
                "{level}: this distribution's kernel asks for CAP_SYS_ADMIN above 2, and the agent has it not"
            ),
        ),
        Tried::Silent | Tried::NotTried => feature(
            name,
            FeatureState::Degraded,
            format!("{level}: distributions' kernels ask for CAP_SYS_ADMIN above 2, which the agent has not"),
        ),
    }
}

/// For people who look for it; with `CAP_BPF` every value is good, so that it is no feature of the agent.
pub(crate) fn unprivileged(facts: &Surroundings) -> Feature {
    let name = "unprivileged_bpf";
    match facts.switches.unprivileged_bpf_disabled {
        None => active(name, "not shown here"),
        Some(0) => active(name, "0: everybody may load some programs; the agent has no need of that"),
        Some(level) => active(name, format!("{level}: only with CAP_BPF")),
    }
}

fn symbols(facts: &Surroundings) -> Feature {
    let name = "kernel_symbols";
    let switch =
        facts.switches.kptr_restrict.map_or_else(String::new, |level| format!("kptr_restrict {level}"));
    match &facts.symbols {
        Some(Err(reason)) => feature(name, FeatureState::Degraded, reason.clone()),
        _ => active(name, switch),
    }
}

fn clock(facts: &Surroundings) -> Feature {
    let name = "clock_source";
    match facts.clock.as_deref() {
        None => active(name, "not shown here"),
        Some(source) if FAST_CLOCKS.contains(&source) => active(name, source),
        Some(source) => feature(name, FeatureState::Degraded, source.to_owned()),
    }
}

fn cluster(cluster: &Cluster) -> [Feature; 2] {
    const NAMES: &str = "pod_names";
    const GRANTS: &str = "kubelet";
    if !cluster.is_node {
        return [NAMES, GRANTS].map(|name| active(name, "not a Kubernetes node"));
    }
    let named = match (cluster.logs, &cluster.runtime) {
        (true, _) => active(NAMES, "/var/log/pods"),
        (false, Some(socket)) => active(NAMES, socket.display().to_string()),
        (false, None) => feature(
            NAMES,
            FeatureState::Degraded,
            "a Kubernetes node, and neither /var/log/pods nor a container runtime's socket is here".into(),
        ),
    };
    let grants = match &cluster.pod_resources {
        Some(socket) => active(GRANTS, socket.display().to_string()),
        None => feature(
            GRANTS,
            FeatureState::Degraded,
            "a Kubernetes node, and kubelet's pod-resources socket is not here".into(),
        ),
    };
    [named, grants]
}

#[cfg(test)]
mod tests;
