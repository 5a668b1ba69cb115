//! Owns what a memory cgroup counts of its own out-of-memory kills, on cgroup v1, v2 and hosts with both.
//! Refuses differences: a counter is as it stands, and a cgroup that is gone has none.

use std::path::PathBuf;

use crate::{Host, HostError, read};

/// Where the memory controller may be: cgroup v1, v2, and v2 beside v1 controllers. A controller is in one hierarchy only.
pub(crate) const VERSION_1: &str = "sys/fs/cgroup/memory";
const VERSION_2: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
/// Ten lines at most.
const LIMIT: u64 = 4096;

/// Counts since the cgroup was made; `None` where this kernel does not count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEvents {
    /// Allocations that found the limit reached. On v2 counted at the cgroup whose limit it was and above.
    pub oom: Option<u64>,
    /// Processes killed. On v2 also those in cgroups below, on v1 its own alone.
    pub oom_kill: Option<u64>,
    /// Times that the cgroup was killed as a whole (v2, since Linux 5.17).
    pub oom_group_kill: Option<u64>,
}

impl MemoryEvents {
    /// `memory.events` or `memory.oom_control`; `None` if no line is a name and a number.
    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.parse().ok())
        };
        let is_table = text
            .lines()
            .any(|line| line.split_once(' ').is_some_and(|(_, value)| value.parse::<u64>().is_ok()));
        let events =
            Self { oom: value("oom"), oom_kill: value("oom_kill"), oom_group_kill: value("oom_group_kill") };
        is_table.then_some(events)
    }
}

impl Host {
    /// The kill counts of a memory cgroup, by its path from the hierarchy's root (`/kubepods/…`). `Ok(None)` where there is
    /// no memory controller, or at a root that counts nothing; an error that `is_gone` once the cgroup was removed.
    pub fn memory_events(&self, cgroup: &str) -> Result<Option<MemoryEvents>, HostError> {
        let Some((hierarchy, file)) = self.memory_hierarchy() else { return Ok(None) };
        let below = read::below(&hierarchy, cgroup)?;
        let path = hierarchy.join(below).join(file);
        let text = match read::text(&path, LIMIT) {
            Err(error) if below.is_empty() && error.is_gone() => return Ok(None),
            other => other?,
        };
        let events = MemoryEvents::parse(&text).ok_or(HostError::Malformed { path, what: "no counts" })?;
        Ok(Some(events))
    }

    /// The path of a process's memory cgroup: what the kernel's log and [`Self::memory_events`] call it.
    pub fn memory_cgroup(&self, pid: u32) -> Result<Option<String>, HostError> {
        Ok(memory_path(&self.cgroup(pid)?).map(str::to_owned))
    }

    /// The directory of the hierarchy that has the memory controller, and the file with the counts.
    pub(crate) fn memory_hierarchy(&self) -> Option<(PathBuf, &'static str)> {
        let version_1 = self.path(VERSION_1);
        if version_1.join("memory.oom_control").exists() {
            return Some((version_1, "memory.oom_control"));
        }
        let has_memory = |place: &PathBuf| {
            let controllers = read::text(&place.join("cgroup.controllers"), LIMIT);
            controllers.is_ok_and(|names| names.split_whitespace().any(|name| name == "memory"))
        };
        VERSION_2.iter().map(|place| self.path(place)).find(has_memory).map(|place| (place, "memory.events"))
    }
}

