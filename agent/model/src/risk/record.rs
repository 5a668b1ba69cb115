//! Owns the agent's own record: which of its forecasts came true.
//! Refuses to judge a forecast before its horizon is over.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::HORIZONS;
use super::forecast::{Calibration, Kept};

/// Forecasts a horizon that are remembered to be judged.
const ASKED: f64 = 10.0;

/// What was forecast and is open, and the outcome of what was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    open: [VecDeque<(f64, u8)>; HORIZONS.len()],
    kept: [[Kept; Calibration::BINS]; HORIZONS.len()],
}

impl Record {
    /// Closes what is decided by now.
    pub(super) fn judge(&mut self, at: f64, exhausted: bool) {
        for ((open, kept), horizon) in self.open.iter_mut().zip(&mut self.kept).zip(HORIZONS) {
            while let Some((said, bin)) = open.front() {
                let in_time = at - said <= horizon;
                if in_time && !exhausted {
                    break;
                }
                let kept = &mut kept[usize::from(*bin)];
                kept.forecasts += 1;
                kept.true_ones += u64::from(in_time && exhausted);
                open.pop_front();
            }
        }
    }

    pub(super) fn say(&mut self, at: f64, risk: &[f64; HORIZONS.len()]) {
        for ((open, horizon), risk) in self.open.iter_mut().zip(HORIZONS).zip(risk) {
            if open.back().is_none_or(|(said, _)| at - said >= horizon / ASKED) {
                #[allow(clippy::cast_possible_truncation, reason = "one of five")]
                open.push_back((at, Calibration::bin(*risk) as u8));
            }
        }
    }

    pub(super) fn kept(&self) -> Calibration {
        Calibration(self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_counts_when_it_is_decided() {
        let mut record = Record::default();
        record.say(0.0, &[0.1, 0.9, 0.9]);
        record.judge(5.0, false);
        assert_eq!(record.kept(), Calibration::default());
        record.judge(50.0, true);
        let Calibration(kept) = record.kept();
        // Ten seconds passed without it; the minute and the five came true.
        assert_eq!(kept[0][0], Kept { forecasts: 1, true_ones: 0 });
        assert_eq!(kept[1][4], Kept { forecasts: 1, true_ones: 1 });
        assert_eq!(kept[2][4], Kept { forecasts: 1, true_ones: 1 });
    }
}
