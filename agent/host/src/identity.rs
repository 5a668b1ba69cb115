//! Owns the first step from a process to a tenant: its cgroup path, then its user.
//! Refuses to guess: what the path does not say is `unknown` with a reason, never somebody else.

mod path;
mod process;
pub(crate) mod shape;
mod view;

use cotenant_model::{Tenant, TenantKind};

pub use path::Owner;
use path::{Found, Place, place};
pub use process::Observed;

use crate::Team;
use crate::names::{Named, Names, clean, escape};

/// What runs a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Runtime {
    Docker,
    Containerd,
    Crio,
    Podman,
    Ecs,
    Lxc,
}

impl Runtime {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Containerd => "containerd",
            Self::Crio => "crio",
            Self::Podman => "podman",
            Self::Ecs => "ecs",
            Self::Lxc => "lxc",
        }
    }
}

/// From where the cgroup paths are seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupView {
    /// The reader is in the host's cgroup namespace: `/` is the host's root.
    Host,
    /// The reader has a cgroup namespace of its own: `/` is the reader's own cgroup.
    Private {
        /// The pod that the reader itself is in, where its mounts say so.
        pod: Option<String>,
    },
}

/// What a process is part of. The words are the interface of `cotenant identify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    KubernetesContainer,
    DockerContainer,
    PodmanContainer,
    ContainerdContainer,
    CrioContainer,
    EcsTask,
    LxcContainer,
    SystemdUnit,
    SlurmJob,
    User,
    Host,
    RuntimeHelper,
    Unknown,
}

impl Kind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::KubernetesContainer => "kubernetes_container",
            Self::DockerContainer => "docker_container",
            Self::PodmanContainer => "podman_container",
            Self::ContainerdContainer => "containerd_container",
            Self::CrioContainer => "crio_container",
            Self::EcsTask => "ecs_task",
            Self::LxcContainer => "lxc_container",
            Self::SystemdUnit => "systemd_unit",
            Self::SlurmJob => "slurm_job",
            Self::User => "user",
            Self::Host => "host",
            Self::RuntimeHelper => "runtime_helper",
            Self::Unknown => "unknown",
        }
    }
}

/// Who a process belongs to, and how that is known. Every string is clean and short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Who is billed: the label set of the metrics.
    pub tenant: Tenant,
    pub kind: Kind,
    /// What the kind's own tools take: container, unit, job, UID.
    pub id: Option<String>,
    /// What people call it, where anything says so.
    pub name: Option<String>,
    /// The pod's UID, or a static pod's configuration hash.
    pub pod_uid: Option<String>,
    pub container_id: Option<String>,
    pub runtime: Option<Runtime>,
    /// The systemd unit, also within a user's session.
    pub unit: Option<String>,
    pub slurm_job: Option<String>,
    pub slurm_step: Option<String>,
    /// Whose session or job it is; elsewhere the process's own.
    pub uid: Option<u32>,
    /// Why it is unknown, or less than it could be. Bounded.
    pub reason: Option<&'static str>,
    /// The path that was believed.
    pub path: Option<String>,
    /// Whether that path is of the unified hierarchy: then its cgroup's id means this identity.
    pub unified: bool,
    /// Where the name came from.
    pub named_by: Option<&'static str>,
    /// The API server, whose label names the tenant, has not told of this pod yet: a later look may say another tenant.
    pub unsettled: bool,
    /// A tenant that seems to run inside this one. Not believed: the outer one can make any path.
    pub nested: Option<String>,
}

impl Identity {
    fn new(kind: Kind, tenant: Tenant) -> Self {
        Self {
            tenant,
            kind,
            id: None,
            name: None,
            pod_uid: None,
            container_id: None,
            runtime: None,
            unit: None,
            slurm_job: None,
            slurm_step: None,
            uid: None,
            reason: None,
            path: None,
            unified: false,
            named_by: None,
            unsettled: false,
            nested: None,
        }
    }

    fn unknown(reason: &'static str) -> Self {
        Self { reason: Some(reason), ..Self::new(Kind::Unknown, Tenant::plain(TenantKind::Unknown, reason)) }
    }
}

/// The tenant of a process, from the text of its `/proc/PID/cgroup` and its UID.
/// Without a UID it is a path's tenant, for people who have only a path.
pub fn identify(cgroup: &str, uid: Option<u32>, view: &CgroupView, names: &dyn Names) -> Identity {
    let Some(Found { place, path, unified, nested, .. }) = place(cgroup) else {
        return Identity { uid, ..Identity::unknown("no_cgroup") };
    };
    let asked = Asked { uid, view, names };
    let mut identity = asked.place(place);
    identity.uid = identity.uid.or(uid);
    identity.path = Some(bounded(path));
    identity.unified = unified;
    identity.nested = nested.map(|nested| describe(&nested));
    identity
}

