//! Owns the turning points of one level: how high it came before it went down again, and how often it went higher still.
//! Refuses to take a wall for a peak: what was stopped by a refusal would have gone on, and all is forgotten with it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Turning points in memory.
const KEPT: usize = 32;
const MIB: f64 = 1024.0 * 1024.0;
/// A turn by less than this, or by less than this part of the leg before it, is no turning point.
const TURN: f64 = 64.0 * MIB;
const PART: f64 = 0.25;
/// A leg is forgotten with time: a program that was loaded an hour ago does not hide its steps.
const LEG_SECONDS: f64 = 600.0;
/// Peaks within this many seconds count as one, the highest: memory is of minutes, not of steps.
const TOGETHER: f64 = 30.0;
/// What happens in the first seconds is loading.
pub(super) const LOADING: f64 = 60.0;
/// Peaks within this part of the range below the record are of its kind.
const NEAR: f64 = 0.25;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Peak {
    at: f64,
    top: f64,
    /// The trough before it.
    trough: f64,
    /// By how much it was above all that were remembered then; 0 when it was not.
    record: f64,
}

/// The last turning points of a level.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Peaks {
    kept: VecDeque<Peak>,
    /// Their tops, lowest first.
    tops: Vec<f64>,
    /// The highest, and what goes beyond it: how often, by how many bytes.
    record: f64,
    beyond: (f64, f64),
    born: f64,
    falling: bool,
    /// The last turning point, when it was, and the extreme since.
    turned: f64,
    turned_at: f64,
    extreme: f64,
    stopped: bool,
}

impl Peaks {
    pub(super) fn new(at: f64, level: f64) -> Self {
        Self { born: at, turned: level, turned_at: at, extreme: level, ..Self::default() }
    }

    /// `high` is the most that the level may have been since the last call, `refused` whether it met the wall.
    ///
    /// True when it came down from the wall: what comes now is another life, of another process as a rule.
    pub(super) fn advance(&mut self, at: f64, level: f64, high: f64, refused: bool) -> bool {
        if at - self.born < LOADING && !refused {
            (self.turned, self.turned_at, self.extreme) = (level, at, level);
            return false;
        }
        self.extreme = if self.falling { self.extreme.min(level) } else { self.extreme.max(high) };
        self.stopped |= refused && !self.falling;
        let leg = (self.extreme - self.turned).abs() * (-(at - self.turned_at) / LEG_SECONDS).exp();
        let turn = TURN.max(PART * leg);
        if self.falling && high > self.extreme + turn {
            (self.turned, self.turned_at) = (self.extreme, at);
            (self.falling, self.extreme, self.stopped) = (false, high, refused);
        } else if !self.falling && level < self.extreme - turn {
            let stopped = std::mem::take(&mut self.stopped);
            if stopped {
                *self = Self::new(at, level);
                return true;
            }
            self.keep(at, self.extreme, self.turned);
            (self.turned, self.turned_at) = (self.extreme, at);
            (self.falling, self.extreme) = (true, level);
        }
        false
    }

    fn keep(&mut self, at: f64, top: f64, trough: f64) {
        let record = if self.kept.is_empty() { 0.0 } else { (top - self.record).max(0.0) };
        match self.kept.back_mut() {
            Some(last) if at - last.at < TOGETHER => {
                (last.top, last.trough) = (last.top.max(top), last.trough.min(trough));
                last.record += record;
            }
            _ => {
                if self.kept.len() == KEPT {
                    self.kept.pop_front();
                }
                self.kept.push_back(Peak { at, top, trough, record });
            }
        }
        self.tops = self.kept.iter().map(|peak| peak.top).collect();
        self.tops.sort_by(f64::total_cmp);
        self.learn();
    }

    fn learn(&mut self) {
        let (trough, highest) = self.kept.iter().fold((f64::MAX, 0.0_f64), |(trough, highest), peak| {
            (trough.min(peak.trough), highest.max(peak.top))
        });
        self.record = highest;
        let range = highest - trough;
        let alike = self.kept.iter().filter(|peak| peak.top >= highest - NEAR * range).count() as f64;
        // Of unrelated peaks the next is the highest with probability 1/(n + 1), and by about a part of that. Where
        // records come more often than that, something grows: the newer half says how often and by how much.
        let newer = || self.kept.iter().skip(self.kept.len().div_ceil(2));
        let records = newer().filter(|peak| peak.record > 0.0).count() as f64;
        let by = newer().map(|peak| peak.record).sum::<f64>() / records.max(1.0);
        let often = (records / (newer().count() as f64 + 2.0)).max(1.0 / (alike + 1.0));
        self.beyond = (often, (range / (2.0 * (alike + 1.0))).max(by));
    }

