//! Owns what `/proc` says about one process, and what the agent itself costs.
//! Refuses identity by PID alone: a PID goes with its start time, since PIDs are reused.

use std::path::PathBuf;

use procfs::FromRead;
use procfs::process::Stat;

use crate::{Host, HostError, read};

/// `/proc` files about one process are a page or so.
const LIMIT: u64 = 64 << 10;
/// A longer environment is not read.
const ENVIRON_LIMIT: u64 = 1 << 20;
/// Controllers times the longest path.
const CGROUP_LIMIT: u64 = 256 << 10;
/// The driver's nodes are opened early; a process that hides them behind more is not looked through.
const MAX_DESCRIPTORS: usize = 4096;

/// Inode that the kernel gives to its first namespace of PIDs (`include/uapi/linux/nsfs.h`).
pub(crate) const INITIAL_PID: u64 = 0xEFFF_FFFC;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    Pid,
    Cgroup,
    Mount,
}

impl Namespace {
    const fn file(self) -> &'static str {
        match self {
            Self::Pid => "pid",
            Self::Cgroup => "cgroup",
            Self::Mount => "mnt",
        }
    }
}

/// What the agent has used so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfCost {
    pub cpu_seconds: f64,
    pub resident_bytes: u64,
}

impl Host {
    /// PIDs of all processes, not threads, in no order.
    pub fn processes(&self) -> Result<Vec<u32>, HostError> {
        let path = self.path("proc");
        let entries = std::fs::read_dir(&path).map_err(|source| HostError::Read { path, source })?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }

    /// Field 22 of `stat`: clock ticks since boot.
    pub fn start(&self, pid: u32) -> Result<u64, HostError> {
        Ok(self.stat(&pid.to_string())?.starttime)
    }

    /// Whether the process that started at `start` still has this PID. A zombie still does.
    pub fn alive(&self, pid: u32, start: u64) -> bool {
        self.start(pid).is_ok_and(|now| now == start)
    }

    pub fn comm(&self, pid: u32) -> Result<String, HostError> {
        let comm = read::text(&self.process_file(pid, "comm"), LIMIT)?;
        Ok(comm.trim_end_matches('\n').to_owned())
    }

    /// The program file as the kernel names it, ` (deleted)` included.
    pub fn exe(&self, pid: u32) -> Result<PathBuf, HostError> {
        let path = self.process_file(pid, "exe");
        std::fs::read_link(&path).map_err(|source| HostError::Read { path, source })
    }

