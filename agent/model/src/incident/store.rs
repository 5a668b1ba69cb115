//! Owns the incidents of a node, open and closed, and the step from one observation to the next.
//! Refuses clocks: time is what the observations say.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::case::Case;
use super::place::{self, Pair, Place, Source, pair};
use super::pressure::{Key, Period, Pressure};
use super::timeline::{Chain, Step, Timeline};
use super::{Incident, IncidentId, Kind, Observation, Rules, Scarce, State};
use crate::GpuId;
use crate::verdict::{FailureRecord, VerdictKind};

/// A neighbour with this part of the blame ties an event to an incident; smaller ones are in it by chance.
const CHIEF_PART: f64 = 0.25;

/// What one observation changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub opened: Vec<IncidentId>,
    pub closed: Vec<IncidentId>,
    /// The first incident was found to be the second.
    pub merged: Vec<(IncidentId, IncidentId)>,
}

/// What found no place. To be published as losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Events for which no incident could be opened: all places were taken by open ones.
    pub incidents: u64,
    /// Rows of waits.
    pub waits: u64,
    /// Steps of the timeline.
    pub steps: u64,
    /// Rows whose numbers cannot be.
    pub implausible: u64,
}

/// The store. `observe` it every tick.
#[derive(Clone, Debug)]
pub struct Incidents {
    rules: Rules,
    /// Sum of all `elapsed`.
    now: f64,
    sequence: u64,
    open: BTreeMap<IncidentId, Case>,
    closed: VecDeque<Incident>,
    by_place: BTreeMap<Place, IncidentId>,
    by_pair: BTreeMap<Pair, IncidentId>,
    pressure: Pressure,
    timeline: Timeline,
    totals: BTreeMap<Kind, u64>,
    losses: Losses,
}

/// Where and between whom an event was: what ties it to an incident.
struct Ties {
    places: BTreeSet<Place>,
    pairs: BTreeSet<Pair>,
}

