//! Owns the claim that tenants are named right under the container runtimes and the batch system that people run: each is
//! started here for real, with a simulated GPU workload inside. `make test-runtimes` runs it.
//! Refuses hand-made cgroups and stores: what is read is what the runtime itself made.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_node::{World, artefacts, scrape::Scrape};
use cotenant_sim_state::NODE_VARIABLE;

const PATIENCE: Duration = Duration::from_mins(1);
const LIVE: f64 = (5 << 20) as f64;
/// Holds its memory for as long as any of these tests.
const SCRIPT: &str = "init\nuuid 0\nretain 0\nalloc a 5MiB\nprint held\nsleep 600000\n";

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// What a command printed; its words are the error when it failed.
fn run(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {command:?}: `bash tests/setup.sh runtimes`"))?;
    ensure!(output.status.success(), "{command:?}: {}", said(&output));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words.first().copied().unwrap_or_default());
    command.args(words.get(1..).unwrap_or_default());
    command
}

/// A daemon of this test; ended with all that it started.
struct Daemon(Child);

impl Daemon {
    fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let file = fs::File::create(log)?;
        let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn();
        Ok(Self(child.with_context(|| format!("cannot start {command:?}: `bash tests/setup.sh runtimes`"))?))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = command(&["kill", &self.0.id().to_string()]).status();
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end && self.0.try_wait().is_ok_and(|status| status.is_none()) {
            sleep(Duration::from_millis(100));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that undoes what the test did, whatever became of it.
struct Undo(Vec<Vec<String>>);

impl Undo {
    fn with(words: &[&str]) -> Self {
        Self(vec![words.iter().map(|word| (*word).to_owned()).collect()])
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for words in &self.0 {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let _ = command(&words).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

fn until(what: &str, log: &Path, mut come: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !come() {
        if Instant::now() > deadline {
            bail!("{what} did not come: {}", fs::read_to_string(log).unwrap_or_default());
        }
        sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// A root file system with the tenant and what it is linked with: an image without a registry.
fn image(directory: &Path) -> Result<PathBuf> {
    let root = directory.join("image");
    let program = artefacts()?.join("cotenant-sim-tenant");
    let path = program.to_str().context("a path of this build")?;
    let linked = run(&mut command(&["ldd", path]))?;
    fs::create_dir_all(root.join("tmp"))?;
    fs::copy(&program, root.join("tenant"))?;
    for file in linked.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(file.trim_start_matches('/'));
        fs::create_dir_all(to.parent().context("a library lies in a directory")?)?;
        fs::copy(file, to)?;
    }
    Ok(root)
}

/// A node whose tenants find all they need below its directory, and a copy of the driver of their own.
struct Stage {
    world: World,
    directory: PathBuf,
    library: PathBuf,
    script: PathBuf,
}

impl Stage {
    fn set(extra: &str) -> Result<Self> {
        let world = World::create(1, extra)?;
        let directory = world.node.directory.clone();
        let library = world.node.library("own")?;
        let script = directory.join("held.script");
        fs::write(&script, SCRIPT)?;
        Ok(Self { world, directory, library, script })
    }

    fn environment(&self) -> [String; 2] {
        [
            format!("{NODE_VARIABLE}={}", self.directory.display()),
            format!("COTENANT_SIM_LIBCUDA={}", self.library.display()),
        ]
    }

    /// Waits for the tenant's memory under this name, and holds that nobody else has any.
    fn expect(&self, tenant: &str) -> Result<Scrape> {
        let labels = [("tenant", tenant), ("memory_kind", "device")];
        let page = self.world.agent.until(|scrape| {
            scrape
                .get("cotenant_gpu_memory_live_bytes", &labels)
                .is_some_and(|bytes| (bytes - LIVE).abs() < 1.0)
        });
        page.with_context(|| {
            let scrape = self.world.agent.scrape().ok();
            let seen = scrape.iter().flat_map(|scrape| scrape.of("cotenant_gpu_memory_live_bytes"));
            let names: Vec<&str> = seen.map(|sample| sample.label("tenant")).collect();
            format!("nobody is {tenant}; these hold memory: {names:?}")
        })
    }
}

#[test]
#[ignore = "needs Docker: make test-runtimes"]
fn c26_a_docker_container_has_its_name() -> Result<()> {
    let stage = Stage::set("")?;
    let log = stage.directory.join("dockerd.log");
    // A Docker that runs already is as good.
    let _daemon = if command(&["docker", "info"]).output().is_ok_and(|output| output.status.success()) {
        None
    } else {
        let mut dockerd = command(&["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none"]);
        dockerd.args(["--storage-driver", "vfs"]);
        Some(Daemon::start(&mut dockerd, &log)?)
    };
    until("dockerd", &log, || {
        command(&["docker", "info"]).output().is_ok_and(|output| output.status.success())
    })?;
    let name = format!("cotenant-test-{}", std::process::id());
    let tag = format!("{name}:1");
    let tar = stage.directory.join("image.tar");
    let root = image(&stage.directory)?;
    run(command(&["tar", "-C"]).arg(&root).arg("-cf").arg(&tar).arg("."))?;
    run(command(&["docker", "import"]).arg(&tar).arg(&tag))?;
    let _image = Undo::with(&["docker", "rmi", "-f", &tag]);
    let mount = format!("{0}:{0}", stage.directory.display());
    let _container = Undo::with(&["docker", "rm", "-f", &name]);
    let [node, library] = stage.environment();
    run(command(&[
        "docker",
        "run",
        "-d",
        "--name",
        &name,
        "--network",
        "none",
        "-v",
        &mount,
        "-e",
        &node,
        "-e",
        &library,
    ])
    .args([&tag, "/tenant"])
    .arg(&stage.script))?;
    stage.expect(&format!("docker:{name}"))?;
    Ok(())
}

#[test]
#[ignore = "needs Podman: make test-runtimes"]
fn c89_a_podman_container_has_its_name() -> Result<()> {
    let stage = Stage::set("")?;
    let root = image(&stage.directory)?;
    let name = format!("cotenant-test-{}", std::process::id());
    let _container = Undo::with(&["podman", "rm", "-f", &name]);
    let mount = format!("{0}:{0}", stage.directory.display());
    let [node, library] = stage.environment();
    run(command(&[
        "podman",
        "run",
        "-d",
        "--name",
        &name,
        "--network",
        "none",
        "--cgroup-manager",
        "cgroupfs",
    ])
    .args(["-v", &mount, "-e", &node, "-e", &library, "--rootfs"])
    .arg(&root)
    .arg("/tenant")
    .arg(&stage.script))?;
    stage.expect(&format!("podman:{name}"))?;
    Ok(())
}

#[test]
#[ignore = "needs Slurm: make test-runtimes"]
fn c26_a_slurm_job_has_its_number() -> Result<()> {
    let stage = Stage::set("")?;
    let slurm = stage.directory.join("slurm");
    for part in ["state", "spool"] {
        fs::create_dir_all(slurm.join(part))?;
    }
    let at = slurm.display();
    let host = run(&mut command(&["hostname", "-s"]))?;
    let config = slurm.join("slurm.conf");
    fs::write(
        &config,
        format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n\
             AuthInfo=socket={at}/munge.socket\nStateSaveLocation={at}/state\nSlurmdSpoolDir={at}/spool\n\
             SlurmctldPidFile={at}/ctld.pid\nSlurmdPidFile={at}/d.pid\nProctrackType=proctrack/cgroup\n\
             TaskPlugin=task/cgroup\nSlurmctldPort=16817\nSlurmdPort=16818\nReturnToService=2\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN\n\
             PartitionName=p Nodes=ALL Default=YES State=UP\n"
        ),
    )?;
    fs::write(
        slurm.join("cgroup.conf"),
        "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nConstrainDevices=no\nConstrainCores=no\n",
    )?;
    let key = slurm.join("munge.key");
    run(command(&["dd", "if=/dev/urandom", "bs=128", "count=1", "status=none"])
        .arg(format!("of={}", key.display())))?;
    run(command(&["chmod", "600"]).arg(&key))?;
    let log = slurm.join("log");
    let mut munged = command(&["munged", "--foreground", "--force"]);
    for (flag, file) in [
        ("key-file", "munge.key"),
        ("socket", "munge.socket"),
        ("pid-file", "munge.pid"),
        ("seed-file", "munge.seed"),
    ] {
        munged.arg(format!("--{flag}={at}/{file}"));
    }
    let _munge = Daemon::start(&mut munged, &slurm.join("munge.log"))?;
    until("munged", &slurm.join("munge.log"), || slurm.join("munge.socket").exists())?;
    let _control = Daemon::start(command(&["slurmctld", "-D", "-f"]).arg(&config), &slurm.join("ctld.log"))?;
    let _node =
        Daemon::start(command(&["slurmd", "-D", "-f"]).arg(&config).env("SLURM_CONF", &config), &log)?;
    let ask = |words: &[&str]| {
        let mut command = command(words);
        command.env("SLURM_CONF", &config);
        command
    };
    until("an idle node", &log, || {
        ask(&["sinfo", "-h", "-o", "%t"]).output().is_ok_and(|said| said.stdout.starts_with(b"idle"))
    })?;
    let [node, library] = stage.environment();
    let tenant = artefacts()?.join("cotenant-sim-tenant");
    let wrapped = format!("env {node} {library} {} {}", tenant.display(), stage.script.display());
    let output = stage.directory.join("job.out");
    let job = run(ask(&["sbatch", "--parsable", "--wrap", &wrapped, "-o"]).arg(&output))?;
    stage.expect(&format!("slurm:{job}")).with_context(|| fs::read_to_string(&log).unwrap_or_default())?;
    run(&mut ask(&["scancel", &job]))?;
    until("the job's end", &log, || ask(&["squeue", "-h"]).output().is_ok_and(|said| said.stdout.is_empty()))
}
