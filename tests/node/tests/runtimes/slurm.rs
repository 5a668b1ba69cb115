//! Owns Slurm: munged, slurmctld and slurmd on one node, and jobs of sbatch.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::{
    Expected, Stage,
    enclosure::{Daemon, Leavings, said},
};

/// The three daemons, the last first to end.
struct Cluster {
    slurmd: Daemon,
    _slurmctld: Daemon,
    _munged: Daemon,
    config: String,
}

fn host() -> Result<String> {
    said(std::process::Command::new("hostname").arg("-s"))
}

impl Cluster {
    /// `tracking`: how processes are kept together, `proctrack/…`. `mapping`: where a prolog notes who was granted the GPU
    /// that the node has then.
    fn start(stage: &Stage, tracking: &str, mapping: Option<&Path>) -> Result<Self> {
        let slurm = stage.directory().join("slurm");
        for part in ["", "state", "spool", "munge"] {
            fs::create_dir_all(slurm.join(part))?;
        }
        // slurmd runs jobs of any user in it.
        fs::set_permissions(stage.directory(), fs::Permissions::from_mode(0o755))?;
        let (at, host) = (slurm.display().to_string(), host()?);
        let config = format!("{at}/slurm.conf");
        let (port, other) = ports()?;
        let (gpus, gres) = match mapping {
            Some(mapping) => {
                note_grants(&slurm, mapping)?;
                (
                    format!(
                        "GresTypes=gpu\nProlog={at}/prolog\nPrologFlags=Contain\nSelectType=select/cons_tres\n\
                     SelectTypeParameters=CR_Core\n"
                    ),
                    " Gres=gpu:1",
                )
            }
            None => (String::new(), ""),
        };
        fs::write(
            &config,
            format!(
                "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\n\
                 AuthType=auth/munge\nAuthInfo=socket={at}/munge/socket\nStateSaveLocation={at}/state\n\
                 SlurmdSpoolDir={at}/spool\nSlurmctldPidFile={at}/ctld.pid\nSlurmdPidFile={at}/d.pid\n\
                 ProctrackType={tracking}\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2\n\
                 SlurmctldPort={port}\nSlurmdPort={other}\n{gpus}\
                 NodeName={host} NodeAddr=127.0.0.1 CPUs=1{gres} State=UNKNOWN\n\
                 PartitionName=p Nodes=ALL Default=YES State=UP\n"
            ),
        )?;
        let cgroups = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n\
                       ConstrainDevices=no\n";
        fs::write(format!("{at}/cgroup.conf"), cgroups)?;
        let key = format!("{at}/munge/key");
        fs::write(&key, "a key of 32 bytes or more, known to nobody but this test")?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let file = |flag: &str, name: &str| format!("--{flag}={at}/munge/{name}");
        let socket = file("socket", "socket");
        let files = [file("key-file", "key"), file("pid-file", "pid"), file("seed-file", "seed")];
        let mut words = vec!["munged", "--foreground", "--force", &socket];
        words.extend(files.iter().map(String::as_str));
        let mut munged = stage.enclosure.daemon("munged", &words, &[])?;
        munged.until(|| slurm.join("munge/socket").exists())?;
        let configured = [("SLURM_CONF", config.as_str())];
        let ctld = ["slurmctld", "-D", "-f", &config];
        let slurmctld = stage.enclosure.daemon("slurmctld", &ctld, &configured)?;
        let slurmd = stage.enclosure.daemon("slurmd", &["slurmd", "-D", "-f", &config], &configured)?;
        let mut cluster = Self { slurmd, _slurmctld: slurmctld, _munged: munged, config };
        let config = cluster.config.clone();
        cluster
            .slurmd
            .until(|| ask(stage, &config, &["sinfo", "-h", "-o", "%t"]).is_ok_and(|state| state == "idle"))?;
        Ok(cluster)
    }

    fn ask(&self, stage: &Stage, words: &[&str]) -> Result<String> {
        ask(stage, &self.config, words)
    }
}

/// The prolog of deploy/README.md, and a device that Slurm takes for a GPU: it only looks whether the node is there.
fn note_grants(slurm: &Path, mapping: &Path) -> Result<()> {
    fs::write(slurm.join("gres.conf"), "Name=gpu File=/dev/zero\n")?;
    let prolog = slurm.join("prolog");
    let script = format!(
        "#!/bin/sh\numask 022\nfor gpu in $(echo \"$SLURM_JOB_GPUS\" | tr ',' ' '); do\n  \
         echo \"$SLURM_JOB_ID\" >> \"{}/$gpu\"\ndone\n",
        mapping.display()
    );
    fs::write(&prolog, script)?;
    Ok(fs::set_permissions(prolog, fs::Permissions::from_mode(0o755))?)
}

fn ask(stage: &Stage, config: &str, words: &[&str]) -> Result<String> {
    said(stage.enclosure.command(words).env("SLURM_CONF", config))
}

