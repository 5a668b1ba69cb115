//! Owns the `[otlp]` section of the configuration.
//! Refuses defaults for what the environment may say: such a key is unset until somebody sets it.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use cotenant_export::otlp::{Bounds, Rates, Settings, Signal, Wishes};
use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools, reason = "each is a switch of the configuration file")]
pub(crate) struct Otlp {
    pub(crate) enabled: bool,
    pub(crate) metrics: bool,
    pub(crate) traces: bool,
    pub(crate) logs: bool,
    pub(crate) endpoint: Option<String>,
    pub(crate) protocol: Option<String>,
    pub(crate) compression: Option<String>,
    pub(crate) headers: BTreeMap<String, String>,
    #[serde(with = "humantime_serde")]
    pub(crate) timeout: Option<Duration>,
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) client_certificate: Option<PathBuf>,
    pub(crate) client_key: Option<PathBuf>,
    #[serde(with = "humantime_serde")]
    pub(crate) interval: Option<Duration>,
    pub(crate) temporality: Option<String>,
    pub(crate) histograms: Option<String>,
    pub(crate) queue_items: usize,
    pub(crate) queue_bytes: usize,
    pub(crate) slow_calls_per_second: u32,
    #[serde(with = "humantime_serde")]
    pub(crate) incident_interval: Duration,
}

impl Default for Otlp {
    fn default() -> Self {
        let Bounds { items, bytes } = Bounds::default();
        let rates = Rates::default();
        Self {
            enabled: false,
            metrics: true,
            traces: true,
            logs: true,
            endpoint: None,
            protocol: None,
            compression: None,
            headers: BTreeMap::new(),
            timeout: None,
            certificate: None,
            client_certificate: None,
            client_key: None,
            interval: None,
            temporality: None,
            histograms: None,
            queue_items: items,
            queue_bytes: bytes,
            slow_calls_per_second: rates.slow_calls_per_second,
            incident_interval: Duration::from_secs_f64(rates.standing_seconds),
        }
    }
}

impl Otlp {
    /// The section over the environment.
    pub(crate) fn settings(&self, variable: &dyn Fn(&str) -> Option<String>) -> Result<Settings> {
        let without =
            [(self.metrics, Signal::Metrics), (self.traces, Signal::Traces), (self.logs, Signal::Logs)];
        let wishes = Wishes {
            endpoint: self.endpoint.clone(),
            protocol: self.protocol.clone(),
            compression: self.compression.clone(),
            headers: self.headers.clone(),
            timeout: self.timeout,
            certificate: self.certificate.clone(),
            client_certificate: self.client_certificate.clone(),
            client_key: self.client_key.clone(),
            interval: self.interval,
            temporality: self.temporality.clone(),
            histograms: self.histograms.clone(),
            without: without.into_iter().filter(|(wanted, _)| !wanted).map(|(_, signal)| signal).collect(),
        };
        let settings = Settings::resolve(&wishes, variable)?;
        Ok(Settings { bounds: Bounds { items: self.queue_items, bytes: self.queue_bytes }, ..settings })
    }

    pub(crate) fn rates(&self) -> Rates {
        Rates {
            slow_calls_per_second: self.slow_calls_per_second,
            standing_seconds: self.incident_interval.as_secs_f64(),
        }
    }

    /// What can be said without the environment.
    pub(crate) fn check(&self) -> Result<()> {
        let least = Duration::from_secs(1);
        if self.interval.is_some_and(|interval| interval < least) {
            bail!("otlp.interval is below 1s: the figures change once a second");
        }
        if self.timeout.is_some_and(|timeout| timeout.is_zero()) {
            bail!("otlp.timeout is 0: no receiver can answer in that; the default is 10s");
        }
        if self.incident_interval < least {
            bail!("otlp.incident_interval is below 1s; the default is 5m");
        }
        if self.queue_items == 0 || !(65_536..=1 << 30).contains(&self.queue_bytes) {
            bail!("otlp.queue_items must be 1 or more, otlp.queue_bytes from 65536 to 1073741824");
        }
        self.settings(&|_| None).map(|_| ()).context("[otlp]")
    }
}

#[cfg(test)]
mod tests {
    use crate::config::COMMENTED;

    use super::*;

    #[derive(Deserialize)]
    struct File {
        otlp: Otlp,
    }

    /// The examples of the commented file, which stand for no default.
    #[test]
    fn the_commented_file_names_every_key_that_has_no_default() {
        let from = COMMENTED.find("[otlp]").expect("the section");
        let section = COMMENTED[from..].split("\n[").next().unwrap_or_default();
        let text: String = section
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(key) if key.contains(" = ") && !key.starts_with(' ') => format!("{key}\n"),
                Some(_) => String::new(),
                None => format!("{line}\n"),
            })
            .collect();
        let File { otlp } = toml::from_str(&text).expect("the examples are valid");
        otlp.check().expect("the examples are allowed");
        let shown = format!("{otlp:?}");
        assert!(!shown.contains(": None"), "every key has its example: {shown}");
    }

    #[test]
    fn values_that_cannot_be_say_what_can() {
        for (text, word) in [
            ("interval = \"10ms\"", "once a second"),
            ("queue_bytes = 10", "65536"),
            ("protocol = \"http/json\"", "http/protobuf"),
            ("endpoint = \"collector:4318\"", "http://collector:4318"),
        ] {
            let File { otlp } = toml::from_str(&format!("[otlp]\n{text}\n")).expect("valid TOML");
            let error = format!("{:#}", otlp.check().expect_err(text));
            assert!(error.contains(word), "{error}");
        }
    }
}
