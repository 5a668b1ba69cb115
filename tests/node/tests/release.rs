//! Owns the claims about letting the driver go: nothing of it is held within five seconds, allocations are counted on.
//! Refuses a look from inside: what is held is what `/proc` says of the agent.

use std::{
    fs,
    io::Read,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Output},
    sync::mpsc,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Agent, Cgroup, Tenant, World, artefacts, scrape::Scrape};
use serde_json::{Value, json};

const WITHIN: Duration = Duration::from_secs(5);
const MIB: f64 = 1_048_576.0;
const LIVE: &str = "cotenant_gpu_memory_live_bytes";
const PROCESS: &str = "cotenant_gpu_memory_process_bytes";
const USAGE: &str = "hw_gpu_memory_usage_bytes";
const ABSENT: &str = "cotenant_gpu_reading_absent";

struct Stage {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
    world: World,
}

/// Descriptors of the driver's devices, and mappings of its library.
fn held(agent: &Agent) -> Result<(usize, usize)> {
    let process = PathBuf::from(format!("/proc/{}", agent.pid()));
    let mut devices = 0;
    for descriptor in fs::read_dir(process.join("fd"))? {
        // One may be closed while they are looked at.
        let Ok(target) = fs::read_link(descriptor?.path()) else { continue };
        devices += usize::from(target.to_string_lossy().contains("/dev/nvidia"));
    }
    let maps = fs::read_to_string(process.join("maps"))?;
    Ok((devices, maps.lines().filter(|line| line.contains("libnvidia-ml")).count()))
}

impl Stage {
    fn open(extra: &str) -> Result<Self> {
        let world = World::create(2, extra)?;
        let unit = format!("release-{}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let script =
            "init\nuuid 0\nretain 0\nalloc a 64MiB\nprint held\nwait\nalloc b 32MiB\nprint more\nwait\n";
        let mut tenant = world.node.tenant("one", &cgroup, script, &[])?;
        tenant.expect("held")?;
        let stage = Self { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup, world };
        stage.world.agent.until(|scrape| stage.process(scrape).is_some() && stage.holds(scrape, 64.0))?;
        let (devices, mappings) = held(&stage.world.agent)?;
        ensure!(devices == 3 && mappings > 0, "NVML is not held: {devices} devices, {mappings} mappings");
        Ok(stage)
    }

    /// Whether the tenant holds so many MiB, by what the programs counted.
    fn holds(&self, scrape: &Scrape, mib: f64) -> bool {
        (scrape.sum(LIVE, &[("tenant", &self.label)]) - mib * MIB).abs() < 0.5
    }

    fn process(&self, scrape: &Scrape) -> Option<f64> {
        scrape.get(PROCESS, &[("tenant", &self.label)])
    }

    fn command(&self, arguments: &[&str]) -> Result<Output> {
        let socket = self.world.node.directory.join("control.sock");
        let mut command = Command::new(artefacts()?.join("cotenant"));
        Ok(command.args(arguments).arg("--socket").arg(socket).output()?)
    }

    fn nvml_feature(&self) -> Result<(String, String)> {
        let status = self.world.agent.status()?;
        let features = status["features"].as_array().context("features")?;
        let nvml = features.iter().find(|feature| feature["name"] == "nvml").context("nvml")?;
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok((word(&nvml["state"]), word(&nvml["reason"])))
    }

    fn until_let_go(&self) -> Result<Duration> {
        let begun = Instant::now();
        while held(&self.world.agent)? != (0, 0) {
            ensure!(begun.elapsed() < WITHIN, "still held: {:?}", held(&self.world.agent)?);
            sleep(Duration::from_millis(20));
        }
        Ok(begun.elapsed())
    }

    fn until_back(&self) -> Result<()> {
        self.world.agent.until(|scrape| self.process(scrape).is_some())?;
        ensure!(held(&self.world.agent)?.0 == 3);
        ensure!(self.nvml_feature()?.0 == "active", "{:?}", self.nvml_feature()?);
        Ok(())
    }

    /// NVML's figures are absent with their reason, and what the programs count goes on.
    fn assert_released(&mut self, by: &str) -> Result<()> {
        let scrape = self
            .world
            .agent
            .until(|scrape| scrape.of(ABSENT).any(|sample| sample.label("reason") == "released"))?;
        assert_eq!((self.process(&scrape), scrape.get(USAGE, &[])), (None, None));
        assert!(self.holds(&scrape, 64.0));
        let (state, reason) = self.nvml_feature()?;
        assert!(state == "disabled" && reason.contains(by), "{state}: {reason}");
        self.tenant.go()?;
        self.tenant.expect("more")?;
        self.world.agent.until(|scrape| self.holds(scrape, 96.0))?;
        assert_eq!(held(&self.world.agent)?, (0, 0));
        Ok(())
    }
}

#[test]
fn c80_a_command_lets_the_driver_go_and_it_comes_back_when_the_time_is_over() -> Result<()> {
    let mut stage = Stage::open("")?;
    let begun = Instant::now();
    let output = stage.command(&["release", "--for", "6s"])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.starts_with("released: nothing of the driver is held; back in "), "{said}");
    // When the command returns it is true already.
    assert_eq!(held(&stage.world.agent)?, (0, 0));
    let took = begun.elapsed();
    assert!(took < WITHIN, "{took:?}");
    stage.assert_released("`cotenant release`")?;
    stage.until_back()?;
    assert!(begun.elapsed() > WITHIN, "it came back before its time");
    println!("let go in {took:?}");
    Ok(())
}