/// `4:memory:/a` of cgroup v1, else `0::/a`.
fn memory_path(cgroups: &str) -> Option<&str> {
    let of = |wanted: &str| {
        cgroups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let controllers = parts.next()?;
            controllers.split(',').any(|name| name == wanted).then(|| parts.next())?
        })
    };
    of("memory").or_else(|| of(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &tempfile::TempDir, file: &str, text: &str) {
        let path = root.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn host() -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        (root, host)
    }

    #[test]
    fn c101_version_2_counts_kills_and_group_kills_apart() {
        let (root, host) = host();
        write(&root, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
        let events = "low 0\nhigh 0\nmax 77\noom 2\noom_kill 3\noom_group_kill 1\n";
        write(&root, "sys/fs/cgroup/kubepods/pod1/memory.events", events);
        // Before Linux 5.17.
        write(&root, "sys/fs/cgroup/old/memory.events", "low 0\nhigh 0\nmax 1\noom 1\noom_kill 1\n");
        let counts = |oom, oom_kill, oom_group_kill| Some(MemoryEvents { oom, oom_kill, oom_group_kill });
        assert_eq!(host.memory_events("/kubepods/pod1").unwrap(), counts(Some(2), Some(3), Some(1)));
        assert_eq!(host.memory_events("/old").unwrap(), counts(Some(1), Some(1), None));
        assert_eq!(host.memory_events("/").unwrap(), None, "the root counts nothing");
        let error = host.memory_events("/kubepods/pod2").unwrap_err();
        assert!(error.is_gone(), "{error}");
    }

    #[test]
    fn version_1_counts_kills_in_its_control_file() {
        let (root, host) = host();
        write(
            &root,
            "sys/fs/cgroup/memory/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 9\n",
        );
        let control = "oom_kill_disable 0\nunder_oom 1\noom_kill 4\n";
        write(&root, "sys/fs/cgroup/memory/docker/a,b=c/memory.oom_control", control);
        // A hybrid host: the unified hierarchy is there, without memory.
        write(&root, "sys/fs/cgroup/unified/cgroup.controllers", "pids\n");
        let kills = |oom_kill| Some(MemoryEvents { oom_kill, ..MemoryEvents::default() });
        assert_eq!(host.memory_events("docker/a,b=c").unwrap(), kills(Some(4)));
        assert_eq!(host.memory_events("/").unwrap(), kills(Some(9)));
    }

    #[test]
    fn a_hybrid_host_may_have_memory_in_version_2() {
        let (root, host) = host();
        assert_eq!(host.memory_events("/x").unwrap(), None, "no memory controller");
        write(&root, "sys/fs/cgroup/unified/cgroup.controllers", "memory\n");
        write(&root, "sys/fs/cgroup/unified/x/memory.events", "oom 0\noom_kill 0\n");
        let events = host.memory_events("/x").unwrap().unwrap();
        assert_eq!((events.oom, events.oom_kill, events.oom_group_kill), (Some(0), Some(0), None));
    }

    #[test]
    fn paths_and_files_that_cannot_be_are_refused() {
        let (root, host) = host();
        write(&root, "sys/fs/cgroup/cgroup.controllers", "memory\n");
        write(&root, "sys/fs/cgroup/x/memory.events", "\n\n");
        write(&root, "sys/fs/cgroup/y/memory.events", "oom_kill many\noom_kills 3\nmax 1\n");
        write(&root, "sys/fs/memory.events", "oom_kill 1\n");
        for path in ["/x", "/../", "/x/../y"] {
            assert!(matches!(host.memory_events(path), Err(HostError::Malformed { .. })), "{path}");
        }
        assert_eq!(host.memory_events("/y").unwrap(), Some(MemoryEvents::default()), "unknown is not zero");
    }

    #[test]
    fn the_memory_cgroup_is_the_controllers() {
        assert_eq!(memory_path("9:name=systemd:/s\n4:cpu,memory:/a:b\n0::/u\n"), Some("/a:b"));
        assert_eq!(memory_path("0::/user.slice\n"), Some("/user.slice"));
        assert_eq!(memory_path("4:memory_not:/a\njunk\n"), None);
    }

    #[test]
    fn live_counts_are_of_this_process() {
        let host = Host::live();
        let Some(cgroup) = host.memory_cgroup(std::process::id()).unwrap() else { return };
        match host.memory_events(&cgroup) {
            Ok(Some(events)) => assert!(events.oom_kill.is_some(), "{events:?}"),
            other => eprintln!("skipped: {other:?}"),
        }
    }
}
