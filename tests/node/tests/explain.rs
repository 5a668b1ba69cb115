//! Owns the claims about what people are told: `cotenant explain`, and Xids as the kernel's log has them.
//! Refuses words that the agent did not say.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    net::TcpListener,
    path::Path,
    process::{Command, Output},
    thread::sleep,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, World, artefacts, scrape::Scrape};
use cotenant_sim_state::NODE_VARIABLE;
use serde_json::Value;

fn cotenant(arguments: &[&str]) -> Result<Output> {
    let program = artefacts()?.join("cotenant");
    Command::new(program).args(arguments).output().context("cannot start cotenant")
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn explain_says_what_the_agent_knows_and_what_is_wrong_with_a_question() -> Result<()> {
    let world = World::create(1, "")?;
    let at = world.agent.address.to_string();
    let unit = format!("told-{}.service", std::process::id());
    let label = format!("systemd:{unit}");
    let explain = |arguments: &[&str]| cotenant(&[&["explain", "--address", &at], arguments].concat());

    let (code, words, errors) = said(&explain(&["--since", "2h"])?);
    ensure!((code, words.as_str()) == (Some(0), "no incidents in the last 2h\n"), "{words}{errors}");

    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let script = "init\nuuid 0\nretain 0\nalloc a 400GiB\nexpect 2\nprint refused\nwait\n";
    let mut tenant = world.node.tenant("told", &cgroup, script, &[])?;
    tenant.expect("refused")?;
    world.agent.until(|scrape| scrape.sum("cotenant_incidents_total", &[]) > 0.0)?;

    let answer = world.agent.json("/api/v1/incidents")?;
    let headline = answer["incidents"][0]["explanation"]["headline"].as_str().context("a headline")?;
    let (code, words, errors) = said(&explain(&[])?);
    ensure!(code == Some(0) && errors.is_empty(), "{errors}");
    ensure!(words.starts_with(headline) && words.contains("Measured:"), "{words}\nis not {headline}");
    ensure!(headline.contains(&label) && headline.contains("400.0 GiB"), "{headline}");
    println!("{words}");
    // The configuration that the agent runs with says where it is asked.
    let config = world.node.directory.join("cotenant.toml");
    let config = config.to_str().context("a path of this test")?;
    let by_config = Command::new(artefacts()?.join("cotenant"))
        .args(["explain", "--config", config])
        // It asks NVML more often than an agent off a simulated node may.
        .env(NODE_VARIABLE, &world.node.directory)
        .output()?;
    ensure!(said(&by_config).1.starts_with(headline), "{by_config:?}");
    ensure!(said(&explain(&["--tenant", &label])?).1.starts_with(headline));
    let (code, words, _) = said(&explain(&["--tenant", "somebody else"])?);
    ensure!((code, words.as_str()) == (Some(0), "no incidents in the last 15m\n"), "{words}");
    let (code, words, _) = said(&explain(&["--output", "json"])?);
    let told: Value = serde_json::from_str(&words)?;
    ensure!(code == Some(0) && told["incidents"][0]["id"] == answer["incidents"][0]["id"], "{words}");

    let (code, _, errors) = said(&explain(&["--since", "yesterday"])?);
    ensure!(code == Some(2) && errors.contains("such as 15m"), "{code:?} {errors}");
    let (code, _, errors) = said(&cotenant(&["explain", "--address", "http://here"])?);
    ensure!(code == Some(2) && errors.contains("HOST:PORT"), "{code:?} {errors}");
    let nobody = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let (code, words, errors) = said(&cotenant(&["explain", "--address", &nobody])?);
    ensure!(code == Some(1) && words.is_empty() && errors.contains("cotenant run"), "{code:?} {errors}");
    tenant.kill()
}

/// Adds records to a log as the kernel writes them: facility and level, sequence, time, flags; text.
fn log(path: &Path, records: &[(u32, &str)]) -> Result<()> {
    let mut file = OpenOptions::new().append(true).open(path)?;
    let mut text = String::new();
    for (at, (facility, line)) in records.iter().enumerate() {
        text = format!("{text}{},{},{},-;{line}\n", facility << 3 | 3, 900 + at, 5_000_000 + at);
    }
    Ok(file.write_all(text.as_bytes())?)
}

#[test]
fn c105_c107_xids_are_counted_apart_and_a_follower_is_an_echo() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let kmsg = directory.path().join("kmsg");
    // What was there before the agent is not told again.
    fs::write(&kmsg, "3,1,1,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n")?;
    let world = World::create(2, &format!("[events]\nkernel_log = \"{}\"\n", kmsg.display()))?;
    let unit = format!("xid-{}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let script = "init\nuuid 0\nretain 0\nalloc a 4MiB\nprint held\nwait\n";
    let mut tenant = world.node.tenant("xid", &cgroup, script, &[])?;
    tenant.expect("held")?;
    // The log names a GPU by its place.
    world.agent.until(|scrape| scrape.of("hw_gpu_memory_usage_bytes").count() == 2)?;
    let gpu = format!("GPU-51515151-5151-5151-5151-{}", "515151515100");
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let before = now();
    let fault = format!(
        "NVRM: Xid (PCI:0000:01:00): 31, pid={}, name=xid, Ch 00000010, intr 00000000. MMU Fault",
        tenant.pid()
    );
    let echo = format!("NVRM: Xid (PCI:0000:01:00): 45, pid={}, name=xid, Ch 00000010", tenant.pid());
    let forged = "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.";
    log(&kmsg, &[(0, &fault), (0, &fault), (0, &echo), (1, forged)])?;
    let count = |code: &'static str| [("hw_id", gpu.as_str().to_owned()), ("xid", code.to_owned())];
    let value = |scrape: &cotenant_node::scrape::Scrape, name: &str, code: &'static str| {
        let labels = count(code);
        scrape.get(name, &[("hw_id", &labels[0].1), ("xid", &labels[1].1)])
    };
    let errors = "cotenant_gpu_xid_errors_total";
    let scrape = world.agent.until(|scrape| value(scrape, errors, "45").is_some())?;
    ensure!((value(&scrape, errors, "31"), value(&scrape, errors, "45")) == (Some(2.0), Some(1.0)));
    ensure!(scrape.of(errors).count() == 2, "{:?}", scrape.of(errors).collect::<Vec<_>>());
    for code in ["31", "45"] {
        let seen = value(&scrape, "cotenant_gpu_xid_last_seen_seconds", code).context("it was seen")?;
        ensure!((before - 1.0..=now() + 1.0).contains(&seen), "{code} at {seen}, not after {before}");
    }
    sleep(Duration::from_millis(500));
    let answer = world.agent.json("/api/v1/incidents")?;
    let incidents = answer["incidents"].as_array().context("a list")?;
    ensure!(incidents.len() == 1 && incidents[0]["kind"] == "xid", "{answer:#}");
    let evidence = incidents[0]["evidence"].as_array().context("evidence")?;
    let of_code = |code: u64| {
        evidence.iter().find(|line| line["evidence"] == "xid" && line["code"] == code).context("its line")
    };
    let (root, follower) = (of_code(31)?, of_code(45)?);
    ensure!(root["count"] == 2 && root["echo"] == false, "{root:#}");
    ensure!(follower["count"] == 1 && follower["echo"] == true, "{follower:#}");
    ensure!(root["tenant"]["name"] == format!("systemd:{unit}"), "{root:#}");
    ensure!(root["gpu"] == gpu.as_str());
    let headline = incidents[0]["explanation"]["headline"].as_str().unwrap_or_default();
    ensure!(headline.contains("Xid 31 2 times"), "the root is what it is told by: {headline}");
    tenant.kill()
}

