//! Owns waiting: executable mappings and the ring's rare facts, in one poll.
//! Refuses to act on them.

use std::{os::fd::AsFd, time::Duration};

use aya::maps::{Map, MapData, RingBuf};
use cotenant_model::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    KernelError, LibraryId,
    perf::{Mapped, Record, Ring},
    reports::{Report, decode},
};

/// Something that happened on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A process mapped a file executable.
    Mapped {
        pid: u32,
        start: u64,
        end: u64,
        path: String,
    },
    /// Announcements were lost: look at every process.
    MappingsLost(u64),
    ProcessSeen {
        id: ProcessId,
        tgid: u32,
        cgroup_id: u64,
    },
    ProcessEnded {
        id: ProcessId,
        tgid: u32,
    },
    /// Two attached files are the same code underneath; the first may go.
    DuplicateLibrary {
        goes: LibraryId,
        stays: LibraryId,
    },
    Reported(Report),
}

pub struct Watcher {
    rings: Vec<Ring>,
    events: RingBuf<MapData>,
    /// CPUs whose mappings cannot be watched, with the first reason.
    pub blind: Option<KernelError>,
}

impl Watcher {
    pub(crate) fn open(events: Map) -> Result<Self, KernelError> {
        let name = "EVENTS";
        let events = RingBuf::try_from(events).map_err(|source| KernelError::Map { name, source })?;
        let mut rings = Vec::new();
        let mut blind = None;
        let cpus = aya::util::online_cpus().map_err(|(_, source)| KernelError::Wait(source))?;
        for cpu in cpus {
            match Ring::open(cpu) {
                Ok(ring) => rings.push(ring),
                Err(error) => {
                    blind.get_or_insert(error);
                }
            }
        }
        Ok(Self { rings, events, blind })
    }

    /// Waits until something happens or the time is over.
    pub fn wait(&mut self, timeout: Duration) -> Result<Vec<Happening>, KernelError> {
        let ring_fd = self.events.as_fd();
        let mut fds: Vec<_> =
            self.rings.iter().map(|ring| PollFd::from_borrowed_fd(ring.fd(), PollFlags::IN)).collect();
        fds.push(PollFd::from_borrowed_fd(ring_fd, PollFlags::IN));
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(KernelError::Wait(error.into())),
        }
        drop(fds);
        let mut happenings = Vec::new();
        for ring in &mut self.rings {
            ring.drain(|record| match record {
                Record::Mapped(Mapped { pid, start, end, path }) => {
                    happenings.push(Happening::Mapped { pid, start, end, path });
                }
                Record::Lost(count) => happenings.push(Happening::MappingsLost(count)),
                Record::Other => {}
            });
        }
        while let Some(item) = self.events.next() {
            happenings.extend(decode(&item));
        }
        Ok(happenings)
    }
}
