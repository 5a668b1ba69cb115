//! Owns a recording's way through a forecaster: read, forecast and written on three threads, one line a moment.
//! Refuses to drop what was whole: a broken recording is replayed up to its break, and then said to be broken.

use std::io::{self, BufWriter, Read, Write};
use std::sync::mpsc::{Receiver, sync_channel};

use cotenant_model::risk::{Forecast, Forecaster};
use thiserror::Error;

use crate::{Block, Blocks, FormatError};

/// Blocks of ten moments, and forecasts, that one thread may be ahead of the next.
const BLOCKS: usize = 4;
const FORECASTS: usize = 64;
const BUFFER: usize = 256 << 10;

/// What was in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    pub moments: u64,
    /// It was recorded from a forecaster of this version, another one: the replay began anew.
    pub other_start: Option<u32>,
}

#[derive(Debug, Error)]
pub enum ReplayError {
    #[error("after {moments} moments")]
    Format { moments: u64, source: FormatError },
    #[error("cannot print")]
    Print(#[source] io::Error),
}

/// Writes one forecast a line, as the agent that was recorded had them.
///
/// # Errors
/// When it breaks off, or nobody takes the lines.
pub fn replay(blocks: Blocks<impl Read + Send>, to: impl Write) -> Result<Replayed, ReplayError> {
    let (read_to, read) = sync_channel::<Block>(BLOCKS);
    let (said_to, said) = sync_channel::<Forecast>(FORECASTS);
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut done = Replayed::default();
            for block in blocks {
                let block = block.map_err(|source| ReplayError::Format { moments: done.moments, source })?;
                match &block {
                    Block::Moments(moments) => done.moments += moments.len() as u64,
                    Block::OtherStart { version } => done.other_start = Some(*version),
                    Block::Start(_) => {}
                }
                // Nobody takes it: the lines could not be written, and that is said by whom it befell.
                if read_to.send(block).is_err() {
                    break;
                }
            }
            Ok(done)
        });
        scope.spawn(move || {
            let mut forecaster = Forecaster::default();
            for block in read {
                match block {
                    Block::Start(start) => forecaster = *start,
                    Block::OtherStart { .. } => {}
                    Block::Moments(moments) => {
                        for moment in &moments {
                            if said_to.send(forecaster.advance(moment)).is_err() {
                                return;
                            }
                        }
                    }
                }
            }
        });
        let printed = print(said, to).map_err(ReplayError::Print);
        let done = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        printed.and(done)
    })
}

fn print(said: Receiver<Forecast>, to: impl Write) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER, to);
    for forecast in said {
        serde_json::to_writer(&mut out, &forecast)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}
