//! Owns the watch over host memory: what the host has left, and what the memory cgroups of GPU tenants hold under their limits.
//! Refuses to keep the tick waiting: it reads in a thread of its own, and the less often the more a round costs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use cotenant_host::Host;
use cotenant_model::{
    Tenant,
    risk::{HostMemory, HostMoment, Kills, PLACES, Place, TenantMemory},
};

const INTERVAL: Duration = Duration::from_secs(1);
/// A round takes one part in so many of the time until the next: one per cent of a core.
const SPARING: u32 = 100;
/// A process may be moved to another cgroup, and a PID may come to be another's.
const AGAIN: Duration = Duration::from_secs(10);

/// What changes by less says nothing of the next minutes, and would fill recordings with noise.
const STEP: u64 = 1 << 20;

/// A process that has used a GPU, and whose it is.
type Watched = (u32, Tenant);

#[derive(Debug, Default)]
pub(crate) struct Pressure {
    wanted: Mutex<BTreeSet<Watched>>,
    latest: ArcSwapOption<HostMoment>,
}

impl Pressure {
    /// From now on these processes are watched, and no others.
    pub(crate) fn watch(&self, wanted: BTreeSet<Watched>) {
        if let Ok(mut watched) = self.wanted.lock() {
            *watched = wanted;
        }
    }

    /// What was read last. `None` before the first round.
    pub(crate) fn latest(&self) -> Option<HostMoment> {
        self.latest.load().as_deref().cloned()
    }

    /// Reads until it is told to stop.
    pub(crate) fn run(&self, host: &Host, started: Instant, stop: &AtomicBool) {
        let mut places = Places::default();
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let wanted = self.wanted.lock().map(|wanted| wanted.clone()).unwrap_or_default();
            let moment = places.read(host, &wanted, started.elapsed());
            self.latest.store(Some(moment.into()));
            std::thread::park_timeout(INTERVAL.max(begun.elapsed() * SPARING));
        }
    }
}

/// The memory cgroups of the watched processes, as of the last look.
#[derive(Debug, Default)]
struct Places {
    known: BTreeMap<Watched, Option<String>>,
    looked: Option<Duration>,
}

impl Places {
    fn read(&mut self, host: &Host, wanted: &BTreeSet<Watched>, now: Duration) -> HostMoment {
        if self.looked.is_none_or(|looked| now.saturating_sub(looked) >= AGAIN) {
            (self.looked, self.known) = (Some(now), BTreeMap::new());
        }
        self.known.retain(|watched, _| wanted.contains(watched));
        let mut cgroups: BTreeMap<&Tenant, BTreeSet<&str>> = BTreeMap::new();
        for watched in wanted {
            if !self.known.contains_key(watched) {
                self.known.insert(watched.clone(), host.memory_cgroup(watched.0).ok().flatten());
            }
        }
        for ((_, tenant), cgroup) in &self.known {
            let cgroups = cgroups.entry(tenant).or_default();
            cgroups.extend(cgroup.as_deref().filter(|_| cgroups.len() < PLACES));
        }
        let tenants = cgroups.into_iter().map(|(tenant, cgroups)| {
            // Containers of one pod may be bounded by the pod: that is one place.
            let places: BTreeMap<String, Place> = cgroups
                .into_iter()
                .filter_map(|cgroup| host.memory_place(cgroup))
                .map(|of| (of.path.clone(), Place { path: of.path, limit: of.limit, held: stepped(of.held) }))
                .collect();
            TenantMemory { tenant: tenant.clone(), pinned: 0, places: places.into_values().collect() }
        });
        let tenants = tenants.collect();
        let memory =
            host.memory().ok().map(|of| HostMemory { total: of.total, available: stepped(of.available) });
        HostMoment { taken: now, memory, tenants, kills: Kills::default() }
    }
}

const fn stepped(bytes: u64) -> u64 {
    bytes / STEP * STEP
}
