//! Owns what is remembered of one level over time: its run of growth, and how far it rose in windows of each horizon.
//! Refuses to grow: slots and bins are of fixed number, old windows are forgotten by and by.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::forecast::Exhaustion;
use super::peaks::{LOADING, Peaks};
use super::run::Run;
use super::{HORIZONS, WARN};

/// A horizon is watched in this many slots.
const SLOTS: usize = 10;
/// The range of a level is taken over two horizons.
const RANGE: usize = 2 * SLOTS;
const MIB: f64 = 1024.0 * 1024.0;
/// Growth below this counts as none.
const LEAST: f64 = 4.0 * MIB;
/// Bins of growth: none, then four an octave up to 256 GiB.
const BINS: usize = 1 + 4 * 16;
/// Windows in memory: each new one takes this part off the old ones. 600 slots are 60 horizons.
const FORGET: f32 = 1.0 - 1.0 / 600.0;
/// How close to their mean the rises of one bin are taken to lie.
const CLOSE: f64 = 0.01;
/// Windows without growth that every tenant starts with: windows overlap, ten are one horizon's worth.
const CALM: f64 = 10.0;

/// Where a level stands in its own range: what comes next depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    Flat,
    Low,
    High,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Slot {
    at: f64,
    level: f64,
    /// The run's rate when the slot began.
    rate: f64,
    phase: Phase,
    /// How far the ceiling of two horizons was above.
    gap: f64,
    floor: f64,
    ceiling: f64,
    /// When the ceiling was reached.
    ceiling_at: f64,
}

/// What windows did that began in one phase: how many came back to their ceiling, and how far they went above it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Bursts {
    /// Windows that went so far above the ceiling or farther, by bin, and the mean of each bin.
    reached: Vec<f32>,
    means: Vec<f32>,
    windows: f64,
    returned: f64,
}

impl Bursts {
    fn new() -> Self {
        // One more than there are bins: nothing goes beyond the last.
        Self { reached: vec![0.0; BINS + 1], means: vec![0.0; BINS], windows: 0.0, returned: 0.0 }
    }

    fn count(&self, bin: usize) -> f32 {
        self.reached[bin] - self.reached[bin + 1]
    }

    /// A window that rose by `growth` where the ceiling was `gap` above.
    fn add(&mut self, growth: f64, gap: f64) {
        for reached in &mut self.reached {
            *reached *= FORGET;
        }
        let forget = f64::from(FORGET);
        self.windows = self.windows * forget + 1.0;
        self.returned = self.returned * forget + f64::from(u8::from(growth >= 0.9 * gap));
        let growth = growth - gap;
        let bin = bin(growth);
        for reached in &mut self.reached[..=bin] {
            *reached += 1.0;
        }
        #[allow(clippy::cast_possible_truncation, reason = "a rise in bytes, to seven digits")]
        let growth = growth as f32;
        self.means[bin] += (growth - self.means[bin]) / self.count(bin).max(1.0);
    }

    /// The part of the windows that rose by more than `bytes`, with the ceiling `gap` above.
    fn exceeds(&self, bytes: f64, gap: f64) -> f64 {
        if bytes < gap { (1.0 + self.returned) / (2.0 + self.windows) } else { self.passes(bytes - gap) }
    }

    /// The part of the windows that went more than `bytes` above their ceiling.
    ///
    /// In the bin of `bytes` itself the rises lie close to their mean: a bin is 19 % wide, and what comes back to the
    /// same level each time must not seem to pass a wall that it always stops short of.
    fn passes(&self, bytes: f64) -> f64 {
        let first = bin(bytes);
        let whole = f64::from(self.reached[first + 1]);
        let mean = f64::from(self.means[first]);
        let around = (CLOSE * mean).max(1.0);
        let part = if first == 0 { 0.0 } else { ((mean + around - bytes) / (2.0 * around)).clamp(0.0, 1.0) };
        (whole + part * f64::from(self.count(first))) / (CALM + self.windows)
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded by the clamp")]
fn bin(growth: f64) -> usize {
    if growth < LEAST {
        return 0;
    }
    (1.0 + 4.0 * (growth / LEAST).log2()).clamp(1.0, (BINS - 1) as f64) as usize
}

/// The lower edge of a bin in bytes.
fn edge(bin: usize) -> f64 {
    if bin == 0 { 0.0 } else { LEAST * ((bin - 1) as f64 / 4.0).exp2() }
}

/// One horizon's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Scale {
    horizon: f64,
    born: f64,
    slots: VecDeque<Slot>,
    /// Where the level stands now.
    phase: Phase,
    floor: f64,
    ceiling: f64,
    flat: Bursts,
    low: Bursts,
    high: Bursts,
}

impl Scale {
    fn new(at: f64, horizon: f64) -> Self {
        Self {
            horizon,
            born: at,
            slots: VecDeque::with_capacity(RANGE + 1),
            phase: Phase::Flat,
            floor: f64::INFINITY,
            ceiling: 0.0,
            flat: Bursts::new(),
            low: Bursts::new(),
            high: Bursts::new(),
        }
    }

