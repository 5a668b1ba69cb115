//! Owns what an open incident has gathered so far.
//! Refuses to sort or to word it: `view` does when somebody looks.

use std::collections::{BTreeMap, BTreeSet};

use super::place::{Pair, Place, Source};
use super::pressure::{Sum, Taken};
use super::timeline::{Chain, Step};
use super::{IncidentId, KillNote, Kind, Scarce, Stall, WarningNote, XidNote};
use crate::verdict::FailureRecord;
use crate::{GpuId, Tenant, WaitClass};

/// Tenants told apart on either side before the rest is summed. More than are listed, so that a late heavy one is seen.
const TENANTS: usize = 64;
const WAIT_ROWS: usize = 4096;
const RECORDS: usize = 64;
const CHAINS: usize = 16;
pub(super) const STEPS: usize = 32;
const LINKS: usize = 256;
const MERGED: usize = 16;

/// Wall time over which one victim's waits were counted, by the clock that does not step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Span {
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) peak_share: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct StallSeen {
    pub(super) since_unix: f64,
    pub(super) seconds: f64,
    pub(super) holder: Option<Source>,
    pub(super) ongoing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct XidSeen {
    pub(super) count: u64,
    pub(super) echo: bool,
    pub(super) first_unix: f64,
    pub(super) last_unix: f64,
}

pub(super) type WaitKey = (Tenant, Source, WaitClass);

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) id: IncidentId,
    pub(super) start_unix: f64,
    pub(super) last_unix: f64,
    /// The last thing that kept it open, by the clock that does not step.
    pub(super) kept: f64,
    pub(super) places: BTreeSet<Place>,
    pub(super) pairs: BTreeSet<Pair>,
    pub(super) gpus: BTreeSet<GpuId>,
    pub(super) waits: BTreeMap<WaitKey, Sum>,
    pub(super) spans: BTreeMap<Tenant, Span>,
    pub(super) stalls: BTreeMap<(Tenant, WaitClass), StallSeen>,
    pub(super) failures: BTreeMap<u64, FailureRecord>,
    pub(super) kills: Vec<KillNote>,
    pub(super) xids: BTreeMap<(GpuId, u32, Option<Tenant>), XidSeen>,
    /// What stood before the first refusal or kill that it foretold.
    pub(super) warnings: BTreeMap<Scarce, WarningNote>,
    pub(super) timeline: Vec<Step>,
    pub(super) chains: Vec<Chain>,
    pub(super) merged: Vec<IncidentId>,
    /// Neighbours with rows of their own.
    culprits: BTreeSet<Tenant>,
    /// Rows whose victim or culprit was summed into `other`.
    pub(super) rows_folded: u64,
    pub(super) records_dropped: u64,
    pub(super) steps_dropped: u64,
    /// By which it was already counted.
    pub(super) named: BTreeSet<Kind>,
}

impl Case {
    pub(super) fn new(id: IncidentId, start_unix: f64, now: f64, at_unix: f64) -> Self {
        Self {
            id,
            start_unix,
            last_unix: at_unix,
            kept: now,
            places: BTreeSet::new(),
            pairs: BTreeSet::new(),
            gpus: BTreeSet::new(),
            waits: BTreeMap::new(),
            spans: BTreeMap::new(),
            stalls: BTreeMap::new(),
            failures: BTreeMap::new(),
            kills: Vec::new(),
            xids: BTreeMap::new(),
            warnings: BTreeMap::new(),
            timeline: Vec::new(),
            chains: Vec::new(),
            merged: Vec::new(),
            culprits: BTreeSet::new(),
            rows_folded: 0,
            records_dropped: 0,
            steps_dropped: 0,
            named: BTreeSet::new(),
        }
    }

    pub(super) fn keep(&mut self, now: f64, at_unix: f64, start_unix: f64) {
        self.kept = self.kept.max(now);
        self.last_unix = self.last_unix.max(at_unix);
        self.start_unix = self.start_unix.min(start_unix);
    }

    /// What names it now.
    pub(super) fn kind(&self) -> Kind {
        let waits = self.spans.keys().next().map(|_| Kind::NoisyNeighbour);
        let stalls = self.stalls.keys().next().map(|_| Kind::Stall);
        let failures = self
            .failures
            .values()
            .map(|record| if record.recovered { Kind::NearMiss } else { Kind::AllocationFailure });
        let kills = self.kills.first().map(|_| Kind::OomKill);
        let xids = self.xids.values().map(|xid| if xid.echo { Kind::XidEcho } else { Kind::Xid });
        failures.chain(xids).chain(waits).chain(stalls).chain(kills).max().unwrap_or(Kind::NearMiss)
    }

