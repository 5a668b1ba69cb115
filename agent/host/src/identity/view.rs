//! Owns where cgroup paths are read from: the host's cgroup namespace, or the agent's own.
//! Refuses a mount that is not the hierarchy's root: its paths would be somebody else's.

use std::{
    collections::{BTreeSet, VecDeque},
    fs::File,
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::PathBuf,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{CgroupView, path, shape};
use crate::{Host, HostError, Namespace, read};

const MAX_MOUNTS: u64 = 4 << 20;
/// Cgroups of a host that are looked through for one of them.
const MAX_CGROUPS: usize = 32_768;
/// Where tenants make cgroups, or containers have theirs: no kubelet of this host is there.
const OTHERS: [&str; 4] = ["docker", "lxc", "slurm", "user.slice"];
/// Levels from the root of a hierarchy to a pod.
const MAX_DEPTH: u32 = 4;
/// The inode of the root of a cgroup hierarchy.
const ROOT_INODE: u64 = 1;

impl Host {
    /// Brings the calling thread, and those it starts from here on, to where the host's cgroup paths can be
    /// read, and says whether that succeeded. It needs the host's PIDs and `CAP_SYS_ADMIN`.
    pub fn enter_cgroups(&self) -> CgroupView {
        let initial = |host: &Self| host.in_initial_cgroup_namespace();
        // A recorded host has no namespaces, and its paths were read on the host.
        if initial(self).unwrap_or(true) || (self.join_init().is_ok() && initial(self).unwrap_or(false)) {
            return CgroupView::Host;
        }
        CgroupView::Private { pod: self.own_pod() }
    }

    fn join_init(&self) -> Result<(), HostError> {
        let path = self.path("proc/1/ns/cgroup");
        let failed = |source| HostError::Read { path: path.clone(), source };
        let namespace = File::open(&path).map_err(failed)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::ControlGroup))
            .map_err(|error| failed(error.into()))
    }

    /// The pod that this process is in, by the files that kubelet mounts into it.
    fn own_pod(&self) -> Option<String> {
        let mounts = read::text(&self.path("proc/self/mountinfo"), MAX_MOUNTS).ok()?;
        mounts.lines().find_map(|line| {
            let root = line.split(' ').nth(3)?;
            let (uid, rest) = root.split_once("/pods/")?.1.split_once('/')?;
            let kubelets = ["etc-hosts", "volumes/", "containers/", "volume-subpaths/"];
            kubelets.iter().any(|part| rest.starts_with(part)).then(|| shape::pod_uid(uid))?
        })
    }

    /// The path of a cgroup of the unified hierarchy by the id that the kernel gives it. Walks the hierarchy,
    /// so it is for what no path says.
    pub fn cgroup_by_id(&self, id: u64) -> Option<String> {
        let root = ["sys/fs/cgroup", "sys/fs/cgroup/unified"].into_iter().map(|root| self.path(root)).find(
            |root| {
                root.join("cgroup.procs").exists()
                    && root.metadata().is_ok_and(|metadata| metadata.ino() == ROOT_INODE)
            },
        )?;
        let mut waiting = VecDeque::from([String::new()]);
        let mut seen = 0;
        while let Some(path) = waiting.pop_front() {
            for entry in std::fs::read_dir(root.join(path.trim_start_matches('/'))).ok()?.flatten() {
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                let Ok(name) = entry.file_name().into_string() else { continue };
                let below = format!("{path}/{name}");
                if entry.metadata().is_ok_and(|metadata| metadata.ino() == id) {
                    return Some(below);
                }
                seen += 1;
                if seen > MAX_CGROUPS {
                    return None;
                }
                waiting.push_back(below);
            }
        }
        None
    }

    /// Whether hierarchies of version 1 are used beside the unified one.
    pub fn has_cgroup_v1(&self) -> bool {
        !self.path("sys/fs/cgroup/cgroup.controllers").exists()
    }

    /// UIDs of the pods that have cgroups here; `None` where no hierarchy can be read.
    pub fn live_pods(&self) -> Option<BTreeSet<String>> {
        let roots =
            ["", "unified", "memory", "systemd"].map(|root| self.path(&format!("sys/fs/cgroup/{root}")));
        let roots: Vec<PathBuf> =
            roots.into_iter().filter(|root| root.join("cgroup.procs").exists()).collect();
        if roots.is_empty() {
            return None;
        }
        let mut pods = BTreeSet::new();
        // With how deep it is, and whether kubelet's own cgroup is above it.
        let mut waiting: VecDeque<(PathBuf, u32, bool)> =
            roots.into_iter().map(|root| (root, 0, false)).collect();
        while let Some((directory, depth, below)) = waiting.pop_front() {
            for name in read::names_in(&directory, MAX_CGROUPS) {
                let slice = shape::colon_form(&name).map_or(name.as_str(), |(slice, ..)| slice);
                let stem = slice.strip_suffix(shape::SLICE).unwrap_or(slice);
                let uid = match stem.rsplit_once("-pod") {
                    Some((parent, uid)) if parent.contains("kubepods") => shape::pod_uid(uid),
                    _ if below => stem.strip_prefix("pod").and_then(shape::pod_uid),
                    _ => None,
                };
                let kubelets = below || name.contains("kubepods");
                // Kubelet's root can be below any cgroup, and, with the wrong driver, below the unit of its runtime.
                let inner = name.contains("kubepods")
                    || name.starts_with("kubelet")
                    || (below && matches!(name.as_str(), "burstable" | "besteffort"))
                    || (depth == 0 && !OTHERS.contains(&name.as_str()) && !name.starts_with("lxc."))
                    || (depth == 1 && path::is_runtime(&name));
                if let Some(uid) = uid {
                    pods.insert(uid);
                } else if inner && depth < MAX_DEPTH {
                    waiting.push_back((directory.join(name), depth + 1, kubelets));
                }
            }
        }
        Some(pods)
    }

    /// Whether cgroup paths are shown from the host's root.
    pub fn in_initial_cgroup_namespace(&self) -> Result<bool, HostError> {
        // That of the calling thread: joining another changes only that one.
        Ok(self.own_namespace(Namespace::Cgroup)? == INITIAL_CGROUP)
    }
}

