//! Owns the rules that forecasts are held against, and their names.
//! Refuses tuning: these are what people alert on today.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Something that says whether memory will run out within the minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// The forecast of this module.
    Risk,
    /// More than so much of the GPU's memory is used.
    Used { percent: u8 },
    /// The least-squares line through the free memory of the last minutes meets zero within the next one.
    Linear { minutes: u8 },
}

impl Rule {
    /// The forecast, and what it is held against.
    pub const ALL: [Self; 6] = [
        Self::Risk,
        Self::Used { percent: 90 },
        Self::Used { percent: 95 },
        Self::Linear { minutes: 1 },
        Self::Linear { minutes: 5 },
        Self::Linear { minutes: 15 },
    ];

    /// Seconds that the rule looks back.
    pub(super) fn window(self) -> f64 {
        match self {
            Self::Linear { minutes } => 60.0 * f64::from(minutes),
            Self::Risk | Self::Used { .. } => 0.0,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Risk => formatter.write_str("risk"),
            Self::Used { percent } => write!(formatter, "used>{percent}%"),
            Self::Linear { minutes } => write!(formatter, "linear-{minutes}m"),
        }
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no rule: write risk, used>90% (1 to 99) or linear-5m (1 to 60)")]
pub struct RuleError(String);

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let number = |text: &str, most: u8| text.parse().ok().filter(|number| (1..=most).contains(number));
        if text == "risk" {
            return Ok(Self::Risk);
        }
        let used = text.strip_prefix("used>").and_then(|rest| rest.strip_suffix('%'));
        let line = text.strip_prefix("linear-").and_then(|rest| rest.strip_suffix('m'));
        used.and_then(|text| number(text, 99))
            .map(|percent| Self::Used { percent })
            .or_else(|| line.and_then(|text| number(text, 60)).map(|minutes| Self::Linear { minutes }))
            .ok_or_else(|| RuleError(text.to_owned()))
    }
}

/// A least-squares line through a window, kept by its sums.
#[derive(Clone, Debug)]
pub(super) struct Line {
    window: f64,
    points: VecDeque<(f64, f64)>,
    /// Of times, values, squared times and products.
    sums: [f64; 4],
}

impl Line {
    pub(super) fn over(window: f64) -> Self {
        Self { window, points: VecDeque::new(), sums: [0.0; 4] }
    }

    pub(super) fn push(&mut self, at: f64, value: f64) {
        self.count(at, value, 1.0);
        self.points.push_back((at, value));
        while let Some((first, old)) = self.points.front().copied()
            && at - first > self.window
        {
            self.count(first, old, -1.0);
            self.points.pop_front();
        }
    }

    fn count(&mut self, at: f64, value: f64, sign: f64) {
        for (sum, part) in self.sums.iter_mut().zip([at, value, at * at, at * value]) {
            *sum += sign * part;
        }
    }

    /// Where the line is at a later time; `None` while there is half a window or less to draw it through.
    pub(super) fn after(&self, at: f64) -> Option<f64> {
        let (first, last) = (self.points.front()?.0, self.points.back()?.0);
        if last - first < 0.5 * self.window {
            return None;
        }
        let count = self.points.len() as f64;
        let [times, values, squares, products] = self.sums.map(|sum| sum / count);
        let variance = squares - times * times;
        (variance > 0.0).then(|| values + (products - times * values) / variance * (at - times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_on_as_its_window_went() {
        let mut line = Line::over(60.0);
        for second in 0..300 {
            let at = f64::from(second);
            line.push(at, if second < 200 { 1e11 } else { 1e11 - 1e9 * (at - 200.0) });
        }
        assert!((line.after(300.0).unwrap() / 1e9).abs() < 0.01, "{:?}", line.after(300.0));
    }
}
