//! Owns the claims about what is bounded: rows of one process, what probes cost, and what happens at the bound.
//! Refuses a neighbour that pays for it.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use cotenant_node::{Cgroup, Tenant, World, losses, scrape::Scrape};

const BEGIN: &str = "init\nuuid 0\nretain 0\n";
const LIVE: &str = "cotenant_gpu_memory_live_bytes";
const MIB: f64 = 1_048_576.0;

/// One tenant of a test: its cgroup goes after it.
struct Guest {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
}

fn guest(world: &World, name: &str, script: &str, environment: &[(&str, &str)]) -> Result<Guest> {
    let unit = format!("budget-{}-{name}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let tenant = world.node.tenant(name, &cgroup, script, environment)?;
    Ok(Guest { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup })
}

/// Of its main thread.
fn on_cpu(pid: u32) -> Result<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
    let first = text.split_whitespace().next().context("time on CPU, time waiting, slices")?;
    Ok(Duration::from_nanos(first.parse()?))
}

fn is(scrape: &Scrape, label: &str, confidence: &str) -> bool {
    scrape.sum("cotenant_gpu_memory_confidence", &[("tenant", label), ("confidence", confidence)]) > 0.0
}

fn rows(scrape: &Scrape, map: &str) -> f64 {
    scrape.sum("cotenant_agent_map_entries", &[("map", map)])
}

fn exact(world: &World, guest: &Guest, dead: &[u32]) -> Result<()> {
    let names = BTreeMap::from([(guest.tenant.pid(), guest.label.clone())]);
    let found = world.settle(&world.truths(&names, dead)?)?;
    assert!(found.is_empty(), "{}: {found:#?}", guest.label);
    Ok(())
}

#[test]
fn c62_three_hostile_processes_meet_their_quota_and_the_neighbour_stays_exact() -> Result<()> {
    let world = World::create(1, "[kernel]\npointers = 512\nhandles = 512\n")?;
    let greedy = format!(
        "{BEGIN}loop 600 {{\nalloc a 4KiB\n}}\nloop 600 {{\ncreate h 2MiB 0\nmap h\n}}\nprint held\nwait\n"
    );
    let mut hostile = Vec::new();
    for name in ["one", "two", "three"] {
        let mut guest = guest(&world, name, &greedy, &[])?;
        guest.tenant.expect("held")?;
        hostile.push(guest);
    }
    let honest = format!(
        "{BEGIN}threads 4 {{\nloop 100 {{\nalloc t 3MiB\nfree t\n}}\nalloc k 1MiB\n}}\ncreate h 4MiB 0\nmap h\n\
         handle_release h\nunmap h\ncreate i 2MiB 0\nalloc p 2MiB cuMemAllocAsync\nprint held\nwait\n"
    );
    let mut neighbour = guest(&world, "neighbour", &honest, &[])?;
    neighbour.tenant.expect("held")?;
    exact(&world, &neighbour, &[])?;
    let scrape = world.agent.scrape()?;
    assert!(is(&scrape, &neighbour.label, "complete"));
    for guest in &hostile {
        assert!(is(&scrape, &guest.label, "events_lost"), "{}", guest.label);
    }
    let lost = losses(&scrape);
    assert_eq!(lost.keys().map(String::as_str).collect::<Vec<_>>(), ["quota"], "no map is full: {lost:?}");
    // Half of the map, then half of what is left, and so on: a part of it is always free.
    for map in ["POINTERS", "HANDLES", "PHYSICALS", "MAPPINGS"] {
        let taken = rows(&scrape, map);
        assert!((400.0..500.0).contains(&taken), "{map}: {taken} of 512");
    }
    // Of the pointers it is known to the row: every one is booked or counted.
    let booked: f64 = hostile
        .iter()
        .map(|guest| scrape.sum(LIVE, &[("tenant", &guest.label), ("memory_kind", "device")]) / 4096.0)
        .sum();
    let neighbours = 5.0;
    assert_eq!(rows(&scrape, "POINTERS").to_bits(), (booked + neighbours).to_bits());
    for mut guest in hostile {
        guest.tenant.kill()?;
    }
    // What the dead held is there again for the next.
    let scrape = world.agent.until(|scrape| rows(scrape, "POINTERS").to_bits() == neighbours.to_bits())?;
    assert_eq!(rows(&scrape, "HANDLES").to_bits(), 1f64.to_bits());
    exact(&world, &neighbour, &[])?;
    let mut next =
        guest(&world, "next", &format!("{BEGIN}loop 200 {{\nalloc a 4KiB\n}}\nprint held\nwait\n"), &[])?;
    next.tenant.expect("held")?;
    exact(&world, &next, &[])?;
    neighbour.tenant.kill()
}

