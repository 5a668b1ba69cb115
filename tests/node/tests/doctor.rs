//! Owns the claims of `cotenant doctor`: what is missing is named, and what it says is what an agent there reports.
//! Refuses recorded hosts: each surrounding is made of the running kernel, with something really taken away.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Agent, Cgroup, Doctor, SimulatedNode, World, artefacts};
use cotenant_sim_state::NodeConfig;
use serde_json::{Value, json};

fn node(directory: &Path) -> Result<SimulatedNode> {
    SimulatedNode::create(directory, &NodeConfig::h200(1, 0.0))
}

/// The states that the agent reports, in the doctor's words.
fn reported(agent: &Agent) -> Result<BTreeMap<String, String>> {
    let begun = Instant::now();
    loop {
        let status = agent.status()?;
        let features = status["features"].as_array().context("features")?;
        let text = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
        let asked = features.iter().all(|of| !text(of, "reason").contains("not_yet"));
        if asked || begun.elapsed() > Duration::from_secs(10) {
            return Ok(features
                .iter()
                .map(|of| {
                    let state = match text(of, "state").as_str() {
                        "active" | "disabled" => "ok".to_owned(),
                        other => other.to_owned(),
                    };
                    (text(of, "name"), state)
                })
                .collect());
        }
        sleep(Duration::from_millis(50));
    }
}

/// What the doctor says of each feature of the agent is what the agent says.
fn agree(doctor: &Doctor, agent: &Agent) -> Result<()> {
    let reported = reported(agent)?;
    let mut compared = 0;
    for (name, state) in &reported {
        // Of where it sends to, who listens and what it costs the agent speaks alone.
        let Ok(said) = doctor.check(name) else { continue };
        compared += 1;
        ensure!(
            said["state"] == state.as_str(),
            "{name} is {state} in the agent, and the doctor says {said}"
        );
    }
    ensure!(compared >= 25, "{compared} of {reported:?}");
    for name in doctor.wrong().keys() {
        let check = doctor.check(name)?;
        let told = |key: &str| check[key].as_str().is_some_and(|text| !text.is_empty());
        ensure!(told("seen") && told("lost") && told("remedy"), "{check}");
    }
    Ok(())
}

/// Starts an agent under the launcher, and asks the doctor under the same one; they agree.
fn both(node: &SimulatedNode, launcher: &[&str]) -> Result<(Doctor, Agent)> {
    let agent = node.agent_under(launcher, "")?;
    let doctor = node.doctor(launcher, &[])?;
    agree(&doctor, &agent)?;
    Ok((doctor, agent))
}

fn says(doctor: &Doctor, name: &str, state: &str, word: &str) -> Result<()> {
    let check = doctor.check(name)?;
    ensure!(check["state"] == state, "{check}");
    ensure!(check["seen"].as_str().is_some_and(|seen| seen.contains(word)), "{word} not in {check}");
    Ok(())
}

#[test]
fn on_a_good_node_everything_is_ok_and_the_libraries_in_use_are_probed() -> Result<()> {
    let world = World::create(1, "")?;
    let doctor = world.node.doctor(&[], &[])?;
    // No simulated driver has a tracepoint, and the agent says so too.
    let (mut wrong, agent) = (doctor.wrong(), doctor.check("agent")?);
    ensure!(wrong.remove("xid_tracepoint") == Some("unsupported"));
    ensure!(wrong.remove("agent") == Some("degraded") && wrong.is_empty(), "{wrong:?} {agent}");
    ensure!(doctor.code == Some(1) && doctor.page["verdict"] == "degraded");
    agree(&doctor, &world.agent)?;
    says(&doctor, "libcuda", "ok", "all probed")?;
    says(&doctor, "agent", "degraded", ", ready: xid_tracepoint unsupported")?;
    says(&doctor, "uprobes", "ok", "tried, works")?;
    Ok(())
}

