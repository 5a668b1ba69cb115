//! Owns the bound on tenants: who has series of its own, who is part of `other`, and the counters of `other`.
//! Refuses to change its mind: a tenant that is folded stays folded, one that has its own series keeps them.
//!
//! Both for as long as the tenant is in the view, because moving a tenant would make a counter fall. For the same
//! reason the counters of `other` are not the sum over who is in it now: they grow by what each member's counters
//! grew since the last tick, so a member that leaves takes nothing away. A member whose counters fall has started
//! again, and counts from zero. A tenant that left and comes back is a new one: it may then get its own series.

mod grants;

use std::collections::{BTreeMap, BTreeSet};

use cotenant_model::blame::{Edge, Share};
use cotenant_model::excess::Excess;
use cotenant_model::sample::{Confidence, Histogram};
use cotenant_model::view::{MemoryTotals, TenantView, View};
use cotenant_model::{CudaError, Culprit, Tenant, TenantKind};

use crate::label::clean_tenant;

/// How many series there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tenants with series of their own; `other` comes on top.
    pub max_tenants: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_tenants: 512 }
    }
}

/// Membership and memory of `other`. One per agent, for its whole life.
#[derive(Debug)]
pub struct Guard {
    limits: Limits,
    own: BTreeSet<Tenant>,
    /// Who is in `other`, with what it had counted at the last tick.
    folded: BTreeMap<Tenant, TenantView>,
    /// The counters of `other` so far, once somebody was folded. Its levels are made anew each tick.
    other: Option<TenantView>,
    /// Blame with a folded tenant at either end, as it was at the last tick.
    folded_blame: BTreeMap<Edge, Share>,
    /// Blame of and on `other` so far.
    other_blame: BTreeMap<Edge, Share>,
    folded_total: u64,
    /// Names of tenants that have grants and no process, with series of their own.
    granted: BTreeSet<String>,
}

impl Guard {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            own: BTreeSet::new(),
            folded: BTreeMap::new(),
            other: None,
            folded_blame: BTreeMap::new(),
            other_blame: BTreeMap::new(),
            folded_total: 0,
            granted: BTreeSet::new(),
        }
    }

    /// Bounds the view's tenants. Call once per tick, before [`crate::rows()`], with every view.
    pub fn fold(&mut self, view: &mut View) {
        let tenants = distinct(std::mem::take(&mut view.tenants));
        self.own.retain(|tenant| tenants.contains_key(tenant));
        self.folded.retain(|tenant, _| tenants.contains_key(tenant));
        self.admit(&tenants);

        let mut members = Vec::new();
        for (tenant, tenant_view) in tenants {
            if self.own.contains(&tenant) {
                view.tenants.push(tenant_view);
            } else {
                let grown = growth(&tenant_view, self.folded.get(&tenant));
                add_counters(self.other.get_or_insert_with(|| empty(Tenant::other())), &grown);
                members.push(tenant_view);
            }
        }
        if let Some(counters) = &self.other {
            let mut other = counters.clone();
            for member in &members {
                add_levels(&mut other, member);
            }
            view.tenants.push(other);
        }
        self.folded = members.into_iter().map(|member| (member.tenant.clone(), member)).collect();
        view.agent.tenants_folded += self.folded_total;
        self.fold_blame(view);
        self.fold_risk(view);
        self.fold_grants(view);
    }

    /// Forecasts of folded tenants are `other`'s.
    fn fold_risk(&self, view: &mut View) {
        let folded = |tenant: &Tenant| {
            let clean = clean_tenant(tenant);
            self.folded.contains_key(clean.as_ref().unwrap_or(tenant))
        };
        for gpu in &mut view.risk.gpus {
            let shares = gpu.tenants.iter_mut().map(|of| &mut of.tenant);
            for tenant in shares.chain(&mut gpu.victims).filter(|tenant| folded(tenant)) {
                *tenant = Tenant::other();
            }
        }
        let memory = view.risk.host.iter_mut().flat_map(|host| &mut host.tenants);
        for tenant in memory.map(|of| &mut of.tenant).filter(|tenant| folded(tenant)) {
            *tenant = Tenant::other();
        }
    }

    /// Edges of folded tenants become edges of `other`, which for the same reason as its counters only grow.
    fn fold_blame(&mut self, view: &mut View) {
        let mut edges: BTreeMap<Edge, Share> = BTreeMap::new();
        let mut folded: BTreeMap<Edge, Share> = BTreeMap::new();
        for (edge, share) in std::mem::take(&mut view.blame) {
            let edge = distinct_edge(edge);
            let ends = self.published(&edge);
            if ends == edge {
                edges.entry(edge).or_default().add(share);
            } else {
                folded.entry(edge).or_default().add(share);
            }
        }
        for (edge, share) in &folded {
            let past = self.folded_blame.get(edge).copied().unwrap_or_default();
            let grown =
                Share { waits: since(share.waits, past.waits), time_ns: since(share.time_ns, past.time_ns) };
            self.other_blame.entry(self.published(edge)).or_default().add(grown);
        }
        self.folded_blame = folded;
        let (own, other) = (&self.own, Tenant::other());
        self.other_blame.retain(|(victim, ..), _| *victim == other || own.contains(victim));
        for (edge, share) in &self.other_blame {
            edges.entry(edge.clone()).or_default().add(*share);
        }
        view.blame = edges;
    }

    /// An edge with `other` in place of folded tenants.
    fn published(&self, (victim, culprit, class): &Edge) -> Edge {
        let bounded = |tenant: &Tenant| {
            if self.folded.contains_key(tenant) { Tenant::other() } else { tenant.clone() }
        };
        let culprit = match culprit {
            Culprit::Tenant(tenant) => Culprit::Tenant(bounded(tenant)),
            other => other.clone(),
        };
        (bounded(victim), culprit, *class)
    }

    /// Gives newcomers the free places, the biggest first; the rest will be folded.
    fn admit(&mut self, tenants: &BTreeMap<Tenant, TenantView>) {
        let mut newcomers: Vec<_> = tenants
            .iter()
            .filter(|(tenant, _)| !self.own.contains(tenant) && !self.folded.contains_key(tenant))
            .filter(|(tenant, _)| tenant.kind != TenantKind::Other)
            .collect();
        newcomers.sort_by_cached_key(|(tenant, view)| (std::cmp::Reverse(weight(view)), (*tenant).clone()));
        let free = self.limits.max_tenants.saturating_sub(self.own.len()).min(newcomers.len());
        self.own.extend(newcomers[..free].iter().map(|(tenant, _)| (*tenant).clone()));
        self.folded_total += (newcomers.len() - free) as u64;
    }
}

