//! Owns runs of growth: since when a level rises, how fast without its largest jump, and how far such runs go.
//! Refuses steps and saw-teeth: growth is growth of the floor, and one jump is not a run.

use serde::{Deserialize, Serialize};

use super::bend::{Bend, Motion};

/// The level counts as the least of this many seconds: what comes and goes within them is no growth.
const FLOOR_SECONDS: usize = 5;
/// Rises that make a run.
const RISES: u32 = 3;
/// A run is over when nothing rose for this long, or for half of its own age.
const PATIENCE: f64 = 15.0;
/// The pace of late is taken over this many seconds or a quarter of the run, twice.
const SPAN: f64 = 10.0;
/// What counts as a rise, and as a fall.
const RISE: f64 = 1024.0 * 1024.0;
const FALL: f64 = 64.0 * RISE;
/// A start is over after so many seconds; until then it is the less likely to go on, down to the fourth power.
const START: (f64, f64) = (20.0, 60.0);
/// A run that begins within so many seconds of its series is a start: libraries are loaded first.
const BEGINS: f64 = 15.0;
/// A run that begins below this is a start, too, however old its series, and a shorter one: what was read once is read
/// again in less time.
const NOTHING: f64 = FALL;
const RELOAD: (f64, f64) = (15.0, 35.0);
/// The power of the rule of thumb. Below 1, as three rises in a row are no moment drawn at random from a run's life.
const BELIEF: f64 = 0.7;

/// Where a run was when a span began, and what came since.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Mark {
    at: f64,
    top: f64,
    rises: u32,
    biggest: f64,
}

impl Mark {
    fn new(at: f64, top: f64) -> Self {
        Self { at, top, rises: 0, biggest: 0.0 }
    }

    fn rise(&mut self, by: f64) {
        self.rises += 1;
        self.biggest = self.biggest.max(by);
    }
}

/// The running growth of one series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    born: f64,
    /// The least level in each of the last seconds, newest last.
    floors: Vec<(i64, f64)>,
    at: f64,
    level: f64,
    floor: f64,
    begun: f64,
    base: f64,
    top: f64,
    last_rise: f64,
    biggest: f64,
    rises: u32,
    /// The begin of the last two spans: a run that slows down or hurries has the pace of these.
    marks: [Mark; 2],
    bend: Bend,
    now: Going,
}

/// What the run looks like at the last tick, worked out once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Going {
    rate: f64,
    motion: Motion,
    alive: f64,
    risen: f64,
    /// Of the rule of thumb.
    power: f64,
}

impl Run {
    pub(super) fn new(at: f64, level: f64) -> Self {
        Self {
            born: at,
            floors: Vec::with_capacity(FLOOR_SECONDS),
            at,
            level,
            floor: level,
            begun: at,
            base: level,
            top: level,
            last_rise: at,
            biggest: 0.0,
            rises: 0,
            marks: [Mark::new(at, level); 2],
            bend: Bend::default(),
            now: Going::default(),
        }
    }

    pub(super) fn advance(&mut self, at: f64, level: f64) {
        let floor = self.floor_with(at, level);
        if floor > self.top + RISE {
            if self.rises == 0 {
                (self.begun, self.base) = (self.at, self.top);
            }
            let by = floor - self.top;
            self.biggest = self.biggest.max(by);
            (self.top, self.last_rise) = (floor, at);
            self.rises += 1;
            if self.rises == 1 {
                self.marks = [Mark::new(self.begun, self.base); 2];
                self.bend.start(self.begun, self.base);
            }
            self.marks.iter_mut().for_each(|mark| mark.rise(by));
            if at - self.marks[1].at > SPAN.max(0.25 * self.age()) {
                self.marks = [self.marks[1], Mark::new(at, floor)];
            }
        }
        let fell = floor < self.top - FALL.max(0.25 * (self.top - self.base));
        let rested = at - self.last_rise > PATIENCE.max(0.5 * self.age());
        if fell || rested {
            (self.rises, self.biggest) = (0, 0.0);
            (self.begun, self.last_rise, self.base, self.top) = (at, at, floor, floor);
        }
        (self.at, self.level, self.floor) = (at, level, floor);
        if self.rises > 0 {
            self.bend.advance(at, floor);
        }
        self.now = self.going();
    }

    fn floor_with(&mut self, at: f64, level: f64) -> f64 {
        #[allow(clippy::cast_possible_truncation, reason = "seconds since the agent started")]
        let second = at.floor() as i64;
        match self.floors.last_mut() {
            Some((newest, floor)) if *newest == second => *floor = floor.min(level),
            _ => {
                if self.floors.len() == FLOOR_SECONDS {
                    self.floors.remove(0);
                }
                self.floors.push((second, level));
            }
        }
        self.floors.iter().map(|(_, floor)| *floor).fold(f64::INFINITY, f64::min)
    }

