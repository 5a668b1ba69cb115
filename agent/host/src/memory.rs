//! Owns how much memory the host has, how much of it can be had, and the limit of a memory cgroup that leaves least room.
//! Refuses GPUs, and processes: a cgroup is a path.

use crate::{Host, HostError, read};

const MEMINFO: &str = "proc/meminfo";
const MEMINFO_LIMIT: u64 = 64 << 10;
const FIGURE_LIMIT: u64 = 64;
/// Cgroups above a cgroup that are asked, at most.
const MAX_DEPTH: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    pub total: u64,
    /// What programs can have without swapping, by the kernel's own estimate.
    pub available: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    pub bytes: u64,
    /// What is charged to that cgroup.
    pub used: u64,
}

impl MemoryLimit {
    const fn room(self) -> u64 {
        self.bytes.saturating_sub(self.used)
    }
}

impl Host {
    pub fn memory(&self) -> Result<HostMemory, HostError> {
        let path = self.path(MEMINFO);
        let text = read::text(&path, MEMINFO_LIMIT)?;
        let bytes = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        let memory = bytes("MemTotal").zip(bytes("MemAvailable"));
        let (total, available) =
            memory.ok_or(HostError::Malformed { path, what: "no MemTotal or MemAvailable" })?;
        Ok(HostMemory { total, available })
    }

    /// Of a memory cgroup and those above it. `None`: none of them has a limit that can be read.
    pub fn memory_limit(&self, cgroup: &str) -> Option<MemoryLimit> {
        let (hierarchy, file) = self.memory_hierarchy()?;
        let names = if file == "memory.oom_control" {
            ["memory.limit_in_bytes", "memory.usage_in_bytes"]
        } else {
            ["memory.max", "memory.current"]
        };
        let below = cgroup.trim_matches('/');
        if below.split('/').any(|segment| segment == "..") {
            return None;
        }
        let whole = hierarchy.join(below);
        let places = whole.ancestors().take_while(|place| place.starts_with(&hierarchy)).take(MAX_DEPTH);
        let limits = places.filter_map(|place| {
            let [bytes, used] = names
                .map(|name| read::text(&place.join(name), FIGURE_LIMIT).ok()?.trim().parse::<u64>().ok());
            Some(MemoryLimit { bytes: bytes?, used: used? })
        });
        // cgroup v1 writes no limit as the largest number of pages.
        limits.filter(|limit| limit.bytes < 1 << 62).min_by_key(|limit| limit.room())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::memory_events::VERSION_1;

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host::at(root.path());
        (root, host)
    }

    #[test]
    fn what_the_host_has_is_in_kibibytes() {
        let (_root, host) =
            host(&[(MEMINFO, "MemTotal:       24 kB\nMemFree: 1 kB\nMemAvailable:   7 kB\n")]);
        assert_eq!(host.memory().unwrap(), HostMemory { total: 24 << 10, available: 7 << 10 });
        let (_root, old) = self::host(&[(MEMINFO, "MemTotal:       24 kB\n")]);
        assert!(old.memory().is_err(), "unknown is not zero");
    }

    #[test]
    fn the_limit_that_leaves_least_room_counts_wherever_it_is() {
        let at = |path: &str| format!("sys/fs/cgroup/{path}");
        let (_root, host) = host(&[
            (&at("cgroup.controllers"), "cpu memory\n"),
            (&at("pods/memory.max"), "1000\n"),
            (&at("pods/memory.current"), "900\n"),
            (&at("pods/a/memory.max"), "500\n"),
            (&at("pods/a/memory.current"), "200\n"),
            (&at("pods/a/b/memory.max"), "max\n"),
            (&at("pods/a/b/memory.current"), "200\n"),
        ]);
        assert_eq!(host.memory_limit("/pods/a/b"), Some(MemoryLimit { bytes: 1000, used: 900 }));
        assert_eq!(host.memory_limit("/elsewhere"), None);
        assert_eq!(host.memory_limit("/pods/../pods"), None);
    }

    #[test]
    fn on_cgroup_v1_no_limit_is_a_number_too() {
        let at = |path: &str| format!("{VERSION_1}/{path}");
        let (_root, host) = host(&[
            (&at("memory.oom_control"), "oom_kill 0\n"),
            (&at("memory.limit_in_bytes"), "9223372036854771712\n"),
            (&at("memory.usage_in_bytes"), "77\n"),
            (&at("job/memory.limit_in_bytes"), "4096\n"),
            (&at("job/memory.usage_in_bytes"), "96\n"),
        ]);
        assert_eq!(host.memory_limit("/job"), Some(MemoryLimit { bytes: 4096, used: 96 }));
        assert_eq!(host.memory_limit("/"), None);
    }
}
