//! Owns `cotenant backtest`: forecasts on recordings, scored beside the rules of today.
//! Refuses to name a driver as right: a recording does not say who it was.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use clap::Args;
use cotenant_model::risk::score::{Rule, Score, Scorer};
use tracing::warn;

use crate::replay::{Part, each};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Recordings to score; their scores are added
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Rule to score: risk, used>90% or linear-5m; may be given more than once [default: the usual ones]
    #[arg(long = "rule", value_name = "RULE")]
    rules: Vec<Rule>,
}

pub(crate) fn backtest(options: &Options) -> Result<()> {
    let rules = if options.rules.is_empty() { Rule::ALL.to_vec() } else { options.rules.clone() };
    let mut sums: BTreeMap<Rule, Score> = BTreeMap::new();
    let mut broken = None;
    for file in &options.files {
        let mut scorer = Scorer::new(&rules);
        let read = each(file, |part| {
            match part {
                Part::Start(start) => scorer.resume(*start),
                Part::Moment(moment) => {
                    scorer.advance(&moment);
                }
            }
            Ok(())
        });
        if let Err(error) = read {
            warn!(%error, "scored up to the break");
            broken = Some(error);
        }
        for (rule, score) in scorer.finish(&[]) {
            sums.entry(rule).or_default().add(&score);
        }
    }
    print(&rules, &sums);
    broken.map_or(Ok(()), Err)
}

fn print(rules: &[Rule], sums: &BTreeMap<Rule, Score>) {
    let days = sums.values().next().map_or(0.0, |score| score.gpu_seconds / 86_400.0);
    println!("{days:.3} GPU-days. Warned: 30 s to 15 min before. Brier: of the next {} s.", Score::HORIZON);
    println!(
        "{:<12} {:>14} {:>14} {:>11} {:>13} {:>8} {:>12}",
        "rule", "built up", "no notice", "median lead", "false per day", "Brier", "first victim"
    );
    for rule in rules {
        let Some(score) = sums.get(rule) else { continue };
        let of =
            |(all, good): (usize, usize)| if all == 0 { "-".to_owned() } else { format!("{good} of {all}") };
        let number = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let leads = score.leads();
        println!(
            "{:<12} {:>14} {:>14} {:>11} {:>13} {:>8} {:>12}",
            rule.to_string(),
            of(score.warned(true)),
            of(score.warned(false)),
            number(leads.get(leads.len() / 2).copied(), 0),
            number(score.false_per_day(), 2),
            number(score.brier(), 4),
            of(score.named(|event| event.victim_right)),
        );
    }
}
