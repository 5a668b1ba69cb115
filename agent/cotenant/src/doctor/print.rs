//! Owns how checks look: lines for people, JSON for programs.
//! Refuses to leave anything out of either.

use std::fmt::Write;

use cotenant_model::view::{Feature, FeatureState};
use serde_json::{Value, json};

use super::{Verdict, facts::Facts};
use crate::features::bad;

/// What is switched off by configuration is as it should be.
const fn word(state: FeatureState) -> &'static str {
    match state {
        FeatureState::Active | FeatureState::Disabled => "ok",
        other => other.as_str(),
    }
}

pub(super) fn text(checks: &[Feature], verdict: Verdict) -> String {
    let mut text = String::new();
    for Feature { name, state, reason, lost, remedy } in checks {
        let _ = writeln!(text, "{:<12} {name:<20} {reason}", word(*state));
        for (key, value) in [("lost", lost), ("remedy", remedy)] {
            if !value.is_empty() {
                let _ = writeln!(text, "{:<12}   {key}: {value}", "");
            }
        }
    }
    let wrong = checks.iter().filter(|check| bad(check.state)).count();
    let meaning = match verdict {
        Verdict::Ok => "everything works here".to_owned(),
        Verdict::Degraded => format!("attribution works; {wrong} of {} checks are not ok", checks.len()),
        Verdict::Broken => {
            format!("attribution does not work; {wrong} of {} checks are not ok", checks.len())
        }
    };
    let _ = writeln!(text, "\nverdict: {} ({meaning})", verdict.as_str());
    text
}

pub(super) fn json(facts: &Facts, checks: &[Feature], verdict: Verdict) -> String {
    let library = facts.nvml.as_ref().and_then(|(sample, _)| sample.library.as_ref().ok());
    let checks: Vec<Value> = checks
        .iter()
        .map(|Feature { name, state, reason, lost, remedy }| {
            json!({ "name": name, "state": word(*state), "seen": reason, "lost": lost, "remedy": remedy })
        })
        .collect();
    let page = json!({
        "versions": {
            "cotenant": env!("CARGO_PKG_VERSION"),
            "kernel": facts.release,
            "driver_module": facts.hardware.module_version,
            "driver_libraries": facts.hardware.library_versions,
            "driver": library.map(|facts| facts.driver_version.as_str()),
            "nvml": library.map(|facts| facts.nvml_version.as_str()),
        },
        "recorded": facts.trials.is_none(),
        "verdict": verdict.as_str(),
        "checks": checks,
    });
    format!("{page:#}")
}
