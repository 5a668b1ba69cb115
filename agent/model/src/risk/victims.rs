//! Owns who is refused first: for each tenant the time until the room falls short of what it comes back to, and it does.
//! Refuses to choose where chance does: whoever follows the first one closely is named beside it.

use super::HORIZONS;
use super::series::Series;

/// Who follows the first within this much, in seconds and as a part of the first one's own time, is named as well.
const CLOSE_SECONDS: f64 = 2.0;
const CLOSE_PART: f64 = 0.1;
/// Nobody is refused who is not within this many seconds.
const FAR_SECONDS: f64 = 3600.0;
/// Where nothing grows, the room is taken to last for so many of the longest horizons, if nobody bursts.
const STANDS: f64 = 10.0;
/// A burst refuses its own tenant first more often than the pace of its GPU says.
const OWN_BURST: f64 = 0.1;
/// No tenant is less likely than this to burst.
const NEVER: f64 = 1e-6;
/// Bytes of the least ask that counts.
const LEAST: f64 = 1024.0 * 1024.0;
const LONGEST: f64 = HORIZONS[HORIZONS.len() - 1];

/// Where a tenant stands in its own ups and downs, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stand {
    /// What it holds above the floor it comes back to, now and on average.
    now: f64,
    usual: f64,
    /// What it asks for above that floor, each with the seconds until it does on average.
    asks: [(f64, f64); 1 + HORIZONS.len()],
}

impl Stand {
    /// Of a tenant whose level is `usual` on average, who asks in so many seconds, the largest ask `need`.
    pub(super) fn of(series: &Series, usual: f64, need: f64, wait: f64) -> Self {
        let (low, _) = series.range(0);
        let rate = series.run.rate().max(0.0);
        // What a run adds while the range is taken is no swing.
        let grown = |horizon: usize| 2.0 * HORIZONS[horizon] * rate;
        let floor = (low + grown(0)).min(series.level);
        let mut asks = [(need, wait); 1 + HORIZONS.len()];
        for (horizon, ask) in asks[1..].iter_mut().enumerate() {
            // One that grows comes back to nothing older: how large it was before it was started again says nothing.
            if horizon == 0 {
                ask.0 = series.range(horizon).1 - low - grown(horizon);
            } else if rate <= 0.0 {
                // The ceiling was reached once within two horizons: the next time is half a horizon away.
                *ask = (series.range(horizon).1 - low, 0.5 * HORIZONS[horizon]);
            }
        }
        let usual = (usual.max(low) - low).min(series.level.max(usual) - floor);
        Self { now: series.level - floor, usual, asks }
    }
}

/// How long until each is refused, in seconds: `free` bytes are there, `pace` of them go in a second, and `bursts` is
/// somebody's probability to take them all at once within the longest horizon.
pub(super) fn times(free: f64, pace: f64, stands: &[Stand], bursts: impl Fn(usize) -> f64) -> Vec<f64> {
    let usual: f64 = stands.iter().map(|of| of.usual).sum();
    // As it is when everybody is down, and on average: not as it is just now.
    let most = free + stands.iter().map(|of| of.now).sum::<f64>();
    let mean = (most - usual).max(0.0);
    let lasts = pace * LONGEST < mean;
    let pace = pace.max(mean / (STANDS * LONGEST)).max(1.0);
    let time = |(place, of): (usize, &Stand)| {
        let burst = if lasts { OWN_BURST * LONGEST / bursts(place).max(NEVER) } else { f64::INFINITY };
        let left = most - (usual - of.usual);
        let asks = of.asks.iter().filter(|(bytes, _)| *bytes >= LEAST);
        asks.map(|(bytes, wait)| (left - bytes).max(0.0) / pace + wait).fold(burst, f64::min)
    };
    stands.iter().enumerate().map(time).collect()
}

