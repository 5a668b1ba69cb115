//! Owns the demo: tenants in cgroups of their own on a simulated node, the real agent on it, the truth beside it.
//! Refuses to end with 0 unless every figure is the driver's own, to the byte and to the call.

#[path = "demo/figures.rs"]
mod figures;
#[path = "demo/table.rs"]
mod table;
#[path = "demo/tenants.rs"]
mod tenants;
#[path = "demo/verdict.rs"]
mod verdict;
#[path = "demo/waiting.rs"]
mod waiting;

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::ExitCode,
    sync::atomic::{AtomicBool, Ordering},
    thread::{ScopedJoinHandle, scope, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_model::GpuId;
use cotenant_node::{
    Agent, SimulatedNode,
    compare::TenantTruth,
    scrape::Scrape,
    waits::{SYMBOLS, WaitTruth},
};
use cotenant_sim_state::{NodeConfig, truth};

use crate::{
    table::Table,
    tenants::{Plan, Resident},
    verdict::Verdict,
    waiting::Explained,
};

const GPUS: usize = 2;
/// The tenants stop this long before the end.
const QUIET: Duration = Duration::from_millis(1_500);
/// Contention may make the scripts later than they were meant to be; a slower machine is not a failure.
const LATE: Duration = Duration::from_mins(1);
/// Two ticks of 200 ms and some.
const SETTLE: Duration = Duration::from_millis(500);
/// NVML is asked for at most 1 % of the time: a poll that queued behind a 30 GiB request is followed by a long rest.
const REST: Duration = Duration::from_secs(40);

const INTERRUPTION: &str = "interrupted: everything that was started is ended";
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_signal: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

fn main() -> ExitCode {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, interrupt as extern "C" fn(i32) as libc::sighandler_t) };
    }
    match seconds().and_then(demo) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn seconds() -> Result<Duration> {
    let text = std::env::var("DEMO_SECONDS").unwrap_or_else(|_| "20".to_owned());
    let seconds = text.parse().ok().filter(|seconds| *seconds >= 5);
    Ok(Duration::from_secs(
        seconds.with_context(|| format!("DEMO_SECONDS={text}: a whole number from 5 up is wanted"))?,
    ))
}

/// True: nothing differs.
fn demo(length: Duration) -> Result<bool> {
    let directory = std::path::absolute("target/demo")?;
    let place = directory.join("node");
    if place.exists() {
        fs::remove_dir_all(&place)
            .with_context(|| format!("cannot remove the last demo's {}", place.display()))?;
    }
    fs::create_dir_all(&place)?;
    println!("a simulated node with {GPUS} GPUs (one at a time on a host: another one is waited for)");
    let node = SimulatedNode::create(&place, &NodeConfig::h200(GPUS, 1.0))?;
    alone();
    // Further settings of the agent, for tests in other languages: where it sends OTLP, say.
    let more = match std::env::var("DEMO_SETTINGS") {
        Ok(path) => fs::read_to_string(&path).with_context(|| format!("DEMO_SETTINGS={path}"))?,
        Err(_) => String::new(),
    };
    let mut agent = node.agent(&format!("{SYMBOLS}\n{more}"))?;
    println!(
        "the agent (pid {}) serves http://{}/metrics; its log is {}/agent.log\n",
        agent.pid(),
        agent.address,
        place.display()
    );
    let busy = u64::try_from(length.saturating_sub(QUIET).as_millis())?;
    let mut residents = Vec::new();
    for plan in tenants::plans(busy) {
        residents.push(Resident::start(&node, plan)?);
    }
    watch(&node, &agent, &mut residents, length)?;
    let scrape = last(&agent)?;
    let truths = truths(&node, &residents)?;
    let verdict = Verdict::of(&scrape, &truths);
    let labels =
        residents.iter().map(|resident| (resident.tenant.pid(), resident.plan.label.to_owned())).collect();
    let waiting =
        waiting::report(&scrape, &WaitTruth::read(&node.directory)?.by_tenant(&labels), &incidents(&agent)?);
    write(&directory, &scrape, &truths, &residents, &verdict, &waiting)?;
    drop(residents);
    let stopped = agent.stop()?;
    println!("the agent stopped in {} ms", stopped.as_millis());
    println!("{}/ has metrics.prom, truth.json and report.txt", directory.display());
    Ok(verdict.differences.is_empty())
}

/// Everything that the agent took for an incident, oldest first.
fn incidents(agent: &Agent) -> Result<Vec<Explained>> {
    let answer: serde_json::Value =
        serde_json::from_str(&agent.get("/api/v1/incidents", "application/json")?)?;
    let list = answer["incidents"].as_array().context("a list of incidents")?;
    let explained = |incident: &serde_json::Value| -> Result<Explained> {
        Ok(Explained {
            line: incident["line"].as_str().context("a line")?.to_owned(),
            explanation: serde_json::from_value(incident["explanation"].clone())?,
        })
    };
    list.iter().rev().map(explained).collect()
}

