//! Owns the witnesses of kills for memory: what the probe marked, the kernel's log, the cgroups' own counters.
//! Refuses to join them: that is the model's.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex},
};

use cotenant_host::{CgroupView, Host, HostNames, identify};
use cotenant_model::{
    GpuId, ProcessId, Tenant, TenantKind,
    incident::{CallNote, KillNote, KillScope},
    kill::{CgroupKills, Held, Kill, KillCounters, Kills, Marked, OomIncident, OomLine, Scope, Trigger},
    report::{KilledThread, LastCall},
    sample::{GpuRef, KernelSample, ProcessSample},
};
use tracing::warn;

use super::{Clock, Tick, roll::Roll};
use crate::{registry::Registry, reports::Reported};

/// What is known of an ended process is kept this long.
const REMEMBERED_NS: u64 = 60_000_000_000;
const REMEMBERED: usize = 4096;
const NEIGHBOURS: usize = 32;
/// Kills that are kept for `/api/v1/kills`.
const LISTED: usize = 256;
const COUNTERS_EVERY_NS: u64 = 2_000_000_000;

/// What can tell whose a victim was, by its PID. It stands in the log under the same one.
struct Dying {
    at: u64,
    uid: u32,
    process: Option<ProcessId>,
    /// In the unified hierarchy.
    cgroup: Option<String>,
}

pub(super) struct Witnesses {
    host: Host,
    names: HostNames,
    registry: Arc<Mutex<Registry>>,
    kills: Kills,
    pub(super) counters: KillCounters,
    /// Kills that only a cgroup's own counter tells of.
    unseen: u64,
    /// Newest first, with the time of day.
    pub(super) recent: VecDeque<(f64, Kill)>,
    /// What ended processes held.
    held: BTreeMap<ProcessId, (u64, Held)>,
    dying: BTreeMap<u32, Dying>,
    /// Memory cgroups of processes, and how many kills each cgroup had counted.
    cgroups: BTreeMap<ProcessId, Option<String>>,
    counted: BTreeMap<String, u64>,
    counted_at: u64,
}

impl Witnesses {
    pub(super) fn new(host: Host, registry: Arc<Mutex<Registry>>) -> Self {
        Self {
            // As everybody else is named, without holding the registry while files are read.
            names: registry
                .lock()
                .map_or_else(|_| HostNames::new(host.clone()), |registry| registry.eyes().names),
            host,
            registry,
            kills: Kills::default(),
            counters: KillCounters::default(),
            unseen: 0,
            recent: VecDeque::new(),
            held: BTreeMap::new(),
            dying: BTreeMap::new(),
            cgroups: BTreeMap::new(),
            counted: BTreeMap::new(),
            counted_at: 0,
        }
    }

    /// Witnesses that found no room, and kills that had none.
    pub(super) fn dropped(&self) -> u64 {
        self.kills.dropped() + self.unseen
    }

