//! Owns whether the tick is alive: when the last one came to its end, and how long that may be ago.
//! Refuses to restart anything: `/healthz` says it, and whoever started the agent acts.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// An agent that has not ticked for so many intervals hangs, and never before [`LEAST`]: a loaded node makes a tick of
/// milliseconds last for seconds, and a restart costs every tenant its `complete`.
const INTERVALS: u32 = 10;
const LEAST: Duration = Duration::from_secs(30);
/// The first tick reads the kernel's symbols and every process that is there. The chart's startup probe waits as long.
const GRACE: Duration = Duration::from_mins(2);

/// Beaten by the tick, and by nothing else.
#[derive(Debug)]
pub(crate) struct Pulse {
    started: Instant,
    patience: Duration,
    /// Milliseconds after `started`, and one more; 0 before the first tick's end.
    last: AtomicU64,
}

impl Pulse {
    pub(crate) fn new(started: Instant, interval: Duration) -> Self {
        Self { started, patience: interval.saturating_mul(INTERVALS).max(LEAST), last: AtomicU64::new(0) }
    }

    /// A tick is through.
    pub(crate) fn beat(&self) {
        self.beat_at(self.started.elapsed());
    }

    /// How long no tick has come to its end, where that is too long.
    pub(crate) fn stuck(&self) -> Option<Duration> {
        self.stuck_at(self.started.elapsed())
    }

    fn beat_at(&self, now: Duration) {
        self.last.store(u64::try_from(now.as_millis()).unwrap_or(u64::MAX - 1) + 1, Ordering::Relaxed);
    }

    fn stuck_at(&self, now: Duration) -> Option<Duration> {
        let (since, patience) = match self.last.load(Ordering::Relaxed) {
            0 => (Duration::ZERO, GRACE.max(self.patience)),
            last => (Duration::from_millis(last - 1), self.patience),
        };
        let ago = now.saturating_sub(since);
        (ago > patience).then_some(ago)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(interval: u64) -> Pulse {
        Pulse::new(Instant::now(), Duration::from_secs(interval))
    }

    #[test]
    fn a_tick_may_be_late_and_not_gone() {
        let pulse = of(1);
        pulse.beat_at(Duration::ZERO);
        assert_eq!(pulse.stuck_at(LEAST), None);
        assert_eq!(pulse.stuck_at(Duration::from_secs(31)), Some(Duration::from_secs(31)));
        pulse.beat_at(Duration::from_secs(40));
        assert_eq!(pulse.stuck_at(Duration::from_secs(41)), None, "it came back");
        // It was read before the last beat.
        assert_eq!(pulse.stuck_at(Duration::from_secs(39)), None);
    }

    #[test]
    fn rare_ticks_are_waited_for_longer() {
        let pulse = of(60);
        pulse.beat_at(Duration::from_secs(5));
        assert_eq!(pulse.stuck_at(Duration::from_secs(604)), None);
        assert!(pulse.stuck_at(Duration::from_secs(606)).is_some());
    }

    #[test]
    fn the_first_tick_has_its_grace() {
        let pulse = of(1);
        assert_eq!(pulse.stuck_at(Duration::from_secs(119)), None);
        assert_eq!(pulse.stuck_at(Duration::from_secs(121)), Some(Duration::from_secs(121)));
        assert_eq!(of(60).stuck_at(Duration::from_secs(599)), None, "and so has a rare one");
        assert!(of(60).stuck_at(Duration::from_secs(601)).is_some());
    }
}
