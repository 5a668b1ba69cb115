//! Owns the witnesses of kills for memory: what the probe marked, the kernel's log, the cgroups' own counters.
//! Refuses to join them: that is the model's.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex},
};

use cotenant_host::Host;
use cotenant_model::{
    GpuId, ProcessId, Tenant,
    incident::{KillNote, KillScope},
    kill::{CgroupKills, Held, Kill, KillCounters, Kills, Marked, OomIncident, OomLine, Scope, Trigger},
    report::KilledThread,
    sample::{GpuRef, KernelSample},
};

use super::{Clock, Tick};
use crate::{registry::Registry, reports::Reported};

/// What a process held is known this long after its end.
const REMEMBERED_NS: u64 = 60_000_000_000;
const REMEMBERED: usize = 4096;
const NEIGHBOURS: usize = 32;
/// Kills that are kept for `/api/v1/kills`.
const LISTED: usize = 256;
const COUNTERS_EVERY_NS: u64 = 2_000_000_000;

pub(super) struct Witnesses {
    host: Host,
    registry: Arc<Mutex<Registry>>,
    kills: Kills,
    pub(super) counters: KillCounters,
    /// Newest first, with the time of day.
    pub(super) recent: VecDeque<(f64, Kill)>,
    /// What ended processes held.
    held: BTreeMap<ProcessId, (u64, Held)>,
    /// Memory cgroups of processes, and how many kills each cgroup had counted.
    cgroups: BTreeMap<ProcessId, Option<String>>,
    counted: BTreeMap<String, u64>,
    counted_at: u64,
}

impl Witnesses {
    pub(super) fn new(host: Host, registry: Arc<Mutex<Registry>>) -> Self {
        Self {
            host,
            registry,
            kills: Kills::default(),
            counters: KillCounters::default(),
            recent: VecDeque::new(),
            held: BTreeMap::new(),
            cgroups: BTreeMap::new(),
            counted: BTreeMap::new(),
            counted_at: 0,
        }
    }

    pub(super) fn tenant_of_pid(&self, pid: u32) -> Option<Tenant> {
        self.registry.lock().ok()?.look(pid)
    }

    /// Remembers what ended processes held, and reads the counters of the cgroups that tenants are in.
    pub(super) fn follow(
        &mut self,
        kernel: &KernelSample,
        tenants: &BTreeMap<ProcessId, Tenant>,
        clock: Clock,
    ) {
        let now = clock.monotonic_ns;
        for process in kernel.processes.iter().filter(|process| process.ended.is_some()) {
            if self.held.len() < REMEMBERED {
                let held = || {
                    let mut held = Held::of(&process.ledger);
                    held.neighbours = neighbours(kernel, tenants, process.id, &held);
                    (now, held)
                };
                self.held.entry(process.id).or_insert_with(held);
            }
        }
        self.held.retain(|_, (at, _)| now.saturating_sub(*at) <= REMEMBERED_NS);
        for process in kernel.processes.iter().filter(|process| process.ended.is_none()) {
            self.cgroups
                .entry(process.id)
                .or_insert_with(|| self.host.memory_cgroup(process.tgid).ok().flatten());
        }
        if now.saturating_sub(self.counted_at) < COUNTERS_EVERY_NS {
            return;
        }
        self.counted_at = now;
        let held = &self.held;
        let there = |id: &ProcessId| {
            held.contains_key(id) || kernel.processes.iter().any(|process| process.id == *id)
        };
        self.cgroups.retain(|id, _| there(id));
        let mut counted = BTreeMap::new();
        let mut paths: Vec<&String> = self.cgroups.values().flatten().collect();
        paths.sort();
        paths.dedup();
        for path in paths {
            let Ok(Some(events)) = self.host.memory_events(path) else { continue };
            let Some(kills) = events.oom_kill else { continue };
            if let Some(before) = self.counted.get(path) {
                let fresh = kills.saturating_sub(*before);
                self.kills.count(CgroupKills { time_ns: now, cgroup: path.clone(), kills: fresh });
            }
            counted.insert(path.clone(), kills);
        }
        self.counted = counted;
    }