/// An edge with its tenants' names as published.
fn distinct_edge((victim, culprit, class): Edge) -> Edge {
    let clean = |tenant: Tenant| clean_tenant(&tenant).unwrap_or(tenant);
    let culprit = match culprit {
        Culprit::Tenant(tenant) => Culprit::Tenant(clean(tenant)),
        other => other,
    };
    (clean(victim), culprit, class)
}

/// What makes a tenant worth its own series.
fn weight(view: &TenantView) -> u128 {
    view.memory.values().map(|totals| u128::from(totals.live) + u128::from(totals.allocated)).sum()
}

/// One view per tenant as published, so that no two views write the same series.
pub(crate) fn distinct(views: Vec<TenantView>) -> BTreeMap<Tenant, TenantView> {
    let mut tenants: BTreeMap<Tenant, TenantView> = BTreeMap::new();
    for mut view in views {
        if let Some(tenant) = clean_tenant(&view.tenant) {
            view.tenant = tenant;
        }
        if let Some(twin) = tenants.get_mut(&view.tenant) {
            add_counters(twin, &view);
            add_levels(twin, &view);
        } else {
            tenants.insert(view.tenant.clone(), view);
        }
    }
    tenants
}

fn empty(tenant: Tenant) -> TenantView {
    TenantView {
        tenant,
        processes: 0,
        confidence: Confidence::Complete,
        memory: BTreeMap::new(),
        process_bytes: BTreeMap::new(),
        pool_reserved: BTreeMap::new(),
        residual: BTreeMap::new(),
        utilization: BTreeMap::new(),
        operations: BTreeMap::new(),
        failures: BTreeMap::new(),
        latency: BTreeMap::new(),
        waits: BTreeMap::new(),
        excess: Excess::default(),
        limits: Vec::new(),
        device_cgroup_bytes: BTreeMap::new(),
        notes: Vec::new(),
    }
}

/// Adds what only grows.
fn add_counters(sum: &mut TenantView, view: &TenantView) {
    for (key, totals) in &view.memory {
        let mine = sum.memory.entry(key.clone()).or_default();
        mine.allocated += totals.allocated;
        mine.freed += totals.freed;
        mine.allocations += totals.allocations;
        mine.frees += totals.frees;
    }
    for (key, calls) in &view.operations {
        *sum.operations.entry(key.clone()).or_default() += calls;
    }
    for (key, count) in &view.failures {
        *sum.failures.entry(key.clone()).or_default() += count;
    }
    for (operation, histogram) in &view.latency {
        sum.latency.entry(*operation).or_default().add(histogram);
    }
    for (class, histogram) in &view.waits {
        sum.waits.entry(*class).or_default().add(histogram);
    }
    sum.excess.time_ns += view.excess.time_ns;
    sum.excess.calls += view.excess.calls;
}

