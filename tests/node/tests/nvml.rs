//! Owns the claims about NVML: what is published when it hangs, fails, lies, grows, or lists what no tenant is.
//! Refuses zeroes for what is not known.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, SimulatedNode, Tenant, World, compare::balance, scrape::Scrape};
use cotenant_sim_state::NodeConfig;
use serde_json::{Value, json};

const HOLD: &str = "init\nuuid 0\nretain 0\nalloc a 64MiB\nprint held\nwait\n";
const MIB: f64 = 1_048_576.0;
const USAGE: &str = "hw_gpu_memory_usage_bytes";
const UNATTRIBUTED: &str = "cotenant_gpu_memory_unattributed_bytes";
const PROCESS_BYTES: &str = "cotenant_gpu_memory_process_bytes";
const ABSENT: &str = "cotenant_gpu_reading_absent";
const LIVE: &str = "cotenant_gpu_memory_live_bytes";
const COLLECTED: &str = "cotenant_agent_nvml_last_collect_success";

/// What NVML does wrong from here on.
fn faults(node: &Path, wanted: &Value) -> Result<()> {
    fs::write(node.join("nvml.json.new"), wanted.to_string())?;
    Ok(fs::rename(node.join("nvml.json.new"), node.join("nvml.json"))?)
}

struct Guest {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
}

impl Guest {
    fn start(node: &SimulatedNode, name: &str, script: &str) -> Result<Self> {
        let unit = format!("nvml-{}-{name}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let tenant = node.tenant(name, &cgroup, script, &[])?;
        Ok(Self { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup })
    }

    /// One that holds 64 MiB and is listed by NVML.
    fn held(world: &World, name: &str) -> Result<Self> {
        let mut guest = Self::start(&world.node, name, HOLD)?;
        guest.tenant.expect("held")?;
        world.agent.until(|scrape| guest.bytes(scrape).is_some() && guest.live(scrape) > 0.0)?;
        Ok(guest)
    }

    fn bytes(&self, scrape: &Scrape) -> Option<f64> {
        scrape.get(PROCESS_BYTES, &[("tenant", &self.label)])
    }

    fn live(&self, scrape: &Scrape) -> f64 {
        scrape.sum(LIVE, &[("tenant", &self.label)])
    }
}

fn absent(scrape: &Scrape, reading: &str, reason: &str) -> bool {
    scrape.of(ABSENT).any(|sample| sample.label("reading") == reading && sample.label("reason") == reason)
}

/// Bytes are whole.
fn same(left: f64, right: f64) -> bool {
    (left - right).abs() < 0.5
}

#[test]
fn c46_a_hang_of_nvml_is_told_and_holds_nothing_up() -> Result<()> {
    let world = World::create(1, "deadline = \"500ms\"\n")?;
    let guest = Guest::held(&world, "hang")?;
    let hung = "nvmlDeviceGetMemoryInfo_v2";
    faults(&world.node.directory, &json!({ "calls": { hung: { "hang_ms": 12_000 } } }))?;
    let timeouts = |scrape: &Scrape| {
        scrape.get("cotenant_agent_nvml_call_timeouts_total", &[("function", hung)]).unwrap_or(0.0)
    };
    let age = |scrape: &Scrape| scrape.get("cotenant_gpu_readings_age_seconds", &[]).unwrap_or(0.0);
    let first = world.agent.until(|scrape| timeouts(scrape) >= 1.0)?;
    // What is lifted now helps the next call, not the one that hangs.
    faults(&world.node.directory, &json!({}))?;
    let begun = Instant::now();
    let mut last = first.clone();
    while begun.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        last = world.agent.scrape()?;
        ensure!(asked.elapsed() < Duration::from_secs(1), "a scrape took {:?}", asked.elapsed());
        ensure!(world.agent.get("/healthz", "text/plain")? == "ok\n");
        sleep(Duration::from_millis(100));
    }
    ensure!(age(&last) > age(&first) + 2.0, "the age went from {} to {}", age(&first), age(&last));
    ensure!(timeouts(&last) > timeouts(&first), "polls that fall into the hang are timeouts");
    ensure!(
        last.get(USAGE, &[]).is_none() && absent(&last, "memory", "timeout"),
        "usage of a GPU that was not read"
    );
    ensure!(same(guest.live(&last), 64.0 * MIB), "the ledger needs no NVML");
    ensure!(last.get(COLLECTED, &[]) == Some(0.0));
    world.agent.until(|scrape| scrape.get(USAGE, &[]).is_some()).context("after the hang")?;
    world
        .agent
        .until(|scrape| scrape.get(COLLECTED, &[]) == Some(1.0))
        .context("the collect is a success")?;
    Ok(())
}

