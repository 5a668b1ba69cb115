//! Owns what this host lets the agent do, asked once at start, and how that is said.
//! Refuses to fail the start for one missing facility: each costs its own feature only.

use std::path::Path;

use cotenant_device::Hearing;
use cotenant_host::{Host, Rights};
use cotenant_kernel::{
    Boundary, Calibration, ExitRule, FLOOR, HostFacts, Kernel, Plan, Probes, Site, TaskOffsets, Waits,
    XidOffsets, calibrate, site,
};
use cotenant_model::{
    Absence,
    view::{Feature, FeatureState},
};

use crate::discovery::chain;

/// What rests on tracefs.
const TRACED: [&str; 5] = ["gpu_boundary", "process_life", "lock_mode", "oom_kills", "xid_tracepoint"];

pub(crate) fn facts(host: &Host) -> (HostFacts, Vec<Feature>) {
    let mut features = Vec::new();
    if let Err(error) = host.ensure_mounted() {
        features.push(feature("tracefs", FeatureState::Broken, chain(&error)));
    } else {
        features.push(feature("tracefs", FeatureState::Active, String::new()));
    }
    let kernel = host.kernel_version().map_or((0, 0), |version| (version.major, version.minor));
    let offset = |category, event, field: &str| {
        host.event_format(category, event).ok()?.field(field).map(|field| field.offset)
    };
    let signal_live = host.btf().ok().and_then(|btf| {
        Some((
            btf.member_offset("task_struct", "signal").ok()?,
            btf.member_offset("signal_struct", "live").ok()?,
        ))
    });
    let task = host.btf().ok().and_then(|btf| {
        let of = |member| btf.member_offset("task_struct", member).ok();
        Some(TaskOffsets {
            pid: of("pid")?,
            state: of("__state").or_else(|| of("state"))?,
            flags: of("flags")?,
        })
    });
    let kprobes = host.has_kprobes();
    let facts = HostFacts {
        kernel,
        kprobes,
        // Reading all of kallsyms takes tens of milliseconds; without kprobes the answer changes nothing.
        uvm_symbol: kprobes
            && host
                .kernel_symbols(&["uvm_unlocked_ioctl_entry"])
                .is_ok_and(|found| found.first() == Some(&true)),
        ioctl_tracepoint: host.event_format("syscalls", "sys_enter_ioctl").is_ok(),
        group_dead_offset: offset("sched", "sched_process_exit", "group_dead"),
        signal_live,
        task,
        interrupts: interrupts(host),
        contention: host.event_format("lock", "contention_begin").is_ok(),
        victim_offset: offset("oom", "mark_victim", "pid"),
        xid: xid(host),
    };
    (facts, features)
}

/// Where the driver's own tracepoint has what it says of a fault.
fn xid(host: &Host) -> Option<XidOffsets> {
    let format = host.event_format("nvidia", "nvidia_dev_xid").ok()?;
    let of = |name| format.field(name).filter(|field| field.size == 4).map(|field| field.offset);
    Some(XidOffsets { code: of("error_code")?, device: of("dev")?, message: of("msg")? })
}

/// What the probes of one call cost on this host, in seconds, measured on a function of the agent's own.
pub(crate) fn probe_cost(host: &Host, probes: &mut Probes) -> (Option<f64>, Feature) {
    let name = "probe_cost";
    if !host.in_initial_pid_namespace().unwrap_or(false) {
        // The programs would not know the agent, and take it for a tenant.
        let reason = "not in the host's PID namespace: what probes cost is not measured (set hostPID: true)";
        return (None, feature(name, FeatureState::Degraded, reason.into()));
    }
    let address = site();
    let own = host.mappings(std::process::id()).ok().and_then(|mappings| {
        let mapping = mappings.rows.into_iter().find(|row| (row.start..row.end).contains(&address))?;
        Some(address - mapping.start + mapping.offset)
    });
    let Some(offset) = own else {
        let reason = "the agent's own program is not in /proc/self/maps: what probes cost is not measured";
        return (None, feature(name, FeatureState::Broken, reason.into()));
    };
    match calibrate(probes, Site { path: Path::new("/proc/self/exe"), offset }) {
        Ok(Some(Calibration { pair, calls })) => {
            let reason = format!("{} ns a probed call, by {calls} calls", pair.as_nanos());
            (Some(pair.as_secs_f64()), feature(name, FeatureState::Active, reason))
        }
        Ok(None) => {
            let reason =
                "the agent's own probed function was not slower for it: what probes cost is not known";
            (None, feature(name, FeatureState::Broken, reason.into()))
        }
        Err(error) => (None, feature(name, FeatureState::Broken, chain(&error))),
    }
}