    /// `said`, but no more than the probability that the peak under way, or any within the horizon, comes above `wall`
    /// from `level`. As it is while nothing is known.
    pub(super) fn bound(&self, said: f64, level: f64, wall: f64, horizon: f64) -> f64 {
        if self.kept.is_empty() || wall <= level {
            return said;
        }
        let (often, scale) = self.beyond;
        if level > self.record {
            // A record as it is made: as far again as it is above the last one, or above what records exceed by.
            // One that is barely made is likely the last of its kind, and goes the less far.
            let above = (level - self.record + scale).max(1.0);
            return said.min((above / (above + wall - level)).powf(1.0 + scale / above));
        }
        let from = |than: f64| (self.tops.len() - self.tops.partition_point(|top| *top < than)) as f64;
        let (reached, passed) = (from(level), from(wall));
        let known = passed / (reached + 1.0);
        let new = if wall > self.record { often * scale / (scale + wall - self.record) } else { often };
        let one = known + (1.0 - known) * new;
        // Of several peaks one is the likelier to pass: the power is dear, and seldom needed.
        if said <= one {
            return said;
        }
        let many = self.peaks_in(horizon);
        said.min(if many <= 1.0 { one } else { 1.0 - (1.0 - one).powf(many) })
    }

    /// How many peaks there are in so many seconds, one at the least.
    fn peaks_in(&self, seconds: f64) -> f64 {
        let (Some(first), Some(last)) = (self.kept.front(), self.kept.back()) else { return 1.0 };
        let each = (last.at - first.at) / (self.kept.len() as f64 - 1.0).max(1.0);
        if self.kept.len() < 2 || each <= 0.0 { 1.0 } else { (seconds / each).max(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = 1024.0 * MIB;

    fn lived(levels: impl IntoIterator<Item = f64>) -> Peaks {
        let mut levels = levels.into_iter().enumerate();
        let mut peaks = Peaks::new(-LOADING, levels.next().map_or(0.0, |(_, level)| level));
        for (second, level) in levels {
            peaks.advance(second as f64, level, level, false);
        }
        peaks
    }

    fn wave(second: u32) -> f64 {
        (10.0 + 10.0 * (f64::from(second) * std::f64::consts::TAU / 300.0).sin()) * GIB
    }

    #[test]
    fn a_wave_is_not_expected_far_above_its_peaks() {
        let one = lived((0..360).map(wave)).bound(1.0, 16.0 * GIB, 24.0 * GIB, 60.0);
        let many = lived((0..3660).map(wave)).bound(1.0, 16.0 * GIB, 24.0 * GIB, 60.0);
        assert!(one < 0.3, "{one}");
        assert!(many < 0.02, "{many}");
        assert!(lived((0..3660).map(wave)).bound(1.0, 16.0 * GIB, 19.0 * GIB, 60.0) > 0.9);
    }

    #[test]
    fn nothing_is_known_of_what_never_fell() {
        let leak = lived((0..600).map(|second| f64::from(second) * GIB));
        assert!(leak.bound(1.0, 600.0 * GIB, 700.0 * GIB, 60.0) > 0.99);
    }

    #[test]
    fn what_leaves_its_peaks_behind_is_judged_by_how_far_it_left_them() {
        let mut drifts = lived((0..3000).map(wave));
        for second in 0..200 {
            let level = (20.0 + 0.1 * f64::from(second)) * GIB;
            drifts.advance(3000.0 + f64::from(second), level, level, false);
        }
        let pass = drifts.bound(1.0, 40.0 * GIB, 50.0 * GIB, 60.0);
        assert!((0.6..0.8).contains(&pass), "{pass}");
    }

    #[test]
    fn a_wall_is_no_peak_and_what_was_before_it_is_forgotten() {
        let mut peaks = lived((0..3660).map(wave));
        assert!(!peaks.advance(3660.0, 15.0 * GIB, 15.0 * GIB, false));
        peaks.advance(3700.0, 24.0 * GIB, 24.0 * GIB, true);
        assert!(peaks.advance(3701.0, 0.0, 0.0, false));
        assert!(peaks.bound(1.0, 16.0 * GIB, 24.0 * GIB, 60.0) > 0.99);
    }
}