#[test]
fn c44_c114_an_error_after_success_is_absent_with_its_reason_and_comes_back() -> Result<()> {
    let world = World::create(1, "")?;
    let guest = Guest::held(&world, "error")?;
    for (code, reason) in [(999, "failed"), (4, "no_permission")] {
        faults(
            &world.node.directory,
            &json!({ "calls": { "nvmlDeviceGetMemoryInfo_v2": { "return": code } } }),
        )?;
        let scrape = world.agent.until(|scrape| absent(scrape, "memory", reason))?;
        for name in [USAGE, UNATTRIBUTED, "hw_gpu_memory_limit_bytes", "hw_gpu_memory_utilization_ratio"] {
            ensure!(scrape.get(name, &[]).is_none(), "{name} is published while NVML fails with {code}");
        }
        ensure!(absent(&scrape, "unattributed", reason));
        ensure!(guest.bytes(&scrape).is_some() && same(guest.live(&scrape), 64.0 * MIB));
        if code == 999 {
            ensure!(scrape.get(COLLECTED, &[]) == Some(0.0));
        }
        faults(&world.node.directory, &json!({}))?;
        let scrape = world.agent.until(|scrape| scrape.get(USAGE, &[]).is_some())?;
        ensure!(!absent(&scrape, "memory", reason));
    }
    Ok(())
}

#[test]
fn c38_bytes_that_nvml_does_not_tell_are_absent_and_not_summed() -> Result<()> {
    let world = World::create(1, "")?;
    let (hidden, shown) = (Guest::held(&world, "hidden")?, Guest::held(&world, "shown")?);
    faults(&world.node.directory, &json!({ "not_available": [hidden.tenant.pid()] }))?;
    let why = [("tenant", hidden.label.as_str()), ("reading", "process_bytes"), ("reason", "not_available")];
    let scrape = world.agent.until(|scrape| scrape.get(ABSENT, &why) == Some(1.0))?;
    ensure!(hidden.bytes(&scrape).is_none(), "bytes that nobody told");
    ensure!(same(hidden.live(&scrape), 64.0 * MIB), "its ledger is there");
    ensure!(scrape.get("cotenant_gpu_tenant_processes", &[("tenant", &hidden.label)]) == Some(1.0));
    ensure!(shown.bytes(&scrape).is_some());
    ensure!(balance(&scrape).is_empty(), "{:?}", balance(&scrape));
    faults(&world.node.directory, &json!({}))?;
    world.agent.until(|scrape| hidden.bytes(scrape).is_some())?;
    Ok(())
}

/// The sharing modes that are in force, by GPU.
fn shared(scrape: &Scrape) -> Vec<&str> {
    let modes = scrape.of("cotenant_gpu_sharing_mode").filter(|sample| same(sample.value, 1.0));
    modes.map(|sample| sample.label("sharing_mode")).collect()
}

