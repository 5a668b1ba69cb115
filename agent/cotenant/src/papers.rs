//! Owns what packages carry beside the program: its completions and manual pages, from the command line itself.
//! Refuses a second description of any flag.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;

#[derive(Args, Debug)]
pub(crate) struct Completions {
    /// The shell to write them for, to standard output.
    shell: Shell,
}

#[derive(Args, Debug)]
pub(crate) struct Manual {
    /// Where the pages go: cotenant.1, cotenant-run.1 and so on.
    directory: PathBuf,
}

pub(crate) fn completions(asked: &Completions, mut command: Command) {
    clap_complete::generate(asked.shell, &mut command, "cotenant", &mut std::io::stdout());
}

pub(crate) fn manual(asked: &Manual, command: Command) -> Result<()> {
    let directory = &asked.directory;
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    clap_mangen::generate_to(command.disable_help_subcommand(true), directory)
        .with_context(|| format!("cannot write the manual into {}", directory.display()))
}
