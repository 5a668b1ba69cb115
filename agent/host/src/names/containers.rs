//! Owns the names of containers outside Kubernetes, from the stores of Docker, Podman and containerd.
//! Refuses another's store: a user's container is named by that user's store, root's by root's.

use std::collections::BTreeMap;

use serde::{Deserialize, de::DeserializeOwned};

use super::{HostNames, Named, known};
use crate::identity::{Owner, Runtime};
use crate::read;

const MAX_CONFIG: u64 = 4 << 20;
const MAX_NAMESPACES: usize = 64;
/// Bundles of running containers, by containerd's namespaces.
const TASKS: &str = "run/containerd/io.containerd.runtime.v2.task";
/// containers/storage keeps each driver's containers apart.
pub(super) const STORAGE_DRIVERS: [&str; 4] = ["overlay", "vfs", "btrfs", "zfs"];

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(rename = "Name", default)]
    name: String,
    #[serde(rename = "Config", default)]
    config: DockerInner,
}

#[derive(Default, Deserialize)]
struct DockerInner {
    #[serde(rename = "Labels", default)]
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct DockerHost {
    #[serde(rename = "CgroupParent", default)]
    cgroup_parent: String,
}

#[derive(Deserialize)]
pub(super) struct DaemonConfig {
    #[serde(rename = "data-root")]
    pub(super) data_root: Option<String>,
}

/// An entry of containers/storage, which Podman and CRI-O share.
#[derive(Deserialize)]
struct Stored {
    id: String,
    names: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
struct Spec {
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    linux: SpecLinux,
}

#[derive(Default, Deserialize)]
struct SpecLinux {
    #[serde(rename = "cgroupsPath", default)]
    cgroups_path: String,
}

impl HostNames {
    pub(super) fn stored(&self, runtime: Runtime, id: &str, owner: &Owner) -> Option<Named> {
        let (name, from) = match (runtime, owner) {
            (Runtime::Docker, Owner::Root) => (self.docker(id)?.name, "docker's config.v2.json"),
            (Runtime::Docker, Owner::User(uid)) => {
                let path = format!("{}/.local/share/docker/containers/{id}/config.v2.json", self.home(*uid)?);
                (self.json::<DockerConfig>(&path, Some(*uid))?.name, "the user's docker store")
            }
            (Runtime::Podman | Runtime::Crio, Owner::Root) => {
                (self.storage(&self.graph_root(), id, None)?, "containers/storage")
            }
            (Runtime::Podman, Owner::User(uid)) => {
                let root = format!("{}/.local/share/containers/storage", self.home(*uid)?);
                (self.storage(&root, id, Some(*uid))?, "the user's containers/storage")
            }
            (Runtime::Podman, Owner::Unit(unit)) => {
                let root = self.graph_root();
                let spec: Spec = STORAGE_DRIVERS.iter().find_map(|driver| {
                    self.json(&format!("{root}/{driver}-containers/{id}/userdata/config.json"), None)
                })?;
                // Podman itself put this container below this unit.
                spec.linux.cgroups_path.split('/').find(|segment| segment == unit)?;
                (self.storage(&root, id, None)?, "containers/storage")
            }
            (Runtime::Containerd, Owner::Root) => (self.containerd(id)?, "containerd's bundle"),
            _ => return None,
        };
        Some(Named { name: known(name.trim_start_matches('/'))?, from })
    }

    /// A container of a namespace of containerd's that has the cgroup's name: `nerdctl --namespace` with cgroupfs.
    pub(super) fn containerd_below(&self, id: &str, parent: &str) -> Option<Named> {
        let namespace = parent.strip_prefix('/').filter(|name| !name.contains('/'))?;
        let spec: Spec = self.json(&format!("{TASKS}/{namespace}/{id}/config.json"), None)?;
        if spec.linux.cgroups_path != format!("{parent}/{id}") {
            return None;
        }
        let called = spec.annotations.get("nerdctl/name").and_then(|name| known(name));
        let name = called.unwrap_or_else(|| id.chars().take(12).collect());
        Some(Named { name, from: "containerd's bundle" })
    }

