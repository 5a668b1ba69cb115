//! Owns the bytes of a recording: a head with a version, then blocks that each stand for themselves.
//! Refuses to guess: a block whose sum is wrong, and all after it, is not read.
//!
//! Head: 12 bytes of name, version as u32. Block: length and CRC-32 of the payload as u32, then the payload: zstd over
//! postcard of a [`Block`]. All little-endian. A recording that breaks off loses the block that was being written.
//!
//! The version is that of [`Moment`] alone. What a forecaster knew is of use to its like only: it has a version of its
//! own, and a recording whose beginning is another forecaster's is read from the first moment on.

mod replay;

use std::io::{self, Read};

use cotenant_model::risk::{Forecaster, HostMoment, KNOWLEDGE, Moment};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use replay::{ReplayError, Replayed, replay};

const NAME: [u8; 12] = *b"cotenant-rec";
/// Goes up with every change of [`Moment`]. 3 has host memory beside each moment; of 2 it is unknown.
const VERSION: u32 = 3;
const OLDEST: u32 = 2;
/// Fast, and moments are much alike: more effort wins little.
const LEVEL: i32 = 3;
/// No block is larger, packed or not: what says so is damaged or foreign.
const MOST: usize = 256 << 20;

#[derive(Debug)]
pub enum Block {
    /// What the forecaster knew when the recording began.
    Start(Box<Forecaster>),
    /// The same of a forecaster of another version: it begins anew.
    OtherStart {
        version: u32,
    },
    Moments(Vec<Moment>),
}

/// What a block is made from.
#[derive(Debug)]
pub enum Written<'a> {
    Start(&'a Forecaster),
    Moments(&'a [Moment]),
}

/// A block in the file.
#[derive(Debug, Deserialize)]
enum Stored {
    Start {
        version: u32,
        knowledge: Vec<u8>,
    },
    /// Up to version 2.
    Moments(Vec<Moment>),
    Whole(Vec<(Moment, Option<HostMoment>)>),
}

/// [`Stored`] as it is written.
#[derive(Debug, Serialize)]
enum Storing<'a> {
    Start {
        version: u32,
        knowledge: Vec<u8>,
    },
    #[allow(dead_code, reason = "keeps the next one's number")]
    Moments(&'a [Moment]),
    Whole(Vec<(&'a Moment, &'a Option<HostMoment>)>),
}

#[derive(Debug, Error)]
pub enum FormatError {
    #[error("this is no recording: it does not begin with one's name; make one with: cotenant record FILE")]
    Foreign,
    #[error(
        "this recording is of version {0}, and this program reads versions {OLDEST} to {VERSION}: use the cotenant it was made with"
    )]
    Version(u32),
    #[error(
        "it breaks off within a block: the agent or the recorder was stopped hard; what came before is whole"
    )]
    CutShort,
    #[error("a block is damaged (its sum is wrong); what came before is whole")]
    Damaged,
    #[error("a block cannot be unpacked")]
    Unpack(#[source] io::Error),
    #[error("a block cannot be understood")]
    Decode(#[source] postcard::Error),
    #[error("a block cannot be packed")]
    Pack(#[source] io::Error),
    #[error("a block cannot be written down")]
    Encode(#[source] postcard::Error),
    #[error("it cannot be read")]
    Read(#[source] io::Error),
}

/// The first bytes of every recording.
pub fn head() -> Vec<u8> {
    [&NAME[..], &VERSION.to_le_bytes()].concat()
}

/// A block with its length and sum.
pub fn pack(block: &Written<'_>) -> Result<Vec<u8>, FormatError> {
    let storing = match block {
        Written::Moments(moments) => {
            Storing::Whole(moments.iter().map(|moment| (moment, &moment.host)).collect())
        }
        Written::Start(forecaster) => Storing::Start {
            version: KNOWLEDGE,
            knowledge: postcard::to_stdvec(forecaster).map_err(FormatError::Encode)?,
        },
    };
    let plain = postcard::to_stdvec(&storing).map_err(FormatError::Encode)?;
    let payload = zstd::bulk::compress(&plain, LEVEL).map_err(FormatError::Pack)?;
    let length = u32::try_from(payload.len())
        .map_err(|_| FormatError::Pack(io::Error::other("a block of 4 GiB and more")))?;
    let sum = crc32fast::hash(&payload);
    Ok([&length.to_le_bytes()[..], &sum.to_le_bytes(), &payload].concat())
}

/// Blocks out of a reader, one by one. Ends after the first error.
pub struct Blocks<R> {
    from: R,
    ended: bool,
}

impl<R: Read> Blocks<R> {
    /// Reads the head.
    pub fn of(mut from: R) -> Result<Self, FormatError> {
        let mut head = [0; NAME.len() + 4];
        if fill(&mut from, &mut head)? < head.len() || head[..NAME.len()] != NAME {
            return Err(FormatError::Foreign);
        }
        let [.., a, b, c, d] = head;
        match u32::from_le_bytes([a, b, c, d]) {
            OLDEST..=VERSION => Ok(Self { from, ended: false }),
            other => Err(FormatError::Version(other)),
        }
    }

    fn block(&mut self) -> Result<Option<Block>, FormatError> {
        let mut frame = [0; 8];
        match fill(&mut self.from, &mut frame)? {
            0 => return Ok(None),
            8 => {}
            _ => return Err(FormatError::CutShort),
        }
        let [l0, l1, l2, l3, s0, s1, s2, s3] = frame;
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if length > MOST {
            return Err(FormatError::Damaged);
        }
        let mut payload = Vec::new();
        let read =
            (&mut self.from).take(length as u64).read_to_end(&mut payload).map_err(FormatError::Read)?;
        if read < length {
            return Err(FormatError::CutShort);
        }
        if crc32fast::hash(&payload) != u32::from_le_bytes([s0, s1, s2, s3]) {
            return Err(FormatError::Damaged);
        }
        let mut plain = Vec::new();
        zstd::Decoder::new(payload.as_slice())
            .and_then(|decoder| decoder.take(MOST as u64).read_to_end(&mut plain))
            .map_err(FormatError::Unpack)?;
        let block = match postcard::from_bytes(&plain).map_err(FormatError::Decode)? {
            Stored::Moments(moments) => Block::Moments(moments),
            Stored::Whole(moments) => {
                Block::Moments(moments.into_iter().map(|(moment, host)| Moment { host, ..moment }).collect())
            }
            Stored::Start { version: KNOWLEDGE, knowledge } => {
                Block::Start(Box::new(postcard::from_bytes(&knowledge).map_err(FormatError::Decode)?))
            }
            Stored::Start { version, .. } => Block::OtherStart { version },
        };
        Ok(Some(block))
    }
}

impl<R: Read> Iterator for Blocks<R> {
    type Item = Result<Block, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let block = self.block().transpose();
        self.ended = !matches!(block, Some(Ok(_)));
        block
    }
}

/// Reads until the buffer is full or the reader at its end.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> Result<usize, FormatError> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FormatError::Read(error)),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests;
