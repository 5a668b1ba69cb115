//! Owns the forecast of host memory: whether a tenant's memory cgroup comes to its limit, or the host to its end, and when.
//! Refuses the page cache: what the kernel takes back before it kills is no use of memory.

mod warned;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::forecast::Exhaustion;
use super::identity;
use super::lasting::Lasting;
use super::series::Series;
use super::warning::{Severity, Warning, WarningCounts};
use super::{FOLLOWED, HORIZONS, WARN, WATCH};
use crate::Tenant;
use crate::kill::Scope;
use warned::Warned;

const MIB: f64 = 1024.0 * 1024.0;
/// Memory cgroups of one tenant that are followed: its containers.
pub const PLACES: usize = 8;
/// What holds this part of its limit has met it: what comes down from there was stopped, and did not turn by itself.
const MET: f64 = 0.98;

/// Host memory at one moment. Read beside the tick, at times of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostMoment {
    /// On the clock of [`super::Moment::at`].
    pub taken: Duration,
    /// `None` when it could not be read.
    pub memory: Option<HostMemory>,
    /// GPU tenants alone.
    pub tenants: Vec<TenantMemory>,
    pub kills: Kills,
}

/// Processes that the kernel killed for want of memory. Counts fall when who is long gone is forgotten.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kills {
    /// At the limit of a memory cgroup, for want of the host's, or for what is not known; by whose they were.
    #[serde(with = "identity::map")]
    pub by_tenant: BTreeMap<Tenant, u64>,
    /// For want of the host's, whosever they were.
    pub of_host: u64,
}

impl Kills {
    pub fn of(kills: &BTreeMap<(Option<Tenant>, Option<Scope>), u64>) -> Self {
        let mut sorted = Self::default();
        for ((tenant, scope), count) in kills {
            // What a cpuset allows is no memory that is forecast. Without the kernel's log nobody says what ran out.
            if let Some(tenant) = tenant
                && *scope != Some(Scope::Cpuset)
            {
                *sorted.by_tenant.entry(tenant.clone()).or_default() += count;
            }
            if *scope == Some(Scope::Global) {
                sorted.of_host += count;
            }
        }
        sorted
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostMemory {
    pub total: u64,
    /// What programs can have without swapping, by the kernel's own estimate.
    pub available: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantMemory {
    #[serde(with = "identity::tenant")]
    pub tenant: Tenant,
    /// Pinned through the driver, by the ledger. Charged to the host, not to the cgroup.
    pub pinned: u64,
    /// What its memory cgroups hold; those that could not be read are not here.
    pub places: Vec<Place>,
}

/// A memory cgroup that bounds a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub path: String,
    /// `None` where there is none up to the root: the host is the bound.
    pub limit: Option<u64>,
    /// What is charged and cannot be taken back.
    pub held: u64,
}

/// What is to be expected of host memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HostForecast {
    /// `None` while the host's memory is not known.
    pub node: Option<MemoryForecast>,
    /// In the order of names; of each tenant the place that is the likeliest to come to its limit.
    pub tenants: Vec<TenantMemoryForecast>,
    /// Those that stand.
    pub warnings: Vec<MemoryWarning>,
    /// By severity, in the order of [`Severity::ALL`]: before the tenants' limits, and before the host's end.
    pub limit_warnings: [WarningCounts; Severity::ALL.len()],
    pub host_warnings: [WarningCounts; Severity::ALL.len()],
}

/// A warning that stands before a limit, or before the end of the host's memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryWarning {
    /// Whose limit; `None` is the host.
    pub tenant: Option<Tenant>,
    #[serde(flatten)]
    pub warning: Warning,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TenantMemoryForecast {
    pub tenant: Tenant,
    pub pinned: u64,
    /// Growth of what it holds and pins, in bytes per second.
    pub rate: f64,
    #[serde(flatten)]
    pub memory: MemoryForecast,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryForecast {
    /// The cgroup's, or all that the host has; `None` where a tenant has none.
    pub limit: Option<u64>,
    pub held: u64,
    /// What is left under the limit or on the host, whichever is less.
    pub room: u64,
    /// The probability that it is used up within each of [`HORIZONS`].
    pub risk: [f64; HORIZONS.len()],
    /// When it is used up at the present pace. `None` while nothing grows.
    pub exhaustion: Option<Exhaustion>,
}

/// Everything remembered of host memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Memory {
    begun: Option<f64>,
    taken: Option<f64>,
    host: Option<(Level, u64)>,
    #[serde(with = "identity::map")]
    tenants: BTreeMap<Tenant, Resident>,
    warned: Warned,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Resident {
    pinned: Level,
    places: BTreeMap<String, (Level, Option<u64>)>,
}

/// One level of bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Level {
    series: Series,
    lasting: Lasting,
}

impl Level {
    fn new(at: f64, bytes: u64) -> Self {
        Self { series: Series::new(at, bytes as f64), lasting: Lasting::default() }
    }