impl Incidents {
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            now: 0.0,
            sequence: 0,
            open: BTreeMap::new(),
            closed: VecDeque::new(),
            by_place: BTreeMap::new(),
            by_pair: BTreeMap::new(),
            pressure: Pressure::default(),
            timeline: Timeline::default(),
            totals: BTreeMap::new(),
            losses: Losses::default(),
        }
    }

    /// One tick.
    pub fn observe(&mut self, observation: &Observation) -> Changes {
        let mut changes = Changes::default();
        if !observation.at_unix.is_finite() || !(0.0..1e9).contains(&observation.elapsed) {
            self.losses.implausible += 1;
            return changes;
        }
        self.now += observation.elapsed;
        let period = Period { now: self.now, elapsed: observation.elapsed, at_unix: observation.at_unix };
        self.note_movements(observation);
        self.note_waits(observation, period, &mut changes);
        self.note_stalls(observation, &mut changes);
        self.note_failures(observation, &mut changes);
        self.note_kills(observation, &mut changes);
        self.note_xids(observation, &mut changes);
        self.settle(observation.at_unix, &mut changes);
        changes
    }

    fn note_movements(&mut self, observation: &Observation) {
        let (from, to) = (observation.at_unix - observation.elapsed, observation.at_unix);
        for movement in &observation.movements {
            self.timeline.add(movement, from, to);
        }
        self.timeline.expire(to - self.rules.lookback_seconds - self.rules.quiet_seconds);
    }

    fn note_waits(&mut self, observation: &Observation, period: Period, changes: &mut Changes) {
        let window = self.rules.window_seconds;
        let mut touched: BTreeSet<Key> = BTreeSet::new();
        for wait in &observation.waits {
            if !wait.seconds.is_finite() || wait.seconds <= 0.0 {
                self.losses.implausible += u64::from(wait.seconds != 0.0);
                continue;
            }
            touched.extend(self.pressure.add(wait, period, window));
        }
        self.pressure.expire(self.now, window);
        for key in touched {
            self.assess(&key, period, changes);
        }
    }

    /// Opens, feeds or leaves alone, by how hard neighbours press on one victim in one place.
    fn assess(&mut self, key: &Key, period: Period, changes: &mut Changes) {
        let (victim, place) = key;
        let rules = self.rules;
        let Some(account) = self.pressure.account(key) else { return };
        let reading = account.read(self.now, rules.window_seconds);
        let presses = reading.share >= rules.open_share && reading.seconds >= rules.open_seconds;
        let fresh = account.fresh();
        let booked_in = self
            .by_place
            .get(place)
            .copied()
            .filter(|id| self.open.get(id).is_some_and(|case| case.has_waits_of(victim)));
        let id = if presses && !fresh.neighbours.is_empty() {
            let mut places = BTreeSet::from([place.clone()]);
            if !matches!(place, Place::HostLock) {
                places.extend(fresh.gpus.into_iter().map(Place::Gpu));
            }
            let chief = fresh.neighbours.iter().filter(|(_, part)| *part >= CHIEF_PART);
            let pairs = chief.filter_map(|(culprit, _)| pair(victim, culprit)).collect();
            self.join(Ties { places, pairs }, period.at_unix - period.elapsed, period.at_unix, changes)
        } else {
            booked_in
        };
        let Some(id) = id else { return };
        let (Some(case), Some(account)) = (self.open.get_mut(&id), self.pressure.account(key)) else {
            return;
        };
        if let Some(taken) = account.take() {
            let start_unix = taken.start_unix;
            case.book_waits(victim, taken, reading.share);
            if presses || reading.share >= rules.keep_share && !fresh.neighbours.is_empty() {
                case.keep(period.now, period.at_unix, start_unix);
            }
        }
    }

    fn note_stalls(&mut self, observation: &Observation, changes: &mut Changes) {
        for case in self.open.values_mut() {
            case.end_stalls();
        }
        for stall in &observation.stalls {
            let seconds = observation.at_unix - stall.since_unix;
            if !seconds.is_finite() {
                self.losses.implausible += 1;
                continue;
            }
            if seconds < self.rules.stall_seconds {
                continue;
            }
            let holder = stall.holder.as_ref().map(|holder| Source::of(&stall.victim, holder));
            let pairs =
                holder.iter().filter_map(Source::neighbour).filter_map(|holder| pair(&stall.victim, holder));
            let ties = Ties { places: stall.places(), pairs: pairs.collect() };
            let Some(id) = self.join(ties, stall.since_unix, observation.at_unix, changes) else { continue };
            if let Some(case) = self.open.get_mut(&id) {
                case.book_stall(stall, seconds);
                case.keep(self.now, observation.at_unix, stall.since_unix);
            }
        }
    }

    fn note_failures(&mut self, observation: &Observation, changes: &mut Changes) {
        for record in &observation.failures {
            if !record.first_unix.is_finite() || !record.last_unix.is_finite() {
                self.losses.implausible += 1;
                continue;
            }
            let chief = record.verdict.culprits().into_iter().filter(|(_, share)| *share >= CHIEF_PART);
            let pairs = chief.filter_map(|(culprit, _)| pair(&record.tenant, culprit)).collect();
            let ties = Ties { places: place::of_failure(record), pairs };
            let Some(id) = self.join(ties, record.first_unix, observation.at_unix, changes) else { continue };
            let chains = self.chains(record);
            if let Some(case) = self.open.get_mut(&id) {
                case.book_failure(record, chains);
                case.book_warnings(
                    &observation.warnings,
                    record.first_unix,
                    |memory| matches!(memory, Scarce::Gpu { gpu } if record.gpu.as_ref() == Some(gpu)),
                );
                case.keep(self.now, record.last_unix, record.first_unix);
            }
        }
    }

    /// Growth of others on the same GPU before a refusal, where the refusal is a neighbour's fault.
    fn chains(&self, record: &FailureRecord) -> Vec<Chain> {
        let (Some(gpu), VerdictKind::Neighbour) = (&record.gpu, record.verdict.kind) else {
            return Vec::new();
        };
        let at = record.first_unix;
        let steps =
            self.timeline.between(gpu, at - self.rules.lookback_seconds, at, self.rules.movement_bytes);
        steps
            .into_iter()
            .filter(|step| step.bytes > 0 && step.tenant != record.tenant)
            .map(|cause| Chain {
                seconds_before: (at - cause.to_unix).max(0.0),
                cause,
                victim: record.tenant.clone(),
                record: record.id,
            })
            .collect()
    }

    fn note_kills(&mut self, observation: &Observation, changes: &mut Changes) {
        for kill in &observation.kills {
            let ties = Ties { places: place::of_kill(kill), pairs: BTreeSet::new() };
            let at = if kill.at_unix.is_finite() { kill.at_unix } else { observation.at_unix };
            let Some(id) = self.join(ties, at, observation.at_unix, changes) else { continue };
            if let Some(case) = self.open.get_mut(&id) {
                case.book_kill(kill);
                case.book_warnings(&observation.warnings, at, |memory| memory.killed(kill));
                case.keep(self.now, at, at);
            }
        }
    }

    fn note_xids(&mut self, observation: &Observation, changes: &mut Changes) {
        for xid in &observation.xids {
            let ties = Ties { places: BTreeSet::from([Place::Gpu(xid.gpu.clone())]), pairs: BTreeSet::new() };
            let at = if xid.at_unix.is_finite() { xid.at_unix } else { observation.at_unix };
            let Some(id) = self.join(ties, at, observation.at_unix, changes) else { continue };
            if let Some(case) = self.open.get_mut(&id) {
                case.book_xid(xid);
                case.keep(self.now, at, at);
            }
        }
    }

    /// The open incident that an event belongs to. Where it ties several together they become one: the oldest.
    /// `None`, and counted, when there is no room for another open one.
    fn join(
        &mut self,
        ties: Ties,
        start_unix: f64,
        at_unix: f64,
        changes: &mut Changes,
    ) -> Option<IncidentId> {
        let known: BTreeSet<IncidentId> = ties
            .places
            .iter()
            .filter_map(|place| self.by_place.get(place))
            .chain(ties.pairs.iter().filter_map(|pair| self.by_pair.get(pair)))
            .copied()
            .filter(|id| self.open.contains_key(id))
            .collect();
        let mut known = known.into_iter();
        let id = match known.next() {
            Some(id) => id,
            None => self.start(start_unix, at_unix, changes)?,
        };
        for other in known {
            self.merge(other, id, changes);
        }
        let case = self.open.get_mut(&id)?;
        for place in ties.places {
            self.by_place.insert(place.clone(), id);
            case.places.insert(place);
        }
        for pair in ties.pairs {
            if case.link(pair.clone()) {
                self.by_pair.insert(pair, id);
            }
        }
        Some(id)
    }

    fn start(&mut self, start_unix: f64, at_unix: f64, changes: &mut Changes) -> Option<IncidentId> {
        if self.open.len() >= self.rules.capacity {
            self.losses.incidents += 1;
            return None;
        }
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to u32 seconds")]
        let start = start_unix.clamp(0.0, f64::from(u32::MAX)) as u64;
        let id = IncidentId { start, sequence: self.sequence };
        self.sequence += 1;
        self.open.insert(id, Case::new(id, start_unix, self.now, at_unix));
        changes.opened.push(id);
        Some(id)
    }

    fn merge(&mut self, from: IncidentId, into: IncidentId, changes: &mut Changes) {
        let Some(other) = self.open.remove(&from) else { return };
        for place in &other.places {
            self.by_place.insert(place.clone(), into);
        }
        for pair in &other.pairs {
            self.by_pair.insert(pair.clone(), into);
        }
        let Some(case) = self.open.get_mut(&into) else { return };
        case.absorb(other);
        // Pairs that the case could not take in must not point to it for ever.
        let pairs = &case.pairs;
        self.by_pair.retain(|pair, id| *id != into || pairs.contains(pair));
        // One that was opened and merged in the same tick was never told to anybody.
        if let Some(at) = changes.opened.iter().position(|id| *id == from) {
            changes.opened.remove(at);
        } else {
            changes.merged.push((from, into));
        }
    }

    /// Names, dates and closes.
    fn settle(&mut self, at_unix: f64, changes: &mut Changes) {
        let rules = self.rules;
        let mut quiet = Vec::new();
        for (id, case) in &mut self.open {
            if self.now - case.kept >= rules.quiet_seconds {
                quiet.push(*id);
                continue;
            }
            // Nothing new: its name stands, and later steps have nothing to do with what was.
            if case.kept < self.now {
                continue;
            }
            let kind = case.kind();
            if case.named.insert(kind) {
                *self.totals.entry(kind).or_default() += 1;
            }
            let from = case.start_unix - rules.lookback_seconds;
            let to = case.last_unix.min(at_unix);
            let steps = case
                .gpus
                .iter()
                .flat_map(|gpu| self.timeline.between(gpu, from, to, rules.movement_bytes))
                .collect();
            case.set_timeline(steps);
        }
        for id in quiet {
            let Some(case) = self.open.remove(&id) else { continue };
            self.by_place.retain(|_, open| *open != id);
            self.by_pair.retain(|_, open| *open != id);
            self.closed.push_back(case.view(&rules, State::Closed));
            changes.closed.push(id);
        }
        while self.open.len() + self.closed.len() > rules.capacity && self.closed.pop_front().is_some() {}
    }

    /// Everything that was not over by `since_unix`, newest first, open ones as they are now; of one tenant where it is given by name.
    pub fn list(&self, since_unix: Option<f64>, tenant: Option<&str>) -> Vec<Incident> {
        let open = self.open.values().map(|case| case.view(&self.rules, State::Open));
        let mut incidents: Vec<_> = self
            .closed
            .iter()
            .cloned()
            .chain(open)
            .filter(|incident| {
                since_unix.is_none_or(|since| incident.state == State::Open || incident.last_unix >= since)
            })
            .filter(|incident| tenant.is_none_or(|tenant| incident.concerns(tenant)))
            .collect();
        incidents.sort_by(|a, b| b.start_unix.total_cmp(&a.start_unix).then(b.id.cmp(&a.id)));
        incidents
    }

    /// By id, also by the id of one that was merged into another.
    pub fn find(&self, id: IncidentId) -> Option<Incident> {
        let is = |mine: IncidentId, merged: &[IncidentId]| mine == id || merged.contains(&id);
        self.open
            .values()
            .find(|case| is(case.id, &case.merged))
            .map(|case| case.view(&self.rules, State::Open))
            .or_else(|| self.closed.iter().find(|incident| is(incident.id, &incident.merged)).cloned())
    }

    /// Who grew and who shrank on a GPU, incident or not.
    pub fn timeline(&self, gpu: &GpuId, since_unix: f64) -> Vec<Step> {
        self.timeline.between(gpu, since_unix, f64::INFINITY, self.rules.movement_bytes)
    }

    /// Incidents since start by kind. One that gets a worse name counts once under each name; none is ever taken back.
    pub const fn totals(&self) -> &BTreeMap<Kind, u64> {
        &self.totals
    }

    pub fn open(&self) -> usize {
        self.open.len()
    }

    pub fn len(&self) -> usize {
        self.open.len() + self.closed.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Victims by place under watch, for the agent's own figures.
    pub fn watched(&self) -> usize {
        self.pressure.len()
    }

    pub const fn losses(&self) -> Losses {
        Losses { waits: self.pressure.dropped, steps: self.timeline.dropped, ..self.losses }
    }
}