    /// The real UID.
    pub fn uid(&self, pid: u32) -> Result<u32, HostError> {
        let path = self.process_file(pid, "status");
        let status = read::text(&path, LIMIT)?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next()?.parse().ok())
            .ok_or(HostError::Malformed { path, what: "no Uid line" })
    }

    /// The PID of the parent; 0 above the first process.
    pub(crate) fn parent(&self, pid: u32) -> Result<u32, HostError> {
        Ok(self.stat(&pid.to_string())?.ppid.cast_unsigned())
    }

    /// The command line as the process shows it, its parts joined by spaces.
    pub(crate) fn command_line(&self, pid: u32) -> Result<String, HostError> {
        let line = read::text(&self.process_file(pid, "cmdline"), LIMIT)?;
        Ok(line.trim_end_matches('\0').replace('\0', " "))
    }

    /// What the process's environment says under these names. Its own words, for people; never an identity.
    pub fn says(&self, pid: u32, names: &[&str]) -> Vec<(String, String)> {
        let environment = read::bytes(&self.process_file(pid, "environ"), ENVIRON_LIMIT).unwrap_or_default();
        let pairs = environment.split(|byte| *byte == 0).filter_map(|pair| {
            let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
            names.contains(&name).then(|| (name.to_owned(), crate::names::clean(value)))
        });
        pairs.take(names.len()).collect()
    }

    /// The inode of a namespace that the process is in.
    pub fn namespace(&self, pid: u32, namespace: Namespace) -> Result<u64, HostError> {
        self.namespace_of(&pid.to_string(), namespace)
    }

    /// Whether the agent sees the host's PIDs. In any other namespace NVML's process lists mean nothing.
    pub fn in_initial_pid_namespace(&self) -> Result<bool, HostError> {
        Ok(self.namespace_of("self", Namespace::Pid)? == INITIAL_PID)
    }

    /// `/proc/PID/cgroup`, for [`crate::identify`].
    pub fn cgroup(&self, pid: u32) -> Result<String, HostError> {
        Ok(read::exact(&read::bytes(&self.process_file(pid, "cgroup"), CGROUP_LIMIT)?))
    }

    /// CPU time and resident memory of the agent itself.
    pub fn self_cost(&self) -> Result<SelfCost, HostError> {
        let stat = self.stat("self")?;
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        Ok(SelfCost {
            cpu_seconds: (stat.utime + stat.stime) as f64 / ticks,
            resident_bytes: stat.rss * rustix::param::page_size() as u64,
        })
    }

    /// Processes that have a device node of the NVIDIA driver open: who may hold memory that no list names (C48).
    ///
    /// Walks every descriptor of the host, so it is for when something does not add up.
    pub fn device_holders(&self) -> Result<Vec<u32>, HostError> {
        let holds = |pid: &u32| {
            let directory = self.process_file(*pid, "fd");
            read::names_in(&directory, MAX_DESCRIPTORS).iter().any(|name| {
                std::fs::read_link(directory.join(name))
                    .is_ok_and(|to| to.to_str().is_some_and(|to| to.starts_with("/dev/nvidia")))
            })
        };
        Ok(self.processes()?.into_iter().filter(holds).collect())
    }

    pub(crate) fn process_file(&self, pid: u32, file: &str) -> PathBuf {
        self.path(&format!("proc/{pid}/{file}"))
    }

    fn stat(&self, pid: &str) -> Result<Stat, HostError> {
        let path = self.path(&format!("proc/{pid}/stat"));
        let content = read::bytes(&path, LIMIT)?;
        Stat::from_read(content.as_slice())
            .map_err(|_| HostError::Malformed { path, what: "not a stat line" })
    }

    /// Of the calling thread.
    pub(crate) fn own_namespace(&self, namespace: Namespace) -> Result<u64, HostError> {
        self.namespace_of("thread-self", namespace)
    }

    fn namespace_of(&self, pid: &str, namespace: Namespace) -> Result<u64, HostError> {
        let path = self.path(&format!("proc/{pid}/ns/{}", namespace.file()));
        let link =
            std::fs::read_link(&path).map_err(|source| HostError::Read { path: path.clone(), source })?;
        link.to_str()
            .and_then(|link| link.split_once(":[")?.1.strip_suffix(']')?.parse().ok())
            .ok_or(HostError::Malformed { path, what: "not a namespace link" })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn c48_who_has_the_driver_open_is_named_when_no_list_does() {
        let root = tempfile::tempdir().unwrap();
        for (pid, target) in [(11, "/dev/nvidia0"), (12, "/dev/null"), (13, "/dev/nvidia-uvm")] {
            let directory = root.path().join(format!("proc/{pid}/fd"));
            std::fs::create_dir_all(&directory).unwrap();
            std::os::unix::fs::symlink(target, directory.join("3")).unwrap();
        }
        let mut holders = crate::Host::at(root.path()).device_holders().unwrap();
        holders.sort_unstable();
        assert_eq!(holders, [11, 13]);
    }

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn live_self_is_described() {
        let host = Host::live();
        let pid = std::process::id();
        let start = host.start(pid).unwrap();
        assert!(host.alive(pid, start) && !host.alive(pid, start + 1));
        assert!(host.processes().unwrap().contains(&pid));
        assert!(!host.comm(pid).unwrap().is_empty());
        assert!(host.exe(pid).unwrap().is_absolute());
        assert_eq!(host.uid(pid).unwrap(), rustix::process::getuid().as_raw());
        assert!(host.self_cost().unwrap().resident_bytes > 1 << 20);
        assert!(host.cgroup(pid).unwrap().contains(':'));
        assert_eq!(
            host.in_initial_pid_namespace().unwrap(),
            host.namespace(pid, Namespace::Pid).unwrap() == INITIAL_PID
        );
    }

    #[test]
    fn c29_a_foreign_pid_namespace_is_seen() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/self/ns")).unwrap();
        symlink("pid:[4026532841]", root.path().join("proc/self/ns/pid")).unwrap();
        fs::create_dir_all(root.path().join("proc/thread-self/ns")).unwrap();
        symlink("cgroup:[4026531835]", root.path().join("proc/thread-self/ns/cgroup")).unwrap();
        let host = Host::at(root.path());
        assert!(!host.in_initial_pid_namespace().unwrap());
        assert!(host.in_initial_cgroup_namespace().unwrap());
    }

    #[test]
    fn a_hostile_comm_does_not_move_the_fields() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/7")).unwrap();
        let stat =
            format!("7 (a) 1 2 (b) S {}", (4..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" "));
        fs::write(root.path().join("proc/7/stat"), stat).unwrap();
        assert_eq!(Host::at(root.path()).start(7).unwrap(), 22);
    }

    #[test]
    fn an_environment_is_read_by_name_and_cleaned() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/7")).unwrap();
        fs::write(root.path().join("proc/7/environ"), b"SECRET=x\0SLURM_JOB_ID=4\n2\0\xff\0JUNK\0").unwrap();
        let said = Host::at(root.path()).says(7, &["SLURM_JOB_ID", "JUNK"]);
        assert_eq!(said, [("SLURM_JOB_ID".to_owned(), "4\\u{a}2".to_owned())]);
    }

    #[test]
    fn a_process_that_is_gone_says_so() {
        assert!(Host::live().start(u32::MAX).unwrap_err().is_gone());
    }
}