    fn bursts(&self, phase: Phase) -> &Bursts {
        match phase {
            Phase::Flat => &self.flat,
            Phase::Low => &self.low,
            Phase::High => &self.high,
        }
    }

    fn advance(&mut self, at: f64, level: f64, high: f64, rate: f64) {
        if let Some(slot) = self.slots.back_mut() {
            slot.floor = slot.floor.min(level);
            if high > slot.ceiling {
                (slot.ceiling, slot.ceiling_at) = (high, at);
            }
        }
        (self.floor, self.ceiling) = if self.slots.is_empty() {
            (level, high)
        } else {
            (self.floor.min(level), self.ceiling.max(high))
        };
        let range = self.ceiling - self.floor;
        // Within the longest horizon most levels pass through all of their range: where it stands now says little.
        self.phase = if self.horizon >= HORIZONS[HORIZONS.len() - 1]
            || range < (32.0 * MIB).max(0.01 * self.ceiling)
        {
            Phase::Flat
        } else if level < self.floor + 0.5 * range {
            Phase::Low
        } else {
            Phase::High
        };
        if self.slots.back().is_some_and(|slot| at - slot.at < self.horizon / SLOTS as f64) {
            return;
        }
        self.learn();
        if self.slots.len() == RANGE {
            self.slots.pop_front();
            // An old extreme may have gone with it.
            (self.floor, self.ceiling) = self.slots.iter().fold((level, level), |(floor, ceiling), slot| {
                (floor.min(slot.floor), ceiling.max(slot.ceiling))
            });
        }
        let (phase, gap) = (self.phase, self.ceiling - level);
        self.slots.push_back(Slot {
            at,
            level,
            rate,
            phase,
            gap,
            floor: level,
            ceiling: level,
            ceiling_at: at,
        });
    }

    /// The window that is full now: how far above its start did it go, beyond what its run would have done?
    ///
    /// What happens in the first seconds is loading, and says nothing of what comes later.
    fn learn(&mut self) {
        let Some(first) = self.slots.len().checked_sub(SLOTS) else { return };
        let begin = self.slots[first];
        if begin.at - self.born < LOADING {
            return;
        }
        let growth = self
            .slots
            .range(first..)
            .map(|slot| slot.ceiling - begin.rate * (slot.ceiling_at - begin.at) - begin.level)
            .fold(0.0, f64::max);
        match begin.phase {
            Phase::Flat => self.flat.add(growth, begin.gap),
            Phase::Low => self.low.add(growth, begin.gap),
            Phase::High => self.high.add(growth, begin.gap),
        }
    }
}

/// One level: a tenant's on a GPU, or all of the GPU's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Series {
    pub(super) run: Run,
    pub(super) level: f64,
    peaks: Peaks,
    scales: Vec<Scale>,
}

impl Series {
    pub(super) fn new(at: f64, level: f64) -> Self {
        Self {
            run: Run::new(at, level),
            level,
            peaks: Peaks::new(at, level),
            scales: HORIZONS.iter().map(|h| Scale::new(at, *h)).collect(),
        }
    }

    /// `high` is the most that the level may have been since the last call; `rate` overrides the run's own; `refused`
    /// says that it met the wall.
    pub(super) fn advance(&mut self, at: f64, level: f64, high: f64, rate: Option<f64>, refused: bool) {
        self.run.advance(at, level);
        self.level = level;
        if self.peaks.advance(at, level, high.max(level), refused) {
            self.scales.iter_mut().for_each(|scale| scale.slots.clear());
        }
        let rate = rate.unwrap_or_else(|| self.run.rate());
        for scale in &mut self.scales {
            scale.advance(at, level, high.max(level), rate);
        }
    }

    /// The probability of rising by more than `bytes` within a horizon, its run aside: how often it did before, when
    /// it stood in its range as it stands now, and no more than its peaks come so high.
    pub(super) fn bursts(&self, horizon: usize, bytes: f64) -> f64 {
        let scale = &self.scales[horizon];
        let often = scale.bursts(scale.phase).exceeds(bytes, self.gap(horizon));
        if often < 0.01 {
            return often;
        }
        self.peaks.bound(often, self.level, self.level + bytes, HORIZONS[horizon])
    }

    /// The probability that the run alone adds more than `bytes` within a horizon to the ceiling of late.
    ///
    /// Below the ceiling it only comes back, which is what [`Self::bursts`] are about.
    pub(super) fn grows(&self, horizon: usize, bytes: f64) -> f64 {
        let bytes = bytes + self.gap(horizon);
        if self.run.rate() <= 0.0 || bytes > self.most(horizon) {
            return 0.0;
        }
        self.peaks.bound(self.run.survives(bytes), self.level, self.level + bytes, HORIZONS[horizon])
    }

    /// From the level up to the ceiling of the last two horizons.
    pub(super) fn gap(&self, horizon: usize) -> f64 {
        (self.scales[horizon].ceiling - self.level).max(0.0)
    }

