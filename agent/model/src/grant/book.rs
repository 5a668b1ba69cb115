//! Owns grant beside use, by tenant and GPU: what is held, whether it is used, what was asked for, how long it lay idle.
//! Refuses to take a grant for use, and to call idle what could not be read.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    Declared, Facts, GrantState, RequestSource, Standing,
    holding::{Holder, Holding, holdings, is_reserved},
};
use crate::{
    Absence, GpuId, Reading, Tenant, TenantKind,
    sample::GpuRef,
    view::{GpuView, TenantView},
};

/// Whoever holds GPUs for others is the system, whatever its pods are called.
const RESERVATION: &str = "gpu-reservation";

/// Grants, ready to be published.
#[derive(Clone, Debug, Default)]
pub struct GrantsView {
    pub shares: Vec<ShareRow>,
    pub standings: Vec<StandingRow>,
    pub requests: Vec<RequestRow>,
    /// Grants of pods that are gone; `None` where nobody could say.
    pub stale: Option<u64>,
    /// Device ids that no plugin's grammar reads.
    pub unread_ids: u64,
    /// How asking goes, by source. Empty where nobody is asked.
    pub sources: Vec<SourceView>,
}

/// One of the sockets that are asked.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceView {
    pub name: &'static str,
    pub errors: u64,
    /// Of what is known from it; `None` if it never answered.
    pub age_seconds: Option<f64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ShareRow {
    pub tenant: Tenant,
    /// `None`: a claim that names no GPU by UUID.
    pub gpu: Option<GpuId>,
    pub resource: String,
    pub shares: u64,
}

/// A tenant on a GPU that it was granted, or that it uses.
#[derive(Clone, Debug, PartialEq)]
pub struct StandingRow {
    pub tenant: Tenant,
    pub gpu: GpuId,
    pub standing: Reading<Standing>,
    /// Bytes of a tenant that NVML lists nowhere, so that nothing else says them.
    pub bytes: Option<Reading<u64>>,
    /// How long the grant lay idle since the agent came; `None` where nothing is granted.
    pub idle_seconds: Option<f64>,
}

/// What a pod asked for on a GPU. Of the pod: a request is not a container's.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRow {
    pub tenant: Tenant,
    pub gpu: GpuId,
    pub source: RequestSource,
    pub bytes: u64,
    /// Bytes in use beyond it; `None` if the use is not known.
    pub over: Option<u64>,
}

/// What has to be remembered from tick to tick.
#[derive(Debug, Default)]
pub struct Book {
    idle: BTreeMap<(Tenant, GpuId), Duration>,
}

/// What one container, or pod, has on one GPU.
#[derive(Clone, Copy)]
struct Use {
    listed: Reading<u64>,
    /// By the probes; they see a GPU that NVML cannot read.
    booked: u64,
}

impl Use {
    /// As far as idle and used are concerned.
    fn known(self) -> Reading<u64> {
        match self.listed {
            Ok(bytes) => Ok(bytes.max(self.booked)),
            Err(_) if self.booked > 0 => Ok(self.booked),
            Err(reason) => Err(reason),
        }
    }
}

/// Who uses what, and which GPUs could be read.
struct Usage<'a> {
    by_holder: BTreeMap<Holder, BTreeMap<GpuId, Use>>,
    gpus: BTreeMap<&'a GpuId, &'a GpuView>,
    library: Reading<()>,
}

impl<'a> Usage<'a> {
    fn of(tenants: &[TenantView], gpus: &'a [GpuView], library: Reading<()>) -> Self {
        let mut by_holder: BTreeMap<Holder, BTreeMap<GpuId, Use>> = BTreeMap::new();
        for view in tenants {
            let Some(holder) = Holder::of(&view.tenant) else { continue };
            let on = by_holder.entry(holder).or_default();
            for (gpu, bytes) in &view.process_bytes {
                on.insert(gpu.clone(), Use { listed: *bytes, booked: 0 });
            }
            for ((gpu, kind), memory) in &view.memory {
                let GpuRef::Known(gpu) = gpu else { continue };
                if kind.is_device() && memory.live > 0 && view.processes > 0 {
                    let listed = Self::empty(gpus.iter().find(|view| view.sample.id == *gpu), library);
                    on.entry(gpu.clone()).or_insert(Use { listed, booked: 0 }).booked += memory.live;
                }
            }
        }
        let gpus = gpus.iter().map(|view| (&view.sample.id, view)).collect();
        Self { by_holder, gpus, library }
    }

    /// What the lists say of somebody whom they do not hold.
    fn empty(gpu: Option<&GpuView>, library: Reading<()>) -> Reading<u64> {
        library?;
        match gpu {
            Some(view) => view.sample.processes.as_ref().map(|_| 0).map_err(|reason| *reason),
            None => Err(Absence::NotAvailable),
        }
    }

