//! Owns the score of forecasts on recorded moments: events, warnings, lead times, false warnings, Brier, calibration.
//! Refuses hindsight: a rule sees one moment at a time, and outcomes are matched when the run is over.

mod rule;
mod tally;

use std::collections::BTreeMap;

pub use rule::{Rule, RuleError};
pub use tally::{Bin, EventScore, Score};

use super::{Forecast, Forecaster, HORIZONS, Holding, Moment, WARN};
use crate::{GpuId, Tenant};
use rule::Line;

/// A warning stands until its rule was silent for this long.
const HOLD: f64 = 60.0;
/// Failures within this of one another are one event.
const EVENT_GAP: f64 = 120.0;
/// A warning counts for an event when it came this long before: not earlier, nobody acts on older ones.
pub const LEAD_LEAST: f64 = 30.0;
pub const LEAD_MOST: f64 = 900.0;
/// Forecasts are scored this often; the moments in between are much the same.
const SCORED_EVERY: f64 = 10.0;
/// Our own warning: the risk within a minute stands at this for two moments, or that within five at more for longer.
pub const RAISE: f64 = 0.4;
pub const RAISE_EARLY: f64 = 0.65;
/// Moments that an early warning takes.
pub const EARLY: usize = 30;

/// What is remembered of one GPU at one moment.
#[derive(Clone, Debug)]
struct Sighting {
    at: f64,
    exhausted: bool,
    /// Within the longest horizon, by our forecast.
    early: f64,
    /// By rule.
    said: Vec<f64>,
    driver: Option<Tenant>,
    victim: Option<Tenant>,
    /// Who failed just now.
    failed: Vec<Tenant>,
}

#[derive(Clone, Copy, Debug)]
struct Room {
    at: f64,
    free: f64,
}

/// One run under every rule.
#[derive(Debug)]
pub struct Scorer {
    forecaster: Forecaster,
    rules: Vec<Rule>,
    lines: BTreeMap<GpuId, Vec<Line>>,
    holdings: BTreeMap<(GpuId, Tenant), Holding>,
    /// Free memory over time, from the first moment on: what builds up may begin before anything is forecast.
    rooms: BTreeMap<GpuId, Vec<Room>>,
    seen: BTreeMap<GpuId, Vec<Sighting>>,
}

impl Scorer {
    pub fn new(rules: &[Rule]) -> Self {
        Self {
            forecaster: Forecaster::default(),
            rules: rules.to_vec(),
            lines: BTreeMap::new(),
            holdings: BTreeMap::new(),
            rooms: BTreeMap::new(),
            seen: BTreeMap::new(),
        }
    }

    /// Goes on from what a forecaster knew when the recording began.
    pub fn resume(&mut self, forecaster: Forecaster) {
        self.forecaster = forecaster;
    }

    pub fn advance(&mut self, moment: &Moment) -> Forecast {
        let forecast = self.forecaster.advance(moment);
        let at = moment.at.as_secs_f64();
        for gpu in &moment.gpus {
            let Some(memory) = gpu.memory else { continue };
            let said = forecast.gpus.iter().find(|said| said.gpu == gpu.gpu);
            let free = said.map_or(memory.free, |said| said.headroom.free) as f64;
            self.rooms.entry(gpu.gpu.clone()).or_default().push(Room { at, free });
        }
        for gpu in &forecast.gpus {
            let (limit, free) = (gpu.headroom.limit as f64, gpu.headroom.free as f64);
            let lines = self
                .lines
                .entry(gpu.gpu.clone())
                .or_insert_with(|| self.rules.iter().map(|rule| Line::over(rule.window())).collect());
            let said = self
                .rules
                .iter()
                .zip(lines)
                .map(|(rule, line)| match rule {
                    Rule::Risk => gpu.risk[WARN],
                    Rule::Used { percent } => truth(limit - free > limit * f64::from(*percent) / 100.0),
                    Rule::Linear { .. } => {
                        line.push(at, free);
                        truth(line.after(at + HORIZONS[WARN]).is_some_and(|then| then <= 0.0))
                    }
                })
                .collect();
            let mut failed = Vec::new();
            for tenant in &moment.tenants {
                let Some(holding) = tenant.holdings.iter().find(|of| of.gpu == gpu.gpu) else { continue };
                let key = (gpu.gpu.clone(), tenant.tenant.clone());
                let before = self.holdings.insert(key, holding.clone());
                if before.is_some_and(|before| holding.refused_since(&before) > 0) {
                    failed.push(tenant.tenant.clone());
                }
            }
            self.seen.entry(gpu.gpu.clone()).or_default().push(Sighting {
                at,
                exhausted: gpu.exhausted,
                early: gpu.risk[HORIZONS.len() - 1],
                said,
                driver: gpu.driver().cloned(),
                victim: gpu.victims.first().cloned(),
                failed,
            });
        }
        forecast
    }

