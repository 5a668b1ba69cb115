//! Owns the claims about lives: threads, exec, fork, PID reuse, contexts, handles, failures, full maps.
//! Refuses tolerance, as `exact` does.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use cotenant_node::{Cgroup, Tenant, World, losses};

/// One tenant of a test: its cgroup goes after it.
struct Guest {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
}

fn guest(world: &World, name: &str, script: &str, environment: &[(&str, &str)]) -> Result<Guest> {
    let unit = format!("life-{}-{name}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let tenant = world.node.tenant(name, &cgroup, script, environment)?;
    Ok(Guest { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup })
}

/// Runs a script up to its `held` and holds the agent to the driver's record, then to its end.
fn exact(world: &World, name: &str, script: &str, environment: &[(&str, &str)]) -> Result<()> {
    let mut guest = guest(world, name, &format!("{script}\nprint held\nwait\n"), environment)?;
    guest.tenant.expect("held")?;
    let names = BTreeMap::from([(guest.tenant.pid(), guest.label.clone())]);
    let found = world.settle(&world.truths(&names, &[])?)?;
    assert!(found.is_empty(), "{name}, while held: {found:#?}");
    guest.tenant.go()?;
    guest.tenant.end()?;
    let found = world.settle(&world.truths(&names, &[guest.tenant.pid()])?)?;
    assert!(found.is_empty(), "{name}, after its end: {found:#?}");
    Ok(())
}

const BEGIN: &str = "init\nuuid 0\nretain 0\n";

#[test]
fn every_family_is_exact_in_life_and_death() -> Result<()> {
    let world = World::create(2, "")?;
    let scripts = [
        (
            "c58_failed_free",
            "alloc a 4MiB\ninject cuMemFree 1 1\nfree a\nexpect 1\nfree a\nexpect 0\nalloc b 2MiB",
        ),
        (
            "c59_failed_alloc",
            "inject cuMemAlloc 2 1\nalloc a 4MiB\nexpect 2\nalloc b 400GiB\nexpect 2\nalloc c 2MiB",
        ),
        (
            "c13_wrong_frees",
            "alloc a 4MiB\nfree a\nfree_again a\nexpect 1\nfree_raw 4096\nexpect 1\nfree_raw 0\nexpect 0",
        ),
        (
            "c57_handles",
            "create h 8MiB 0\nmap h\nhandle_release h\ncreate i 2MiB 0\nhandle_release i\ncreate j 4MiB 0\nmap j\n\
             handle_retain j\nunmap j\nhandle_release j",
        ),
        (
            "c57_arrays",
            "array a 100 50\nmipmap m 64 64 7\npitch p 1000 30\narray b 8 0\nfree a cuArrayDestroy",
        ),
        (
            "c56_twins",
            "alloc a 1MiB cuMemAlloc\nalloc b 3MiB cuMemAllocAsync_ptsz\nfree b cuMemFreeAsync_ptsz\nalloc c 5KiB",
        ),
        (
            "c40_managed",
            "alloc m 4GiB cuMemAllocManaged\nalloc h 1MiB cuMemHostAlloc\nregister r 64KiB\nipc i 3MiB",
        ),
        (
            "contexts",
            "alloc a 4MiB\nctx_create c 1 v3\nalloc b 6MiB\nalloc h 1MiB cuMemHostAlloc\nctx_destroy c\nctx_create d 1 v4\n\
             alloc e 8MiB\npop\nalloc f 2MiB\npush d\nalloc g 2MiB",
        ),
        ("primary_reset", "alloc a 4MiB\nreset 0\nalloc b 6MiB"),
        (
            "primary_release",
            "alloc a 4MiB\nretain 0\nrelease 0\nalloc b 6MiB\nrelease 0\nretain 0\nalloc c 2MiB",
        ),
    ];
    for (name, script) in scripts {
        exact(&world, name, &format!("{BEGIN}{script}"), &[])?;
    }
    exact(
        &world,
        "nested",
        &format!("{BEGIN}pitch p 1000 30\npitch q 10 10\nfree q"),
        &[("COTENANT_SIM_NESTED", "1")],
    )
    .context("a call inside a traced call")?;
    let by_lookup = [("COTENANT_SIM_RESOLVE", "procaddress")];
    exact(
        &world,
        "c56_lookup",
        &format!("{BEGIN}alloc a 1MiB\nalloc b 3MiB cuMemAllocAsync_ptsz\nfree a"),
        &by_lookup,
    )?;
    assert_eq!(losses(&world.agent.scrape()?), BTreeMap::new());
    Ok(())
}

#[test]
fn threads_at_once_are_exact() -> Result<()> {
    let world = World::create(2, "")?;
    let script = "alloc a 2MiB\nthreads 8 {\nloop 200 {\nalloc t 3MiB\nfree t\n}\nalloc k 1MiB\n}";
    exact(&world, "threads", &format!("{BEGIN}{script}"), &[])?;
    assert_eq!(losses(&world.agent.scrape()?), BTreeMap::new());
    Ok(())
}

#[test]
fn c60_the_main_threads_exit_is_not_the_processs() -> Result<()> {
    let world = World::create(1, "")?;
    let script = format!(
        "{BEGIN}alloc a 4MiB\nbackground {{\nsleep 300\nalloc b 2MiB\nprint held\nwait\nexit 0\n}}\nleader_exit\n"
    );
    let mut guest = guest(&world, "leader", &script, &[])?;
    guest.tenant.expect("held")?;
    let names = BTreeMap::from([(guest.tenant.pid(), guest.label.clone())]);
    let found = world.settle(&world.truths(&names, &[])?)?;
    assert!(found.is_empty(), "after the main thread's exit: {found:#?}");
    guest.tenant.go()?;
    guest.tenant.end()?;
    let found = world.settle(&world.truths(&names, &[guest.tenant.pid()])?)?;
    assert!(found.is_empty(), "after the process's exit: {found:#?}");
    Ok(())
}

#[test]
fn exec_starts_clean_and_frees_what_was_held() -> Result<()> {
    let world = World::create(1, "")?;
    let second = world.node.directory.join("second.script");
    fs::write(&second, format!("{BEGIN}alloc b 2MiB\nprint held\nwait\n"))?;
    let mut guest = guest(&world, "exec", &format!("{BEGIN}alloc a 4MiB\nexec {}\n", second.display()), &[])?;
    guest.tenant.expect("held")?;
    let wanted = [("tenant", guest.label.as_str())];
    let scrape = world.agent.until(|scrape| {
        scrape.sum("cotenant_gpu_memory_live_bytes", &wanted).to_bits() == f64::from(2 << 20).to_bits()
    })?;
    let sum = |name: &str| scrape.sum(name, &wanted);
    assert_eq!(sum("cotenant_gpu_memory_allocated_bytes_total").to_bits(), f64::from(6 << 20).to_bits());
    assert_eq!(sum("cotenant_gpu_memory_freed_bytes_total").to_bits(), f64::from(4 << 20).to_bits());
    assert_eq!(losses(&scrape), BTreeMap::new());
    guest.tenant.kill()
}

#[test]
fn a_fork_child_is_its_own_process() -> Result<()> {
    let world = World::create(1, "")?;
    let script = format!(
        "{BEGIN}alloc a 4MiB\nfork {{\nfree a\nexpect 3\nalloc b 2MiB\nexpect 3\n}}\nprint held\nwait\n"
    );
    let mut guest = guest(&world, "fork", &script, &[])?;
    guest.tenant.expect("held")?;
    let wanted = [("tenant", guest.label.as_str())];
    let failed = [("tenant", guest.label.as_str()), ("error_type", "CUDA_ERROR_NOT_INITIALIZED")];
    let scrape = world.agent.until(|scrape| {
        scrape.sum("cotenant_gpu_memory_failures_total", &failed).to_bits() == 2f64.to_bits()
    })?;
    let live = scrape.sum("cotenant_gpu_memory_live_bytes", &wanted);
    assert_eq!(
        live.to_bits(),
        f64::from(4 << 20).to_bits(),
        "a child's refused free takes nothing from its parent"
    );
    guest.tenant.kill()
}

#[test]
fn a_reused_pid_inherits_nothing() -> Result<()> {
    let world = World::create(1, "")?;
    let script = format!("{BEGIN}alloc a 4MiB\nprint held\nwait\n");
    let mut first = guest(&world, "first", &script, &[])?;
    first.tenant.expect("held")?;
    let pid = first.tenant.pid();
    first.tenant.kill()?;
    let mut second = None;
    for _ in 0..200 {
        // The next process gets the number after this one, unless somebody else is faster.
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())
            .context("PIDs cannot be steered (root?)")?;
        let mut candidate =
            guest(&world, "second", &format!("{BEGIN}alloc b 2MiB\nprint held\nwait\n"), &[])?;
        if candidate.tenant.pid() == pid {
            candidate.tenant.expect("held")?;
            second = Some(candidate);
            break;
        }
        candidate.tenant.kill()?;
    }
    let second = second.context("the PID never came back")?;
    let names = BTreeMap::from([(pid, second.label.clone())]);
    let live = |label: &str| {
        let wanted = [("tenant", label)];
        world.agent.scrape().map(|scrape| scrape.sum("cotenant_gpu_memory_live_bytes", &wanted))
    };
    world.agent.until(|scrape| {
        let wanted = [("tenant", second.label.as_str())];
        scrape.sum("cotenant_gpu_memory_live_bytes", &wanted).to_bits() == f64::from(2 << 20).to_bits()
    })?;
    assert_eq!(live(&first.label)?.to_bits(), 0f64.to_bits());
    assert_eq!(names.len(), 1);
    Ok(())
}