/// Whether NVML tells of faults.
pub(crate) fn hearing(hearing: Option<Hearing>) -> Feature {
    let (state, reason) = match hearing {
        None => (FeatureState::Disabled, "nvml.enabled = false".into()),
        Some(Hearing::Listening { .. }) => (FeatureState::Active, String::new()),
        Some(Hearing::NotYet) => (
            FeatureState::Degraded,
            "NVML has not answered yet; Xids come from the kernel's log alone".into(),
        ),
        Some(Hearing::Released) => (FeatureState::Degraded, "NVML is let go of, on request".into()),
        Some(Hearing::Failed(reason @ (Absence::NotSupported | Absence::SymbolMissing))) => (
            FeatureState::Unsupported,
            format!("{}: NVML tells no events here; Xids come from the kernel's log alone", reason.as_str()),
        ),
        Some(Hearing::Failed(reason)) => (
            FeatureState::Broken,
            format!(
                "{}: NVML's events are asked for again; Xids come from the kernel's log",
                reason.as_str()
            ),
        ),
        Some(Hearing::Hung { since }) => (
            FeatureState::Broken,
            format!("a wait has been stuck for {} s: the driver hangs", since.as_secs()),
        ),
    };
    feature("xid_events", state, reason)
}

/// Whether cgroups count device memory here.
pub(crate) fn dmem(host: &Host) -> Feature {
    if host.has_dmem() {
        return feature("dmem", FeatureState::Active, String::new());
    }
    let reason = "absent: this kernel has no dmem controller (Linux 6.14); cgroups neither count nor limit device memory";
    feature("dmem", FeatureState::Unsupported, reason.into())
}

/// Kernel text that runs in interrupt context only. Exceptions come before interrupts in their section and are left
/// out: what a process does in a page fault is its own doing.
fn interrupts(host: &Host) -> Option<[[u64; 2]; 2]> {
    let names = [
        "asm_common_interrupt",
        "__irqentry_text_start",
        "__irqentry_text_end",
        "handle_softirqs",
        "__do_softirq",
    ];
    let ranges = host.text_range(&names).ok()?;
    let start = |at: usize| ranges.get(at).copied().flatten().map(|(start, _)| start);
    let entry = start(0).or_else(|| start(1))?;
    let end = start(2).filter(|end| *end > entry)?;
    let (soft, soft_end) = ranges[3].or(ranges[4]).unwrap_or((0, 0));
    Some([[entry, end - entry], [soft, soft_end - soft]])
}

