//! Owns looking at a process: everything about its identity that reads files.
//! Refuses to remember: the registry does, and nothing is read while it is locked.

use cotenant_host::{CgroupView, Host, HostNames, Identity, Kind, Observed, identify};
use cotenant_model::Tenant;

/// A process as it was at one look.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    pub(crate) start: u64,
    pub(crate) uid: u32,
    pub(crate) tenant: Tenant,
    /// Only a pod's UID was there to name it, which a later look may improve on.
    pub(crate) nameless: bool,
    /// The API server has not told of its pod, which may change whose it is.
    pub(crate) unsettled: bool,
    /// What the API server had told before this look, as [`HostNames::heard`] counts it.
    pub(crate) heard: u64,
    /// Whoever else has this cgroup and UID is the same tenant.
    pub(crate) by_cgroup: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Eyes {
    pub(crate) host: Host,
    pub(crate) names: HostNames,
    pub(crate) view: CgroupView,
}

impl Eyes {
    /// `None` when it is gone already.
    pub(crate) fn look(&self, pid: u32) -> Option<Sight> {
        let heard = self.names.heard();
        let Observed { start, uid, identity } = self.host.identity(pid, &self.view, &self.names).ok()?;
        if pid == std::process::id() {
            // Whoever started it, what it does to tenants is its own doing, and is to be seen as such.
            let tenant = Tenant::agent();
            let (nameless, unsettled, by_cgroup) = (false, false, false);
            return Some(Sight { start, uid, tenant, nameless, unsettled, heard, by_cgroup });
        }
        Some(Sight {
            start,
            uid,
            unsettled: identity.unsettled,
            heard,
            nameless: identity.reason == Some("pod_without_name"),
            by_cgroup: identity.unified && identity.kind != Kind::Unknown,
            tenant: identity.tenant,
        })
    }

    /// As [`Self::look`], without reading again what was `seen` of the same process.
    pub(crate) fn look_again(&self, pid: u32, seen: Option<Sight>) -> Option<Sight> {
        seen.filter(|sight| self.host.alive(pid, sight.start)).or_else(|| self.look(pid))
    }

    /// The tenant that a cgroup of the unified hierarchy is by its path, for a process that nobody looked at in time.
    pub(crate) fn of_cgroup(&self, id: u64, uid: u32) -> Option<Identity> {
        let path = self.host.cgroup_by_id(id)?;
        let identity = self.identity_of_path(&path, Some(uid));
        // Where version 1 counts too, a container may be known by that alone.
        let telling = !self.host.has_cgroup_v1()
            || !matches!(identity.kind, Kind::Host | Kind::User | Kind::Unknown)
                && !identity.unit.as_deref().is_some_and(is_runtime);
        (telling && identity.kind != Kind::Unknown).then_some(identity)
    }

    pub(crate) fn identity_of_path(&self, path: &str, uid: Option<u32>) -> Identity {
        identify(&format!("0::{path}\n"), uid, &self.view, &self.names)
    }
}

/// Units whose cgroups may hold other units' containers and jobs.
fn is_runtime(unit: &str) -> bool {
    ["containerd", "cri", "docker", "k0s", "k3s", "podman", "rke2", "slurm"]
        .iter()
        .any(|runtime| unit.starts_with(runtime))
}
