//! Owns the claims about finding libraries: in any container, at any moment, by any agent, each call once.
//! Refuses tolerance, and libraries that are none.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt, symlink},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_node::{
    Agent, Cgroup, SimulatedNode, Tenant, World,
    compare::{TenantTruth, differences},
    losses,
    scrape::Scrape,
};
use cotenant_sim_state::{NodeConfig, truth};
use tempfile::TempDir;

const WORK: &str = "init\nuuid 0\nretain 0\nalloc a 64MiB\nalloc b 2MiB\nfree b\nprint held\nwait\n";
const LOADED: &str = "print loaded\nwait\n";
const OPERATIONS: &str = "cotenant_gpu_memory_operations_total";
const LIVE: &str = "cotenant_gpu_memory_live_bytes";

struct Guest {
    tenant: Tenant,
    label: String,
    _cgroup: Cgroup,
}

impl Guest {
    fn start(node: &SimulatedNode, name: &str, script: &str, environment: &[(&str, &str)]) -> Result<Self> {
        Self::start_under("", node, name, script, environment)
    }

    fn start_under(
        launcher: &str,
        node: &SimulatedNode,
        name: &str,
        script: &str,
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let unit = format!("find-{}-{name}.service", std::process::id());
        let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
        let tenant = node.tenant_under(launcher, name, &cgroup, script, environment)?;
        Ok(Self { tenant, label: format!("systemd:{unit}"), _cgroup: cgroup })
    }

    /// One that has loaded `library` and waits, so that there is time to attach where calls take none.
    fn loaded(node: &SimulatedNode, name: &str, script: &str, library: &Path) -> Result<Self> {
        let library = library.to_str().context("a path of this test")?;
        let script = format!("{LOADED}{script}");
        let mut guest = Self::start(node, name, &script, &[("COTENANT_SIM_LIBCUDA", library)])?;
        guest.tenant.expect("loaded")?;
        Ok(guest)
    }

    fn calls(&self, scrape: &Scrape, operation: &str) -> f64 {
        scrape.sum(OPERATIONS, &[("tenant", &self.label), ("operation", operation)])
    }

    fn confidence(&self, scrape: &Scrape, word: &str) -> bool {
        let labels = [("tenant", self.label.as_str()), ("confidence", word)];
        scrape.get("cotenant_gpu_memory_confidence", &labels) == Some(1.0)
    }
}

/// Holds the agent to the driver's record, once it had time to read.
fn exact(node: &SimulatedNode, agent: &Agent, guest: &Guest) -> Result<()> {
    exact_but(node, agent, guest, "nothing")
}

fn exact_but(node: &SimulatedNode, agent: &Agent, guest: &Guest, except: &str) -> Result<()> {
    let mut truth = TenantTruth::default();
    for process in truth::read(&node.directory)?.iter().filter(|of| of.pid == guest.tenant.pid()) {
        truth.add(&node.state, process);
    }
    ensure!(truth.total_calls() > 0, "{} made no call", guest.label);
    let mut found = Vec::new();
    let settled = within(5, "exact", || {
        found = differences(&agent.scrape()?, &guest.label, &truth);
        found.retain(|difference| !difference.contains(except));
        Ok(found.is_empty().then_some(()))
    });
    settled.with_context(|| format!("{found:#?}; attached in {:?} ms", milliseconds_to_attach(node)))
}

/// Of a call that a library's probes came during, the beginning was not seen: cuInit is the call that leaves time.
const PROBED_MEANWHILE: &str = "calls of cuInit:";

/// A node whose driver takes its time, with nothing on it.
fn timed_node() -> Result<(TempDir, SimulatedNode)> {
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(1, 1.0))?;
    Ok((directory, node))
}

/// Calls and bytes are whole.
fn same(left: f64, right: f64) -> bool {
    (left - right).abs() < 0.5
}

/// Waits until it gives something.
fn within<T>(seconds: u64, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(seconds) {
        if let Some(found) = look()? {
            return Ok(found);
        }
        sleep(Duration::from_millis(20));
    }
    bail!("{what}: not within {seconds} s")
}

