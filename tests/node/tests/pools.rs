//! Owns the claim about pools: what they have taken of a GPU is known to the byte, used or not.
//! Refuses the agent's own sums as truth: NVML says what a process takes, and nothing else is allocated here.

use anyhow::Result;
use cotenant_node::{Cgroup, World, losses, scrape::Scrape};

const BEGIN: &str = "init\nuuid 0\nretain 0\n";
const MIB: f64 = 1_048_576.0;

#[test]
fn a_pools_memory_is_two_figures_used_and_taken() -> Result<()> {
    let world = World::create(1, "")?;
    let unit = format!("pools-{}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let script = format!(
        "{BEGIN}print bare\nwait\nalloc a 64MiB cuMemAllocAsync\nalloc b 100MiB cuMemAllocAsync\nprint grown\nwait\n\
         free a cuMemFreeAsync\nfree b cuMemFreeAsync\nprint freed\nwait\nalloc c 60MiB cuMemAllocAsync\nprint \
         again\nwait\ntrim\nprint trimmed\nwait\nfree c cuMemFreeAsync\nreset 0\nprint reset\nwait\nalloc d 8MiB \
         cuMemAllocAsync\nprint new\nwait\n"
    );
    let mut tenant = world.node.tenant("pools", &cgroup, &script, &[])?;
    let label = format!("systemd:{unit}");
    let of = |scrape: &Scrape, name: &str| scrape.sum(name, &[("tenant", &label)]);
    let nvml = |scrape: &Scrape| of(scrape, "cotenant_gpu_memory_process_bytes");
    tenant.expect("bare")?;
    let scrape = world.agent.until(|scrape| nvml(scrape) > 0.0)?;
    let context = nvml(&scrape);
    assert_eq!(scrape.of("cotenant_gpu_memory_pool_reserved_bytes").count(), 0, "no pool, no figure");
    for (said, used, taken) in [
        ("grown", 164.0, 164.0),
        ("freed", 0.0, 164.0),
        ("again", 60.0, 164.0),
        // Of 104 MiB that are free in it, the piece of 64 goes; the other is in use in part.
        ("trimmed", 60.0, 100.0),
        ("reset", 0.0, 0.0),
        ("new", 8.0, 8.0),
    ] {
        tenant.go()?;
        tenant.expect(said)?;
        let seen = world.agent.until(|scrape| {
            let is = |name, mib: f64| of(scrape, name).to_bits() == (mib * MIB).to_bits();
            is("cotenant_gpu_memory_live_bytes", used)
                && is("cotenant_gpu_memory_pool_reserved_bytes", taken)
                && (nvml(scrape) - context).to_bits() == (taken * MIB).to_bits()
        });
        let scrape = world.agent.scrape()?;
        assert!(
            seen.is_ok(),
            "{said}: used {}, taken {}, by NVML {} MiB",
            of(&scrape, "cotenant_gpu_memory_live_bytes") / MIB,
            of(&scrape, "cotenant_gpu_memory_pool_reserved_bytes") / MIB,
            (nvml(&scrape) - context) / MIB
        );
    }
    assert!(losses(&world.agent.scrape()?).is_empty());
    tenant.kill()
}