#[test]
fn c80_a_resume_ends_a_release_without_end() -> Result<()> {
    let mut stage = Stage::open("")?;
    ensure!(stage.command(&["release"])?.status.success());
    stage.assert_released("until `cotenant resume`")?;
    let output = stage.command(&["resume"])?;
    assert_eq!(String::from_utf8_lossy(&output.stdout), "resumed: NVML is asked again\n");
    stage.until_back()
}

#[test]
fn c80_signals_do_the_same() -> Result<()> {
    let mut stage = Stage::open("")?;
    stage.world.agent.signal(libc::SIGUSR1);
    println!("let go in {:?}", stage.until_let_go()?);
    stage.assert_released("SIGUSR1")?;
    stage.world.agent.signal(libc::SIGUSR2);
    stage.until_back()
}

#[test]
fn c80_an_annotation_mounted_as_a_file_does_the_same() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("release");
    let mut stage = Stage::open(&format!("release_file = \"{}\"\n", file.display()))?;
    fs::write(&file, "true")?;
    println!("let go in {:?}", stage.until_let_go()?);
    stage.assert_released("nvml.release_file")?;
    fs::write(&file, "false")?;
    stage.until_back()
}

/// A collector that takes every connection and never answers: the thread that exports waits for it, and nobody else.
#[test]
fn c80_an_export_that_hangs_does_not_keep_the_driver() -> Result<()> {
    let collector = TcpListener::bind("127.0.0.1:0")?;
    let address = collector.local_addr()?;
    let (told, heard) = mpsc::channel();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in collector.incoming().flatten() {
            let mut first = [0; 4];
            let asked = (&stream).read(&mut first).is_ok_and(|length| length > 0);
            kept.push(stream);
            if told.send(asked).is_err() {
                return;
            }
        }
    });
    let otlp = format!(
        "[otlp]\nenabled = true\nprotocol = \"http/protobuf\"\nendpoint = \"http://{address}\"\ninterval = \"1s\"\n\
         timeout = \"60s\"\n"
    );
    let mut stage = Stage::open(&otlp)?;
    ensure!(heard.recv_timeout(Duration::from_secs(30))?, "nothing was exported");
    stage.world.agent.signal(libc::SIGUSR1);
    println!("let go in {:?} beside an export that hangs", stage.until_let_go()?);
    stage.assert_released("SIGUSR1")?;
    stage.world.agent.signal(libc::SIGUSR2);
    stage.until_back()
}

#[test]
fn c80_a_call_that_hangs_is_told_and_the_driver_goes_when_it_comes_back() -> Result<()> {
    let stage = Stage::open("deadline = \"500ms\"\n")?;
    let faults = json!({ "calls": { "nvmlDeviceGetMemoryInfo_v2": { "hang_ms": 9_000 } } });
    let file = stage.world.node.directory.join("nvml.json");
    fs::write(&file, faults.to_string())?;
    let nvml = || stage.nvml_feature().map(|(state, _)| state);
    while nvml()? == "active" {
        sleep(Duration::from_millis(50));
    }
    let output = stage.command(&["release"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("still held"), "{said}");
    assert!(stage.nvml_feature()?.1.contains("handles are still held"), "{:?}", stage.nvml_feature()?);
    fs::write(&file, "{}")?;
    let begun = Instant::now();
    while held(&stage.world.agent)? != (0, 0) {
        ensure!(begun.elapsed() < Duration::from_secs(20), "never let go");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn the_socket_says_how_the_agent_is_to_probes_without_a_key() -> Result<()> {
    let stage = Stage::open("")?;
    for arguments in [&["health"][..], &["health", "--ready"]] {
        let asked = stage.command(arguments)?;
        let said = String::from_utf8_lossy(&asked.stdout).into_owned();
        assert!(asked.status.success(), "{asked:?}");
        assert_eq!(said.lines().next(), Some(if arguments.len() > 1 { "ready" } else { "ok" }));
    }
    let socket = stage.world.node.directory.join("control.sock");
    drop(stage);
    let output =
        Command::new(artefacts()?.join("cotenant")).args(["health", "--socket"]).arg(&socket).output()?;
    assert_eq!(output.status.code(), Some(1), "an agent that is gone is not well");
    Ok(())
}

#[test]
fn only_root_and_the_agents_own_user_are_heard() -> Result<()> {
    let stage = Stage::open("")?;
    let socket = stage.world.node.directory.join("control.sock");
    assert_eq!(fs::metadata(&socket)?.permissions().mode() & 0o777, 0o600);
    // Even where somebody opened the file to all.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666))?;
    let program = artefacts()?.join("cotenant");
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(program)
        .args(["release", "--socket"])
        .arg(&socket)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("only root"), "{said}");
    sleep(Duration::from_secs(1));
    assert_eq!(held(&stage.world.agent)?.0, 3);
    Ok(())
}

#[test]
fn a_release_that_makes_no_sense_is_refused_with_what_would() -> Result<()> {
    let stage = Stage::open("")?;
    let output = stage.command(&["release", "--for", "3days"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("24 hours"), "{said}");
    assert_eq!(held(&stage.world.agent)?.0, 3);
    Ok(())
}