/// The row of /status for a file.
fn row(agent: &Agent, library: &Path) -> Result<Option<serde_json::Value>> {
    let inode = fs::metadata(library)?.ino();
    let status = agent.status()?;
    let rows = status["libraries"].as_array().context("libraries are a list")?;
    Ok(rows.iter().find(|of| of["inode"].as_u64() == Some(inode)).cloned())
}

fn log(node: &SimulatedNode) -> String {
    fs::read_to_string(node.directory.join("agent.log")).unwrap_or_default()
}

fn milliseconds_to_attach(node: &SimulatedNode) -> Vec<u64> {
    let plain = log(node).replace("\u{1b}[0m", "").replace("\u{1b}[2m", "").replace("\u{1b}[3m", "");
    let probed = plain.lines().filter(|line| line.contains("library probed"));
    probed.filter_map(|line| line.rsplit_once("milliseconds=")?.1.trim().parse().ok()).collect()
}

#[test]
fn c51_a_library_only_its_container_has_is_probed() -> Result<()> {
    let (_directory, node) = timed_node()?;
    let agent = node.agent("")?;
    let hidden = "/mnt/only-in-the-container/libcuda.so.1";
    let launcher = format!(
        "unshare --mount -- /bin/sh -c 'mount -t tmpfs none /mnt && mkdir /mnt/only-in-the-container && \
         cp \"$COTENANT_SIM_LIBCUDA\" {hidden} && COTENANT_SIM_LIBCUDA={hidden} exec \"$@\"' sh"
    );
    let mut guest = Guest::start_under(&launcher, &node, "container", WORK, &[])?;
    guest.tenant.expect("held")?;
    ensure!(!Path::new(hidden).exists(), "the host must not have it");
    exact_but(&node, &agent, &guest, PROBED_MEANWHILE)
}

#[test]
fn c53_nothing_runs_and_then_something_does() -> Result<()> {
    let (_directory, node) = timed_node()?;
    let agent = node.agent("")?;
    sleep(Duration::from_secs(2));
    ensure!(agent.status()?["libraries"] == serde_json::json!([]));
    ensure!(agent.get("/readyz", "text/plain")?.starts_with("ready"));
    let troubled = log(&node).lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).count();
    ensure!(troubled == 0, "{}", log(&node));
    let mut guest = Guest::start(&node, "first", WORK, &[])?;
    guest.tenant.expect("held")?;
    exact_but(&node, &agent, &guest, PROBED_MEANWHILE)
}

#[test]
fn c55_c56_however_a_call_is_found_it_counts_once() -> Result<()> {
    let world = World::create(1, "")?;
    let plain =
        "alloc a 8MiB\nalloc p 4MiB cuMemAllocAsync\nfree p cuMemFreeAsync\nalloc o 1MiB cuMemAlloc\n";
    let streams = "alloc p 4MiB cuMemAllocAsync_ptsz\nalloc q 2MiB cuMemAllocFromPoolAsync_ptsz\n\
                   free p cuMemFreeAsync_ptsz\n";
    let by_lookup: &[_] = &[("COTENANT_SIM_RESOLVE", "procaddress")];
    for (index, (script, environment)) in
        [(plain, &[][..]), (plain, by_lookup), (streams, &[]), (streams, by_lookup)].into_iter().enumerate()
    {
        let script = format!("init\nuuid 0\nretain 0\n{script}print held\nwait\n");
        let mut guest = Guest::start(&world.node, &format!("lookup{index}"), &script, environment)?;
        guest.tenant.expect("held")?;
        exact(&world.node, &world.agent, &guest).with_context(|| format!("{environment:?}: {script}"))?;
    }
    ensure!(losses(&world.agent.scrape()?).is_empty());
    Ok(())
}