/// The places of those to be named, the first one first.
pub(super) fn named(times: &[f64], most: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..times.len()).filter(|place| times[*place] <= FAR_SECONDS).collect();
    order.sort_by(|one, two| times[*one].total_cmp(&times[*two]));
    let first = order.first().map_or(0.0, |place| times[*place]);
    order.retain(|place| times[*place] <= first * (1.0 + CLOSE_PART) + CLOSE_SECONDS);
    order.truncate(most);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

    /// A tenant's levels of the last ten minutes, its largest ask and how often it asks.
    fn stand(levels: impl Fn(f64) -> f64, need: f64, every: f64) -> Stand {
        let mut series = Series::new(0.0, levels(0.0));
        let mut usual = levels(0.0);
        for second in 1..600 {
            let level = levels(f64::from(second));
            series.advance(f64::from(second), level, level, None, false);
            usual += (level - usual) / 15.0;
        }
        Stand::of(&series, usual, need, 0.5 * every)
    }

    fn leak() -> Stand {
        stand(|second| 0.2 * GIB * second, 0.05 * GIB, 0.25)
    }

    /// Nobody bursts; in GiB and GiB a second.
    fn times_of(free: f64, pace: f64, stands: &[Stand]) -> Vec<f64> {
        times(free * GIB, pace * GIB, stands, |_| 0.0)
    }

    fn names(free: f64, pace: f64, stands: &[Stand]) -> Vec<usize> {
        named(&times_of(free, pace, stands), 3)
    }

    #[test]
    fn who_asks_for_much_each_second_is_refused_before_the_leak_that_takes_little() {
        let service = stand(|_| 4.0 * GIB, 6.0 * GIB, 1.0);
        assert_eq!(names(20.0, 0.2, &[leak(), service]), [1]);
        // Where it asks for little, too, nobody knows which of them it is.
        let small = stand(|_| 4.0 * GIB, 0.06 * GIB, 1.0);
        assert_eq!(names(20.0, 0.2, &[leak(), small]).len(), 2);
    }

    #[test]
    fn who_evaluates_once_in_minutes_is_no_match_for_a_leak_that_is_soon_there() {
        let evaluates = |second: f64| if second % 300.0 > 250.0 { 12.0 * GIB } else { 8.0 * GIB };
        let trainer = stand(|second| evaluates(second + 200.0), 2.0 * GIB, 300.0);
        assert_eq!(names(6.0, 0.2, &[trainer, leak()])[0], 1);
    }

    #[test]
    fn where_somebody_stands_in_its_swing_just_now_does_not_matter() {
        let swings = |phase: f64| {
            stand(
                move |second| if (second + phase) % 10.0 < 3.0 { 9.0 * GIB } else { 5.0 * GIB },
                4.0 * GIB,
                10.0,
            )
        };
        // Level 5 with 14 free, or level 9 with 10 free: the same, for it and for the leak beside it.
        let low = times_of(14.0, 0.2, &[swings(5.0), leak()]);
        let high = times_of(10.0, 0.2, &[swings(1.0), leak()]);
        for (low, high) in low.iter().zip(&high) {
            // Its mean of late differs by its phase: 2 GiB at the most, of which the leak's time depends.
            assert!((low - high).abs() < 8.0, "{low} {high}");
        }
        assert!(low[0] < low[1] && high[0] < high[1], "{low:?} {high:?}");
    }

    #[test]
    fn on_a_full_gpu_where_nothing_grows_who_swings_is_named() {
        let swings = stand(|second| if second % 10.0 < 3.0 { 9.0 * GIB } else { 5.0 * GIB }, 4.0 * GIB, 10.0);
        let asks = stand(|_| 30.0 * GIB, 1.0 * GIB, 1.0);
        let names = names(0.0, 0.0, &[swings, asks]);
        assert!(!names.is_empty());
    }

    #[test]
    fn where_nothing_grows_the_likeliest_burst_is_refused() {
        let silent = [stand(|_| 4.0 * GIB, 0.1 * GIB, 1.0), stand(|_| 5.0 * GIB, 0.1 * GIB, 1.0)];
        let bursts = |place: usize| if place == 1 { 0.5 } else { 0.0 };
        assert_eq!(named(&times(20.0 * GIB, 0.0, &silent, bursts), 3), [1]);
    }

    #[test]
    fn nobody_is_named_who_does_not_ask() {
        let silent = stand(|_| 4.0 * GIB, 0.0, f64::INFINITY);
        assert_eq!(names(20.0, 0.0, &[silent]), [0; 0]);
    }
}