/// A scrape whose every part was read after the tenants were done: NVML's is up to `REST` late.
fn last(agent: &Agent) -> Result<Scrape> {
    println!("\nwaiting for two ticks of the agent, and for NVML's next poll");
    let done = Instant::now();
    loop {
        sleep(SETTLE);
        ensure!(!INTERRUPTED.load(Ordering::Relaxed), INTERRUPTION);
        let scrape = agent.scrape()?;
        // The age is that of the poll's end; it began at most one queue of requests earlier.
        let fresh = figures::nvml_age(&scrape).is_some_and(|age| age + 0.5 < done.elapsed().as_secs_f64());
        if fresh {
            return Ok(scrape);
        }
        ensure!(done.elapsed() < REST, "NVML was not polled within {REST:?} after the tenants were done");
    }
}

/// Waits, not for ever, for what another node left behind: while one agent's probes go, the kernel takes seconds to
/// attach another's, not 30 ms.
fn alone() {
    let begun = Instant::now();
    while begun.elapsed() < LATE && !INTERRUPTED.load(Ordering::Relaxed) && others() {
        sleep(Duration::from_millis(200));
    }
}

/// Whether an agent runs or a process has a libcuda mapped.
fn others() -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return false };
    processes.flatten().map(|entry| entry.path()).any(|process| {
        fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim_end() == "cotenant")
            || fs::read_to_string(process.join("maps")).is_ok_and(|maps| maps.contains("/libcuda.so"))
    })
}

/// Draws until every tenant has said that it is done.
fn watch(node: &SimulatedNode, agent: &Agent, residents: &mut [Resident], length: Duration) -> Result<()> {
    let gpus =
        (0..GPUS).map(|gpu| (GpuId::from_uuid(node.state.uuid(gpu)).as_str().to_owned(), gpu)).collect();
    let mut table = Table::new(gpus);
    let begun = Instant::now();
    let pids: Vec<u32> = residents.iter().map(|resident| resident.tenant.pid()).collect();
    scope(|scope| {
        let held: Vec<ScopedJoinHandle<'_, Result<()>>> =
            residents.iter_mut().map(|resident| scope.spawn(|| resident.tenant.expect("held"))).collect();
        let outcome =
            draw(agent, &mut table, begun, length, || held.iter().all(ScopedJoinHandle::is_finished));
        if outcome.is_err() {
            // A tenant that is not done would be waited for.
            for pid in pids {
                kill(pid);
            }
        }
        let ends =
            held.into_iter().map(|end| end.join().unwrap_or_else(|_| bail!("a tenant's reader panicked")));
        let ends: Result<()> = ends.collect();
        outcome.and(ends)
    })
}

fn draw(
    agent: &Agent,
    table: &mut Table,
    begun: Instant,
    length: Duration,
    held: impl Fn() -> bool,
) -> Result<()> {
    loop {
        let next = Instant::now() + Duration::from_secs(1);
        let title = format!("{} s of {}", begun.elapsed().as_secs(), length.as_secs());
        table.draw(&title, &agent.scrape()?);
        while Instant::now() < next {
            ensure!(!INTERRUPTED.load(Ordering::Relaxed), INTERRUPTION);
            if held() && begun.elapsed() + SETTLE >= length {
                table.draw(
                    &format!("{} s: every tenant is done and holds what it holds", begun.elapsed().as_secs()),
                    &agent.scrape()?,
                );
                return Ok(());
            }
            sleep(Duration::from_millis(20));
        }
        ensure!(begun.elapsed() < length + LATE, "the tenants are not done {LATE:?} after their time");
    }
}

fn kill(pid: u32) {
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(i32::try_from(pid).unwrap_or(0), libc::SIGKILL) };
}

/// The driver's record by the label that the agent should use.
fn truths(node: &SimulatedNode, residents: &[Resident]) -> Result<BTreeMap<String, TenantTruth>> {
    let labels: BTreeMap<u32, &str> =
        residents.iter().map(|resident| (resident.tenant.pid(), resident.plan.label)).collect();
    let mut by_tenant: BTreeMap<String, TenantTruth> = BTreeMap::new();
    for process in truth::read(&node.directory)? {
        let label =
            labels.get(&process.pid).with_context(|| format!("{} is nobody's process", process.pid))?;
        by_tenant.entry((*label).to_owned()).or_default().add(&node.state, &process);
    }
    ensure!(
        by_tenant.len() == residents.len(),
        "{} of {} tenants have a record",
        by_tenant.len(),
        residents.len()
    );
    Ok(by_tenant)
}

fn write(
    directory: &Path,
    scrape: &Scrape,
    truths: &BTreeMap<String, TenantTruth>,
    residents: &[Resident],
    verdict: &Verdict,
    waiting: &str,
) -> Result<()> {
    let story = |plan: &Plan| (plan.label.to_owned(), plan.story.to_owned());
    let stories = residents.iter().map(|resident| story(&resident.plan)).collect();
    let report = format!("{}\n{waiting}", verdict::report(scrape, truths, &stories, verdict));
    fs::write(directory.join("metrics.prom"), &scrape.text)?;
    fs::write(directory.join("truth.json"), format!("{:#}\n", verdict::truth(truths, verdict)))?;
    fs::write(directory.join("report.txt"), &report)?;
    print!("\n{report}");
    Ok(())
}
