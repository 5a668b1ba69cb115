//! Owns the claims about forecasts: on runs that the forecast was not tuned on, beside the rules of today.
//! Refuses to hide what came without notice: it is counted apart.
//!
//! `COTENANT_RISK_VERBOSE=1` prints each run, `COTENANT_BLESS=1` writes tests/risk/results.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use cotenant_model::risk::score::{EventScore, Rule, Score, Scorer, Truth};
use cotenant_model::risk::warning::Bar;
use cotenant_risk_runs::{BOUNDED, SCENARIOS, Scenario, Scores, TUNED_ON, UNSEEN};

/// Every case of every seed, on both processors; `one` says also whether the case is a steady one.
fn scored<C: Copy + Sync>(
    cases: &[C],
    seeds: std::ops::Range<u64>,
    one: impl Fn(C, u64) -> (bool, Outcome) + Sync,
) -> Scores {
    let jobs: Vec<(C, u64)> = seeds.flat_map(|seed| cases.iter().map(move |case| (*case, seed))).collect();
    let next = AtomicUsize::new(0);
    let scores: Mutex<Scores> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((case, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (steady, (outcome, bars)) = one(*case, *seed);
                    let mut scores = scores.lock().unwrap_or_else(PoisonError::into_inner);
                    for (rule, score) in outcome {
                        scores.add(steady, rule, &score);
                    }
                    for (bar, score) in bars {
                        scores.add_at(steady, bar, &score);
                    }
                }
            });
        }
    });
    scores.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn backtest(seeds: std::ops::Range<u64>) -> Scores {
    scored(&SCENARIOS, seeds, |scenario, seed| (scenario.is_steady(), one(scenario, seed)))
}

fn limits(seeds: std::ops::Range<u64>) -> Scores {
    scored(&BOUNDED, seeds, |bounded, seed| {
        let mut scorer = Scorer::new(&Rule::ALL);
        for moment in bounded.moments(seed) {
            scorer.advance(&moment);
        }
        let outcome = scorer.finish_limits(&Truth::default());
        tell(&format!("{bounded:?} {seed}"), &outcome);
        (bounded.is_steady(), (outcome, Vec::new()))
    })
}

/// By rule, and of the forecast at other bars.
type Outcome = (Vec<(Rule, Score)>, Vec<(Bar, Score)>);

fn one(scenario: Scenario, seed: u64) -> Outcome {
    let run = scenario.run(seed);
    let truth = Truth { drivers: run.drivers.clone(), began: Vec::new() };
    let mut scorer = Scorer::new(&Rule::ALL);
    for moment in run.moments() {
        scorer.advance(&moment);
    }
    let outcome = scorer.finish(&truth);
    tell(&format!("{scenario:?} {seed}"), &outcome);
    let at = |bar: Bar| scorer.at_bar(&bar, &truth).map(|score| (bar, score));
    (outcome, Bar::sweep().filter_map(at).collect())
}

fn tell(run: &str, outcome: &[(Rule, Score)]) {
    if std::env::var_os("COTENANT_RISK_VERBOSE").is_none() {
        return;
    }
    let (_, risk) = &outcome[0];
    let events: Vec<String> = risk.events.iter().map(told).collect();
    let (warnings, wrong) = (risk.warnings, risk.false_warnings);
    let brier = risk.brier().unwrap_or(0.0);
    println!("{run}: warnings {warnings}, false {wrong}, Brier {brier:.4} {}", events.join(", "));
}

fn told(event: &EventScore) -> String {
    let sort = if event.built_up { "built up" } else { "sudden" };
    let wrong = |right: Option<bool>, what| if right == Some(false) { what } else { "" };
    let (driver, victim) = (wrong(event.driver_right, " DRIVER"), wrong(event.victim_right, " VICTIM"));
    format!("{sort} {:.0}: {:.0?} ({:.0?}){driver}{victim}", event.at, event.lead, event.late)
}

fn show(scores: &Scores) {
    println!("{}", scores.table());
    for bin in scores.all[&Rule::Risk].bins.iter().filter(|bin| bin.forecasts > 0) {
        let count = bin.forecasts as f64;
        println!("{count} forecasts said {:.3}, {:.3} came", bin.sum / count, bin.true_ones as f64 / count);
    }
}

#[test]
#[ignore = "for tuning: the seeds that were tuned on"]
fn tuned_on() {
    let scores = backtest(TUNED_ON);
    show(&scores);
    println!("{}", scores.sweep_table());
    if std::env::var_os("COTENANT_BLESS").is_some() {
        let text = format!(
            "# Runs drawn from the seeds that were tuned on, and what other thresholds would do there\n\n`COTENANT_BLESS=1 cargo \
             test -p cotenant-risk-runs --test backtest -- --ignored tuned_on` writes this.\n\n{}\nThe first two lines are the \
             two severities; below, each probability alone.\n\n{}",
            scores.table(),
            scores.sweep_table()
        );
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("results/tuned.md"), text).unwrap();
    }
}

#[test]
fn unseen_runs_are_warned_of_and_steady_ones_are_left_alone() {
    let scores = backtest(UNSEEN);
    show(&scores);
    if std::env::var_os("COTENANT_BLESS").is_some() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
        std::fs::create_dir_all(&results).unwrap();
        let text = format!(
            "# Runs drawn from seeds that were not looked at\n\n`COTENANT_BLESS=1 cargo test -p cotenant-risk-runs \
             --test backtest` writes this.\n\n{}",
            scores.table()
        );
        std::fs::write(results.join("unseen.md"), text).unwrap();
        scores.write_calibration(&results.join("calibration.tsv"), "generated").unwrap();
    }
    let risk = &scores.all[&Rule::Risk];
    for (rule, score) in scores.all.iter().filter(|(rule, _)| **rule != Rule::Risk) {
        assert!(risk.brier() < score.brier(), "{rule} forecasts better");
    }
}

#[test]
fn kills_at_a_memory_limit_are_warned_of() {
    let scores = limits(UNSEEN);
    show(&scores);
    if std::env::var_os("COTENANT_BLESS").is_some() {
        let text = format!(
            "# Runs into the limit of a memory cgroup, drawn; nothing was tuned on them\n\n`COTENANT_BLESS=1 cargo test -p \
             cotenant-risk-runs --test backtest` writes this.\n\n{}",
            scores.table()
        );
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("results/limits.md"), text).unwrap();
    }
    let risk = &scores.all[&Rule::Risk];
    for (rule, score) in scores.all.iter().filter(|(rule, _)| **rule != Rule::Risk) {
        assert!(risk.brier() < score.brier(), "{rule} forecasts better");
    }
}