    /// The scores by rule. `drivers` are who filled the memory, where that is known; any of them is right.
    pub fn finish(&self, drivers: &[Tenant]) -> Vec<(Rule, Score)> {
        let score = |(index, rule): (usize, &Rule)| {
            let mut score = Score::default();
            for (gpu, seen) in &self.seen {
                let rooms = self.rooms.get(gpu).map_or(&[][..], Vec::as_slice);
                score.add(&of_gpu(seen, rooms, index, *rule, drivers));
            }
            (*rule, score)
        };
        self.rules.iter().enumerate().map(score).collect()
    }
}

fn truth(said: bool) -> f64 {
    f64::from(u8::from(said))
}

/// Indexes of first refusals that stayed so.
fn events(seen: &[Sighting]) -> Vec<usize> {
    let mut events = Vec::new();
    let mut last = f64::NEG_INFINITY;
    for (index, sighting) in seen.iter().enumerate().filter(|(_, sighting)| sighting.exhausted) {
        if sighting.at - last > EVENT_GAP {
            events.push(index);
        }
        last = sighting.at;
    }
    events
}

/// From when to when a rule's warnings stood, as indexes. A warning ends with its event, or when its rule is silent.
fn warnings(seen: &[Sighting], index: usize, rule: Rule) -> Vec<(usize, usize)> {
    let mut warnings = Vec::new();
    let mut open: Option<(usize, f64)> = None;
    let (mut row, mut early) = (0, 0);
    let (mut failed, mut over) = (f64::NEG_INFINITY, true);
    for (place, sighting) in seen.iter().enumerate() {
        if sighting.exhausted {
            (failed, over) = (sighting.at, false);
        } else if !over && sighting.at - failed > HOLD {
            over = true;
            (row, early) = (0, 0);
            warnings.extend(open.take().map(|(begun, _)| (begun, place)));
        }
        let (raise, moments) = if rule == Rule::Risk { (RAISE, 2) } else { (0.5, 1) };
        row = if sighting.said[index] >= raise { row + 1 } else { 0 };
        early = if rule == Rule::Risk && sighting.early >= RAISE_EARLY { early + 1 } else { 0 };
        let raised = row >= moments || early >= EARLY;
        match &mut open {
            Some((_, last)) if row > 0 || early > 0 => *last = sighting.at,
            Some((begun, last)) if sighting.at - *last > HOLD => {
                warnings.push((*begun, place));
                open = None;
            }
            None if raised => open = Some((place, sighting.at)),
            _ => {}
        }
    }
    warnings.extend(open.map(|(begun, _)| (begun, seen.len())));
    warnings
}

