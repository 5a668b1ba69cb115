//! Owns what this host lets the agent do, and how that is said: in the log, on `/status`, as metrics and by `doctor`.
//! Refuses to fail the start for one missing facility: each costs its own feature only.

mod gpus;
mod hooks;
mod surroundings;
mod trials;
mod words;

use std::path::Path;

use cotenant_device::Hearing;
use cotenant_host::{Host, HostError};
use cotenant_kernel::{
    Calibration, HostFacts, Kernel, MapSizes, Plan, Probes, Site, TaskOffsets, Trials, Tried, XidOffsets,
    calibrate, site, start, trials,
};
use cotenant_model::{
    Absence,
    view::{Feature, FeatureState},
};

pub(crate) use gpus::{Visible, driver, libraries, nvml, visibility};
pub(crate) use hooks::recorded;
pub(crate) use surroundings::{Surroundings, judge, look, unprivileged};
pub(crate) use trials::{Diagnosis, diagnose, report};

use crate::discovery::chain;
use hooks::{kernel, without_kernel};
use tracing::warn;

/// Attribution rests on these; without one of them `/readyz` says no, and `doctor` says broken.
const NEEDED: [&str; 6] = [
    "allocation_probes",
    "process_life",
    "library_access",
    "host_pid_namespace",
    "gpu_visibility",
    "configuration",
];

/// Whether something does not work as it should.
pub(crate) const fn bad(state: FeatureState) -> bool {
    !matches!(state, FeatureState::Active | FeatureState::Disabled)
}

/// Whether attribution can be relied on.
pub(crate) fn ready(features: &[Feature]) -> bool {
    !features.iter().any(|feature| NEEDED.contains(&feature.name) && bad(feature.state))
}

/// A feature with what is lost and what helps, where anything is lost.
pub(crate) fn feature(name: &'static str, state: FeatureState, reason: String) -> Feature {
    // In whatever state: every test that comes by a feature asks for its words.
    debug_assert!(words::known(name), "{name} has no words: features/words.rs");
    let (lost, remedy) = if bad(state) { words::of(name) } else { ("", "") };
    Feature { name, state, reason, lost: lost.to_owned(), remedy: remedy.to_owned() }
}

/// The same where the cause has a better remedy.
pub(crate) fn remedied(feature: Feature, remedy: impl Into<String>) -> Feature {
    Feature { remedy: remedy.into(), ..feature }
}

fn active(name: &'static str, seen: impl Into<String>) -> Feature {
    feature(name, FeatureState::Active, seen.into())
}

/// What the plan rests on, and why parts of it could not be had.
pub(crate) struct Asked {
    pub(crate) facts: HostFacts,
    pub(crate) btf: Result<(), String>,
    pub(crate) symbols: Result<(), String>,
}

/// Asks the host for what the plan rests on. Tracefs is mounted by then if it can be.
pub(crate) fn facts(host: &Host) -> Asked {
    let kernel = host.kernel_version().map_or((0, 0), |version| (version.major, version.minor));
    let offset = |category, event, field: &str| {
        host.event_format(category, event).ok()?.field(field).map(|field| field.offset)
    };
    let btf = host.btf();
    let signal_live = btf.as_ref().ok().and_then(|btf| {
        Some((
            btf.member_offset("task_struct", "signal").ok()?,
            btf.member_offset("signal_struct", "live").ok()?,
        ))
    });
    let task = btf.as_ref().ok().and_then(|btf| {
        let of = |member| btf.member_offset("task_struct", member).ok();
        Some(TaskOffsets {
            pid: of("pid")?,
            state: of("__state").or_else(|| of("state"))?,
            flags: of("flags")?,
        })
    });
    let kprobes = host.has_kprobes();
    let interrupts = interrupts(host);
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
        interrupts: interrupts.as_ref().ok().copied().flatten(),
        contention: host.event_format("lock", "contention_begin").is_ok(),
        victim_offset: offset("oom", "mark_victim", "pid"),
        xid: xid(host),
    };
    let symbols = match interrupts {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err("/proc/kallsyms names no interrupt entry of this architecture".to_owned()),
        Err(error) => Err(chain(&error)),
    };
    let btf = match btf {
        Ok(_) if task.is_none() => Err("it does not describe a task as this agent knows it".to_owned()),
        Ok(_) => Ok(()),
        Err(error) => Err(chain(&error)),
    };
    Asked { facts, btf, symbols }
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
        Some(Hearing::Released) => (FeatureState::Disabled, "NVML is let go of, on request".into()),
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
fn interrupts(host: &Host) -> Result<Option<[[u64; 2]; 2]>, HostError> {
    let names = [
        "asm_common_interrupt",
        "__irqentry_text_start",
        "__irqentry_text_end",
        "handle_softirqs",
        "__do_softirq",
    ];
    let ranges = host.text_range(&names)?;
    let start = |at: usize| ranges.get(at).copied().flatten().map(|(start, _)| start);
    let Some(entry) = start(0).or_else(|| start(1)) else { return Ok(None) };
    let Some(end) = start(2).filter(|end| *end > entry) else { return Ok(None) };
    let (soft, soft_end) = ranges[3].or(ranges[4]).unwrap_or((0, 0));
    Ok(Some([[entry, end - entry], [soft, soft_end - soft]]))
}

/// What starting the kernel side came to.
pub(crate) struct Attempt {
    pub(crate) kernel: Option<Kernel>,
    /// As far as they were made: those that the start itself has answered are not.
    pub(crate) trials: Trials,
    pub(crate) features: Vec<Feature>,
}

/// What a start without any fault has shown.
const ANSWERED: Trials = Trials {
    bpf: Tried::Works,
    map: Tried::Works,
    ring_buffer: Tried::Works,
    program: Tried::Works,
    perf: Tried::Works,
    perf_all: Tried::Works,
    uprobe: Tried::NotTried,
    uprobe_multi: Tried::NotTried,
    raw_tracepoint: Tried::NotTried,
    attach_cookie: None,
    bpf_loop: None,
};

/// Starts the kernel side. What fails is found out by trials, unless they were made before.
pub(crate) fn attempt(plan: &Plan, sizes: MapSizes, facts: &Surroundings, before: Option<Trials>) -> Attempt {
    match start(plan, sizes, std::process::id()) {
        Ok(started) => {
            let watches = started.watcher.blind.is_none();
            let answered = watches && started.missing.is_empty() && started.probes.links_many();
            let trials = before.unwrap_or_else(|| if answered { ANSWERED } else { trials() });
            let features = kernel(plan, &started, facts, diagnose(facts, &trials).as_ref());
            Attempt { kernel: Some(started), trials, features }
        }
        Err(error) => {
            let trials = before.unwrap_or_else(trials);
            let diagnosis = diagnose(facts, &trials);
            let reason = chain(&error);
            let missing = diagnosis.as_ref().map_or("unknown, see the error", |found| found.missing.as_str());
            warn!(error = reason, missing, "no eBPF: allocations are not seen, NVML's figures only");
            Attempt { kernel: None, trials, features: without_kernel(&reason, diagnosis.as_ref()) }
        }
    }
}

fn is_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| {
        error
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
    })
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
