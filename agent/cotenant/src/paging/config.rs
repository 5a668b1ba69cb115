//! Owns the keys of `[alertmanager]`.
//! Refuses addresses that cannot be asked.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail, ensure};
use serde::Deserialize;

/// Names that an alert gets from the agent.
const OURS: [&str; 3] = ["alertname", "severity", "tenant"];

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Alertmanager {
    pub(crate) enabled: bool,
    pub(crate) urls: Vec<String>,
    #[serde(with = "humantime_serde")]
    pub(crate) interval: Duration,
    #[serde(with = "humantime_serde")]
    pub(crate) timeout: Duration,
    labels: BTreeMap<String, String>,
}

impl Default for Alertmanager {
    fn default() -> Self {
        Self {
            enabled: false,
            urls: vec!["http://127.0.0.1:9093".to_owned()],
            interval: Duration::from_secs(30),
            timeout: Duration::from_secs(5),
            labels: BTreeMap::new(),
        }
    }
}

impl Alertmanager {
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(
            !self.urls.is_empty(),
            "alertmanager.urls is empty: give one address, or set enabled = false"
        );
        for url in &self.urls {
            let address = url.strip_prefix("http://");
            if !address.is_some_and(|rest| {
                !rest.trim_matches('/').is_empty() && !rest.contains([' ', '@', '?', '#'])
            }) {
                bail!(
                    "alertmanager.urls: {url:?} is no http://HOST:PORT (https and credentials are not spoken: \
                     put a proxy on this host before it)"
                );
            }
        }
        let (shortest, longest) = (Duration::from_secs(5), Duration::from_mins(10));
        ensure!(
            (shortest..=longest).contains(&self.interval),
            "alertmanager.interval: {:?} is not between 5s and 10m",
            self.interval
        );
        ensure!(
            (Duration::from_millis(100)..=longest).contains(&self.timeout),
            "alertmanager.timeout: {:?} is not between 100ms and 10m",
            self.timeout
        );
        for name in self.labels.keys() {
            let is_name = |(place, c): (usize, char)| {
                c == '_' || c.is_ascii_alphabetic() || (place > 0 && c.is_ascii_digit())
            };
            ensure!(
                !name.is_empty() && name.chars().enumerate().all(is_name),
                "alertmanager.labels: {name:?} is no label name ([a-zA-Z_][a-zA-Z0-9_]*)"
            );
            ensure!(!OURS.contains(&name.as_str()), "alertmanager.labels: {name:?} is the agent's to set");
        }
        Ok(())
    }

    /// On every alert: the configured ones, and the host's name as `instance` if nothing else is said.
    pub(crate) fn labels(&self) -> BTreeMap<String, String> {
        let mut labels = self.labels.clone();
        labels.entry("job".to_owned()).or_insert_with(|| "cotenant".to_owned());
        if let Ok(name) = rustix::system::uname().nodename().to_str() {
            labels.entry("instance".to_owned()).or_insert_with(|| name.to_owned());
        }
        labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_asked_is_refused_with_a_reason() {
        let with = |change: &dyn Fn(&mut Alertmanager)| {
            let mut settings = Alertmanager::default();
            change(&mut settings);
            settings.check().err().map(|error| error.to_string())
        };
        assert_eq!(with(&|_| {}), None);
        assert_eq!(with(&|settings| settings.urls = vec!["http://a:9093/prefix/".into()]), None);
        let refused = |change: &dyn Fn(&mut Alertmanager), word: &str| {
            let said = with(change).unwrap_or_default();
            assert!(said.contains(word), "{said:?} has no {word:?}");
        };
        refused(&|settings| settings.urls.clear(), "is empty");
        for url in ["https://a", "a:9093", "http://", "http://u:p@a", "http://a/?x"] {
            refused(&|settings| settings.urls = vec![url.into()], "HOST:PORT");
        }
        refused(&|settings| settings.interval = Duration::from_secs(1), "5s");
        refused(&|settings| settings.timeout = Duration::ZERO, "100ms");
        refused(&|settings| settings.labels = [("a-b".into(), String::new())].into(), "label name");
        refused(&|settings| settings.labels = [("tenant".into(), String::new())].into(), "agent's");
    }
}