#[test]
fn an_ordinary_user_is_told_which_capability_is_missing() -> Result<()> {
    let directory = tempfile::tempdir()?;
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
    let node = node(directory.path())?;
    let (doctor, agent) = both(&node, &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"])?;
    ensure!(doctor.code == Some(2) && doctor.page["verdict"] == "broken");
    says(&doctor, "bpf", "broken", "CAP_BPF is missing")?;
    says(&doctor, "allocation_probes", "broken", "CAP_BPF is missing")?;
    says(&doctor, "tracefs", "broken", "")?;
    ensure!(agent.get("/readyz", "text/plain")?.contains("CAP_BPF is missing"));
    Ok(())
}

#[test]
fn c72_each_capability_taken_away_alone_is_named_and_the_agent_says_the_same() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    for (capability, code, named) in [
        ("bpf", 2, "BPF"),
        ("perfmon", 2, "PERFMON"),
        ("sys_ptrace", 2, "SYS_PTRACE"),
        ("dac_read_search", 1, "DAC_READ_SEARCH"),
        ("syslog", 1, "SYSLOG"),
    ] {
        // SYS_ADMIN would stand for the first two.
        let set = format!("--bounding-set=-sys_admin,-{capability}");
        let (doctor, mut agent) =
            both(&node, &["setpriv", &set]).with_context(|| format!("without {capability}"))?;
        ensure!(doctor.code == Some(code), "{capability}: {:?} {:?}", doctor.code, doctor.wrong());
        let check = doctor.check("capabilities")?;
        ensure!(check["seen"] == format!("missing {named}"), "{check}");
        agent.stop()?;
    }
    let (doctor, _agent) = both(&node, &["setpriv", "--bounding-set=-sys_admin"])?;
    let mut wrong = doctor.wrong();
    // Nobody runs here that has one.
    wrong.remove("libcuda");
    // A simulated driver has no tracepoint, and the agent says so too.
    wrong.remove("xid_tracepoint");
    wrong.remove("agent");
    ensure!(wrong.is_empty(), "SYS_ADMIN is not needed (Linux 6.6): {wrong:?}");
    Ok(())
}

/// A shell that does something in mounts of its own, and then becomes the program.
fn mounts(script: &str) -> Vec<String> {
    let words = ["unshare", "--mount", "--", "/bin/sh", "-c"];
    let script = format!("{script} && exec \"$@\"");
    words.iter().map(|word| (*word).to_owned()).chain([script, "sh".to_owned()]).collect()
}

const NO_TRACEFS: &str = "for at in /sys/kernel/debug/tracing /sys/kernel/tracing; do \
     while umount $at 2>/dev/null; do :; done; done";

#[test]
fn without_tracefs_the_doctor_mounts_it_for_itself_alone() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    let mut agent = node.agent("")?;
    agent.stop()?;
    let left = directory.path().join("left");
    // It is run, not become: whoever comes after it sees the mounts that it leaves.
    let script = format!(
        "{NO_TRACEFS}; \"$@\"; code=$?; grep -c ' tracefs ' /proc/mounts > {}; exit $code",
        left.display()
    );
    let launcher = ["unshare", "--mount", "--", "/bin/sh", "-c", &script, "sh"];
    let doctor = node.doctor(&launcher, &[])?;
    says(&doctor, "tracefs", "ok", "")?;
    says(&doctor, "process_life", "ok", "")?;
    ensure!(fs::read_to_string(left)?.trim() == "0", "a mount was left behind");
    Ok(())
}

#[test]
fn without_tracefs_and_the_right_to_mount_it_attribution_is_broken() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    let mut launcher = mounts(NO_TRACEFS);
    launcher.extend(["setpriv".to_owned(), "--bounding-set=-sys_admin".to_owned()]);
    let launcher: Vec<&str> = launcher.iter().map(String::as_str).collect();
    let (doctor, agent) = both(&node, &launcher)?;
    ensure!(doctor.code == Some(2));
    says(&doctor, "tracefs", "broken", "not mounted")?;
    says(&doctor, "process_life", "broken", "")?;
    says(&doctor, "oom_kills", "broken", "tracefs")?;
    ensure!(agent.get("/readyz", "text/plain")?.starts_with("not ready"));
    Ok(())
}

#[test]
fn c74_with_btf_hidden_allocations_are_seen_and_waits_say_why_not() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    let launcher = mounts("mount -t tmpfs none /sys/kernel/btf");
    let launcher: Vec<&str> = launcher.iter().map(String::as_str).collect();
    let (doctor, agent) = both(&node, &launcher)?;
    ensure!(doctor.code == Some(1), "{:?}", doctor.wrong());
    for name in ["btf", "waits", "lock_mode"] {
        ensure!(doctor.check(name)?["state"] == "unsupported");
    }
    ensure!(agent.get("/readyz", "text/plain")?.starts_with("ready"));
    let cgroup = Cgroup::create(&format!("system.slice/btf-{}.service", std::process::id()))?;
    let mut tenant = node.tenant(
        "btf",
        &cgroup,
        "print up\nwait\ninit\nretain 0\nalloc a 64MiB\nprint held\nwait\n",
        &[],
    )?;
    tenant.expect("up")?;
    agent.until_probed(&node.directory.join("lib/libcuda.so.1"))?;
    tenant.go()?;
    tenant.expect("held")?;
    agent.until(|scrape| scrape.sum("cotenant_gpu_memory_live_bytes", &[]) >= 67_108_864.0)?;
    Ok(())
}

