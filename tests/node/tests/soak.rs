//! Owns the claim about short lives: processes that come, allocate and go, thousands of them, each under its tenant's name.
//! Refuses a sample: the sums are compared with the driver's own record of every process, to the byte and to the call.
//!
//! `make soak` is 100,000 in ten minutes; `make test` takes fewer. `COTENANT_SOAK_PROCESSES`, `COTENANT_SOAK_SECONDS`:
//! how many, in how long; `COTENANT_SOAK_LIMIT`: seconds after which a host that cannot keep up has done enough, whatever is
//! left; `COTENANT_SOAK_RESULT`: a file for what was measured.

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, Tenant, World, losses, scrape::Scrape, slowness};
use cotenant_sim_state::truth;

const ALLOCATED: &str = "cotenant_gpu_memory_allocated_bytes_total";
const OPERATIONS: &str = "cotenant_gpu_memory_operations_total";
const MIB: u64 = 1 << 20;
/// More than any of these processes leaves.
const RECORDS: u64 = 64;
/// What the agent may have grown by from a half of the run to its end; and from a tenth, when its memory of the dead
/// (16,384 of them) fills up meanwhile.
const FLAT: f64 = 1.05;
const FILLING: f64 = 1.5;
/// Beside the proportion, for a run that is over before anything has settled.
const SETTLING: f64 = 12.0;

/// A tenant whose processes all allocate one piece of a size that only they allocate: the driver's record of a process says
/// whose it was, whatever number it had.
struct Crowd {
    label: &'static str,
    cgroup: &'static str,
    bytes: u64,
}

const ID: &str = "50a150a150a150a150a150a150a150a150a150a150a150a150a150a150a150a1";
const CROWDS: [Crowd; 4] = [
    Crowd { label: "systemd:soak.service", cgroup: "system.slice/soak.service", bytes: 2 * MIB },
    Crowd { label: "docker:50a150a150a1", cgroup: "docker/ID", bytes: 3 * MIB },
    Crowd { label: "slurm:4250", cgroup: "slurm/uid_0/job_4250/step_0", bytes: 5 * MIB },
    Crowd {
        label: "pod:6a1b2c3d-50a1-4444-8888-123456789abc",
        cgroup: "kubepods/besteffort/pod6a1b2c3d-50a1-4444-8888-123456789abc/ID",
        bytes: 7 * MIB,
    },
];

fn wanted(variable: &str, otherwise: u64) -> Result<u64> {
    std::env::var(variable).map_or(Ok(otherwise), |text| text.parse().context(variable.to_owned()))
}

/// By the driver's record: processes, and what they allocated, by the size of their pieces.
#[derive(Default)]
struct Harvest(BTreeMap<u64, (u64, u64)>);

impl Harvest {
    /// Takes the records of the dead, so that a number may come again.
    fn reap(&mut self, node: &Path) -> Result<()> {
        let (standing, cut) = (node.join("truth"), node.join("harvest/truth"));
        fs::create_dir_all(&cut)?;
        for entry in fs::read_dir(standing)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let number = name
                .rsplit_once('-')
                .map_or("", |(head, _)| head)
                .trim_start_matches(|c: char| !c.is_ascii_digit());
            if !number.is_empty() && !Path::new("/proc").join(number).exists() {
                let to = cut.join(name);
                fs::rename(&path, &to)?;
                // It was mapped for thousands of records; these lives are short, and reading is work.
                let file = fs::OpenOptions::new().write(true).open(&to)?;
                file.set_len(file.metadata()?.len().min(RECORDS * size_of::<truth::Record>() as u64))?;
            }
        }
        for process in truth::read(&node.join("harvest"))? {
            ensure!(process.records < RECORDS, "{} made {} calls", process.pid, process.records);
            let bytes: u64 = process.balances.values().map(|balance| balance.allocated).sum();
            let (processes, sum) = self.0.entry(bytes).or_default();
            (*processes, *sum) = (*processes + 1, *sum + bytes);
        }
        Ok(fs::remove_dir_all(&cut)?)
    }

    fn processes(&self) -> u64 {
        self.0.values().map(|(processes, _)| processes).sum()
    }
}

/// Resident MiB, and seconds on a processor, of the agent.
fn cost(pid: u32) -> Result<(f64, f64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("it has memory")?;
    let kibibytes: f64 = line.trim().trim_end_matches(" kB").parse()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(") ").context("a stat line")?.1.split(' ');
    let ticks: f64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    Ok((kibibytes / 1024.0, ticks / 100.0))
}

/// Whatever the agent has that differs from the driver's record. Series that exist and belong to nobody here count too.
fn differences(scrape: &Scrape, harvest: &Harvest) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |what: String, published: f64, truth: u64| {
        if published.to_bits() != (truth as f64).to_bits() {
            found.push(format!("{what}: published {published}, true {truth}"));
        }
    };
    let (mut bytes, mut calls) = (0, 0);
    for Crowd { label, bytes: piece, .. } in CROWDS {
        let (processes, sum) = harvest.0.get(&piece).copied().unwrap_or_default();
        let of = [("tenant", label)];
        check(format!("bytes of {label}"), scrape.sum(ALLOCATED, &of), sum);
        check(format!("freed by {label}"), scrape.sum("cotenant_gpu_memory_freed_bytes_total", &of), sum);
        check(format!("live of {label}"), scrape.sum("cotenant_gpu_memory_live_bytes", &of), 0);
        for operation in ["cuInit", "cuMemAlloc"] {
            let of = [("tenant", label), ("operation", operation)];
            check(format!("{operation} of {label}"), scrape.sum(OPERATIONS, &of), processes);
        }
        (bytes, calls) = (bytes + sum, calls + processes);
    }
    check("bytes of everybody".to_owned(), scrape.sum(ALLOCATED, &[]), bytes);
    check("cuInit of everybody".to_owned(), scrape.sum(OPERATIONS, &[("operation", "cuInit")]), calls);
    found
}

