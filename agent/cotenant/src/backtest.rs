//! Owns `cotenant backtest`: forecasts on recordings, scored beside the rules of today.
//! Refuses to name a driver as right: a recording does not say who it was.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::Result;
use clap::Args;
use cotenant_model::risk::score::{Rule, Score, Scorer, Truth};
use cotenant_model::risk::warning::Bar;
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
    /// Score the forecast also at other thresholds of its warning, one line each: what a higher one spares and misses
    #[arg(long)]
    sweep: bool,
}

pub(crate) fn backtest(options: &Options) -> Result<()> {
    let mut rules = if options.rules.is_empty() { Rule::ALL.to_vec() } else { options.rules.clone() };
    if options.sweep && !rules.contains(&Rule::Risk) {
        rules.insert(0, Rule::Risk);
    }
    let (mut sums, mut limits) = (BTreeMap::<Rule, Score>::new(), BTreeMap::<Rule, Score>::new());
    let mut sweep: Vec<(Bar, Score)> =
        if options.sweep { Bar::sweep().map(|bar| (bar, Score::default())).collect() } else { Vec::new() };
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
        for (rule, score) in scorer.finish(&Truth::default()) {
            sums.entry(rule).or_default().add(&score);
        }
        for (rule, score) in scorer.finish_limits(&Truth::default()) {
            limits.entry(rule).or_default().add(&score);
        }
        for (bar, sum) in &mut sweep {
            if let Some(score) = scorer.at_bar(bar, &Truth::default()) {
                sum.add(&score);
            }
        }
    }
    print("GPU-days", &rules, &sums);
    if !limits.is_empty() {
        println!();
        print("days of memory limits", &rules, &limits);
    }
    if !sweep.is_empty() {
        print_sweep(&sweep);
    }
    broken.map_or(Ok(()), Err)
}

/// Recall is of what built up; a warning that is not false was of an event of either sort.
fn print_sweep(sweep: &[(Bar, Score)]) {
    println!(
        "\n{:<22} {:>14} {:>8} {:>9} {:>11} {:>13}",
        "warn at", "built up", "recall", "precision", "median lead", "false per day"
    );
    let part = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
    for (bar, score) in sweep {
        let (events, warned) = score.warned(true);
        let leads = score.leads();
        println!(
            "{:<22} {:>14} {:>8} {:>9} {:>11} {:>13}",
            bar.to_string(),
            format!("{warned} of {events}"),
            part(score.recall()),
            part(score.precision()),
            leads.get(leads.len() / 2).map_or_else(|| "-".to_owned(), |lead| format!("{lead:.0}")),
            part(score.false_per_day()),
        );
    }
}

fn print(of: &str, rules: &[Rule], sums: &BTreeMap<Rule, Score>) {
    let days = sums.values().next().map_or(0.0, |score| score.seconds / 86_400.0);
    println!("{days:.3} {of}. Warned: 30 s to 15 min before. Brier: of the next {} s.", Score::HORIZON);
    println!(
        "{:<12} {:>14} {:>14} {:>11} {:>13} {:>8} {:>12}",
        "rule", "built up", "no notice", "median lead", "false per day", "Brier", "victim named"
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
