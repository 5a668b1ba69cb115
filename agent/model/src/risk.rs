//! Owns the forecast of GPU memory: whether an allocation will find no room, when, because of whom, and who will pay.
//! Refuses clocks and IO: a moment goes in, a forecast comes out, live and from a recording alike.
//!
//! The method, its assumptions and units are in dashboards/RISK.md.

mod bend;
mod forecast;
mod gpu;
mod host;
mod identity;
mod lasting;
mod moment;
mod peaks;
pub mod quota;
mod record;
mod refusals;
mod run;
pub mod score;
mod series;
mod spread;
mod victims;
pub mod warning;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use forecast::{Calibration, Exhaustion, Forecast, GpuForecast, Growth, Headroom, Kept, TenantForecast};
pub use host::{
    HostForecast, HostMemory, HostMoment, Kills, MemoryForecast, MemoryWarning, PLACES, Place, TenantMemory,
    TenantMemoryForecast,
};
pub use moment::{GpuMemory, GpuMoment, Holding, Moment, TenantMoment};
pub use refusals::Refusals;

use crate::{GpuId, Tenant};
use gpu::Gpu;

/// The version of what a [`Forecaster`] remembers: goes up with every change of it, so that no recording is gone on
/// with by another's memory.
pub const KNOWLEDGE: u32 = 5;
/// What is looked ahead, in seconds. The middle one is the one to warn by.
pub const HORIZONS: [f64; 3] = [10.0, 60.0, 300.0];
/// The spelling of [`HORIZONS`] as a label.
pub const HORIZON_NAMES: [&str; HORIZONS.len()] = ["10s", "60s", "300s"];
/// The place of the horizon to warn by.
pub const WARN: usize = 1;
/// Likely victims that are named.
pub const VICTIMS: usize = 3;
/// For so many seconds a GPU is watched before anything is said of it: what starts together with the agent, or was
/// there before it, is not known.
pub const WATCH: f64 = 30.0;
/// Tenants on one GPU that have a memory of their own; the others are in the GPU's sum only.
pub const FOLLOWED: usize = 1024;

/// Everything remembered between moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Forecaster {
    #[serde(with = "identity::map")]
    gpus: BTreeMap<GpuId, Gpu>,
    /// Time that each tenant has waited for reclaim, in ns, as of the last moment.
    #[serde(with = "identity::map")]
    reclaim: BTreeMap<Tenant, u64>,
    memory: host::Memory,
}

impl Forecaster {
    pub fn advance(&mut self, moment: &Moment) -> Forecast {
        let at = moment.at.as_secs_f64();
        let mut holdings: BTreeMap<&GpuId, BTreeMap<&Tenant, &Holding>> = BTreeMap::new();
        let mut waited: BTreeMap<&GpuId, f64> = BTreeMap::new();
        for tenant in &moment.tenants {
            // In place: a copy of each name at each tick is what a node with many tenants would pay most for.
            let before = if let Some(known) = self.reclaim.get_mut(&tenant.tenant) {
                std::mem::replace(known, tenant.reclaim_ns)
            } else {
                self.reclaim.insert(tenant.tenant.clone(), tenant.reclaim_ns);
                tenant.reclaim_ns
            };
            let fresh = tenant.reclaim_ns.saturating_sub(before) as f64 / 1e9;
            for holding in &tenant.holdings {
                holdings.entry(&holding.gpu).or_default().insert(&tenant.tenant, holding);
                *waited.entry(&holding.gpu).or_default() += fresh;
            }
        }
        if self.reclaim.len() > moment.tenants.len() {
            let here: BTreeSet<&Tenant> = moment.tenants.iter().map(|of| &of.tenant).collect();
            self.reclaim.retain(|tenant, _| here.contains(tenant));
        }
        // A GPU that NVML no longer lists is forgotten; one that did not answer is kept.
        self.gpus.retain(|id, _| moment.gpus.iter().any(|gpu| gpu.gpu == *id));
        let none = BTreeMap::new();
        let mut gpus = Vec::with_capacity(moment.gpus.len());
        for gpu in &moment.gpus {
            let Some(memory) = gpu.memory else { continue };
            let holdings = holdings.get(&gpu.gpu).unwrap_or(&none);
            let reclaim = waited.get(&gpu.gpu).copied().unwrap_or(0.0);
            let state = self.gpus.entry(gpu.gpu.clone()).or_default();
            gpus.extend(state.advance(&gpu.gpu, at, gpu.polled.as_secs_f64(), memory, holdings, reclaim));
        }
        let host = moment.host.as_ref().map(|host| self.memory.advance(host));
        Forecast { at: moment.at, gpus, host }
    }
}
