//! Owns `cotenant replay`: a recording through the same forecaster, as fast as it goes.
//! Refuses to drop what was whole: a broken file is replayed up to the break, and then said to be broken.

use std::{
    fs::File,
    io::{self, BufReader, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::Args;
use cotenant_model::risk::{Forecaster, Moment};
use cotenant_recording::{Block, Blocks};
use tracing::warn;

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Recording to read
    file: PathBuf,
}

/// Prints one forecast a line, as `/api/v1/risk` had them.
pub(crate) fn replay(options: &Options) -> Result<()> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut forecaster = Forecaster::default();
    let read = each(&options.file, |part| match part {
        Part::Start(start) => {
            forecaster = *start;
            Ok(())
        }
        Part::Moment(moment) => {
            serde_json::to_writer(&mut out, &forecaster.advance(&moment)).context("cannot print")?;
            writeln!(out).context("cannot print")
        }
    });
    out.flush().context("cannot print")?;
    read
}

pub(crate) enum Part {
    Start(Box<Forecaster>),
    Moment(Moment),
}

/// Gives every whole part of a recording, then what is wrong with the file, if anything.
pub(crate) fn each(path: &Path, mut take: impl FnMut(Part) -> Result<()>) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let blocks = Blocks::of(BufReader::new(file)).with_context(|| path.display().to_string())?;
    let mut moments = 0u64;
    for block in blocks {
        match block.with_context(|| format!("{}, after {moments} moments", path.display()))? {
            Block::Start(start) => take(Part::Start(start))?,
            Block::OtherStart { version } => {
                warn!(
                    version,
                    "the forecaster that this was recorded from was of another version: it begins anew"
                );
            }
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
