//! Owns reading waits, blame and effort, and the kernel stacks they refer to.
//! Refuses classes: frames go out as addresses, each stack once.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use aya::maps::{MapData, StackTraceMap};
use cotenant_abi::{
    Blame, BlameKey, Effort, EffortKey, Latency, Operation, Thread, WAKER_DEVICE, WAKER_KERNEL,
    WAKER_PROCESS, Wait, WaitKey,
};
use cotenant_model::{
    ProcessId,
    sample::{
        BlameRow, EffortRow, Histogram, LockMode, MapFill, ProcessSample, StackId, StallRow, WaitRow, Waker,
    },
};

use crate::{
    KernelError,
    maps::{Table, take},
};

/// Nanoseconds from which on a wait that goes on is reported.
const STALLED: u64 = 1_000_000_000;

/// Return addresses, innermost first.
pub(crate) type NewStacks = BTreeMap<StackId, Vec<u64>>;

/// The maps of the scheduler hooks.
pub(crate) struct Waits {
    places: Table<WaitKey, Latency>,
    blame: Table<BlameKey, Blame>,
    effort: Table<EffortKey, Effort>,
    threads: Table<u32, Thread>,
    stacks: StackTraceMap<MapData>,
    known: BTreeSet<StackId>,
    /// Ended before the last read: nobody is blamed on their account any more.
    ended: BTreeSet<u64>,
}

impl Waits {
    pub(crate) fn take(
        ebpf: &mut aya::Ebpf,
        entries: &BTreeMap<&'static str, u32>,
    ) -> Result<Self, KernelError> {
        let size = |name| entries.get(name).copied().unwrap_or(0);
        let name = "STACKS";
        let stacks =
            StackTraceMap::try_from(take(ebpf, name)?).map_err(|source| KernelError::Map { name, source })?;
        Ok(Self {
            places: Table::take(ebpf, "WAITS", size("WAITS"))?,
            blame: Table::take(ebpf, "BLAME", size("BLAME"))?,
            effort: Table::take(ebpf, "EFFORT", size("EFFORT"))?,
            threads: Table::take(ebpf, "THREADS", size("THREADS"))?,
            stacks,
            known: BTreeSet::new(),
            ended: BTreeSet::new(),
        })
    }

    /// Adds every row to its process. Gives the stacks that were not given before, and how full the maps are.
    pub(crate) fn read(
        &mut self,
        samples: &mut BTreeMap<u64, ProcessSample>,
    ) -> Result<(NewStacks, [MapFill; 3]), KernelError> {
        let (waits, blame, effort) = (self.places.rows()?, self.blame.rows()?, self.effort.rows()?);
        let mut stacks = BTreeMap::new();
        for (key, value) in &waits {
            let stack = StackId::new(key.stack);
            if let Some(stack) = stack
                && self.known.insert(stack)
            {
                // Its row may be gone again only if the map was cleared: then the stack stays nameless.
                stacks.insert(stack, self.frames(stack).unwrap_or_default());
            }
            if let Some(sample) = samples.get_mut(&key.process) {
                let histogram = Histogram { count: value.count, sum_ns: value.sum, buckets: value.buckets };
                sample.waits.push(WaitRow { stack, mode: LockMode::from_flags(key.mode), histogram });
            }
        }
        for (key, value) in &blame {
            if let Some(sample) = samples.get_mut(&key.victim) {
                let waker = match key.waker {
                    WAKER_PROCESS if key.culprit != 0 => Waker::Process(ProcessId(key.culprit)),
                    WAKER_DEVICE => Waker::Device,
                    WAKER_KERNEL => Waker::Kernel,
                    _ => Waker::Unseen,
                };
                let stack = StackId::new(key.stack);
                sample.blame.push(BlameRow { waker, stack, waits: value.waits, time_ns: value.time });
            }
        }
        for (key, value) in &effort {
            let Some(operation) = Operation::from_tag(key.operation) else { continue };
            if let Some(sample) = samples.get_mut(&key.process) {
                sample.effort.push(EffortRow {
                    operation,
                    size_bits: key.size_bits,
                    solo_calls: value.solo_calls,
                    solo_ns: value.solo_time,
                    shared_calls: value.shared_calls,
                    shared_ns: value.shared_time,
                });
            }
        }
        let fill = |name, entries: usize, capacity| MapFill { name, entries: entries as u64, capacity };
        let fills = [
            fill(self.places.name(), waits.len(), self.places.capacity()),
            fill(self.blame.name(), blame.len(), self.blame.capacity()),
            fill(self.effort.name(), effort.len(), self.effort.capacity()),
        ];
        Ok((stacks, fills))
    }

    /// Threads that have been blocked for [`STALLED`] or longer, and the processes of the others while there is one.
    pub(crate) fn stalls(&self) -> Result<(Vec<StallRow>, BTreeSet<ProcessId>), KernelError> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now =
            Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
        let now = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        let (mut stalls, mut at_work) = (Vec::new(), BTreeSet::new());
        for (_, thread) in self.threads.rows()?.iter().filter(|(_, thread)| thread.depth > 0) {
            let Wait { blocked_at, woken_at, stack, .. } = thread.wait;
            let process = ProcessId(thread.process);
            let blocked_ns = now.saturating_sub(blocked_at);
            if blocked_at != 0 && woken_at == 0 && blocked_ns >= STALLED {
                stalls.push(StallRow { process, stack: StackId::new(stack), blocked_ns });
            } else {
                at_work.insert(process);
            }
        }
        if stalls.is_empty() {
            at_work.clear();
        }
        Ok((stalls, at_work))
    }

    /// Innermost first.
    fn frames(&self, stack: StackId) -> Option<Vec<u64>> {
        let trace = self.stacks.get(&stack.0, 0).ok()?;
        Some(trace.frames().iter().map(|frame| frame.ip).take_while(|ip| *ip != 0).collect())
    }

    /// Forgets ended victims at once, and ended culprits when no reading can be missing any more.
    pub(crate) fn retire(&mut self, ended: &BTreeSet<ProcessId>) -> Result<(), KernelError> {
        if ended.is_empty() && self.ended.is_empty() {
            return Ok(());
        }
        let gone = |process: u64| ended.contains(&ProcessId(process));
        let before = std::mem::replace(&mut self.ended, ended.iter().map(|id| id.0).collect());
        self.blame.retain(|key, _| !gone(key.victim) && !before.contains(&key.culprit))?;
        if !ended.is_empty() {
            self.places.retain(|key, _| !gone(key.process))?;
            self.effort.retain(|key, _| !gone(key.process))?;
        }
        Ok(())
    }
}
