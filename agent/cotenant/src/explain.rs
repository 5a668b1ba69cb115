//! Owns `cotenant explain`: what the running agent says has happened, in words.
//! Refuses to judge again: the words are the agent's.
//!
//! Exits with 0 when the agent has answered, 1 when it could not be asked, 2 when the question makes no sense.

mod quota;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use clap::{Args, ValueEnum};
use cotenant_model::explain::Explanation;
use serde::Deserialize;

use crate::{
    client::{self, Access, ClientError, quoted},
    config::{self, Overrides},
};

/// The agent answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// 256 incidents with all their evidence are some megabytes.
const LONGEST: usize = 64 << 20;
const UNASKED: u8 = 1;
const SENSELESS: u8 = 2;

#[derive(Args, Debug)]
pub(crate) struct Question {
    /// How far back to look, such as 15m or 2h
    #[arg(long, value_name = "DURATION", default_value = "15m", value_parser = duration)]
    since: String,
    /// Only what concerns this tenant, by its name in the metrics
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Instead of incidents: how much memory each tenant needs, why, and which MIG profile would hold it
    #[arg(long, conflicts_with = "since")]
    quota: bool,
    /// Words, or the agent's JSON as it came
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
    /// Where the agent serves [default: server.listen of the configuration]
    #[arg(long, value_name = "HOST:PORT", value_parser = address)]
    address: Option<String>,
    /// Configuration file [default: /etc/cotenant/cotenant.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    access: Access,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// As it was written, once it can be read: the agent reads it again.
fn duration(text: &str) -> Result<String, String> {
    humantime::parse_duration(text)
        .map(|_| text.to_owned())
        .map_err(|error| format!("{error}; write a duration such as 15m or 2h"))
}

fn address(text: &str) -> Result<String, String> {
    let wrong = || format!("{text:?} is no HOST:PORT, such as 127.0.0.1:9468");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let shaped = plain.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte));
    let is_port = port.parse::<u16>().is_ok_and(|port| port > 0);
    (!plain.is_empty() && shaped && is_port).then(|| text.to_owned()).ok_or_else(wrong)
}

/// The answer, as far as it is read here.
#[derive(Deserialize)]
struct Answer {
    incidents: Vec<Told>,
}

#[derive(Deserialize)]
struct Told {
    explanation: Explanation,
}

#[derive(Debug, thiserror::Error)]
enum ExplainError {
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

pub(crate) fn run(question: &Question) -> ExitCode {
    let answered = ask(question).and_then(|(address, text)| match question.output {
        Output::Json => Ok(text),
        Output::Text if question.quota => quota::words(&text, question.tenant.as_deref())
            .map_err(|source| ExplainError::Malformed { address, source }),
        Output::Text => {
            words(&text, &question.since).map_err(|source| ExplainError::Malformed { address, source })
        }
    });
    match answered {
        Ok(text) => {
            println!("{}", text.trim_end());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cotenant: {}", crate::discovery::chain(&error));
            ExitCode::from(if matches!(error, ExplainError::Refused { .. }) { SENSELESS } else { UNASKED })
        }
    }
}

/// The agent's answer, and where it came from.
fn ask(question: &Question) -> Result<(String, String), ExplainError> {
    let address = if let Some(address) = &question.address {
        address.clone()
    } else {
        let overrides = Overrides { config: question.config.clone(), ..Overrides::default() };
        let config = config::load(&overrides).map_err(ExplainError::Config)?;
        reachable(config.server.listen).to_string()
    };
    let target = if question.quota {
        "/api/v1/risk".to_owned()
    } else {
        let mut target = format!("/api/v1/incidents?since={}", quoted(&question.since));
        if let Some(tenant) = &question.tenant {
            target = format!("{target}&tenant={}", quoted(tenant));
        }
        target
    };
    let told = question
        .access
        .get(&address, &target, LONGEST, PATIENCE)
        .map_err(|source| ExplainError::Unreachable { address: address.clone(), source })?;
    if let Some(remedy) = told.remedy() {
        return Err(ExplainError::Unadmitted { address, remedy });
    }
    let client::Told { status, text } = told;
    match status {
        200 => Ok((address, text)),
        400 => Err(ExplainError::Refused { address, reason: text.trim_end().to_owned() }),
        _ => Err(ExplainError::Status { address, status }),
    }
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

/// Newest last: that is where a terminal's reader is.
fn words(text: &str, since: &str) -> Result<String, serde_json::Error> {
    let answer: Answer = serde_json::from_str(text)?;
    if answer.incidents.is_empty() {
        return Ok(format!("no incidents in the last {since}"));
    }
    let told: Vec<String> = answer.incidents.iter().rev().map(|told| told.explanation.to_string()).collect();
    Ok(told.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_that_make_no_sense_are_told_what_would() {
        assert_eq!(duration("15m").as_deref(), Ok("15m"));
        assert!(duration("15").unwrap_err().contains("such as 15m"));
        for good in ["127.0.0.1:9468", "node-7.example:80", "[::1]:9468"] {
            assert_eq!(address(good).as_deref(), Ok(good));
        }
        for bad in
            ["9468", "http://node:80", "node:", "node:0", "node:99999", ":80", "a/b:80", "user@node:80"]
        {
            assert!(address(bad).unwrap_err().contains("HOST:PORT"), "{bad}");
        }
    }

    #[test]
    fn an_agent_that_listens_everywhere_is_asked_at_home() {
        let of = |text: &str| reachable(text.parse().expect("an address")).to_string();
        assert_eq!(of("0.0.0.0:1"), "127.0.0.1:1");
        assert_eq!(of("[::]:2"), "[::1]:2");
        assert_eq!(of("10.0.0.7:3"), "10.0.0.7:3");
    }

    #[test]
    fn the_newest_incident_is_the_last_one() {
        let one = |headline: &str| {
            format!(
                "{{\"id\":\"1-1\",\"explanation\":{{\"headline\":\"{headline}\",\"measured\":[],\"because\":[],\"advice\":[\"Go.\"]}}}}"
            )
        };
        let text = format!("{{\"incidents\":[{},{}]}}", one("second"), one("first"));
        let words = words(&text, "15m").expect("an answer");
        assert_eq!(words, "first\n\nWhat to do:\n  - Go.\n\nsecond\n\nWhat to do:\n  - Go.\n");
        assert_eq!(
            super::words("{\"incidents\":[]}", "2h").expect("an answer"),
            "no incidents in the last 2h"
        );
        assert!(super::words("{}", "2h").is_err());
    }
}