    fn total(&self, gpu: &GpuId) -> Option<u64> {
        Some(self.gpus.get(gpu)?.sample.memory.ok()?.total)
    }

    /// The GPU, and where only a part of it was granted, the parts that it has.
    fn places<'b>(&'b self, gpu: &'b GpuId, parts: bool) -> impl Iterator<Item = &'b GpuId> {
        let below = self.gpus.values().filter(move |view| parts && view.sample.parent.as_ref() == Some(gpu));
        std::iter::once(gpu).chain(below.map(|view| &view.sample.id))
    }

    /// Of everybody who may be this holder.
    fn on(&self, holder: &Holder, gpu: &GpuId, parts: bool) -> Use {
        let mut sum = Use { listed: Self::empty(self.gpus.get(gpu).copied(), self.library), booked: 0 };
        for place in self.places(gpu, parts) {
            let usage = self.by_holder.iter().filter(|(other, _)| other.meets(holder));
            for used in usage.filter_map(|(_, on)| on.get(place)) {
                sum.listed = sum.listed.and_then(|sum| used.listed.map(|bytes| sum + bytes));
                sum.booked += used.booked;
            }
        }
        sum
    }

    /// Whether anybody who may be this holder is listed or booked anywhere.
    fn anywhere(&self, holder: &Holder) -> bool {
        self.by_holder.iter().any(|(other, on)| other.meets(holder) && !on.is_empty())
    }
}

impl Book {
    /// One tick. `library`: whether NVML as a whole answers. `elapsed`: since the last tick.
    pub fn advance(
        &mut self,
        facts: Facts<'_>,
        tenants: &[TenantView],
        gpus: &[GpuView],
        library: Reading<()>,
        elapsed: Duration,
    ) -> GrantsView {
        let jobs = facts.jobs.answered || !facts.jobs.grants.is_empty();
        if !facts.answered && facts.declared.is_empty() && !jobs {
            self.idle.clear();
            return GrantsView::default();
        }
        let whole = gpus.iter().filter(|view| view.sample.parent.is_none());
        let indexes = whole.map(|view| (view.sample.index, view.sample.id.clone())).collect();
        let held = holdings(facts, &indexes);
        let usage = Usage::of(tenants, gpus, library);
        let mut standings = self.granted(&held, &usage, elapsed);
        standings.extend(ungranted(&held, facts, &usage));
        GrantsView {
            shares: shares(&held),
            standings,
            requests: requests(&held, facts.declared, &usage),
            stale: stale(facts),
            ..GrantsView::default()
        }
    }

    /// Every tenant on every GPU that it was granted.
    fn granted(&mut self, held: &[Holding], usage: &Usage<'_>, elapsed: Duration) -> Vec<StandingRow> {
        let mut past = std::mem::take(&mut self.idle);
        let mut rows = Vec::new();
        let mut done = BTreeSet::new();
        for holding in held {
            let Some(gpu) = &holding.gpu else { continue };
            let tenant = tenant_of(holding);
            if !done.insert((tenant.clone(), gpu.clone())) {
                continue;
            }
            let used = usage.on(&holding.holder, gpu, holding.instance);
            let (standing, bytes) = match holding.state {
                GrantState::Reservation => (Ok(Standing::Reservation), None),
                GrantState::Stale => (Ok(Standing::Stale), None),
                GrantState::Held | GrantState::Unknown => {
                    let standing = Standing::of(true, used.known(), false);
                    let silent = !usage.anywhere(&holding.holder);
                    (
                        standing.map(|standing| standing.unwrap_or(Standing::GrantedIdle)),
                        silent.then_some(used.listed),
                    )
                }
            };
            let key = (tenant.clone(), gpu.clone());
            let mut idle = past.remove(&key).unwrap_or_default();
            if standing == Ok(Standing::GrantedIdle) {
                idle += elapsed;
            }
            let counts = !matches!(standing, Ok(Standing::Reservation | Standing::Stale));
            if counts {
                self.idle.insert(key, idle);
            }
            let idle_seconds = counts.then_some(idle.as_secs_f64());
            rows.push(StandingRow { tenant, gpu: gpu.clone(), standing, bytes, idle_seconds });
        }
        rows
    }
}

/// `None` where nobody could say of any grant.
fn stale(facts: Facts<'_>) -> Option<u64> {
    let of_pods = facts.grants.iter().map(|grant| grant.state(facts.live, facts.all_named));
    let of_jobs = facts.jobs.grants.iter().map(|grant| grant.state(facts.jobs.live));
    let judged = (facts.answered && facts.live.is_some())
        || (facts.jobs.live.is_some() && (facts.jobs.answered || !facts.jobs.grants.is_empty()));
    judged.then(|| of_pods.chain(of_jobs).filter(|state| *state == GrantState::Stale).count() as u64)
}

fn tenant_of(holding: &Holding) -> Tenant {
    match holding.state {
        GrantState::Reservation => Tenant::plain(TenantKind::System, RESERVATION),
        _ => holding.holder.tenant(),
    }
}

