//! Owns the fold from single failures to records: a storm of equal failures is one record with a count.
//! Refuses growth: a fixed number of open records, the rest counted.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Ask, Because, Verdict, VerdictKind, judge};
use crate::{CudaError, GpuId, Operation, ProcessId, Tenant};

/// What makes failures equal.
type Key = (Tenant, Option<GpuId>, Operation, u32);

/// When records open, close and are given up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fold {
    /// A failure this long after the last one is a new record.
    pub gap_seconds: f64,
    /// A success of the same size this soon after the last failure is a near miss.
    pub retry_seconds: f64,
    pub capacity: usize,
}

impl Default for Fold {
    fn default() -> Self {
        Self { gap_seconds: 10.0, retry_seconds: 2.0, capacity: 1024 }
    }
}

/// The same size was granted after it had been refused.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NearMiss {
    /// From the last refusal to the grant.
    pub after_seconds: f64,
    /// What the process freed in between. `None`: not known.
    pub freed: Option<u64>,
}

/// A granted ask, told because the same tenant was refused shortly before.
#[derive(Clone, Debug, PartialEq)]
pub struct Success {
    pub at_unix: f64,
    pub tenant: Tenant,
    pub process: ProcessId,
    pub gpu: Option<GpuId>,
    pub operation: Operation,
    pub bytes: u64,
    /// What the process freed since the refusal. `None`: not known.
    pub freed: Option<u64>,
}

/// Equal failures of one tenant, folded.
#[derive(Clone, Debug, PartialEq)]
pub struct FailureRecord {
    /// Never reused while the agent lives.
    pub id: u64,
    pub tenant: Tenant,
    /// `None` for host memory, and where it is not known.
    pub gpu: Option<GpuId>,
    pub operation: Operation,
    pub error: CudaError,
    pub count: u64,
    pub first_unix: f64,
    pub last_unix: f64,
    /// Of the asks whose size is known; `None` when no size is.
    pub sizes: Option<Sizes>,
    /// The most certain verdict of the storm; of equals the first.
    pub verdict: Verdict,
    /// How often a refusal was followed by a grant of the same size.
    pub near_misses: u64,
    /// Refusals that the same process made good by such a grant.
    pub made_good: u64,
    /// No refusal came after the last grant: the program went on.
    pub recovered: bool,
}

/// Asked bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sizes {
    pub smallest: u64,
    pub largest: u64,
    pub total: u64,
    /// Asks of known size.
    pub asks: u64,
}

/// Power-of-two size class: a retry may be rounded, so equal bytes are too strict.
fn class(bytes: u64) -> u32 {
    bytes.checked_ilog2().unwrap_or(0)
}

impl Sizes {
    fn add(sizes: Option<Self>, bytes: u64, count: u64) -> Self {
        let total = bytes.saturating_mul(count);
        match sizes {
            None => Self { smallest: bytes, largest: bytes, total, asks: count },
            Some(sizes) => Self {
                smallest: sizes.smallest.min(bytes),
                largest: sizes.largest.max(bytes),
                total: sizes.total.saturating_add(total),
                asks: sizes.asks.saturating_add(count),
            },
        }
    }
}

#[derive(Clone, Debug)]
struct Open {
    record: FailureRecord,
    /// Of the last refusal.
    last_size: Option<u64>,
    process: Option<ProcessId>,
    /// Refusals of that process in a row, which a grant makes good.
    run: u64,
    changed: bool,
}

/// Open records by what makes failures equal.
#[derive(Clone, Debug)]
pub struct Failures {
    fold: Fold,
    open: BTreeMap<Key, Open>,
    /// Replaced by a newer one of the same key before anybody drained them.
    finished: Vec<FailureRecord>,
    next: u64,
    unfolded: u64,
}

impl Failures {
    pub fn new(fold: Fold) -> Self {
        Self { fold, open: BTreeMap::new(), finished: Vec::new(), next: 0, unfolded: 0 }
    }

