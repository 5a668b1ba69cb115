//! Owns the curvature of a run of growth: whether it hurries or tires, and how sure that is.
//! Refuses to extrapolate: it says how likely the run still comes so far, never where it will be.

use serde::{Deserialize, Serialize};

/// A run is remembered at so many points at the most, evenly spaced.
const KNOTS: usize = 36;
/// Points it takes to say anything.
const LEAST: usize = 6;

/// The run so far, coarsely: a point every `every` seconds, twice as far apart whenever there are too many.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Bend {
    knots: Vec<(f64, f64)>,
    every: f64,
}

/// A growth's speed and its change per second, with the standard error of the change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Motion {
    pub(super) speed: f64,
    pub(super) change: f64,
    pub(super) unsure: f64,
}

impl Bend {
    pub(super) fn start(&mut self, at: f64, level: f64) {
        self.knots.clear();
        self.knots.push((at, level));
        self.every = 1.0;
    }

    pub(super) fn advance(&mut self, at: f64, level: f64) {
        if self.knots.last().is_some_and(|(last, _)| at - last < 0.99 * self.every) {
            return;
        }
        self.knots.push((at, level));
        if self.knots.len() > KNOTS {
            let mut odd = false;
            self.knots.retain(|_| {
                odd = !odd;
                odd
            });
            self.every *= 2.0;
        }
    }

    /// How the newest third of the run moves.
    ///
    /// A line through the growth from point to point, not a parabola through the points: what is uncertain in a run
    /// adds up, so that points far apart err together and their differences do not. The change is shrunk towards none:
    /// before it is measured, a run is expected to change its speed by half within its own age.
    pub(super) fn motion(&self, rate: f64) -> Motion {
        let plain = |unsure| Motion { speed: rate, change: 0.0, unsure };
        let Some((first, last)) = self.knots.first().zip(self.knots.last()) else { return plain(0.0) };
        let age = (last.0 - first.0).max(1.0);
        let expected = rate / (2.0 * age);
        let newer = &self.knots[2 * self.knots.len() / 3..];
        if newer.len() < LEAST {
            return plain(expected);
        }
        let steps = || {
            newer.windows(2).map(|pair| {
                let span = (pair[1].0 - pair[0].0).max(0.1);
                (f64::midpoint(pair[0].0, pair[1].0), (pair[1].1 - pair[0].1) / span)
            })
        };
        let count = (newer.len() - 1) as f64;
        let (time, speed) = steps().fold((0.0, 0.0), |sum, (at, step)| (sum.0 + at, sum.1 + step));
        let (time, speed) = (time / count, speed / count);
        let (across, along) = steps().fold((0.0, 0.0), |sum, (at, step)| {
            (sum.0 + (at - time) * (step - speed), sum.1 + (at - time) * (at - time))
        });
        let change = across / along.max(1e-9);
        let rest: f64 = steps().map(|(at, step)| (step - speed - change * (at - time)).powi(2)).sum();
        let error = (rest / (count - 2.0).max(1.0) / along.max(1e-9)).max(1e-12);
        let trust = expected * expected / (expected * expected + error);
        Motion { speed: rate, change: trust * change, unsure: (trust * error).sqrt() }
    }
}

impl Motion {
    /// The probability that it comes `bytes` further before its speed is spent.
    pub(super) fn reaches(self, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 1.0;
        }
        let spent = -self.speed * self.speed / (2.0 * bytes);
        let unsure = self.unsure.max(1e-9 * self.speed.max(1.0));
        // The logistic curve for the normal one: within 1 % of it, and cheap. Twice: what is as likely to be tired as not
        // is no news, that runs end is in the rule of thumb.
        (2.0 / (1.0 + (-1.702 * (self.change - spent) / unsure).exp())).min(1.0)
    }

    /// What it adds within so many seconds, hurrying counted and tiring not: that is what [`Self::reaches`] is about.
    pub(super) fn within(self, seconds: f64) -> f64 {
        // At the most three times the present speed: what hurries does not for ever.
        let gain = (0.5 * self.change.max(0.0) * seconds).min(self.speed);
        (self.speed + gain) * seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn motion(level: impl Fn(f64) -> f64, seconds: u32) -> Motion {
        let mut bend = Bend::default();
        bend.start(0.0, level(0.0));
        for second in 1..=seconds {
            bend.advance(f64::from(second), level(f64::from(second)));
        }
        let last = f64::from(seconds);
        bend.motion(level(last) - level(last - 1.0))
    }

    #[test]
    fn a_wave_tires_before_its_top_and_a_line_does_not() {
        let wave = |second: f64| 1e10 - 1e10 * (second * std::f64::consts::PI / 120.0).cos();
        // Three quarters up: 5e9 to its top, 8e9 to a wall that it never meets.
        let tired = motion(wave, 90);
        assert!(tired.reaches(1.2e10) < 0.1, "{tired:?}");
        let line = motion(|second| 1e8 * second, 90);
        assert!(line.reaches(8e9) > 0.9, "{line:?}");
    }

    #[test]
    fn what_hurries_is_ahead_of_its_pace() {
        let hurries = motion(|second| 1e6 * second * second, 60);
        let line = motion(|second| 1.2e8 * second, 60);
        assert!(hurries.within(60.0) > 1.3 * line.within(60.0), "{hurries:?} {line:?}");
    }

    #[test]
    fn memory_is_fixed() {
        let mut bend = Bend::default();
        bend.start(0.0, 0.0);
        (1..100_000).for_each(|second| bend.advance(f64::from(second), f64::from(second)));
        assert!(bend.knots.len() <= KNOTS);
    }
}
