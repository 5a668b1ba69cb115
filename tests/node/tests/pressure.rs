//! Owns the claim that a GPU tenant's way to its memory cgroup's limit is warned of before the kernel kills it there, and
//! that files that are read are no way to it.
//! Refuses to make up figures: the limit is the kernel's, and so is the kill.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, World, artefacts, scrape::Scrape};

const START: &str = "init\nuuid 0\nretain 0\nalloc a 5MiB\nprint ready\nwait\n";
const MIB: u64 = 1 << 20;
const LIMIT: u64 = 512 * MIB;
const SIGKILL: i32 = 9;
/// Of the warning, as the alert has it.
const BAR: f64 = 0.5;
const AHEAD: Duration = Duration::from_secs(20);

fn unit(name: &str) -> String {
    format!("pressure-{}-{name}.service", std::process::id())
}

fn place(name: &str, limit: Option<u64>) -> Result<Cgroup> {
    Cgroup::with_memory(&format!("system.slice/{}", unit(name)), limit)
}

fn risk(scrape: &Scrape, name: &str) -> Option<f64> {
    let tenant = format!("systemd:{}", unit(name));
    scrape.get("cotenant_memory_limit_risk_ratio", &[("tenant", &tenant), ("horizon", "60s")])
}

fn figure(scrape: &Scrape, name: &str, metric: &str) -> Option<f64> {
    scrape.get(metric, &[("tenant", &format!("systemd:{}", unit(name)))])
}

fn counted(scrape: &Scrape, outcome: &str) -> Option<f64> {
    let of = [("severity", "warning"), ("outcome", outcome)];
    scrape.get("cotenant_memory_limit_risk_warnings_total", &of)
}

/// Ends with the test.
struct Reader(Child);

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_way_to_a_memory_limit_is_warned_of_before_the_kill_and_reading_files_is_none() -> Result<()> {
    let world = World::create(1, "")?;
    let (grows, reads, free) =
        (place("grows", Some(LIMIT))?, place("reads", Some(LIMIT / 4))?, place("free", None)?);
    // A minute and more to the limit, in steps that any allocator takes.
    let grow = format!("{START}for 200000 {{\neat 2MiB\nsleep 300\n}}\n");
    let mut grower = world.node.tenant("grows", &grows, &grow, &[])?;
    let mut reader = world.node.tenant("reads", &reads, START, &[])?;
    let mut still = world.node.tenant("free", &free, START, &[])?;
    for tenant in [&mut grower, &mut reader, &mut still] {
        tenant.expect("ready")?;
    }
    // Written and read from within the cgroup, so that its page cache is charged there: twice its limit, again and again.
    let file = tempfile::NamedTempFile::new_in(artefacts()?)?;
    let mut command = reads.command("");
    let script = format!(
        "dd if=/dev/zero of={0} bs=1M count={1} conv=fsync; while cat {0}; do :; done",
        file.path().display(),
        LIMIT / 2 / MIB
    );
    command.args(["/bin/sh", "-c", &script]).stdout(Stdio::null()).stderr(Stdio::null());
    let _files = Reader(command.spawn().context("cannot start a shell")?);

    world.agent.until(|scrape| risk(scrape, "grows").is_some())?;
    let first = world.agent.scrape()?;
    ensure!(figure(&first, "grows", "cotenant_memory_limit_bytes") == Some(LIMIT as f64), "its limit");
    ensure!(figure(&first, "free", "cotenant_memory_limit_bytes").is_none(), "there is no limit to tell of");
    ensure!(risk(&first, "free").is_some(), "without a limit the host is the bound");
    ensure!(first.get("cotenant_host_memory_risk_ratio", &[("horizon", "60s")]).is_some(), "the host's");
    grower.go()?;
    let begun = Instant::now();
    let (mut warned, mut highest_other, mut time) = (None, 0.0_f64, None);
    let ended = loop {
        let scrape = world.agent.scrape()?;
        if warned.is_none() && risk(&scrape, "grows").is_some_and(|risk| risk >= BAR) {
            warned = Some(begun.elapsed());
            time = figure(&scrape, "grows", "cotenant_memory_limit_time_seconds");
        }
        for name in ["reads", "free"] {
            highest_other = highest_other.max(risk(&scrape, name).unwrap_or(0.0));
        }
        if let Some(held) = figure(&scrape, "reads", "cotenant_memory_usage_bytes") {
            ensure!(held < (LIMIT / 8) as f64, "page cache counts as held: {held}");
        }
        if let Some(status) = grower.ended()? {
            break status;
        }
        ensure!(begun.elapsed() < Duration::from_mins(4), "it never met its limit");
        std::thread::sleep(Duration::from_millis(200));
    };
    let killed = begun.elapsed();
    ensure!(ended.signal() == Some(SIGKILL) && grows.kills()? == 1, "it ended with {ended}");
    let warned = warned.context("nobody warned")?;
    let time = time.context("it grows, and has a time")?;
    println!(
        "warned after {warned:?} of {time:.0} s, killed after {killed:?}; others at {highest_other:.3} at most"
    );
    ensure!(killed.saturating_sub(warned) >= AHEAD, "warned after {warned:?}, killed after {killed:?}");
    ensure!(highest_other < BAR, "one that reads files, or stands still, was at {highest_other}");

    // What became of it is counted, and the kill's incident carries it.
    world.agent.until(|scrape| counted(scrape, "exhausted") == Some(1.0))?;
    let answer = world.agent.json("/api/v1/incidents")?;
    let told = answer["incidents"].as_array().context("incidents")?;
    let kill = told.iter().find(|told| told["kind"] == "oom_kill").context("the kill")?;
    let warning = &kill["warnings"][0];
    ensure!(
        warning["memory"] == "limit" && warning["tenant"]["name"] == format!("systemd:{}", unit("grows")),
        "{kill}"
    );
    let lead = warning["lead_seconds"].as_f64().context("its lead")?;
    ensure!(
        (lead - killed.saturating_sub(warned).as_secs_f64()).abs() < 3.0,
        "{lead} s, by /metrics {warned:?}"
    );
    let words = kill["explanation"].to_string();
    ensure!(words.contains("fills the host memory it may hold was warned of"), "{words}");
    Ok(())
}
