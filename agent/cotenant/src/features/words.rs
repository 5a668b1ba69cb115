//! Owns the words about each feature: what is lost without it, and what brings it back.
//! Refuses states: whether something is lost here is decided beside the facts.

/// Name, what is lost, and the remedy that helps unless the cause has a better one.
static WORDS: &[(&str, &str, &str)] = &[
    ("agent", "what the agent itself lists under it", "journalctl -u cotenant, or kubectl logs of its pod"),
    (
        "alertmanager_push",
        "nothing reaches Alertmanager from here; incidents stay on /metrics and /api/v1/incidents",
        "cotenant config check FILE",
    ),
    (
        "allocation_probes",
        "every figure by tenant: no allocation, wait or failure is seen, only NVML's figures are left",
        "cotenant doctor, as the agent runs, names the one thing that is missing",
    ),
    (
        "api_watch",
        "pods' labels, and teams made of them: a tenant is a pod",
        "apiWatch.enabled=true of the chart, or kubernetes.api_watch = false; kubectl get --raw /readyz",
    ),
    (
        "attach_cookies",
        "allocation probes: a program cannot tell which symbol it was hit at",
        "a kernel of 5.15 or later",
    ),
    (
        "bpf",
        "everything by tenant: no program can be loaded",
        "give the agent CAP_BPF and CAP_PERFMON, or run it as root",
    ),
    (
        "bpf_loop",
        "cuMemUnmap: memory released while still mapped stays booked until its process ends",
        "a kernel of 5.17 or later",
    ),
    (
        "btf",
        "who waits for whom (the feature waits); before Linux 6.16, and with threads that outlive the main one, also \
         when a process ends",
        "a kernel with CONFIG_DEBUG_INFO_BTF=y; in a container mount the host's /sys/kernel/btf",
    ),
    (
        "capabilities",
        "what needs them",
        "securityContext.capabilities.add (Kubernetes), AmbientCapabilities= (systemd), --cap-add (docker), or sudo",
    ),
    (
        "cgroup_namespace",
        "the tenant of processes whose cgroup path begins with /.. as seen from here",
        "docker run --cgroupns=host; or give the agent CAP_SYS_ADMIN and CAP_SYS_PTRACE, and it enters the host's",
    ),
    (
        "cgroups",
        "tenants: no process has a path that says whose it is",
        "mount -t cgroup2 none /sys/fs/cgroup; in a container mount the host's /sys/fs/cgroup",
    ),
    (
        "clock_source",
        "precision: each time stamp costs a microsecond or more, which every probed call pays several times",
        "boot with a stable TSC, then: echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource",
    ),
    ("configuration", "the agent does not start with this file", "cotenant config check FILE"),
    (
        "control",
        "cotenant release and resume; the signals USR1 and USR2 still work",
        "let agent.control name a file in a directory that the agent may write, such as /run/cotenant",
    ),
    (
        "dmem",
        "limits of device memory by cgroup are neither seen nor kept",
        "a kernel of 6.14 or later with CONFIG_CGROUP_DMEM=y",
    ),
    (
        "driver_version",
        "NVML, and every CUDA program that starts from now on",
        "unload and load the module (rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; modprobe nvidia), or reboot",
    ),
    (
        "endpoint",
        "what the new web configuration was to bring; the last valid one stays in force",
        "mend the file that the reason names; it is read again when it changes",
    ),
    (
        "gpu_boundary",
        "the GPU of an allocation where a process uses several: it is known from the thread's context only",
        "a kernel with CONFIG_KPROBE_EVENTS=y or CONFIG_FTRACE_SYSCALLS=y, and kernel.syscall_tracepoint = true",
    ),
    (
        "gpu_visibility",
        "figures of the GPUs that NVML does not list, and the check of every account against the device",
        "nvidia-smi -L; dmesg | grep -i NVRM; in a container set NVIDIA_VISIBLE_DEVICES=all",
    ),
    (
        "grants",
        "what was granted to whom, beside what is used",
        "mount /var/lib/kubelet/pod-resources from the host; systemctl status kubelet",
    ),
    (
        "host_pid_namespace",
        "whose a process is: the kernel and NVML name processes by PIDs that mean nothing here",
        "hostPID: true (Kubernetes), --pid=host (docker)",
    ),
    (
        "job_grants",
        "what Slurm granted its jobs, beside what they use",
        "slurm.job_mapping: a directory in which the prolog writes; chown root, chmod 755, files 644. In a container mount it",
    ),
    (
        "kernel",
        "attribution: probes need a ring buffer (Linux 5.8) and attach cookies (5.15)",
        "a kernel of 5.15 or later; 6.6 for links of many probes",
    ),
    (
        "kernel_log",
        "the limit's owner of a kill, and Xids",
        "give the agent CAP_SYSLOG (or sysctl kernel.dmesg_restrict=0); /dev/kmsg itself is not needed, syslog(2) stands in for it",
    ),
    (
        "kernel_symbols",
        "the classes of waits; and an interrupt may be taken for the process that it interrupted",
        "sysctl kernel.kptr_restrict=1, and give the agent CAP_SYSLOG",
    ),
    ("kprobes", "the cheapest way to the GPU of an allocation", "a kernel with CONFIG_KPROBE_EVENTS=y"),
    (
        "kubelet",
        "which GPUs are granted to which pod",
        "mount /var/lib/kubelet/pod-resources from the host; systemctl status kubelet",
    ),
    (
        "libcuda",
        "allocations through the libcuda files that are not probed",
        "curl -s http://127.0.0.1:9468/status | jq .libraries says what was refused, and why",
    ),
    (
        "libraries",
        "allocations through the libcuda files that are not probed",
        "curl -s http://127.0.0.1:9468/status | jq .libraries says what was refused, and why",
    ),
    (
        "library_access",
        "the calls of every tenant whose libcuda cannot be opened",
        "give the agent CAP_SYS_PTRACE",
    ),
    (
        "lock_mode",
        "whether a wait was to read or to write a lock",
        "a kernel of 5.19 or later, with tracefs mounted",
    ),
    (
        "lockdown",
        "every program that reads kernel memory: waits, process ends, kills, the GPU by the kernel boundary",
        "boot with lockdown=integrity or without lockdown= (it cannot be lowered while running)",
    ),
    (
        "mapping_watch",
        "time: new processes are found by a look every 2 s, and what they allocate until then counts as joined late",
        "give the agent CAP_PERFMON; sysctl kernel.perf_event_paranoid=2",
    ),
    (
        "nvml",
        "device figures (use, utilisation, errors) and the check of every account against the device",
        "nvidia-smi",
    ),
    ("oom_kills", "kills for memory by the kernel", "mount -t tracefs tracefs /sys/kernel/tracing"),
    (
        "otlp",
        "metrics, traces and logs at the collector; /metrics is not touched",
        "cotenant config check FILE",
    ),
    (
        "perf_event_paranoid",
        "events of other processes: mappings, process ends, kills",
        "sysctl kernel.perf_event_paranoid=2, or give the agent CAP_SYS_ADMIN",
    ),
    (
        "perf_events",
        "mappings, process ends and kills are not seen, and on kernels before 6.6 nothing can be probed",
        "give the agent CAP_PERFMON, or run it as root",
    ),
    (
        "pod_names",
        "the names of pods: a tenant is a UID",
        "mount /var/log/pods, or the container runtime's socket, from the host (read-only)",
    ),
    (
        "private_files",
        "tenants whose libcuda lies below a directory that is private to its user",
        "give the agent CAP_DAC_READ_SEARCH",
    ),
    (
        "privilege_drop",
        "the agent's threads keep every capability that it was started with; nothing that it measures",
        "a kernel of 4.3 or later, and no filter on prctl and capset (seccompProfile: the chart's)",
    ),
    (
        "probe_budget",
        "times, waits and failures of the calls that are not timed, and pool allocations of libraries that are shed: their \
         tenants are events_lost",
        "raise kernel.probe_share, or have the tenant call the driver less often: cotenant_gpu_calls_total says who does",
    ),
    (
        "probe_cost",
        "what probes cost their callers: cotenant_agent_probe_cost_seconds and the budget, which rests on it",
        "hostPID: true; on a busy node start the agent again: it is measured once",
    ),
    (
        "process_life",
        "when a process ends: what it held may stay booked, or be taken for freed too early",
        "mount -t tracefs tracefs /sys/kernel/tracing; a kernel of 6.16 or later, or one with BTF",
    ),
    ("raw_tracepoints", "waits and blame", "a kernel with CONFIG_BPF_EVENTS=y and CONFIG_TRACEPOINTS=y"),
    ("ring_buffer", "everything by tenant: the programs report through it", "a kernel of 5.8 or later"),
    (
        "seccomp",
        "the system calls that it refuses",
        "allow bpf and perf_event_open in the profile (seccompProfile: the chart's, or --security-opt seccomp=FILE)",
    ),
    (
        "tracefs",
        "process ends, kills for memory, and the layout of the kernel's events",
        "mount -t tracefs tracefs /sys/kernel/tracing; in a container mount the host's /sys/kernel/tracing",
    ),
    (
        "unprivileged_bpf",
        "nothing of the agent's: users without rights may load programs, which weakens this host",
        "sysctl kernel.unprivileged_bpf_disabled=1",
    ),
    (
        "uprobe_multi",
        "speed only: letting go of a library takes some 100 ms a symbol",
        "a kernel of 6.6 or later",
    ),
    (
        "uprobes",
        "every figure by tenant: no call into the driver is seen",
        "a kernel with CONFIG_UPROBE_EVENTS=y and CONFIG_BPF_EVENTS=y",
    ),
    (
        "vmm_unmap",
        "cuMemUnmap: memory released while still mapped stays booked until its process ends",
        "a kernel of 5.17 or later",
    ),
    (
        "waits",
        "who waits for whom: waits, blame, and what rests on them",
        "a kernel with BTF, and waits.enabled = true",
    ),
    (
        "xid_events",
        "one of three ways to hear of faults: Xids come from the kernel's log or the driver's tracepoint",
        "nvidia-smi (NVML has to answer); dmesg | grep -i NVRM where a wait is stuck",
    ),
    (
        "xid_tracepoint",
        "one of three ways to hear of faults: Xids are taken from the kernel's log",
        "driver 550 or later, its module loaded before the agent starts; tracefs mounted",
    ),
];

/// Whether anything is said of a feature.
pub(super) fn known(name: &str) -> bool {
    WORDS.binary_search_by(|(of, _, _)| (*of).cmp(name)).is_ok()
}

/// What is lost, and the remedy. A feature without words here has none.
pub(super) fn of(name: &str) -> (&'static str, &'static str) {
    let found = WORDS.binary_search_by(|(of, _, _)| (*of).cmp(name)).ok();
    found.and_then(|at| WORDS.get(at)).map_or(("", ""), |(_, lost, remedy)| (lost, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_none_is_there_twice() {
        assert!(WORDS.is_sorted_by(|left, right| left.0 < right.0));
        for (name, lost, remedy) in WORDS {
            assert_eq!(of(name).0, *lost);
            assert!(known(name) && !lost.is_empty() && !remedy.is_empty(), "{name}");
        }
        assert_eq!(of("no_such_feature"), ("", ""));
    }
}