/// The state of everything that was planned, after the attempt.
pub(crate) fn kernel(facts: &HostFacts, plan: &Plan, kernel: &Kernel, rights: &Rights) -> Vec<Feature> {
    let failed = |name: &str| {
        kernel.missing.iter().find(|(missing, _)| *missing == name).map(|(_, error)| told(error, rights))
    };
    // What only serves a traced call has nothing to do where there is none.
    let idle = (!plan.probes || failed("allocation_probes").is_some())
        .then_some("it serves allocation_probes, which this kernel does not take");
    let mut features = vec![match (failed("allocation_probes"), failed("multi_uprobes")) {
        _ if !plan.probes => feature(
            "allocation_probes",
            FeatureState::Unsupported,
            format!(
                "Linux {}.{} is too old: probes on libraries need {}.{} (bpf_get_attach_cookie); allocations are not \
                 seen, only NVML's figures are there",
                facts.kernel.0, facts.kernel.1, FLOOR.0, FLOOR.1
            ),
        ),
        (Some(reason), _) => feature(
            "allocation_probes",
            FeatureState::Broken,
            format!("on Linux {}.{}: {reason}", facts.kernel.0, facts.kernel.1),
        ),
        (None, Some(reason)) => feature(
            "allocation_probes",
            FeatureState::Degraded,
            format!("each symbol has a link of its own, and letting a library go takes seconds: {reason}"),
        ),
        (None, None) => feature("allocation_probes", FeatureState::Active, String::new()),
    }];
    features.push(match (failed("boundary"), plan.boundary) {
        _ if let Some(idle) = idle => feature("gpu_boundary", FeatureState::Unsupported, idle.to_owned()),
        (Some(reason), _) => feature("gpu_boundary", FeatureState::Broken, reason),
        (None, _) if let Some(reason) = failed("uvm_kprobe") => feature(
            "gpu_boundary",
            FeatureState::Degraded,
            format!(
                "{} instead, which every ioctl of the host passes: {reason}",
                Boundary::SyscallTracepoint.as_str()
            ),
        ),
        (None, Boundary::ContextOnly) => feature(
            "gpu_boundary",
            FeatureState::Degraded,
            "no kprobes and no syscalls tracepoint: the GPU of an allocation is known from its context only"
                .into(),
        ),
        (None, boundary) => feature("gpu_boundary", FeatureState::Active, boundary.as_str().into()),
    });
    features.push(match (failed("process_exit").or_else(|| failed("process_exec")), plan.exit) {
        _ if let Some(idle) = idle => feature("process_life", FeatureState::Unsupported, idle.to_owned()),
        (Some(reason), _) => feature("process_life", FeatureState::Broken, reason),
        (None, ExitRule::Leader) => feature(
            "process_life",
            FeatureState::Degraded,
            "no group_dead field and no BTF: a process counts as gone when its main thread is".into(),
        ),
        (None, _) => feature("process_life", FeatureState::Active, String::new()),
    });
    features.push(match (failed("unmap_return"), plan.unmap) {
        _ if let Some(idle) = idle => feature("vmm_unmap", FeatureState::Unsupported, idle.to_owned()),
        (Some(reason), _) => feature("vmm_unmap", FeatureState::Broken, reason),
        (None, false) => feature(
            "vmm_unmap",
            FeatureState::Unsupported,
            "needs bpf_loop (Linux 5.17): memory released while still mapped stays booked until its process ends"
                .into(),
        ),
        (None, true) => feature("vmm_unmap", FeatureState::Active, String::new()),
    });
    let hooks = ["sched_switch", "sched_waking"].iter().find_map(|name| failed(name));
    features.push(match (hooks, plan.waits) {
        _ if let Some(idle) = idle => feature("waits", FeatureState::Unsupported, idle.to_owned()),
        (Some(reason), _) => feature("waits", FeatureState::Broken, reason),
        (None, None) => feature(
            "waits",
            FeatureState::Unsupported,
            "no /sys/kernel/btf/vmlinux, so the layout of a task is not known (or waits.enabled = false): who waits \
             for whom is not seen"
                .into(),
        ),
        (None, Some(Waits { interrupts: None, .. })) => feature(
            "waits",
            FeatureState::Degraded,
            "/proc/kallsyms shows no addresses: waits have no class, and an interrupt may be taken for the process \
             that it interrupted; set kernel.kptr_restrict to 0 or 1 and give the agent CAP_SYSLOG"
                .into(),
        ),
        (None, Some(_)) => feature("waits", FeatureState::Active, String::new()),
    });
    let contention = ["contention_begin", "contention_end"].iter().find_map(|name| failed(name));
    features.push(match (contention, plan.waits) {
        _ if let Some(idle) = idle => feature("lock_mode", FeatureState::Unsupported, idle.to_owned()),
        (Some(reason), _) => feature("lock_mode", FeatureState::Broken, reason),
        (None, Some(Waits { contention: true, .. })) => {
            feature("lock_mode", FeatureState::Active, String::new())
        }
        (None, _) => feature(
            "lock_mode",
            FeatureState::Unsupported,
            "no lock:contention_begin (Linux 5.19): readers and writers of a lock are not told apart".into(),
        ),
    });
    // A victim is reported when it exits.
    features.push(match (failed("mark_victim").or_else(|| failed("process_exit")), plan.kills) {
        (Some(reason), _) => feature("oom_kills", FeatureState::Broken, reason),
        (None, None) => feature(
            "oom_kills",
            FeatureState::Unsupported,
            "no oom:mark_victim under tracefs: kills for memory are not seen".into(),
        ),
        (None, Some(_)) => feature("oom_kills", FeatureState::Active, String::new()),
    });
    features.push(match (failed("xid"), plan.xid) {
        (Some(reason), _) => feature("xid_tracepoint", FeatureState::Broken, reason),
        (None, None) => feature(
            "xid_tracepoint",
            FeatureState::Unsupported,
            "no nvidia:nvidia_dev_xid under tracefs when the agent started (driver 550 or later, its module loaded): \
             Xids are taken from the kernel's log alone"
                .into(),
        ),
        (None, Some(_)) => feature("xid_tracepoint", FeatureState::Active, String::new()),
    });
    features.push(match &kernel.watcher.blind {
        Some(error) => feature("mapping_watch", FeatureState::Degraded, told(error, rights)),
        None => feature("mapping_watch", FeatureState::Active, String::new()),
    });
    features
}

