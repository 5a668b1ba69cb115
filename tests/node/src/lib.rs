//! Owns a simulated node with the real agent on it: directories, cgroups, processes, scrapes.
//! Refuses to stand in for the agent: what is compared came out of its own /metrics.

pub mod cgroup;
pub mod compare;
pub mod scrape;
pub mod waits;

pub use cgroup::Cgroup;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_sim_state::{NODE_VARIABLE, Node, NodeConfig, truth};

use crate::{compare::TenantTruth, scrape::Scrape};

const PATIENCE: Duration = Duration::from_mins(1);

/// How many times as long things take here: an emulated machine (tests/kernels) says so, and is given more time.
pub fn slowness() -> u32 {
    std::env::var("COTENANT_SLOW_HOST").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

fn patience() -> Duration {
    PATIENCE * slowness()
}

/// Where this build's programs and libraries are.
pub fn artefacts() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let directory = own.parent().context("a program lies in a directory")?;
    let directory =
        if directory.ends_with("deps") { directory.parent().unwrap_or(directory) } else { directory };
    for needed in ["cotenant", "cotenant-sim-tenant", "libcotenant_sim_cuda.so", "libcotenant_sim_nvml.so"] {
        ensure!(
            directory.join(needed).exists(),
            "{needed} is not in {}: run `make build sim`",
            directory.display()
        );
    }
    Ok(directory.to_owned())
}

/// The node: shared state, a libcuda of its own, an NVML of its own.
pub struct SimulatedNode {
    pub directory: PathBuf,
    pub state: Node,
    /// What the agent takes for the host's file system.
    pub root: PathBuf,
    artefacts: PathBuf,
    /// Probes reach every process of the host: one node at a time.
    _alone: fs::File,
}

impl SimulatedNode {
    pub fn create(directory: &Path, config: &NodeConfig) -> Result<Self> {
        let artefacts = artefacts()?;
        let alone = fs::File::create(std::env::temp_dir().join("cotenant-simulated-node.lock"))?;
        alone.lock().context("cannot wait for another simulated node to end")?;
        let state = Node::create(directory, config)?;
        let node = Self {
            directory: directory.to_owned(),
            state,
            root: PathBuf::from("/"),
            artefacts,
            _alone: alone,
        };
        node.library("lib")?;
        fs::copy(
            node.artefacts.join("libcotenant_sim_nvml.so"),
            node.directory.join("lib/libnvidia-ml.so.1"),
        )?;
        // What NVML holds open.
        let devices = node.directory.join("dev");
        fs::create_dir(&devices)?;
        for gpu in 0..config.gpus.len() {
            fs::write(devices.join(format!("nvidia{gpu}")), "")?;
        }
        fs::write(devices.join("nvidiactl"), "")?;
        Ok(node)
    }

    /// Another copy of libcuda, as a container brings one: its own inode.
    pub fn library(&self, name: &str) -> Result<PathBuf> {
        let directory = self.directory.join(name);
        fs::create_dir_all(&directory)?;
        let path = directory.join("libcuda.so.1");
        fs::copy(self.artefacts.join("libcotenant_sim_cuda.so"), &path)?;
        Ok(path)
    }

    /// Starts the agent with `extra` TOML after the node's own settings, and waits until it serves.
    pub fn agent(&self, extra: &str) -> Result<Agent> {
        self.agent_under(&[], extra)
    }

