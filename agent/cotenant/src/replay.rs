//! Owns `cotenant replay`: a recording through the same forecaster, as fast as it goes.
//! Refuses to drop what was whole: a broken file is replayed up to the break, and then said to be broken.

use std::{
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use cotenant_model::risk::{Forecaster, Moment};
use cotenant_recording::{Block, Blocks, ReplayError};
use tracing::warn;

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Recording to read
    file: PathBuf,
}

/// Prints one forecast a line, as `/api/v1/risk` had them.
pub(crate) fn replay(options: &Options) -> Result<()> {
    match cotenant_recording::replay(open(&options.file)?, io::stdout()) {
        Ok(done) => {
            done.other_start.into_iter().for_each(tell_other);
            Ok(())
        }
        // Whoever took the lines has enough of them.
        Err(ReplayError::Print(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(error).with_context(|| options.file.display().to_string()),
    }
}

fn open(path: &Path) -> Result<Blocks<BufReader<File>>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Blocks::of(BufReader::new(file)).with_context(|| path.display().to_string())
}

fn tell_other(version: u32) {
    warn!(version, "the forecaster that this was recorded from was of another version: it begins anew");
}

pub(crate) enum Part {
    Start(Box<Forecaster>),
    Moment(Moment),
}

/// Gives every whole part of a recording, then what is wrong with the file, if anything.
pub(crate) fn each(path: &Path, mut take: impl FnMut(Part) -> Result<()>) -> Result<()> {
    let mut moments = 0u64;
    for block in open(path)? {
        match block.with_context(|| format!("{}, after {moments} moments", path.display()))? {
            Block::Start(start) => take(Part::Start(start))?,
            Block::OtherStart { version } => tell_other(version),
            Block::Moments(some) => {
                for moment in some {
                    moments += 1;
                    take(Part::Moment(moment))?;
                }
            }
        }
    }
    Ok(())
}