/// Where tracefs was not to be read, what looks unsupported may only be hidden.
pub(crate) fn hide(features: &mut [Feature]) {
    for feature in features.iter_mut().filter(|one| TRACED.contains(&one.name)) {
        if feature.state == FeatureState::Active {
            continue;
        }
        if feature.state == FeatureState::Unsupported {
            feature.state = FeatureState::Broken;
        }
        feature.reason = format!("tracefs cannot be read (see the feature tracefs): {}", feature.reason);
    }
}

/// What went wrong, and the one thing that is missing before it, where it is a right.
pub(crate) fn told(error: &(dyn std::error::Error + 'static), rights: &Rights) -> String {
    match rights.why_refused().filter(|_| is_refusal(error)) {
        Some(why) => format!("{why} ({})", chain(error)),
        None => chain(error),
    }
}

fn is_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| {
        error
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
    })
}

/// Without the kernel side: every one of its features is broken for the same reason.
pub(crate) fn without_kernel(reason: &str) -> Vec<Feature> {
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
    .map(|name| feature(name, FeatureState::Broken, reason.to_owned()))
    .into()
}

pub(crate) fn pid_namespace(host: &Host) -> Feature {
    match host.in_initial_pid_namespace() {
        Ok(true) => feature("host_pid_namespace", FeatureState::Active, String::new()),
        Ok(false) => feature(
            "host_pid_namespace",
            FeatureState::Degraded,
            "not in the host's PID namespace: NVML's process lists mean nothing here (set hostPID: true, or run \
             with --pid=host)"
                .into(),
        ),
        Err(error) => feature("host_pid_namespace", FeatureState::Broken, chain(&error)),
    }
}

pub(crate) fn feature(name: &'static str, state: FeatureState, reason: String) -> Feature {
    Feature { name, state, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c107_the_drivers_tracepoint_is_read_at_the_offsets_of_its_format_file() {
        let root = tempfile::tempdir().expect("a directory");
        let event = root.path().join("sys/kernel/tracing/events/nvidia/nvidia_dev_xid");
        std::fs::create_dir_all(&event).expect("writable");
        let format = |last: &str| {
            format!(
                "name: nvidia_dev_xid\nID: 2101\nformat:\n\
                 \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
                 \tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n\
                 \tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;\n\
                 \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
                 \tfield:__data_loc char[] dev;\toffset:8;\tsize:4;\tsigned:0;\n\
                 \tfield:u32 error_code;\toffset:12;\tsize:4;\tsigned:0;\n{last}\n\
                 print fmt: \"Xid (PCI:%s): %u, %s\", __get_str(dev), REC->error_code, __get_str(msg)\n"
            )
        };
        let host = Host::at(root.path());
        let write = |text: String| std::fs::write(event.join("format"), text).expect("writable");
        write(format("\tfield:__data_loc char[] msg;\toffset:16;\tsize:4;\tsigned:0;\n"));
        assert_eq!(xid(&host), Some(XidOffsets { code: 12, device: 8, message: 16 }));
        write(format(""));
        assert_eq!(xid(&host), None, "a layout that is not the one known is not read");
        assert_eq!(xid(&Host::at("/nowhere")), None);
    }
}