    /// Starts the agent as `launcher` (a program with its arguments) does it: in namespaces of its own, say.
    pub fn agent_under(&self, launcher: &[&str], extra: &str) -> Result<Agent> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = format!(
            "[server]\nlisten = \"{address}\"\n[agent]\ninterval = \"200ms\"\nroot = \"{}\"\ncontrol = \"{}\"\n[nvml]\n\
             library = \"{}\"\ninterval = \"500ms\"\n{extra}",
            self.root.display(),
            self.directory.join("control.sock").display(),
            self.directory.join("lib/libnvidia-ml.so.1").display()
        );
        let path = self.directory.join("cotenant.toml");
        fs::write(&path, config)?;
        let log = fs::File::create(self.directory.join("agent.log"))?;
        let program = self.artefacts.join("cotenant");
        let mut command = Command::new(launcher.first().map_or(program.as_os_str(), OsStr::new));
        if let Some((_, arguments)) = launcher.split_first() {
            command.args(arguments).arg(&program);
        }
        let child = command
            .args(["run", "--config"])
            .arg(&path)
            .env(NODE_VARIABLE, &self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("cannot start the agent")?;
        let agent = Agent { child, address, log: self.directory.join("agent.log") };
        agent.until(|scrape| !scrape.samples.is_empty())?;
        Ok(agent)
    }

    /// What `cotenant identify PID --output json` says, as `launcher` starts it.
    pub fn identify(&self, launcher: &[&str], pid: u32) -> Result<serde_json::Value> {
        let program = self.artefacts.join("cotenant");
        let words = launcher.iter().map(OsStr::new).chain([program.as_os_str()]).collect::<Vec<_>>();
        let (first, rest) = words.split_first().context("there is a program")?;
        let output = Command::new(first)
            .args(rest)
            .args(["identify", &pid.to_string(), "--output", "json", "--config"])
            .arg(self.directory.join("cotenant.toml"))
            .env(NODE_VARIABLE, &self.directory)
            .output()
            .context("cannot start identify")?;
        let said = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice(&output.stdout).with_context(|| format!("identify said {said:?}"))
    }

    /// `cotenant doctor` as `launcher` starts it, with the configuration of the last agent.
    pub fn doctor(&self, launcher: &[&str], arguments: &[&str]) -> Result<Doctor> {
        let program = self.artefacts.join("cotenant");
        let mut words: Vec<&OsStr> = launcher.iter().map(OsStr::new).collect();
        words.push(program.as_os_str());
        let (first, rest) = words.split_first().context("there is a program")?;
        let output = Command::new(first)
            .args(rest)
            .args(["doctor", "--output", "json", "--config"])
            .arg(self.directory.join("cotenant.toml"))
            .args(arguments)
            .env(NODE_VARIABLE, &self.directory)
            .stdin(Stdio::null())
            .output()
            .context("cannot start the doctor")?;
        let page = serde_json::from_slice(&output.stdout).with_context(|| {
            format!(
                "the doctor said {:?} {:?}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            )
        })?;
        Ok(Doctor { code: output.status.code(), page })
    }

    /// Starts a tenant in a cgroup; its script goes to a file of the node.
    pub fn tenant(
        &self,
        name: &str,
        cgroup: &Cgroup,
        script: &str,
        environment: &[(&str, &str)],
    ) -> Result<Tenant> {
        self.tenant_under("", name, cgroup, script, environment)
    }

    /// A program of one's own on this node, to be run in a cgroup.
    pub fn command(&self, cgroup: &Cgroup, program: &str, arguments: &[&str]) -> Command {
        let mut command = cgroup.command("");
        command.arg(program).args(arguments).env(NODE_VARIABLE, &self.directory);
        command
    }

    /// Starts a tenant as `launcher` (words of a shell that end before the program) does it.
    pub fn tenant_under(
        &self,
        launcher: &str,
        name: &str,
        cgroup: &Cgroup,
        script: &str,
        environment: &[(&str, &str)],
    ) -> Result<Tenant> {
        let path = self.directory.join(format!("{name}.script"));
        fs::write(&path, script)?;
        let mut command = cgroup.command(launcher);
        command
            .arg(self.artefacts.join("cotenant-sim-tenant"))
            .arg(&path)
            .env(NODE_VARIABLE, &self.directory)
            .env("COTENANT_SIM_LIBCUDA", self.directory.join("lib/libcuda.so.1"))
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a tenant")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().map(BufReader::new).context("a pipe was asked for")?;
        Ok(Tenant { name: name.to_owned(), child, stdin, stdout })
    }
}

/// What `cotenant doctor` said.
pub struct Doctor {
    pub code: Option<i32>,
    pub page: serde_json::Value,
}

impl Doctor {
    /// One check.
    pub fn check(&self, name: &str) -> Result<&serde_json::Value> {
        let found = self.page["checks"].as_array().and_then(|all| all.iter().find(|of| of["name"] == name));
        found.with_context(|| format!("no check {name} in {}", self.page))
    }

