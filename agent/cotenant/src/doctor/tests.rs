use std::{fs, os::unix::fs::symlink, path::Path};

use super::*;

/// A host as a directory: good, unless a test takes something away.
struct Recorded(tempfile::TempDir);

impl Recorded {
    fn new(release: &str) -> Self {
        let host = Self(tempfile::tempdir().expect("a directory"));
        host.put("proc/sys/kernel/osrelease", release);
        host.put("proc/sys/kernel/perf_event_paranoid", "2\n");
        host.put("proc/sys/kernel/kptr_restrict", "0\n");
        host.put("proc/sys/kernel/unprivileged_bpf_disabled", "2\n");
        host.status("000001ffffffffff", 0);
        host.put("proc/self/uid_map", "0 0 4294967295\n");
        host.link("proc/self/ns/pid", "pid:[4026531836]");
        host.link("proc/thread-self/ns/cgroup", "cgroup:[4026531835]");
        host.put(
            "proc/kallsyms",
            "ffffffff81000000 T asm_common_interrupt\nffffffff81000100 T __irqentry_text_end\n\
             ffffffff81000200 T handle_softirqs\nffffffff81000300 T next\n",
        );
        host.put("sys/bus/event_source/devices/uprobe/type", "9\n");
        host.put("sys/bus/event_source/devices/kprobe/type", "8\n");
        host.put("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        host.put("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n");
        let event = |fields: &str| format!("name: x\nID: 1\nformat:\n{fields}\n");
        let field = |name: &str| format!("\tfield:int {name};\toffset:8;\tsize:4;\tsigned:1;\n");
        let events = "sys/kernel/tracing/events";
        host.put(&format!("{events}/sched/sched_process_exit/format"), &event(&field("group_dead")));
        host.put(&format!("{events}/oom/mark_victim/format"), &event(&field("pid")));
        host.put(&format!("{events}/lock/contention_begin/format"), &event(&field("flags")));
        host.put(&format!("{events}/syscalls/sys_enter_ioctl/format"), &event(&field("fd")));
        let xid = ["error_code", "dev", "msg"].map(field).concat();
        host.put(&format!("{events}/nvidia/nvidia_dev_xid/format"), &event(xid.trim_end()));
        // The running kernel's: what matters of it is that it describes a task.
        host.link("sys/kernel/btf/vmlinux", "/sys/kernel/btf/vmlinux");
        host
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }

    fn link(&self, path: &str, to: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        let _ = fs::remove_file(&path);
        symlink(to, path).expect("a link");
    }

    fn status(&self, effective: &str, seccomp: u32) {
        let own = fs::read_to_string("/proc/self/status").expect("a status");
        let lines = own.lines().map(|line| match line.split_once(':') {
            Some(("CapEff", _)) => format!("CapEff:\t{effective}\n"),
            Some(("Seccomp", _)) => format!("Seccomp:\t{seccomp}\n"),
            _ => format!("{line}\n"),
        });
        self.put("proc/self/status", &lines.collect::<String>());
    }

    fn without(&self, path: &str) {
        let path = self.0.path().join(path);
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.expect("it is there");
    }

    fn checks(&self) -> Vec<Feature> {
        let mut config = Config::default();
        config.agent.root = self.0.path().to_owned();
        judge::judge(&facts::gather(&config, Ok(None), &Access::default()))
    }

    /// The verdict, and what is not as it should be.
    fn told(&self) -> (Verdict, Vec<&'static str>) {
        let checks = self.checks();
        let wrong = checks.iter().filter(|check| bad(check.state)).map(|check| check.name).collect();
        (Verdict::of(&checks), wrong)
    }

    fn check(&self, name: &str) -> Feature {
        self.checks().into_iter().find(|check| check.name == name).expect(name)
    }
}

#[test]
fn a_good_recorded_host_is_ok() {
    for release in ["6.18.44-fc\n", "6.6.0\n"] {
        assert_eq!(Recorded::new(release).told(), (Verdict::Ok, vec![]));
    }
}

#[test]
fn c77_each_recorded_kernel_says_what_it_lacks() {
    let (verdict, wrong) = Recorded::new("6.1.0-44-amd64\n").told();
    assert_eq!((verdict, wrong), (Verdict::Degraded, vec!["uprobe_multi"]));
    let (verdict, wrong) = Recorded::new("5.15.0-1084-aws\n").told();
    assert_eq!((verdict, wrong), (Verdict::Degraded, vec!["uprobe_multi", "bpf_loop", "vmm_unmap"]));
    for release in ["5.10.0-30-amd64\n", "5.4.0-200-generic\n"] {
        let host = Recorded::new(release);
        let (verdict, wrong) = host.told();
        assert_eq!(verdict, Verdict::Broken);
        assert!(wrong.contains(&"kernel") && wrong.contains(&"attach_cookies"), "{wrong:?}");
        let probes = host.check("allocation_probes");
        assert!(probes.reason.contains("5.15") && probes.remedy.contains("5.15"), "{probes:?}");
    }
}

#[test]
fn c74_without_btf_attribution_goes_on() {
    let host = Recorded::new("6.18.0\n");
    host.without("sys/kernel/btf/vmlinux");
    let (verdict, wrong) = host.told();
    assert_eq!((verdict, wrong), (Verdict::Degraded, vec!["btf", "waits", "lock_mode"]));
}

#[test]
fn without_tracefs_the_end_of_a_process_is_not_seen() {
    let host = Recorded::new("6.1.0\n");
    host.without("sys/kernel/tracing");
    host.without("sys/kernel/btf/vmlinux");
    let (verdict, wrong) = host.told();
    assert_eq!(verdict, Verdict::Broken);
    for name in ["tracefs", "btf", "process_life", "oom_kills"] {
        assert!(wrong.contains(&name), "{name} not in {wrong:?}");
    }
}

#[test]
fn c72_rights_are_judged_one_by_one() {
    let host = Recorded::new("6.18.0\n");
    host.status("0000000000000000", 2);
    let (verdict, wrong) = host.told();
    assert_eq!(verdict, Verdict::Broken);
    assert!(wrong.contains(&"capabilities"));
    assert!(host.check("allocation_probes").reason.contains("CAP_BPF is missing"));
    // BPF, PERFMON, SYS_PTRACE, DAC_READ_SEARCH and SYSLOG.
    host.status("000000c400080004", 2);
    assert_eq!(host.told(), (Verdict::Ok, vec![]));
    host.put("proc/sys/kernel/perf_event_paranoid", "4\n");
    assert_eq!(host.told(), (Verdict::Degraded, vec!["perf_event_paranoid"]));
    host.status("000000c400000004", 2);
    assert!(host.check("capabilities").reason.contains("SYS_PTRACE"));
}

#[test]
fn lockdown_at_confidentiality_is_broken_and_at_integrity_is_not() {
    let host = Recorded::new("6.18.0\n");
    host.put("sys/kernel/security/lsm", "lockdown,capability");
    host.put("sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
    assert_eq!(host.told(), (Verdict::Ok, vec![]));
    host.put("sys/kernel/security/lockdown", "none integrity [confidentiality]\n");
    assert_eq!(host.told().0, Verdict::Broken);
    assert!(host.check("allocation_probes").reason.contains("lockdown"));
}

#[test]
fn c29_a_pid_namespace_of_its_own_breaks_attribution() {
    let host = Recorded::new("6.18.0\n");
    host.link("proc/self/ns/pid", "pid:[4026532841]");
    assert_eq!(host.told(), (Verdict::Broken, vec!["host_pid_namespace"]));
}

#[test]
fn both_versions_of_cgroups_are_told_apart() {
    let host = Recorded::new("6.18.0\n");
    host.without("sys/fs/cgroup");
    assert_eq!(host.told(), (Verdict::Degraded, vec!["cgroups"]));
    host.put("sys/fs/cgroup/memory/tasks", "");
    assert_eq!(host.check("cgroups").reason, "v1 only");
    host.put("sys/fs/cgroup/unified/cgroup.procs", "");
    assert_eq!(host.check("cgroups").reason, "hybrid");
}

#[test]
fn c58_a_driver_that_differs_from_its_libraries_is_told_by_their_files() {
    let host = Recorded::new("6.18.0\n");
    host.put("sys/module/nvidia/version", "580.159.04\n");
    host.put("usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "");
    host.put("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04", "");
    assert_eq!(host.told(), (Verdict::Ok, vec![]));
    host.put("sys/module/nvidia/version", "580.95.05\n");
    assert_eq!(host.told(), (Verdict::Degraded, vec!["driver_version"]));
}

#[test]
fn c53_a_gpu_without_any_libcuda_is_told() {
    let host = Recorded::new("6.18.0\n");
    assert!(!bad(host.check("libcuda").state), "no GPU, no libcuda: nothing is missing");
    host.put("dev/nvidia0", "");
    host.put("sys/module/nvidia/version", "580.159.04\n");
    let check = host.check("libcuda");
    assert!(check.state == FeatureState::Degraded && check.remedy.contains("libcuda"), "{check:?}");
}

fn with_agent(features: &serde_json::Value, code: u16) -> Feature {
    let host = Recorded::new("6.18.0\n");
    let mut config = Config::default();
    config.agent.root = host.0.path().to_owned();
    let mut facts = facts::gather(&config, Ok(None), &Access::default());
    facts.agent = Some(ask::Agent {
        address: config.server.listen,
        status: Ok(serde_json::json!({ "version": "0.1.0", "features": features })),
        readiness: Some((code, String::new())),
    });
    judge::judge(&facts).into_iter().find(|check| check.name == "agent").expect("an agent")
}

#[test]
fn what_the_agent_says_is_passed_on() {
    let active =
        serde_json::json!([{ "name": "waits", "state": "active" }, { "name": "otlp", "state": "disabled" }]);
    assert_eq!(with_agent(&active, 200).state, FeatureState::Active);
    let degraded = serde_json::json!([
        { "name": "btf", "state": "unsupported", "reason": "r", "lost": "waits", "remedy": "a kernel" },
    ]);
    let check = with_agent(&degraded, 200);
    assert_eq!(
        (check.state, check.lost.as_str(), check.remedy.as_str()),
        (FeatureState::Degraded, "waits", "a kernel")
    );
    assert!(check.reason.contains("btf unsupported"));
    let broken = with_agent(&degraded, 503);
    assert_eq!(broken.state, FeatureState::Broken);
    assert_eq!(Verdict::of(&[broken]), Verdict::Broken);
}

#[test]
fn an_agent_that_lets_nobody_in_is_a_question_without_an_answer() {
    let host = Recorded::new("6.18.0\n");
    let mut config = Config::default();
    config.agent.root = host.0.path().to_owned();
    let mut facts = facts::gather(&config, Ok(None), &Access::default());
    let mut say = |status| {
        facts.agent =
            Some(ask::Agent { address: config.server.listen, status: Err(status), readiness: None });
        judge::judge(&facts).into_iter().find(|check| check.name == "agent").expect("an agent")
    };
    let absent = say(ask::Unasked::Absent("refused".to_owned()));
    assert_eq!(absent.state, FeatureState::Active);
    let closed = say(ask::Unasked::Unadmitted { reason: "401".to_owned(), remedy: "--user".to_owned() });
    assert_eq!((closed.state, closed.remedy.as_str()), (FeatureState::Degraded, "--user"));
    assert!(!closed.lost.is_empty());
}

#[test]
fn both_prints_have_every_check() {
    let host = Recorded::new("5.15.0\n");
    let mut config = Config::default();
    config.agent.root = host.0.path().to_owned();
    let facts = facts::gather(&config, Err("line 3: port".to_owned()), &Access::default());
    let checks = judge::judge(&facts);
    let verdict = Verdict::of(&checks);
    assert_eq!(verdict, Verdict::Broken, "an agent does not start with such a file");
    let page: serde_json::Value = serde_json::from_str(&print::json(&facts, &checks, verdict)).expect("JSON");
    let (rows, text) = (page["checks"].as_array().expect("checks"), print::text(&checks, verdict));
    assert_eq!(rows.len(), checks.len());
    for (row, check) in rows.iter().zip(&checks) {
        assert_eq!(row["name"], check.name);
        assert!(text.contains(check.name) && text.contains(&check.lost) && text.contains(&check.remedy));
        let state = row["state"].as_str().expect("a state");
        assert!(["ok", "degraded", "unsupported", "broken"].contains(&state));
        assert!(state == "ok" || (!check.lost.is_empty() && !check.remedy.is_empty()), "{check:?}");
    }
    assert_eq!(page["verdict"], "broken");
    assert_eq!(page["versions"]["kernel"], "5.15.0");
    assert!(text.ends_with("are not ok)\n"));
}

#[test]
fn nothing_is_tried_on_a_recorded_host() {
    let facts = {
        let mut config = Config::default();
        config.agent.root = Path::new("/nonexistent").to_owned();
        facts::gather(&config, Ok(None), &Access::default())
    };
    assert!(facts.trials.is_none() && facts.attempted.is_none() && facts.nvml.is_none());
    assert!(facts.agent.is_none());
    assert_eq!(Verdict::of(&judge::judge(&facts)), Verdict::Broken);
}
