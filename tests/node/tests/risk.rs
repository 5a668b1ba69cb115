//! Owns the claim that a leak is warned of before it hits the wall, by the real agent, with the right name, and that a
//! recording of it replays to the same bytes.
//! Refuses a clock of its own: the agent sees real seconds.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, World, artefacts};

const START: &str = "init\nuuid 0\nretain 0\n";

#[test]
fn c22_a_leak_is_warned_of_and_named_before_the_wall() -> Result<()> {
    let world = World::create(1, "")?;
    let own = std::process::id();
    let unit = |name: &str| format!("risk-{own}-{name}.service");
    let cgroup = |name: &str| Cgroup::create(&format!("system.slice/{}", unit(name)));
    let (first, second) = (cgroup("trainer")?, cgroup("leak")?);
    let trainer = format!(
        "{START}alloc base 40GiB\nprint ready\nfor 200000 {{\nalloc step 2GiB\nsleep 300\nfree step\nsleep 300\n}}\n"
    );
    // The agent says nothing of a GPU's first 30 s; then half a GiB every 300 ms into 97 GiB: a minute.
    let leak = format!(
        "{START}alloc base 1GiB\nprint ready\nwait\nfor 200000 {{\nalloc grown 512MiB\nsleep 300\n}}\n"
    );
    let mut trainer = world.node.tenant("trainer", &first, &trainer, &[])?;
    let mut leak = world.node.tenant("leak", &second, &leak, &[])?;
    trainer.expect("ready")?;
    leak.expect("ready")?;
    let file = world.node.directory.join("leak.recording");
    let program = artefacts()?.join("cotenant");
    let mut recorder = Command::new(&program)
        .arg("record")
        .arg(&file)
        .args(["--for", "100s", "--from", &world.agent.address.to_string()])
        .stderr(Stdio::inherit())
        .spawn()
        .context("cannot start the recorder")?;
    world
        .agent
        .until(|scrape| scrape.get("cotenant_gpu_reclaim_risk_ratio", &[("horizon", "60s")]).is_some())?;
    leak.go()?;

    let begun = Instant::now();
    let (mut warned, mut failed, mut live) = (None, None, BTreeMap::new());
    while failed.is_none() && begun.elapsed() < Duration::from_secs(90) {
        let text = world.agent.get("/api/v1/risk", "application/json")?;
        let forecast: serde_json::Value = serde_json::from_str(&text)?;
        let gpu = &forecast["gpus"][0];
        if warned.is_none() && gpu["warning"].is_object() {
            let name = |tenant: &serde_json::Value| tenant["name"].as_str().unwrap_or_default().to_owned();
            let warning = &gpu["warning"];
            let victims: Vec<String> =
                warning["victims"].as_array().into_iter().flatten().map(name).collect();
            warned = Some((begun.elapsed(), name(&warning["driver"]), victims));
        }
        if gpu["exhausted"] == true {
            failed = Some(begun.elapsed());
        }
        live.insert(forecast["at"].to_string(), text);
        std::thread::sleep(Duration::from_millis(100));
    }
    let failed = failed.context("the leak never hit the wall")?;
    let (warned, driver, victims) = warned.context("nobody warned")?;
    println!("warned after {warned:?}, failed after {failed:?}: driver {driver}, first victims {victims:?}");
    let ahead = failed.saturating_sub(warned);
    ensure!(ahead >= Duration::from_secs(15), "warned {ahead:?} ahead");
    ensure!(driver.contains("-leak"), "the driver was {driver}");
    // It asks for four times as much at once, and the leak for twice as often: a second decides.
    ensure!(victims.iter().any(|victim| victim.contains("-trainer")), "the first victims were {victims:?}");

    let incident = carries_its_warning(&world, ahead)?;
    println!("{incident}");

    ensure!(recorder.wait()?.success(), "the recorder failed");
    let replayed = Command::new(&program).arg("replay").arg(&file).output()?;
    ensure!(replayed.status.success(), "{}", String::from_utf8_lossy(&replayed.stderr));
    let mut same = 0;
    for line in String::from_utf8(replayed.stdout)?.lines() {
        let forecast: serde_json::Value = serde_json::from_str(line)?;
        if let Some(text) = live.get(&forecast["at"].to_string()) {
            ensure!(text == line, "live:   {text}\nreplay: {line}");
            same += 1;
        }
    }
    ensure!(same > 100, "only {same} forecasts were seen both live and in the replay");
    println!("{same} forecasts are the same live and replayed");
    Ok(())
}

/// The incident of the first refusal says when it was warned of, and how right that was, in its JSON and in words.
fn carries_its_warning(world: &World, ahead: Duration) -> Result<String> {
    let deadline = Instant::now() + Duration::from_secs(15);
    while Instant::now() < deadline {
        let answer = world.agent.json("/api/v1/incidents")?;
        let incidents = answer["incidents"].as_array().context("incidents")?;
        if let Some(incident) = incidents.iter().find(|of| of["kind"] == "allocation_failure") {
            let warned = &incident["warnings"][0];
            let lead = warned["lead_seconds"].as_f64().with_context(|| format!("no warning: {incident}"))?;
            ensure!((lead - ahead.as_secs_f64()).abs() < 3.0, "{lead} s, seen {ahead:?} ahead");
            ensure!(warned["victim_right"] == true, "{warned}");
            ensure!(warned["driver"]["name"].as_str().is_some_and(|name| name.contains("-leak")), "{warned}");
            let because = incident["explanation"]["because"].to_string();
            ensure!(because.contains("It was warned of"), "{because}");
            return Ok(warned.to_string());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    anyhow::bail!("no incident of an allocation failure")
}
