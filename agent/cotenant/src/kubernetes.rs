//! Owns how Kubernetes is asked: the section of the configuration, kubelet's thread, and how that goes.
//! Refuses the API server unless told to ask it: everything else needs no right in the cluster.

mod pods;

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use cotenant_host::{ApiConfig, Host, Kubelet, KubeletConfig, Listing, Source, Wishes};
use cotenant_model::{
    grant::SourceView,
    view::{Feature, FeatureState},
};
pub(crate) use pods::{Pods, Told};
use serde::Deserialize;
use tracing::warn;

use crate::{features::feature, rights::Confinement};

const LEAST_INTERVAL: Duration = Duration::from_millis(100);
/// Labels, and as many annotations: each is a series of each tenant.
const MAX_KEYS: usize = 16;
/// A prefix of 253, a slash and a name of 63.
const MAX_KEY: usize = 317;

/// `[kubernetes]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Kubernetes {
    pub(crate) enabled: Enabled,
    pub(crate) podresources: PathBuf,
    pub(crate) runtimes: Vec<PathBuf>,
    pub(crate) pod_logs: PathBuf,
    pub(crate) resources: Vec<String>,
    #[serde(with = "humantime_serde")]
    pub(crate) interval: Duration,
    #[serde(with = "humantime_serde")]
    pub(crate) deadline: Duration,
    pub(crate) api_watch: bool,
    pub(crate) api_server: String,
    pub(crate) api_credentials: PathBuf,
    pub(crate) node: String,
    pub(crate) labels: Vec<String>,
    pub(crate) annotations: Vec<String>,
    pub(crate) tenant_label: String,
    pub(crate) tenant_namespace: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Enabled {
    Auto,
    On,
    Off,
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            enabled: Enabled::Auto,
            podresources: PathBuf::from(KubeletConfig::PODRESOURCES),
            runtimes: KubeletConfig::RUNTIMES.iter().map(PathBuf::from).collect(),
            pod_logs: PathBuf::from(Host::POD_LOGS),
            resources: Vec::new(),
            interval: KubeletConfig::INTERVAL,
            deadline: KubeletConfig::DEADLINE,
            api_watch: false,
            api_server: String::new(),
            api_credentials: PathBuf::from(ApiConfig::CREDENTIALS),
            node: String::new(),
            labels: Vec::new(),
            annotations: Vec::new(),
            tenant_label: String::new(),
            tenant_namespace: false,
        }
    }
}

impl Kubernetes {
    pub(crate) fn check(&self) -> Result<()> {
        let paths = self.runtimes.iter().map(|path| ("runtimes", path));
        let single = [("podresources", &self.podresources), ("pod_logs", &self.pod_logs)];
        for (key, path) in single.into_iter().chain(paths) {
            if !path.is_absolute() {
                bail!(
                    "kubernetes.{key} has {}: a path from the root is wanted, such as {}",
                    path.display(),
                    KubeletConfig::PODRESOURCES
                );
            }
        }
        if self.interval < LEAST_INTERVAL {
            bail!("kubernetes.interval is {:?}: allowed are 100ms and more", self.interval);
        }
        if self.deadline.is_zero() {
            bail!("kubernetes.deadline is 0: no question can meet it; the default is 2s");
        }
        self.check_labels()
    }

