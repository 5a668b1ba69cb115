//! Owns which agent a command asks, and what its refusals mean for whoever asked.
//! Refuses to read answers: they are text until the command reads them.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use clap::Args;

use super::{Access, ClientError, Told};
use crate::config::{self, Overrides};

/// The agent answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// 256 incidents with all their evidence are some megabytes.
const LONGEST: usize = 64 << 20;

/// Which agent to ask, and how to get in.
#[derive(Args, Clone, Debug)]
pub(crate) struct Place {
    /// Where the agent serves [default: server.listen of the configuration]
    #[arg(long, value_name = "HOST:PORT", value_parser = shaped)]
    address: Option<String>,
    /// Configuration file [default: /etc/cotenant/cotenant.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    access: Access,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error("{0:#}")]
    Config(anyhow::Error),
    #[error(
        "no agent answers on {address}: start one with `cotenant run` (as root), or say where it serves with --address"
    )]
    Unreachable { address: String, source: ClientError },
    #[error("the agent on {address} does not let this question in: {remedy}")]
    Unadmitted { address: String, remedy: &'static str },
    #[error("the agent on {address} refused the question: {reason}")]
    Refused { address: String, reason: String },
    #[error("{address} answered with status {status}: is that a cotenant agent, and this version of it?")]
    Status { address: String, status: u16 },
    #[error("{address} did not answer as an agent would: is that a cotenant agent, and this version of it?")]
    Malformed { address: String, source: serde_json::Error },
}

impl Place {
    /// `HOST:PORT` of the agent.
    pub(crate) fn address(&self) -> Result<String, AskError> {
        if let Some(address) = &self.address {
            return Ok(address.clone());
        }
        let overrides = Overrides { config: self.config.clone(), ..Overrides::default() };
        let config = config::load(&overrides).map_err(AskError::Config)?;
        Ok(reachable(config.server.listen).to_string())
    }

    /// The answer of the agent on `address` to one question, where it gave one.
    pub(crate) fn ask(&self, address: &str, target: &str) -> Result<String, AskError> {
        let address = address.to_owned();
        let told = match self.access.get(&address, target, LONGEST, PATIENCE) {
            Ok(told) => told,
            Err(source) => return Err(AskError::Unreachable { address, source }),
        };
        if let Some(remedy) = told.remedy() {
            return Err(AskError::Unadmitted { address, remedy });
        }
        let Told { status, text } = told;
        match status {
            200 => Ok(text),
            400 => Err(AskError::Refused { address, reason: text.trim_end().to_owned() }),
            _ => Err(AskError::Status { address, status }),
        }
    }
}

fn shaped(text: &str) -> Result<String, String> {
    let wrong = || format!("{text:?} is no HOST:PORT, such as 127.0.0.1:9468");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let shaped = plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte));
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    (!plain.is_empty() && shaped && is_port).then(|| text.to_owned()).ok_or_else(wrong)
}

/// An agent that listens everywhere is asked at home.
pub(crate) fn reachable(listen: SocketAddr) -> SocketAddr {
    let home = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(home, listen.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_make_no_sense_are_told_what_would() {
        for good in ["127.0.0.1:9468", "node-7.example:80", "[::1]:9468"] {
            assert_eq!(shaped(good).as_deref(), Ok(good));
        }
        for bad in
            ["9468", "http://node:80", "node:", "node:0", "node:99999", ":80", "a/b:80", "user@node:80"]
        {
            assert!(shaped(bad).unwrap_err().contains("HOST:PORT"), "{bad}");
        }
    }

    #[test]
    fn an_agent_that_listens_everywhere_is_asked_at_home() {
        let of = |text: &str| reachable(text.parse().expect("an address")).to_string();
        assert_eq!(of("0.0.0.0:1"), "127.0.0.1:1");
        assert_eq!(of("[::]:2"), "[::1]:2");
        assert_eq!(of("10.0.0.7:3"), "10.0.0.7:3");
    }
}
