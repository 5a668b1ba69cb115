//! Owns the proof that a Go program survives the probes: its goroutines' stacks move, the driver runs on a C stack.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use cotenant_node::{Cgroup, World, scrape::Scrape};

/// Seconds of allocating. The case asks for 60; `COTENANT_GO_SECONDS=60` gives them.
fn seconds() -> String {
    std::env::var("COTENANT_GO_SECONDS").unwrap_or_else(|_| "10".into())
}

#[test]
fn c66_goroutines_that_allocate_through_cgo_do_not_crash_and_are_counted() -> Result<()> {
    let world = World::create(1, "")?;
    let program = world.node.directory.join("goroutines");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("go/main.go");
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(&source)
        .env("GOCACHE", world.node.directory.join("go-cache"))
        .env("GO111MODULE", "off")
        .env("CGO_ENABLED", "1")
        .output()
        .context("go is missing: run `make setup`")?;
    ensure!(built.status.success(), "go build: {}", String::from_utf8_lossy(&built.stderr));

    let cgroup = Cgroup::create("system.slice/goroutines.service")?;
    let library = world.node.directory.join("lib/libcuda.so.1");
    let (program, library) = (program.display().to_string(), library.display().to_string());
    let output =
        world.node.command(&cgroup, &program, &[library.as_str(), &seconds()]).output().context("run")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let pairs: f64 = said.trim().parse().with_context(|| format!("{said:?}"))?;
    ensure!(pairs > 1000.0, "{pairs} pairs are no test");

    let counted = |scrape: &Scrape, operation| {
        let labels = [("tenant", "systemd:goroutines.service"), ("operation", operation)];
        scrape.sum("cotenant_gpu_memory_operations_total", &labels)
    };
    let all = |scrape: &Scrape| ["cuMemAlloc", "cuMemFree"].map(|operation| counted(scrape, operation));
    let scrape = world.agent.until(|scrape| all(scrape).iter().all(|calls| *calls >= pairs))?;
    ensure!(all(&scrape).iter().all(|calls| *calls <= pairs), "{pairs} pairs were made: {:?}", all(&scrape));
    let lost = scrape.sum("cotenant_agent_losses_total", &[]);
    ensure!(lost == 0.0, "{lost} losses");
    Ok(())
}
