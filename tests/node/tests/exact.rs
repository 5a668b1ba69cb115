//! Owns the claim of exactness: the real agent against the driver's own record, to the byte and to the call.
//! Refuses tolerance.

use std::collections::BTreeMap;

use anyhow::Result;
use cotenant_node::{Agent, Cgroup, SimulatedNode, Tenant, compare, losses, scrape::Scrape};
use cotenant_sim_state::{NodeConfig, truth};

const UNTIL_GO: &str = "init\nuuid 0\nretain 0\nprint ready\nwait\n";

struct World {
    node: SimulatedNode,
    agent: Agent,
    _warm: (Cgroup, Tenant),
    _directory: tempfile::TempDir,
}

/// A node whose library is probed before any tenant of the test starts: at scale 0 there is no time to attach.
fn world(gpus: usize, extra: &str) -> Result<World> {
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(gpus, 0.0))?;
    let agent = node.agent(extra)?;
    let cgroup = Cgroup::create(&format!("system.slice/warm-{}.service", std::process::id()))?;
    let mut warm = node.tenant("warm", &cgroup, "print loaded\nwait\n", &[])?;
    warm.expect("loaded")?;
    agent.until_probed(1)?;
    Ok(World { node, agent, _warm: (cgroup, warm), _directory: directory })
}

fn truths(world: &World, tenants: &BTreeMap<u32, String>, dead: &[u32]) -> Result<BTreeMap<String, compare::TenantTruth>> {
    let mut by_tenant: BTreeMap<String, compare::TenantTruth> = BTreeMap::new();
    for mut process in truth::read(&world.node.directory)? {
        let Some(tenant) = tenants.get(&process.pid) else { continue };
        if dead.contains(&process.pid) {
            process.end();
        }
        by_tenant.entry(tenant.clone()).or_default().add(&world.node.state, &process);
    }
    Ok(by_tenant)
}

fn differences(scrape: &Scrape, truths: &BTreeMap<String, compare::TenantTruth>) -> Vec<String> {
    truths.iter().flat_map(|(tenant, truth)| compare::differences(scrape, tenant, truth)).collect()
}

/// Scrapes until nothing differs, or gives what still does.
fn settle(world: &World, truths: &BTreeMap<String, compare::TenantTruth>) -> Result<Vec<String>> {
    let mut last = Vec::new();
    for _ in 0..50 {
        last = differences(&world.agent.scrape()?, truths);
        if last.is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    Ok(last)
}

#[test]
fn c13_c56_c57_c58_a_million_calls_of_64_processes_are_exact() -> Result<()> {
    let world = world(2, "")?;
    let own = std::process::id();
    let mut tenants = Vec::new();
    let mut names = BTreeMap::new();
    for index in 0..64 {
        // 48 tenants of one process, 4 of four.
        let unit = if index < 48 { format!("w{index}") } else { format!("g{}", index % 4) };
        let unit = format!("exact-{own}-{unit}.service");
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let script = format!("{UNTIL_GO}random {index} 14000\nprint held\nwait\n");
        let visible = if index % 2 == 0 { "0,1" } else { "1,0" };
        let tenant = world.node.tenant(&format!("t{index}"), &cgroup, &script, &[("CUDA_VISIBLE_DEVICES", visible)])?;
        names.insert(tenant.pid(), format!("systemd:{unit}"));
        tenants.push((tenant, cgroup));
    }
    for (tenant, _) in &mut tenants {
        tenant.expect("ready")?;
        tenant.go()?;
    }
    for (tenant, _) in &mut tenants {
        tenant.expect("held")?;
    }
    let while_held = truths(&world, &names, &[])?;
    let calls: u64 = while_held.values().map(compare::TenantTruth::total_calls).sum();
    assert!(calls >= 1_000_000, "only {calls} calls");
    let found = settle(&world, &while_held)?;
    assert!(found.is_empty(), "{} differences, first: {:#?}", found.len(), &found[..found.len().min(10)]);
    let scrape = world.agent.scrape()?;
    assert_eq!(losses(&scrape), BTreeMap::new());
    // kill -9 while holding, the rest by their own end.
    let mut dead = Vec::new();
    for (index, (tenant, _)) in tenants.iter_mut().enumerate() {
        dead.push(tenant.pid());
        if index % 4 == 0 {
            tenant.kill()?;
        } else {
            tenant.end()?;
        }
    }
    let after = truths(&world, &names, &dead)?;
    let found = settle(&world, &after)?;
    assert!(found.is_empty(), "after death: {} differences, first: {:#?}", found.len(), &found[..found.len().min(10)]);
    let scrape = world.agent.scrape()?;
    assert_eq!(losses(&scrape), BTreeMap::new());
    println!("{calls} calls, 0 differences, 0 losses");
    Ok(())
}
