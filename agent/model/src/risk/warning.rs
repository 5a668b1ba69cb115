//! Owns when a forecast becomes a warning: raised at a bar, held through silence, ended by its event or by time.
//! Refuses to know why: it sees two probabilities and whether the memory ran out, a GPU's or the host's.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{HORIZON_NAMES, HORIZONS, WARN, identity};
use crate::Tenant;

/// A warning stands until its rule was silent for this long, in seconds.
pub const HOLD: f64 = 120.0;

/// What raises a warning: probabilities, and for how many seconds they must stand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bar {
    /// Of running out within the minute.
    pub minute: f64,
    pub minute_for: f64,
    /// Of running out within the longest horizon: earlier, so for longer.
    pub longest: f64,
    pub longest_for: f64,
}

impl Bar {
    /// Somebody should look.
    pub const WARNING: Self = Self { minute: 0.5, minute_for: 1.0, longest: 0.35, longest_for: 10.0 };
    /// Somebody should act.
    pub const CRITICAL: Self =
        Self { minute: 0.7, minute_for: 3.0, longest: f64::INFINITY, longest_for: 0.0 };
}

impl Bar {
    /// This one's neighbours: each probability alone, from 0.1 to 0.9.
    pub fn sweep() -> impl Iterator<Item = Self> {
        let steps = || (1..=9_u8).map(|tenth| f64::from(tenth) / 10.0);
        let minute = steps().map(|minute| Self { minute, longest: f64::INFINITY, ..Self::WARNING });
        let longest = steps().map(|longest| Self { longest, minute: f64::INFINITY, ..Self::WARNING });
        [Self::WARNING, Self::CRITICAL].into_iter().chain(minute).chain(longest)
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let horizon = |place: usize| HORIZON_NAMES[place];
        let mut or = "";
        for (bar, seconds, place) in
            [(self.minute, self.minute_for, WARN), (self.longest, self.longest_for, HORIZONS.len() - 1)]
        {
            if bar.is_finite() {
                write!(formatter, "{or}{bar} in {} for {seconds}s", horizon(place))?;
                or = ", ";
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    Warning,
    Critical,
}

impl Severity {
    pub const ALL: [Self; 2] = [Self::Warning, Self::Critical];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }

    const fn bar(self) -> Bar {
        match self {
            Self::Warning => Bar::WARNING,
            Self::Critical => Bar::CRITICAL,
        }
    }
}

/// A warning that stands, and what was said when it was raised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Warning {
    /// Seconds since the agent started.
    pub raised: f64,
    pub severity: Severity,
    /// The probability of running out within the minute.
    pub risk: f64,
    pub driver: Option<Tenant>,
    pub victims: Vec<Tenant>,
    /// When it came true, if it did: it stands on until failures have stopped for a while.
    pub came_true: Option<f64>,
}

/// How many warnings of one severity there were, and what became of them. Counters since the agent started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarningCounts {
    /// Memory ran out while it stood.
    pub came_true: u64,
    /// It was silent again and nothing had happened.
    pub cleared: u64,
}

/// The warnings of one memory: a watch a severity, and the words of the one that stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Warnings {
    watches: [Watch; Severity::ALL.len()],
    counts: [WarningCounts; Severity::ALL.len()],
    standing: Option<Standing>,
}

/// A tenant that comes back from a recording whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Named(#[serde(with = "identity::tenant")] Tenant);

/// A [`Warning`] as it is remembered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Standing {
    raised: f64,
    severity: Severity,
    risk: f64,
    driver: Option<Named>,
    victims: Vec<Named>,
    came_true: Option<f64>,
}