#[test]
fn c29_in_a_pid_namespace_of_its_own_attribution_is_broken() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    let launcher = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let (doctor, mut agent) = both(&node, &launcher)?;
    ensure!(doctor.code == Some(2));
    says(&doctor, "host_pid_namespace", "degraded", "PID namespace")?;
    ensure!(
        doctor.check("host_pid_namespace")?["remedy"].as_str().is_some_and(|text| text.contains("hostPID"))
    );
    // `unshare` does not pass a request to stop on.
    agent.kill()
}

#[test]
fn nvml_that_is_missing_or_of_another_version_degrades() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    fs::write(node.directory.join("nvml.json"), json!({ "version_mismatch": true }).to_string())?;
    let (doctor, mut agent) = both(&node, &[])?;
    ensure!(doctor.code == Some(1));
    says(&doctor, "nvml", "broken", "version_mismatch")?;
    ensure!(doctor.check("nvml")?["remedy"].as_str().is_some_and(|text| text.contains("reload")));
    agent.stop()?;
    fs::remove_file(node.directory.join("lib/libnvidia-ml.so.1"))?;
    let (doctor, _agent) = both(&node, &[])?;
    ensure!(doctor.code == Some(1));
    says(&doctor, "nvml", "unsupported", "library_missing")
}

#[test]
fn c53_a_node_without_any_libcuda_waits_for_one() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    let (doctor, agent) = both(&node, &[])?;
    says(&doctor, "libcuda", "degraded", "no process has mapped one")?;
    let scrape = agent.scrape()?;
    for state in ["attached", "partial", "refused"] {
        ensure!(scrape.get("cotenant_agent_probe_libraries", &[("state", state)]) == Some(0.0));
    }
    let libraries = [("feature", "libraries"), ("state", "active")];
    ensure!(scrape.get("cotenant_agent_feature_state", &libraries) == Some(1.0));
    Ok(())
}

/// Refuses one system call with EPERM, as container runtimes' profiles do, and becomes the program.
const FILTER: &str = "
import ctypes, os, struct, sys
number = int(sys.argv[1])
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(rows), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
for call in ((38, 1, 0, 0, 0), (22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0)):
    if libc.prctl(*call):
        sys.exit(os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
";

#[test]
fn c73_a_seccomp_filter_is_told_apart_from_a_missing_capability() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    for (number, call) in [(libc::SYS_bpf, "bpf"), (libc::SYS_perf_event_open, "perf_event_open")] {
        let number = number.to_string();
        let (doctor, mut agent) = both(&node, &["python3", "-c", FILTER, &number])?;
        says(&doctor, "seccomp", "broken", call)?;
        let facility = if call == "bpf" { "bpf" } else { "perf_events" };
        says(&doctor, facility, "broken", &format!("a seccomp filter refuses {call}"))?;
        says(&doctor, "capabilities", "ok", "")?;
        ensure!(doctor.code == Some(2), "{call}: {:?}", doctor.wrong());
        ensure!(agent.get("/readyz", "text/plain")?.starts_with("not ready"));
        agent.stop()?;
    }
    Ok(())
}

/// The host again, with other GPUs on its bus.
fn host_with_gpus(root: &Path, addresses: &[&str]) -> Result<()> {
    let mirror = |from: &str, but: &str| -> Result<()> {
        let to = root.join(from.trim_start_matches('/'));
        fs::create_dir_all(&to)?;
        for entry in fs::read_dir(from)? {
            let name = entry?.file_name();
            if name != but {
                symlink(Path::new(from).join(&name), to.join(&name))?;
            }
        }
        Ok(())
    };
    mirror("/", "sys")?;
    mirror("/sys", "bus")?;
    mirror("/sys/bus", "pci")?;
    for address in addresses {
        let device = root.join("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&device)?;
        fs::write(device.join("vendor"), "0x10de\n")?;
        fs::write(device.join("class"), "0x030200\n")?;
    }
    Ok(())
}

#[test]
fn c79_a_gpu_that_nvml_does_not_list_makes_the_node_not_ready() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let root = tempfile::tempdir()?;
    host_with_gpus(root.path(), &["0000:65:00.0", "0000:b1:00.0"])?;
    let mut node = node(directory.path())?;
    node.root = root.path().to_owned();
    let (doctor, agent) = both(&node, &[])?;
    ensure!(doctor.code == Some(2));
    says(&doctor, "gpu_visibility", "broken", "2 NVIDIA GPUs, NVML lists 1")?;
    let mismatch = "cotenant_agent_gpu_visibility_mismatch";
    ensure!(agent.scrape()?.get(mismatch, &[]) == Some(1.0));
    let ready = agent.get("/readyz", "text/plain")?;
    ensure!(ready.starts_with("not ready") && ready.contains("NVML lists 1"), "{ready}");
    ensure!(agent.get("/healthz", "text/plain")? == "ok\n");
    // The second one goes to a virtual machine.
    symlink("/sys/bus/pci/drivers/vfio-pci", root.path().join("sys/bus/pci/devices/0000:b1:00.0/driver"))?;
    agent.until(|scrape| scrape.get(mismatch, &[]) == Some(0.0))?;
    ensure!(agent.get("/readyz", "text/plain")?.starts_with("ready"));
    Ok(())
}

