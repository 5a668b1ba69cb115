//! Owns the claim that tenants are named right under the container runtimes and the batch system that people run: each is
//! started here for real, with a simulated GPU workload inside. `make test-runtimes` runs it.
//! Refuses hand-made cgroups and stores where a runtime can run: what is read is what the runtime itself made. A runtime
//! that is not installed is a failure that names it.

mod containerd;
mod docker;
mod enclosure;
mod image;
mod podman;
mod slurm;
mod systemd;

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result, ensure};
use cotenant_node::{World, losses};
use cotenant_sim_state::{NODE_VARIABLE, PROC_VARIABLE, truth};
use serde_json::{Value, json};

use enclosure::Enclosure;

/// Where containers find the host's `/proc`, by which the simulated driver numbers processes as a real one does.
const HOST_PROC: &str = "/host-proc";

/// A node with the agent and the runtimes in one enclosure. Its tenants get the node's own driver library, as NVIDIA's
/// toolkit mounts the host's into containers.
struct Stage {
    world: World,
    enclosure: Enclosure,
}

/// Who the workload has to be.
struct Expected<'a> {
    tenant: &'a str,
    /// Labels of its series, beside `tenant`.
    labels: &'a [(&'a str, &'a str)],
    /// Of `cotenant identify`, whole. `null`: any value.
    identity: Value,
}

impl Stage {
    fn set(programs: &[&str], extra: &str) -> Result<Self> {
        let enclosure = Enclosure::create(programs)?;
        let world = World::create_under(&enclosure.launcher(), 1, extra)?;
        Ok(Self { world, enclosure })
    }

    fn directory(&self) -> PathBuf {
        self.world.node.directory.clone()
    }

    /// What a workload needs to be told. `contained`: it sees the host's `/proc` at [`HOST_PROC`].
    fn environment(&self, contained: bool) -> Vec<(&'static str, String)> {
        let directory = self.world.node.directory.display();
        let mut environment = vec![
            (NODE_VARIABLE, directory.to_string()),
            ("COTENANT_SIM_LIBCUDA", format!("{directory}/lib/libcuda.so.1")),
        ];
        if contained {
            environment.push((PROC_VARIABLE, HOST_PROC.to_owned()));
        }
        environment
    }

    /// A workload that holds memory, gave some back, and failed once.
    fn script(&self) -> Result<String> {
        let path = self.world.node.directory.join("held.script");
        let steps = "init\nuuid 0\nretain 0\nalloc a 5MiB\nalloc b 3MiB\nfree b\nalloc c 400GiB\nexpect 2\nalloc d 7MiB \
                     cuMemAllocManaged\n";
        std::fs::write(&path, format!("{steps}sleep 600000\n"))?;
        Ok(path.display().to_string())
    }

    /// The one process that called the driver, by the driver's own record.
    fn workload(&self) -> Result<u32> {
        let began = std::time::Instant::now();
        loop {
            let pids: Vec<u32> = truth::read(&self.world.node.directory)?
                .iter()
                // Its last call is there.
                .filter(|process| process.calls.values().sum::<u64>() >= CALLS)
                .map(|process| process.pid)
                .collect();
            match pids[..] {
                [pid] if pid > 1 => return Ok(pid),
                [] if began.elapsed().as_secs() < 60 => {}
                _ => anyhow::bail!("these processes called the driver: {pids:?}"),
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// Holds that the workload's figures are exact, under this name and no other, and that `cotenant identify` agrees.
    fn expect(&self, expected: &Expected<'_>) -> Result<u32> {
        let Expected { tenant, labels, identity } = expected;
        let pid = self.workload()?;
        let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let truths = self.world.truths(&BTreeMap::from([(pid, (*tenant).to_owned())]), &[])?;
        let found = self.world.settle(&truths)?;
        let scrape = self.world.agent.scrape()?;
        let live = || scrape.of("cotenant_gpu_memory_live_bytes");
        let seen: Vec<_> = live().map(|sample| (&sample.labels, sample.value)).collect();
        ensure!(found.is_empty(), "{found:#?}\nthese hold memory: {seen:#?}\n{pid} is in\n{cgroup}");
        for sample in live() {
            let right = |(key, value): &(&str, &str)| sample.label(key) == *value;
            ensure!(
                labels.iter().all(right),
                "wanted {labels:?}: {:?}\n{pid} is in\n{cgroup}",
                sample.labels
            );
            ensure!(sample.label("tenant") == *tenant, "somebody else has memory: {seen:#?}");
        }
        // NVML's list has it as well, under the same name.
        let listed = [("tenant", *tenant)];
        self.world.agent.until(|scrape| scrape.sum("cotenant_gpu_memory_process_bytes", &listed) > 5e6)?;
        let lost = losses(&self.world.agent.scrape()?);
        ensure!(lost.is_empty(), "{lost:?}");
        let mut told = self.world.node.identify(&self.enclosure.launcher(), pid)?;
        for (key, value) in identity.as_object().context("an object is expected")? {
            if value.is_null()
                && let Some(any) = told.get_mut(key)
            {
                *any = Value::Null;
            }
        }
        ensure!(told == *identity, "identify says {told:#}, expected is {identity:#}\n{cgroup}");
        Ok(pid)
    }
}

/// What [`Stage::script`] makes of the driver: with the ninth call it is at rest.
const CALLS: u64 = 9;

/// Two objects in one.
fn merged(base: &Value, more: &Value) -> Value {
    let rows = [base, more].into_iter().filter_map(Value::as_object).flatten();
    json!(rows.map(|(key, value)| (key.clone(), value.clone())).collect::<serde_json::Map<_, _>>())
}