    pub(super) fn tenant_of_pid(&self, pid: u32) -> Option<Tenant> {
        let mut registry = self.registry.lock().ok()?;
        // A fault ends most processes before its line is read.
        registry.look(pid).or_else(|| registry.known(pid))
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
            self.held.entry(process.id).or_insert_with(|| (now, holdings(kernel, tenants, process)));
        }
        while self.held.len() > REMEMBERED {
            // By id, so about the oldest.
            self.held.pop_first();
        }
        let fresh = |at: &u64| now.saturating_sub(*at) <= REMEMBERED_NS;
        self.held.retain(|_, (at, _)| fresh(at));
        self.dying.retain(|_, dying| fresh(&dying.at));
        for process in kernel.processes.iter().filter(|process| process.ended.is_none()) {
            self.cgroups
                .entry(process.id)
                .or_insert_with(|| self.host.memory_cgroup(process.tgid).ok().flatten());
        }
        if now.saturating_sub(self.counted_at) >= COUNTERS_EVERY_NS {
            self.read_counters(kernel, now);
        }
    }

    fn read_counters(&mut self, kernel: &KernelSample, now: u64) {
        let since = std::mem::replace(&mut self.counted_at, now);
        let there: BTreeSet<ProcessId> =
            kernel.processes.iter().map(|process| process.id).chain(self.held.keys().copied()).collect();
        self.cgroups.retain(|id, _| there.contains(id));
        let paths: BTreeSet<&String> = self.cgroups.values().flatten().collect();
        let mut counted = BTreeMap::new();
        for path in paths {
            let Ok(Some(events)) = self.host.memory_events(path) else { continue };
            let Some(kills) = events.oom_kill else { continue };
            // A count that fell is another cgroup's of the same name.
            if let Some(fresh) = self.counted.get(path).and_then(|before| kills.checked_sub(*before)) {
                let cgroup = path.clone();
                self.kills.count(CgroupKills { since_ns: since, time_ns: now, cgroup, kills: fresh });
            }
            counted.insert(path.clone(), kills);
        }
        self.counted = counted;
    }

    pub(super) fn mark(&mut self, thread: &KilledThread, reported: &Reported, roll: &Roll) {
        let known = thread.process.and_then(|id| roll.of(id)).cloned();
        let cgroup = thread.process.and_then(|id| self.cgroups.get(&id).cloned().flatten());
        if self.dying.len() < REMEMBERED {
            let (at, uid) = (thread.marked_at, thread.uid);
            let (process, cgroup) = (thread.process, reported.cgroup.clone());
            self.dying.insert(thread.tgid, Dying { at, uid, process, cgroup });
        }
        self.kills.mark(Marked {
            time_ns: thread.marked_at,
            tid: thread.tid,
            tgid: thread.tgid,
            process: thread.process,
            comm: thread.comm.clone(),
            cgroup_id: thread.cgroup_id,
            cgroup,
            tenant: known,
            trigger: Trigger { tgid: thread.trigger, tenant: reported.trigger.clone() },
        });
    }

    pub(super) fn log(&mut self, clock: Clock, sequence: u64, line: OomLine) {
        self.kills.log(clock.monotonic_ns, sequence, line);
    }

    /// Counts the kills that are known for good, and gives one note a victim and shortage. `by`: a moment before the
    /// sample was taken, so that a victim of before is in that, or was in one before it.
    pub(super) fn settle(&mut self, tick: &Tick<'_>, by: u64, clock: Clock) -> Vec<KillNote> {
        let (dying, names, registry) = (&self.dying, &self.names, &self.registry);
        let settled = self.kills.settle(by, |pid, cgroup| {
            if let Some(dying) = dying.get(&pid) {
                // By now the sample may have shown one that was younger than the last.
                let known = dying.process.and_then(|id| tick.tenants.get(&id));
                return known.cloned().or_else(|| dying.tenant(cgroup, names));
            }
            let registry = registry.lock().ok()?;
            let by_place = cgroup.map(|path| registry.of_cgroup(path));
            // A path alone says nothing of a user.
            by_place.filter(is_telling).or_else(|| registry.known(pid))
        });
        for missed in &settled.unseen {
            warn!(cgroup = %missed.cgroup.escape_debug(), kills = missed.kills, "the cgroup counts kills for memory that nobody saw");
            self.unseen += missed.kills;
        }
        let mut notes = Vec::new();
        for incident in settled.incidents {
            for mut kill in incident.kills.clone() {
                kill.held = kill.process.and_then(|id| self.holdings(id, tick));
                if let Some(trigger) = kill.trigger.as_mut().filter(|trigger| trigger.tgid == kill.tgid) {
                    trigger.tenant.clone_from(&kill.tenant);
                }
                self.counters.add(&kill);
                notes.extend(note(&kill, &incident, clock));
                self.recent.push_front((clock.unix_of(kill.time_ns), kill));
                self.recent.truncate(LISTED);
            }
        }
        let present = |tenant: &Tenant| tick.tenants.values().any(|known| known == tenant);
        self.counters.forget(clock.monotonic_ns.saturating_sub(3_600_000_000_000), present);
        notes
    }

    /// As it ended; of one that takes long to end, as it is now.
    fn holdings(&self, id: ProcessId, tick: &Tick<'_>) -> Option<Held> {
        if let Some((_, held)) = self.held.get(&id) {
            return Some(held.clone());
        }
        let process = tick.kernel.processes.iter().find(|process| process.id == id)?;
        Some(holdings(tick.kernel, tick.tenants, process))
    }
}