#[test]
fn a_bundle_has_what_helps_and_no_secret() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = node(directory.path())?;
    let secrets = "# the password is hunter2\n[otlp]\nendpoint = \"http://collector.example:4318/?key=hunter2\"\n\
         headers = { authorization = \"Bearer hunter2\", x-team = \"hunter2\" }\n";
    let agent = node.agent(secrets)?;
    let bundle = directory.path().join("bundle.tar.gz");
    let bundle = bundle.to_str().context("a path")?;
    let doctor = node.doctor(&[], &["--bundle", bundle])?;
    says(&doctor, "agent", "degraded", ", ready")?;
    ensure!(fs::metadata(bundle)?.permissions().mode() & 0o777 == 0o600, "only its owner may read it");
    let out = tempfile::tempdir()?;
    let done = Command::new("tar").arg("xzf").arg(bundle).arg("-C").arg(out.path()).status()?;
    ensure!(done.success());
    let read = |name: &str| fs::read_to_string(out.path().join("cotenant-bundle").join(name));
    let manifest = read("manifest.txt")?;
    for name in [
        "doctor.json",
        "cotenant.toml",
        "status.json",
        "ready.txt",
        "metrics.txt",
        "node.json",
        "incidents.json",
        "kills.json",
    ] {
        ensure!(manifest.contains(name), "{name} not in {manifest}");
        let content = read(name).with_context(|| name.to_owned())?;
        ensure!(!content.is_empty() && !content.contains("hunter2"), "{name}: {content}");
    }
    ensure!(read("cotenant.toml")?.contains("x-team = \"REDACTED\""), "{}", read("cotenant.toml")?);
    ensure!(read("metrics.txt")?.contains("cotenant_agent_feature_state"));
    let again = node.doctor(&[], &["--bundle", bundle])?;
    ensure!(again.code == Some(2), "a file that is there is not written over");
    drop(agent);
    Ok(())
}

/// A parser's complaint comes with the line that it is about, and the others' come with what was configured.
#[test]
fn a_bundle_of_a_configuration_that_is_wrong_has_no_secret_either() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("wrong.toml");
    for (at, (wrong, place)) in [
        ("[otlp]\nheaders = { authorization = \"Bearer hunter2\", x-team = 5 }\n", "line 2, column"),
        ("[otlp]\nheaders = \"hunter2\"\n", "line 2, column"),
        ("[otlp]\nheaders = { authorization = \"hunter2\n", "line 2"),
        ("[otlp]\nenabled = true\nendpoint = \"ftp://bob:hunter2@collector\"\n", "http://collector"),
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(&config, wrong)?;
        let bundle = directory.path().join(format!("bundle-{at}.tar.gz"));
        let (config, bundle) = (config.to_str().context("a path")?, bundle.to_str().context("a path")?);
        let cotenant = artefacts()?.join("cotenant");
        let arguments = ["doctor", "--output", "json", "--config", config, "--bundle", bundle];
        let doctor = Command::new(&cotenant).args(arguments).output()?;
        let page: Value = serde_json::from_slice(&doctor.stdout)?;
        ensure!(doctor.status.code() == Some(2) && page["verdict"] == "broken", "{}", page["verdict"]);
        let checks = page["checks"].as_array().context("checks")?;
        let told = checks.iter().find(|check| check["name"] == "configuration").context("configuration")?;
        let seen = told["seen"].as_str().context("seen")?;
        ensure!(told["state"] == "broken" && seen.contains(place), "{told}");
        let text = Command::new("tar").args(["xzf", bundle, "--to-stdout"]).output()?;
        let checked = Command::new(&cotenant).args(["config", "check", config]).output()?;
        for (whose, said) in
            [("the bundle", &text.stdout), ("the doctor", &doctor.stdout), ("config check", &checked.stderr)]
        {
            let said = String::from_utf8_lossy(said);
            ensure!(!said.is_empty() && !said.contains("hunter2"), "{whose}: {said}");
        }
    }
    Ok(())
}
