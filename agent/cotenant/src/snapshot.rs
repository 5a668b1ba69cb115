//! Owns the node as one JSON answer, /api/v1/node: GPUs, tenants with their counters, who made whom wait.
//! Refuses rates: counters run since the agent started, and a reader of two answers makes its own.
//!
//! An absent key is unknown, never zero. Keys may be added, not renamed. Sizes are bytes, times seconds.

use std::{collections::BTreeMap, fmt};

use cotenant_model::{
    Culprit, GpuId, Tenant,
    risk::HORIZON_NAMES,
    sample::GpuRef,
    view::{GpuView, TenantView, View},
};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Snapshot {
    /// Unix time of the figures, and of the agent's start: a newer start begins every counter anew.
    pub(crate) taken: f64,
    pub(crate) started: f64,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) tenants: Vec<Row>,
    pub(crate) blame: Vec<Blamed>,
    /// What works only in part or not at all, and why.
    pub(crate) degraded: Vec<Degraded>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Gpu {
    pub(crate) id: String,
    pub(crate) index: u32,
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) used: Option<u64>,
    /// Without what the driver keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) free: Option<u64>,
    /// 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) utilization: Option<f64>,
    pub(crate) sharing: String,
    /// Probability by horizon (`10s`, `60s`, `300s`).
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub(crate) reclaim_risk: BTreeMap<String, f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) exhaustion_seconds: Option<f64>,
    /// Who drives the risk most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) driver: Option<String>,
    /// How old NVML's figures are.
    pub(crate) age_seconds: f64,
}

/// Whom a row or an edge is about.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub(crate) struct Name {
    pub(crate) tenant: String,
    /// Where several containers make up the tenant's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) container: Option<String>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) name: Name,
    pub(crate) processes: u32,
    pub(crate) confidence: String,
    /// Live bytes of device memory by GPU; `unknown` where the GPU is not known.
    pub(crate) live: BTreeMap<String, u64>,
    /// NVML's bytes for its processes, by GPU.
    pub(crate) nvml: BTreeMap<String, u64>,
    /// Pinned and registered host memory.
    pub(crate) host: u64,
    /// Counters, all kinds of memory and all GPUs.
    pub(crate) allocated: u64,
    pub(crate) calls: u64,
    pub(crate) failures: u64,
    pub(crate) blocked_seconds: f64,
}

/// Blocked time of a victim by who had what it waited for.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Blamed {
    pub(crate) victim: Name,
    pub(crate) culprit: Name,
    /// `self`, `neighbour`, `device`, `kernel` or `unknown`.
    pub(crate) relation: String,
    pub(crate) wait_class: String,
    pub(crate) seconds: f64,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Degraded {
    pub(crate) feature: String,
    pub(crate) state: String,
    pub(crate) reason: String,
}

impl Snapshot {
    pub(crate) fn of(view: &View) -> Self {
        let features = view.agent.features.iter().filter(|feature| crate::features::bad(feature.state));
        Self {
            taken: view.taken_unix,
            started: view.started_unix,
            gpus: view.gpus.iter().map(|gpu| Gpu::of(gpu, view)).collect(),
            tenants: view.tenants.iter().map(Row::of).collect(),
            blame: blamed(view),
            degraded: features
                .map(|feature| Degraded {
                    feature: feature.name.to_owned(),
                    state: feature.state.as_str().to_owned(),
                    reason: feature.reason.clone(),
                })
                .collect(),
        }
    }
}

impl Gpu {
    fn of(gpu: &GpuView, view: &View) -> Self {
        let GpuView { sample, age_seconds, sharing, .. } = gpu;
        let memory = sample.memory.as_ref().ok();
        let forecast = view.risk.gpus.iter().find(|forecast| forecast.gpu == sample.id);
        let risks = forecast.map(|forecast| forecast.risk).into_iter().flatten();
        Self {
            id: sample.id.as_str().to_owned(),
            index: sample.index,
            name: sample.name.clone(),
            limit: memory.map(|memory| memory.total),
            used: memory.map(|memory| memory.used),
            free: memory.map(|memory| memory.free),
            utilization: sample.utilization.ok(),
            sharing: sharing.mode.as_str().to_owned(),
            reclaim_risk: HORIZON_NAMES.iter().map(|name| (*name).to_owned()).zip(risks).collect(),
            exhaustion_seconds: forecast.and_then(|forecast| forecast.exhaustion).map(|end| end.seconds),
            driver: forecast.and_then(|forecast| forecast.driver()).map(|tenant| tenant.name.clone()),
            age_seconds: *age_seconds,
        }
    }
}

impl Name {
    fn of(tenant: &Tenant) -> Self {
        Self { tenant: tenant.name.clone(), container: tenant.container.clone() }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.tenant)?;
        self.container.as_ref().map_or(Ok(()), |container| write!(f, "/{container}"))
    }
}

impl Row {
    fn of(view: &TenantView) -> Self {
        let mut live = BTreeMap::new();
        let mut host = 0;
        for ((gpu, kind), totals) in &view.memory {
            if kind.is_host() {
                host += totals.live;
            } else if kind.is_device() && totals.live > 0 {
                *live.entry(place(gpu)).or_insert(0) += totals.live;
            }
        }
        let nvml =
            view.process_bytes.iter().filter_map(|(gpu, bytes)| Some((gpu.as_str().to_owned(), bytes.ok()?)));
        let blocked: u64 = view.waits.values().map(|waits| waits.sum_ns).sum();
        Self {
            name: Name::of(&view.tenant),
            processes: view.processes,
            confidence: view.confidence.as_str().to_owned(),
            live,
            nvml: nvml.collect(),
            host,
            allocated: view.memory.values().map(|totals| totals.allocated).sum(),
            calls: view.operations.values().sum(),
            failures: view.failures.values().sum(),
            blocked_seconds: blocked as f64 / 1e9,
        }
    }
}

fn place(gpu: &GpuRef) -> String {
    match gpu {
        GpuRef::Known(gpu) => GpuId::as_str(gpu).to_owned(),
        GpuRef::Host | GpuRef::Unknown => "unknown".to_owned(),
    }
}

fn blamed(view: &View) -> Vec<Blamed> {
    let edges = view.blame.iter().map(|((victim, culprit, class), share)| Blamed {
        victim: Name::of(victim),
        culprit: match culprit {
            Culprit::Tenant(tenant) => Name::of(tenant),
            other => Name { tenant: other.as_str().to_owned(), container: None },
        },
        relation: culprit.relation(victim).to_owned(),
        wait_class: class.as_str().to_owned(),
        seconds: share.time_ns as f64 / 1e9,
    });
    edges.collect()
}
