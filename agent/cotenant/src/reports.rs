//! Owns reports on their way from the ring to the tick.
//! Refuses to grow: what a tick does not fetch in time is counted and dropped.

use cotenant_kernel::Report;
use cotenant_model::Tenant;

/// A report with what only a look at once can tell about the processes in it: they may be gone at the next tick.
#[derive(Debug)]
pub(crate) struct Reported {
    pub(crate) report: Report,
    /// For a kill: the victim's place in the unified hierarchy. Not its `/proc`, where one that is dying stands in the
    /// root of each hierarchy of version 1.
    pub(crate) cgroup: Option<String>,
    /// For a kill: who asked for the memory that was not there.
    pub(crate) trigger: Option<Tenant>,
}

/// A tick fetches once a second, a process reports a hundred times.
const ROOM: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Reports {
    waiting: Vec<Reported>,
    dropped: u64,
}

impl Reports {
    pub(crate) fn push(&mut self, report: Reported) {
        if self.waiting.len() < ROOM {
            self.waiting.push(report);
        } else {
            self.dropped += 1;
        }
    }

    /// Everything that has come since the last time.
    pub(crate) fn fetch(&mut self) -> Vec<Reported> {
        std::mem::take(&mut self.waiting)
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}
