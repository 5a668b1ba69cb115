//! Owns one agent that serves, and what curl, openssl and the agent's own commands hear from it.
//! Refuses NVML and tenants: what is served is not the matter here.

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use cotenant_node::{SimulatedNode, artefacts};
use cotenant_sim_state::NodeConfig;

/// The agent alone: what it serves is not the matter here.
pub(crate) struct Served {
    pub(crate) child: std::process::Child,
    pub(crate) address: String,
    config: PathBuf,
    log: PathBuf,
    _node: SimulatedNode,
}

impl Served {
    pub(crate) fn start(directory: &Path, web: &str) -> Result<Self> {
        let node = SimulatedNode::create(directory, &NodeConfig::h200(1, 0.0))?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = directory.join("cotenant.toml");
        fs::write(
            &config,
            format!(
                "[server]\nlisten = \"{address}\"\nweb_config = \"{web}\"\n[agent]\ncontrol = \"\"\n[nvml]\nenabled = false\n"
            ),
        )?;
        let log = directory.join("agent.log");
        let child = Command::new(artefacts()?.join("cotenant"))
            .args(["run", "--config"])
            .arg(&config)
            .env(cotenant_sim_state::NODE_VARIABLE, directory)
            .stderr(fs::File::create(&log)?)
            .spawn()?;
        let served = Self { child, address: address.to_string(), config, log, _node: node };
        let begun = Instant::now();
        while !fs::read_to_string(&served.log)?.contains("serving") {
            ensure!(begun.elapsed() < Duration::from_mins(1), "{}", fs::read_to_string(&served.log)?);
            sleep(Duration::from_millis(20));
        }
        // The first tick.
        sleep(Duration::from_millis(1_500));
        Ok(served)
    }

    /// `curl`: status and body, or its exit code and what it said.
    pub(crate) fn curl(
        &self,
        scheme: &str,
        path: &str,
        more: &[&str],
    ) -> Result<Result<(u16, String), (i32, String)>> {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "20", "--write-out", "\n%{http_code}"])
            .args(more)
            .arg(format!("{scheme}://{}{path}", self.address))
            .output()
            .context("curl is missing: run `make setup`")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            return Ok(Err((output.status.code().unwrap_or(-1), said)));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (body, status) = text.rsplit_once('\n').context("a status")?;
        Ok(Ok((status.parse()?, body.to_owned())))
    }

    pub(crate) fn status(&self, scheme: &str, path: &str, more: &[&str]) -> Result<u16> {
        match self.curl(scheme, path, more)? {
            Ok((status, _)) => Ok(status),
            Err((code, said)) => bail!("curl ended with {code}: {said}"),
        }
    }

    pub(crate) fn cotenant(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(artefacts()?.join("cotenant"));
        Ok(command.args(arguments).args(["--address", &self.address]).output()?)
    }

    /// What the doctor says of this agent: state, what it saw, and the remedy.
    pub(crate) fn doctor(&self, access: &[&str]) -> Result<(String, String, String)> {
        let output = Command::new(artefacts()?.join("cotenant"))
            .args(["doctor", "--output", "json", "--config"])
            .arg(&self.config)
            .args(access)
            .output()?;
        let page: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let checks = page["checks"].as_array().context("checks")?;
        let agent = checks.iter().find(|check| check["name"] == "agent").context("agent")?;
        let word = |key: &str| agent[key].as_str().unwrap_or_default().to_owned();
        Ok((word("state"), word("seen"), word("remedy")))
    }

    pub(crate) fn connect(&self) -> Result<TcpStream> {
        Ok(TcpStream::connect(&self.address)?)
    }

    pub(crate) fn feature(&self, scheme: &str, more: &[&str]) -> Result<(String, String)> {
        let answer = self.curl(scheme, "/status", more)?;
        let Ok((200, text)) = answer else { bail!("{answer:?}") };
        let status: serde_json::Value = serde_json::from_str(&text)?;
        let features = status["features"].as_array().context("features")?;
        let endpoint = features.iter().find(|one| one["name"] == "endpoint").context("endpoint")?;
        let word = |key: &str| endpoint[key].as_str().unwrap_or_default().to_owned();
        Ok((word("state"), word("reason")))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // SAFETY: a signal to a child that has not been waited for.
        unsafe { libc::kill(i32::try_from(self.child.id()).unwrap_or(0), libc::SIGTERM) };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(20) {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
