//! Owns `cotenant doctor`: what this host allows, what is lost, and what helps, each in a line.
//! Refuses to change the host: what it tries is undone before it prints, and tracefs is mounted for itself alone.
//!
//! Facts, then what they mean, then printing. The words and rules are those that a running agent has (`features`).

mod ask;
mod bundle;
mod facts;
mod judge;
mod print;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, ValueEnum};
use cotenant_model::view::{Feature, FeatureState};

use crate::{
    client::Access,
    config::{self, Config, Overrides},
    features::{bad, ready},
    redact,
};

const EXIT_CODES: &str = "\
Exit code:
  0  everything is ok
  1  something is degraded, unsupported or broken, and attribution works
  2  attribution does not work, or the question could not be answered

Run it as the agent runs: what it may do is judged by what this process may do.";

#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Options {
    /// Lines for people, or JSON with the keys versions, verdict and checks
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
    /// Also write a support bundle to this file (tar.gz), which must not exist; secrets are left out
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// Configuration file [default: /etc/cotenant/cotenant.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The host as a directory [default: agent.root of the configuration]. One that was recorded elsewhere is judged by its
    /// files; nothing is tried
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
    #[command(flatten)]
    access: Access,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// What the checks come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Ok,
    Degraded,
    Broken,
}

impl Verdict {
    fn of(checks: &[Feature]) -> Self {
        // A running agent that has only lost something is degraded; one that is not ready is what people came for.
        let agent = |check: &Feature| check.name == "agent" && check.state == FeatureState::Broken;
        if !ready(checks) || checks.iter().any(agent) {
            Self::Broken
        } else if checks.iter().any(|check| bad(check.state)) {
            Self::Degraded
        } else {
            Self::Ok
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Broken => "broken",
        }
    }

    const fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Degraded => 1,
            Self::Broken => 2,
        }
    }
}

pub(crate) fn run(options: &Options) -> ExitCode {
    let overrides = Overrides { config: options.config.clone(), ..Overrides::default() };
    let (mut config, configuration) = match config::load(&overrides) {
        Ok(config) => (config, Ok(config::source(&overrides).map(|file| file.display().to_string()))),
        Err(error) => (Config::default(), Err(redact::urls(&format!("{error:#}")))),
    };
    if let Some(root) = &options.root {
        config.agent.root.clone_from(root);
    }
    let facts = facts::gather(&config, configuration, &options.access);
    let checks = judge::judge(&facts);
    let verdict = Verdict::of(&checks);
    match options.output {
        Output::Text => print!("{}", print::text(&checks, verdict)),
        Output::Json => println!("{}", print::json(&facts, &checks, verdict)),
    }
    if let Some(path) = &options.bundle {
        match bundle::write(path, &facts, &print::json(&facts, &checks, verdict), &overrides, &options.access)
        {
            Ok(entries) => eprint!("{}: {entries}", path.display()),
            Err(error) => {
                eprintln!("cotenant: {error:#}");
                return ExitCode::from(Verdict::Broken.code());
            }
        }
    }
    ExitCode::from(verdict.code())
}

#[cfg(test)]
mod tests;
