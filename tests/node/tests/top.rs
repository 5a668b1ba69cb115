//! Owns the claims about the live view: `/api/v1/node` and `cotenant top`, against /metrics and the driver's own tenants.
//! Refuses a picture without a wait in it: the view is there for those.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, SimulatedNode, Tenant, artefacts, slowness, waits::SYMBOLS};
use cotenant_sim_state::NodeConfig;

const LIVE: &str = "cotenant_gpu_memory_live_bytes";

fn guest(node: &SimulatedNode, unit: &str, script: &str) -> Result<(Tenant, Cgroup, String)> {
    let unit = format!("top-{}-{unit}.service", std::process::id());
    let cgroup = Cgroup::create(&format!("system.slice/{unit}"))?;
    let mut tenant = node.tenant("top", &cgroup, script, &[])?;
    tenant.expect("ready")?;
    Ok((tenant, cgroup, format!("systemd:{unit}")))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `top` in a terminal of its own, told to leave after a while.
fn in_a_terminal(command: &str, keys: &[(Duration, &[u8])]) -> Result<Output> {
    let mut terminal = Command::new("script")
        .args(["--quiet", "--flush", "--return", "--command", command, "/dev/null"])
        .env("TERM", "xterm-256color")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start script (util-linux): it makes the terminal")?;
    let mut input = terminal.stdin.take().context("its input")?;
    for (after, key) in keys {
        sleep(*after);
        input.write_all(key)?;
        input.flush()?;
    }
    Ok(terminal.wait_with_output()?)
}

#[test]
fn top_shows_who_holds_who_waits_and_for_whom() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let node =
        SimulatedNode::create(directory.path(), &NodeConfig { spin_us: 0, ..NodeConfig::h200(2, 1.0) })?;
    let agent = node.agent(SYMBOLS)?;
    let start = "init\nuuid 0\nretain 0\n";
    let (mut chat, _one, victim) = guest(
        &node,
        "chat",
        &format!(
            "{start}alloc k 3GiB\nprint ready\nwait\nfor 200000 {{\nalloc a 2MiB\nfree a\n}}\nprint done\nwait\n"
        ),
    )?;
    let (mut hog, _two, culprit) = guest(
        &node,
        "hog",
        &format!(
            "{start}print ready\nwait\nfor 200000 {{\nalloc b 30GiB\nfree b\npause 300\n}}\nprint done\nwait\n"
        ),
    )?;
    agent.until(|scrape| scrape.sum(LIVE, &[("tenant", &victim)]) > 0.0)?;
    // What stands still is compared to the byte.
    let answer = agent.json("/api/v1/node")?;
    let scrape = agent.scrape()?;
    let row =
        answer["tenants"].as_array().context("tenants")?.iter().find(|row| row["tenant"] == victim.as_str());
    let row = row.with_context(|| format!("{victim} in {answer}"))?;
    let gpu = answer["gpus"][0]["id"].as_str().context("a GPU")?;
    ensure!(row["live"][gpu].as_f64() == Some(3.0 * f64::from(1 << 30)), "{row}");
    ensure!(
        row["live"][gpu].as_f64()
            == scrape.get(LIVE, &[("tenant", &victim), ("hw_id", gpu), ("memory_kind", "device")]),
        "{row}"
    );
    ensure!(
        answer["gpus"][0]["limit"].as_f64() == scrape.get("hw_gpu_memory_limit_bytes", &[("hw_id", gpu)]),
        "{answer}"
    );

    chat.go()?;
    hog.go()?;
    agent.until(|scrape| {
        let blamed = [("victim", victim.as_str()), ("culprit", culprit.as_str())];
        scrape.sum("cotenant_gpu_blame_seconds_total", &blamed) > 0.05
    })?;
    let program = artefacts()?.join("cotenant");
    let address = agent.address.to_string();
    let top = |arguments: &[&str]| {
        Command::new(&program).args(["top", "--address", &address]).args(arguments).output()
    };
    // No terminal: one table.
    let once = top(&["--interval", "1s"])?;
    let (table, errors) = (text(&once.stdout), text(&once.stderr));
    println!("{table}");
    ensure!(once.status.success() && errors.is_empty() && !table.contains('\x1b'), "{table}{errors}");
    let of = |name: &str| {
        table.lines().find(|line| line.starts_with(name)).with_context(|| format!("{name} in\n{table}"))
    };
    let waits = of(&victim)?;
    ensure!(waits.contains("3.0 GiB") && waits.contains(&format!(" % {culprit}")), "{waits}");
    ensure!(table.find(&culprit) < table.find(&victim), "who causes most comes first:\n{table}");
    ensure!(table.contains("CAUSED*") && table.contains("GPU") && table.contains("INCIDENTS"), "{table}");
    let named = top(&["--once", "--interval", "1s", "--sort", "name"])?;
    let named = text(&named.stdout);
    ensure!(named.find(&victim) < named.find(&culprit) && named.contains("TENANT*"), "{named}");

    // In a terminal: drawn again and again, ordered otherwise by a key, left by another, and the terminal is given back.
    let slow = slowness();
    // A terminal made for a pipe has no size.
    let command =
        format!("stty cols 140 rows 40; {} top --address {address} --interval 1s", program.display());
    let seen = in_a_terminal(
        &command,
        &[(Duration::from_secs(3) * slow, b"s"), (Duration::from_secs(2) * slow, b"q")],
    )?;
    let drawn = text(&seen.stdout);
    ensure!(seen.status.success(), "{:?}\n{drawn}", seen.status);
    ensure!(
        drawn.contains("\x1b[?1049h") && drawn.contains("\x1b[?1049l"),
        "no screen of its own was taken and given back: {drawn:?}"
    );
    ensure!(drawn.contains("leaves") && drawn.contains("top-"), "{drawn:?}");
    hog.kill()?;
    chat.kill()?;

    // Nobody there, and a question that makes no sense.
    let refused = top(&["--interval", "10ms"])?;
    ensure!(
        refused.status.code() == Some(2) && text(&refused.stderr).contains("once a second"),
        "{refused:?}"
    );
    drop(agent);
    let alone = top(&["--once"])?;
    ensure!(alone.status.code() == Some(1) && text(&alone.stderr).contains("cotenant run"), "{alone:?}");
    Ok(())
}
