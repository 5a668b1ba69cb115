//! Owns how scores are shown: a table in Markdown, the calibration as a picture.
//! Refuses rounding up: what is written is what was scored.

use std::collections::BTreeMap;
use std::fmt::Write;

use cotenant_model::risk::score::{Rule, Score};

/// Scores of the steady runs and of all of them, by rule.
#[derive(Debug, Default)]
pub struct Scores {
    pub steady: BTreeMap<Rule, Score>,
    pub all: BTreeMap<Rule, Score>,
}

impl Scores {
    pub fn add(&mut self, steady: bool, rule: Rule, score: &Score) {
        self.all.entry(rule).or_default().add(score);
        if steady {
            self.steady.entry(rule).or_default().add(score);
        }
    }

    /// One line a rule.
    pub fn table(&self) -> String {
        let mut text = String::from(
            "| rule | built up, warned | no notice, warned | median lead, s | false a steady GPU-day | false a GPU-day, all \
             runs | Brier, 60 s | driver right | first victim right |\n|---|---|---|---|---|---|---|---|---|\n",
        );
        for (rule, all) in &self.all {
            let of = |(count, good): (usize, usize)| format!("{good} of {count}");
            let number = |value: Option<f64>, digits: usize| {
                value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
            };
            let leads = all.leads();
            // Names are our forecast's, whatever rule raised the warning.
            let _ = writeln!(
                text,
                "| {rule} | {} | {} | {} | {} | {} | {} | {} | {} |",
                of(all.warned(true)),
                of(all.warned(false)),
                number(leads.get(leads.len() / 2).copied(), 0),
                number(self.steady.get(rule).and_then(Score::false_per_day), 2),
                number(all.false_per_day(), 2),
                number(all.brier(), 4),
                of(all.named(|event| event.driver_right)),
                of(all.named(|event| event.victim_right)),
            );
        }
        text
    }

    /// Said against came, one point a bin, its size by the number of forecasts.
    pub fn plot(&self, rule: Rule) -> String {
        let mut text = String::from(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 460 460\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"460\" height=\"460\" fill=\"white\"/>\n\
             <path d=\"M50 410 V30 M50 410 H430\" stroke=\"black\" fill=\"none\"/>\n\
             <path d=\"M50 410 L430 30\" stroke=\"grey\" stroke-dasharray=\"4\" fill=\"none\"/>\n\
             <text x=\"180\" y=\"445\">risk that was said, 60 s</text>\n\
             <text x=\"20\" y=\"290\" transform=\"rotate(-90 20 290)\">part that came true</text>\n",
        );
        for tenth in 0..=5 {
            let (at, label) = (76 * tenth, f64::from(tenth) / 5.0);
            let _ = writeln!(text, "<text x=\"{}\" y=\"426\">{label:.1}</text>", 42 + at);
            let _ = writeln!(text, "<text x=\"26\" y=\"{}\">{label:.1}</text>", 414 - at);
        }
        for bin in
            self.all.get(&rule).into_iter().flat_map(|score| score.bins).filter(|bin| bin.forecasts > 0)
        {
            let count = bin.forecasts as f64;
            let (said, came) = (bin.sum / count, bin.true_ones as f64 / count);
            let _ = writeln!(
                text,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{:.1}\" fill=\"steelblue\"><title>{} forecasts said {said:.3}, \
                 {came:.3} came true</title></circle>",
                50.0 + 380.0 * said,
                410.0 - 380.0 * came,
                2.0 + 2.0 * count.log10(),
                bin.forecasts,
            );
        }
        text.push_str("</svg>\n");
        text
    }
}
