//! Owns who each process belongs to, as far as anyone asked: found once, kept while it is needed and some minutes more.
//! Refuses to change its mind, except for a pod that had no name yet, or of which the API server had not told yet: a tenant
//! is what it was at first sight.

mod eyes;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use cotenant_host::{Host, HostNames, Kubelet, Listing};
use cotenant_model::{
    GpuId, ProcessId, Tenant, TenantKind,
    sample::{Confidence, ProcessSample, Waker},
    sharing::{Granted, granted},
};
pub(crate) use eyes::{Eyes, Sight};

use crate::{
    kubernetes::{Kubernetes, Pods, Told},
    rights::Confinement,
};

/// `bpf_get_current_cgroup_id` of a process outside every cgroup of the unified hierarchy.
const ROOT_CGROUP: u64 = 1;
/// What ended is still named this long: waits, kills and log lines speak of it later.
const AFTERLIFE: Duration = Duration::from_mins(5);
/// Of each kind of memory. A host that lives faster forgets earlier.
const MAX_DEAD: usize = 16_384;
const MAX_CGROUPS: usize = 16_384;
/// Between two looks at a pod without a name.
const AGAIN: Duration = Duration::from_secs(1);
/// A pod that has no name after this long keeps its UID.
const NAMING: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Known {
    sight: Sight,
    gone: bool,
    /// While its tenant may still get another name: since when, and when that was asked last.
    waiting: Option<(Instant, Instant)>,
}

#[derive(Debug)]
pub(crate) struct Registry {
    eyes: Eyes,
    kubelet: Option<Kubelet>,
    pods: Pods,
    by_process: BTreeMap<ProcessId, Tenant>,
    /// The PIDs of processes whose tenants may still get another name.
    nameless: BTreeMap<ProcessId, u32>,
    /// With the start time that makes a PID an identity.
    by_pid: BTreeMap<u32, Known>,
    /// Processes that were seen to map the driver: nothing of theirs came before the agent.
    witnessed: BTreeMap<u32, u64>,
    /// By cgroup and user, for processes that are gone before anyone looked. With the sequence of their last use.
    by_cgroup: BTreeMap<(u64, u32), (u64, Tenant)>,
    uses: u64,
    dead_pids: VecDeque<(Instant, u32, u64)>,
    dead_processes: VecDeque<(Instant, ProcessId)>,
}

impl Registry {
    /// Before any other thread is started that reads cgroups: those that come after see what this one sees.
    pub(crate) fn new(host: Host, kubernetes: &Kubernetes, confinement: Confinement) -> Self {
        let view = host.enter_cgroups();
        let kubelet = kubernetes.ask(&host, confinement);
        let pods = Pods::watch(kubernetes, confinement);
        let mut names = HostNames::new(host.clone()).with_namespaces(kubernetes.tenant_namespace);
        if let Some(kubelet) = &kubelet {
            names = names.with(kubelet);
        }
        if let Pods::Watched(watch) = &pods {
            names = names.with_pods(watch);
        }
        Self { kubelet, pods, ..Self::with(Eyes { host, names, view }) }
    }

    fn with(eyes: Eyes) -> Self {
        Self {
            eyes,
            kubelet: None,
            pods: Pods::Off,
            by_process: BTreeMap::new(),
            nameless: BTreeMap::new(),
            by_pid: BTreeMap::new(),
            witnessed: BTreeMap::new(),
            by_cgroup: BTreeMap::new(),
            uses: 0,
            dead_pids: VecDeque::new(),
            dead_processes: VecDeque::new(),
        }
    }

    /// What kubelet and the runtime said last; `None` while nobody asks them.
    pub(crate) fn listing(&self) -> Option<Arc<Listing>> {
        self.kubelet.as_ref().map(|kubelet| kubelet.heard.latest())
    }

    /// What the API server says of this node's pods.
    pub(crate) fn pods(&self) -> Told {
        self.pods.told()
    }

    /// To look with while the registry is not locked.
    pub(crate) fn eyes(&self) -> Eyes {
        self.eyes.clone()
    }

    /// First contact: now, while it lives. `None` when it is gone already.
    pub(crate) fn look(&mut self, pid: u32) -> Option<Tenant> {
        if let Some(sight) = self.seen(pid)
            && self.eyes.host.alive(pid, sight.start)
        {
            return Some(sight.tenant);
        }
        let sight = self.eyes.look(pid)?;
        Some(self.note(pid, sight))
    }

    /// What the last look at this PID found, unless it is time for another: a pod may have got its name since.
    pub(crate) fn seen(&self, pid: u32) -> Option<Sight> {
        let known = self.by_pid.get(&pid)?;
        (!known.waiting.is_some_and(|waiting| self.again(&known.sight, waiting))).then(|| known.sight.clone())
    }

