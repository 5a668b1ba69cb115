//! Owns the claim of exactness: the real agent against the driver's own record, to the byte and to the call.
//! Refuses tolerance.

use std::collections::BTreeMap;

use anyhow::Result;
use cotenant_node::{Cgroup, World, compare::TenantTruth, losses};

const UNTIL_GO: &str = "init\nuuid 0\nretain 0\nprint ready\nwait\n";

#[test]
fn c13_c56_c57_c58_a_million_calls_of_64_processes_are_exact() -> Result<()> {
    let world = World::create(2, "")?;
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
        let tenant = world.node.tenant(
            &format!("t{index}"),
            &cgroup,
            &script,
            &[("CUDA_VISIBLE_DEVICES", visible)],
        )?;
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
    let while_held = world.truths(&names, &[])?;
    let calls: u64 = while_held.values().map(TenantTruth::total_calls).sum();
    assert!(calls >= 1_000_000, "only {calls} calls");
    let found = world.settle(&while_held)?;
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
    let after = world.truths(&names, &dead)?;
    let found = world.settle(&after)?;
    assert!(
        found.is_empty(),
        "after death: {} differences, first: {:#?}",
        found.len(),
        &found[..found.len().min(10)]
    );
    let scrape = world.agent.scrape()?;
    assert_eq!(losses(&scrape), BTreeMap::new());
    println!("{calls} calls, 0 differences, 0 losses");
    Ok(())
}
