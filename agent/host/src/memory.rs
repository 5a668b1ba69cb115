//! Owns how much memory the host has, how much of it can be had, and the limit of a memory cgroup that leaves least room.
//! Refuses GPUs, and processes: a cgroup is a path.

use std::path::{Path, PathBuf};

use crate::{Host, HostError, read};

const MEMINFO: &str = "proc/meminfo";
const MEMINFO_LIMIT: u64 = 64 << 10;
const FIGURE_LIMIT: u64 = 64;
/// Some fifty lines, more on hosts with many NUMA nodes' worth of counters.
const STAT: &str = "memory.stat";
const STAT_LIMIT: u64 = 64 << 10;
/// cgroup v1 writes no limit as the largest number of pages.
const NO_LIMIT: u64 = 1 << 62;
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

/// A memory cgroup whose limit is the nearest one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlace {
    pub path: String,
    /// `None` where there is none up to the root.
    pub limit: Option<u64>,
    /// What is charged to it and the kernel cannot take back without swapping or killing.
    pub held: u64,
}

impl MemoryPlace {
    fn room(&self) -> u64 {
        self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.held))
    }
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
        let files = self.memory_files(cgroup)?;
        let limits = files.places().filter_map(|place| {
            let (bytes, used) = (figure(place, files.limit)?, figure(place, files.used)?);
            Some(MemoryLimit { bytes, used })
        });
        limits.filter(|limit| limit.bytes < NO_LIMIT).min_by_key(|limit| limit.room())
    }

    /// Where a memory cgroup runs out first: of itself and those above it the one whose limit leaves least room. Itself,
    /// where none has a limit. `None`: it is gone, or cannot be read.
    pub fn memory_place(&self, cgroup: &str) -> Option<MemoryPlace> {
        let files = self.memory_files(cgroup)?;
        let own = files.held(&files.whole)?;
        let limited = files.places().filter_map(|place| {
            let bytes = figure(place, files.limit).filter(|bytes| *bytes < NO_LIMIT)?;
            let held = if *place == *files.whole { own } else { files.held(place)? };
            let path = format!("/{}", place.strip_prefix(&files.hierarchy).ok()?.display());
            Some(MemoryPlace { path, limit: Some(bytes), held })
        });
        let own = || MemoryPlace { path: format!("/{}", cgroup.trim_matches('/')), limit: None, held: own };
        Some(limited.min_by_key(MemoryPlace::room).unwrap_or_else(own))
    }

    fn memory_files(&self, cgroup: &str) -> Option<MemoryFiles> {
        let (hierarchy, file) = self.memory_hierarchy()?;
        let whole = hierarchy.join(read::below(&hierarchy, cgroup).ok()?);
        let of = |limit, used, given_back| MemoryFiles { hierarchy, whole, limit, used, given_back };
        Some(if file == "memory.oom_control" {
            // Version 1 counts what is below under another name, and its slabs not at all.
            of(
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                &["total_active_file", "total_inactive_file"],
            )
        } else {
            of("memory.max", "memory.current", &["active_file", "inactive_file", "slab_reclaimable"])
        })
    }
}

/// A memory cgroup's directory, and what its figures are called there.
struct MemoryFiles {
    hierarchy: PathBuf,
    whole: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// What the kernel takes back before it kills: the page cache that can be dropped, and caches of its own.
    given_back: &'static [&'static str],
}

impl MemoryFiles {
    fn places(&self) -> impl Iterator<Item = &Path> {
        self.whole.ancestors().take_while(|place| place.starts_with(&self.hierarchy)).take(MAX_DEPTH)
    }

    /// What is charged there and cannot be given back. Shared memory, and pages that are locked, are no page cache here.
    fn held(&self, place: &Path) -> Option<u64> {
        let used = figure(place, self.used)?;
        let stat = read::text(&place.join(STAT), STAT_LIMIT).ok()?;
        let value = |name: &str| -> Option<u64> {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line?.trim().parse().ok()
        };
        let [active, inactive, rest @ ..] = self.given_back else { return None };
        let caches = value(active)?.saturating_add(value(inactive)?);
        let rest = rest.iter().filter_map(|name| value(name)).sum::<u64>();
        Some(used.saturating_sub(caches).saturating_sub(rest))
    }
}

fn figure(place: &Path, name: &str) -> Option<u64> {
    read::text(&place.join(name), FIGURE_LIMIT).ok()?.trim().parse().ok()
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

    #[test]
    fn page_cache_that_can_be_dropped_is_not_held() {
        let at = |path: &str| format!("sys/fs/cgroup/{path}");
        let stat = "anon 300\nfile 650\nshmem 50\ninactive_file 400\nactive_file 200\nunevictable 0\n\
                    slab_reclaimable 20\nslab_unreclaimable 30\n";
        let (root, host) = host(&[
            (&at("cgroup.controllers"), "cpu memory\n"),
            (&at("pod/memory.max"), "2000\n"),
            (&at("pod/memory.current"), "1500\n"),
            (&at("pod/memory.stat"), "inactive_file 0\nactive_file 0\n"),
            (&at("pod/reader/memory.max"), "1000\n"),
            (&at("pod/reader/memory.current"), "1000\n"),
            (&at("pod/reader/memory.stat"), stat),
            (&at("free/memory.max"), "max\n"),
            (&at("free/memory.current"), "1000\n"),
            (&at("free/memory.stat"), stat),
        ]);
        // The reader fills its limit with files, and has 620 left of it; its pod has 500.
        let place = |path: &str, limit, held| Some(MemoryPlace { path: path.to_owned(), limit, held });
        assert_eq!(host.memory_place("/pod/reader"), place("/pod", Some(2000), 1500));
        assert_eq!(host.memory_place("/free/"), place("/free", None, 380));
        assert_eq!(host.memory_place("/gone"), None);
        std::fs::remove_file(root.path().join(at("free/memory.stat"))).unwrap();
        assert_eq!(host.memory_place("/free"), None, "unknown is not zero");
    }

    #[test]
    fn on_cgroup_v1_the_page_cache_of_those_below_counts_with_it() {
        let at = |path: &str| format!("{VERSION_1}/{path}");
        let (_root, host) = host(&[
            (&at("memory.oom_control"), "oom_kill 0\n"),
            (&at("job/memory.limit_in_bytes"), "4096\n"),
            (&at("job/memory.usage_in_bytes"), "4000\n"),
            (&at("job/memory.stat"), "active_file 1\ntotal_inactive_file 3000\ntotal_active_file 500\n"),
        ]);
        let place = MemoryPlace { path: "/job".to_owned(), limit: Some(4096), held: 500 };
        assert_eq!(host.memory_place("/job"), Some(place));
    }
}
