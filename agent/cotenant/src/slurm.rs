//! Owns how it is found out what Slurm granted its jobs: the section of the configuration, the thread, and how that goes.
//! Refuses to ask Slurm: no program of its is run and no daemon of its is called.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Result, bail};
use cotenant_host::{Host, JobListing, Jobs, JobsConfig};
use cotenant_model::view::{Feature, FeatureState};
use serde::Deserialize;
use tracing::warn;

use crate::{features::feature, rights::Confinement};

const NAME: &str = "job_grants";
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

/// `[slurm]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Slurm {
    /// Below `agent.root`; none when empty.
    pub(crate) job_mapping: PathBuf,
    #[serde(with = "humantime_serde")]
    pub(crate) interval: Duration,
}

impl Default for Slurm {
    fn default() -> Self {
        Self { job_mapping: PathBuf::new(), interval: JobsConfig::INTERVAL }
    }
}

impl Slurm {
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_mapped() && !self.job_mapping.is_absolute() {
            bail!(
                "slurm.job_mapping is {}: a path from the root is wanted, or \"\" for none",
                self.job_mapping.display()
            );
        }
        if self.interval < LEAST_INTERVAL {
            bail!("slurm.interval is {:?}: allowed are 100ms and more", self.interval);
        }
        Ok(())
    }

    fn is_mapped(&self) -> bool {
        !self.job_mapping.as_os_str().is_empty()
    }

    /// Starts the thread that looks.
    pub(crate) fn watch(&self, host: &Host, confinement: Confinement) -> Watched {
        Watched { slurm: self.clone(), jobs: self.look(host, confinement) }
    }

    fn look(&self, host: &Host, confinement: Confinement) -> Option<Jobs> {
        let mapping = self.is_mapped().then(|| host.path(&self.job_mapping.to_string_lossy()));
        let config = JobsConfig { mapping, interval: self.interval };
        confinement
            .outside(|| Jobs::spawn(host.clone(), config))
            .and_then(|spawned| Ok(spawned?))
            .inspect_err(|error| warn!(error = format!("{error:#}"), "jobs' grants are not looked for"))
            .ok()
    }

    /// `None` for `listing` where the thread did not start.
    fn feature(&self, listing: Option<&JobListing>) -> Feature {
        let (state, reason) = match listing {
            None => (FeatureState::Broken, "the thread that looks for them did not start".to_owned()),
            Some(listing) if !self.is_mapped() => {
                if listing.constrained() {
                    (FeatureState::Active, "by the devices that jobs' cgroups allow".to_owned())
                } else {
                    (FeatureState::Disabled, "slurm.job_mapping is not set".to_owned())
                }
            }
            Some(listing) => mapped(listing),
        };
        feature(NAME, state, reason)
    }

    /// How it goes, for commands that ask once.
    pub(crate) fn asked_once(&self, host: &Host) -> Feature {
        let jobs = self.look(host, Confinement::none());
        self.feature(jobs.map(|jobs| jobs.heard.first()).as_deref())
    }
}

fn mapped(listing: &JobListing) -> (FeatureState, String) {
    let JobListing { distrusted, unread, .. } = listing;
    match &listing.error {
        None if !listing.mapped => (FeatureState::Degraded, "not looked at yet".to_owned()),
        None if *distrusted > 0 => (
            FeatureState::Degraded,
            format!("{distrusted} files of slurm.job_mapping are not root's alone, or cannot be read"),
        ),
        None if *unread > 0 => (
            FeatureState::Degraded,
            format!("{unread} lines of slurm.job_mapping are no job's number such as SLURM_JOB_ID"),
        ),
        None => (FeatureState::Active, format!("{} jobs", listing.grants.len())),
        Some(error) if listing.mapped => {
            (FeatureState::Degraded, format!("{error}; what was granted before still holds"))
        }
        Some(error) => (FeatureState::Broken, error.clone()),
    }
}

/// The thread, if it could be started, and what it was started for.
#[derive(Debug)]
pub(crate) struct Watched {
    slurm: Slurm,
    jobs: Option<Jobs>,
}

impl Watched {
    /// What was found last.
    pub(crate) fn latest(&self) -> Option<Arc<JobListing>> {
        self.jobs.as_ref().map(|jobs| jobs.heard.latest())
    }

    pub(crate) fn feature(&self, listing: Option<&JobListing>) -> Feature {
        self.slurm.feature(listing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_slurm_is_no_fault_and_a_directory_that_is_not_there_is_one() {
        let unset = Slurm::default();
        let set = Slurm { job_mapping: "/run/gpu-jobs".into(), ..Slurm::default() };
        let mut listing = JobListing::default();
        assert_eq!(unset.feature(Some(&listing)).state, FeatureState::Disabled);
        assert_eq!(set.feature(Some(&listing)).state, FeatureState::Degraded);
        assert_eq!(set.feature(None).state, FeatureState::Broken);
        listing.error = Some("gone".to_owned());
        assert_eq!(set.feature(Some(&listing)).state, FeatureState::Broken);
        listing.mapped = true;
        assert_eq!(set.feature(Some(&listing)).state, FeatureState::Degraded);
        listing.error = None;
        assert_eq!(set.feature(Some(&listing)).state, FeatureState::Active);
        listing.distrusted = 1;
        let feature = set.feature(Some(&listing));
        assert!(feature.state == FeatureState::Degraded && feature.remedy.contains("chown root"));
    }
}