fn shares(held: &[Holding]) -> Vec<ShareRow> {
    let mut sums: BTreeMap<(Tenant, Option<GpuId>, String), u64> = BTreeMap::new();
    for holding in held {
        let key = (tenant_of(holding), holding.gpu.clone(), holding.resource.clone());
        *sums.entry(key).or_default() += holding.shares;
    }
    let row = |((tenant, gpu, resource), shares)| ShareRow { tenant, gpu, resource, shares };
    sums.into_iter().map(row).collect()
}

/// Every pod and job on every GPU that it uses and was not granted, where somebody says what was.
fn ungranted(held: &[Holding], facts: Facts<'_>, usage: &Usage<'_>) -> Vec<StandingRow> {
    let mut rows = Vec::new();
    for (holder, on) in &usage.by_holder {
        let told = match holder {
            Holder::Pod { .. } => facts.answered && !holder.is_reserved(),
            Holder::Job(job) => facts.jobs.tells_of(job),
        };
        if !told {
            continue;
        }
        let own: Vec<&Holding> = held.iter().filter(|holding| holding.holder.meets(holder)).collect();
        let unnamed = own.iter().any(|holding| holding.gpu.is_none());
        for (gpu, used) in on.iter().filter(|(_, used)| used.known().is_ok_and(|bytes| bytes > 0)) {
            let granted = own.iter().any(|holding| {
                let granted = holding.gpu.as_ref();
                granted
                    .is_some_and(|granted| usage.places(granted, holding.instance).any(|place| place == gpu))
            });
            if granted {
                continue;
            }
            // A claim names no UUID, and a reservation without a group does not say for whom it is.
            let covered = unnamed || shares_a_reservation(holder, gpu, held, facts.declared);
            let elsewhere = own.iter().any(|holding| holding.gpu.is_some());
            let standing = match Standing::of(covered, used.known(), elsewhere) {
                Ok(None) => continue,
                Ok(Some(standing)) => Ok(standing),
                Err(reason) => Err(reason),
            };
            rows.push(StandingRow {
                tenant: holder.tenant(),
                gpu: gpu.clone(),
                standing,
                bytes: None,
                idle_seconds: None,
            });
        }
    }
    rows
}

fn shares_a_reservation(holder: &Holder, gpu: &GpuId, held: &[Holding], declared: &[Declared]) -> bool {
    let asks = |declared: &&Declared| {
        Holder::pod(&declared.namespace, &declared.pod) == holder.whole()
            && declared.requests.iter().any(|request| {
                matches!(request.source, RequestSource::KaiMemory | RequestSource::KaiFraction)
            })
    };
    declared.iter().any(|one| asks(&one))
        && held
            .iter()
            .any(|holding| holding.state == GrantState::Reservation && holding.gpu.as_ref() == Some(gpu))
}

/// What each pod asked for, on the GPUs that it was granted or uses.
fn requests(held: &[Holding], declared: &[Declared], usage: &Usage<'_>) -> Vec<RequestRow> {
    let mut asked: BTreeMap<(Holder, GpuId), (RequestSource, u64)> = BTreeMap::new();
    for declared in declared.iter().filter(|declared| !is_reserved(&declared.namespace)) {
        let pod = Holder::pod(&declared.namespace, &declared.pod);
        let granted = held.iter().filter(|holding| holding.holder.meets(&pod));
        let used = usage.by_holder.iter().filter(|(holder, _)| holder.meets(&pod));
        let gpus: BTreeSet<&GpuId> =
            granted.filter_map(|of| of.gpu.as_ref()).chain(used.flat_map(|(_, on)| on.keys())).collect();
        for request in &declared.requests {
            let on = |gpu: &&&GpuId| request.gpu.as_ref().is_none_or(|asked| asked == **gpu);
            for gpu in gpus.iter().filter(on) {
                let Some(bytes) = usage.total(gpu).and_then(|total| request.amount.bytes(total)) else {
                    continue;
                };
                asked.insert((pod.clone(), (*gpu).clone()), (request.source, bytes));
            }
        }
    }
    for holding in
        held.iter().filter(|of| of.whole && matches!(of.state, GrantState::Held | GrantState::Unknown))
    {
        if let Some(gpu) = &holding.gpu
            && let Some(total) = usage.total(gpu)
        {
            let place = (holding.holder.whole(), gpu.clone());
            asked.entry(place).or_insert((RequestSource::Device, total));
        }
    }
    asked
        .into_iter()
        .map(|((holder, gpu), (source, bytes))| {
            let used = usage.on(&holder, &gpu, false).listed.ok();
            let over = used.map(|used| used.saturating_sub(bytes));
            RequestRow { tenant: holder.tenant(), gpu, source, bytes, over }
        })
        .collect()
}

#[cfg(test)]
mod tests;