/// Two that are free now.
fn ports() -> Result<(u16, u16)> {
    let bind = || std::net::TcpListener::bind("127.0.0.1:0");
    let (one, two) = (bind()?, bind()?);
    Ok((one.local_addr()?.port(), two.local_addr()?.port()))
}

/// A job that runs the workload, as its batch script or as a step of `srun`.
fn holds(tracking: &str, launcher: &str, step: &str) -> Result<()> {
    let _leavings = Leavings::of(&["slurm", &format!("slurm_{}", host()?), "system.slice/slurmstepd.scope"])?;
    let stage = Stage::set(&["slurmctld", "slurmd", "sbatch", "munged"], "")?;
    let cluster = Cluster::start(&stage, tracking, None)?;
    let environment: Vec<String> =
        stage.environment(false).iter().map(|(key, value)| format!("{key}={value}")).collect();
    let tenant = cotenant_node::artefacts()?.join("cotenant-sim-tenant");
    let wrapped =
        format!("{launcher} env {} {} {}", environment.join(" "), tenant.display(), stage.script()?);
    let output = stage.directory().join("job.out").display().to_string();
    let job = cluster.ask(&stage, &["sbatch", "--parsable", "--output", &output, "--wrap", &wrapped])?;
    let identity = json!({
        "kind": "slurm_job", "id": job, "name": job, "slurm_job": job, "slurm_step": step, "uid": 0,
    });
    let expected =
        Expected { tenant: &format!("slurm:{job}"), labels: &[("tenant_kind", "slurm")], identity };
    let held = stage.expect(&expected).with_context(|| {
        format!("{}\n{}", fs::read_to_string(&output).unwrap_or_default(), cluster.slurmd.log())
    });
    cluster.ask(&stage, &["scancel", "--full", "--signal=KILL", &job])?;
    held.map(|_| ())
}

#[test]
#[ignore = "needs Slurm: make test-runtimes"]
fn c26_a_slurm_job_has_its_number() -> Result<()> {
    holds("proctrack/cgroup", "", "batch")
}

#[test]
#[ignore = "needs Slurm: make test-runtimes"]
fn c24_a_job_that_holds_a_gpu_and_runs_nothing_on_it_is_idle() -> Result<()> {
    const STATE: &str = "cotenant_gpu_grant_state";
    let _leavings = Leavings::of(&["slurm", &format!("slurm_{}", host()?), "system.slice/slurmstepd.scope"])?;
    let mapping = tempfile::tempdir()?;
    let extra = format!("[slurm]\njob_mapping = \"{}\"\ninterval = \"500ms\"\n", mapping.path().display());
    let stage = Stage::set(&["slurmctld", "slurmd", "sbatch", "munged"], &extra)?;
    let cluster = Cluster::start(&stage, "proctrack/cgroup", Some(mapping.path()))?;
    let submit = |words: &[&str]| {
        cluster.ask(
            &stage,
            &[&["sbatch", "--parsable", "--output=/dev/null"], words, &["--wrap=sleep 600"]].concat(),
        )
    };
    let job = submit(&["--gres=gpu:1"])?;
    let tenant = format!("slurm:{job}");
    let is = |scrape: &cotenant_node::scrape::Scrape, word: &str| {
        scrape.get(STATE, &[("tenant", &tenant), ("grant", word)]) == Some(1.0)
    };
    let said = || {
        let files = fs::read_dir(mapping.path()).into_iter().flatten().flatten();
        let files = files.map(|file| (file.file_name(), fs::read_to_string(file.path())));
        format!("{:?}\n{}", files.collect::<Vec<_>>(), cluster.slurmd.log())
    };
    let scrape = stage.world.agent.until(|scrape| is(scrape, "idle")).with_context(said)?;
    let share = [("tenant", tenant.as_str()), ("resource", "gres/gpu")];
    ensure!(scrape.get("cotenant_gpu_grant_shares", &share) == Some(1.0), "{}", said());
    let idle = |scrape: &cotenant_node::scrape::Scrape| {
        scrape.get("cotenant_gpu_grant_idle_seconds_total", &[("tenant", &tenant)])
    };
    let before = idle(&scrape);
    stage.world.agent.until(|scrape| idle(scrape) > before)?;
    // It ends, and no epilog takes its line away.
    cluster.ask(&stage, &["scancel", "--full", "--signal=KILL", &job])?;
    stage.world.agent.until(|scrape| is(scrape, "stale")).with_context(said)?;
    Ok(())
}

#[test]
#[ignore = "needs Slurm: make test-runtimes"]
fn a_slurm_step_has_its_number_too() -> Result<()> {
    holds("proctrack/cgroup", "srun", "0")
}

#[test]
#[ignore = "needs Slurm: make test-runtimes"]
fn a_slurm_job_without_cgroups_has_its_number() -> Result<()> {
    holds("proctrack/linuxproc", "", "batch")
}
