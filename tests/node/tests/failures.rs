//! Owns the claims about refused memory: why, whose bytes were in the way, how often; and what is no refusal.
//! Refuses a verdict without its figures: they are held to the simulated node's own.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_node::{Cgroup, Tenant, World, scrape::Scrape};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// What a context takes on the simulated node: how far a free figure may be off.
const CONTEXT: u64 = 518 * MIB;
/// How far back the agent looks for growth, and a little.
const WINDOW: Duration = Duration::from_secs(32);
const PROCESSES: &str = "cotenant_gpu_tenant_processes";
const INCIDENTS: &str = "cotenant_incidents_total";

struct Guest {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
}

impl Guest {
    /// Each on a GPU of its own; it runs up to its first `held`.
    fn start(world: &World, gpu: usize, name: &str, script: &str) -> Result<Self> {
        let mut guest = Self::begin(world, gpu, name, script)?;
        guest.tenant.expect("held")?;
        Ok(guest)
    }

    fn begin(world: &World, gpu: usize, name: &str, script: &str) -> Result<Self> {
        Self::within(world, gpu, name, name, script)
    }

    fn within(world: &World, gpu: usize, unit: &str, name: &str, script: &str) -> Result<Self> {
        let unit = format!("fail-{}-{unit}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let script = format!("init\nuuid {gpu}\nretain {gpu}\n{script}");
        let tenant = world.node.tenant(name, &cgroup, &script, &[])?;
        Ok(Self { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup })
    }

    /// Lets it go on to its next word.
    fn go(&mut self, word: &str) -> Result<()> {
        self.tenant.go()?;
        self.tenant.expect(word)
    }
}

/// Holds so much and waits.
fn hold(mib: u64) -> String {
    format!("alloc held {mib}MiB\nexpect 0\nprint held\nwait\n")
}

/// Holds so much, and when told to asks for more, which is refused.
fn ask(own_mib: u64, step: &str) -> String {
    format!("alloc own {own_mib}MiB\nexpect 0\nprint held\nwait\n{step}\nexpect 2\nprint refused\nwait\n")
}

fn list(world: &World) -> Result<Vec<Value>> {
    let answer = world.agent.json("/api/v1/incidents")?;
    answer["incidents"].as_array().cloned().context("a list of incidents")
}

/// The evidence of this tenant's refusals, with the incident that it is in.
fn refusals(world: &World, label: &str) -> Result<Vec<(Value, Value)>> {
    let mut found = Vec::new();
    for incident in list(world)? {
        let lines = incident["evidence"].as_array().cloned().unwrap_or_default();
        let own = |line: &Value| line["evidence"] == "failure" && line["victim"]["name"] == label;
        found.extend(lines.into_iter().filter(own).map(|line| (incident.clone(), line)));
    }
    Ok(found)
}

/// Waits for the one refusal of this tenant, as wanted.
fn refusal(world: &World, label: &str, wanted: impl Fn(&Value) -> bool) -> Result<(Value, Value)> {
    let mut last = Vec::new();
    for _ in 0..150 {
        last = refusals(world, label)?;
        if let [(_, line)] = last.as_slice()
            && wanted(line)
        {
            return Ok(last.remove(0));
        }
        sleep(Duration::from_millis(100));
    }
    bail!("{label}: not as wanted: {last:#?}")
}

fn verdict<'a>(line: &'a Value, kind: &str) -> Result<&'a Value> {
    let verdict = &line["verdict"];
    ensure!(verdict["kind"] == kind, "{kind} is true: {line:#}");
    Ok(verdict)
}

fn because<'a>(verdict: &'a Value, fact: &str) -> Result<&'a Value> {
    let steps = verdict["because"].as_array().context("reasons")?;
    steps.iter().find(|step| step["fact"] == fact).with_context(|| format!("{fact} is among {verdict:#}"))
}

fn holder<'a>(verdict: &'a Value, guest: &Guest) -> Result<&'a Value> {
    let holders = verdict["holders"].as_array().context("holders")?;
    holders
        .iter()
        .find(|holder| holder["tenant"]["name"] == guest.label.as_str())
        .with_context(|| format!("{} is among {verdict:#}", guest.label))
}

/// What is free on a GPU by the node itself.
fn free(world: &World, gpu: usize) -> u64 {
    let (capacity, reserved, used) = world.node.state.memory(gpu);
    capacity - reserved - used
}

fn near(told: Option<u64>, true_value: u64) -> Result<()> {
    let told = told.context("a figure")?;
    ensure!(told.abs_diff(true_value) <= CONTEXT, "told {told}, true {true_value}");
    Ok(())
}

