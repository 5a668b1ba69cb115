//! Owns who a process belongs to, as a name that a person on call recognises.
//! Refuses to guess: what is not recognised is `unknown` with a reason, never somebody else.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TenantKind {
    Pod,
    Docker,
    Podman,
    Containerd,
    Crio,
    Ecs,
    Lxc,
    Systemd,
    Slurm,
    User,
    System,
    /// Tenants past the cap, folded together.
    Other,
    Unknown,
    /// A pod that a label of its own gives to a team.
    Team,
}

impl TenantKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pod => "pod",
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Containerd => "containerd",
            Self::Crio => "crio",
            Self::Ecs => "ecs",
            Self::Lxc => "lxc",
            Self::Systemd => "systemd",
            Self::Slurm => "slurm",
            Self::User => "user",
            Self::System => "system",
            Self::Other => "other",
            Self::Unknown => "unknown",
            Self::Team => "team",
        }
    }

    /// Whether the label set has a namespace, a pod and a container.
    pub const fn is_kubernetes(self) -> bool {
        matches!(self, Self::Pod | Self::Team)
    }
}

/// The tenant label set. Equal values are the same tenant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant {
    /// `pod:<namespace>/<pod>`, `team:<label>`, `docker:<name>`, `systemd:<unit>`, `user:<name>`, `system:<what>`, `other`…
    pub name: String,
    pub kind: TenantKind,
    pub namespace: Option<String>,
    pub pod: Option<String>,
    pub container: Option<String>,
}

impl Tenant {
    /// A tenant without Kubernetes labels.
    pub fn plain(kind: TenantKind, name: &str) -> Self {
        let name = match kind {
            TenantKind::Other => "other".to_owned(),
            _ => format!("{}:{name}", kind.as_str()),
        };
        Self { name, kind, namespace: None, pod: None, container: None }
    }

    /// The agent itself: what it does to tenants is to be seen as its own doing.
    pub fn agent() -> Self {
        Self::plain(TenantKind::System, "cotenant")
    }

    /// The MPS server: it works for its clients and belongs to none of them.
    pub fn mps_server() -> Self {
        Self::plain(TenantKind::System, "mps-server")
    }

    /// Where the tenants past the cap go.
    pub fn other() -> Self {
        Self::plain(TenantKind::Other, "")
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.name)
    }
}
