//! Owns the command line.
//! Refuses work: each command is a module of its own.

mod backtest;
mod budget;
mod client;
mod config;
mod control;
mod discovery;
mod doctor;
mod events;
mod explain;
mod features;
mod identify;
mod kubernetes;
#[cfg(test)]
mod layouts;
mod limits;
mod node;
mod notify;
mod paging;
mod papers;
mod pressure;
mod pulse;
mod record;
mod redact;
mod registry;
mod replay;
mod reports;
mod restraint;
mod rights;
mod run;
mod serve;
mod slurm;
mod snapshot;
mod stacks;
mod telemetry;
mod top;

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory, Parser, Subcommand};

/// Says who hurts whom on a shared GPU.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the agent: watch the CUDA driver on this node and serve what it sees.
    Run(config::Overrides),
    /// Say what this host lets the agent do, what is lost, and what helps.
    Doctor(doctor::Options),
    /// Say whose a process or a cgroup path is, and how that is known.
    Identify(identify::Asked),
    /// Say in words what happened: ask the agent that runs on this node.
    Explain(explain::Question),
    /// Show live who holds, churns and waits, and for whom: ask the agent that runs on this node.
    Top(top::Options),
    /// Record what the forecast of a running agent consumes, until interrupted.
    Record(record::Options),
    /// Run a recording through the forecast: one forecast a line.
    Replay(replay::Options),
    /// Score forecasts on recordings, beside the rules people alert on today.
    Backtest(backtest::Options),
    /// Let go of the GPU driver (NVML, every /dev/nvidia* handle), so that it can be replaced; allocations are counted on.
    Release(control::ReleaseOptions),
    /// Take up NVML again after a release.
    Resume(control::ResumeOptions),
    /// Ask the agent on this node through its socket whether it is well: 0 and `ok`, or 1 and what is wrong.
    Health(control::HealthOptions),
    /// Look at the configuration.
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Print completions for a shell; packages install them.
    #[command(hide = true)]
    Completions(papers::Completions),
    /// Write the manual pages into a directory; packages install them.
    #[command(hide = true)]
    Man(papers::Manual),
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a configuration file and say what is wrong with it, by line.
    Check { file: PathBuf },
    /// Print every key with its default, commented.
    Default,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Explain(question) => return explain::run(&question),
        Command::Doctor(options) => return doctor::run(&options),
        Command::Run(overrides) => config::load(&overrides).and_then(|config| run::run(&config)),
        Command::Identify(asked) => identify::identify(&asked),
        Command::Top(options) => top::top(&options),
        Command::Record(options) => record::record(&options),
        Command::Replay(options) => replay::replay(&options),
        Command::Backtest(options) => backtest::backtest(&options),
        Command::Release(options) => control::run(&control::Ask::Release(&options)),
        Command::Resume(options) => control::run(&control::Ask::Resume(&options)),
        Command::Health(options) => control::run(&control::Ask::Health(&options)),
        Command::Config { command: ConfigCommand::Check { file } } => config::read(&file)
            .and_then(|config| serve::Gate::check(&config.server.web_config))
            .map(|()| println!("{}: ok", file.display())),
        Command::Config { command: ConfigCommand::Default } => {
            print!("{}", config::COMMENTED);
            Ok(())
        }
        Command::Completions(asked) => {
            papers::completions(&asked, Arguments::command());
            Ok(())
        }
        Command::Man(asked) => papers::manual(&asked, Arguments::command()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cotenant: {}", redact::urls(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}