    /// What the run adds if it lasts through the horizon.
    pub(super) fn most(&self, horizon: usize) -> f64 {
        self.run.within(HORIZONS[horizon])
    }

    /// The probability of rising by more than `bytes` within a horizon, by run or burst.
    pub(super) fn rises(&self, horizon: usize, bytes: f64) -> f64 {
        1.0 - (1.0 - self.bursts(horizon, bytes)) * (1.0 - self.grows(horizon, bytes))
    }

    /// The growths that are exceeded with these probabilities, falling ones, read off a grid of octaves.
    pub(super) fn quantiles<const N: usize>(&self, horizon: usize, tails: [f64; N]) -> [f64; N] {
        let mut found = [0.0; N];
        let (mut bytes, mut above) = (LEAST, self.rises(horizon, LEAST));
        // Tails that no growth at all exceeds stay at 0.
        let mut open = tails.iter().take_while(|tail| above <= **tail).count()..N;
        while !open.is_empty() && bytes < edge(BINS) {
            let (wider, then) = (2.0 * bytes, self.rises(horizon, 2.0 * bytes).min(above));
            while let Some(place) = open.clone().next()
                && then <= tails[place]
            {
                let part = if above > then { (above - tails[place]) / (above - then) } else { 1.0 };
                found[place] = bytes * part.clamp(0.0, 1.0).exp2();
                open.next();
            }
            (bytes, above) = (wider, then);
        }
        for place in open {
            found[place] = bytes;
        }
        found
    }

    /// What is added on average within a horizon, no more than `room`: by its run above the ceiling of late, and by
    /// bursts above that.
    pub(super) fn mean(&self, horizon: usize, room: f64) -> f64 {
        const POINTS: usize = 12;
        let gap = self.gap(horizon);
        if self.run.rate() <= 0.0 && self.bursts(horizon, LEAST + gap) < 1e-4 {
            return 0.0;
        }
        let step = room / POINTS as f64;
        let at = |point: usize| (point as f64 + 0.5) * step;
        // Both fall with the bytes: beyond the first none there are none.
        let sum = |of: &dyn Fn(f64) -> f64| {
            (0..POINTS).map(|point| of(at(point))).take_while(|part| *part > 0.0).sum::<f64>() * step
        };
        sum(&|bytes| self.grows(horizon, bytes)) + sum(&|bytes| self.bursts(horizon, bytes + gap))
    }

    /// When `room` is gone at this pace, or sooner by a burst of this level's. `None` while nothing grows.
    pub(super) fn exhaustion(&self, room: f64, pace: f64) -> Option<Exhaustion> {
        if pace < MIB / 60.0 {
            return None;
        }
        let [burst] = self.quantiles(WARN, [0.1]);
        let seconds = room / pace;
        Some(Exhaustion { seconds, low: (room - burst.min(room)) / (1.25 * pace), high: 2.0 * seconds })
    }

    /// Least and most of the last two horizons.
    pub(super) fn range(&self, horizon: usize) -> (f64, f64) {
        let scale = &self.scales[horizon];
        (scale.floor.min(self.level), scale.ceiling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = 1024.0 * MIB;

    fn lived(levels: impl IntoIterator<Item = f64>) -> Series {
        let mut levels = levels.into_iter().enumerate();
        let mut series = Series::new(0.0, levels.next().map_or(0.0, |(_, level)| level));
        for (second, level) in levels {
            series.advance(second as f64, level, level, None, false);
        }
        series
    }

    #[test]
    fn a_saw_tooth_knows_where_it_goes_from_where_it_stands() {
        let tooth = |second: u32| if second % 30 < 15 { 10.0 * GIB } else { 14.0 * GIB };
        let low = lived((0..3610).map(tooth));
        let high = lived((0..3620).map(tooth));
        assert!(low.bursts(1, 3.5 * GIB) > 0.9, "{}", low.bursts(1, 3.5 * GIB));
        assert!(low.bursts(1, 5.0 * GIB) < 0.01);
        assert!(high.bursts(1, 0.5 * GIB) < 0.01, "{}", high.bursts(1, 0.5 * GIB));
    }

    #[test]
    fn a_leak_is_its_run_and_not_a_row_of_bursts() {
        let leak = lived((0..600).map(|second| 0.05 * GIB * f64::from(second)));
        assert!(leak.bursts(1, 0.5 * GIB) < 0.1, "{}", leak.bursts(1, 0.5 * GIB));
        assert!(leak.grows(1, 2.5 * GIB) > 0.85);
        let [median] = leak.quantiles(1, [0.5]);
        assert!((median / GIB - 3.0).abs() < 0.6, "{}", median / GIB);
    }

    #[test]
    fn memory_is_fixed() {
        let size = |seconds: u32| {
            let series = lived((0..seconds).map(|second| f64::from(second * 7919 % 97) * GIB));
            serde_json::to_value(&series).unwrap()["scales"][0]["slots"].as_array().unwrap().len()
        };
        assert_eq!(size(500), RANGE);
        assert_eq!(size(5000), RANGE);
    }
}
