//! Owns what cgroups may take of device memory, and take: the `dmem` controller (Linux 6.14), where it is.
//! Refuses to say which GPU a region is: its name is the driver's own.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::{Host, HostError, read};

/// The unified hierarchy, alone or beside version 1: the controller is in no other.
const HIERARCHIES: [&str; 2] = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
/// Some tens of regions of some tens of bytes.
const LIMIT: u64 = 16 << 10;
const MOST_REGIONS: usize = 64;
const LONGEST_REGION: usize = 128;
/// Cgroups above one another.
const MOST_LEVELS: usize = 64;

/// One region as one cgroup counts it, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    pub current: Option<u64>,
    /// `None`: `max`, which is no limit, or not told.
    pub max: Option<u64>,
    pub min: Option<u64>,
    pub low: Option<u64>,
}

/// One cgroup's device memory by region, such as `drm/0000:03:00.0/vram0`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dmem {
    /// From the hierarchy's root, without slashes around it.
    pub cgroup: String,
    pub regions: BTreeMap<String, Region>,
}

/// Lines of a region and a number. `max` is no number.
fn parse(text: &str) -> impl Iterator<Item = (&str, Option<u64>)> {
    text.lines().take(MOST_REGIONS).filter_map(|line| {
        let (region, value) = line.trim_end().rsplit_once(' ')?;
        let named = !region.is_empty() && region.len() <= LONGEST_REGION;
        let value = if value == "max" { None } else { Some(value.parse().ok()?) };
        named.then_some((region, value))
    })
}

impl Host {
    /// Whether this kernel counts device memory by cgroup at all.
    pub fn has_dmem(&self) -> bool {
        self.dmem_hierarchy().is_some()
    }

    /// A process's cgroup in the unified hierarchy, for [`Self::dmem`].
    pub fn unified_cgroup(&self, pid: u32) -> Result<Option<String>, HostError> {
        let cgroups = self.cgroup(pid)?;
        Ok(cgroups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned))
    }

    /// The device memory of a cgroup and of each above it, its own first. Empty where the kernel has no such controller,
    /// and without those that it is not switched on for.
    pub fn dmem(&self, cgroup: &str) -> Result<Vec<Dmem>, HostError> {
        let Some(mut directory) = self.dmem_hierarchy() else { return Ok(Vec::new()) };
        let below = read::below(&directory, cgroup)?;
        let mut levels = Vec::new();
        // The root has a capacity and no limits.
        for segment in below.split('/').filter(|segment| !segment.is_empty()).take(MOST_LEVELS) {
            directory.push(segment);
            let root = HIERARCHIES.map(|place| self.path(place));
            let inside = root.iter().rev().find_map(|root| directory.strip_prefix(root).ok());
            let cgroup = inside.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
            let mut level = Dmem { cgroup, ..Dmem::default() };
            for (file, field) in FILES {
                // Not there: not switched on here. Gone: the cgroup was removed.
                let Ok(text) = read::text(&directory.join(file), LIMIT) else { continue };
                for (region, value) in parse(&text) {
                    field(level.regions.entry(region.to_owned()).or_default(), value);
                }
            }
            if !level.regions.is_empty() {
                levels.insert(0, level);
            }
        }
        Ok(levels)
    }

    fn dmem_hierarchy(&self) -> Option<PathBuf> {
        let has_dmem = |place: &PathBuf| {
            let controllers = read::text(&place.join("cgroup.controllers"), LIMIT);
            controllers.is_ok_and(|names| names.split_whitespace().any(|name| name == "dmem"))
        };
        HIERARCHIES.iter().map(|place| self.path(place)).find(has_dmem)
    }
}

type Field = fn(&mut Region, Option<u64>);

const FILES: [(&str, Field); 4] = [
    ("dmem.current", |region, value| region.current = value),
    ("dmem.max", |region, value| region.max = value),
    ("dmem.min", |region, value| region.min = value),
    ("dmem.low", |region, value| region.low = value),
];