impl Dying {
    /// Whose it was, for one that never called the driver: by where it was, in whichever hierarchy says most.
    fn tenant(&self, logged: Option<&str>, names: &HostNames) -> Option<Tenant> {
        let mut lines = String::new();
        for (hierarchy, path) in [("0::", self.cgroup.as_deref()), ("1:memory:", logged)] {
            // A name with a line's end in it would be taken for another hierarchy's line.
            if let Some(path) = path.filter(|path| !path.contains('\n')) {
                lines = format!("{lines}{hierarchy}{path}\n");
            }
        }
        if lines.is_empty() {
            return None;
        }
        let tenant = identify(&lines, Some(self.uid), &CgroupView::Host, names).tenant;
        (tenant.kind != TenantKind::Unknown).then_some(tenant)
    }
}

fn is_telling(tenant: &Tenant) -> bool {
    !matches!(tenant.kind, TenantKind::Unknown | TenantKind::User)
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
        last_calls: kill.held.iter().flat_map(|held| &held.last_calls).map(|call| told(call, kill)).collect(),
    })
}

/// One of the last calls, as seen from the kill.
pub(crate) fn told(call: &LastCall, kill: &Kill) -> CallNote {
    CallNote {
        seconds_before: (kill.time_ns as f64 - call.at as f64) / 1e9,
        operation: call.operation,
        bytes: call.bytes,
        code: call.error.0,
        gpu: call.gpu.clone(),
    }
}

fn holdings(kernel: &KernelSample, tenants: &BTreeMap<ProcessId, Tenant>, process: &ProcessSample) -> Held {
    let mut held = Held::of(&process.ledger);
    held.neighbours = neighbours(kernel, tenants, process, &held);
    held.last_calls.clone_from(&process.last_calls);
    held
}

/// Who else held memory on the GPUs of a process when that ended.
fn neighbours(
    kernel: &KernelSample,
    tenants: &BTreeMap<ProcessId, Tenant>,
    own: &ProcessSample,
    held: &Held,
) -> Vec<(GpuId, Tenant)> {
    let own_tenant = tenants.get(&own.id);
    let ended = if own.ended_at == 0 { u64::MAX } else { own.ended_at };
    let was_there = |process: &&ProcessSample| {
        process.first_seen < ended && (process.ended_at == 0 || process.ended_at > ended)
    };
    let mut neighbours = BTreeSet::new();
    for process in kernel.processes.iter().filter(was_there) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn named(cgroup: Option<&str>, logged: Option<&str>) -> Option<String> {
        let names = HostNames::new(Host::at("/nowhere"));
        let dying = Dying { at: 0, uid: 1000, process: None, cgroup: cgroup.map(str::to_owned) };
        dying.tenant(logged, &names).map(|tenant| tenant.name)
    }

    #[test]
    fn c99_the_dead_are_named_by_the_hierarchy_that_says_most() {
        let id = "5".repeat(64);
        let docker = format!("docker:{}", &id[..12]);
        // The daemon's own unit in one hierarchy, the container in the other.
        let (unit, container) = ("/system.slice/containerd.service", format!("/docker/{id}"));
        assert_eq!(named(Some(unit), Some(&container)), Some(docker.clone()));
        assert_eq!(named(Some(&container), None), Some(docker), "the log was cut short");
        assert_eq!(named(Some("/"), Some("/")), Some("user:1000".to_owned()));
        assert_eq!(named(None, None), None, "unknown, and not the root's");
    }

    #[test]
    fn a_cgroup_cannot_name_a_second_one_behind_a_line_end() {
        let forged = format!("/user.slice/x\n1:memory:/docker/{}", "5".repeat(64));
        assert_eq!(
            named(Some(&forged), Some("/system.slice/a.service")),
            Some("systemd:a.service".to_owned())
        );
    }
}
