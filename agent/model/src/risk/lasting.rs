//! Owns what is said of the longest horizon from one moment to the next: a mean of late, since what is true of minutes
//! does not change with each tooth of a saw.
//! Refuses to be slower than the shorter horizons: what they expect the longest one does, too.

use serde::{Deserialize, Serialize};

use super::HORIZONS;

/// The weight of what was said falls to a third in so many seconds.
const SECONDS: f64 = 30.0;

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Lasting(f64);

impl Lasting {
    /// `elapsed` seconds after the last one. Whatever the horizon, it is no less likely within a longer one.
    pub(super) fn advance(&mut self, risk: &mut [f64; HORIZONS.len()], elapsed: f64) {
        if let Some(longest) = risk.last_mut() {
            self.0 += (*longest - self.0) * (1.0 - (-elapsed / SECONDS).exp());
            *longest = self.0;
        }
        for horizon in 1..risk.len() {
            risk[horizon] = risk[horizon].max(risk[horizon - 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tooth_that_is_seen_for_half_of_the_time_is_a_half_and_a_minute_is_not_waited_for() {
        let mut lasting = Lasting::default();
        let mut said = Vec::new();
        for second in 0..300 {
            let mut risk = if second % 20 < 10 { [0.0, 0.1, 0.9] } else { [0.0, 0.0, 0.1] };
            lasting.advance(&mut risk, 1.0);
            said.push(risk[2]);
        }
        assert!(said[200..].iter().all(|risk| (0.35..0.65).contains(risk)), "{:?}", &said[200..]);
        let mut risk = [0.2, 0.95, 0.96];
        lasting.advance(&mut risk, 1.0);
        assert!((risk[2] - 0.95).abs() < 1e-9, "{risk:?}");
    }
}
