//! Owns the claims about what Slurm granted its jobs: files as a prolog writes them and cgroups as slurmd makes them, both
//! by hand, with the real agent. `tests/runtimes` has Slurm itself.
//! Refuses a job's own word.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, thread::sleep, time::Duration};

use anyhow::{Context, Result, ensure};
use cotenant_model::GpuId;
use cotenant_node::{Cgroup, Tenant, World, scrape::Scrape};

const STATE: &str = "cotenant_gpu_grant_state";
const SHARES: &str = "cotenant_gpu_grant_shares";
const IDLE: &str = "cotenant_gpu_grant_idle_seconds_total";
const STALE: &str = "cotenant_gpu_stale_grants";
const BYTES: &str = "cotenant_gpu_memory_process_bytes";

struct Job {
    tenant: String,
    number: u32,
    cgroup: Cgroup,
}

impl Job {
    fn create(at: u32) -> Result<Self> {
        let number = std::process::id() * 10 + at;
        let path = format!("system.slice/slurmstepd.scope/job_{number}/step_batch/user/task_0");
        Ok(Self { tenant: format!("slurm:{number}"), number, cgroup: Cgroup::create(&path)? })
    }

    fn hold(&self, world: &World, gpu: usize) -> Result<Tenant> {
        let script = format!("init\nuuid {gpu}\nretain {gpu}\nalloc a 64MiB\nprint held\nwait\n");
        // What it says of itself is nobody's grant.
        let said = [("SLURM_JOB_GPUS", "0,1"), ("CUDA_VISIBLE_DEVICES", "0,1"), ("SLURM_JOB_ID", "1")];
        let mut tenant = world.node.tenant(&self.tenant.replace(':', "-"), &self.cgroup, &script, &said)?;
        tenant.expect("held").with_context(|| format!("{} on GPU {gpu}", self.tenant))?;
        Ok(tenant)
    }
}

/// The one word for a job on a GPU.
fn grant(scrape: &Scrape, job: &str, gpu: &str) -> Option<String> {
    let mut on = scrape.of(STATE).filter(|sample| {
        sample.label("tenant") == job && sample.label("hw_id") == gpu && sample.value != 0.0
    });
    let word = on.next()?.label("grant").to_owned();
    on.next().is_none().then_some(word)
}

fn feature(scrape: &Scrape, state: &str) -> bool {
    let labels = [("feature", "job_grants"), ("state", state)];
    scrape.get("cotenant_agent_feature_state", &labels) == Some(1.0)
}

/// As a prolog does it.
fn write(directory: &Path, gpu: &str, jobs: &[&Job]) -> Result<()> {
    let lines = jobs.iter().fold(String::new(), |lines, job| lines + &job.number.to_string() + "\n");
    Ok(fs::write(directory.join(gpu), lines)?)
}

