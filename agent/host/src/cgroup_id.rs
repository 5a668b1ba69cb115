//! Owns the way from the id that the kernel gives a cgroup to its path.
//! Refuses a mount that is not the hierarchy's root: its paths would be somebody else's.

use std::{collections::VecDeque, fs, os::unix::fs::MetadataExt};

use crate::Host;

/// Cgroups of a host that are looked through for one of them.
const MOST: usize = 32_768;
/// The inode of the root of a cgroup hierarchy. A cgroup's inode is its id (`kernfs_ino`, 64-bit hosts).
const ROOT: u64 = 1;

impl Host {
    /// The path of a cgroup of the unified hierarchy by its id. Walks the hierarchy, so it is for what no path says.
    pub fn cgroup_by_id(&self, id: u64) -> Option<String> {
        let root = ["sys/fs/cgroup", "sys/fs/cgroup/unified"].map(|root| self.path(root)).into_iter().find(
            |root| {
                root.join("cgroup.procs").exists()
                    && root.metadata().is_ok_and(|metadata| metadata.ino() == ROOT)
            },
        )?;
        if id == ROOT {
            return Some("/".to_owned());
        }
        let mut waiting = VecDeque::from([String::new()]);
        let mut seen = 0;
        while let Some(path) = waiting.pop_front() {
            // One that is being removed has nothing below it.
            let Ok(entries) = fs::read_dir(root.join(path.trim_start_matches('/'))) else { continue };
            for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
                let Ok(name) = entry.file_name().into_string() else { continue };
                let below = format!("{path}/{name}");
                if entry.metadata().is_ok_and(|metadata| metadata.ino() == id) {
                    return Some(below);
                }
                seen += 1;
                if seen > MOST {
                    return None;
                }
                waiting.push_back(below);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_cgroups_are_found_by_id() {
        let host = Host::live();
        let unified = host.path("sys/fs/cgroup/unified");
        let root = if unified.exists() { unified } else { host.path("sys/fs/cgroup") };
        let name = format!("cotenant-id-{}", std::process::id());
        let outer = root.join(&name);
        if fs::create_dir_all(outer.join("inner")).is_err() {
            eprintln!("no cgroup can be made here: not tested");
            return;
        }
        let id = outer.join("inner").metadata().unwrap().ino();
        let found = host.cgroup_by_id(id);
        fs::remove_dir(outer.join("inner")).unwrap();
        fs::remove_dir(&outer).unwrap();
        assert_eq!(found, Some(format!("/{name}/inner")));
        assert_eq!(host.cgroup_by_id(id), None, "gone");
        assert_eq!(host.cgroup_by_id(ROOT).as_deref(), Some("/"));
    }
}