#[test]
fn c64_c71_two_libraries_are_attached_once_each_and_let_go() -> Result<()> {
    let world = World::create(1, "")?;
    let usual = world.node.directory.join("lib/libcuda.so.1");
    let compat = world.node.library("compat")?;
    let mut guests = vec![
        Guest::loaded(&world.node, "usual", WORK, &usual)?,
        Guest::loaded(&world.node, "compat0", WORK, &compat)?,
        Guest::loaded(&world.node, "compat1", WORK, &compat)?,
    ];
    world.agent.until_probed(&compat)?;
    for guest in &mut guests {
        guest.tenant.go()?;
        guest.tenant.expect("held")?;
        exact(&world.node, &world.agent, guest)?;
    }
    ensure!(
        world.agent.status()?["libraries"].as_array().map(Vec::len) == Some(2),
        "a row a file, not a process"
    );
    ensure!(row(&world.agent, &compat)?.context("compat is listed")?["processes"] == 2);
    guests.drain(1..).for_each(drop);
    within(15, "no mapper is left", || {
        Ok((row(&world.agent, &compat)?.context("it lingers")?["processes"] == 0).then_some(()))
    })
}

/// An overlay over `lower`; goes before its directory does.
struct Overlay(PathBuf);

impl Overlay {
    /// `None` where this host does not let anyone mount one.
    fn mount(lower: &Path, at: &Path) -> Result<Option<Self>> {
        for part in ["upper", "work", "merged"] {
            fs::create_dir_all(at.join(part))?;
        }
        let part = |name: &str| at.join(name).display().to_string();
        let options =
            format!("lowerdir={},upperdir={},workdir={}", lower.display(), part("upper"), part("work"));
        let output = Command::new("mount")
            .args(["-t", "overlay", "overlay", "-o", &options, &part("merged")])
            .stderr(Stdio::piped())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return Ok(Some(Self(at.join("merged"))));
        }
        if said.contains("permission denied") || said.contains("Operation not permitted") {
            return Ok(None);
        }
        bail!("cannot mount an overlay: {said}")
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn two_overlays_of_one_library_count_each_call_once() -> Result<()> {
    let world = World::create(1, "")?;
    let lower = world.node.library("image")?;
    let lower = lower.parent().context("it lies in a directory")?;
    let mut overlays = Vec::new();
    for name in ["one", "two"] {
        let Some(overlay) = Overlay::mount(lower, &world.node.directory.join(name))? else {
            println!("NOT TESTED: no overlay can be mounted here (EPERM)");
            return Ok(());
        };
        overlays.push(overlay);
    }
    let twice = format!("{WORK}alloc c 2MiB\nalloc d 4MiB\nfree c\nprint again\nwait\n");
    let mut guests = Vec::new();
    for (name, overlay) in ["overlay0", "overlay1"].into_iter().zip(&overlays) {
        let library = overlay.0.join("libcuda.so.1");
        guests.push(Guest::loaded(&world.node, name, &twice, &library)?);
        world.agent.until_probed(&library)?;
    }
    for line in ["held", "again"] {
        for guest in &mut guests {
            guest.tenant.go()?;
            guest.tenant.expect(line)?;
        }
        for guest in &guests {
            exact(&world.node, &world.agent, guest).with_context(|| line.to_owned())?;
        }
    }
    let scrape = world.agent.scrape()?;
    let notes = scrape.sum("cotenant_agent_notes_total", &[("note", "duplicate_attachment")]);
    println!("duplicate_attachment {notes}, merged: {}", log(&world.node).contains("share their code"));
    Ok(())
}

/// Bytes of a tenant's library that are not those of the file: the probes in it.
fn probed_bytes(pid: u32) -> Result<usize> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let line = maps.lines().find(|line| line.contains(" r-xp ") && line.ends_with("libcuda.so.1"));
    let fields: Vec<&str> = line.context("it maps a libcuda")?.split_whitespace().collect();
    let (start, end) = fields[0].split_once('-').context("a range")?;
    let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
    let length = usize::try_from(end - start)?;
    let (mut memory, mut file) = (vec![0; length], vec![0; length]);
    File::open(format!("/proc/{pid}/mem"))?.read_exact_at(&mut memory, start)?;
    let read = File::open(fields[5])?.read_at(&mut file, u64::from_str_radix(fields[2], 16)?)?;
    Ok(memory[..read].iter().zip(&file).filter(|(left, right)| left != right).count())
}