    /// A name may come any second for a while; what the API server says comes with its word, however late.
    fn again(&self, sight: &Sight, (since, asked): (Instant, Instant)) -> bool {
        asked.elapsed() >= AGAIN
            && (sight.nameless && since.elapsed() < NAMING
                || sight.unsettled && self.eyes.names.heard() != sight.heard)
    }

    /// What a look at a process found. What was known of the same process before stays, but for its missing name.
    pub(crate) fn note(&mut self, pid: u32, sight: Sight) -> Tenant {
        let now = Instant::now();
        let open = sight.nameless || sight.unsettled;
        let waiting = |since, asked| open.then_some((since, asked));
        let known = match self.by_pid.get(&pid).filter(|known| known.sight.start == sight.start) {
            Some(Known { waiting: None, sight, .. }) => return sight.tenant.clone(),
            Some(Known { waiting: Some((since, asked)), gone, .. }) => {
                // What was seen before comes back here as well, and is no new question.
                let asked = if asked.elapsed() >= AGAIN { now } else { *asked };
                Known { gone: *gone, waiting: waiting(*since, asked), sight }
            }
            None => Known { gone: false, waiting: waiting(now, now), sight },
        };
        let tenant = known.sight.tenant.clone();
        self.by_pid.insert(pid, known);
        tenant
    }

    /// Of a PID that somebody named.
    pub(crate) fn tenant(&mut self, pid: u32) -> Tenant {
        self.look(pid).unwrap_or_else(gone)
    }

    /// Of a PID that was seen before, whether it still runs or not.
    pub(crate) fn known(&self, pid: u32) -> Option<Tenant> {
        self.by_pid.get(&pid).map(|known| known.sight.tenant.clone())
    }

    /// Of a cgroup's path, when nothing else is left of a process.
    pub(crate) fn of_cgroup(&self, path: &str) -> Tenant {
        self.eyes.identity_of_path(path, None).tenant
    }

    /// A process made its first traced call. `sight`: a look at it since then, if it was still there.
    pub(crate) fn meet(&mut self, id: ProcessId, tgid: u32, cgroup_id: u64, sight: Option<Sight>) {
        if self.by_process.contains_key(&id) {
            return;
        }
        // One that is gone waits for its sample: the sample has the user that its cgroup alone does not say.
        let Some(sight) = sight else { return };
        let key = (cgroup_id, sight.uid);
        let open = sight.nameless || sight.unsettled;
        let lasting = sight.by_cgroup && !open;
        let tenant = self.note(tgid, sight);
        if cgroup_id > ROOT_CGROUP && lasting {
            self.remember(key, tenant.clone());
        }
        if open {
            self.nameless.insert(id, tgid);
        }
        self.by_process.insert(id, tenant);
    }

    fn remember(&mut self, key: (u64, u32), tenant: Tenant) {
        self.uses += 1;
        self.by_cgroup.insert(key, (self.uses, tenant));
        if self.by_cgroup.len() > MAX_CGROUPS {
            // The older half: a cgroup's id is not used again, so only their dead lose by it.
            let mut uses: Vec<u64> = self.by_cgroup.values().map(|(used, _)| *used).collect();
            uses.sort_unstable();
            let middle = uses[uses.len() / 2];
            self.by_cgroup.retain(|_, (used, _)| *used > middle);
        }
    }

    /// Of a process that nobody looked at before it was gone.
    fn of_the_gone(&mut self, process: &ProcessSample) -> Tenant {
        let key = (process.cgroup_id, process.uid);
        if process.cgroup_id <= ROOT_CGROUP {
            return gone();
        }
        if let Some((used, tenant)) = self.by_cgroup.get_mut(&key) {
            self.uses += 1;
            *used = self.uses;
            return tenant.clone();
        }
        match self.eyes.of_cgroup(process.cgroup_id, process.uid) {
            Some(identity) => {
                if !identity.unsettled {
                    self.remember(key, identity.tenant.clone());
                }
                identity.tenant
            }
            None => gone(),
        }
    }

    /// Before a process calls the driver: it has mapped it. `witnessed` when it was seen doing so.
    pub(crate) fn foresee(&mut self, pid: u32, sight: Option<Sight>, witnessed: Option<u64>) {
        if let Some(sight) = sight {
            self.note(pid, sight);
        }
        if let Some(start) = witnessed {
            self.witnessed.insert(pid, start);
        }
    }

    /// A late first call is no gap where the agent saw the process map the driver and no memory came before.
    pub(crate) fn judge(&self, process: &mut ProcessSample) {
        let alive = |start: &u64| self.eyes.host.alive(process.tgid, *start);
        let seen = || self.witnessed.get(&process.tgid).is_some_and(alive);
        if process.confidence == Confidence::JoinedLate && process.before_memory && seen() {
            process.confidence = Confidence::Complete;
        }
    }