#[test]
fn c105_c107_a_fault_that_the_log_and_nvml_tell_is_one_with_both_its_sources() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let kmsg = directory.path().join("kmsg");
    fs::write(&kmsg, "")?;
    let world = World::create(1, &format!("[events]\nkernel_log = \"{}\"\n", kmsg.display()))?;
    let listening = [("feature", "xid_events"), ("state", "active")];
    world.agent.until(|scrape| scrape.get("cotenant_agent_feature_state", &listening) == Some(1.0))?;
    // 79 comes by both ways, 31 by the log alone and twice, 48 by NVML alone.
    let line = |code: u32| format!("NVRM: Xid (PCI:0000:01:00): {code}, pid=1, name=x, Ch 00000010");
    // Reports of one fault come within seconds of each other by the kernel's clock.
    let uptime = fs::read_to_string("/proc/uptime")?;
    let seconds: f64 = uptime.split_whitespace().next().context("a time")?.parse()?;
    let records = [31, 31, 79].into_iter().enumerate();
    let lines = records.map(|(at, code)| format!("3,{at},{:.0},-;{}\n", seconds * 1e6, line(code)));
    let text = lines.collect::<Vec<_>>().concat();
    OpenOptions::new().append(true).open(&kmsg)?.write_all(text.as_bytes())?;
    let told = r#"{ "xids": [{ "gpu": 0, "code": 79 }, { "gpu": 0, "code": 48 }] }"#;
    fs::write(world.node.directory.join("nvml.json.new"), told)?;
    fs::rename(world.node.directory.join("nvml.json.new"), world.node.directory.join("nvml.json"))?;
    let faults = |scrape: &Scrape, code: &str| scrape.get("cotenant_gpu_xid_errors_total", &[("xid", code)]);
    let told = |scrape: &Scrape, code: &str, source: &str| {
        scrape.get("cotenant_gpu_xid_reports_total", &[("xid", code), ("source", source)])
    };
    let scrape = world
        .agent
        .until(|scrape| told(scrape, "48", "nvml") == Some(1.0) && told(scrape, "79", "kmsg") == Some(1.0))?;
    ensure!(told(&scrape, "79", "nvml") == Some(1.0) && faults(&scrape, "79") == Some(1.0), "one fault");
    ensure!(faults(&scrape, "31") == Some(2.0) && told(&scrape, "31", "kmsg") == Some(2.0));
    ensure!(told(&scrape, "31", "nvml").is_none() && told(&scrape, "48", "kmsg").is_none());
    ensure!(faults(&scrape, "48") == Some(1.0));
    Ok(())
}