#[test]
fn c62_a_full_pointer_map_is_counted_and_the_process_marked() -> Result<()> {
    let world = World::create(1, "[kernel]\npointers = 64\n")?;
    let mut guest =
        guest(&world, "full", &format!("{BEGIN}loop 2000 {{\nalloc a 4KiB\n}}\nprint held\nwait\n"), &[])?;
    guest.tenant.expect("held")?;
    let lost = [("tenant", guest.label.as_str()), ("confidence", "events_lost")];
    let scrape = world.agent.until(|scrape| scrape.sum("cotenant_gpu_memory_confidence", &lost) > 0.0)?;
    // Half of the rows are for others: the quota comes before the end of the map.
    let lost = losses(&scrape).get("quota").copied().unwrap_or(0.0);
    let wanted = [("tenant", guest.label.as_str())];
    let booked = scrape.sum("cotenant_gpu_memory_live_bytes", &wanted) / 4096.0;
    assert_eq!((lost + booked).to_bits(), 2000f64.to_bits(), "every allocation is booked or counted as lost");
    guest.tenant.kill()
}

#[test]
fn c76_a_stalled_reader_loses_events_and_no_bytes() -> Result<()> {
    // Two events a child, 48 bytes each in a ring of 256 KiB.
    const CHILDREN: u32 = 4000;
    let world = World::create(1, "")?;
    let script = format!(
        "{BEGIN}alloc a 4MiB\nprint held\nwait\nloop {CHILDREN} {{\nfork {{\ninit\nexpect 3\n}}\nalloc b 2MiB\nfree \
         b\n}}\nprint done\nwait\n"
    );
    let mut guest = guest(&world, "stall", &script, &[])?;
    guest.tenant.expect("held")?;
    let wanted = [("tenant", guest.label.as_str())];
    world.agent.until(|scrape| scrape.sum("cotenant_gpu_memory_live_bytes", &wanted) > 0.0)?;
    world.agent.pause();
    guest.tenant.go()?;
    guest.tenant.expect("done")?;
    world.agent.resume();
    let failed = [("tenant", guest.label.as_str()), ("error_type", "CUDA_ERROR_NOT_INITIALIZED")];
    let scrape = world.agent.until(|scrape| {
        scrape.sum("cotenant_gpu_memory_failures_total", &failed).to_bits() == f64::from(CHILDREN).to_bits()
    })?;
    let lost = losses(&scrape);
    assert_eq!(lost.keys().map(String::as_str).collect::<Vec<_>>(), ["ring_full"], "{lost:?}");
    let explicit = [("tenant", guest.label.as_str()), ("operation", "cuMemFree")];
    let count = scrape.sum("cotenant_gpu_memory_operations_total", &explicit);
    assert_eq!(count.to_bits(), f64::from(CHILDREN).to_bits());
    let live = scrape.sum("cotenant_gpu_memory_live_bytes", &wanted);
    assert_eq!(live.to_bits(), f64::from(4 << 20).to_bits());
    guest.tenant.kill()
}

#[test]
fn the_agent_stops_within_five_seconds_and_leaves_nothing_attached() -> Result<()> {
    let mut world = World::create(1, "")?;
    let pairs = "loop 2000 {\nalloc a 2MiB\nfree a\n}\nprint done\nwait\n";
    let mut guest = guest(&world, "loop", &format!("{BEGIN}print held\nwait\n{pairs}{pairs}"), &[])?;
    guest.tenant.expect("held")?;
    let mut timed = || -> Result<Duration> {
        let begun = Instant::now();
        guest.tenant.go()?;
        guest.tenant.expect("done")?;
        Ok(begun.elapsed())
    };
    let watched = timed()?;
    let took = world.agent.stop()?;
    let alone = timed()?;
    println!("stop took {took:?}; 2000 pairs: {watched:?} with the agent, {alone:?} after it");
    assert!(took < Duration::from_secs(5), "stopping took {took:?}");
    // A probe that stayed would trap into the kernel four times a pair.
    assert!(alone.mul_f64(1.5) < watched, "probes are still there: {watched:?}, then {alone:?}");
    guest.tenant.kill()
}
