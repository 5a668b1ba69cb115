//! Owns the identity of a living process: what `/proc` says about it, read while it is the same process.
//! Refuses its environment and its name, which are the process's own words.

use std::os::unix::fs::MetadataExt;

use super::{
    CgroupView, Identity, Kind, identify,
    path::{self, Found, Place},
    shape,
};
use crate::{Host, HostError, names::Names};

/// Ancestors that are asked for a Slurm step.
const MAX_ANCESTORS: usize = 64;

/// A process at one moment.
#[derive(Clone, Debug)]
pub struct Observed {
    /// What makes its PID an identity.
    pub start: u64,
    /// The process's own UID, whosesoever session it is in.
    pub uid: u32,
    pub identity: Identity,
}

impl Host {
    /// Who the process is. An error when it was not there all along.
    pub fn identity(&self, pid: u32, view: &CgroupView, names: &dyn Names) -> Result<Observed, HostError> {
        let start = self.start(pid)?;
        let cgroup = self.cgroup(pid)?;
        let uid = self.uid(pid)?;
        let mut identity = identify(&cgroup, Some(uid), view, names);
        if let Some(owner) = path::place(&cgroup).and_then(|found| self.cgroup_owner(&found)) {
            let path = identity.path.take();
            let asked = super::Asked { uid: Some(uid), view, names };
            identity = Identity { path, reason: Some("cgroup_delegated"), ..asked.user(owner) };
        }
        // Without cgroups of its own (proctrack/linuxproc) Slurm leaves jobs where slurmd is.
        let shared = match identity.kind {
            Kind::Host | Kind::Unknown => true,
            Kind::SystemdUnit => identity.unit.as_deref() == Some("slurmd.service"),
            _ => false,
        };
        if shared && let Some((job, step)) = self.slurm_step_above(pid) {
            let job = Place::Job { job, step: Some(step), uid: None };
            let path = identity.path.take();
            identity = Identity {
                uid: Some(uid),
                path,
                named_by: Some("slurmstepd above it"),
                ..super::Asked { uid: Some(uid), view, names }.place(job)
            };
        }
        // A PID that somebody else has by now would mix two processes.
        if self.start(pid)? != start {
            return Err(HostError::Malformed {
                path: self.process_file(pid, "stat"),
                what: "the process changed while it was read",
            });
        }
        Ok(Observed { start, uid, identity })
    }

    /// The user to whom somebody gave a cgroup above the one that claims to be a tenant's: whatever is below it can be
    /// that user's invention. Of the host's own hierarchies.
    fn cgroup_owner(&self, found: &Found<'_>) -> Option<u32> {
        if matches!(found.place, Place::Session { .. } | Place::Plain(_) | Place::Root | Place::Outside)
            || found.path.split('/').any(|segment| segment == "..")
        {
            return None;
        }
        let hierarchy = found.hierarchy.strip_prefix("name=").unwrap_or(found.hierarchy);
        let mut directory = if found.unified {
            let unified = self.path("sys/fs/cgroup/unified");
            if unified.exists() { unified } else { self.path("sys/fs/cgroup") }
        } else {
            self.path(&format!("sys/fs/cgroup/{hierarchy}"))
        };
        found.path.split('/').filter(|segment| !matches!(*segment, "" | ".")).take(found.depth).find_map(
            |segment| {
                directory.push(segment);
                // Where it cannot be seen, the path is all there is.
                directory.metadata().ok().map(|metadata| metadata.uid()).filter(|uid| *uid != 0)
            },
        )
    }

    /// The step whose `slurmstepd`, a process of root, is an ancestor. It writes `slurmstepd: [job.step]` over its
    /// command line; nobody but root can make a process of root that says so.
    fn slurm_step_above(&self, pid: u32) -> Option<(String, String)> {
        let mut pid = pid;
        for _ in 0..MAX_ANCESTORS {
            pid = self.parent(pid).ok().filter(|parent| *parent > 1)?;
            if let Some(step) = self.slurm_step(pid) {
                return Some(step);
            }
        }
        None
    }

