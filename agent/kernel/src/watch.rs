//! Owns waiting: executable mappings and the ring's rare facts, in one poll.
//! Refuses to act on them.

use std::{os::fd::AsFd, time::Duration};

use aya::maps::{Map, MapData, RingBuf};
use cotenant_abi::{EVENT_DUPLICATE_LIBRARY, EVENT_PROCESS_ENDED, EVENT_PROCESS_SEEN, Event};
use cotenant_model::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    KernelError, LibraryId,
    perf::{Mapped, Record, Ring},
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

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Reads one record of the ring; an unknown tag is nothing.
fn decode(bytes: &[u8]) -> Option<Happening> {
    if bytes.len() < size_of::<Event>() {
        return None;
    }
    let tgid = u32::from_ne_bytes(field(bytes, 4)?);
    let id = ProcessId(u64::from_ne_bytes(field(bytes, 8)?));
    match u32::from_ne_bytes(field(bytes, 0)?) {
        EVENT_PROCESS_SEEN => {
            Some(Happening::ProcessSeen { id, tgid, cgroup_id: u64::from_ne_bytes(field(bytes, 24)?) })
        }
        EVENT_PROCESS_ENDED => Some(Happening::ProcessEnded { id, tgid }),
        EVENT_DUPLICATE_LIBRARY => Some(Happening::DuplicateLibrary {
            goes: LibraryId(u32::from_ne_bytes(field(bytes, 32)?)),
            stays: LibraryId(u32::from_ne_bytes(field(bytes, 36)?)),
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(tag: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(tag.to_ne_bytes());
        bytes.extend(7u32.to_ne_bytes());
        bytes.extend(8u64.to_ne_bytes());
        bytes.extend(9u64.to_ne_bytes());
        bytes.extend(10u64.to_ne_bytes());
        bytes.extend(11u32.to_ne_bytes());
        bytes.extend(12u32.to_ne_bytes());
        bytes
    }

    #[test]
    fn every_tag_decodes_and_others_are_nothing() {
        let seen = Happening::ProcessSeen { id: ProcessId(8), tgid: 7, cgroup_id: 10 };
        assert_eq!(decode(&event(EVENT_PROCESS_SEEN)), Some(seen));
        let ended = Happening::ProcessEnded { id: ProcessId(8), tgid: 7 };
        assert_eq!(decode(&event(EVENT_PROCESS_ENDED)), Some(ended));
        let duplicate = Happening::DuplicateLibrary { goes: LibraryId(11), stays: LibraryId(12) };
        assert_eq!(decode(&event(EVENT_DUPLICATE_LIBRARY)), Some(duplicate));
        assert_eq!(decode(&event(99)), None);
        assert_eq!(decode(&event(EVENT_PROCESS_SEEN)[..39]), None);
    }
}