/// How long it took until nothing was attached any more.
fn until_unprobed(pid: u32) -> Result<Duration> {
    let begun = Instant::now();
    within(60, "the text is the file's again", || Ok((probed_bytes(pid)? == 0).then_some(())))?;
    Ok(begun.elapsed())
}

#[test]
fn c65_agents_come_and_go_while_a_tenant_runs() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(1, 0.0))?;
    let library = directory.path().join("lib/libcuda.so.1");
    let round =
        "init\nuuid 0\nretain 0\nprint loaded\nloop 6 {\nwait\nalloc a 2MiB\nfree a\nprint done\n}\nwait\n";
    let mut guest = Guest::start(&node, "stays", round, &[])?;
    guest.tenant.expect("loaded")?;
    let once = |scrape: &Scrape, guest: &Guest| {
        same(guest.calls(scrape, "cuMemAlloc"), 1.0) && same(guest.calls(scrape, "cuMemFree"), 1.0)
    };
    let mut stops = Vec::new();
    for index in 0..5 {
        let mut agent = node.agent("")?;
        agent.until_probed(&library)?;
        ensure!(probed_bytes(guest.tenant.pid())? > 0, "an attached probe is seen in the text");
        guest.tenant.go()?;
        guest.tenant.expect("done")?;
        agent.until(|scrape| once(scrape, &guest)).with_context(|| format!("agent {index}"))?;
        if index % 2 == 0 {
            agent.kill()?;
            println!("kill -9: unprobed after {:?}", until_unprobed(guest.tenant.pid())?);
        } else {
            let took = agent.stop()?;
            println!("SIGTERM: ended in {took:?}, unprobed {:?} later", until_unprobed(guest.tenant.pid())?);
            stops.push(took);
        }
    }
    let agents = [node.agent("")?, node.agent("")?];
    for agent in &agents {
        agent.until_probed(&library)?;
    }
    guest.tenant.go()?;
    guest.tenant.expect("done")?;
    for agent in &agents {
        agent.until(|scrape| once(scrape, &guest)).context("two at once")?;
    }
    ensure!(stops.iter().all(|took| *took < Duration::from_secs(5)), "SIGTERM took {stops:?}");
    Ok(())
}

