//! Owns the demo's end on who made whom wait: the agent's seconds beside the driver's own, and its incidents in words.
//! Refuses words of its own about an incident: they are the agent's.

use std::{collections::BTreeMap, fmt::Write as _};

use cotenant_model::explain::Explanation;
use cotenant_node::scrape::Scrape;
use cotenant_sim_state::truth::Class;

/// Shorter waits are left out of the table.
const SHOWN: f64 = 0.05;

/// An incident as the agent explains it.
pub(crate) struct Explained {
    pub(crate) line: String,
    pub(crate) explanation: Explanation,
}

pub(crate) fn report(
    scrape: &Scrape,
    truth: &BTreeMap<(String, String, Class), f64>,
    incidents: &[Explained],
) -> String {
    let mut text = String::from(
        "Who made whom wait inside the driver, in seconds (the driver's own record of its locks beside it):\n",
    );
    for ((victim, culprit, class), seconds) in truth.iter().filter(|(_, seconds)| **seconds >= SHOWN) {
        let labels =
            [("victim", victim.as_str()), ("culprit", culprit.as_str()), ("wait_class", class.as_str())];
        let published = scrape.sum("cotenant_gpu_blame_seconds_total", &labels);
        let _ = writeln!(
            text,
            "  {victim:22} waited {published:7.3} (true {seconds:7.3})  {:14} <- {culprit}",
            class.as_str()
        );
    }
    let _ = writeln!(text, "\nIncidents, in the agent's words:");
    if incidents.is_empty() {
        let _ = writeln!(text, "  none");
    }
    for incident in incidents {
        let _ = writeln!(text, "\n{}\n{}", incident.line, incident.explanation);
    }
    text
}
