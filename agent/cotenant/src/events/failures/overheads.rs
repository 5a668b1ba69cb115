//! Owns how much of a GPU no ledger holds: contexts, modules, processes that nobody traced.
//! Refuses a poll beside a ledger that moved, as long as there are calmer ones.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use cotenant_model::{
    DeviceSample, GpuId,
    sample::{GpuRef, KernelSample},
};

/// Polls from which it is told while the ledger moves.
const POLLS: usize = 9;

#[derive(Default)]
pub(super) struct Overheads {
    /// Bytes outside the ledger, poll by poll. A poll and a reading of the ledger are up to a tick apart, and a burst
    /// between them is no overhead: the median says what stays.
    polls: BTreeMap<GpuId, VecDeque<u64>>,
    ledger: BTreeMap<GpuId, Reading>,
    taken: Option<Duration>,
}

/// The ledger of one GPU.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Reading {
    live: u64,
    /// Bytes that came and went: what is the same after a burst that is over has not moved.
    moved: u64,
}

impl Overheads {
    pub(super) fn learn(&mut self, device: &DeviceSample, kernel: &KernelSample) {
        let before = std::mem::replace(&mut self.ledger, read(kernel));
        if self.taken == Some(device.taken) {
            return;
        }
        self.taken = Some(device.taken);
        self.polls.retain(|gpu, _| device.gpus.iter().any(|known| known.id == *gpu));
        for gpu in &device.gpus {
            let Ok(memory) = gpu.memory else { continue };
            let now = self.ledger.get(&gpu.id).copied().unwrap_or_default();
            let polls = self.polls.entry(gpu.id.clone()).or_default();
            let calm = before.get(&gpu.id).copied().unwrap_or_default() == now;
            put(polls, memory.total.saturating_sub(memory.free).saturating_sub(now.live), calm);
        }
    }

    pub(super) fn of(&self, gpu: &GpuId) -> Option<u64> {
        median(self.polls.get(gpu)?)
    }
}

/// `calm`: the ledger stood still around this poll, so that what was told before is older and no better.
fn put(polls: &mut VecDeque<u64>, outside: u64, calm: bool) {
    if calm {
        polls.clear();
    }
    polls.push_back(outside);
    if polls.len() > POLLS {
        polls.pop_front();
    }
}

fn median(polls: &VecDeque<u64>) -> Option<u64> {
    let mut polls: Vec<u64> = polls.iter().copied().collect();
    polls.sort_unstable();
    polls.get(polls.len() / 2).copied()
}

fn read(kernel: &KernelSample) -> BTreeMap<GpuId, Reading> {
    let mut readings: BTreeMap<GpuId, Reading> = BTreeMap::new();
    for row in kernel
        .processes
        .iter()
        .filter(|process| process.ended.is_none())
        .flat_map(|process| &process.ledger)
        .filter(|row| row.kind.is_device())
    {
        if let GpuRef::Known(gpu) = &row.gpu {
            let reading = readings.entry(gpu.clone()).or_default();
            reading.live += row.live;
            reading.moved += row.allocated + row.freed;
        }
    }
    readings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_at_a_poll_is_no_overhead_and_a_calm_poll_is_believed_at_once() {
        let mut polls = VecDeque::new();
        assert_eq!(median(&polls), None, "unknown is not zero");
        for outside in [500, 500, 30_000, 500, 30_000] {
            put(&mut polls, outside, false);
        }
        assert_eq!(median(&polls), Some(500));
        put(&mut polls, 900, true);
        assert_eq!(median(&polls), Some(900));
        (0..20).for_each(|_| put(&mut polls, 700, false));
        assert_eq!((polls.len(), median(&polls)), (POLLS, Some(700)));
    }
}