    /// Names and states of what is not ok.
    pub fn wrong(&self) -> BTreeMap<&str, &str> {
        let all = self.page["checks"].as_array().into_iter().flatten();
        let rows = all.filter_map(|of| Some((of["name"].as_str()?, of["state"].as_str()?)));
        rows.filter(|(_, state)| *state != "ok").collect()
    }
}

/// The running agent; ended on drop.
pub struct Agent {
    child: Child,
    pub address: SocketAddr,
    log: PathBuf,
}

impl Agent {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// One HTTP request, as a scraper makes it.
    pub fn get(&self, path: &str, accept: &str) -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(2) * slowness())?;
        stream.set_read_timeout(Some(Duration::from_secs(5) * slowness()))?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: agent\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer has a head")?;
        if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            bail!("a chunked answer is not expected here");
        }
        Ok(body.to_owned())
    }

    pub fn scrape(&self) -> Result<Scrape> {
        Scrape::parse(&self.get("/metrics", "text/plain")?)
    }

    pub fn status(&self) -> Result<serde_json::Value> {
        self.json("/status")
    }

    pub fn json(&self, path: &str) -> Result<serde_json::Value> {
        let text = self.get(path, "application/json")?;
        serde_json::from_str(&text).with_context(|| format!("{path} answered {text:?}"))
    }

    /// Scrapes until it is as wanted.
    pub fn until(&self, wanted: impl Fn(&Scrape) -> bool) -> Result<Scrape> {
        let begun = Instant::now();
        loop {
            if let Ok(scrape) = self.scrape()
                && wanted(&scrape)
            {
                return Ok(scrape);
            }
            if begun.elapsed() > patience() {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                bail!("the agent never showed what was wanted; its log:\n{log}");
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Waits until this file is probed.
    pub fn until_probed(&self, library: &Path) -> Result<()> {
        let inode = fs::metadata(library)?.ino();
        let begun = Instant::now();
        while begun.elapsed() < patience() {
            let status = self.status()?;
            let probed = status["libraries"].as_array().is_some_and(|all| {
                all.iter().any(|of| of["inode"].as_u64() == Some(inode) && of["attached"].as_u64() > Some(0))
            });
            if probed {
                return Ok(());
            }
            sleep(Duration::from_millis(20));
        }
        bail!("{} was not probed in time; status: {}", library.display(), self.status()?)
    }

    /// A signal that is a command to it.
    pub fn signal(&self, number: i32) {
        signal(self.child.id(), number);
    }

    /// Halts the agent where it is, as a debugger or an overloaded host does.
    pub fn pause(&self) {
        signal(self.child.id(), libc::SIGSTOP);
    }

    pub fn resume(&self) {
        signal(self.child.id(), libc::SIGCONT);
    }

    /// Asks the agent to stop; gives how long that took.
    pub fn stop(&mut self) -> Result<Duration> {
        let begun = Instant::now();
        signal(self.child.id(), libc::SIGTERM);
        while begun.elapsed() < patience() {
            if self.child.try_wait()?.is_some() {
                return Ok(begun.elapsed());
            }
            sleep(Duration::from_millis(5));
        }
        bail!("the agent does not stop")
    }

    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Agent {
    /// Asked, not killed: the kernel takes ten times as long to remove the probes of a process that it kills.
    fn drop(&mut self) {
        if self.stop().is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Some(kept) = std::env::var_os("COTENANT_KEEP_LOG") {
            let _ = fs::copy(&self.log, kept);
        }
    }
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(i32::try_from(pid).unwrap_or(0), signal) };
}

/// A running tenant; killed on drop.
pub struct Tenant {
    pub name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Tenant {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that the script prints.
    pub fn expect(&mut self, line: &str) -> Result<()> {
        let mut read = String::new();
        while self.stdout.read_line(&mut read)? > 0 {
            if read.trim_end() == line {
                return Ok(());
            }
            read.clear();
        }
        bail!("{} ended before it said {line:?} (status {:?})", self.name, self.child.wait()?)
    }

    /// Lets a `wait` step go on.
    pub fn go(&mut self) -> Result<()> {
        self.stdin.as_mut().context("the tenant reads")?.write_all(b"\n")?;
        Ok(())
    }

    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for its own end.
    pub fn end(&mut self) -> Result<()> {
        let status = self.ending()?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }

    /// Waits for its end, whatever that is.
    pub fn ending(&mut self) -> Result<ExitStatus> {
        drop(self.stdin.take());
        Ok(self.child.wait()?)
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Losses that are not 0, by reason.
pub fn losses(scrape: &Scrape) -> BTreeMap<String, f64> {
    scrape
        .of("cotenant_agent_losses_total")
        .filter(|sample| sample.value != 0.0)
        .map(|sample| (sample.label("reason").to_owned(), sample.value))
        .collect()
}

/// A node with the agent on it, whose library is probed before any tenant starts: at scale 0 a driver call takes
/// no time, and there would be none to attach in.
pub struct World {
    pub agent: Agent,
    _warm: (Tenant, Cgroup),
    /// After whoever is on it: the next node may begin when this one is dropped.
    pub node: SimulatedNode,
    _directory: tempfile::TempDir,
}

impl World {
    pub fn create(gpus: usize, extra: &str) -> Result<Self> {
        Self::create_under(&[], gpus, extra)
    }

    /// The same with the agent as `launcher` starts it.
    pub fn create_under(launcher: &[&str], gpus: usize, extra: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let node = SimulatedNode::create(directory.path(), &NodeConfig::h200(gpus, 0.0))?;
        let agent = node.agent_under(launcher, extra)?;
        let cgroup = Cgroup::create(&format!("system.slice/warm-{}.service", std::process::id()))?;
        let mut warm = node.tenant("warm", &cgroup, "print loaded\nwait\n", &[])?;
        warm.expect("loaded")?;
        agent.until_probed(&directory.path().join("lib/libcuda.so.1"))?;
        Ok(Self { node, agent, _warm: (warm, cgroup), _directory: directory })
    }

    /// The driver's record by tenant; `dead` processes hold nothing any more.
    pub fn truths(
        &self,
        tenants: &BTreeMap<u32, String>,
        dead: &[u32],
    ) -> Result<BTreeMap<String, TenantTruth>> {
        let mut by_tenant: BTreeMap<String, TenantTruth> = BTreeMap::new();
        for mut process in truth::read(&self.node.directory)? {
            let Some(tenant) = tenants.get(&process.pid) else { continue };
            if dead.contains(&process.pid) {
                process.end();
            }
            by_tenant.entry(tenant.clone()).or_default().add(&self.node.state, &process);
        }
        Ok(by_tenant)
    }

    /// Scrapes until nothing differs from the truth, or gives what still does.
    pub fn settle(&self, truths: &BTreeMap<String, TenantTruth>) -> Result<Vec<String>> {
        let mut last = Vec::new();
        for _ in 0..50 {
            let scrape = self.agent.scrape()?;
            last = truths
                .iter()
                .flat_map(|(tenant, truth)| compare::differences(&scrape, tenant, truth))
                .collect();
            if last.is_empty() {
                break;
            }
            sleep(Duration::from_millis(100));
        }
        Ok(last)
    }
}