    fn check_labels(&self) -> Result<()> {
        if !self.api_credentials.is_absolute() {
            bail!(
                "kubernetes.api_credentials is {}: a path from the root is wanted, such as {}",
                self.api_credentials.display(),
                ApiConfig::CREDENTIALS
            );
        }
        let server = &self.api_server;
        if !server.is_empty() && !server.starts_with("https://") {
            bail!(
                "kubernetes.api_server is {server:?}: https://HOST:PORT is wanted, as the token goes there"
            );
        }
        let mut asked = !self.tenant_label.is_empty();
        for (name, keys) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            asked |= !keys.is_empty();
            if keys.len() > MAX_KEYS {
                bail!(
                    "kubernetes.{name} has {} keys: {MAX_KEYS} at most, each is a series of each pod",
                    keys.len()
                );
            }
            if let Some(key) = keys.iter().find(|key| !is_key(key)) {
                bail!("kubernetes.{name} has {key:?}, which is no key such as app.kubernetes.io/name");
            }
        }
        if !self.tenant_label.is_empty() && !is_key(&self.tenant_label) {
            bail!("kubernetes.tenant_label is {:?}, which is no key such as team", self.tenant_label);
        }
        if asked && !self.api_watch {
            bail!("kubernetes.labels, annotations and tenant_label need kubernetes.api_watch = true");
        }
        Ok(())
    }

    /// How the API server is to be asked, if it is.
    pub(crate) fn api(&self) -> Option<ApiConfig> {
        self.api_watch.then(|| ApiConfig {
            server: self.api_server.clone(),
            credentials: self.api_credentials.clone(),
            node: self.node.clone(),
            deadline: ApiConfig::DEADLINE,
            wishes: Wishes {
                labels: self.labels.clone(),
                annotations: self.annotations.clone(),
                tenant_label: self.tenant_label.clone(),
            },
        })
    }

    /// The host as it names pods.
    pub(crate) fn host(&self, host: Host) -> Host {
        host.with_pod_logs(&self.pod_logs)
    }

    /// Who is asked on this host, unless nobody is to be.
    pub(crate) fn asked(&self, host: &Host) -> Option<KubeletConfig> {
        let below = |path: &PathBuf| host.path(&path.to_string_lossy());
        (self.enabled != Enabled::Off).then(|| KubeletConfig {
            podresources: below(&self.podresources),
            runtimes: self.runtimes.iter().map(below).collect(),
            interval: self.interval,
            deadline: self.deadline,
            resources: self.resources.clone(),
        })
    }

    /// The thread that asks.
    pub(crate) fn ask(&self, host: &Host, confinement: Confinement) -> Option<Kubelet> {
        let config = self.asked(host)?;
        confinement
            .outside(|| Kubelet::spawn(host.clone(), config))
            .and_then(|spawned| Ok(spawned?))
            .inspect_err(|error| {
                warn!(error = format!("{error:#}"), "kubelet is not asked; pods are named by files only");
            })
            .ok()
    }
}

/// As labels and annotations are named.
fn is_key(key: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
    !key.is_empty() && key.len() <= MAX_KEY && key.bytes().all(plain)
}

/// How asking goes. Nothing before anybody answered: a host without Kubernetes has no such figures.
pub(crate) fn sources(listing: &Listing) -> Vec<SourceView> {
    [("podresources", &listing.podresources), ("runtime", &listing.runtime)]
        .into_iter()
        .filter(|(_, source)| source.answered.is_some() || source.failures > 0)
        .map(|(name, source)| SourceView {
            name,
            errors: source.failures,
            age_seconds: source.age().map(|age| age.as_secs_f64()),
        })
        .collect()
}

/// Of grants; `None` for `listing` while nobody is asked.
pub(crate) fn grants_feature(enabled: Enabled, listing: Option<&Listing>) -> Feature {
    let Some(listing) = listing else {
        let off = enabled == Enabled::Off;
        let state = if off { FeatureState::Disabled } else { FeatureState::Broken };
        let reason =
            if off { "kubernetes.enabled = \"off\"" } else { "the thread that asks kubelet did not start" };
        return feature("grants", state, reason.to_owned());
    };
    let Source { answered, failures, error } = &listing.podresources;
    let (state, reason) = match error {
        None if listing.rounds == 0 => (FeatureState::Degraded, "kubelet was not asked yet".to_owned()),
        None if listing.unread_ids > 0 => (
            FeatureState::Degraded,
            format!("{} device ids of kubelet's answer are of no plugin that is known", listing.unread_ids),
        ),
        None => (FeatureState::Active, String::new()),
        Some(error) if answered.is_none() && *failures == 0 && enabled == Enabled::Auto => {
            (FeatureState::Unsupported, error.clone())
        }
        Some(error) => (FeatureState::Broken, error.clone()),
    };
    feature("grants", state, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_kubernetes_is_no_fault_unless_it_was_to_be_there() {
        let mut listing = Listing::default();
        listing.podresources.error = Some("nothing listens".to_owned());
        let state = |enabled, listing| grants_feature(enabled, listing).state;
        assert_eq!(state(Enabled::Auto, Some(&listing)), FeatureState::Unsupported);
        assert_eq!(state(Enabled::On, Some(&listing)), FeatureState::Broken);
        assert_eq!(state(Enabled::Off, None), FeatureState::Disabled);
        assert!(sources(&listing).is_empty());
        let mut failing = listing.clone();
        failing.podresources.failures = 2;
        assert_eq!(state(Enabled::Auto, Some(&failing)), FeatureState::Broken);
        assert_eq!(sources(&failing), [SourceView { name: "podresources", errors: 2, age_seconds: None }]);
    }
}
