//! Owns runs of growth: since when a level rises, how fast without its largest jump, and how long such runs last.
//! Refuses steps and saw-teeth: growth is growth of the floor, and one jump is not a run.

use serde::{Deserialize, Serialize};

/// The level counts as the least of this many seconds: what comes and goes within them is no growth.
const FLOOR_SECONDS: usize = 5;
/// Rises that make a run.
const RISES: u32 = 3;
/// A run is over when nothing rose for this long, or for half of its own age.
const PATIENCE: f64 = 15.0;
/// What counts as a rise, and as a fall.
const RISE: f64 = 1024.0 * 1024.0;
const FALL: f64 = 64.0 * RISE;
/// Durations of ended runs, in powers of two of seconds from 4 s on.
const DURATIONS: usize = 12;
/// A run that ends is worth this much less at each later one.
const FORGET: f32 = 0.97;
/// How much the rule of thumb weighs, in runs.
const THUMB: f64 = 1.0;

/// The running growth of one series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    born: f64,
    /// The least level in each of the last seconds, newest last.
    floors: Vec<(i64, f64)>,
    at: f64,
    floor: f64,
    begun: f64,
    base: f64,
    top: f64,
    last_rise: f64,
    biggest: f64,
    rises: u32,
    /// Ended runs by duration, old ones forgotten.
    ended: Vec<f32>,
}

impl Run {
    pub(super) fn new(at: f64, level: f64) -> Self {
        Self {
            born: at,
            floors: Vec::with_capacity(FLOOR_SECONDS),
            at,
            floor: level,
            begun: at,
            base: level,
            top: level,
            last_rise: at,
            biggest: 0.0,
            rises: 0,
            ended: vec![0.0; DURATIONS],
        }
    }

    pub(super) fn advance(&mut self, at: f64, level: f64) {
        let floor = self.floor_with(at, level);
        if floor > self.top + RISE {
            if self.rises == 0 {
                (self.begun, self.base) = (self.at, self.top);
            }
            self.biggest = self.biggest.max(floor - self.top);
            (self.top, self.last_rise) = (floor, at);
            self.rises += 1;
        }
        let fell = floor < self.top - FALL.max(0.25 * (self.top - self.base));
        let rested = at - self.last_rise > PATIENCE.max(0.5 * self.age());
        if fell || rested {
            self.end();
            (self.begun, self.last_rise, self.base, self.top) = (at, at, floor, floor);
        }
        (self.at, self.floor) = (at, floor);
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

    fn end(&mut self) {
        if self.rises >= RISES {
            for count in &mut self.ended {
                *count *= FORGET;
            }
            let bin = bin(self.age());
            self.ended[bin] += 1.0;
        }
        (self.rises, self.biggest) = (0, 0.0);
    }

    /// From the first rise to the last, in seconds.
    fn age(&self) -> f64 {
        self.last_rise - self.begun
    }

    /// Growth in bytes per second, without the largest jump; 0 when there is no run.
    pub(super) fn rate(&self) -> f64 {
        if self.rises < RISES {
            return 0.0;
        }
        let gap = self.age() / f64::from(self.rises);
        // A run that pauses for longer than it did before is getting slower.
        let until = if self.at - self.last_rise > 2.0 * gap + 1.0 { self.at } else { self.last_rise };
        let others = f64::from(self.rises - 1) / f64::from(self.rises);
        (self.top - self.base - self.biggest) / ((until - self.begun) * others).max(1.0)
    }

    /// The probability that the run goes on for another `seconds`.
    ///
    /// The rule of thumb is Gott's: what has lasted for t lasts as long again with probability 1/2. A run that began
    /// with the series is a start, and starts end: there it is 1/4. Against it stand this series' own runs.
    pub(super) fn survives(&self, seconds: f64) -> f64 {
        let lasted = self.age() + FLOOR_SECONDS as f64 - 1.0;
        let thumb = lasted / (lasted + seconds);
        let thumb = if self.begun - self.born < 5.0 && lasted < 45.0 { thumb * thumb } else { thumb };
        let longer = |than: f64| -> f64 {
            self.ended.iter().enumerate().map(|(index, count)| f64::from(*count) * above(index, than)).sum()
        };
        (THUMB * thumb + longer(lasted + seconds)) / (THUMB + longer(lasted))
    }
}

fn bin(seconds: f64) -> usize {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded by the clamp")]
    let index = (seconds / 4.0).max(1.0).log2().clamp(0.0, (DURATIONS - 1) as f64) as usize;
    index
}

/// Which part of a bin's runs lasted longer than `than` seconds.
fn above(index: usize, than: f64) -> f64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "below DURATIONS")]
    let low = if index == 0 { 0.0 } else { 4.0 * 2f64.powi(index as i32) };
    let high = if index == 0 { 8.0 } else { 2.0 * low };
    ((high - than) / (high - low)).clamp(0.0, 1.0)
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
        assert!((0.45..0.55).contains(&run.survives(60.0)), "{}", run.survives(60.0));
    }

    #[test]
    fn one_jump_and_a_saw_tooth_are_no_runs() {
        let jump = ran((0..60).map(|second| if second < 50 { GIB } else { 20.0 * GIB }));
        assert!(jump.rate().abs() < 1.0);
        let teeth = ran((0..120).map(|second| f64::from(second % 4) * GIB));
        assert!(teeth.rate().abs() < 1.0);
    }

    #[test]
    fn runs_that_always_end_are_not_trusted_to_go_on() {
        // Half a minute up, then down: ten times over.
        let slow = |second: u32| f64::from(second % 40).min(30.0) * GIB;
        let wise = ran((0..420).map(slow));
        let fresh = ran(std::iter::repeat_n(0.0, 60).chain((400..420).map(slow)));
        assert!(wise.survives(60.0) < 0.5 * fresh.survives(60.0));
    }
}
