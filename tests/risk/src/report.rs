//! Owns how scores are shown: a table in Markdown, the calibration as lines for its picture.
//! Refuses rounding up: what is written is what was scored.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use cotenant_model::risk::score::{Rule, Score};
use cotenant_model::risk::warning::Bar;

/// Scores of the steady runs and of all of them, by rule.
#[derive(Debug, Default)]
pub struct Scores {
    pub steady: BTreeMap<Rule, Score>,
    pub all: BTreeMap<Rule, Score>,
    /// At other bars: the steady runs, and all of them.
    bars: Vec<(Bar, Score, Score)>,
}

impl Scores {
    pub fn add(&mut self, steady: bool, rule: Rule, score: &Score) {
        self.all.entry(rule).or_default().add(score);
        if steady {
            self.steady.entry(rule).or_default().add(score);
        }
    }

    pub fn add_at(&mut self, steady: bool, bar: Bar, score: &Score) {
        let place = self.bars.iter().position(|(known, ..)| *known == bar).unwrap_or_else(|| {
            self.bars.push((bar, Score::default(), Score::default()));
            self.bars.len() - 1
        });
        let (_, quiet, all) = &mut self.bars[place];
        all.add(score);
        if steady {
            quiet.add(score);
        }
    }

    /// One line a bar.
    pub fn sweep_table(&self) -> String {
        let mut text = String::from(
            "| warned at a risk of | built up, warned | recall | precision | median lead, s | false a steady GPU-day |\n\
             |---|---|---|---|---|---|\n",
        );
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
        for (bar, steady, all) in &self.bars {
            let (events, warned) = all.warned(true);
            let leads = all.leads();
            let _ = writeln!(
                text,
                "| {bar} | {warned} of {events} | {} | {} | {} | {} |",
                number(all.recall()),
                number(all.precision()),
                leads.get(leads.len() / 2).map_or_else(|| "-".to_owned(), |lead| format!("{lead:.0}")),
                number(steady.false_per_day()),
            );
        }
        text
    }

    /// One line a rule.
    pub fn table(&self) -> String {
        let mut text = String::from(
            "| rule | built up, warned | no notice, warned | median lead, s | false a steady GPU-day | false a GPU-day, all \
             runs | Brier, 60 s | driver right | first victim among those named | named an event | by lot | first victim named first |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|\n",
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
                "| {rule} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                of(all.warned(true)),
                of(all.warned(false)),
                number(leads.get(leads.len() / 2).copied(), 0),
                number(self.steady.get(rule).and_then(Score::false_per_day), 2),
                number(all.false_per_day(), 2),
                number(all.brier(), 4),
                of(all.named(|event| event.driver_right)),
                of(all.named(|event| event.victim_right)),
                number(all.victims(), 2),
                number(all.by_lot(), 2),
                of(all.named(|event| event.victim_first)),
            );
        }
        text
    }

    /// Said against came, a line a bin, for the picture of it.
    pub fn calibration(&self, runs: &str) -> String {
        let mut text = String::new();
        let bins = self.all.get(&Rule::Risk).into_iter().flat_map(|score| score.bins);
        for bin in bins.filter(|bin| bin.forecasts > 0) {
            let said = bin.sum / bin.forecasts as f64;
            let _ = writeln!(text, "{runs}\t{said:.4}\t{}\t{}", bin.true_ones, bin.forecasts);
        }
        text
    }

    /// Writes the lines of these runs into a table that other runs have lines in, too.
    ///
    /// # Errors
    /// When the table cannot be read or written.
    pub fn write_calibration(&self, table: &Path, runs: &str) -> std::io::Result<()> {
        let before = std::fs::read_to_string(table).unwrap_or_default();
        let others = before.lines().skip(1).filter(|line| line.split('\t').next() != Some(runs));
        let own = self.calibration(runs);
        let mut lines: Vec<&str> = others.chain(own.lines()).collect();
        // In one order, whichever test was the last to write.
        lines.sort_by_key(|line| line.split('\t').next());
        lines.insert(0, "runs\tsaid\ttrue_ones\tforecasts");
        std::fs::write(table, lines.join("\n") + "\n")
    }
}