#[test]
fn c41_c42_c43_mig_instances_are_devices_with_a_parent_and_a_mode_of_their_own() -> Result<()> {
    const MIG: &str = "MIG-6a1b2c3d-0000-4444-8888-123456789ab";
    let world = World::create(1, "")?;
    let guests = [Guest::held(&world, "left")?, Guest::held(&world, "right")?];
    let slot = |at: u32| json!({ "uuid": format!("{MIG}{at}"), "bytes": 20_u64 << 30, "used": 1 << 30, "gi": at, "ci": 0 });
    let row = |guest: &Guest, slot: u32| json!({ "gpu": 0, "pid": guest.tenant.pid(), "bytes": 64 << 20, "list": "compute", "slot": slot });
    // Slots 0, 2 and 5 of 7; whole-GPU figures are not for everybody.
    let mut wanted = json!({
        "mig": { "0": { "max": 7, "slots": { "0": slot(0), "2": slot(2), "5": slot(5) } } },
        "rows": [row(&guests[0], 0), row(&guests[1], 0)],
        "calls": { "nvmlDeviceGetMemoryInfo_v2": { "return": 4, "on": "gpu" } },
    });
    faults(&world.node.directory, &wanted)?;
    let instances =
        |scrape: &Scrape| scrape.of(USAGE).filter(|sample| sample.label("hw_id").starts_with("MIG-")).count();
    let scrape = world.agent.until(|scrape| instances(scrape) == 3)?;
    ensure!(absent(&scrape, "memory", "no_permission"), "the parent's memory is not for this agent");
    for at in [0, 2, 5] {
        let id = format!("{MIG}{at}");
        let info = scrape.of("cotenant_gpu_info").find(|sample| sample.label("hw_id") == id);
        ensure!(info.context("an instance")?.label("hw_parent").starts_with("GPU-"), "{id} has a parent");
        let busy = [("hw_id", id.as_str())];
        ensure!(scrape.get("hw_gpu_utilization_ratio", &busy).is_none(), "an instance has no utilisation");
        ensure!(scrape.get("hw_gpu_memory_limit_bytes", &busy) == Some(20.0 * 1024.0 * MIB));
    }
    let mode = |scrape: &Scrape, id: &str| -> Vec<String> {
        let of = scrape.of("cotenant_gpu_sharing_mode").filter(|sample| sample.label("hw_id") == id);
        of.filter(|sample| same(sample.value, 1.0)).map(|of| of.label("sharing_mode").to_owned()).collect()
    };
    let whole = scrape.of("cotenant_gpu_mig_enabled").find(|sample| same(sample.value, 1.0));
    let whole = whole.context("a GPU in MIG mode")?.label("hw_id").to_owned();
    let first = format!("{MIG}0");
    world.agent.until(|scrape| mode(scrape, &whole) == ["mig"] && mode(scrape, &first) == ["time_sliced"])?;
    for guest in &guests {
        let bytes = [("tenant", guest.label.as_str()), ("hw_id", first.as_str())];
        world.agent.until(|scrape| scrape.get(PROCESS_BYTES, &bytes) == Some(64.0 * MIB))?;
    }
    // One is deleted; its handle may linger.
    wanted["mig"]["0"]["slots"] = json!({ "0": slot(0), "5": slot(5) });
    faults(&world.node.directory, &wanted)?;
    world.agent.until(|scrape| instances(scrape) == 2)?;
    Ok(())
}

#[test]
fn c47_dear_figures_are_read_seldom_and_their_age_is_told() -> Result<()> {
    const ENERGY: &str = "nvmlDeviceGetTotalEnergyConsumption";
    let world = World::create(1, "")?;
    faults(&world.node.directory, &json!({ "calls": { ENERGY: { "holds_us": 4000 } } }))?;
    let calls = |scrape: &Scrape, function: &str| {
        scrape
            .get("cotenant_agent_nvml_call_duration_seconds_count", &[("function", function)])
            .unwrap_or(0.0)
    };
    let polls = |scrape: &Scrape| calls(scrape, "nvmlDeviceGetMemoryInfo_v2");
    let scrape = world.agent.until(|scrape| polls(scrape) >= 20.0)?;
    let (energy, handles) = (calls(&scrape, ENERGY), calls(&scrape, "nvmlDeviceGetHandleByIndex_v2"));
    ensure!(energy <= 2.0 && same(handles, 1.0), "{energy} and {handles} calls in {} polls", polls(&scrape));
    let age = |figure| scrape.get("cotenant_gpu_figure_age_seconds", &[("figure", figure)]);
    let (old, young) = (age("energy").context("an age")?, age("power").context("an age")?);
    ensure!(old > 5.0 && young < old, "energy is {old} s old, power {young} s");
    ensure!(scrape.get("hw_energy_joules_total", &[]).is_some(), "it is there as it was read");
    Ok(())
}

/// A process under a name of its own.
struct Named(Child);

