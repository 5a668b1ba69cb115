//! Owns the figures of a score, and how scores of several runs add up.
//! Refuses averages of averages: sums are kept, ratios are asked for.

use super::super::HORIZONS;

/// One exhaustion, and what was said before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EventScore {
    pub at: f64,
    /// It built up over a minute or more; else it came without notice.
    pub built_up: bool,
    /// Seconds between the warning and the first failure, where they are enough and not too many.
    pub lead: Option<f64>,
    /// The same for a warning that stood when it happened, however long before.
    pub late: Option<f64>,
    /// `None` where nobody knows.
    pub driver_right: Option<bool>,
    /// Whether who was refused first was among those named, whether it was the first of them, and how many they were.
    pub victim_right: Option<bool>,
    pub victim_first: Option<bool>,
    pub victims: usize,
    /// How many tenants there were to choose from.
    pub tenants: usize,
}

/// A bin of forecasts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bin {
    pub forecasts: u64,
    pub sum: f64,
    pub true_ones: u64,
}

/// One rule on one or more runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    pub events: Vec<EventScore>,
    pub warnings: u64,
    pub false_warnings: u64,
    /// How long it was forecast.
    pub seconds: f64,
    pub squares: f64,
    pub bins: [Bin; Score::BINS],
}

impl Score {
    pub const BINS: usize = 10;
    /// The horizon of the forecasts in the bins, in seconds.
    pub const HORIZON: f64 = HORIZONS[super::WARN];

    pub fn add(&mut self, other: &Self) {
        self.events.extend(&other.events);
        self.warnings += other.warnings;
        self.false_warnings += other.false_warnings;
        self.seconds += other.seconds;
        self.squares += other.squares;
        for (mine, theirs) in self.bins.iter_mut().zip(&other.bins) {
            mine.forecasts += theirs.forecasts;
            mine.sum += theirs.sum;
            mine.true_ones += theirs.true_ones;
        }
    }

    pub(super) fn judge(&mut self, said: f64, happened: bool) {
        let outcome = f64::from(u8::from(happened));
        self.squares += (said - outcome) * (said - outcome);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded by the clamp")]
        let bin = &mut self.bins[(said * Self::BINS as f64).clamp(0.0, (Self::BINS - 1) as f64) as usize];
        bin.forecasts += 1;
        bin.sum += said;
        bin.true_ones += u64::from(happened);
    }

    /// Mean squared error of the forecasts; `None` without any.
    pub fn brier(&self) -> Option<f64> {
        let forecasts: u64 = self.bins.iter().map(|bin| bin.forecasts).sum();
        (forecasts > 0).then(|| self.squares / forecasts as f64)
    }

    pub fn false_per_day(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.false_warnings as f64 * 86_400.0 / self.seconds)
    }

    /// Events of a sort: how many there were, and how many were warned of in time.
    pub fn warned(&self, built_up: bool) -> (usize, usize) {
        let of: Vec<&EventScore> = self.events.iter().filter(|event| event.built_up == built_up).collect();
        (of.len(), of.iter().filter(|event| event.lead.is_some()).count())
    }

    /// The part of what built up that was warned of in time; `None` where nothing did.
    pub fn recall(&self) -> Option<f64> {
        let (events, warned) = self.warned(true);
        (events > 0).then(|| warned as f64 / events as f64)
    }

    /// The part of the warnings that were not false; `None` without any.
    pub fn precision(&self) -> Option<f64> {
        (self.warnings > 0).then(|| 1.0 - self.false_warnings as f64 / self.warnings as f64)
    }

    /// Lead times of the events that were warned of, shortest first.
    pub fn leads(&self) -> Vec<f64> {
        let mut leads: Vec<f64> = self.events.iter().filter_map(|event| event.lead).collect();
        leads.sort_by(f64::total_cmp);
        leads
    }

    /// Likely victims that were named, an event on average; `None` without any.
    pub fn victims(&self) -> Option<f64> {
        let named: usize = self.events.iter().map(|event| event.victims).sum();
        (!self.events.is_empty()).then(|| named as f64 / self.events.len() as f64)
    }

    /// How often as many names drawn by lot would have had the right one among them, where that can be judged.
    pub fn by_lot(&self) -> Option<f64> {
        let judged: Vec<f64> = self
            .events
            .iter()
            .filter(|event| event.victim_right.is_some())
            .map(|event| event.victims as f64 / event.tenants.max(1) as f64)
            .collect();
        (!judged.is_empty()).then(|| judged.iter().sum::<f64>() / judged.len() as f64)
    }

    /// How many of the names that can be judged were right.
    pub fn named(&self, of: impl Fn(&EventScore) -> Option<bool>) -> (usize, usize) {
        let judged: Vec<bool> = self.events.iter().filter_map(of).collect();
        (judged.len(), judged.iter().filter(|right| **right).count())
    }
}
