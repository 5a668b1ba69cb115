//! Owns the claim about the kernel boundary: it names the GPU where nothing else does, whichever hook sees the ioctl.
//! Refuses to say which hook that should be: the kernel offers one or the other (tests/kernels runs both).

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use cotenant_node::{Cgroup, World, losses};

const NOTES: &str = "cotenant_agent_notes_total";

/// The second GPU as ordinal 0, and nobody asks for its UUID: only the ioctl says which one it is.
#[test]
fn the_ioctl_names_the_gpu_that_the_context_cannot() -> Result<()> {
    let world = World::create(2, "")?;
    let status = world.agent.status()?;
    let boundary = status["features"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|feature| feature["name"] == "gpu_boundary")
        .context("the boundary is a feature")?;
    println!("boundary: {} {}", boundary["state"], boundary["reason"]);
    assert_eq!(boundary["state"], "active", "{boundary}");

    let unit = format!("boundary-{}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let script = "init\nretain 0\nalloc a 64MiB\nfree a\nalloc b 6MiB\nalloc m 32MiB cuMemAllocManaged\nprint held\nwait\n";
    let mut tenant = world.node.tenant("second", &cgroup, script, &[("CUDA_VISIBLE_DEVICES", "1")])?;
    tenant.expect("held")?;
    let names = BTreeMap::from([(tenant.pid(), format!("systemd:{unit}"))]);
    let found = world.settle(&world.truths(&names, &[])?)?;
    assert!(found.is_empty(), "{found:#?}");

    let scrape = world.agent.scrape()?;
    let hits = scrape.sum(NOTES, &[("note", "boundary_hits")]);
    assert!(hits >= 2.0, "{hits} ioctls were seen");
    assert_eq!(scrape.sum(NOTES, &[("note", "gpu_disagreement")]).to_bits(), 0f64.to_bits());
    assert_eq!(losses(&scrape), BTreeMap::new());
    println!("{hits} ioctls seen");
    tenant.go()?;
    tenant.end()
}