impl Warnings {
    /// One tick. `name` says who drives it and who would be refused; it is asked when a warning is raised.
    pub(super) fn advance(
        &mut self,
        at: f64,
        risk: &[f64; HORIZONS.len()],
        exhausted: bool,
        name: impl Fn() -> (Option<Tenant>, Vec<Tenant>),
    ) {
        let (minute, longest) = (risk[WARN], risk[HORIZONS.len() - 1]);
        for (severity, (watch, counts)) in
            Severity::ALL.into_iter().zip(self.watches.iter_mut().zip(&mut self.counts))
        {
            match watch.advance(&severity.bar(), at, minute, longest, exhausted) {
                // One that became critical keeps its time and its names: these are what was acted on.
                Some(Change::Raised) => {
                    if let Some(standing) = &mut self.standing {
                        standing.severity = standing.severity.max(severity);
                        continue;
                    }
                    let (driver, victims) = name();
                    self.standing = Some(Standing {
                        raised: at,
                        severity,
                        risk: minute,
                        driver: driver.map(Named),
                        victims: victims.into_iter().map(Named).collect(),
                        came_true: None,
                    });
                }
                Some(Change::CameTrue) => {
                    counts.came_true += 1;
                    if let Some(standing) = &mut self.standing {
                        standing.came_true = standing.came_true.or(Some(at));
                    }
                }
                Some(Change::Cleared) => counts.cleared += 1,
                Some(Change::Ended) | None => {}
            }
        }
        if self.watches.iter().all(|watch| watch.standing.is_none()) {
            self.standing = None;
        }
    }

    pub(super) fn standing(&self) -> Option<Warning> {
        self.standing.as_ref().map(|of| Warning {
            raised: of.raised,
            severity: of.severity,
            risk: of.risk,
            driver: of.driver.as_ref().map(|of| of.0.clone()),
            victims: of.victims.iter().map(|of| of.0.clone()).collect(),
            came_true: of.came_true,
        })
    }

    pub(super) const fn counts(&self) -> [WarningCounts; Severity::ALL.len()] {
        self.counts
    }
}

/// What became of a warning at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Raised,
    CameTrue,
    /// Nothing came of it.
    Cleared,
    /// What came of it is over.
    Ended,
}

/// Watches one pair of probabilities against one bar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Watch {
    /// Since when each stands at the bar.
    minute: Option<f64>,
    longest: Option<f64>,
    /// When the warning that stands was last due.
    standing: Option<f64>,
    came_true: bool,
    failed: Option<f64>,
}

impl Watch {
    pub(super) fn advance(
        &mut self,
        bar: &Bar,
        at: f64,
        minute: f64,
        longest: f64,
        exhausted: bool,
    ) -> Option<Change> {
        if exhausted {
            self.failed = Some(at);
            if self.standing.is_some() && !self.came_true {
                self.came_true = true;
                return Some(Change::CameTrue);
            }
        } else if self.failed.is_some_and(|failed| at - failed > HOLD) {
            // What was said in the aftermath is no news.
            let ended = self.standing.is_some().then_some(Change::Ended);
            *self = Self::default();
            return ended;
        }
        self.minute = (minute >= bar.minute).then(|| self.minute.unwrap_or(at));
        self.longest = (longest >= bar.longest).then(|| self.longest.unwrap_or(at));
        let due = |since: Option<f64>, wanted: f64| since.is_some_and(|since| at - since >= wanted);
        match self.standing {
            Some(_) if self.minute.is_some() || self.longest.is_some() => self.standing = Some(at),
            Some(last) if at - last > HOLD => {
                self.standing = None;
                let came_true = std::mem::take(&mut self.came_true);
                return Some(if came_true { Change::Ended } else { Change::Cleared });
            }
            None if due(self.minute, bar.minute_for) || due(self.longest, bar.longest_for) => {
                self.standing = Some(at);
                return Some(Change::Raised);
            }
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(said: &[(f64, f64, bool)]) -> Vec<(f64, Change)> {
        let mut watch = Watch::default();
        said.iter()
            .filter_map(|(at, minute, exhausted)| {
                watch.advance(&Bar::WARNING, *at, *minute, 0.0, *exhausted).map(|change| (*at, change))
            })
            .collect()
    }

    #[test]
    fn a_warning_comes_true_and_ends_when_failures_have_stopped() {
        let said =
            [(0.0, 0.5, false), (3.0, 0.5, false), (60.0, 0.9, true), (90.0, 0.9, true), (211.0, 0.9, false)];
        let came = [(3.0, Change::Raised), (60.0, Change::CameTrue), (211.0, Change::Ended)];
        assert_eq!(changes(&said), came);
    }

    #[test]
    fn one_moment_is_no_warning_and_silence_clears_one() {
        assert_eq!(changes(&[(0.0, 0.9, false), (1.0, 0.1, false), (2.0, 0.9, false)]), []);
        let said = [(0.0, 0.5, false), (3.0, 0.5, false), (100.0, 0.1, false), (124.0, 0.1, false)];
        assert_eq!(changes(&said), [(3.0, Change::Raised), (124.0, Change::Cleared)]);
    }
}