    /// A container that Docker was told to put below `parent`.
    pub(super) fn docker_below(&self, id: &str, parent: &str) -> Option<Named> {
        let told = self.docker_parent(id)?;
        if told.trim_matches('/') != parent.trim_matches('/') {
            return None;
        }
        self.stored(Runtime::Docker, id, &Owner::Root)
    }

    /// Whether Docker was told to put it below a pod.
    pub(super) fn docker_is_podded(&self, id: &str) -> bool {
        self.docker_parent(id).is_some_and(|parent| parent.contains("kubepods"))
    }

    pub(super) fn docker_labels(&self, id: &str) -> Option<BTreeMap<String, String>> {
        self.docker(id)?.config.labels
    }

    fn docker_parent(&self, id: &str) -> Option<String> {
        Some(self.docker_file::<DockerHost>(id, "hostconfig.json")?.cgroup_parent)
    }

    fn docker(&self, id: &str) -> Option<DockerConfig> {
        self.docker_file(id, "config.v2.json")
    }

    /// A file of a container's, from whichever root's Docker has it.
    fn docker_file<T: DeserializeOwned>(&self, id: &str, file: &str) -> Option<T> {
        let within = |root: &str| self.json(&format!("{root}/containers/{id}/{file}"), None);
        within(&self.docker_root())
            .or_else(|| within("var/snap/docker/common/var-lib-docker"))
            .or_else(|| within(&self.dockerd_root()?))
    }

    fn docker_root(&self) -> String {
        self.json::<DaemonConfig>("etc/docker/daemon.json", None)
            .and_then(|config| config.data_root)
            .unwrap_or_else(|| "var/lib/docker".to_owned())
    }

    /// Where Podman keeps root's containers.
    fn graph_root(&self) -> String {
        let text = read::text(&self.host.path("etc/containers/storage.conf"), MAX_CONFIG).unwrap_or_default();
        let value = |line: &str| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "graphroot").then(|| value.trim().trim_matches('"').to_owned())
        };
        text.lines().find_map(value).unwrap_or_else(|| "var/lib/containers/storage".to_owned())
    }

    fn storage(&self, root: &str, id: &str, owner: Option<u32>) -> Option<String> {
        // Those of `--rm` are in the second file.
        let files = STORAGE_DRIVERS
            .iter()
            .flat_map(|driver| ["containers.json", "volatile-containers.json"].map(|file| (driver, file)));
        files.into_iter().find_map(|(driver, file)| {
            let listed: Vec<Stored> = self.json(&format!("{root}/{driver}-containers/{file}"), owner)?;
            listed.into_iter().find(|stored| stored.id == id)?.names?.into_iter().next()
        })
    }

    /// What `nerdctl` called it, by containerd's namespaces.
    fn containerd(&self, id: &str) -> Option<String> {
        let namespaces = read::names_in(&self.host.path(TASKS), MAX_NAMESPACES);
        namespaces.iter().filter(|namespace| *namespace != "k8s.io").find_map(|namespace| {
            let mut spec: Spec = self.json(&format!("{TASKS}/{namespace}/{id}/config.json"), None)?;
            spec.annotations.remove("nerdctl/name")
        })
    }

    /// `owner`: in a user's home any file can be a link to somebody else's.
    pub(super) fn json<T: DeserializeOwned>(&self, path: &str, owner: Option<u32>) -> Option<T> {
        let path = self.host.path(path);
        let content = match owner {
            Some(uid) => read::bytes_of(&path, MAX_CONFIG, uid),
            None => read::bytes(&path, MAX_CONFIG),
        };
        serde_json::from_slice(&content.ok()?).ok()
    }
}