    /// Folds `count` equal failures that ended at `at_unix`. `false` where the code is not a refusal of memory. A count of
    /// 0 says more about failures that were folded before.
    pub fn failed(&mut self, at_unix: f64, count: u64, ask: &Ask) -> bool {
        let Some(verdict) = judge(ask) else { return false };
        let key = (ask.tenant.clone(), ask.gpu.clone(), ask.operation, ask.error.0);
        if let Some(open) = self.open.get_mut(&key)
            && (at_unix - open.record.last_unix).abs() <= self.fold.gap_seconds
        {
            if count == 0 {
                if says_more(&verdict, &open.record.verdict) {
                    open.record.verdict = Verdict { near_miss: open.record.verdict.near_miss, ..verdict };
                    open.changed = true;
                }
                return true;
            }
            let record = &mut open.record;
            if open.process != ask.process || record.recovered {
                open.run = 0;
            }
            open.run = open.run.saturating_add(count);
            if ask.operation == Operation::MemCreate && record.recovered {
                // One piece of a segment was granted, and the segment was not.
                record.near_misses = record.near_misses.saturating_sub(1);
                record.made_good = 0;
                record.verdict.near_miss = None;
            }
            record.count = record.count.saturating_add(count);
            record.last_unix = record.last_unix.max(at_unix);
            record.sizes = ask.requested.map(|bytes| Sizes::add(record.sizes, bytes, count)).or(record.sizes);
            record.recovered = verdict.near_miss.is_some();
            record.near_misses = record.near_misses.saturating_add(u64::from(record.recovered));
            if says_more(&verdict, &record.verdict) {
                record.verdict = verdict;
            } else if verdict.near_miss.is_some() {
                record.verdict.near_miss = verdict.near_miss;
            }
            open.last_size = ask.requested;
            open.process = ask.process;
            open.changed = true;
            return true;
        }
        if count == 0 {
            return true;
        }
        if let Some(past) = self.open.remove(&key) {
            self.finish(past);
        }
        if self.open.len() >= self.fold.capacity {
            self.unfolded = self.unfolded.saturating_add(count);
            return true;
        }
        let recovered = verdict.near_miss.is_some();
        let record = FailureRecord {
            id: self.next,
            tenant: ask.tenant.clone(),
            gpu: ask.gpu.clone(),
            operation: ask.operation,
            error: ask.error,
            count,
            first_unix: at_unix,
            last_unix: at_unix,
            sizes: ask.requested.map(|bytes| Sizes::add(None, bytes, count)),
            verdict,
            near_misses: u64::from(recovered),
            made_good: if recovered { count } else { 0 },
            recovered,
        };
        self.next += 1;
        self.open.insert(
            key,
            Open { record, last_size: ask.requested, process: ask.process, run: count, changed: true },
        );
        true
    }

    /// Marks a near miss where the same process had been refused this size class on this GPU just before, by whatever
    /// operation: an allocator may retry by another one. True if so.
    pub fn succeeded(&mut self, success: &Success) -> bool {
        let retry_seconds = self.fold.retry_seconds;
        let mut marked = false;
        let mine = self.open.iter_mut().filter(|((tenant, gpu, _, _), _)| {
            *tenant == success.tenant && (gpu.is_none() || success.gpu.is_none() || *gpu == success.gpu)
        });
        for (_, open) in mine {
            let after_seconds = success.at_unix - open.record.last_unix;
            let same = open.last_size.map(class) == Some(class(success.bytes));
            let same_arena = open.record.verdict.arena
                == super::Arena::of(success.operation).unwrap_or(open.record.verdict.arena);
            if open.record.recovered
                || open.process.is_some_and(|process| process != success.process)
                || !same
                || !same_arena
                || !(0.0..=retry_seconds).contains(&after_seconds)
            {
                continue;
            }
            open.record.recovered = true;
            open.record.near_misses = open.record.near_misses.saturating_add(1);
            open.record.made_good = open.record.made_good.saturating_add(open.run);
            open.record.verdict.near_miss = Some(NearMiss { after_seconds, freed: success.freed });
            open.changed = true;
            marked = true;
        }
        marked
    }

    /// The records that changed since the last call, as they are now, oldest first. Records past their gap are let go.
    pub fn drain(&mut self, now_unix: f64) -> Vec<FailureRecord> {
        let gap = self.fold.gap_seconds;
        let mut changed = std::mem::take(&mut self.finished);
        changed.extend(
            self.open
                .values_mut()
                .filter_map(|open| std::mem::take(&mut open.changed).then(|| open.record.clone())),
        );
        // Either way: a clock that was set back must not keep a record for hours.
        self.open.retain(|_, open| (now_unix - open.record.last_unix).abs() <= gap);
        changed.sort_by_key(|record| record.id);
        changed
    }

