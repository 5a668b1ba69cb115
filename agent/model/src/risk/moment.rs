//! Owns what the forecast consumes at one tick: memory of GPUs, holdings of tenants, waits for reclaim.
//! Refuses what the forecast does not need: a recording is a row of these, and nothing else.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::host::{HostMoment, Kills};
use super::identity;
use crate::node::Step;
use crate::sample::GpuRef;
use crate::view::TenantView;
use crate::{CudaError, GpuId, MemoryKind, Tenant, WaitClass};

/// One tick.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Since the agent started.
    pub at: Duration,
    pub gpus: Vec<GpuMoment>,
    pub tenants: Vec<TenantMoment>,
    /// `None` where host memory is not watched. A recording has it beside the rest: older ones are without.
    #[serde(skip)]
    pub host: Option<HostMoment>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuMoment {
    #[serde(with = "identity::gpu")]
    pub gpu: GpuId,
    /// When NVML was asked, on the clock of [`Moment::at`]. The ledger fills the time since.
    pub polled: Duration,
    /// `None` when NVML did not say.
    pub memory: Option<GpuMemory>,
}

/// NVML's figures. `used` is without `reserved` where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    pub limit: u64,
    pub reserved: Option<u64>,
    pub used: u64,
    pub free: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantMoment {
    #[serde(with = "identity::tenant")]
    pub tenant: Tenant,
    pub holdings: Vec<Holding>,
    /// Waits of class `reclaim` or `uvm_eviction` since the agent came, on whatever GPU.
    pub reclaim_waits: u64,
    pub reclaim_ns: u64,
}

/// What a tenant has on one GPU. Counters are since the agent came.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    #[serde(with = "identity::gpu")]
    pub gpu: GpuId,
    /// Device memory by the ledger.
    pub live: u64,
    /// The highest `live` since the agent came.
    pub peak: u64,
    pub allocated: u64,
    pub freed: u64,
    pub allocations: u64,
    /// Allocations that failed for want of memory.
    pub failures: u64,
    /// Managed memory, virtual: how much of it is on the GPU is not known.
    pub managed: u64,
    /// What pools keep beyond what is live; `None` where that is not known.
    pub pool: Option<u64>,
}

impl Holding {
    pub fn on(gpu: GpuId) -> Self {
        Self {
            gpu,
            live: 0,
            peak: 0,
            allocated: 0,
            freed: 0,
            allocations: 0,
            failures: 0,
            managed: 0,
            pool: None,
        }
    }
}

impl Moment {
    /// The moment of one tick. `polled` is when NVML was asked.
    pub fn of(step: &Step, at: Duration, polled: Duration) -> Self {
        let gpus = step.gpus.iter().map(|gpu| GpuMoment {
            gpu: gpu.sample.id.clone(),
            polled,
            memory: gpu.sample.memory.ok().map(|memory| GpuMemory {
                limit: memory.total,
                reserved: memory.reserved,
                used: memory.used,
                free: memory.free,
            }),
        });
        let tenants = step.tenants.iter().map(TenantMoment::of).filter(|tenant| !tenant.is_nothing());
        Self { at, gpus: gpus.collect(), tenants: tenants.collect(), host: None }
    }

    /// The same with host memory: what was read of it, completed by what the ledgers say is pinned and who was killed.
    #[must_use]
    pub fn with_host(self, step: &Step, read: Option<HostMoment>, kills: Kills) -> Self {
        let pinned: BTreeMap<&Tenant, u64> = step
            .tenants
            .iter()
            .map(|view| {
                let rows = view.memory.iter().filter(|((_, kind), _)| kind.is_host());
                (&view.tenant, rows.map(|(_, totals)| totals.live).sum())
            })
            .collect();
        let host = read.map(|mut host| {
            host.tenants.iter_mut().for_each(|of| of.pinned = pinned.get(&of.tenant).copied().unwrap_or(0));
            host.kills = kills;
            host
        });
        Self { host, ..self }
    }
}

impl TenantMoment {
    fn of(view: &TenantView) -> Self {
        let mut holdings: BTreeMap<&GpuId, Holding> = BTreeMap::new();
        for ((place, kind), totals) in &view.memory {
            let GpuRef::Known(gpu) = place else { continue };
            let holding = holdings.entry(gpu).or_insert_with(|| Holding::on(gpu.clone()));
            if kind.is_device() {
                holding.live += totals.live;
                holding.peak += totals.peak;
                holding.allocated += totals.allocated;
                holding.freed += totals.freed;
                holding.allocations += totals.allocations;
            } else if *kind == MemoryKind::Managed {
                holding.managed += totals.live;
            }
        }
        let mut nowhere = 0;
        for ((place, _, error), count) in &view.failures {
            match place {
                _ if *error != CudaError::OUT_OF_MEMORY => {}
                GpuRef::Known(gpu) => {
                    holdings.entry(gpu).or_insert_with(|| Holding::on(gpu.clone())).failures += count;
                }
                GpuRef::Unknown => nowhere += count,
                GpuRef::Host => {}
            }
        }
        let mut holdings: Vec<Holding> = holdings.into_values().collect();
        // A call that failed early names no GPU; of a tenant on one GPU it can be no other.
        if let [only] = holdings.as_mut_slice() {
            only.failures += nowhere;
        }
        let waits = [WaitClass::Reclaim, WaitClass::UvmEviction].map(|class| view.waits.get(&class));
        Self {
            tenant: view.tenant.clone(),
            holdings,
            reclaim_waits: waits.iter().flatten().map(|waits| waits.count).sum(),
            reclaim_ns: waits.iter().flatten().map(|waits| waits.sum_ns).sum(),
        }
    }

    fn is_nothing(&self) -> bool {
        self.reclaim_waits == 0 && self.holdings.is_empty()
    }
}