    /// The job and the step of a process that is root's `slurmstepd`.
    pub(crate) fn slurm_step(&self, pid: u32) -> Option<(String, String)> {
        // Debian calls it slurmstepd-wlm.
        if !self.comm(pid).ok()?.starts_with("slurmstepd") || self.uid(pid).ok()? != 0 {
            return None;
        }
        let line = self.command_line(pid).ok()?;
        let (job, step) = line.split_once(": [")?.1.split_once(']')?.0.split_once('.')?;
        let step = shape::step(&format!("step_{step}"))?.to_owned();
        Some((shape::number(job)?.to_owned(), step))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::HostNames;

    /// A process as three files: `(pid, parent, comm, uid, command line, cgroup)`.
    fn host(processes: &[(u32, u32, &str, u32, &str, &str)]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for (pid, parent, comm, uid, line, cgroup) in processes {
            let directory = root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&directory).unwrap();
            let rest = (5..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
            fs::write(directory.join("stat"), format!("{pid} ({comm}) S {parent} {rest}")).unwrap();
            fs::write(directory.join("comm"), format!("{comm}\n")).unwrap();
            fs::write(directory.join("status"), format!("Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"))
                .unwrap();
            fs::write(directory.join("cmdline"), line).unwrap();
            fs::write(directory.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
        }
        let host = Host::at(root.path());
        (root, host)
    }

    fn tenant(host: &Host, pid: u32) -> String {
        let names = HostNames::new(host.clone());
        host.identity(pid, &CgroupView::Host, &names).unwrap().identity.tenant.name
    }

    #[test]
    fn a_job_without_cgroups_is_known_by_roots_slurmstepd() {
        let (_root, host) = host(&[
            (10, 1, "slurmstepd", 0, "slurmstepd: [42.batch]\0", "/system.slice/slurmd.service"),
            (11, 10, "slurm_script", 1000, "/bin/sh\0", "/system.slice/slurmd.service"),
            (12, 11, "python", 1000, "python\0", "/"),
            // As Debian's 22.05 was seen to look.
            (13, 1, "slurmstepd-wlm", 0, "slurmstepd-wlm: [1.batch]           \0", "/"),
            (14, 13, "sleep", 0, "sleep\0", "/"),
            // A user's process may call itself anything.
            (20, 1, "slurmstepd", 1000, "slurmstepd: [42.batch]\0", "/"),
            (21, 20, "python", 1000, "python\0", "/"),
            // slurmd itself.
            (9, 1, "slurmd", 0, "slurmd\0", "/system.slice/slurmd.service"),
        ]);
        assert_eq!(tenant(&host, 11), "slurm:42");
        assert_eq!(tenant(&host, 12), "slurm:42");
        assert_eq!(tenant(&host, 14), "slurm:1");
        assert_eq!(tenant(&host, 21), "user:1000");
        assert_eq!(tenant(&host, 9), "systemd:slurmd.service");
    }

    #[test]
    fn what_is_below_a_cgroup_that_a_user_was_given_is_that_users() {
        const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        if !rustix::process::getuid().is_root() {
            eprintln!("not root: nothing can be given to another user here");
            return;
        }
        let forged = format!("/mine/kubepods/pod6a1b2c3d-0000-4444-8888-123456789abc/{ID}");
        let (root, host) = host(&[
            (10, 1, "python", 1000, "python\0", &forged),
            (11, 1, "python", 1000, "python\0", &format!("/docker/{ID}")),
        ]);
        for path in [&forged, &format!("/docker/{ID}")] {
            fs::create_dir_all(root.path().join(format!("sys/fs/cgroup{path}"))).unwrap();
        }
        assert_eq!(tenant(&host, 10), "pod:6a1b2c3d-0000-4444-8888-123456789abc");
        let mine = root.path().join("sys/fs/cgroup/mine");
        std::os::unix::fs::chown(&mine, Some(1000), None).unwrap();
        assert_eq!(tenant(&host, 10), "user:1000");
        // A container's own cgroup may be given to the user in it.
        let own = root.path().join(format!("sys/fs/cgroup/docker/{ID}"));
        std::os::unix::fs::chown(own, Some(1000), None).unwrap();
        assert_eq!(tenant(&host, 11), "docker:0123456789ab");
    }

    #[test]
    fn live_self_has_an_identity_with_the_path_it_came_from() {
        let host = Host::live();
        let view = host.enter_cgroups();
        let Observed { start, identity, .. } =
            host.identity(std::process::id(), &view, &HostNames::new(host.clone())).unwrap();
        assert_eq!(start, host.start(std::process::id()).unwrap());
        assert!(identity.path.is_some() && identity.uid.is_some());
        assert!(host.identity(u32::MAX, &view, &HostNames::new(host.clone())).unwrap_err().is_gone());
    }
}