#[test]
fn c24_a_job_that_was_granted_a_gpu_and_runs_nothing_is_seen_to_do_so() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mapping = directory.path();
    let [quiet, busy, stray, bold, late] = [1, 2, 3, 4, 5].map(Job::create);
    let (quiet, busy, stray, bold, late) = (quiet?, busy?, stray?, bold?, late?);
    let settings = format!(
        "[kubernetes]\nenabled = \"off\"\n[slurm]\njob_mapping = \"{}\"\ninterval = \"200ms\"\n",
        mapping.display()
    );
    let world = World::create(2, &settings)?;
    let [x, y] = [0, 1].map(|index| GpuId::from_uuid(world.node.state.uuid(index)).as_str().to_owned());
    // One by NVML's index, one by its UUID.
    write(mapping, "0", &[&quiet, &stray])?;
    write(mapping, &y, &[&busy, &late])?;
    let _running = [busy.hold(&world, 1)?, stray.hold(&world, 1)?, bold.hold(&world, 0)?];

    let is = |scrape: &Scrape, job: &Job, gpu: &str, word: &str| {
        grant(scrape, &job.tenant, gpu).as_deref() == Some(word)
    };
    let scrape = world.agent.until(|scrape| {
        is(scrape, &quiet, &x, "idle")
            && is(scrape, &busy, &y, "used")
            && is(scrape, &stray, &y, "allocation_mismatch")
            && is(scrape, &stray, &x, "idle")
            && is(scrape, &bold, &x, "none")
            && is(scrape, &late, &y, "idle")
            // NVML's lists come with the next poll.
            && scrape.get(BYTES, &[("tenant", &bold.tenant)]).is_some()
    })?;
    let share = [("tenant", quiet.tenant.as_str()), ("hw_id", &x), ("resource", "gres/gpu")];
    ensure!(scrape.get(SHARES, &share) == Some(1.0));
    ensure!(scrape.get(SHARES, &[("tenant", &bold.tenant)]).is_none(), "its own word is no grant");
    ensure!(scrape.get(BYTES, &[("tenant", &quiet.tenant), ("hw_id", &x)]) == Some(0.0), "lists were read");
    ensure!(scrape.get(STALE, &[]) == Some(0.0) && feature(&scrape, "active"));
    let idle = |scrape: &Scrape| scrape.get(IDLE, &[("tenant", &quiet.tenant)]).unwrap_or(-1.0);
    let before = idle(&scrape);
    sleep(Duration::from_secs(2));
    let grown = idle(&world.agent.scrape()?) - before;
    ensure!((1.5..20.0).contains(&grown), "{grown} s idle in 2 s");

    // A file that anybody may write is nobody's word: whoever is only in it has no grant any more.
    fs::write(mapping.join("1"), format!("{}\n", bold.number))?;
    fs::set_permissions(mapping.join("1"), fs::Permissions::from_mode(0o666))?;
    let scrape = world.agent.until(|scrape| feature(scrape, "degraded"))?;
    ensure!(scrape.get(SHARES, &[("tenant", &bold.tenant)]).is_none());
    fs::remove_file(mapping.join("1"))?;

    // A job that ends before its epilog has come.
    let Job { tenant: ended, cgroup, .. } = late;
    drop(cgroup);
    let scrape = world.agent.until(|scrape| scrape.get(STALE, &[]) == Some(1.0))?;
    ensure!(grant(&scrape, &ended, &y).as_deref() == Some("stale"));
    ensure!(scrape.get(BYTES, &[("tenant", &ended)]).is_none(), "a stale grant is no use, and no zero");
    write(mapping, &y, &[&busy])?;
    world.agent.until(|scrape| {
        scrape.get(STALE, &[]) == Some(0.0) && scrape.get(SHARES, &[("tenant", &ended)]).is_none()
    })?;

    // The directory goes, and nobody's label set does.
    fs::set_permissions(mapping, fs::Permissions::from_mode(0o777))?;
    let scrape = world.agent.until(|scrape| feature(scrape, "degraded"))?;
    ensure!(is(&scrape, &quiet, &x, "idle") && is(&scrape, &busy, &y, "used"));
    fs::set_permissions(mapping, fs::Permissions::from_mode(0o755))?;
    world.agent.until(|scrape| feature(scrape, "active"))?;
    Ok(())
}

#[test]
fn c24_what_the_kernel_lets_a_job_use_is_a_grant_where_it_lists_it() -> Result<()> {
    let devices = Path::new("/sys/fs/cgroup/devices");
    if !devices.join("devices.list").exists() {
        eprintln!("no version 1 hierarchy has the devices controller here: version 2 lists nothing");
        return Ok(());
    }
    let number = std::process::id() * 10 + 9;
    let jobs = [number, number + 1].map(|number| devices.join(format!("slurm/uid_0/job_{number}")));
    let write = |job: &Path, file: &str, text: &str| {
        fs::write(job.join(file), text).with_context(|| format!("{}: {file}", job.display()))
    };
    let made = || -> Result<World> {
        for job in &jobs {
            fs::create_dir_all(job)?;
        }
        write(&jobs[0], "devices.deny", "a")?;
        for device in ["c 195:0 rwm", "c 195:255 rwm", "c 1:3 rwm"] {
            write(&jobs[0], "devices.allow", device)?;
        }
        // Only forbidden devices: the kernel does not show them.
        write(&jobs[1], "devices.deny", "c 195:1 rwm")?;
        World::create(1, "[kubernetes]\nenabled = \"off\"\n[slurm]\ninterval = \"200ms\"\n")
    };
    let held = made().and_then(|world| {
        // This host has no driver that says which GPU is behind which device node.
        let listed = format!("slurm:{number}");
        let share = [("tenant", listed.as_str()), ("hw_id", "unknown"), ("resource", "gres/gpu")];
        let scrape = world.agent.until(|scrape| scrape.get(SHARES, &share) == Some(1.0))?;
        let other = format!("slurm:{}", number + 1);
        ensure!(scrape.get(SHARES, &[("tenant", &other)]).is_none(), "what cannot be read is not known");
        ensure!(feature(&scrape, "active") && scrape.get(STALE, &[]) == Some(0.0));
        Ok(())
    });
    for job in jobs.iter().flat_map(|job| job.ancestors().take(3)) {
        let _ = fs::remove_dir(job);
    }
    held
}