    fn finish(&mut self, open: Open) {
        if !open.changed {
            return;
        }
        if self.finished.len() < self.fold.capacity {
            self.finished.push(open.record);
        } else {
            self.unfolded = self.unfolded.saturating_add(open.record.count);
        }
    }

    /// Open records now.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Failures that found no free record. To be published as a loss.
    pub const fn unfolded(&self) -> u64 {
        self.unfolded
    }
}

fn says_more(new: &Verdict, old: &Verdict) -> bool {
    let known = |verdict: &Verdict| verdict.kind != VerdictKind::Unknown;
    (known(new), new.certainty, growth_seen(new)) > (known(old), old.certainty, growth_seen(old))
}

fn growth_seen(verdict: &Verdict) -> bool {
    verdict.because.iter().any(|why| matches!(why, Because::NeighboursGrew { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TenantKind;

    const MIB: u64 = 1 << 20;

    fn tenant(name: &str) -> Tenant {
        Tenant::plain(TenantKind::Docker, name)
    }

    fn ask(name: &str, requested: Option<u64>) -> Ask {
        Ask {
            requested,
            gpu: Some(GpuId::from_uuid([1; 16])),
            ..Ask::new(tenant(name), Operation::MemAlloc, CudaError::OUT_OF_MEMORY)
        }
    }

    fn granted(name: &str, at_unix: f64, bytes: u64) -> Success {
        Success {
            at_unix,
            tenant: tenant(name),
            process: ProcessId(1),
            gpu: Some(GpuId::from_uuid([1; 16])),
            operation: Operation::MemAlloc,
            bytes,
            freed: Some(3 * MIB),
        }
    }

    #[test]
    fn a_storm_is_one_record() {
        let mut failures = Failures::new(Fold::default());
        for step in 0..1000_u32 {
            assert!(failures.failed(f64::from(step) * 0.01, 1, &ask("a", Some(u64::from(step + 1) * MIB))));
        }
        let records = failures.drain(10.0);
        assert_eq!(records.len(), 1);
        let record = &records[0];
        assert_eq!(record.count, 1000);
        assert_eq!(record.sizes.map(|sizes| (sizes.smallest, sizes.largest)), Some((MIB, 1000 * MIB)));
        assert_eq!(record.sizes.map(|sizes| sizes.total), Some(500_500 * MIB));
        assert!((record.first_unix - 0.0).abs() < 1e-9 && (record.last_unix - 9.99).abs() < 1e-9);
        assert!(failures.drain(11.0).is_empty(), "nothing changed since");
    }

    #[test]
    fn a_gap_and_another_tenant_make_new_records() {
        let mut failures = Failures::new(Fold::default());
        failures.failed(0.0, 1, &ask("a", Some(MIB)));
        failures.failed(0.5, 1, &ask("b", Some(MIB)));
        failures.failed(30.0, 1, &ask("a", Some(MIB)));
        let ids: Vec<_> = failures.drain(30.0).iter().map(|record| (record.id, record.count)).collect();
        assert_eq!(ids, [(0, 1), (1, 1), (2, 1)]);
    }

    #[test]
    fn codes_that_are_not_refusals_are_not_folded() {
        let mut failures = Failures::new(Fold::default());
        for code in [1, 4, 201, 700, 800, 801] {
            let ask = Ask { error: CudaError(code), ..ask("a", Some(MIB)) };
            assert!(!failures.failed(0.0, 1, &ask));
        }
        assert!(failures.is_empty());
    }

    #[test]
    fn another_process_of_the_tenant_makes_nothing_good() {
        let mut failures = Failures::new(Fold::default());
        let by = |process: u64| Ask { process: Some(ProcessId(process)), ..ask("a", Some(20 * MIB)) };
        failures.failed(0.0, 3, &by(1));
        failures.failed(0.1, 2, &by(2));
        assert!(!failures.succeeded(&granted("a", 0.2, 20 * MIB)), "the last to be refused was 2");
        assert!(failures.succeeded(&Success { process: ProcessId(2), ..granted("a", 0.3, 20 * MIB) }));
        let record = failures.drain(0.4).remove(0);
        assert_eq!((record.count, record.near_misses, record.made_good), (5, 1, 2));
    }

    #[test]
    fn a_piece_of_a_segment_that_is_refused_again_was_no_near_miss() {
        let mut failures = Failures::new(Fold::default());
        let piece =
            Ask { operation: Operation::MemCreate, process: Some(ProcessId(1)), ..ask("a", Some(20 * MIB)) };
        let grant = Success { operation: Operation::MemCreate, ..granted("a", 0.1, 20 * MIB) };
        failures.failed(0.0, 1, &piece);
        assert!(failures.succeeded(&grant));
        failures.failed(0.2, 1, &piece);
        let record = failures.drain(0.3).remove(0);
        assert_eq!((record.count, record.near_misses, record.made_good, record.recovered), (2, 0, 0, false));
    }

    #[test]
    fn near_miss_needs_the_same_size_soon_after() {
        let mut failures = Failures::new(Fold::default());
        failures.failed(1.0, 1, &ask("a", Some(100 * MIB)));
        assert!(!failures.succeeded(&granted("a", 1.5, 3 * MIB)), "another size class");
        assert!(!failures.succeeded(&granted("b", 1.5, 100 * MIB)), "another tenant");
        assert!(!failures.succeeded(&granted("a", 9.0, 100 * MIB)), "too late");
        let host = Success { operation: Operation::MemHostAlloc, gpu: None, ..granted("a", 1.2, 100 * MIB) };
        assert!(!failures.succeeded(&host), "other memory");
        assert!(failures.succeeded(&granted("a", 1.25, 101 * MIB)));
        assert!(!failures.succeeded(&granted("a", 1.3, 101 * MIB)), "once a refusal");
        let record = failures.drain(2.0).remove(0);
        assert!(record.recovered);
        assert_eq!(record.near_misses, 1);
        assert_eq!(record.verdict.near_miss, Some(NearMiss { after_seconds: 0.25, freed: Some(3 * MIB) }));
        failures.failed(2.0, 1, &ask("a", Some(100 * MIB)));
        let record = failures.drain(2.0).remove(0);
        assert!(!record.recovered, "refused again");
        assert_eq!((record.count, record.near_misses), (2, 1));
    }

    #[test]
    fn a_more_certain_verdict_replaces_a_less_certain_one() {
        let mut failures = Failures::new(Fold::default());
        failures.failed(0.0, 1, &ask("a", Some(100 * MIB)));
        failures.failed(0.1, 1, &Ask { capacity: Some(MIB), ..ask("a", Some(100 * MIB)) });
        failures.failed(0.2, 1, &ask("a", Some(100 * MIB)));
        assert_eq!(failures.drain(1.0)[0].verdict.kind, VerdictKind::Impossible);
    }

    #[test]
    fn what_is_learned_late_changes_the_verdict_and_not_the_count() {
        let mut failures = Failures::new(Fold::default());
        let more = Ask { capacity: Some(MIB), ..ask("a", Some(100 * MIB)) };
        failures.failed(0.0, 0, &more);
        assert!(failures.is_empty(), "nothing to say more about");
        failures.failed(0.0, 3, &ask("a", Some(100 * MIB)));
        assert_eq!(failures.drain(0.1)[0].verdict.kind, VerdictKind::Unknown);
        failures.failed(0.0, 0, &more);
        let record = failures.drain(0.2).remove(0);
        assert_eq!((record.count, record.verdict.kind), (3, VerdictKind::Impossible));
        failures.failed(0.0, 0, &ask("a", Some(100 * MIB)));
        assert!(failures.drain(0.3).is_empty());
    }

    #[test]
    fn bounded_and_counted() {
        let mut failures = Failures::new(Fold { capacity: 8, ..Fold::default() });
        for name in 0..100 {
            failures.failed(0.0, 3, &ask(&format!("t{name}"), None));
        }
        assert_eq!((failures.len(), failures.unfolded()), (8, 92 * 3));
        assert_eq!(failures.drain(100.0).len(), 8);
        assert!(failures.is_empty(), "past their gap");
    }
}
