//! Owns incidents as alerts: names and labels as the shipped rules have them, so that one routing serves both.
//! Refuses to leave an alert standing: each has an end, a few intervals ahead while its incident is open.

use std::{
    collections::BTreeMap,
    time::{Duration, UNIX_EPOCH},
};

use cotenant_model::{
    explain::explain,
    incident::{Incident, IncidentId, Kind, State},
};
use serde::Serialize;

/// Alerts end by themselves after this many intervals without word: an agent that died holds nothing open.
const PATIENCE: u32 = 4;
const RUNBOOKS: &str = "https://github.com/cotenant/cotenant/blob/main/dashboards/runbooks";
/// Characters of a summary: a headline is shorter.
const SUMMARY: usize = 300;

type Labels = BTreeMap<String, String>;

/// As Alertmanager's v2 API takes it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Alert {
    pub(super) labels: Labels,
    annotations: BTreeMap<&'static str, String>,
    starts_at: String,
    pub(super) ends_at: String,
}

#[derive(Clone, Debug)]
struct Page {
    labels: Labels,
    annotations: BTreeMap<&'static str, String>,
    start_unix: f64,
    /// `None` while it is open.
    end_unix: Option<f64>,
}

/// What has been told, and what is to be.
#[derive(Debug)]
pub(super) struct Desk {
    common: Labels,
    interval: Duration,
    open: BTreeMap<IncidentId, Page>,
    /// To be told once more, as over.
    over: Vec<Page>,
}

impl Desk {
    pub(super) const fn new(common: Labels, interval: Duration) -> Self {
        Self { common, interval, open: BTreeMap::new(), over: Vec::new() }
    }

    /// Takes over how incidents stand; whether that is worth a message at once.
    pub(super) fn observe(&mut self, incidents: &[Incident], now: f64) -> bool {
        let mut news = false;
        let mut gone = std::mem::take(&mut self.open);
        for incident in incidents.iter().filter(|incident| incident.state == State::Open) {
            let Some(page) = self.page(incident) else { continue };
            match gone.remove(&incident.id) {
                Some(old) if old.labels == page.labels => {}
                // An incident that turned out to be another's doing is another alert.
                Some(old) => {
                    news = true;
                    self.over.push(Page { end_unix: Some(now), ..old });
                }
                None => news = true,
            }
            self.open.insert(incident.id, page);
        }
        for (id, page) in gone {
            news = true;
            let end =
                incidents.iter().find(|incident| incident.id == id).and_then(|incident| incident.end_unix);
            self.over.push(Page { end_unix: Some(end.unwrap_or(now)), ..page });
        }
        // Two incidents with the same labels are one alert to Alertmanager: it goes on while one of them does.
        self.over.retain(|over| self.open.values().all(|open| open.labels != over.labels));
        news
    }

    pub(super) fn alerts(&self, now: f64) -> Vec<Alert> {
        let standing = now + (self.interval * PATIENCE).as_secs_f64();
        let alert = |page: &Page| Alert {
            labels: page.labels.clone(),
            annotations: page.annotations.clone(),
            starts_at: time(page.start_unix),
            ends_at: time(page.end_unix.unwrap_or(standing)),
        };
        self.over.iter().chain(self.open.values()).map(alert).collect()
    }

    /// Somebody has all of it.
    pub(super) fn told(&mut self) {
        self.over.clear();
    }

    fn page(&self, incident: &Incident) -> Option<Page> {
        let (name, severity) = match incident.kind {
            Kind::NoisyNeighbour => ("CotenantNoisyNeighbour", "warning"),
            Kind::Stall => ("CotenantTenantStuck", "warning"),
            Kind::AllocationFailure => ("CotenantAllocationFailureStorm", "warning"),
            Kind::OomKill => ("CotenantGpuTenantOomKilled", "critical"),
            Kind::Xid => ("CotenantGpuXid", "critical"),
            Kind::XidEcho => ("CotenantGpuXid", "warning"),
            // Nobody has to get up for what went well.
            Kind::NearMiss => return None,
        };
        let mut labels = self.common.clone();
        let mut put = |name: &str, value: &str| labels.insert(name.to_owned(), value.to_owned());
        put("alertname", name);
        put("severity", severity);
        if let Some(victim) = incident.victims.first() {
            put("tenant", &victim.tenant.name);
        }
        if let Some(culprit) = incident.culprits.first() {
            put("culprit", &culprit.tenant.name);
        }
        // A GPU that joins later would be another alert; the words have them all.
        if let (false, [gpu]) = (incident.host_lock, incident.gpus.as_slice()) {
            put("hw_id", gpu.as_str());
        }
        let explanation = explain(incident);
        let mut lines = explanation.measured;
        lines.extend(explanation.advice);
        let annotations = BTreeMap::from([
            ("summary", explanation.headline.chars().take(SUMMARY).collect()),
            ("description", lines.join("\n")),
            ("runbook_url", format!("{RUNBOOKS}/{name}.md")),
        ]);
        Some(Page { labels, annotations, start_unix: incident.start_unix, end_unix: None })
    }
}

fn time(unix: f64) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_secs_f64(unix.max(0.0))).to_string()
}
