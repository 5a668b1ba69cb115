//! Owns where this process stands: which cgroup hierarchies, which doors of a cluster, and whether the tree is alive.
//! Refuses to knock at the doors: asking kubelet is `kubelet`'s.

use std::{fs, path::PathBuf};

use crate::{Host, KubeletConfig, read};

const LOGS: &str = "var/log/pods";
const LIMIT: u64 = 4096;

/// Which hierarchies hold this host's processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupMode {
    V1,
    V2,
    /// Version 2 beside the controllers of version 1.
    Hybrid,
    /// None is mounted here.
    #[default]
    Absent,
}

impl CgroupMode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::Hybrid => "hybrid",
            Self::Absent => "absent",
        }
    }
}

/// What of Kubernetes can be reached from here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Something says that this is a node: kubelet's directory, or pods' cgroups.
    pub is_node: bool,
    /// Kubelet's pod-resources socket, if it is there.
    pub pod_resources: Option<PathBuf>,
    /// The first container runtime's socket that is there.
    pub runtime: Option<PathBuf>,
    /// Whether `/var/log/pods` can be listed.
    pub logs: bool,
}

impl Host {
    pub fn cgroup_mode(&self) -> CgroupMode {
        let there = |path: &str| self.path(&format!("sys/fs/cgroup/{path}")).exists();
        if there("cgroup.controllers") {
            CgroupMode::V2
        } else if there("unified/cgroup.procs") {
            CgroupMode::Hybrid
        } else if ["memory", "systemd", "devices", "cpu,cpuacct"].iter().any(|name| there(name)) {
            CgroupMode::V1
        } else {
            CgroupMode::Absent
        }
    }

    pub fn cluster(&self) -> Cluster {
        let KubeletConfig { podresources, runtimes, .. } = KubeletConfig::of(self);
        let logs = fs::read_dir(self.path(LOGS)).is_ok();
        let pods = self.live_pods().is_some_and(|pods| !pods.is_empty());
        Cluster {
            is_node: logs || pods || self.path("var/lib/kubelet").exists(),
            pod_resources: Some(podresources).filter(|socket| socket.exists()),
            runtime: runtimes.into_iter().find(|socket| socket.exists()),
            logs,
        }
    }

    /// Whether this tree is the running kernel's, and not one that was recorded.
    pub fn is_running(&self) -> bool {
        let boot = |host: &Self| read::text(&host.path("proc/sys/kernel/random/boot_id"), LIMIT).ok();
        boot(self).is_some_and(|id| boot(&Self::live()) == Some(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(paths: &[&str]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for path in paths {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let host = Host::at(root.path());
        (root, host)
    }

    #[test]
    fn the_mode_is_what_is_mounted() {
        for (paths, mode) in [
            (&["sys/fs/cgroup/cgroup.controllers"][..], CgroupMode::V2),
            (&["sys/fs/cgroup/unified/cgroup.procs", "sys/fs/cgroup/memory/tasks"], CgroupMode::Hybrid),
            (&["sys/fs/cgroup/memory/tasks"], CgroupMode::V1),
            (&[], CgroupMode::Absent),
        ] {
            assert_eq!(tree(paths).1.cgroup_mode(), mode);
        }
    }

    #[test]
    fn a_node_of_a_cluster_is_known_by_what_kubelet_leaves() {
        assert_eq!(tree(&[]).1.cluster(), Cluster::default());
        let (_root, host) = tree(&["var/lib/kubelet/config.yaml", "run/k3s/containerd/containerd.sock"]);
        let cluster = host.cluster();
        assert!(cluster.is_node && !cluster.logs && cluster.pod_resources.is_none());
        assert_eq!(cluster.runtime, Some(host.path("run/k3s/containerd/containerd.sock")));
        let (_root, host) = tree(&["var/log/pods/a_b_c/0.log"]);
        assert!(host.cluster().is_node && host.cluster().logs);
    }

    #[test]
    fn only_the_running_kernels_tree_is_alive() {
        assert!(Host::live().is_running());
        let (root, host) = tree(&["proc/sys/kernel/random/boot_id"]);
        assert!(!host.is_running());
        let own = fs::read("/proc/sys/kernel/random/boot_id").unwrap();
        fs::write(root.path().join("proc/sys/kernel/random/boot_id"), own).unwrap();
        assert!(host.is_running(), "the host's own tree, mounted elsewhere");
        assert!(!Host::at(root.path().join("none")).is_running());
    }
}