/// Whether a process in these cgroups is one of the host's own: in no container, pod or job, and in no other user's session.
pub(crate) fn holds_no_tenant(cgroup: &str) -> bool {
    place(cgroup).is_some_and(|found| {
        matches!(
            found.place,
            Place::Unit { .. } | Place::Session { uid: 0, .. } | Place::Plain(_) | Place::Root
        )
    })
}

struct Asked<'a> {
    uid: Option<u32>,
    view: &'a CgroupView,
    names: &'a dyn Names,
}

impl Asked<'_> {
    fn place(&self, place: Place) -> Identity {
        match place {
            Place::Pod { uid, container } => self.pod(uid, container),
            Place::Job { job, step, uid } => Identity {
                id: Some(job.clone()),
                name: Some(job.clone()),
                slurm_step: step,
                uid,
                tenant: Tenant::plain(TenantKind::Slurm, &job),
                slurm_job: Some(job),
                ..Identity::new(Kind::SlurmJob, Tenant::other())
            },
            Place::Helper { what, container, pod } => Identity {
                id: container.clone(),
                name: Some(what.to_owned()),
                container_id: container,
                pod_uid: pod,
                ..Identity::new(Kind::RuntimeHelper, Tenant::plain(TenantKind::System, what))
            },
            Place::Container { runtime, id, task, owner } => self.container(runtime, id, task, owner),
            Place::Task(task) => Identity {
                id: Some(task.clone()),
                name: Some(task.clone()),
                runtime: Some(Runtime::Ecs),
                ..Identity::new(Kind::EcsTask, Tenant::plain(TenantKind::Ecs, &task))
            },
            Place::Sibling { runtime, id } => self.sibling(runtime, id),
            Place::Strange { parent, id } => match self.names.adopted(&id, &parent) {
                Some((runtime, named)) => container(runtime, id, Some(named)),
                None => Identity {
                    id: Some(id.clone()),
                    container_id: Some(id),
                    ..Identity::unknown("container_of_unknown_runtime")
                },
            },
            Place::Unit { unit } => {
                let name = clean(&unit);
                Identity {
                    id: Some(name.clone()),
                    unit: Some(name.clone()),
                    tenant: Tenant::plain(TenantKind::Systemd, &name),
                    name: Some(name),
                    ..Identity::new(Kind::SystemdUnit, Tenant::other())
                }
            }
            Place::Session { uid, unit, helper } => {
                let kind = if helper { Kind::RuntimeHelper } else { Kind::User };
                Identity { unit: unit.map(|unit| clean(&unit)), kind, ..self.user(uid) }
            }
            Place::Outside => Identity::unknown("cgroup_outside_namespace"),
            Place::Root => match self.view {
                CgroupView::Private { .. } => Identity::unknown("cgroupns"),
                CgroupView::Host => self.host(),
            },
            // Root's processes do not become the root tenant because somebody moved them.
            Place::Plain(reason) => match self.uid.filter(|uid| *uid != 0) {
                Some(uid) => Identity { reason: Some(reason), ..self.user(uid) },
                None => Identity::unknown(reason),
            },
        }
    }

    fn user(&self, uid: u32) -> Identity {
        let name = self.names.user(uid);
        let shown = name.clone().unwrap_or_else(|| uid.to_string());
        Identity {
            id: Some(uid.to_string()),
            named_by: name.as_ref().map(|_| "/etc/passwd"),
            name,
            uid: Some(uid),
            ..Identity::new(Kind::User, Tenant::plain(TenantKind::User, &shown))
        }
    }

    fn host(&self) -> Identity {
        let tenant = match self.uid {
            Some(uid) => self.user(uid).tenant,
            None => Tenant::plain(TenantKind::System, "host"),
        };
        Identity { name: Some("host".to_owned()), ..Identity::new(Kind::Host, tenant) }
    }

    fn pod(&self, uid: String, container: Option<(Option<Runtime>, String)>) -> Identity {
        let (runtime, container_id) = match container {
            Some((runtime, id)) => (runtime, Some(id)),
            None => (None, None),
        };
        let found = self.names.pod(&uid, container_id.as_deref());
        let named_by = found.as_ref().map(|name| name.from);
        let reason = found.is_none().then_some("pod_without_name");
        let team = self.names.team(&uid, found.as_ref());
        let mut tenant = match found {
            Some(name) => Tenant {
                namespace: Some(name.namespace.clone()),
                pod: Some(name.pod.clone()),
                ..Tenant::plain(TenantKind::Pod, &format!("{}/{}", name.namespace, name.pod))
            },
            None => Tenant::plain(TenantKind::Pod, &uid),
        };
        let name = tenant.namespace.is_some().then(|| tenant.name["pod:".len()..].to_owned());
        // The pod stays in the label set: whoever takes a team's name for it is seen to do so.
        if let Team::Known(team) = &team {
            tenant = Tenant {
                namespace: tenant.namespace,
                pod: tenant.pod,
                ..Tenant::plain(TenantKind::Team, team)
            };
        }
        tenant.container = container_id.as_deref().and_then(|id| self.names.pod_container(&uid, id));
        Identity {
            id: container_id.clone().or_else(|| Some(uid.clone())),
            name,
            container_id,
            pod_uid: Some(uid),
            runtime,
            reason,
            named_by,
            unsettled: team == Team::NotYet,
            ..Identity::new(Kind::KubernetesContainer, tenant)
        }
    }

    fn container(&self, runtime: Runtime, id: String, task: Option<String>, owner: Owner) -> Identity {
        if let Some(task) = task {
            return Identity {
                id: Some(task.clone()),
                name: Some(task.clone()),
                container_id: Some(bounded(&id)),
                runtime: Some(runtime),
                ..Identity::new(Kind::EcsTask, Tenant::plain(TenantKind::Ecs, &task))
            };
        }
        if runtime == Runtime::Lxc {
            let named = Named { name: clean(&id), from: "cgroup" };
            return container(runtime, bounded(&id), Some(named));
        }
        // A runtime of Kubernetes that was told of no pod by path may have noted it with the container.
        if owner == Owner::Root
            && matches!(runtime, Runtime::Containerd | Runtime::Crio)
            && let Some(pod) = self.names.pod_of(&id)
        {
            return self.pod(pod, Some((Some(runtime), id)));
        }
        let named = self.names.container(runtime, &id, &owner);
        match owner {
            Owner::Root => container(runtime, bounded(&id), named),
            // The user may have made the path: the tenant is the user's, and the name says so.
            Owner::User(uid) => {
                let user = self.names.user(uid).unwrap_or_else(|| uid.to_string());
                let short = || id.chars().take(12).collect();
                let shown =
                    format!("{user}/{}", named.as_ref().map_or_else(short, |named| named.name.clone()));
                let mut identity = container(runtime, id, named);
                identity.tenant = Tenant::plain(identity.tenant.kind, &clean(&shown));
                Identity { uid: Some(uid), ..identity }
            }
            // The unit may have made the path: unless the store agrees, the unit is the tenant.
            Owner::Unit(unit) => {
                let unit = clean(&unit);
                let believed = named.is_some();
                let mut identity = container(runtime, id, named);
                if !believed {
                    identity.tenant = Tenant::plain(TenantKind::Systemd, &unit);
                    identity.reason = Some("container_not_confirmed");
                }
                Identity { unit: Some(unit), ..identity }
            }
        }
    }

    fn sibling(&self, runtime: Option<Runtime>, id: String) -> Identity {
        let own = match self.view {
            CgroupView::Private { pod } => pod.clone(),
            CgroupView::Host => None,
        };
        match (own, runtime) {
            (Some(pod), _) => self.pod(pod, Some((runtime, id))),
            (None, Some(runtime)) => self.container(runtime, id, None, Owner::Root),
            (None, None) => Identity {
                id: Some(id.clone()),
                container_id: Some(id),
                ..Identity::unknown("cgroup_outside_namespace")
            },
        }
    }
}

