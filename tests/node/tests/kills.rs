//! Owns the claims about kernel OOM kills: whose they were, who asked, what the dead held; and what is none.
//! Refuses tolerance: 100 of 100, and none elsewhere. Truth is exit statuses, the cgroups' counters, the driver's record.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    os::unix::process::ExitStatusExt,
    process::{Child, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_model::GpuId;
use cotenant_node::{Cgroup, Tenant, World, scrape::Scrape};
use cotenant_sim_state::truth;
use serde_json::Value;

const KILLS: &str = "cotenant_oom_kills_total";
const BEGIN: &str = "init\nuuid 0\nretain 0\n";
const MIB: u64 = 1 << 20;
/// Room for a tenant with its driver and not much more.
const LIMIT: u64 = 48 * MIB;
const SIGKILL: i32 = 9;

/// A tenant's place, and what is known of its deaths.
struct Room {
    cgroup: Cgroup,
    label: String,
    killed: u64,
}

impl Room {
    fn unit(name: &str, limit: Option<u64>) -> Result<Self> {
        let unit = format!("kill-{}-{name}.service", std::process::id());
        let cgroup = Cgroup::with_memory(&format!("system.slice/{unit}"), limit)?;
        Ok(Self { cgroup, label: format!("systemd:{unit}"), killed: 0 })
    }

    fn start(&self, world: &World, name: &str, script: &str) -> Result<Tenant> {
        world.node.tenant(name, &self.cgroup, script, &[])
    }

    /// A shell in this place; it prints the exit statuses of what it ran.
    fn shell(&self, script: &str) -> Result<Child> {
        let mut command = self.cgroup.command("");
        command.args(["/bin/sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn().context("cannot start a shell")
    }

    /// Runs a script to its death for memory. Gives its PID and how long it lived.
    fn die(&mut self, world: &World, name: &str, script: &str) -> Result<(u32, Duration)> {
        let begun = Instant::now();
        let mut tenant = self.start(world, name, script)?;
        self.died(&mut tenant)?;
        Ok((tenant.pid(), begun.elapsed()))
    }

    fn died(&mut self, tenant: &mut Tenant) -> Result<()> {
        let status = tenant.ending()?;
        ensure!(status.signal() == Some(SIGKILL), "{} ended with {status}", tenant.name);
        self.killed += 1;
        Ok(())
    }

    /// What the shell said was killed.
    fn shell_died(&mut self, mut shell: Child, wanted: u64) -> Result<()> {
        let mut said = String::new();
        shell.stdout.take().context("a pipe was asked for")?.read_to_string(&mut said)?;
        shell.wait()?;
        let killed = said.lines().filter(|line| *line == "137").count() as u64;
        ensure!(killed == wanted, "of {wanted} runs {killed} were killed: {said:?}");
        self.killed += killed;
        Ok(())
    }
}

fn kills_of(scrape: &Scrape, label: &str) -> f64 {
    scrape.sum(KILLS, &[("tenant", label)])
}

/// Waits until the agent has counted `wanted` kills, and two ticks and a settling longer for what it should not count.
fn settled(world: &World, wanted: u64) -> Result<Scrape> {
    let reached = |scrape: &Scrape| scrape.sum(KILLS, &[]) >= wanted as f64;
    if let Err(error) = world.agent.until(reached) {
        let kills = world.agent.json("/api/v1/kills")?;
        return Err(error.context(format!("{wanted} kills wanted; listed: {kills:#}")));
    }
    sleep(Duration::from_secs(3));
    world.agent.scrape()
}

fn listed(world: &World) -> Result<Vec<Value>> {
    let answer = world.agent.json("/api/v1/kills")?;
    answer["kills"].as_array().cloned().context("a list of kills")
}

fn of_pid(kills: &[Value], pid: u32) -> Result<&Value> {
    let mut found = kills.iter().filter(|kill| kill["pid"].as_u64() == Some(pid.into()));
    let first = found.next().with_context(|| format!("no kill of {pid} is listed"))?;
    ensure!(found.next().is_none(), "the kill of {pid} is listed twice");
    Ok(first)
}

/// The agent's word on what a victim held against the driver's record.
fn holds_as_recorded(world: &World, kill: &Value, pid: u32) -> Result<()> {
    let record = truth::read(&world.node.directory)?;
    let record = record.iter().find(|process| process.pid == pid).context("the driver recorded it")?;
    let (mut live, mut pinned) = (BTreeMap::new(), 0);
    for ((gpu, kind), balance) in record.balances.iter().filter(|(_, balance)| balance.live > 0) {
        match gpu {
            Some(gpu) => {
                let gpu = GpuId::from_uuid(world.node.state.uuid((*gpu).into())).as_str().to_owned();
                live.insert((gpu, kind.as_str().to_owned()), balance.live);
            }
            None => pinned += balance.live,
        }
    }
    let held = &kill["held"];
    let told: BTreeMap<(String, String), u64> = held["live"]
        .as_array()
        .with_context(|| format!("what it held is told: {kill}"))?
        .iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            ((text("gpu"), text("memory_kind")), row["bytes"].as_u64().unwrap_or(0))
        })
        .collect();
    ensure!(told == live, "{pid} held {live:?} by the driver, {told:?} by the agent");
    ensure!(held["host_pinned"].as_u64() == Some(pinned), "{pid} had pinned {pinned}: {kill}");
    ensure!(held["on_unknown_gpu"].as_u64() == Some(0), "{kill}");
    Ok(())
}

fn neighbours(kill: &Value) -> BTreeSet<String> {
    let rows = kill["held"]["neighbours"].as_array().cloned().unwrap_or_default();
    rows.iter().filter_map(|row| row["tenant"].as_str().map(str::to_owned)).collect()
}

#[test]
#[allow(clippy::too_many_lines, reason = "one list of ways to die")]
fn c99_c100_a_hundred_kills_are_on_the_right_tenants() -> Result<()> {
    let world = World::create(2, "")?;
    let mut rooms = Vec::new();

    // One that is only there, on both GPUs.
    let quiet = Room::unit("quiet", Some(4 * LIMIT))?;
    let mut witness = quiet.start(
        &world,
        "quiet",
        &format!("{BEGIN}retain 1\nalloc a 8MiB\nretain 0\nalloc b 8MiB\nprint held\nwait\n"),
    )?;
    witness.expect("held")?;

    // 12: three processes a tenant, each with GPU memory, while the others live.
    let mut gpu = Vec::new();
    for index in 0..4 {
        let room = Room::unit(&format!("gpu{index}"), Some(3 * LIMIT))?;
        let ordinal = index % 2;
        let mut processes = Vec::new();
        for process in 0..3 {
            let script = format!(
                "init\nuuid {ordinal}\nretain {ordinal}\nalloc a {}MiB\nalloc p 3MiB cuMemAllocAsync\nalloc h 2MiB \
                 cuMemHostAlloc\nregister r 64KiB\nprint held\nwait\noom\n",
                10 * (index + 1) + process
            );
            let mut tenant = room.start(&world, &format!("gpu{index}-{process}"), &script)?;
            tenant.expect("held")?;
            processes.push(tenant);
        }
        gpu.push((ordinal, room, processes));
    }
    let mut held = Vec::new();
    for round in 0..3 {
        for at in 0..4 {
            let alive: BTreeSet<String> = gpu
                .iter()
                .enumerate()
                .filter(|(other, (ordinal, _, _))| *other != at && *ordinal == gpu[at].0)
                // A tenant is there as long as one of its three is.
                .filter(|(other, _)| round < 2 || *other > at)
                .map(|(_, (_, room, _))| room.label.clone())
                .chain([quiet.label.clone()])
                .collect();
            let (_, room, processes) = &mut gpu[at];
            processes[round].go()?;
            room.died(&mut processes[round])?;
            held.push((processes[round].pid(), alive));
        }
    }
    rooms.extend(gpu.into_iter().map(|(_, room, _)| room));

    // 16: dead at once after a first and only allocation.
    for index in 0..2 {
        let mut room = Room::unit(&format!("brief{index}"), Some(LIMIT))?;
        for _ in 0..8 {
            let (pid, _) =
                room.die(&world, &format!("brief{index}"), &format!("{BEGIN}alloc a 5MiB\noom\n"))?;
            held.push((pid, BTreeSet::from([quiet.label.clone()])));
        }
        rooms.push(room);
    }

    // 32: no driver at all, dead as soon as there.
    let mut lives = Vec::new();
    for index in 0..4 {
        let mut room = Room::unit(&format!("never{index}"), Some(8 * MIB))?;
        for _ in 0..8 {
            lives.push(room.die(&world, &format!("never{index}"), "nodriver\noom\n")?.1);
        }
        rooms.push(room);
    }

    // 20: restarts as fast as a shell can; nobody waits for the agent to look.
    for (name, runs) in [("tail", 5), ("loop", 15)] {
        let mut room = Room::unit(name, Some(8 * MIB))?;
        let shell = room.shell(&format!("for i in $(seq {runs}); do tail /dev/zero; echo $?; done"))?;
        room.shell_died(shell, runs)?;
        rooms.push(room);
    }

    // 10: the memory runs out in threads that are not the first.
    for index in 0..2 {
        let mut room = Room::unit(&format!("threads{index}"), Some(LIMIT))?;
        for _ in 0..5 {
            let script = format!("{BEGIN}alloc a 5MiB\nthreads 3 {{\noom\n}}\n");
            let (pid, _) = room.die(&world, &format!("threads{index}"), &script)?;
            held.push((pid, BTreeSet::from([quiet.label.clone()])));
        }
        rooms.push(room);
    }

    // 5: the first thread is gone, so the kernel marks another one.
    let mut room = Room::unit("leader", Some(LIMIT))?;
    for _ in 0..5 {
        let script = format!("{BEGIN}alloc a 5MiB\nbackground {{\nsleep 20\noom\n}}\nleader_exit\n");
        let (pid, _) = room.die(&world, "leader", &script)?;
        held.push((pid, BTreeSet::from([quiet.label.clone()])));
    }
    rooms.push(room);

    // 5: a container of a pod that nobody can name.
    let uid = format!("6a1b2c3d-1111-4222-8333-{:012}", std::process::id());
    let pod = format!("kubepods.slice/kubepods-pod{}.slice", uid.replace('-', "_"));
    let outer = Cgroup::with_memory(&pod, Some(4 * LIMIT))?;
    let container = format!("{pod}/cri-containerd-{:064x}.scope", std::process::id());
    let cgroup = Cgroup::with_memory(&container, Some(LIMIT))?;
    let mut room = Room { cgroup, label: format!("pod:{uid}"), killed: 0 };
    for _ in 0..5 {
        room.die(&world, "pod", "nodriver\noom\n")?;
    }
    rooms.push(room);

    let total: u64 = rooms.iter().map(|room| room.killed).sum();
    assert_eq!(total, 100, "the plan");
    let scrape = settled(&world, total)?;
    let mut wrong = Vec::new();
    for room in &rooms {
        assert_eq!(
            room.cgroup.kills()?,
            room.killed,
            "{}: the kernel's count and the exit statuses",
            room.label
        );
        let counted = kills_of(&scrape, &room.label);
        if counted.to_bits() != (room.killed as f64).to_bits() {
            wrong.push(format!("{}: {counted} counted, {} true", room.label, room.killed));
        }
    }
    let rows: Vec<String> = scrape
        .of(KILLS)
        .map(|row| format!("{} {} {}", row.label("tenant"), row.label("scope"), row.value))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}\nof {rows:#?}");
    assert_eq!(scrape.sum(KILLS, &[]).to_bits(), 100f64.to_bits(), "none elsewhere: {rows:#?}");
    // The kernel leaves summaries out in a storm, and they alone say more than that a cgroup was full.
    let scopes: BTreeSet<&str> = scrape.of(KILLS).map(|row| row.label("scope")).collect();
    assert!(scopes.iter().all(|scope| ["memcg", "unknown"].contains(scope)), "{scopes:?}");
    assert_eq!(kills_of(&scrape, &quiet.label).to_bits(), 0f64.to_bits());

    let kills = listed(&world)?;
    assert_eq!(kills.len(), 100);
    for (pid, others) in &held {
        let kill = of_pid(&kills, *pid)?;
        holds_as_recorded(&world, kill, *pid)?;
        assert_eq!(neighbours(kill), *others, "neighbours of {kill}");
    }
    let brief = lives.iter().filter(|life| **life < Duration::from_millis(100)).count();
    println!("{} of {} without the driver were dead within 100 ms of their start", brief, lives.len());
    println!("{rows:#?}");
    assert!(brief >= 10, "too few short lives to say anything: {lives:?}");
    // What lies in it goes first.
    drop(rooms);
    drop(outer);
    witness.kill()
}

#[test]
fn c97_the_victim_is_not_the_one_that_asked() -> Result<()> {
    let world = World::create(1, "")?;
    let own = std::process::id();
    let slice = format!("system.slice/system-pair{own}.slice");
    let parent = Cgroup::with_memory(&slice, Some(96 * MIB))?;
    let place = |name: &str| -> Result<Room> {
        let unit = format!("kill-{own}-{name}.service");
        let cgroup = Cgroup::with_memory(&format!("{slice}/{unit}"), None)?;
        Ok(Room { cgroup, label: format!("systemd:{unit}"), killed: 0 })
    };
    let (mut asks, mut dies) = (place("asks")?, place("dies")?);
    let mut asking = asks.start(
        &world,
        "asks",
        &format!("{BEGIN}alloc a 4MiB\nprint held\nwait\neat 60MiB\nprint fed\nwait\n"),
    )?;
    asking.expect("held")?;
    let mut dying = world.node.tenant_under(
        "choom -n 1000 --",
        "dies",
        &dies.cgroup,
        &format!("{BEGIN}alloc a 6MiB\nalloc h 1MiB cuMemHostAlloc\neat 40MiB\nprint held\nwait\n"),
        &[],
    )?;
    dying.expect("held")?;
    asking.go()?;
    asking.expect("fed").context("the one that asked lives")?;
    dies.died(&mut dying)?;
    let scrape = settled(&world, 1)?;
    assert_eq!(kills_of(&scrape, &dies.label).to_bits(), 1f64.to_bits());
    assert_eq!(scrape.sum(KILLS, &[]).to_bits(), 1f64.to_bits());
    assert_eq!((asks.cgroup.kills()?, dies.cgroup.kills()?), (0, 1));
    let kills = listed(&world)?;
    let kill = of_pid(&kills, dying.pid())?;
    assert_eq!(kill["tenant"], dies.label.as_str());
    assert_eq!(kill["trigger"]["tenant"], asks.label.as_str(), "{kill}");
    assert_eq!(kill["trigger"]["pid"].as_u64(), Some(asking.pid().into()));
    assert_eq!(kill["limit_owner"], format!("/{slice}"), "{kill}");
    assert_eq!(kill["scope"], "memcg");
    holds_as_recorded(&world, kill, dying.pid())?;
    assert_eq!(neighbours(kill), BTreeSet::from([asks.label.clone()]));
    let incidents = world.agent.json("/api/v1/incidents")?;
    let of_kind: Vec<&Value> = incidents["incidents"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|one| one["kind"] == "oom_kill")
        .collect();
    assert_eq!(of_kind.len(), 1, "{incidents:#}");
    assert_eq!(of_kind[0]["victims"][0]["tenant"]["name"], dies.label.as_str());
    asks.killed = 0;
    asking.kill()?;
    drop((asks, dies));
    drop(parent);
    Ok(())
}

#[test]
fn c101_a_group_kill_is_one_incident_with_every_victim() -> Result<()> {
    let mut room = Room::unit("group", Some(2 * LIMIT))?;
    if !room.cgroup.kill_as_group()? {
        println!("skipped: the memory controller is in cgroup version 1, which has no memory.oom.group");
        return Ok(());
    }
    let world = World::create(1, "")?;
    let hold = format!("{BEGIN}alloc a 4MiB\nprint held\nwait\n");
    let mut idle = Vec::new();
    for index in 0..3 {
        let mut tenant = room.start(&world, &format!("idle{index}"), &hold)?;
        tenant.expect("held")?;
        idle.push(tenant);
    }
    room.die(&world, "group", &format!("{BEGIN}alloc a 4MiB\noom\n"))?;
    for tenant in &mut idle {
        room.died(tenant)?;
    }
    let scrape = settled(&world, 4)?;
    assert_eq!(kills_of(&scrape, &room.label).to_bits(), 4f64.to_bits());
    let incidents = world.agent.json("/api/v1/incidents")?;
    let of_kind: Vec<&Value> = incidents["incidents"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|one| one["kind"] == "oom_kill")
        .collect();
    assert_eq!(of_kind.len(), 1, "{incidents:#}");
    assert_eq!(of_kind[0]["victims"][0]["killed_processes"], 4);
    Ok(())
}

#[test]
fn c103_only_the_kernels_kills_count_and_a_restart_loses_none() -> Result<()> {
    let world = World::create(1, "")?;
    let hold = format!("{BEGIN}alloc a 4MiB\nprint held\nwait\n");
    let by_hand = Room::unit("by-hand", Some(LIMIT))?;
    for index in 0..3 {
        let mut tenant = by_hand.start(&world, &format!("hand{index}"), &hold)?;
        tenant.expect("held")?;
        tenant.kill()?;
    }
    let mut own = by_hand.start(&world, "itself", &format!("{BEGIN}alloc a 4MiB\ndie\n"))?;
    assert_eq!(own.ending()?.signal(), Some(SIGKILL));
    let mut code = by_hand.start(&world, "code", "nodriver\nexit 137\n")?;
    assert_eq!(code.ending()?.code(), Some(137));
    assert_eq!(by_hand.cgroup.kills()?, 0);

    // A child dies, its parent lives.
    let mut family = Room::unit("family", Some(LIMIT))?;
    let shell = family.shell("tail /dev/zero; echo $?; sleep 0.3")?;
    family.shell_died(shell, 1)?;

    // Twice, in cgroups of the same name: the kernel's counter begins anew, the agent's goes on.
    let mut label = String::new();
    for _ in 0..2 {
        let mut room = Room::unit("again", Some(LIMIT))?;
        room.die(&world, "again", &format!("{BEGIN}alloc a 4MiB\nsleep 600\noom\n"))?;
        assert_eq!(room.cgroup.kills()?, 1);
        label = room.label;
    }
    let scrape = settled(&world, 3)?;
    assert_eq!(kills_of(&scrape, &by_hand.label).to_bits(), 0f64.to_bits());
    assert_eq!(kills_of(&scrape, &family.label).to_bits(), 1f64.to_bits());
    assert_eq!(kills_of(&scrape, &label).to_bits(), 2f64.to_bits());
    assert_eq!(scrape.sum(KILLS, &[]).to_bits(), 3f64.to_bits());
    Ok(())
}

#[test]
fn c99_a_kill_says_what_the_victim_did_last() -> Result<()> {
    let world = World::create(1, "")?;
    let mut room = Room::unit("last", Some(LIMIT))?;
    let script = format!(
        "{BEGIN}loop 20 {{\nalloc x 1MiB\nfree x\n}}\nalloc a 4MiB\ncreate h 6MiB 0\nhandle_release h\nfree_raw 4096\nalloc c \
         400GiB\noom\n"
    );
    let (pid, _) = room.die(&world, "last", &script)?;
    settled(&world, 1)?;
    let kills = listed(&world)?;
    let calls = of_pid(&kills, pid)?["held"]["last_calls"].as_array().context("its last calls")?.clone();
    let told: Vec<_> = calls
        .iter()
        .map(|call| (call["operation"].as_str(), call["bytes"].as_u64(), call["code"].as_u64()))
        .collect();
    let expected = [
        ("cuMemFree", Some(MIB), 0),
        ("cuMemAlloc", Some(MIB), 0),
        ("cuMemFree", Some(MIB), 0),
        ("cuMemAlloc", Some(4 * MIB), 0),
        ("cuMemCreate", Some(6 * MIB), 0),
        ("cuMemRelease", Some(6 * MIB), 0),
        ("cuMemFree", None, 1),
        ("cuMemAlloc", Some(400 << 30), 2),
    ]
    .map(|(operation, bytes, code)| (Some(operation), bytes, Some(code)));
    assert_eq!(told, expected);
    let before: Vec<f64> = calls.iter().filter_map(|call| call["seconds_before"].as_f64()).collect();
    assert!(before.is_sorted_by(|one, next| one >= next) && before.iter().all(|s| (0.0..60.0).contains(s)));
    let incidents = world.agent.json("/api/v1/incidents")?;
    let evidence = incidents["incidents"].as_array().into_iter().flatten();
    let mut kills = evidence.flat_map(|of| of["evidence"].as_array().into_iter().flatten());
    let told = kills.any(|line| line["last_calls"].as_array().is_some_and(|calls| calls.len() == 8));
    assert!(told, "evidence has it too: {incidents:#}");
    Ok(())
}