/// Whether an exhaustion built up: at the worst, the peaks of half a minute took the room little by little.
///
/// It did, when over some stretch of a minute or more the room above the peaks fell by two fifths, and no ten seconds
/// of it took half. Else it came without notice: a burst, or one request too large for the room that stood for long.
fn built_up(rooms: &[Room], event: f64) -> bool {
    let rooms = &rooms[..rooms.partition_point(|room| room.at < event)];
    let room_at = |at: f64| {
        let from = rooms.partition_point(|room| room.at < at - 30.0);
        let to = rooms.partition_point(|room| room.at <= at);
        rooms.get(from..to)?.iter().map(|room| room.free).reduce(f64::min)
    };
    let end = event - 1.0;
    [60.0, 120.0, 300.0, 600.0].into_iter().any(|stretch| {
        let (Some(before), Some(after)) = (room_at(end - stretch), room_at(end)) else { return false };
        let mut steps = (0..).map(|step| end - stretch + 10.0 * f64::from(step)).take_while(|at| *at < end);
        let sudden = steps.any(|at| match (room_at(at), room_at((at + 10.0).min(end))) {
            (Some(one), Some(two)) => one - two > 0.5 * before,
            _ => false,
        });
        after <= 0.6 * before && !sudden
    })
}

fn of_gpu(seen: &[Sighting], rooms: &[Room], index: usize, rule: Rule, drivers: &[Tenant]) -> Score {
    let mut score = Score::default();
    let [first, .., last] = seen else { return score };
    score.gpu_seconds = last.at - first.at;
    let warnings = warnings(seen, index, rule);
    let events = events(seen);
    for event in &events {
        let at = seen[*event].at;
        let warning = warnings
            .iter()
            .map(|(begun, _)| *begun)
            .rfind(|begun| (LEAD_LEAST..=LEAD_MOST).contains(&(at - seen[*begun].at)));
        let any = warnings.iter().rfind(|(begun, end)| begun < event && *end >= *event);
        // Who was named when it was warned; without a warning, half a minute before.
        let spoke = warning.unwrap_or_else(|| seen.partition_point(|of| of.at < at - LEAD_LEAST).min(*event));
        let right = |named: &Option<Tenant>, truth: &[Tenant]| {
            (!truth.is_empty()).then(|| named.as_ref().is_some_and(|named| truth.contains(named)))
        };
        score.events.push(EventScore {
            at,
            built_up: built_up(rooms, at),
            lead: warning.map(|begun| at - seen[begun].at),
            late: any.map(|(begun, _)| at - seen[*begun].at),
            driver_right: right(&seen[spoke].driver, drivers),
            victim_right: right(&seen[spoke].victim, &seen[*event].failed),
        });
    }
    score.warnings = warnings.len() as u64;
    score.false_warnings = warnings
        .iter()
        .filter(|(begun, end)| {
            let from = seen[*begun].at;
            let until = seen.get(*end).map_or(last.at, |of| of.at).min(from + LEAD_MOST);
            // One that the end of the run cuts short is not decided.
            let undecided = *end == seen.len() && last.at - from < HORIZONS[WARN];
            // A warning that stands after an event is that event's.
            let after = events.iter().any(|event| (0.0..=EVENT_GAP).contains(&(from - seen[*event].at)));
            !undecided && !after && !events.iter().any(|event| (from..=until).contains(&seen[*event].at))
        })
        .count() as u64;
    brier(seen, index, &events, &mut score);
    score
}

/// Scores forecasts, not aftermaths: while failures go on, and until they have stopped for a while, nobody forecasts.
fn brier(seen: &[Sighting], index: usize, events: &[usize], score: &mut Score) {
    let end = seen.last().map_or(0.0, |of| of.at);
    let (mut scored, mut failed) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
    for sighting in seen {
        if sighting.exhausted {
            failed = sighting.at;
        }
        let decided = sighting.at + HORIZONS[WARN] <= end;
        if !decided || sighting.at - failed <= EVENT_GAP || sighting.at - scored < SCORED_EVERY {
            continue;
        }
        scored = sighting.at;
        let next = events.iter().map(|event| seen[*event].at).find(|at| *at > sighting.at);
        score.judge(sighting.said[index], next.is_some_and(|at| at - sighting.at <= HORIZONS[WARN]));
    }
}

#[cfg(test)]
mod tests;
