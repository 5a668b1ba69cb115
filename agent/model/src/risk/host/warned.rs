//! Owns the warnings of host memory: of each tenant before its limit, of the host before its end, and what became of them.
//! Refuses to forget one with its tenant: a kill is often the end of both.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::super::HORIZONS;
use super::super::identity;
use super::super::warning::{Severity, WarningCounts, Warnings};
use super::{HostForecast, Kills, MemoryWarning};
use crate::Tenant;

/// The warnings of one memory, and its kills as of the last reading.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Watched {
    warnings: Warnings,
    kills: u64,
}

impl Watched {
    fn since(kills: u64) -> Self {
        Self { kills, ..Self::default() }
    }

    fn advance(
        &mut self,
        at: f64,
        risk: &[f64; HORIZONS.len()],
        kills: u64,
        name: impl Fn() -> (Option<Tenant>, Vec<Tenant>),
    ) {
        let before = std::mem::replace(&mut self.kills, kills);
        self.warnings.advance(at, risk, kills > before, name);
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Warned {
    #[serde(with = "identity::map")]
    limits: BTreeMap<Tenant, Watched>,
    host: Option<Watched>,
    /// Of tenants that are not watched any more.
    past: [WarningCounts; Severity::ALL.len()],
}

impl Warned {
    /// One reading: what it says, and who was killed by then.
    pub(super) fn advance(&mut self, at: f64, forecast: &HostForecast, kills: &Kills) {
        let of = |tenant: &Tenant| kills.by_tenant.get(tenant).copied().unwrap_or(0);
        let risks: BTreeMap<&Tenant, &[f64; HORIZONS.len()]> =
            forecast.tenants.iter().map(|of| (&of.tenant, &of.memory.risk)).collect();
        for tenant in risks.keys() {
            if !self.limits.contains_key(*tenant) {
                self.limits.insert((*tenant).clone(), Watched::since(of(tenant)));
            }
        }
        for (tenant, watched) in &mut self.limits {
            let risk = risks.get(tenant).copied().unwrap_or(&[0.0; HORIZONS.len()]);
            // Whose limit it is both fills it and is killed there.
            watched.advance(at, risk, of(tenant), || (Some(tenant.clone()), vec![tenant.clone()]));
        }
        let here: BTreeSet<&Tenant> = risks.into_keys().collect();
        let past = &mut self.past;
        self.limits.retain(|tenant, watched| {
            let stays = here.contains(tenant) || watched.warnings.standing().is_some();
            if !stays {
                add(past, &watched.warnings.counts());
            }
            stays
        });
        if let Some(node) = &forecast.node {
            let host = self.host.get_or_insert_with(|| Watched::since(kills.of_host));
            host.advance(at, &node.risk, kills.of_host, || {
                // Whom the kernel chooses then is its own affair.
                let grows = forecast.tenants.iter().filter(|of| of.rate > 0.0);
                (
                    grows.max_by(|one, two| one.rate.total_cmp(&two.rate)).map(|of| of.tenant.clone()),
                    Vec::new(),
                )
            });
        }
    }

    pub(super) fn tell(&self, forecast: &mut HostForecast) {
        let standing = |tenant: Option<&Tenant>, watched: &Watched| {
            watched.warnings.standing().map(|warning| MemoryWarning { tenant: tenant.cloned(), warning })
        };
        let limits = self.limits.iter().filter_map(|(tenant, watched)| standing(Some(tenant), watched));
        let host = self.host.iter().filter_map(|watched| standing(None, watched));
        forecast.warnings = limits.chain(host).collect();
        forecast.limit_warnings = self.past;
        for watched in self.limits.values() {
            add(&mut forecast.limit_warnings, &watched.warnings.counts());
        }
        forecast.host_warnings = self.host.as_ref().map(|of| of.warnings.counts()).unwrap_or_default();
    }
}

fn add(to: &mut [WarningCounts; Severity::ALL.len()], of: &[WarningCounts; Severity::ALL.len()]) {
    for (to, of) in to.iter_mut().zip(of) {
        to.came_true += of.came_true;
        to.cleared += of.cleared;
    }
}