/// Inode that the kernel gives to its first cgroup namespace (`include/uapi/linux/nsfs.h`).
const INITIAL_CGROUP: u64 = 0xEFFF_FFFB;

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn live_view_is_one_of_the_two_and_says_so_again() {
        let host = Host::live();
        let view = host.enter_cgroups();
        assert_eq!(view == CgroupView::Host, host.in_initial_cgroup_namespace().unwrap());
        assert_eq!(view, host.enter_cgroups());
    }

    #[test]
    fn c09_pods_are_found_wherever_kubelet_may_put_them_and_nowhere_else() {
        let root = tempfile::tempdir().unwrap();
        let uid = |number: u32| format!("6a1b2c3d-0000-4444-8888-{number:012}");
        let escaped = |number: u32| uid(number).replace('-', "_");
        let id = "0123456789abcdef".repeat(4);
        for path in [
            format!("kubepods/burstable/pod{}/{id}", uid(1)),
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice", escaped(2)),
            format!("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{}.slice", escaped(3)),
            format!("mycluster/kubepods/besteffort/pod{}", uid(4)),
            format!(
                "a.slice/a-kubepods.slice/a-kubepods-besteffort.slice/a-kubepods-besteffort-pod{}.slice",
                escaped(5)
            ),
            format!("system.slice/containerd.service/kubepods-pod{}.slice:cri-containerd:{id}", escaped(6)),
            format!("system.slice/k3s.service/kubepods/burstable/pod{}", uid(7)),
            // Whoever was given a cgroup below these can make any name in it.
            format!("docker/{id}/kubepods/burstable/pod{}", uid(90)),
            format!("lxc.payload.web/kubepods/pod{}", uid(91)),
            format!("system.slice/evil.service/kubepods/pod{}", uid(92)),
            format!("user.slice/user-1000.slice/kubepods/pod{}", uid(93)),
            format!("mycluster/pod{}", uid(94)),
        ] {
            fs::create_dir_all(root.path().join("sys/fs/cgroup").join(path)).unwrap();
        }
        fs::write(root.path().join("sys/fs/cgroup/cgroup.procs"), "").unwrap();
        let live = Host::at(root.path()).live_pods().unwrap();
        assert_eq!(live, (1..=7).map(uid).collect());
        assert_eq!(Host::at(root.path().join("x")).live_pods(), None);
    }

    #[test]
    fn c88_the_readers_own_pod_is_known_by_its_mounts() {
        const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/thread-self/ns")).unwrap();
        fs::create_dir_all(root.path().join("proc/self")).unwrap();
        symlink("cgroup:[4026532841]", root.path().join("proc/thread-self/ns/cgroup")).unwrap();
        let line =
            format!("700 600 8:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw\n");
        fs::write(root.path().join("proc/self/mountinfo"), format!("1 0 0:1 / / rw - overlay o rw\n{line}"))
            .unwrap();
        let view = Host::at(root.path()).enter_cgroups();
        assert_eq!(view, CgroupView::Private { pod: Some(UID.into()) });
    }

    #[test]
    fn c88_live_cgroups_are_found_by_id() {
        let host = Host::live();
        let unified = host.path("sys/fs/cgroup/unified");
        let root = if unified.exists() { unified } else { host.path("sys/fs/cgroup") };
        let path = root.join(format!("cotenant-view-{}", std::process::id()));
        if fs::create_dir(&path).is_err() {
            eprintln!("no cgroup can be made here: not tested");
            return;
        }
        let id = path.metadata().unwrap().ino();
        let found = host.cgroup_by_id(id);
        fs::remove_dir(&path).unwrap();
        assert_eq!(
            found.as_deref(),
            path.file_name().and_then(|name| name.to_str()).map(|name| format!("/{name}")).as_deref()
        );
        assert_eq!(host.cgroup_by_id(u64::MAX), None);
    }
}
