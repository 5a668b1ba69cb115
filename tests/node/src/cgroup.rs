//! Owns the cgroups that tenants live in: one path in the unified hierarchy, and in the one with the memory controller.
//! Refuses to guess which that is: hosts have it in version 1, in version 2, or in version 2 beside version 1.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

/// A hierarchy as it is mounted.
struct Hierarchy {
    root: PathBuf,
    unified: bool,
    memory: bool,
}

fn hierarchies() -> Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let mut found = Vec::new();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, root, kind, options, ..] = fields[..] else { continue };
        let root = PathBuf::from(root);
        let memory = match kind {
            "cgroup" => options.split(',').any(|option| option == "memory"),
            "cgroup2" => controllers(&root, "cgroup.controllers").iter().any(|name| name == "memory"),
            _ => continue,
        };
        found.push(Hierarchy { root, unified: kind == "cgroup2", memory });
    }
    Ok(found)
}

fn controllers(directory: &Path, file: &str) -> Vec<String> {
    let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// A cgroup, removed on drop.
pub struct Cgroup {
    /// First the one in the unified hierarchy.
    directories: Vec<PathBuf>,
    memory: Option<Memory>,
}

/// Where a cgroup's memory is counted.
struct Memory {
    directory: PathBuf,
    unified: bool,
}

impl Cgroup {
    /// Makes `path` (and what it lies in) below the host's cgroup2 mount.
    pub fn create(path: &str) -> Result<Self> {
        let unified = hierarchies()?
            .into_iter()
            .find(|hierarchy| hierarchy.unified)
            .context("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")?;
        let directory = unified.root.join(path);
        make(&directory)?;
        Ok(Self { directories: vec![directory], memory: None })
    }

    /// The same with its own memory account; `limit` bytes where there is a limit.
    pub fn with_memory(path: &str, limit: Option<u64>) -> Result<Self> {
        let mut cgroup = Self::create(path)?;
        let Hierarchy { root, unified, .. } = hierarchies()?
            .into_iter()
            .find(|hierarchy| hierarchy.memory)
            .context("no hierarchy has the memory controller")?;
        let directory = root.join(path);
        if unified {
            delegate(&root, path)?;
        } else {
            make(&directory)?;
            cgroup.directories.push(directory.clone());
        }
        if let Some(bytes) = limit {
            let file = directory.join(if unified { "memory.max" } else { "memory.limit_in_bytes" });
            fs::write(&file, bytes.to_string())
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        cgroup.memory = Some(Memory { directory, unified });
        Ok(cgroup)
    }

    /// Processes of its own that the kernel has killed for memory, by its own count.
    pub fn kills(&self) -> Result<u64> {
        let Memory { directory, unified } = self.memory.as_ref().context("it has no memory account")?;
        // Version 2 counts those below as well, unless asked for its own.
        let local = directory.join("memory.events.local");
        let file = match unified {
            true if local.exists() => local,
            true => directory.join("memory.events"),
            false => directory.join("memory.oom_control"),
        };
        let text = fs::read_to_string(&file)?;
        let count =
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")).context("it counts kills")?;
        Ok(count.trim().parse()?)
    }

    /// Lets the kernel kill it as a whole. False where this kernel cannot: version 1.
    pub fn kill_as_group(&self) -> Result<bool> {
        let Memory { directory, unified } = self.memory.as_ref().context("it has no memory account")?;
        let file = directory.join("memory.oom.group");
        if !unified || !file.exists() {
            return Ok(false);
        }
        fs::write(&file, "1").with_context(|| format!("cannot write {}", file.display()))?;
        Ok(true)
    }

    /// A shell that enters it and becomes the program that the caller adds, with its arguments. `launcher`: words that
    /// end before the program.
    pub fn command(&self, launcher: &str) -> Command {
        let enter: Vec<String> =
            (1..=self.directories.len()).map(|at| format!("echo $$ > \"${at}/cgroup.procs\" &&")).collect();
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(format!(
            "{} shift {} && exec {launcher} \"$@\"",
            enter.join(" "),
            self.directories.len()
        ));
        command.arg("enter").args(&self.directories);
        command
    }
}

/// Version 2: every cgroup above hands the controller down.
fn delegate(root: &Path, path: &str) -> Result<()> {
    let mut directory = root.to_owned();
    for segment in Path::new(path) {
        if !controllers(&directory, "cgroup.subtree_control").iter().any(|name| name == "memory") {
            let file = directory.join("cgroup.subtree_control");
            fs::write(&file, "+memory").with_context(|| {
                format!("cannot hand the memory controller down at {}: has it processes?", file.display())
            })?;
        }
        directory.push(segment);
    }
    ensure!(directory.join("memory.max").exists(), "{} has no memory controller", directory.display());
    Ok(())
}

/// Another test may be removing what it lies in.
fn make(directory: &Path) -> Result<()> {
    for _ in 0..20 {
        match fs::create_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => {
                return other.with_context(|| format!("cannot make {} (root?)", directory.display()));
            }
        }
    }
    fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for directory in &self.directories {
            // Its processes may take a moment to leave; the parents may be others' too and then stay.
            for _ in 0..50 {
                if fs::remove_dir(directory).is_ok() {
                    break;
                }
                sleep(Duration::from_millis(20));
            }
            for parent in directory.ancestors().skip(1) {
                if parent.join("cgroup.procs").exists() && fs::remove_dir(parent).is_err() {
                    break;
                }
            }
        }
    }
}
