//! Owns the claims about forecasts: on runs that the forecast was not tuned on, beside the rules of today.
//! Refuses to hide what came without notice: it is counted apart.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cotenant_model::risk::score::{Rule, Score, Scorer};
use cotenant_risk_runs::{SCENARIOS, Scenario, TUNED_ON, UNSEEN};

fn backtest(seeds: std::ops::Range<u64>) -> BTreeMap<(bool, Rule), Score> {
    let verbose = std::env::var_os("COTENANT_RISK_VERBOSE").is_some();
    let only = std::env::var("COTENANT_RISK_ONLY").unwrap_or_default();
    let jobs: Vec<(Scenario, u64)> = seeds
        .flat_map(|seed| SCENARIOS.into_iter().map(move |scenario| (scenario, seed)))
        .filter(|(scenario, _)| only.is_empty() || only.contains(&format!("{scenario:?}")))
        .collect();
    let next = AtomicUsize::new(0);
    let scores: Mutex<BTreeMap<(bool, Rule), Score>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((scenario, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    one(*scenario, *seed, verbose, &scores);
                }
            });
        }
    });
    scores.into_inner().unwrap()
}

fn one(scenario: Scenario, seed: u64, verbose: bool, scores: &Mutex<BTreeMap<(bool, Rule), Score>>) {
    let run = scenario.run(seed);
    let drivers = run.drivers.clone();
    let mut scorer = Scorer::new(&Rule::ALL);
    for moment in run.moments() {
        scorer.advance(&moment);
    }
    for (rule, score) in scorer.finish(&drivers) {
        if verbose && rule == Rule::Risk {
            let events: Vec<String> = score
                .events
                .iter()
                .map(|event| {
                    format!(
                        "{}{:.0}:{:.0?}/{:.0?}{}{}",
                        if event.built_up { "B" } else { "s" },
                        event.at,
                        event.lead,
                        event.late,
                        if event.driver_right == Some(false) { " DRIVER" } else { "" },
                        if event.victim_right == Some(false) { " VICTIM" } else { "" },
                    )
                })
                .collect();
            println!(
                "{scenario:?} {seed}: warnings {} false {} brier {:.4} {}",
                score.warnings,
                score.false_warnings,
                score.brier().unwrap_or(0.0),
                events.join(", ")
            );
        }
        scores.lock().unwrap().entry((scenario.is_steady(), rule)).or_default().add(&score);
    }
}

fn table(scores: &BTreeMap<(bool, Rule), Score>) -> BTreeMap<Rule, Score> {
    let mut sums: BTreeMap<Rule, Score> = BTreeMap::new();
    println!(
        "rule | built up: warned of events | no notice: warned of events | median lead | false per steady GPU-day | false per GPU-day | Brier | driver | victim"
    );
    for rule in Rule::ALL {
        let steady = &scores[&(true, rule)];
        let mut all = steady.clone();
        all.add(&scores[&(false, rule)]);
        let (built, warned) = all.warned(true);
        let (sudden, caught) = all.warned(false);
        let leads = all.leads();
        let (drivers, driver) = all.named(|event| event.driver_right);
        let (victims, victim) = all.named(|event| event.victim_right);
        println!(
            "{rule} | {warned}/{built} | {caught}/{sudden} | {:.0} | {:.2} | {:.2} | {:.4} | {driver}/{drivers} | {victim}/{victims}",
            leads.get(leads.len() / 2).copied().unwrap_or(f64::NAN),
            steady.false_per_day().unwrap_or(f64::NAN),
            all.false_per_day().unwrap_or(f64::NAN),
            all.brier().unwrap_or(f64::NAN),
        );
        sums.insert(rule, all);
    }
    for (index, bin) in sums[&Rule::Risk].bins.iter().enumerate().filter(|(_, bin)| bin.forecasts > 0) {
        let mean = bin.sum / bin.forecasts as f64;
        let came = bin.true_ones as f64 / bin.forecasts as f64;
        println!("bin {index}: {} forecasts, said {mean:.3}, came {came:.3}", bin.forecasts);
    }
    sums
}

#[test]
#[ignore = "for tuning: prints the table of the seeds that were tuned on"]
fn tuned_on() {
    table(&backtest(TUNED_ON));
}

#[test]
fn unseen_runs() {
    table(&backtest(UNSEEN));
}