/// Adds what is true now. The sum with an unknown part is unknown; confidence is the worst one.
fn add_levels(sum: &mut TenantView, view: &TenantView) {
    sum.processes += view.processes;
    sum.excess.unjudged += view.excess.unjudged;
    sum.confidence = sum.confidence.max(view.confidence);
    for (key, totals) in &view.memory {
        let mine = sum.memory.entry(key.clone()).or_default();
        mine.live += totals.live;
        mine.peak += totals.peak;
    }
    for (gpu, bytes) in &view.process_bytes {
        let mine = sum.process_bytes.entry(gpu.clone()).or_insert(Ok(0));
        *mine = mine.and_then(|mine| bytes.map(|bytes| mine + bytes));
    }
    for (gpu, bytes) in &view.pool_reserved {
        let mine = sum.pool_reserved.entry(gpu.clone()).or_insert(Some(0));
        *mine = mine.zip(*bytes).map(|(mine, bytes)| mine + bytes);
    }
    for (gpu, residual) in &view.residual {
        let mine = sum.residual.entry(gpu.clone()).or_default();
        mine.context += residual.context;
        mine.baseline += residual.baseline;
        mine.drift += residual.drift;
    }
    for (gpu, bytes) in &view.device_cgroup_bytes {
        *sum.device_cgroup_bytes.entry(gpu.clone()).or_default() += bytes;
    }
    // Each of several tenants has limits of its own: together they have none.
    if sum.tenant == view.tenant {
        sum.limits.extend(view.limits.iter().cloned());
        sum.notes
            .extend(view.notes.iter().filter(|note| !sum.notes.contains(note)).cloned().collect::<Vec<_>>());
    }
    for (gpu, share) in &view.utilization {
        *sum.utilization.entry(gpu.clone()).or_default() += share;
    }
}

/// What a member's counters grew by since the last tick; all of them for one that has just come.
fn growth(now: &TenantView, before: Option<&TenantView>) -> TenantView {
    let mut grown = empty(now.tenant.clone());
    for (key, totals) in &now.memory {
        let past = before.and_then(|view| view.memory.get(key)).copied().unwrap_or_default();
        let totals = MemoryTotals {
            allocated: since(totals.allocated, past.allocated),
            freed: since(totals.freed, past.freed),
            allocations: since(totals.allocations, past.allocations),
            frees: since(totals.frees, past.frees),
            ..MemoryTotals::default()
        };
        grown.memory.insert(key.clone(), totals);
    }
    for (key, calls) in &now.operations {
        let past = before.and_then(|view| view.operations.get(key)).copied().unwrap_or(0);
        grown.operations.insert(key.clone(), since(*calls, past));
    }
    for (key, count) in &now.failures {
        let past = before.and_then(|view| view.failures.get(key)).copied().unwrap_or(0);
        let (gpu, operation, error) = key.clone();
        *grown.failures.entry((gpu, operation, bounded(error))).or_default() += since(*count, past);
    }
    for (operation, histogram) in &now.latency {
        let past = before.and_then(|view| view.latency.get(operation));
        grown
            .latency
            .insert(*operation, past.map_or_else(|| histogram.clone(), |past| later(histogram, past)));
    }
    for (class, histogram) in &now.waits {
        let past = before.and_then(|view| view.waits.get(class));
        grown.waits.insert(*class, past.map_or_else(|| histogram.clone(), |past| later(histogram, past)));
    }
    let past = before.map(|view| view.excess).unwrap_or_default();
    grown.excess = Excess {
        time_ns: since(now.excess.time_ns, past.time_ns),
        calls: since(now.excess.calls, past.calls),
        unjudged: 0,
    };
    grown
}

fn since(now: u64, before: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

/// A histogram starts again as a whole: half of an old one and half of a new one is no distribution.
fn later(now: &Histogram, before: &Histogram) -> Histogram {
    let restarted = now.sum_ns < before.sum_ns
        || now.count < before.count
        || now.buckets.iter().zip(before.buckets).any(|(now, before)| *now < before);
    if restarted {
        return now.clone();
    }
    let mut grown =
        Histogram { count: now.count - before.count, sum_ns: now.sum_ns - before.sum_ns, ..now.clone() };
    grown.buckets.iter_mut().zip(before.buckets).for_each(|(now, before)| *now -= before);
    grown
}

/// Codes without a name share one, so that a driver that answers nonsense does not grow `other`'s memory.
fn bounded(error: CudaError) -> CudaError {
    if error.name() == CudaError(u32::MAX).name() { CudaError(u32::MAX) } else { error }
}