/// NVML and the ledger have both seen everybody who is there now.
fn calm(world: &World) -> Result<()> {
    let on_gpus = |process: &&cotenant_sim_state::Process| process.contexts.iter().any(|count| *count > 0);
    let there = world.node.state.processes().iter().filter(on_gpus).count();
    world.agent.until(|scrape| scrape.sum(PROCESSES, &[]) >= there as f64)?;
    // Two polls in a row, without anything that moves.
    sleep(Duration::from_millis(1500));
    Ok(())
}

fn incidents(scrape: &Scrape, kind: &str) -> f64 {
    scrape.sum(INCIDENTS, &[("kind", kind)])
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table of situations")]
fn c104_verdicts_are_right_with_the_real_agent() -> Result<()> {
    let world = World::create(12, "")?;
    // Everybody who holds something, first; each situation has a GPU of its own.
    let full = Guest::start(&world, 0, "full", &hold(128_000))?;
    let mut asks = Guest::start(&world, 0, "asks", &ask(1_000, "alloc a 20GiB"))?;
    let mut creates = Guest::start(&world, 0, "creates", &ask(2, "create h 20GiB 0"))?;
    let mut pools = Guest::start(&world, 0, "pools", &ask(2, "alloc p 20GiB cuMemAllocAsync"))?;
    let mut giant = Guest::start(&world, 1, "giant", &ask(2, "alloc a 400GiB"))?;
    let mut alone = Guest::start(&world, 2, "alone", &ask(120_000, "alloc a 40GiB"))?;
    let _little = Guest::start(&world, 2, "little", &hold(64))?;
    let quiet = Guest::start(&world, 3, "quiet", &hold(90_000))?;
    let mut bursts = Guest::start(
        &world,
        3,
        "bursts",
        "print held\nwait\nalloc b 30GiB\nexpect 0\nprint burst\nwait\nfree b\nprint freed\nwait\n",
    )?;
    let mut hurt = Guest::start(&world, 3, "hurt", &ask(2_000, "alloc a 30GiB"))?;
    let mut roomy = Guest::start(&world, 4, "roomy", &ask(2, "inject cuMemAlloc 2 1\nalloc a 1GiB"))?;
    let codes: String = [1, 4, 800, 801]
        .map(|code| format!("inject cuMemAlloc {code} 1\nalloc a 1GiB\nexpect {code}\nsleep 20\n"))
        .concat();
    let mut other =
        Guest::start(&world, 5, "other", &format!("print held\nwait\n{codes}print refused\nwait\n"))?;
    let mut first = Guest::within(&world, 9, "family", "first", &hold(100_000))?;
    first.tenant.expect("held")?;
    let mut second = Guest::within(&world, 9, "family", "second", &ask(2, "alloc a 60GiB"))?;
    second.tenant.expect("held")?;
    let packed = Guest::start(&world, 10, "packed", &hold(142_400))?;
    let mut pinned = Guest::start(
        &world,
        11,
        "pinned",
        &ask(2, "inject cuMemHostAlloc 2 1\nalloc h 1GiB cuMemHostAlloc"),
    )?;
    calm(&world)?;
    let (before, begun) = (world.agent.scrape()?, Instant::now());

    for guest in [
        &mut asks,
        &mut creates,
        &mut pools,
        &mut giant,
        &mut alone,
        &mut roomy,
        &mut other,
        &mut second,
        &mut pinned,
    ] {
        guest.go("refused")?;
    }
    // A context has no room either; its process never gets one.
    let mut late = Guest::begin(&world, 10, "late", "expect 2\nprint refused\nwait\n")?;
    late.tenant.expect("refused")?;
    for (guest, operation) in [(&asks, "cuMemAlloc"), (&creates, "cuMemCreate"), (&pools, "cuMemAllocAsync")]
    {
        let (incident, line) = refusal(&world, &guest.label, |_| true)?;
        let verdict = verdict(&line, "neighbour")?;
        ensure!(line["operation"] == operation && line["count"] == 1, "{line:#}");
        ensure!(holder(verdict, &full)?["bytes"].as_u64() == Some(128_000 * MIB), "{verdict:#}");
        near(because(verdict, "shortfall")?["free"].as_u64(), free(&world, 0))?;
        ensure!(incident["culprits"][0]["tenant"]["name"] == full.label.as_str(), "{incident:#}");
    }
    let (incident, line) = refusal(&world, &giant.label, |_| true)?;
    let usable = because(verdict(&line, "impossible")?, "larger_than_device")?["usable"].as_u64();
    let (capacity, reserved, _) = world.node.state.memory(1);
    ensure!(usable == Some(capacity - reserved), "{line:#}");
    ensure!(incident["culprits"].as_array().is_some_and(Vec::is_empty), "nobody's fault: {incident:#}");

    let (incident, line) = refusal(&world, &alone.label, |_| true)?;
    let own = because(verdict(&line, "self")?, "own_holds")?["bytes"].as_u64();
    ensure!(own == Some(120_000 * MIB), "{line:#}");
    ensure!(incident["culprits"].as_array().is_some_and(Vec::is_empty), "{incident:#}");

    let (_, line) = refusal(&world, &roomy.label, |_| true)?;
    near(because(verdict(&line, "fragmentation")?, "room_was_free")?["free"].as_u64(), free(&world, 4))?;

    let (_, line) = refusal(&world, &second.label, |_| true)?;
    let siblings = because(verdict(&line, "self")?, "own_siblings")?["bytes"].as_u64();
    ensure!(siblings == Some(100_000 * MIB), "{line:#}");

    let (_, line) = refusal(&world, &late.label, |_| true)?;
    let said = verdict(&line, "neighbour")?;
    ensure!(said["arena"] == "context" && line["operation"] == "cuDevicePrimaryCtxRetain", "{line:#}");
    ensure!(holder(said, &packed)?["bytes"].as_u64() == Some(142_400 * MIB), "{said:#}");

    let (_, line) = refusal(&world, &pinned.label, |_| true)?;
    let said = verdict(&line, "unknown")?;
    ensure!(said["arena"] == "host" && because(said, "host_memory").is_ok(), "{said:#}");
    ensure!(said["holders"].as_array().is_some_and(Vec::is_empty), "no GPU neighbour is the cause: {said:#}");

    ensure!(refusals(&world, &other.label)?.is_empty(), "1, 4, 800 and 801 are no refusals of memory");
    ensure!(!list(&world)?.iter().any(|incident| incident.to_string().contains(&other.label)));
    // What one has held for longer than the agent looks back is no growth.
    sleep(WINDOW.saturating_sub(begun.elapsed()));
    // The agent looks before the burst and after it, not at it.
    world.agent.pause();
    bursts.go("burst")?;
    let free_in_burst = free(&world, 3);
    hurt.go("refused")?;
    bursts.go("freed")?;
    world.agent.resume();

    let (incident, line) = refusal(&world, &hurt.label, |_| true)?;
    let said = verdict(&line, "neighbour")?;
    let burst = holder(said, &bursts)?;
    ensure!(
        burst["bytes"].as_u64() == Some(30 << 30) && burst["grew"].as_i64() == Some(30 << 30),
        "{said:#}"
    );
    ensure!(holder(said, &quiet)?["bytes"].as_u64() == Some(90_000 * MIB), "{said:#}");
    near(because(said, "shortfall")?["free"].as_u64(), free_in_burst)?;
    ensure!(because(said, "neighbours_grew")?["bytes"].as_u64() == Some(30 << 30));
    ensure!(
        incident["culprits"][0]["tenant"]["name"] == bursts.label.as_str(),
        "who grew, first: {incident:#}"
    );

    // One a GPU (0, 1, 2, 3, 4, 9, 10), and one of the host's memory.
    let after = world.agent.scrape()?;
    let new = incidents(&after, "allocation_failure") - incidents(&before, "allocation_failure");
    ensure!(new.to_bits() == 8f64.to_bits(), "{new} incidents: {:#?}", list(&world)?);
    ensure!(incidents(&after, "near_miss").to_bits() == 0f64.to_bits());
    Ok(())
}

#[test]
fn c104_a_storm_is_one_incident_and_a_retry_that_succeeds_a_near_miss() -> Result<()> {
    const STORM: u64 = 5_000;
    let world = World::create(3, "")?;
    let mut storm = Guest::start(
        &world,
        0,
        "storm",
        &format!("print held\nwait\nloop {STORM} {{\nalloc a 200GiB\n}}\nexpect 2\nprint refused\nwait\n"),
    )?;
    // Some of a storm fall between reports, and its process may be gone before anybody looks.
    let mut brief =
        Guest::start(&world, 1, "brief", "print held\nwait\nloop 700 {\nalloc a 200GiB\n}\nexit 1\n")?;
    let mut keeps =
        Guest::start(&world, 2, "keeps", "alloc b 130000MiB\nprint held\nwait\nfree b\nprint freed\nwait\n")?;
    let mut tries = Guest::start(
        &world,
        2,
        "tries",
        "print held\nwait\nalloc a 20GiB\nexpect 2\nprint refused\nwait\nalloc a 20GiB\nexpect 0\nprint granted\nwait\n",
    )?;
    calm(&world)?;
    storm.go("refused")?;
    brief.tenant.go()?;
    ensure!(brief.tenant.ending()?.code() == Some(1));
    tries.go("refused")?;
    keeps.go("freed")?;
    tries.go("granted")?;

    let (incident, line) = refusal(&world, &storm.label, |line| line["count"] == STORM)?;
    verdict(&line, "impossible")?;
    ensure!(incident["victims"][0]["failures"] == STORM, "{incident:#}");
    let (_, line) = refusal(&world, &brief.label, |line| line["count"] == 700)?;
    verdict(&line, "impossible")?;
    let (incident, line) = refusal(&world, &tries.label, |line| line["recovered"] == true)?;
    let said = verdict(&line, "neighbour")?;
    ensure!(line["count"] == 1 && line["near_misses"] == 1, "{line:#}");
    ensure!(holder(said, &keeps)?["bytes"].as_u64() == Some(130_000 * MIB), "{said:#}");
    ensure!(incident["kind"] == "near_miss", "{incident:#}");

    // Counts stand, and no second incident comes of what was counted later.
    sleep(Duration::from_secs(1));
    let (_, line) = refusal(&world, &storm.label, |_| true)?;
    ensure!(line["count"] == STORM, "{line:#}");
    let scrape = world.agent.scrape()?;
    let all = list(&world)?;
    ensure!(all.len() == 3, "{all:#?}");
    ensure!(
        incidents(&scrape, "allocation_failure") >= 2.0
            && incidents(&scrape, "near_miss").to_bits() == 1f64.to_bits()
    );
    Ok(())
}

#[test]
fn c104_an_mps_clients_limit_is_told_and_refuses_where_a_device_is_not_full() -> Result<()> {
    const VARIABLE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    let world = World::create(2, "")?;
    let start = |name: &str| -> Result<Guest> {
        let unit = format!("fail-{}-{name}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let script = format!("init\nuuid 0\nretain 0\n{}", ask(1_000, "alloc a 2GiB"));
        let tenant = world.node.tenant(name, &cgroup, &script, &[(VARIABLE, "0=2G,9=1G,junk")])?;
        let mut guest = Guest { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup };
        guest.tenant.expect("held")?;
        Ok(guest)
    };
    let (mut client, mut other) = (start("client")?, start("other")?);
    // NVML knows the one as a client, and the other's word is nothing but a word.
    let row = serde_json::json!({ "gpu": 0, "pid": client.tenant.pid(), "bytes": 1000 * MIB, "list": "mps" });
    std::fs::write(
        world.node.directory.join("nvml.json.new"),
        serde_json::json!({ "rows": [row] }).to_string(),
    )?;
    std::fs::rename(world.node.directory.join("nvml.json.new"), world.node.directory.join("nvml.json"))?;
    let limit = |scrape: &Scrape, guest: &Guest, source: &str| {
        scrape.get(
            "cotenant_gpu_memory_tenant_limit_bytes",
            &[("tenant", guest.label.as_str()), ("limit_source", source)],
        )
    };
    let scrape = world.agent.until(|scrape| {
        limit(scrape, &client, "mps").is_some() && limit(scrape, &other, "declared").is_some()
    })?;
    ensure!(
        limit(&scrape, &client, "mps") == Some((2048 * MIB) as f64)
            && limit(&scrape, &client, "declared").is_none()
    );
    ensure!(limit(&scrape, &other, "mps").is_none(), "who is no client is not held");
    let room = [("tenant", client.label.as_str())];
    ensure!(scrape.get("cotenant_gpu_memory_tenant_room_bytes", &room) == Some((1048 * MIB) as f64));
    calm(&world)?;
    client.go("refused")?;
    other.go("refused")?;
    let (_, line) = refusal(&world, &client.label, |line| line["verdict"]["kind"] == "limit")?;
    let over = because(verdict(&line, "limit")?, "over_limit")?;
    ensure!(
        over["enforced"] == true && over["limit"]["source"] == "mps" && over["limit"]["scope"] == "process",
        "{over}"
    );
    ensure!(over["limit"]["bytes"] == 2048 * MIB && over["held"] == 1000 * MIB, "{over}");
    ensure!(line["verdict"]["certainty"] == "high", "there was room on the device: {line:#}");
    // It was refused all the same, and the only thing that says why is its own word.
    let (incident, line) = refusal(&world, &other.label, |line| line["verdict"]["kind"] == "limit")?;
    ensure!(line["verdict"]["certainty"] == "low", "{line:#}");
    let words = incident["explanation"]["because"].to_string();
    ensure!(words.contains("MPS"), "how the GPU is shared is said: {words}");
    Ok(())
}
