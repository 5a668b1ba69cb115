//! Owns the watch at the API server as the agent has it: started by configuration, its state as a feature, whose pod is whose.
//! Refuses to start it unasked: it is the only part that needs a right in the cluster.

use std::sync::Arc;

use cotenant_host::{PodWatch, Roster};
use cotenant_model::{
    Tenant, TenantKind,
    grant::{GrantsView, SourceView},
    view::{Feature, FeatureState, TenantNote, TenantView},
};
use tracing::warn;

use super::Kubernetes;
use crate::{
    discovery::chain,
    features::{feature, remedied},
    rights::Confinement,
};

const NAME: &str = "api_watch";

#[derive(Debug)]
pub(crate) enum Pods {
    Off,
    /// Why it could not be started.
    Failed(String),
    Watched(PodWatch),
}

impl Pods {
    pub(crate) fn watch(kubernetes: &Kubernetes, confinement: Confinement) -> Self {
        let Some(config) = kubernetes.api() else { return Self::Off };
        let reason = match confinement.outside(|| PodWatch::spawn(config)) {
            Ok(Ok(watch)) => return Self::Watched(watch),
            Ok(Err(error)) => chain(&error),
            Err(error) => format!("{error:#}"),
        };
        warn!(reason, "the API server is not asked; no label makes a tenant");
        Self::Failed(reason)
    }

    pub(crate) fn told(&self) -> Told {
        match self {
            Self::Off => Told::Nothing,
            Self::Failed(reason) => Told::Failed(reason.clone()),
            Self::Watched(watch) => Told::Known(watch.heard.latest()),
        }
    }

    /// How it goes, for commands that ask once.
    pub(crate) fn asked_once(&self) -> Feature {
        match self {
            Self::Watched(watch) => Told::Known(watch.heard.first()).feature(),
            Self::Off | Self::Failed(_) => self.told().feature(),
        }
    }
}

/// What is known at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) enum Told {
    #[default]
    Nothing,
    Failed(String),
    Known(Arc<Roster>),
}

impl Told {
    pub(crate) fn feature(&self) -> Feature {
        let (state, reason, remedy) = match self {
            Self::Nothing => {
                return feature(NAME, FeatureState::Disabled, "kubernetes.api_watch = false".to_owned());
            }
            Self::Failed(reason) => (FeatureState::Broken, reason.clone(), String::new()),
            Self::Known(roster) => judge(roster),
        };
        let feature = feature(NAME, state, reason);
        if remedy.is_empty() { feature } else { remedied(feature, remedy) }
    }

    pub(crate) fn source(&self) -> Option<SourceView> {
        let Self::Known(roster) = self else { return None };
        Some(SourceView {
            name: "apiserver",
            errors: roster.source.failures,
            age_seconds: roster.age().map(|age| age.as_secs_f64()),
        })
    }

    /// Whose the pod is. `by_namespace`: its namespace's, where no label says it and it is known that none does.
    fn team_of<'a>(&'a self, namespace: &'a str, pod: &str, by_namespace: bool) -> Option<&'a str> {
        let (labelled, judged) = match self {
            Self::Known(roster) => (roster.team_of(namespace, pod), roster.has_judged(namespace, pod)),
            Self::Nothing | Self::Failed(_) => (None, true),
        };
        labelled.or_else(|| (by_namespace && judged).then_some(namespace))
    }

    /// Grants speak of pods by name. They are whoever the pods' processes are.
    pub(crate) fn name_grants(&self, grants: &mut GrantsView, by_namespace: bool) {
        let shares = grants.shares.iter_mut().map(|row| &mut row.tenant);
        let standings = grants.standings.iter_mut().map(|row| &mut row.tenant);
        let requests = grants.requests.iter_mut().map(|row| &mut row.tenant);
        for tenant in shares.chain(standings).chain(requests) {
            if tenant.kind == TenantKind::Pod
                && let (Some(namespace), Some(pod)) = (&tenant.namespace, &tenant.pod)
                && let Some(team) = self.team_of(namespace, pod, by_namespace)
            {
                let Tenant { name, kind, .. } = Tenant::plain(TenantKind::Team, team);
                (tenant.name, tenant.kind) = (name, kind);
            }
        }
    }

    /// Notes what each tenant's pod is labelled.
    pub(crate) fn note(&self, tenants: &mut [TenantView]) {
        let Self::Known(roster) = self else { return };
        for view in tenants {
            if let (Some(namespace), Some(pod)) = (&view.tenant.namespace, &view.tenant.pod) {
                // What is left of the time before the server told whose it is: one pod has its labels once.
                if view.tenant.kind == TenantKind::Pod && roster.team_of(namespace, pod).is_some() {
                    continue;
                }
                let note = |note: &cotenant_host::PodNote| TenantNote {
                    source: note.kind.as_str(),
                    key: note.key.clone(),
                    value: note.value.clone(),
                };
                view.notes = roster.notes(namespace, pod).iter().map(note).collect();
            }
        }
    }
}

fn judge(roster: &Roster) -> (FeatureState, String, String) {
    let never = roster.source.answered.is_none();
    match &roster.source.error {
        None if !roster.watching => {
            (FeatureState::Degraded, "the API server did not answer yet".to_owned(), String::new())
        }
        None if roster.left_out > 0 => {
            let reason = format!("{} pods of this node were left out: there are too many", roster.left_out);
            (FeatureState::Degraded, reason, String::new())
        }
        None => (FeatureState::Active, String::new(), String::new()),
        Some(error) if never => (FeatureState::Broken, error.clone(), roster.remedy.clone()),
        // What was heard before still holds; what is new is missed.
        Some(error) => (
            FeatureState::Degraded,
            format!("{error}; the pods known before keep their tenants"),
            roster.remedy.clone(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn an_outage_degrades_and_never_having_heard_is_broken() {
        let mut roster = Roster::default();
        let state = |roster: &Roster| judge(roster).0;
        assert_eq!(state(&roster), FeatureState::Degraded);
        roster.source.error = Some("403".to_owned());
        roster.remedy = "apply".to_owned();
        assert_eq!((state(&roster), judge(&roster).2), (FeatureState::Broken, "apply".to_owned()));
        roster.source.answered = Some(Instant::now());
        assert_eq!(state(&roster), FeatureState::Degraded);
        assert!(judge(&roster).1.starts_with("403; "));
        roster.source.error = None;
        // Listed, and the watch is not open yet.
        assert_eq!(state(&roster), FeatureState::Degraded);
        roster.watching = true;
        assert_eq!(state(&roster), FeatureState::Active);
        roster.left_out = 1;
        assert_eq!(state(&roster), FeatureState::Degraded);
    }

    #[test]
    fn off_is_disabled_and_says_nothing_of_a_source() {
        assert_eq!(Told::Nothing.feature().state, FeatureState::Disabled);
        assert_eq!(Told::Nothing.source(), None);
        let failed = Told::Failed("no server".to_owned()).feature();
        assert_eq!((failed.state, failed.reason.as_str()), (FeatureState::Broken, "no server"));
        assert!(!failed.remedy.is_empty());
    }
}
