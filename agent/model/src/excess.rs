//! Owns the estimate of what contention costs without blocking: spinning on the driver's locks, cold caches.
//! Refuses to add it to measured waits: it is an estimate, with its own name.
//!
//! Of each call, only its time on the CPU counts here. Calls that nobody disturbed give the baseline of that process,
//! operation and size (sizes of as many bits); what the others took beyond it is the excess. Disturbed: a call of
//! another process overlapped, or a process in no traced call had what one waited for a moment before (NVML's callers).
//! Without [`ENOUGH`] calls of its own the baseline is that of all processes of the host; without those either, there
//! is no estimate, and the calls are counted as such.

use std::collections::BTreeMap;

use crate::{
    Operation,
    sample::{EffortRow, KernelSample},
};

/// Calls that make a baseline.
pub const ENOUGH: u64 = 16;

/// The excess of some calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Excess {
    pub time_ns: u64,
    /// Overlapped calls that it was estimated from.
    pub calls: u64,
    /// Overlapped calls without a baseline: their excess is unknown.
    pub unjudged: u64,
}

impl Excess {
    pub fn add(&mut self, more: Self) {
        self.time_ns += more.time_ns;
        self.calls += more.calls;
        self.unjudged += more.unjudged;
    }
}

/// What calls take on this host when nobody disturbs them.
#[derive(Clone, Debug, Default)]
pub struct Baselines(BTreeMap<(Operation, u8), (u64, u64)>);

impl Baselines {
    /// Of every process in the sample; what ended processes showed stays until the sample drops them.
    pub fn of(kernel: &KernelSample) -> Self {
        let mut all = BTreeMap::new();
        for row in kernel.processes.iter().flat_map(|process| &process.effort) {
            let (calls, time) = all.entry((row.operation, row.size_bits)).or_insert((0, 0));
            *calls += row.solo_calls;
            *time += row.solo_ns;
        }
        Self(all)
    }

    fn mean(&self, row: &EffortRow) -> Option<f64> {
        let host = self.0.get(&(row.operation, row.size_bits)).copied();
        [Some((row.solo_calls, row.solo_ns)), host]
            .into_iter()
            .flatten()
            .find(|(calls, _)| *calls >= ENOUGH)
            .map(|(calls, time)| time as f64 / calls as f64)
    }

    /// The excess of one process's calls since it began.
    pub fn excess(&self, rows: &[EffortRow]) -> Excess {
        let mut excess = Excess::default();
        for row in rows.iter().filter(|row| row.shared_calls > 0) {
            let Some(mean) = self.mean(row) else {
                excess.unjudged += row.shared_calls;
                continue;
            };
            excess.calls += row.shared_calls;
            let beyond = row.shared_ns as f64 - mean * row.shared_calls as f64;
            // A mean over fewer calls than there were may lie above them: that is no negative contention.
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "finite, and not below 0"
            )]
            let beyond = beyond.max(0.0) as u64;
            excess.time_ns += beyond;
        }
        excess
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::process;

    fn row(solo: (u64, u64), shared: (u64, u64)) -> EffortRow {
        EffortRow {
            operation: Operation::MemAlloc,
            size_bits: 22,
            solo_calls: solo.0,
            solo_ns: solo.1,
            shared_calls: shared.0,
            shared_ns: shared.1,
        }
    }

    #[test]
    fn what_overlapped_calls_take_beyond_the_baseline_is_excess() {
        let excess = Baselines::default().excess(&[row((100, 7_000_000), (50, 7_000_000))]);
        assert_eq!(excess, Excess { time_ns: 3_500_000, calls: 50, unjudged: 0 });
    }

    #[test]
    fn without_a_baseline_the_excess_is_unknown_not_zero() {
        let excess = Baselines::default().excess(&[row((ENOUGH - 1, 1), (50, 7_000_000))]);
        assert_eq!(excess, Excess { time_ns: 0, calls: 0, unjudged: 50 });
    }

    #[test]
    fn a_newcomer_is_judged_by_what_the_host_has_shown() {
        let mut veteran = process(1);
        veteran.effort.push(row((ENOUGH, ENOUGH * 100), (0, 0)));
        let host = Baselines::of(&KernelSample { processes: vec![veteran], ..KernelSample::default() });
        assert_eq!(host.excess(&[row((0, 0), (10, 3000))]).time_ns, 2000);
    }

    #[test]
    fn faster_than_the_baseline_is_no_negative_contention() {
        assert_eq!(Baselines::default().excess(&[row((20, 2000), (20, 1000))]).time_ns, 0);
    }
}