    /// Whether this tenant's waits are booked here.
    pub(super) fn has_waits_of(&self, victim: &Tenant) -> bool {
        self.spans.contains_key(victim)
    }

    pub(super) fn book_waits(&mut self, victim: &Tenant, taken: Taken, share: f64) {
        let Taken { start, end, rows, .. } = taken;
        let victim = self.add_span(victim, Span { start, end, peak_share: share });
        // Largest first: where there are too many to tell apart, the small ones are summed.
        let mut rows: Vec<_> = rows.into_iter().collect();
        rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds).then_with(|| a.0.cmp(&b.0)));
        for ((source, class), sum) in rows {
            self.add_wait((victim.clone(), source, class), &sum);
        }
    }

    /// The tenant under which the victim is booked.
    fn add_span(&mut self, victim: &Tenant, span: Span) -> Tenant {
        let victim = if self.spans.contains_key(victim) || self.spans.len() < TENANTS {
            victim.clone()
        } else {
            self.rows_folded += 1;
            Tenant::other()
        };
        let mine = self.spans.entry(victim.clone()).or_insert(span);
        mine.start = mine.start.min(span.start);
        mine.end = mine.end.max(span.end);
        mine.peak_share = mine.peak_share.max(span.peak_share);
        victim
    }

    fn add_wait(&mut self, (victim, source, class): WaitKey, sum: &Sum) {
        self.gpus.extend(sum.gpus.iter().cloned());
        let source = match source {
            Source::Neighbour(tenant) if self.culprits.contains(&tenant) => Source::Neighbour(tenant),
            Source::Neighbour(tenant) if self.culprits.len() < TENANTS => {
                self.culprits.insert(tenant.clone());
                Source::Neighbour(tenant)
            }
            Source::Neighbour(_) => {
                self.rows_folded += 1;
                Source::Neighbour(Tenant::other())
            }
            apart => apart,
        };
        let mut key = (victim, source, class);
        if !self.waits.contains_key(&key) && self.waits.len() >= WAIT_ROWS {
            self.rows_folded += 1;
            key = (Tenant::other(), Source::Neighbour(Tenant::other()), WaitClass::Other);
        }
        self.waits.entry(key).or_default().add(sum);
    }

    pub(super) fn book_failure(&mut self, record: &FailureRecord, chains: Vec<Chain>) {
        if !self.failures.contains_key(&record.id) && self.failures.len() >= RECORDS {
            self.records_dropped += 1;
            return;
        }
        self.gpus.extend(record.gpu.iter().cloned());
        self.failures.insert(record.id, record.clone());
        for chain in chains {
            let known = self.chains.iter().position(|known| {
                known.record == chain.record
                    && known.cause.tenant == chain.cause.tenant
                    && known.cause.from_unix.total_cmp(&chain.cause.from_unix).is_eq()
            });
            match known {
                Some(at) => self.chains[at] = chain,
                None if self.chains.len() < CHAINS => self.chains.push(chain),
                None => {}
            }
        }
    }

    /// Those that a refusal or a kill was foretold by.
    pub(super) fn book_warnings(
        &mut self,
        standing: &[WarningNote],
        at_unix: f64,
        of: impl Fn(&Scarce) -> bool,
    ) {
        for note in standing.iter().filter(|note| note.foretold(at_unix) && of(&note.of)) {
            self.warnings.entry(note.of.clone()).or_insert_with(|| note.clone());
        }
    }

    pub(super) fn book_kill(&mut self, kill: &KillNote) {
        if self.kills.len() >= RECORDS {
            self.records_dropped += 1;
            // Every victim counts: the last note of the same tenant and limit stands for this one too.
            let same =
                |known: &&mut KillNote| known.victim == kill.victim && known.limit_owner == kill.limit_owner;
            if let Some(known) = self.kills.iter_mut().rev().find(same) {
                known.processes = known.processes.saturating_add(kill.processes.max(1));
            }
            return;
        }
        self.gpus.extend(kill.gpu_live.iter().map(|(gpu, _)| gpu.clone()));
        self.kills.push(kill.clone());
    }

    pub(super) fn book_xid(&mut self, xid: &XidNote) {
        let key = (xid.gpu.clone(), xid.code, xid.tenant.clone());
        if !self.xids.contains_key(&key) && self.xids.len() >= RECORDS {
            self.records_dropped += 1;
            return;
        }
        self.gpus.insert(xid.gpu.clone());
        let seen = self.xids.entry(key).or_insert(XidSeen {
            count: 0,
            echo: xid.echo,
            first_unix: xid.at_unix,
            last_unix: xid.at_unix,
        });
        seen.count += 1;
        seen.echo &= xid.echo;
        seen.first_unix = seen.first_unix.min(xid.at_unix);
        seen.last_unix = seen.last_unix.max(xid.at_unix);
    }

    pub(super) fn book_stall(&mut self, stall: &Stall, seconds: f64) {
        let key = (stall.victim.clone(), stall.class);
        if !self.stalls.contains_key(&key) && self.stalls.len() >= RECORDS {
            self.records_dropped += 1;
            return;
        }
        self.gpus.extend(stall.gpus.iter().cloned());
        let holder = stall.holder.as_ref().map(|holder| Source::of(&stall.victim, holder));
        let seen = self.stalls.entry(key).or_insert(StallSeen {
            since_unix: stall.since_unix,
            seconds,
            holder: holder.clone(),
            ongoing: true,
        });
        seen.ongoing = true;
        if seconds >= seen.seconds {
            (seen.since_unix, seen.seconds) = (stall.since_unix, seconds);
            seen.holder = holder.or(seen.holder.take());
        }
    }

    /// Stalls that were not told again have ended.
    pub(super) fn end_stalls(&mut self) {
        for stall in self.stalls.values_mut() {
            stall.ongoing = false;
        }
    }

    pub(super) fn set_timeline(&mut self, steps: Vec<Step>) {
        let mut all = steps;
        // What the timeline has let go of is kept here.
        for old in self.timeline.drain(..) {
            let same = |step: &Step| {
                step.tenant == old.tenant
                    && step.gpu == old.gpu
                    && step.from_unix.total_cmp(&old.from_unix).is_eq()
            };
            if !all.iter().any(same) {
                all.push(old);
            }
        }
        if all.len() > STEPS {
            all.sort_by(|a, b| {
                b.bytes.unsigned_abs().cmp(&a.bytes.unsigned_abs()).then(a.from_unix.total_cmp(&b.from_unix))
            });
            self.steps_dropped += (all.len() - STEPS) as u64;
            all.truncate(STEPS);
        }
        all.sort_by(|a, b| a.from_unix.total_cmp(&b.from_unix).then_with(|| a.tenant.cmp(&b.tenant)));
        self.timeline = all;
    }

    /// Takes in another case that turned out to be the same trouble.
    pub(super) fn absorb(&mut self, other: Self) {
        self.keep(other.kept, other.last_unix, other.start_unix);
        self.places.extend(other.places);
        for pair in other.pairs {
            self.link(pair);
        }
        self.gpus.extend(other.gpus);
        for (victim, span) in other.spans {
            self.add_span(&victim, span);
        }
        for ((victim, source, class), sum) in other.waits {
            let victim = if self.spans.contains_key(&victim) { victim } else { Tenant::other() };
            self.add_wait((victim, source, class), &sum);
        }
        for (key, stall) in other.stalls {
            let room = self.stalls.len() < RECORDS;
            match self.stalls.get_mut(&key) {
                Some(mine) if stall.seconds > mine.seconds => *mine = stall,
                Some(_) => {}
                None if room => {
                    self.stalls.insert(key, stall);
                }
                None => self.records_dropped += 1,
            }
        }
        for (_, record) in other.failures {
            self.book_failure(&record, Vec::new());
        }
        for (memory, warning) in other.warnings {
            self.warnings.entry(memory).or_insert(warning);
        }
        for kill in &other.kills {
            self.book_kill(kill);
        }
        for (key, xid) in other.xids {
            if !self.xids.contains_key(&key) && self.xids.len() >= RECORDS {
                self.records_dropped += 1;
                continue;
            }
            let mine = self.xids.entry(key).or_insert(XidSeen { count: 0, ..xid });
            mine.count += xid.count;
            mine.echo &= xid.echo;
            mine.first_unix = mine.first_unix.min(xid.first_unix);
            mine.last_unix = mine.last_unix.max(xid.last_unix);
        }
        self.set_timeline(other.timeline);
        self.chains.extend(other.chains);
        self.chains.truncate(CHAINS);
        self.merged.push(other.id);
        self.merged.extend(other.merged);
        self.merged.truncate(MERGED);
        self.rows_folded += other.rows_folded;
        self.records_dropped += other.records_dropped;
        self.steps_dropped += other.steps_dropped;
        self.named.extend(other.named);
    }

    /// Remembers who hurts whom. False when there are too many to remember.
    pub(super) fn link(&mut self, pair: Pair) -> bool {
        if self.pairs.len() < LINKS {
            self.pairs.insert(pair);
            return true;
        }
        self.pairs.contains(&pair)
    }
}