    /// It began with the series, or from nothing: when it is over.
    fn start(&self) -> Option<(f64, f64)> {
        if self.begun - self.born < BEGINS { Some(START) } else { (self.base < NOTHING).then_some(RELOAD) }
    }

    /// From the first rise to the last, in seconds.
    fn age(&self) -> f64 {
        self.last_rise - self.begun
    }

    /// Growth in bytes per second, without the largest jump; 0 when there is no run.
    pub(super) fn rate(&self) -> f64 {
        self.now.rate
    }

    /// What it adds within so many seconds if it lasts.
    pub(super) fn within(&self, seconds: f64) -> f64 {
        self.now.motion.within(seconds)
    }

    fn going(&self) -> Going {
        let rate = self.pace();
        if rate <= 0.0 {
            return Going::default();
        }
        let unseen = (FLOOR_SECONDS as f64 - 1.0) * rate;
        // At the present pace: a load that went before a leak is not the leak's.
        let risen = (self.top - self.base - self.biggest).min(rate * self.age()) + unseen;
        let young = self.start().map_or(0.0, |(from, to)| ((to - self.age()) / (to - from)).clamp(0.0, 1.0));
        let power = BELIEF * (1.0 + 3.0 * young);
        Going { rate, motion: self.bend.motion(rate), alive: self.alive(rate), risen, power }
    }

    fn pace(&self) -> f64 {
        if self.rises < RISES {
            return 0.0;
        }
        let gap = self.age() / f64::from(self.rises);
        // A run that pauses for longer than it did before is getting slower.
        let until = if self.at - self.last_rise > 2.0 * gap + 1.0 { self.at } else { self.last_rise };
        let others = f64::from(self.rises - 1) / f64::from(self.rises);
        let overall = (self.top - self.base - self.biggest) / ((until - self.begun) * others).max(1.0);
        let [mark, _] = self.marks;
        let span = (until - mark.at).max(1.0);
        let recent = (self.top - mark.top) / span;
        if recent <= overall || mark.rises < RISES {
            return overall.min(recent);
        }
        // It hurries, and not by one jump alone: sequences that lengthen take more at each step.
        let others = f64::from(mark.rises - 1) / f64::from(mark.rises);
        overall.max((self.top - mark.top - mark.biggest) / (span * others))
    }

    /// How far the run still seems to be under way. One that rose every second has a level above its floor; one that
    /// rose at times is waited for twice as long as it paused before.
    fn alive(&self, rate: f64) -> f64 {
        let gap = self.age() / f64::from(self.rises.max(1));
        if gap < 1.5 {
            return ((self.level - self.floor) / (2.0 * rate).max(1.0)).clamp(0.0, 1.0);
        }
        let paused = (self.at - self.last_rise).max(1.0);
        ((2.0 * gap + 1.0) / paused).min(1.0).powi(2)
    }

    /// The probability that the run adds more than `bytes` before it ends.
    ///
    /// The rule of thumb is Gott's: what has risen by x rises by y more with probability x / (x + y), to a power. A run
    /// that began with the series is a start, and starts end. One that tires must have the speed to come so far.
    pub(super) fn survives(&self, bytes: f64) -> f64 {
        let now = &self.now;
        let thumb = now.risen / (now.risen + bytes);
        now.alive * thumb.powf(now.power) * now.motion.reaches(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

    fn ran(levels: impl IntoIterator<Item = f64>) -> Run {
        let mut levels = levels.into_iter().enumerate();
        let mut run = Run::new(0.0, levels.next().map_or(0.0, |(_, level)| level));
        for (second, level) in levels {
            run.advance(second as f64, level);
        }
        run
    }

    #[test]
    fn a_leak_has_its_rate_and_goes_on_as_long_as_it_did() {
        let flat = std::iter::repeat_n(10.0 * GIB, 60);
        let run = ran(flat.chain((0..60).map(|second| (10.0 + 0.1 * f64::from(second)) * GIB)));
        assert!((run.rate() / GIB - 0.1).abs() < 0.005, "{}", run.rate() / GIB);
        assert!((0.55..0.65).contains(&run.survives(6.0 * GIB)), "{}", run.survives(6.0 * GIB));
    }

    #[test]
    fn growth_that_hurries_has_the_pace_of_late() {
        let run = ran((0..80).map(|second| 0.01 * f64::from(second * second) * GIB));
        // 0.75 GiB a second over all, 1.6 at the end; two spans before it, 40 s, have 1.1 to 1.2.
        assert!((1.1..1.6).contains(&(run.rate() / GIB)), "{}", run.rate() / GIB);
    }

    #[test]
    fn one_jump_and_a_saw_tooth_are_no_runs() {
        let jump = ran((0..60).map(|second| if second < 50 { GIB } else { 20.0 * GIB }));
        assert!(jump.rate().abs() < 1.0);
        let teeth = ran((0..120).map(|second| f64::from(second % 4) * GIB));
        assert!(teeth.rate().abs() < 1.0);
    }
}
