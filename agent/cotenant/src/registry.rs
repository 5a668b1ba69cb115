//! Owns who each process belongs to, as far as anyone asked: found once, kept while it is needed.
//! Refuses to change its mind: a process's tenant is what it was at first sight.

use std::collections::{BTreeMap, BTreeSet};

use cotenant_host::{CgroupView, Host, HostNames};
use cotenant_model::{
    ProcessId, Tenant, TenantKind,
    sample::{Confidence, ProcessSample},
};

/// `bpf_get_current_cgroup_id` of a process outside every cgroup of the unified hierarchy.
const ROOT_CGROUP: u64 = 1;

#[derive(Debug)]
pub(crate) struct Registry {
    host: Host,
    names: HostNames,
    view: CgroupView,
    by_process: BTreeMap<ProcessId, Tenant>,
    /// With the start time that makes a PID an identity.
    by_pid: BTreeMap<u32, (u64, Tenant)>,
    /// Processes that were seen to map the driver: nothing of theirs came before the agent.
    witnessed: BTreeMap<u32, u64>,
    /// Tenants by cgroup, for processes that are gone before anyone looked.
    by_cgroup: BTreeMap<u64, Tenant>,
}

impl Registry {
    pub(crate) fn new(host: Host) -> Self {
        let view = host.enter_cgroups();
        Self {
            names: HostNames::new(host.clone()),
            host,
            view,
            by_process: BTreeMap::new(),
            by_pid: BTreeMap::new(),
            witnessed: BTreeMap::new(),
            by_cgroup: BTreeMap::new(),
        }
    }

    /// First contact: now, while it lives. `None` when it is gone already.
    fn look(&mut self, pid: u32) -> Option<Tenant> {
        let start = self.host.start(pid).ok()?;
        if let Some((known, tenant)) = self.by_pid.get(&pid)
            && *known == start
        {
            return Some(tenant.clone());
        }
        let (start, identity) = self.host.identity(pid, &self.view, &self.names).ok()?;
        let tenant = identity.tenant;
        self.by_pid.insert(pid, (start, tenant.clone()));
        Some(tenant)
    }

    /// Of a PID that somebody named.
    pub(crate) fn tenant(&mut self, pid: u32) -> Tenant {
        self.look(pid).unwrap_or_else(|| Tenant::plain(TenantKind::Unknown, "gone"))
    }

    /// A process made its first traced call.
    pub(crate) fn meet(&mut self, id: ProcessId, tgid: u32, cgroup_id: u64) {
        if self.by_process.contains_key(&id) {
            return;
        }
        let of_cgroup = (cgroup_id > ROOT_CGROUP).then_some(cgroup_id);
        let tenant = match self.look(tgid) {
            Some(tenant) => {
                if let Some(cgroup) = of_cgroup {
                    self.by_cgroup.insert(cgroup, tenant.clone());
                }
                tenant
            }
            None => of_cgroup
                .and_then(|cgroup| self.by_cgroup.get(&cgroup).cloned())
                .unwrap_or_else(|| Tenant::plain(TenantKind::Unknown, "gone")),
        };
        self.by_process.insert(id, tenant);
    }

    /// Before a process calls the driver: it has mapped it. `start` when it was seen doing so.
    pub(crate) fn foresee(&mut self, pid: u32, witnessed: Option<u64>) {
        self.look(pid);
        if let Some(start) = witnessed {
            self.witnessed.insert(pid, start);
        }
    }

    /// A late first call is no gap where the agent saw the process map the driver and no memory came before.
    pub(crate) fn judge(&self, process: &mut ProcessSample) {
        let seen =
            || self.witnessed.get(&process.tgid).is_some_and(|start| self.host.alive(process.tgid, *start));
        if process.confidence == Confidence::JoinedLate && process.before_memory && seen() {
            process.confidence = Confidence::Complete;
        }
    }

    /// The tenants of these processes and of these PIDs; whatever else was known is forgotten.
    pub(crate) fn resolve(&mut self, processes: &[ProcessSample], pids: &BTreeSet<u32>) -> Resolved {
        for process in processes {
            self.meet(process.id, process.tgid, process.cgroup_id);
        }
        let by_process: BTreeMap<_, _> = processes
            .iter()
            .filter_map(|process| Some((process.id, self.by_process.get(&process.id)?.clone())))
            .collect();
        let by_pid = pids.iter().map(|pid| (*pid, self.tenant(*pid))).collect();
        Resolved { by_process, by_pid }
    }

    /// Forgets what is no longer running. Cgroups stay as long as a tenant of theirs does.
    pub(crate) fn forget(&mut self, retired: &BTreeSet<ProcessId>) {
        for id in retired {
            self.by_process.remove(id);
        }
        if self.by_cgroup.len() > 4096 {
            let used: BTreeSet<&Tenant> = self.by_process.values().collect();
            self.by_cgroup.retain(|_, tenant| used.contains(tenant));
        }
    }

    /// Forgets PIDs that are gone, on a timer: most of them never called the driver.
    pub(crate) fn prune(&mut self) {
        let host = &self.host;
        self.by_pid.retain(|pid, (start, _)| host.alive(*pid, *start));
        self.witnessed.retain(|pid, start| host.alive(*pid, *start));
    }
}

#[derive(Default)]
pub(crate) struct Resolved {
    pub(crate) by_process: BTreeMap<ProcessId, Tenant>,
    pub(crate) by_pid: BTreeMap<u32, Tenant>,
}
