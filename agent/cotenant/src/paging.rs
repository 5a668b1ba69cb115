//! Owns the push to Alertmanager's v2 API, for hosts without a Prometheus that evaluates rules; off by default.
//! Refuses judgement: an open incident is an alert, and grouping, silences and routing are Alertmanager's.

mod alert;
pub(crate) mod config;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::park_timeout,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use cotenant_model::view::{Feature, FeatureState};
use tracing::warn;

use self::alert::{Alert, Desk};
use crate::{config::Config, discovery::chain, events::Story, features::feature};

const NAME: &str = "alertmanager_push";
/// How soon a new incident is told.
const LOOK: Duration = Duration::from_secs(2);
/// Words of an Alertmanager that end up in the log.
const WORDS: u64 = 300;

/// What became of the requests, as `/metrics` has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account(Option<Arc<Tally>>);

#[derive(Debug, Default)]
struct Tally {
    accepted: AtomicU64,
    unreachable: AtomicU64,
    refused: AtomicU64,
}

impl Account {
    /// Empty while nothing is pushed.
    pub(crate) fn view(&self) -> Vec<(&'static str, u64)> {
        let Some(tally) = &self.0 else { return Vec::new() };
        [("accepted", &tally.accepted), ("refused", &tally.refused), ("unreachable", &tally.unreachable)]
            .map(|(outcome, count)| (outcome, count.load(Ordering::Relaxed)))
            .into()
    }
}

/// The thread that tells.
pub(crate) struct Paging {
    desk: Desk,
    urls: Vec<String>,
    http: ureq::Agent,
    interval: Duration,
    story: Arc<Mutex<Story>>,
    tally: Arc<Tally>,
}

impl Paging {
    pub(crate) fn feature(config: &Config) -> Feature {
        if config.alertmanager.enabled {
            return feature(NAME, FeatureState::Active, String::new());
        }
        feature(NAME, FeatureState::Disabled, "alertmanager.enabled = false".to_owned())
    }

    /// `None` when it is off.
    pub(crate) fn new(config: &Config, story: &Arc<Mutex<Story>>) -> Option<Self> {
        let settings = &config.alertmanager;
        settings.enabled.then(|| Self {
            desk: Desk::new(settings.labels(), settings.interval),
            urls: settings
                .urls
                .iter()
                .map(|url| format!("{}/api/v2/alerts", url.trim_end_matches('/')))
                .collect(),
            http: ureq::Agent::config_builder()
                .timeout_global(Some(settings.timeout))
                .http_status_as_error(false)
                .proxy(None)
                .build()
                .into(),
            interval: settings.interval,
            story: Arc::clone(story),
            tally: Arc::default(),
        })
    }

    pub(crate) fn account(&self) -> Account {
        Account(Some(Arc::clone(&self.tally)))
    }

    /// Tells what is new at once and what stands at the interval. What could not be told is told the next time: every
    /// message has all that is open.
    pub(crate) fn run(mut self, stop: &AtomicBool) {
        let mut told = None::<Instant>;
        while !stop.load(Ordering::Relaxed) {
            park_timeout(LOOK);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let incidents = self.story.lock().map(|story| story.incidents.list(Some(now - 3600.0), None));
            let news = self.desk.observe(&incidents.unwrap_or_default(), now);
            if !news && told.is_some_and(|told| told.elapsed() < self.interval) {
                continue;
            }
            let alerts = self.desk.alerts(now);
            if alerts.is_empty() {
                continue;
            }
            // One of several that has it is enough for what is over to be forgotten: they tell each other.
            let reached = self.urls.iter().filter(|url| self.post(url, &alerts)).count();
            if reached > 0 {
                told = Some(Instant::now());
                self.desk.told();
            }
        }
    }

    fn post(&self, url: &str, alerts: &[Alert]) -> bool {
        let body = match serde_json::to_string(alerts) {
            Ok(body) => body,
            Err(error) => {
                warn!(error = %chain(&error), "alerts cannot be written");
                return false;
            }
        };
        let (count, words) = match self.http.post(url).content_type("application/json").send(&body) {
            Ok(answer) if answer.status().is_success() => {
                self.tally.accepted.fetch_add(1, Ordering::Relaxed);
                return true;
            }
            Ok(mut answer) => {
                let said = answer.body_mut().with_config().limit(WORDS).lossy_utf8(true).read_to_string();
                (
                    &self.tally.refused,
                    format!("{}: {}", answer.status(), said.unwrap_or_default().escape_debug()),
                )
            }
            Err(error) => (&self.tally.unreachable, chain(&error)),
        };
        // The first of each is enough for a log; the rest is counted.
        if count.fetch_add(1, Ordering::Relaxed) == 0 {
            warn!(url, error = words, "Alertmanager did not take the alerts; tried again, and counted");
        }
        false
    }
}
