//! Owns the first step from a process to a tenant: its cgroup path, then its user.
//! Refuses to guess: what the path does not say is `unknown` with a reason, never somebody else.

use cotenant_model::{Tenant, TenantKind};

use crate::cgroup::{Place, Runtime, place};
use crate::names::{Names, clean};

/// From where the cgroup paths are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupView {
    /// The reader is in the host's cgroup namespace: `/` is the host's root.
    Host,
    /// The reader has a cgroup namespace of its own: `/` is the reader's own cgroup.
    Private,
}

/// Who a process belongs to, and how that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub tenant: Tenant,
    pub container_id: Option<String>,
    pub pod_uid: Option<String>,
    pub runtime: Option<Runtime>,
    /// The systemd unit, also within a user's session.
    pub unit: Option<String>,
    /// Why the tenant is unknown or only as good as its user. Bounded.
    pub reason: Option<&'static str>,
}

/// The tenant of a process, from the text of its `/proc/PID/cgroup` and its UID.
pub fn identify(cgroup: &str, uid: u32, view: CgroupView, names: &dyn Names) -> Identity {
    match place(cgroup) {
        Some(Place::Pod { uid, container }) => pod(uid, container, names),
        Some(Place::Job { job }) => bare(Tenant::plain(TenantKind::Slurm, &job)),
        Some(Place::Helper { what }) => bare(Tenant::plain(TenantKind::System, what)),
        Some(Place::Container { runtime, id, task }) => container(runtime, id, task, uid, names),
        Some(Place::Strange) => unknown("container_of_unknown_runtime"),
        Some(Place::Unit { unit }) => {
            let tenant = Tenant::plain(TenantKind::Systemd, &clean(&unit));
            Identity { unit: Some(unit), ..bare(tenant) }
        }
        Some(Place::Session { uid, unit }) => Identity { unit, ..user(uid, names, None) },
        Some(Place::Outside) => unknown("cgroup_outside_namespace"),
        Some(Place::Root) if view == CgroupView::Private => unknown("cgroup_namespace"),
        Some(Place::Root) => user(uid, names, None),
        Some(Place::Plain) => user(uid, names, Some("cgroup_not_recognised")),
        None => unknown("no_cgroup"),
    }
}

fn bare(tenant: Tenant) -> Identity {
    Identity { tenant, container_id: None, pod_uid: None, runtime: None, unit: None, reason: None }
}

fn unknown(reason: &'static str) -> Identity {
    Identity { reason: Some(reason), ..bare(Tenant::plain(TenantKind::Unknown, reason)) }
}

fn user(uid: u32, names: &dyn Names, reason: Option<&'static str>) -> Identity {
    let name = names.user(uid).unwrap_or_else(|| uid.to_string());
    Identity { reason, ..bare(Tenant::plain(TenantKind::User, &name)) }
}

fn pod(uid: String, container: Option<(Option<Runtime>, String)>, names: &dyn Names) -> Identity {
    let (runtime, container_id) = match container {
        Some((runtime, id)) => (runtime, Some(id)),
        None => (None, None),
    };
    let found = names.pod(&uid);
    let reason = found.is_none().then_some("pod_without_name");
    let mut tenant = match found {
        Some(name) => Tenant {
            namespace: Some(name.namespace.clone()),
            pod: Some(name.pod.clone()),
            ..Tenant::plain(TenantKind::Pod, &format!("{}/{}", name.namespace, name.pod))
        },
        None => Tenant::plain(TenantKind::Pod, &uid),
    };
    tenant.container = container_id.as_deref().and_then(|id| names.pod_container(&uid, id));
    Identity { container_id, pod_uid: Some(uid), runtime, reason, ..bare(tenant) }
}

fn container(runtime: Runtime, id: String, task: Option<String>, uid: u32, names: &dyn Names) -> Identity {
    let kind = match runtime {
        Runtime::Docker => TenantKind::Docker,
        Runtime::Containerd => TenantKind::Containerd,
        Runtime::Crio => TenantKind::Crio,
        Runtime::Podman => TenantKind::Podman,
        Runtime::Ecs => TenantKind::Ecs,
        Runtime::Lxc => TenantKind::Lxc,
    };
    let name = match task {
        Some(task) => task,
        None if runtime == Runtime::Lxc => clean(&id),
        None => names.container(runtime, &id, uid).unwrap_or_else(|| id.chars().take(12).collect()),
    };
    Identity { container_id: Some(id), runtime: Some(runtime), ..bare(Tenant::plain(kind, &name)) }
}

#[cfg(test)]
mod tests;
