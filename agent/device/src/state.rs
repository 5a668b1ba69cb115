//! Owns what happens after a poll: when the next one is, and whether the library is opened anew.
//! Refuses clocks and NVML: every function is its arguments.

use std::time::Duration;

use cotenant_model::Absence;

/// Back-off stops growing at this many intervals (5 minutes at the default 5 s).
const MAX_INTERVALS: u32 = 60;
/// A missing library is looked for this seldom: somebody has to install a driver first.
const MISSING_INTERVALS: u32 = 12;
/// Time between polls per time inside NVML: below one per cent of the wall.
const DUTY: u32 = 100;
/// A poll so slow that the duty cycle would ask for more than this is seen as an incident, not as a load.
const MAX_STRETCH: Duration = Duration::from_mins(10);

/// How the last order to the polling thread ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Polled,
    /// Answers came, and among them one that says the handles are no good any more.
    Trouble(Absence),
    OpenFailed(Absence),
    /// A call came back after its deadline; the rest of the poll was not asked.
    Abandoned,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Failures or give-ups in a row.
    pub failures: u32,
    /// Polls still to go before the library is opened anew; means nothing without failures.
    pub patience: u32,
    /// From the end of this poll to the start of the next.
    pub delay: Duration,
    /// Whether the next poll starts with a fresh library.
    pub reopen: bool,
}

/// What to do after `outcome`, of which `inside` was spent in NVML.
pub fn next_state(state: State, outcome: Outcome, inside: Duration, interval: Duration) -> State {
    let failures = state.failures.saturating_add(1);
    let rest = rest(interval, inside);
    match outcome {
        Outcome::Polled => State { failures: 0, patience: 0, delay: rest, reopen: false },
        // The other GPUs still answer, so polls go on; only the opening anew backs off.
        Outcome::Trouble(_) if state.patience > 0 => {
            State { patience: state.patience - 1, delay: rest, reopen: false, ..state }
        }
        Outcome::Trouble(_) => {
            State { failures, patience: intervals(failures) - 1, delay: rest, reopen: true }
        }
        Outcome::OpenFailed(Absence::LibraryMissing) => {
            State { failures, patience: 0, delay: interval * MISSING_INTERVALS, reopen: true }
        }
        Outcome::OpenFailed(_) => {
            State { failures, patience: 0, delay: interval * intervals(failures), reopen: true }
        }
        // Once is bad luck; a driver that hangs again and again is left alone for longer.
        Outcome::Abandoned if state.failures == 0 => {
            State { failures, patience: 0, delay: Duration::ZERO, reopen: false }
        }
        Outcome::Abandoned => {
            State { failures, patience: 0, delay: interval * intervals(failures), reopen: false }
        }
    }
}

fn intervals(failures: u32) -> u32 {
    1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(MAX_INTERVALS).min(MAX_INTERVALS)
}

/// The pause after a poll that keeps both the interval and the duty cycle.
fn rest(interval: Duration, inside: Duration) -> Duration {
    interval.saturating_sub(inside).max(inside.saturating_mul(DUTY).min(MAX_STRETCH.max(interval)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(5);

    fn step(state: State, outcome: Outcome) -> State {
        next_state(state, outcome, Duration::from_millis(1), INTERVAL)
    }

    #[test]
    fn c44_reopening_backs_off_and_is_capped_while_polls_go_on() {
        let mut state = State::default();
        let mut reopened = vec![];
        for poll in 0..400 {
            state = step(state, Outcome::Trouble(Absence::Failed));
            assert!(state.delay <= INTERVAL);
            if state.reopen {
                reopened.push(poll);
            }
        }
        assert_eq!(reopened, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243, 303, 363]);
        assert_eq!(step(state, Outcome::Polled).failures, 0);
    }

    #[test]
    fn failed_opening_backs_off_to_five_minutes() {
        let mut state = State::default();
        let mut delays = vec![];
        for _ in 0..9 {
            state = step(state, Outcome::OpenFailed(Absence::VersionMismatch));
            delays.push(state.delay.as_secs());
        }
        assert_eq!(delays, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn a_missing_library_is_looked_for_once_a_minute() {
        let mut state = State::default();
        for _ in 0..20 {
            state = step(state, Outcome::OpenFailed(Absence::LibraryMissing));
            assert_eq!(state.delay, Duration::from_mins(1));
        }
    }

    #[test]
    fn c47_slow_calls_stretch_the_interval_below_one_per_cent() {
        let inside = Duration::from_millis(200) * 15;
        let state = next_state(State::default(), Outcome::Polled, inside, INTERVAL);
        let share = inside.as_secs_f64() / (inside + state.delay).as_secs_f64();
        assert!(share < 0.01, "{share}");
        let quick = step(State::default(), Outcome::Polled);
        assert_eq!(quick.delay, INTERVAL.checked_sub(Duration::from_millis(1)).unwrap_or_default());
    }

    #[test]
    fn c46_after_one_hang_the_next_poll_is_at_once_after_more_it_waits() {
        let once = step(State::default(), Outcome::Abandoned);
        assert_eq!(once.delay, Duration::ZERO);
        assert_eq!(step(once, Outcome::Abandoned).delay, INTERVAL * 2);
    }
}
