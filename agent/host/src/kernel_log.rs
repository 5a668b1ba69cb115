//! Owns the kernel's log as records: who wrote each, and how many were overwritten before they were read.
//! Refuses what user space wrote: anybody who may open `/dev/kmsg` can write a kill or a fault there, but not as the kernel.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::Host;

mod notice;
mod ring;

pub use notice::Notice;
use ring::Ring;

/// One read of `/dev/kmsg` is one record with its dictionary; the kernel never makes one longer than this
/// (`PRINTK_MESSAGE_MAX`, `CONSOLE_EXT_LOG_MAX`).
const LONGEST: usize = 8192;

#[derive(Debug, thiserror::Error)]
pub enum KernelLogError {
    #[error(
        "could not open {}; run as root (CAP_SYSLOG where kernel.dmesg_restrict is 1) and mount the host's /dev/kmsg",
        path.display()
    )]
    Open { path: PathBuf, source: io::Error },
    #[error("could not go to the end of {}; start from its beginning instead", path.display())]
    Seek { path: PathBuf, source: io::Error },
    #[error("syslog(2) does not give the kernel's log either")]
    Syslog { source: io::Error },
    #[error("could not read {}; the log is not followed any more, restart the agent to try again", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// Where to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// With what the kernel still has.
    Beginning,
    /// With what comes.
    End,
}

/// One record: `prio,seq,usec,flags;text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// 0 is the kernel itself. It gives user space's writes 1 or more, whatever they ask for (`devkmsg_write`).
    pub facility: u32,
    pub level: u8,
    pub sequence: u64,
    /// Since boot, on the scheduler's clock: it drifts from the monotonic one by up to a second a day, so what has to
    /// meet other events uses the time at which the record was read.
    pub usec: u64,
    /// As the kernel escapes it: bytes that are not printable, and `\`, are `\xNN`.
    pub text: String,
}

impl Record {
    /// Pure over one line without its end; `None` for a dictionary's line or another format.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let line = str::from_utf8(line).ok()?;
        let (prefix, text) = line.split_once(';')?;
        let mut fields = prefix.split(',');
        let mut number = || fields.next()?.parse::<u64>().ok();
        let (priority, sequence, usec) = (number()?, number()?, number()?);
        Some(Self {
            facility: u32::try_from(priority >> 3).ok()?,
            level: (priority & 7) as u8,
            sequence,
            usec,
            text: text.to_owned(),
        })
    }

    /// What the record says that this agent wants to know; only the kernel's own word counts. `time_ns` is monotonic,
    /// when the record was read.
    pub fn notice(&self, time_ns: u64) -> Option<Notice> {
        (self.facility == 0).then(|| Notice::parse(&self.text, time_ns)).flatten()
    }
}

/// A log that is followed. Never waits.
#[derive(Debug)]
pub struct KernelLog<R = File> {
    path: PathBuf,
    source: R,
    chunk: Box<[u8]>,
    /// The beginning of a line that is not whole yet: a pipe or a file cuts where it likes.
    pending: Vec<u8>,
    /// The line being read is too long.
    skipping: bool,
    next: Option<u64>,
    overrun: bool,
    lost: u64,
    malformed: u64,
}

/// A log that is followed, by whatever way it is read.
pub type Followed = KernelLog<Box<dyn Read + Send>>;

impl Host {
    pub fn kernel_log(&self, start: Start) -> Result<KernelLog, KernelLogError> {
        KernelLog::open(&self.path("dev/kmsg"), start)
    }
}

impl KernelLog {
    /// `/dev/kmsg`, or a file or pipe in its format.
    pub fn open(path: &Path, start: Start) -> Result<Self, KernelLogError> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let source = fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(path)
            .map_err(|source| KernelLogError::Open { path: path.to_owned(), source })?;
        if start == Start::End {
            match rustix::fs::seek(&source, rustix::fs::SeekFrom::End(0)) {
                // A pipe has nothing but what comes.
                Ok(_) | Err(rustix::io::Errno::SPIPE) => {}
                Err(error) => {
                    return Err(KernelLogError::Seek { path: path.to_owned(), source: error.into() });
                }
            }
        }
        Ok(Self::over(path, source))
    }

    /// As one among others.
    pub fn followed(self) -> Followed {
        Followed::over(&self.path.clone(), Box::new(self.source))
    }
}

impl Followed {
    /// By `syslog(2)`, where `/dev/kmsg` may not be opened: `tell` fills a buffer with the log's last lines and takes nothing
    /// away, `size` bytes are what the kernel keeps. What is there already is not read.
    pub fn by_syslog(
        tell: impl FnMut(&mut [u8]) -> io::Result<usize> + Send + 'static,
        size: usize,
    ) -> Result<Self, KernelLogError> {
        let mut ring = Ring::new(tell, size);
        ring.skip().map_err(|source| KernelLogError::Syslog { source })?;
        Ok(Self::over(Path::new("syslog(2)"), Box::new(ring)))
    }
}

impl AsFd for KernelLog {
    /// To wait for the next record with `poll`.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.source.as_fd()
    }
}

impl<R: Read> KernelLog<R> {
    fn over(path: &Path, source: R) -> Self {
        Self {
            path: path.to_owned(),
            source,
            chunk: vec![0; LONGEST].into(),
            pending: Vec::new(),
            skipping: false,
            next: None,
            overrun: false,
            lost: 0,
            malformed: 0,
        }
    }

    /// The records that are there, in order, about `most` of them; the rest is for the next call.
    pub fn read(&mut self, most: usize) -> Result<Vec<Record>, KernelLogError> {
        let mut records = Vec::new();
        while records.len() < most {
            match self.source.read(&mut self.chunk) {
                Ok(0) => break,
                Ok(length) => self.lines(length, &mut records),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => break,
                    ErrorKind::Interrupted => {}
                    // Overwritten before it was read; the next read goes on with the oldest record that is left.
                    ErrorKind::BrokenPipe => self.overrun = true,
                    _ => return Err(KernelLogError::Read { path: self.path.clone(), source: error }),
                },
            }
        }
        Ok(records)
    }

    /// Records that were overwritten before they were read. Where the first one read was already late, a lower bound.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Lines in another format, or longer than the kernel writes.
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    fn lines(&mut self, length: usize, records: &mut Vec<Record>) {
        let mut rest = &self.chunk[..length];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.pending.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            let line = std::mem::take(&mut self.pending);
            // A dictionary (` SUBSYSTEM=pci`) goes with the record before it.
            if std::mem::take(&mut self.skipping) || line.is_empty() || line[0] == b' ' {
                continue;
            }
            let record = if line.len() > LONGEST { None } else { Record::parse(&line) };
            let Some(record) = record else {
                self.malformed += 1;
                continue;
            };
            if std::mem::take(&mut self.overrun) {
                let gap = self.next.map_or(1, |next| record.sequence.saturating_sub(next).max(1));
                self.lost = self.lost.saturating_add(gap);
            }
            self.next = record.sequence.checked_add(1);
            records.push(record);
        }
        self.pending.extend_from_slice(rest);
        if self.pending.len() > LONGEST {
            self.pending.clear();
            self.malformed += u64::from(!self.skipping);
            self.skipping = true;
        }
    }
}

#[cfg(test)]
mod tests;
