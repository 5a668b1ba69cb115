//! Owns one memory's run under every rule: its room, what was said of it, which exhaustions and warnings there were.
//! Refuses to know what memory it is: a GPU's, or what a memory cgroup may hold.

use super::{
    Bar, Change, EventScore, HORIZONS, LEAD_LEAST, LEAD_MOST, Line, Rule, Score, Truth, WARN, Watch,
};
use crate::Tenant;

/// Failures within this of one another are one event.
const EVENT_GAP: f64 = 120.0;
/// What grows for so many seconds before the end has built up.
const BUILDING: f64 = 60.0;
/// Forecasts are scored this often; the moments in between are much the same.
const SCORED_EVERY: f64 = 10.0;
/// What is remembered of one moment.
#[derive(Clone, Debug)]
pub(super) struct Sighting {
    pub(super) at: f64,
    pub(super) exhausted: bool,
    /// Within the longest horizon, by our forecast.
    pub(super) longest: f64,
    /// By rule.
    pub(super) said: Vec<f64>,
    pub(super) driver: Option<Tenant>,
    pub(super) victims: Vec<Tenant>,
    /// How many tenants were there.
    pub(super) tenants: usize,
    /// Who failed just now.
    pub(super) failed: Vec<Tenant>,
}

#[derive(Clone, Copy, Debug)]
struct Room {
    at: f64,
    free: f64,
}

/// One run.
#[derive(Debug)]
pub(super) struct Track {
    lines: Vec<Line>,
    /// Free memory over time, from the first moment on: what builds up may begin before anything is forecast.
    rooms: Vec<Room>,
    seen: Vec<Sighting>,
}

impl Track {
    pub(super) fn new(rules: &[Rule]) -> Self {
        let lines = rules.iter().map(|rule| Line::over(rule.window())).collect();
        Self { lines, rooms: Vec::new(), seen: Vec::new() }
    }

    pub(super) fn room(&mut self, at: f64, free: f64) {
        self.rooms.push(Room { at, free });
    }

    /// What each rule says of so much that is free under such a limit; `risk` is the forecast's word.
    pub(super) fn said(&mut self, rules: &[Rule], at: f64, limit: f64, free: f64, risk: f64) -> Vec<f64> {
        let say = |(rule, line): (&Rule, &mut Line)| match rule {
            Rule::Risk => risk,
            Rule::Used { percent } => yes(limit - free > limit * f64::from(*percent) / 100.0),
            Rule::Linear { .. } => {
                line.push(at, free);
                yes(line.after(at + HORIZONS[WARN]).is_some_and(|then| then <= 0.0))
            }
        };
        rules.iter().zip(&mut self.lines).map(say).collect()
    }

    pub(super) fn see(&mut self, sighting: Sighting) {
        self.seen.push(sighting);
    }

    pub(super) fn score(&self, index: usize, rule: Rule, truth: &Truth, bar: &Bar) -> Score {
        of_run(&self.seen, &self.rooms, index, rule, truth, bar)
    }
}

fn yes(said: bool) -> f64 {
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

/// The bar of a rule that says yes or no.
const PLAIN: Bar = Bar { minute: 0.5, minute_for: 0.0, longest: f64::INFINITY, longest_for: 0.0 };

/// From when to when a rule's warnings stood, as indexes.
fn warnings(seen: &[Sighting], index: usize, rule: Rule, bar: &Bar) -> Vec<(usize, usize)> {
    let bar = if rule == Rule::Risk { bar } else { &PLAIN };
    let (mut warnings, mut watch, mut begun) = (Vec::new(), Watch::default(), 0);
    let mut open = false;
    for (place, of) in seen.iter().enumerate() {
        match watch.advance(bar, of.at, of.said[index], of.longest, of.exhausted) {
            Some(Change::Raised) => (begun, open) = (place, true),
            Some(Change::Cleared | Change::Ended) => {
                warnings.push((begun, place));
                open = false;
            }
            Some(Change::CameTrue) | None => {}
        }
    }
    if open {
        warnings.push((begun, seen.len()));
    }
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

fn of_run(seen: &[Sighting], rooms: &[Room], index: usize, rule: Rule, truth: &Truth, bar: &Bar) -> Score {
    let mut score = Score::default();
    let [first, .., last] = seen else { return score };
    score.seconds = last.at - first.at;
    let warnings = warnings(seen, index, rule, bar);
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
        let right = |named: &[Tenant], truth: &[Tenant]| {
            (!truth.is_empty()).then(|| named.iter().any(|named| truth.contains(named)))
        };
        let (named, failed) = (&seen[spoke].victims, &seen[*event].failed);
        score.events.push(EventScore {
            at,
            built_up: truth.began(at).map_or_else(|| built_up(rooms, at), |began| at - began >= BUILDING),
            lead: warning.map(|begun| at - seen[begun].at),
            late: any.map(|(begun, _)| at - seen[*begun].at),
            driver_right: right(seen[spoke].driver.as_slice(), &truth.drivers),
            victim_right: right(named, failed),
            victim_first: right(&named[..named.len().min(1)], failed),
            victims: named.len(),
            tenants: seen[spoke].tenants,
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