impl Named {
    fn start(directory: &Path, name: &str) -> Result<Self> {
        let program = directory.join(name);
        fs::copy("/bin/sleep", &program)?;
        Ok(Self(Command::new(program).arg("300").stdin(Stdio::null()).spawn()?))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn c02_c07_the_mps_server_is_its_own_tenant_and_clients_count_once() -> Result<()> {
    let world = World::create(1, "")?;
    let clients = [Guest::held(&world, "client0")?, Guest::held(&world, "client1")?];
    let server = Named::start(&world.node.directory, "nvidia-cuda-mps-server")?;
    let before = world.agent.until(|scrape| clients.iter().all(|client| client.bytes(scrape).is_some()))?;
    let server_bytes = 69 << 20;
    let mut rows = vec![json!({ "gpu": 0, "pid": server.0.id(), "bytes": server_bytes, "list": "compute" })];
    for process in world.node.state.processes() {
        rows.push(json!({ "gpu": 0, "pid": process.pid, "bytes": process.bytes[0], "list": "mps" }));
    }
    faults(&world.node.directory, &json!({ "rows": rows, "extra_unattributed": { "0": server_bytes } }))?;
    let labels = [("tenant", "system:mps-server")];
    let scrape = world.agent.until(|scrape| scrape.get(PROCESS_BYTES, &labels).is_some())?;
    ensure!(scrape.get(PROCESS_BYTES, &labels) == Some(69.0 * MIB));
    for client in &clients {
        ensure!(client.bytes(&scrape) == client.bytes(&before), "{} counts once", client.label);
    }
    ensure!(same(scrape.sum(LIVE, &labels), 0.0));
    world.agent.until(|scrape| shared(scrape) == ["mps"]).context("clients make it MPS")?;
    let status = world.agent.status()?;
    let sharing = &status["gpus"][0]["sharing"];
    ensure!(sharing["basis"] == "mps_lists" && sharing["tenants"] == 2, "{sharing}");
    ensure!(scrape.get(UNATTRIBUTED, &[]) == Some(0.0), "{:?}", scrape.get(UNATTRIBUTED, &[]));
    ensure!(balance(&scrape).is_empty(), "{:?}", balance(&scrape));
    Ok(())
}

#[test]
fn c30_bytes_without_a_process_are_unattributed() -> Result<()> {
    let world = World::create(2, "")?;
    faults(&world.node.directory, &json!({ "extra_unattributed": { "1": 2_u64 << 30 } }))?;
    let scrape = world.agent.until(|scrape| scrape.of(UNATTRIBUTED).any(|sample| sample.value > 0.0))?;
    let mut values: Vec<f64> = scrape.of(UNATTRIBUTED).map(|sample| sample.value).collect();
    values.sort_by(f64::total_cmp);
    ensure!(values == [0.0, 2048.0 * MIB], "{values:?}");
    ensure!(scrape.of(PROCESS_BYTES).next().is_none(), "no process, no process bytes");
    ensure!(balance(&scrape).is_empty(), "{:?}", balance(&scrape));
    Ok(())
}

/// No tenants: in a PID namespace of its own the simulated NVML takes every process of the host for dead.
#[test]
fn c29_a_foreign_pid_namespace_makes_process_figures_absent() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(1, 0.0))?;
    let launcher = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let mut agent = node.agent_under(&launcher, "")?;
    let scrape = agent.until(|scrape| absent(scrape, "processes", "foreign_pid_namespace"))?;
    let state = [("feature", "host_pid_namespace"), ("state", "degraded")];
    ensure!(scrape.get("cotenant_agent_feature_state", &state) == Some(1.0));
    ensure!(scrape.get(USAGE, &[]).is_some(), "figures of the whole GPU need no PIDs");
    for name in [PROCESS_BYTES, UNATTRIBUTED, "cotenant_gpu_tenant_utilization_ratio"] {
        ensure!(scrape.of(name).next().is_none(), "{name} is published");
    }
    let ready = agent.get("/readyz", "text/plain")?;
    ensure!(ready.starts_with("not ready") && ready.contains("hostPID"), "{ready}");
    ensure!(agent.get("/healthz", "text/plain")? == "ok\n");
    // `unshare` does not pass a request to stop on.
    agent.kill()?;
    Ok(())
}

#[test]
fn a_lost_gpu_is_absent_and_the_others_go_on() -> Result<()> {
    let world = World::create(2, "")?;
    let both = world.agent.until(|scrape| scrape.of(USAGE).count() == 2)?;
    faults(&world.node.directory, &json!({ "lost": [1] }))?;
    let scrape = world.agent.until(|scrape| absent(scrape, "memory", "gpu_lost"))?;
    let left: Vec<&str> = scrape.of(USAGE).map(|sample| sample.label("hw_id")).collect();
    ensure!(left.len() == 1, "published: {left:?}");
    let lost = both.of(USAGE).find(|sample| sample.label("hw_id") != left[0]).context("two GPUs")?;
    let why = [("hw_id", lost.label("hw_id")), ("reading", "memory")];
    ensure!(scrape.get(ABSENT, &why) == Some(1.0), "the one that is lost is still named");
    faults(&world.node.directory, &json!({}))?;
    world.agent.until(|scrape| scrape.of(USAGE).count() == 2)?;
    Ok(())
}