#[test]
fn c67_a_storm_of_stream_ordered_calls_is_shed_said_and_comes_back() -> Result<()> {
    let world = World::create(1, "[kernel]\nprobe_share = 0.02\nshed_for = \"4s\"\n")?;
    let own = world.node.library("own")?;
    let steady = format!("print loaded\nwait\n{BEGIN}alloc p 6MiB cuMemAllocAsync\nprint held\nwait\n");
    let path = own.to_str().context("a path in UTF-8")?;
    let mut neighbour = guest(&world, "neighbour", &steady, &[("COTENANT_SIM_LIBCUDA", path)])?;
    neighbour.tenant.expect("loaded")?;
    world.agent.until_probed(&own)?;
    neighbour.tenant.go()?;
    neighbour.tenant.expect("held")?;
    let pair = "alloc a 1MiB cuMemAllocAsync\nfree a cuMemFreeAsync\n";
    let script = format!(
        "{BEGIN}alloc early 4MiB cuMemAllocAsync\nalloc d 2MiB\nprint held\nwait\nfor 14000 {{\n{pair}}}\nprint over\n\
         wait\nfree early cuMemFreeAsync\nalloc late 8MiB cuMemAllocAsync\nprint late\nwait\n"
    );
    let mut storm = guest(&world, "storm", &script, &[])?;
    storm.tenant.expect("held")?;
    let pool = [("tenant", storm.label.as_str()), ("memory_kind", "pool")];
    world.agent.until(|scrape| scrape.sum(LIVE, &pool).to_bits() == (4.0 * MIB).to_bits())?;
    storm.tenant.go()?;
    let scrape = world.agent.until(|scrape| scrape.sum("cotenant_agent_processes_untimed", &[]) > 0.0)?;
    assert!(is(&scrape, &storm.label, "complete"), "without timing the ledger is exact still");
    let scrape = world.agent.until(|scrape| scrape.sum("cotenant_agent_probes_shed", &[]) > 0.0)?;
    assert_eq!(scrape.sum("cotenant_agent_probes_shed", &[]).to_bits(), 1f64.to_bits());
    let scrape = world.agent.until(|scrape| {
        is(scrape, &storm.label, "events_lost") && scrape.sum(LIVE, &pool).to_bits() == 0f64.to_bits()
    })?;
    let lost = losses(&scrape);
    assert_eq!(lost.keys().map(String::as_str).collect::<Vec<_>>(), ["probes_shed"], "{lost:?}");
    assert_eq!(lost["probes_shed"].to_bits(), 1f64.to_bits(), "one process");
    let status = world.agent.status()?;
    let said = status["features"].as_array().into_iter().flatten().find(|of| of["name"] == "probe_budget");
    assert_eq!(said.context("the budget is a feature")?["state"], "degraded");
    storm.tenant.expect("over")?;
    // The storm is over: everything comes back, and what it holds from then on is known.
    world.agent.until(|scrape| {
        scrape.sum("cotenant_agent_probes_shed", &[]).to_bits() == 0f64.to_bits()
            && scrape.sum("cotenant_agent_processes_untimed", &[]).to_bits() == 0f64.to_bits()
    })?;
    storm.tenant.go()?;
    storm.tenant.expect("late")?;
    let scrape = world.agent.until(|scrape| scrape.sum(LIVE, &pool).to_bits() == (8.0 * MIB).to_bits())?;
    assert!(is(&scrape, &storm.label, "events_lost"), "for life");
    let of = |name: &str| scrape.sum(name, &pool);
    let (allocated, freed) =
        (of("cotenant_gpu_memory_allocated_bytes_total"), of("cotenant_gpu_memory_freed_bytes_total"));
    assert_eq!((allocated - freed).to_bits(), (8.0 * MIB).to_bits());
    let device = [("tenant", storm.label.as_str()), ("memory_kind", "device")];
    assert_eq!(scrape.sum(LIVE, &device).to_bits(), (2.0 * MIB).to_bits(), "other kinds are not touched");
    assert!(is(&scrape, &neighbour.label, "complete"), "who has a library of its own is not concerned");
    exact(&world, &neighbour, &[])?;
    storm.tenant.kill()?;
    neighbour.tenant.kill()
}

#[test]
fn c67_what_a_probed_call_costs_is_known_within_a_factor_of_two() -> Result<()> {
    const PAIRS: u32 = 3000;
    let mut world = World::create(1, "[kernel]\nprobe_share = 0.0\n")?;
    let pairs = format!(
        "loop {PAIRS} {{\nalloc a 1MiB cuMemAllocAsync\nfree a cuMemFreeAsync\n}}\nprint done\nwait\n"
    );
    let mut guest = guest(&world, "pairs", &format!("{BEGIN}print held\nwait\n{}", pairs.repeat(16)), &[])?;
    guest.tenant.expect("held")?;
    // The tenant's time on its CPU, the cheapest of eight: what else the host does only adds.
    let cheapest = |tenant: &mut Tenant| -> Result<Duration> {
        let mut best = Duration::MAX;
        for _ in 0..8 {
            let begun = on_cpu(tenant.pid())?;
            tenant.go()?;
            tenant.expect("done")?;
            best = best.min(on_cpu(tenant.pid())?.saturating_sub(begun) / PAIRS);
        }
        Ok(best)
    };
    let watched = cheapest(&mut guest.tenant)?;
    let hits = |scrape: &Scrape| scrape.sum("cotenant_agent_notes_total", &[("note", "probe_hits")]);
    let scrape = world.agent.until(|scrape| hits(scrape) >= f64::from(PAIRS * 16))?;
    world.agent.stop()?;
    let alone = cheapest(&mut guest.tenant)?;
    // Two calls a pair.
    let measured = watched.saturating_sub(alone).as_secs_f64() / 2.0;
    let calibrated = scrape.sum("cotenant_agent_probe_calibration_seconds", &[]);
    println!(
        "a pair: {alone:?} alone, {watched:?} probed; a call: {measured:.2e} s, calibrated {calibrated:.2e} s"
    );
    assert!(calibrated > 0.0, "calibrated");
    assert!((0.5..=2.0).contains(&(calibrated / measured)), "calibrated {calibrated}, measured {measured}");
    let total = scrape.sum("cotenant_agent_probe_cost_seconds_total", &[]);
    assert!((total / (hits(&scrape) * calibrated) - 1.0).abs() < 1e-6, "{total}");
    guest.tenant.kill()
}
