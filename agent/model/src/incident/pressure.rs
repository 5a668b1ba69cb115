//! Owns the sliding window over waits: how hard neighbours press on each victim in each place.
//! Refuses thresholds: the store compares.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::WaitDelta;
use super::place::{Place, Source};
use crate::{GpuId, Tenant, WaitClass};

/// A window is kept in this many parts.
const PARTS: f64 = 10.0;

/// Rows of one victim in one part of a window: neighbours × classes, beyond which rows are dropped and counted.
const ROWS: usize = 512;

/// Victims × places under watch.
const ACCOUNTS: usize = 4096;

/// Frames of a stack that are kept.
const FRAMES: usize = 12;

pub(super) type Key = (Tenant, Place);

/// Equal waits, summed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sum {
    pub(super) seconds: f64,
    pub(super) waits: u64,
    pub(super) longest: Option<f64>,
    pub(super) stack: Vec<String>,
    pub(super) gpus: BTreeSet<GpuId>,
}

impl Sum {
    pub(super) fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.waits = self.waits.saturating_add(other.waits);
        // The stack that is shown is that of the longest wait known.
        if self.stack.is_empty() || other.longest > self.longest && !other.stack.is_empty() {
            self.stack.clone_from(&other.stack);
        }
        self.longest = match (self.longest, other.longest) {
            (Some(mine), Some(theirs)) => Some(mine.max(theirs)),
            (mine, theirs) => mine.or(theirs),
        };
        self.gpus.extend(other.gpus.iter().cloned());
    }
}

pub(super) type Rows = BTreeMap<(Source, WaitClass), Sum>;

#[derive(Clone, Debug)]
struct Part {
    start: f64,
    end: f64,
    /// The wall clock at `start`.
    start_unix: f64,
    neighbours: f64,
    /// Not yet taken by an incident.
    rows: Rows,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    parts: VecDeque<Part>,
}

/// What was waited and not yet booked to an incident.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) start_unix: f64,
    pub(super) rows: Rows,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reading {
    /// By neighbours, over the window.
    pub(super) seconds: f64,
    /// Of the window.
    pub(super) share: f64,
}

impl Account {
    pub(super) fn read(&self, now: f64, window: f64) -> Reading {
        let seconds: f64 = self.parts.iter().map(|part| part.neighbours).sum();
        // A period can be longer than the window.
        let span = self.parts.front().map_or(window, |part| window.max(now - part.start));
        Reading { seconds, share: seconds / span }
    }

    /// Everything that no incident has taken yet; the window itself stays.
    pub(super) fn take(&mut self) -> Option<Taken> {
        let mut taken: Option<Taken> = None;
        for part in &mut self.parts {
            if part.rows.is_empty() {
                continue;
            }
            let rows = std::mem::take(&mut part.rows);
            if let Some(taken) = &mut taken {
                taken.end = part.end;
                for (key, sum) in rows {
                    taken.rows.entry(key).or_default().add(&sum);
                }
            } else {
                taken = Some(Taken { start: part.start, end: part.end, start_unix: part.start_unix, rows });
            }
        }
        taken
    }

    /// What no incident has taken yet: its neighbours by the part that each made, and the GPUs.
    pub(super) fn fresh(&self) -> Fresh {
        let mut by_tenant: BTreeMap<Tenant, f64> = BTreeMap::new();
        let mut gpus = BTreeSet::new();
        for ((source, _), sum) in self.parts.iter().flat_map(|part| &part.rows) {
            if let Some(tenant) = source.neighbour() {
                *by_tenant.entry(tenant.clone()).or_default() += sum.seconds;
                gpus.extend(sum.gpus.iter().cloned());
            }
        }
        let total: f64 = by_tenant.values().sum();
        Fresh {
            neighbours: by_tenant.into_iter().map(|(name, seconds)| (name, seconds / total)).collect(),
            gpus,
        }
    }
}

/// The neighbours in what was not yet taken.
#[derive(Clone, Debug)]
pub(super) struct Fresh {
    pub(super) neighbours: Vec<(Tenant, f64)>,
    pub(super) gpus: BTreeSet<GpuId>,
}

/// All windows.
#[derive(Clone, Debug, Default)]
pub(super) struct Pressure {
    accounts: BTreeMap<Key, Account>,
    pub(super) dropped: u64,
}

/// The period that rows belong to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Period {
    /// Its end by the clock that does not step.
    pub(super) now: f64,
    pub(super) elapsed: f64,
    pub(super) at_unix: f64,
}

impl Pressure {
    /// Adds a row; its key, or `None` where it was dropped.
    pub(super) fn add(&mut self, wait: &WaitDelta, period: Period, window: f64) -> Option<Key> {
        let key = (wait.victim.clone(), wait.places().into_iter().next()?);
        if !self.accounts.contains_key(&key) && self.accounts.len() >= ACCOUNTS {
            self.dropped += 1;
            return None;
        }
        let account = self.accounts.entry(key.clone()).or_default();
        let Period { now, elapsed, at_unix } = period;
        let start = now - elapsed;
        if account.parts.back().is_none_or(|part| part.end < now && now - part.start > window / PARTS) {
            account.parts.push_back(Part {
                start,
                end: now,
                start_unix: at_unix - elapsed,
                neighbours: 0.0,
                rows: Rows::new(),
            });
        }
        let part = account.parts.back_mut()?;
        part.end = now;
        let source = Source::of(&wait.victim, &wait.culprit);
        if source.neighbour().is_some() {
            part.neighbours += wait.seconds;
        }
        let row = (source, wait.class);
        if !part.rows.contains_key(&row) && part.rows.len() >= ROWS {
            self.dropped += 1;
            return Some(key);
        }
        part.rows.entry(row).or_default().add(&Sum {
            seconds: wait.seconds,
            waits: wait.waits,
            longest: wait.longest.filter(|seconds| seconds.is_finite()),
            stack: wait.stack.iter().take(FRAMES).cloned().collect(),
            gpus: wait.gpus.iter().cloned().collect(),
        });
        Some(key)
    }

    pub(super) fn account(&mut self, key: &Key) -> Option<&mut Account> {
        self.accounts.get_mut(key)
    }

    /// Lets go of what has left the window.
    pub(super) fn expire(&mut self, now: f64, window: f64) {
        self.accounts.retain(|_, account| {
            while account.parts.front().is_some_and(|part| part.end <= now - window) {
                account.parts.pop_front();
            }
            !account.parts.is_empty()
        });
    }

    pub(super) fn len(&self) -> usize {
        self.accounts.len()
    }
}