#[cfg(test)]
mod tests {
    use super::*;

    const VRAM: &str = "drm/0000:03:00.0/vram0";

    fn write(root: &tempfile::TempDir, file: &str, text: &str) {
        let path = root.path().join("sys/fs/cgroup").join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn host() -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        let host = Host::at(root.path());
        (root, host)
    }

    #[test]
    fn c116_regions_are_read_by_file_and_max_is_no_number() {
        let (root, host) = host();
        write(&root, "cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc dmem\n");
        write(&root, "pods/a/dmem.current", "drm/0000:03:00.0/vram0 123\ndrm/0000:03:00.0/stolen 5\n");
        write(&root, "pods/a/dmem.max", "drm/0000:03:00.0/vram0 1073741824\ndrm/0000:03:00.0/stolen max\n");
        write(&root, "pods/a/dmem.min", "drm/0000:03:00.0/vram0 0\ndrm/0000:03:00.0/stolen 0\n");
        write(&root, "pods/a/dmem.low", "drm/0000:03:00.0/vram0 7\n");
        write(&root, "pods/dmem.current", "drm/0000:03:00.0/vram0 500\n");
        write(&root, "pods/dmem.max", "drm/0000:03:00.0/vram0 1000\n");
        assert!(host.has_dmem());
        let levels = host.dmem("/pods/a").unwrap();
        let names: Vec<_> = levels.iter().map(|level| level.cgroup.as_str()).collect();
        assert_eq!(names, ["pods/a", "pods"]);
        let own = Region { current: Some(123), max: Some(1 << 30), min: Some(0), low: Some(7) };
        assert_eq!(levels[0].regions[VRAM], own);
        let stolen = Region { current: Some(5), max: None, min: Some(0), low: None };
        assert_eq!(levels[0].regions["drm/0000:03:00.0/stolen"], stolen);
        assert_eq!(levels[1].regions[VRAM].max, Some(1000));
    }

    #[test]
    fn c116_a_kernel_without_it_has_none_and_that_is_no_error() {
        let (root, host) = host();
        assert!(!host.has_dmem());
        assert_eq!(host.dmem("/pods/a").unwrap(), []);
        write(&root, "cgroup.controllers", "cpu memory pids\n");
        assert!(!host.has_dmem());
        // There, and not switched on for these cgroups.
        write(&root, "cgroup.controllers", "cpu memory dmem\n");
        assert!(host.has_dmem());
        assert_eq!(host.dmem("/pods/a").unwrap(), []);
    }

    #[test]
    fn what_cannot_be_is_passed_over() {
        let (root, host) = host();
        write(&root, "cgroup.controllers", "dmem\n");
        let long = "x".repeat(LONGEST_REGION + 1);
        let text = format!("vram0\nvram1 -1\nvram2 1 2\n 3\n{long} 4\nvram3 99999999999999999999\nvram4 5\n");
        write(&root, "a/dmem.current", &text);
        let regions = host.dmem("a").unwrap().remove(0).regions;
        let known: Vec<_> = regions.iter().map(|(name, region)| (name.as_str(), region.current)).collect();
        assert_eq!(known, [("vram2 1", Some(2)), ("vram4", Some(5))]);
        let many: String = (0..1000).map(|at| format!("r{at} {at}\n")).collect::<Vec<_>>().concat();
        write(&root, "b/dmem.current", &many);
        assert_eq!(host.dmem("b").unwrap()[0].regions.len(), MOST_REGIONS);
        assert!(matches!(host.dmem("/a/../b"), Err(HostError::Malformed { .. })));
    }

    #[test]
    fn live_a_process_has_a_cgroup_where_there_is_a_unified_hierarchy() {
        let host = Host::live();
        let Some(cgroup) = host.unified_cgroup(std::process::id()).unwrap() else { return };
        let levels = host.dmem(&cgroup).unwrap();
        eprintln!("dmem here: {}, {levels:?}", host.has_dmem());
        assert!(host.has_dmem() || levels.is_empty());
    }
}