    fn advance(&mut self, at: f64, bytes: u64, limit: Option<u64>) {
        let level = bytes as f64;
        let met = limit.is_some_and(|limit| level >= MET * limit as f64);
        self.series.advance(at, level, level, None, met);
    }

    /// `elapsed` seconds after the last one: none of the same reading.
    fn forecast(&mut self, limit: Option<u64>, room: u64, elapsed: f64) -> MemoryForecast {
        let series = &self.series;
        let left = (room as f64).max(MIB);
        let mut risk = std::array::from_fn(|horizon| series.rises(horizon, left));
        self.lasting.advance(&mut risk, elapsed);
        let exhaustion = series.exhaustion(room as f64, series.run.rate());
        MemoryForecast { limit, held: self.held(), room, risk, exhaustion }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it was bytes")]
    fn held(&self) -> u64 {
        self.series.level.max(0.0) as u64
    }
}

impl Memory {
    pub(super) fn advance(&mut self, moment: &HostMoment) -> HostForecast {
        let at = moment.taken.as_secs_f64();
        let begun = *self.begun.get_or_insert(at);
        // The same reading twice is one: nothing stood still meanwhile.
        let elapsed = self.taken.map_or(0.0, |taken| (at - taken).max(0.0));
        let fresh = self.taken.is_none() || elapsed > 0.0;
        if fresh {
            self.taken = Some(at);
            self.take(at, moment);
        }
        if at - begun < WATCH {
            return HostForecast::default();
        }
        let mut forecast = self.forecast(elapsed);
        if fresh {
            self.warned.advance(at, &forecast, &moment.kills);
        }
        self.warned.tell(&mut forecast);
        forecast
    }

    fn take(&mut self, at: f64, moment: &HostMoment) {
        match moment.memory {
            Some(HostMemory { total, available }) => {
                let used = total.saturating_sub(available);
                match &mut self.host {
                    Some((level, known)) => {
                        level.advance(at, used, Some(total));
                        *known = total;
                    }
                    None => self.host = Some((Level::new(at, used), total)),
                }
            }
            None => self.host = None,
        }
        let here: BTreeSet<&Tenant> = moment.tenants.iter().map(|of| &of.tenant).collect();
        self.tenants.retain(|tenant, _| here.contains(tenant));
        for of in &moment.tenants {
            if !self.tenants.contains_key(&of.tenant) {
                if self.tenants.len() >= FOLLOWED {
                    continue;
                }
                let new = Resident { pinned: Level::new(at, of.pinned), places: BTreeMap::new() };
                self.tenants.insert(of.tenant.clone(), new);
            }
            if let Some(resident) = self.tenants.get_mut(&of.tenant) {
                resident.take(at, of);
            }
        }
    }

    fn forecast(&mut self, elapsed: f64) -> HostForecast {
        let available = self.host.as_ref().map(|(level, total)| total.saturating_sub(level.held()));
        let node = self
            .host
            .as_mut()
            .zip(available)
            .map(|((level, total), room)| level.forecast(Some(*total), room, elapsed));
        let tenants =
            self.tenants.iter_mut().filter_map(|(tenant, of)| of.forecast(tenant, available, elapsed));
        HostForecast { node, tenants: tenants.collect(), ..HostForecast::default() }
    }
}

impl Resident {
    fn take(&mut self, at: f64, of: &TenantMemory) {
        self.pinned.advance(at, of.pinned, None);
        let followed = &of.places[..of.places.len().min(PLACES)];
        self.places.retain(|path, _| followed.iter().any(|place| place.path == *path));
        for place in followed {
            match self.places.get_mut(&place.path) {
                Some((level, limit)) => {
                    level.advance(at, place.held, place.limit);
                    *limit = place.limit;
                }
                None => {
                    self.places.insert(place.path.clone(), (Level::new(at, place.held), place.limit));
                }
            }
        }
    }

    /// `None` while no place of it can be read, or it has no bound that is known.
    fn forecast(
        &mut self,
        tenant: &Tenant,
        available: Option<u64>,
        elapsed: f64,
    ) -> Option<TenantMemoryForecast> {
        let forecasts = self.places.values_mut().filter_map(|(level, limit)| {
            let free = limit.map(|limit| limit.saturating_sub(level.held()));
            let room = free.into_iter().chain(available).min()?;
            Some((level.series.run.rate(), level.forecast(*limit, room, elapsed)))
        });
        let worst = forecasts.max_by(|(_, one), (_, two)| {
            one.risk[WARN].total_cmp(&two.risk[WARN]).then(two.room.cmp(&one.room))
        });
        let (rate, memory) = worst?;
        let rate = rate.max(self.pinned.series.run.rate());
        Some(TenantMemoryForecast { tenant: tenant.clone(), pinned: self.pinned.held(), rate, memory })
    }
}

#[cfg(test)]
mod tests;
