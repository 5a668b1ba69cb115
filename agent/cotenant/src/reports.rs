//! Owns reports on their way from the ring to the tick.
//! Refuses to grow: what a tick does not fetch in time is counted and dropped.

use cotenant_kernel::Report;

/// A tick fetches once a second, a process reports a hundred times.
const ROOM: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Reports {
    waiting: Vec<Report>,
    dropped: u64,
}

impl Reports {
    pub(crate) fn push(&mut self, report: Report) {
        if self.waiting.len() < ROOM {
            self.waiting.push(report);
        } else {
            self.dropped += 1;
        }
    }

    /// Everything that has come since the last time.
    pub(crate) fn fetch(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.waiting)
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}