/// Maps a file executable, as a library is, until its standard input ends.
struct Mapper(#[allow(dead_code, reason = "held for its pipe")] Child);

impl Mapper {
    fn start(file: &Path) -> Result<Self> {
        let program = "import mmap,sys\nf=open(sys.argv[1],'rb')\n\
                       m=mmap.mmap(f.fileno(),0,flags=mmap.MAP_PRIVATE,prot=mmap.PROT_READ|mmap.PROT_EXEC)\n\
                       sys.stdin.read()";
        let child =
            Command::new("/usr/bin/python3").args(["-c", program]).arg(file).stdin(Stdio::piped()).spawn();
        Ok(Self(child.context("apt-get install python3")?))
    }
}

#[test]
fn c69_what_is_no_driver_is_refused_and_harms_nobody() -> Result<()> {
    let world = World::create(1, "")?;
    let real = fs::read(world.node.directory.join("lib/libcuda.so.1"))?;
    let mut sections = real.clone();
    sections[0x28..0x40].fill(0xff);
    let mut body = real.clone();
    body[0x40..0x4000].fill(0xff);
    let hostile: [(&str, &[u8]); 5] = [
        ("text", b"no ELF at all"),
        ("cut", &real[..4096]),
        ("sections", &sections),
        ("body", &body),
        ("other", &fs::read("/bin/true")?),
    ];
    let mut mappers = Vec::new();
    for (name, bytes) in hostile {
        let file = world.node.directory.join(name).join("libcuda.so.1");
        fs::create_dir_all(file.parent().context("it lies in a directory")?)?;
        fs::write(&file, bytes)?;
        mappers.push((name, Mapper::start(&file)?, file));
    }
    fs::create_dir(world.node.directory.join("linked"))?;
    let linked = world.node.directory.join("linked/libcuda.so.1");
    symlink("/etc/passwd", &linked)?;
    let _linked = Mapper::start(&linked)?;
    for (name, _, file) in &mappers {
        let seen = within(20, name, || row(&world.agent, file))?;
        ensure!(seen["refused"].is_string() && seen["attached"] == 0, "{name}: {seen}");
        println!("{name}: {}", seen["refused"]);
    }
    ensure!(row(&world.agent, Path::new("/etc/passwd"))?.is_none());
    let mut guest = Guest::start(&world.node, "unharmed", WORK, &[])?;
    guest.tenant.expect("held")?;
    exact(&world.node, &world.agent, &guest)
}

#[test]
fn a_tenant_that_was_there_before_is_joined_late() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(1, 0.0))?;
    let script = "init\nuuid 0\nretain 0\nalloc a 64MiB\nalloc k 1GiB\nprint early\nwait\nalloc b 32MiB\nfree a\n\
                  print late\nwait\n";
    let mut guest = Guest::start(&node, "early", script, &[])?;
    guest.tenant.expect("early")?;
    let agent = node.agent("")?;
    agent.until_probed(&directory.path().join("lib/libcuda.so.1"))?;
    guest.tenant.go()?;
    guest.tenant.expect("late")?;
    let residual = |scrape: &Scrape, part: &str| {
        scrape.sum("cotenant_gpu_memory_residual_bytes", &[("tenant", &guest.label), ("part", part)])
    };
    let scrape = agent.until(|scrape| {
        assert!(scrape.of(LIVE).all(|sample| sample.value >= 0.0), "{}", scrape.text);
        guest.calls(scrape, "cuMemFree") > 0.0 && residual(scrape, "baseline") > 0.0
    })?;
    ensure!(guest.confidence(&scrape, "joined_late") && !guest.confidence(&scrape, "complete"));
    ensure!(same(scrape.sum(LIVE, &[("tenant", &guest.label)]), f64::from(32 << 20)));
    ensure!(scrape.sum("cotenant_agent_notes_total", &[("note", "unmatched_free")]) >= 1.0);
    ensure!(same(scrape.sum("cotenant_gpu_memory_freed_bytes_total", &[("tenant", &guest.label)]), 0.0));
    // What is held beyond the ledger: 1 GiB and the context.
    ensure!(residual(&scrape, "baseline") >= f64::from(1 << 30), "{}", residual(&scrape, "baseline"));
    Ok(())
}

#[test]
fn first_contact_sees_the_first_allocation() -> Result<()> {
    let tries = std::env::var("COTENANT_TRIES").map_or(Ok(30), |text| text.parse::<usize>())?;
    let (_directory, node) = timed_node()?;
    let agent = node.agent("")?;
    let (mut unseen, mut incomplete) = (Vec::new(), Vec::new());
    for index in 0..tries {
        let library = node.library(&format!("container{index}"))?;
        sleep(Duration::from_millis(10));
        let library = library.to_str().context("a path of this test")?;
        let script = "init\nretain 0\nalloc a 2MiB\nprint held\nwait\n";
        let environment = [("COTENANT_SIM_LIBCUDA", library)];
        let mut guest = Guest::start(&node, &format!("contact{index}"), script, &environment)?;
        guest.tenant.expect("held")?;
        let counted = |scrape: &Scrape| same(guest.calls(scrape, "cuMemAlloc"), 1.0);
        match within(2, "seen", || Ok(Some(agent.scrape()?).filter(counted))) {
            Ok(scrape) if guest.confidence(&scrape, "complete") => {}
            Ok(_) => incomplete.push(index),
            Err(_) => unseen.push(index),
        }
    }
    let attach = milliseconds_to_attach(&node);
    let (least, most) = (attach.iter().min(), attach.iter().max());
    let counts = (unseen.len(), incomplete.len());
    println!("first contact: of {tries}, (unseen, not complete) {counts:?}; attach {least:?} to {most:?} ms");
    ensure!(unseen.is_empty(), "unseen: {unseen:?}; attach ms: {attach:?}");
    ensure!(incomplete.is_empty(), "not complete: {incomplete:?}; attach ms: {attach:?}");
    Ok(())
}