#[test]
fn a_version_mismatch_at_start_is_told_and_ends() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(1, 0.0))?;
    faults(directory.path(), &json!({ "version_mismatch": true }))?;
    let agent = node.agent("")?;
    let scrape = agent.until(|scrape| absent(scrape, "library", "version_mismatch"))?;
    ensure!(scrape.get(COLLECTED, &[]) == Some(0.0) && scrape.of(USAGE).next().is_none());
    let status = agent.status()?;
    let nvml = status["features"].as_array().and_then(|all| all.iter().find(|of| of["name"] == "nvml"));
    let remedy = nvml.and_then(|of| of["remedy"].as_str()).context("NVML is a feature")?;
    ensure!(remedy.contains("reload the module"), "{remedy}");
    ensure!(agent.get("/readyz", "text/plain")?.starts_with("ready"), "attribution goes on without NVML");
    faults(directory.path(), &json!({}))?;
    agent.until(|scrape| scrape.of(USAGE).count() == 1).context("after the mismatch")?;
    agent.until(|scrape| scrape.get(COLLECTED, &[]) == Some(1.0)).context("the collect is a success")?;
    Ok(())
}

#[test]
fn lists_that_grow_between_questions_are_read() -> Result<()> {
    let world = World::create(1, "")?;
    let guest = Guest::held(&world, "grow")?;
    let busy = json!({ guest.tenant.pid().to_string(): { "sm": 40, "memory": 10 } });
    faults(&world.node.directory, &json!({ "grow": true, "busy": busy }))?;
    let utilization =
        |scrape: &Scrape| scrape.get("cotenant_gpu_tenant_utilization_ratio", &[("tenant", &guest.label)]);
    let scrape = world.agent.until(|scrape| utilization(scrape) == Some(0.4))?;
    ensure!(guest.bytes(&scrape).is_some() && !absent(&scrape, "process_utilization", "failed"));
    Ok(())
}

/// Counters by series.
fn counters(scrape: &Scrape) -> BTreeMap<String, f64> {
    let counts = |name: &str| ["_total", "_bucket", "_count"].iter().any(|suffix| name.ends_with(suffix));
    let series = |sample: &cotenant_node::scrape::Sample| format!("{} {:?}", sample.name, sample.labels);
    scrape.samples.iter().filter(|sample| counts(&sample.name)).map(|of| (series(of), of.value)).collect()
}

#[test]
fn r2_holds_and_counters_never_fall_during_churn() -> Result<()> {
    let world = World::create(2, "")?;
    let churn = "init\nuuid 0\nretain 0\nretain 1\nprint held\nloop 100000 {\nalloc a 6MiB\nalloc b 1GiB\nfree a\nfree b\n\
                 sleep 1\n}\n";
    let mut guests = Vec::new();
    for index in 0..4 {
        let mut guest = Guest::start(&world.node, &format!("churn{index}"), churn)?;
        guest.tenant.expect("held")?;
        guests.push(guest);
    }
    let mut before = BTreeMap::new();
    let mut balanced = 0;
    for round in 0..10 {
        let scrape = world.agent.scrape()?;
        ensure!(balance(&scrape).is_empty(), "scrape {round}: {:?}", balance(&scrape));
        balanced += scrape.of(UNATTRIBUTED).count();
        let now = counters(&scrape);
        for (series, value) in &before {
            let Some(later) = now.get(series) else { continue };
            ensure!(later >= value, "scrape {round}: {series} fell from {value} to {later}");
        }
        before.extend(now);
        // Ends are part of churn.
        if round == 3 || round == 6 {
            guests[round / 3].tenant.kill()?;
        }
        sleep(Duration::from_millis(350));
    }
    ensure!(balanced >= 10, "only {balanced} sums could be checked");
    println!("{balanced} sums of 10 scrapes, {} counters", before.len());
    Ok(())
}

#[test]
fn c27_c113_a_real_page_passes_promtool_and_names_no_process() -> Result<()> {
    let world = World::create(1, "")?;
    let mut guest = Guest::held(&world, "page")?;
    faults(
        &world.node.directory,
        &json!({ "busy": { guest.tenant.pid().to_string(): { "sm": 40, "memory": 10 } } }),
    )?;
    let scrape =
        world.agent.until(|scrape| scrape.of("cotenant_gpu_tenant_utilization_ratio").next().is_some())?;
    let own = guest.tenant.pid().to_string();
    for sample in &scrape.samples {
        for (label, value) in &sample.labels {
            let names_process =
                ["pid", "tgid", "process_id", "comm"].contains(&label.as_str()) || *value == own;
            ensure!(!names_process, "{} has {label}={value}", sample.name);
        }
    }
    let mut child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("promtool: apt-get install prometheus")?;
    child.stdin.take().context("a pipe was asked for")?.write_all(scrape.text.as_bytes())?;
    let output = child.wait_with_output()?;
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && said.is_empty(), "promtool: {said}");
    guest.tenant.go()?;
    guest.tenant.end()
}