struct Run(Vec<(Tenant, Cgroup)>);

/// Each crowd has one process that never touches the driver and starts the others, `batch` at a time.
fn gather(world: &World, batch: u64) -> Result<Run> {
    let mut crowds = Vec::new();
    for (index, crowd) in CROWDS.iter().enumerate() {
        let short = world.node.directory.join(format!("short{index}.script"));
        fs::write(&short, format!("init\nuuid 0\nretain 0\nalloc a {}\nexit 0\n", crowd.bytes))?;
        let script = format!(
            "nodriver\nprint ready\nloop 1000000 {{\nwait\nloop {batch} {{\nfork {{\nexec {}\n}}\n}}\nprint batch\n}}\n",
            short.display()
        );
        let cgroup = Cgroup::create(&crowd.cgroup.replace("ID", ID))?;
        // Whatever ends the test ends it: nobody would count what it goes on to start.
        let bound = "setpriv --pdeathsig KILL";
        let mut tenant = world.node.tenant_under(bound, &format!("crowd{index}"), &cgroup, &script, &[])?;
        tenant.expect("ready")?;
        crowds.push((tenant, cgroup));
    }
    Ok(Run(crowds))
}

impl Run {
    fn ask(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|(tenant, _)| tenant.go())
    }

    fn answered(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|(tenant, _)| tenant.expect("batch"))
    }
}

#[test]
fn short_lives_keep_their_names_and_cost_no_memory() -> Result<()> {
    let (processes, seconds) =
        (wanted("COTENANT_SOAK_PROCESSES", 4000)?, wanted("COTENANT_SOAK_SECONDS", 30)?.max(1));
    let crowds = CROWDS.len() as u64;
    // Up to one batch a second, and not more than there are processes.
    let batches = seconds.min(processes.div_ceil(crowds)).max(10);
    let batch = processes.div_ceil(crowds * batches);
    let world = World::create(1, "")?;
    let mut run = gather(&world, batch)?;
    let (mut harvest, mut costs) = (Harvest::default(), Vec::new());
    let began = Instant::now();
    let before = cost(world.agent.pid())?;
    let pace = Duration::from_secs(seconds).div_f64(batches as f64);
    let limit = Duration::from_secs(wanted("COTENANT_SOAK_LIMIT", seconds * 10)?);
    let mut done = 0;
    for at in 1..=batches {
        if began.elapsed() > limit {
            break;
        }
        done = at;
        run.ask()?;
        run.answered().with_context(|| format!("batch {at}"))?;
        harvest.reap(&world.node.directory)?;
        costs.push(cost(world.agent.pid())?.0);
        let due = pace.mul_f64(at as f64);
        sleep(due.saturating_sub(began.elapsed()));
    }
    let took = began.elapsed();
    let after = cost(world.agent.pid())?;
    harvest.reap(&world.node.directory)?;
    let (all, asked) = (done * batch * crowds, batches * batch * crowds);
    ensure!(harvest.processes() == all, "{} of {all} processes left a record", harvest.processes());
    let mut found = Vec::new();
    for _ in 0..600 * slowness() {
        found = differences(&world.agent.scrape()?, &harvest);
        if found.is_empty() {
            break;
        }
        sleep(Duration::from_millis(100));
    }
    let scrape = world.agent.scrape()?;
    let at = |share: usize| costs[(costs.len() * share / 100).min(costs.len() - 1)];
    let mut told = String::new();
    let _ = writeln!(
        told,
        "{all} of {asked} processes of {crowds} tenants in {:.0} s ({:.0} a second, {:.0} asked for)",
        took.as_secs_f64(),
        all as f64 / took.as_secs_f64(),
        asked as f64 / seconds as f64
    );
    let _ = writeln!(
        told,
        "resident memory of the agent, MiB: {:.1} before, {:.1} at 10 %, {:.1} at 50 %, {:.1} at 100 %, {:.1} at most",
        before.0,
        at(10),
        at(50),
        at(100),
        costs.iter().copied().fold(0.0, f64::max)
    );
    let _ = writeln!(told, "CPU of the agent: {:.1} s", after.1 - before.1);
    let _ = writeln!(told, "losses: {:?}", losses(&scrape));
    for Crowd { label, bytes, .. } in CROWDS {
        let (processes, sum) = harvest.0.get(&bytes).copied().unwrap_or_default();
        let published = scrape.sum(ALLOCATED, &[("tenant", label)]);
        let _ = writeln!(
            told,
            "{label}: {processes} processes, {sum} bytes by the driver, {published} published"
        );
    }
    println!("{told}");
    if let Some(file) = std::env::var_os("COTENANT_SOAK_RESULT") {
        fs::write(file, format!("{told}differences: {found:?}\n"))?;
    }
    ensure!(found.is_empty(), "{found:#?}\n{told}");
    ensure!(losses(&scrape).is_empty(), "{told}");
    ensure!(at(100) < at(50) * FLAT + SETTLING && at(100) < at(10) * FILLING + SETTLING, "it grows: {told}");
    Ok(())
}