fn container(runtime: Runtime, id: String, named: Option<Named>) -> Identity {
    let (kind, tenant_kind) = match runtime {
        Runtime::Docker => (Kind::DockerContainer, TenantKind::Docker),
        Runtime::Containerd => (Kind::ContainerdContainer, TenantKind::Containerd),
        Runtime::Crio => (Kind::CrioContainer, TenantKind::Crio),
        Runtime::Podman => (Kind::PodmanContainer, TenantKind::Podman),
        Runtime::Ecs => (Kind::EcsTask, TenantKind::Ecs),
        Runtime::Lxc => (Kind::LxcContainer, TenantKind::Lxc),
    };
    let short = || id.chars().take(12).collect();
    let shown = named.as_ref().map_or_else(short, |named| named.name.clone());
    Identity {
        id: Some(id.clone()),
        named_by: named.as_ref().map(|named| named.from),
        name: named.map(|named| named.name),
        container_id: Some(id),
        runtime: Some(runtime),
        ..Identity::new(kind, Tenant::plain(tenant_kind, &shown))
    }
}

/// A path as shown: cleaned, and longer than a name may be.
fn bounded(path: &str) -> String {
    let mut shown = escape(path);
    shown.truncate(shown.floor_char_boundary(1024));
    shown
}

fn describe(nested: &Place) -> String {
    match nested {
        Place::Pod { uid, .. } => format!("pod {uid}"),
        Place::Job { job, .. } => format!("slurm job {job}"),
        Place::Container { runtime, id, .. } => format!("{} container {}", runtime.as_str(), clean(id)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