    /// The tenants of these processes, of whoever they waited for, and of these PIDs. `servers`: PIDs that NVML's lists show
    /// to be MPS servers. Whoever started one, what it does it does for its clients.
    pub(crate) fn resolve(
        &mut self,
        processes: &[ProcessSample],
        pids: &BTreeSet<u32>,
        servers: &BTreeSet<u32>,
    ) -> Resolved {
        for process in processes {
            if !self.by_process.contains_key(&process.id) {
                // An ended process's PID may be somebody else's by now.
                let there = process.ended.is_none();
                let seen = self.seen(process.tgid);
                let sight = there.then(|| self.eyes.look_again(process.tgid, seen)).flatten();
                self.meet(process.id, process.tgid, process.cgroup_id, sight);
            }
            if !self.by_process.contains_key(&process.id) {
                let tenant = self.of_the_gone(process);
                self.by_process.insert(process.id, tenant);
            }
        }
        self.name_the_nameless();
        for process in processes.iter().filter(|process| process.ended.is_none()) {
            if servers.contains(&process.tgid) {
                self.by_process.insert(process.id, Tenant::mps_server());
            }
        }
        let wakers = processes.iter().flat_map(|process| &process.blame).filter_map(|row| match row.waker {
            Waker::Process(id) => Some(id),
            _ => None,
        });
        let by_process: BTreeMap<_, _> = processes
            .iter()
            .map(|process| process.id)
            .chain(wakers)
            .filter_map(|id| Some((id, self.by_process.get(&id)?.clone())))
            .collect();
        let by_pid = pids
            .iter()
            .map(|pid| {
                let server = servers.contains(pid);
                (*pid, if server { Tenant::mps_server() } else { self.tenant(*pid) })
            })
            .collect();
        Resolved { by_process, by_pid }
    }

    /// Pods whose names were not there yet at first sight.
    fn name_the_nameless(&mut self) {
        let nameless = |pid| self.by_pid.get(pid).is_some_and(|known| known.sight.nameless);
        if let Some(kubelet) = &self.kubelet
            && self.nameless.values().any(nameless)
        {
            kubelet.hurry();
        }
        for (id, pid) in self.nameless.clone() {
            let tenant = self.look(pid);
            let waits = self.by_pid.get(&pid).and_then(|known| {
                let (since, _) = known.waiting?;
                Some(known.sight.unsettled || since.elapsed() < NAMING)
            });
            if let Some(tenant) = tenant
                && tenant.namespace.is_some()
            {
                self.by_process.insert(id, tenant);
            }
            if waits != Some(true) {
                self.nameless.remove(&id);
            }
        }
    }

    /// How the kubelet granted each GPU, where there is one.
    pub(crate) fn granted(&self) -> BTreeMap<GpuId, Granted> {
        self.kubelet.as_ref().map(|kubelet| granted(&kubelet.heard.latest().grants)).unwrap_or_default()
    }

    /// Processes that the kernel side has let go of.
    pub(crate) fn forget(&mut self, retired: &BTreeSet<ProcessId>) {
        let now = Instant::now();
        for id in retired {
            self.nameless.remove(id);
            self.dead_processes.push_back((now, *id));
        }
        while self.dead_processes.len() > MAX_DEAD
            || self.dead_processes.front().is_some_and(|(died, _)| died.elapsed() >= AFTERLIFE)
        {
            if let Some((_, id)) = self.dead_processes.pop_front() {
                self.by_process.remove(&id);
            }
        }
    }

    /// PIDs and starts that are taken to run, for [`Self::bury`].
    pub(crate) fn running(&self) -> Vec<(u32, u64)> {
        let known =
            self.by_pid.iter().filter(|(_, known)| !known.gone).map(|(pid, known)| (*pid, known.sight.start));
        known.chain(self.witnessed.iter().map(|(pid, start)| (*pid, *start))).collect()
    }

    /// These are gone. They keep their names for a while, and lose them all together where too many die.
    pub(crate) fn bury(&mut self, dead: &[(u32, u64)]) {
        let now = Instant::now();
        for (pid, start) in dead {
            if self.witnessed.get(pid) == Some(start) {
                self.witnessed.remove(pid);
            }
            if let Some(known) = self.by_pid.get_mut(pid)
                && known.sight.start == *start
                && !known.gone
            {
                known.gone = true;
                self.dead_pids.push_back((now, *pid, *start));
            }
        }
        while self.dead_pids.len() > MAX_DEAD
            || self.dead_pids.front().is_some_and(|(died, ..)| died.elapsed() >= AFTERLIFE)
        {
            if let Some((_, pid, start)) = self.dead_pids.pop_front()
                && self.by_pid.get(&pid).is_some_and(|known| known.sight.start == start)
            {
                self.by_pid.remove(&pid);
            }
        }
    }
}

fn gone() -> Tenant {
    Tenant::plain(TenantKind::Unknown, "gone")
}

#[derive(Default)]
pub(crate) struct Resolved {
    pub(crate) by_process: BTreeMap<ProcessId, Tenant>,
    pub(crate) by_pid: BTreeMap<u32, Tenant>,
}

#[cfg(test)]
mod tests;