    pub(super) fn mark(&mut self, thread: &KilledThread, reported: &Reported, tick: &Tick<'_>) {
        let known = thread.process.and_then(|id| tick.tenants.get(&id).cloned());
        let cgroup = thread.process.and_then(|id| self.cgroups.get(&id).cloned().flatten());
        self.kills.mark(Marked {
            time_ns: thread.marked_at,
            tid: thread.tid,
            tgid: thread.tgid,
            process: thread.process,
            comm: thread.comm.clone(),
            cgroup_id: thread.cgroup_id,
            cgroup,
            tenant: known.or_else(|| reported.victim.clone()),
            trigger: Trigger { tgid: thread.trigger, tenant: reported.trigger.clone() },
        });
    }

    pub(super) fn log(&mut self, clock: Clock, sequence: u64, line: OomLine) {
        self.kills.log(clock.monotonic_ns, sequence, line);
    }

    /// Counts the kills that are known for good, and gives one note a victim and shortage.
    pub(super) fn settle(&mut self, tenants: &BTreeMap<ProcessId, Tenant>, clock: Clock) -> Vec<KillNote> {
        let registry = &self.registry;
        let settled = self.kills.settle(clock.monotonic_ns, |pid, cgroup| {
            let registry = registry.lock().ok()?;
            registry.known(pid).or_else(|| cgroup.map(|path| registry.of_cgroup(path)))
        });
        let mut notes = Vec::new();
        for incident in settled.incidents {
            for mut kill in incident.kills.clone() {
                kill.held = kill.process.and_then(|id| self.held.get(&id)).map(|(_, held)| held.clone());
                self.counters.add(&kill);
                self.recent.push_front((clock.unix_of(kill.time_ns), kill.clone()));
                self.recent.truncate(LISTED);
                notes.extend(note(&kill, &incident, clock));
            }
        }
        let present = |tenant: &Tenant| tenants.values().any(|known| known == tenant);
        self.counters.forget(clock.monotonic_ns.saturating_sub(3_600_000_000_000), present);
        notes
    }
}

fn note(kill: &Kill, incident: &OomIncident, clock: Clock) -> Option<KillNote> {
    let mut gpu_live: BTreeMap<GpuId, u64> = BTreeMap::new();
    for ((gpu, kind), bytes) in kill.held.iter().flat_map(|held| &held.live) {
        if kind.is_device() {
            *gpu_live.entry(gpu.clone()).or_default() += bytes;
        }
    }
    Some(KillNote {
        at_unix: clock.unix_of(kill.time_ns),
        victim: kill.tenant.clone()?,
        scope: match kill.scope {
            Some(Scope::Memcg) => KillScope::Cgroup,
            Some(Scope::Global) => KillScope::Node,
            Some(Scope::Cpuset) => KillScope::Numa,
            None => KillScope::Unknown,
        },
        limit_owner: incident.limit_owner.clone(),
        trigger: kill.trigger.as_ref().and_then(|trigger| trigger.tenant.clone()),
        processes: 1,
        gpu_live: gpu_live.into_iter().collect(),
        host_pinned: kill.held.as_ref().map(|held| held.pinned),
    })
}

/// Who else holds memory on the GPUs of one that ended.
fn neighbours(
    kernel: &KernelSample,
    tenants: &BTreeMap<ProcessId, Tenant>,
    own: ProcessId,
    held: &Held,
) -> Vec<(GpuId, Tenant)> {
    let own_tenant = tenants.get(&own);
    let mut neighbours = BTreeSet::new();
    for process in kernel.processes.iter().filter(|process| process.ended.is_none()) {
        let Some(tenant) = tenants.get(&process.id).filter(|tenant| Some(*tenant) != own_tenant) else {
            continue;
        };
        for row in process.ledger.iter().filter(|row| row.live > 0) {
            if let GpuRef::Known(gpu) = &row.gpu
                && held.live.keys().any(|(of, _)| of == gpu)
            {
                neighbours.insert((gpu.clone(), tenant.clone()));
            }
        }
    }
    neighbours.into_iter().take(NEIGHBOURS).collect()
}
