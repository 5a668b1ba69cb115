//! Owns what Slurm granted its jobs on this node, as far as root wrote it down: the files of the site's prolog, and the
//! devices that version 1 of cgroups lets a job have.
//! Refuses the job's environment, files that others than root can write, and a job that is not there.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use cotenant_model::{
    GpuId,
    grant::{DeviceId, JobDevice, JobFacts, JobGrant, Physical},
};

use crate::{
    Host, HostError,
    heard::{Asked, Heard},
    identity::shape,
    kubelet::chain,
    read,
};

const ROOT: u32 = 0;
/// Bits of a file's mode by which others than its owner may change it.
const WRITABLE: u32 = 0o022;
/// GPUs and their MIG devices.
const MAX_FILES: usize = 1024;
const MAX_FILE: u64 = 64 << 10;
const MAX_JOBS: usize = 8192;
const MAX_ENTRIES: usize = 8192;
/// From the root of the unified hierarchy to the scope of Slurm's steps.
const MAX_DEPTH: u32 = 4;
/// A job's `devices.list` has some tens of lines.
const MAX_DEVICES: u64 = 64 << 10;
const NVIDIA: &str = "195";
/// The device nodes that are no GPU: `nvidia-modeset` and `nvidiactl`.
const NO_GPU: u32 = 254;

#[derive(Clone, Debug)]
pub struct JobsConfig {
    /// Where the prolog writes, one file a GPU, one job a line; `None` where it does not.
    pub mapping: Option<PathBuf>,
    pub interval: Duration,
}

impl JobsConfig {
    pub const INTERVAL: Duration = Duration::from_secs(5);
}

#[derive(Debug, thiserror::Error)]
enum MappingError {
    #[error("{} cannot be read; the prolog makes it, a container mounts it", path.display())]
    Absent { path: PathBuf, source: std::io::Error },
    #[error(
        "{} belongs to another user than root, or others may write in it: chown root, chmod 755",
        path.display()
    )]
    Distrusted { path: PathBuf },
}

/// What was found at the last look.
#[derive(Clone, Debug, Default)]
pub struct JobListing {
    /// The directory of the prolog was read once; what it said last stays in force.
    pub mapped: bool,
    /// What is wrong with that directory now.
    pub error: Option<String>,
    /// Its files that somebody else than root can write, or that could not be read: not believed.
    pub distrusted: u64,
    /// Lines that are no job's number.
    pub unread: u64,
    /// How often was looked.
    pub rounds: u64,
    /// Jobs with cgroups or a `slurmstepd`; `None` where no hierarchy could be read.
    pub live: Option<BTreeSet<String>>,
    pub grants: Vec<JobGrant>,
    minors: BTreeMap<u32, GpuId>,
    by_mapping: BTreeMap<String, BTreeSet<JobDevice>>,
}

impl JobListing {
    pub fn facts(&self) -> JobFacts<'_> {
        JobFacts {
            answered: self.mapped,
            grants: &self.grants,
            live: self.live.as_ref(),
            minors: &self.minors,
        }
    }

    /// Whether a job's cgroup says what devices it has.
    pub fn constrained(&self) -> bool {
        self.grants.iter().any(|grant| !self.by_mapping.contains_key(&grant.job))
    }

    fn look(&mut self, host: &Host, mapping: Option<&Path>) {
        self.rounds += 1;
        if let Some(directory) = mapping {
            match self.read(directory) {
                Ok(()) => (self.mapped, self.error) = (true, None),
                Err(error) => self.error = Some(chain(&error)),
            }
        }
        let mut granted = self.by_mapping.clone();
        for (job, devices) in host.constrained_jobs() {
            granted.entry(job).or_default().extend(devices);
        }
        self.live = host.live_jobs();
        if let Some(live) = &mut self.live
            && granted.keys().any(|job| !live.contains(job))
        {
            live.extend(host.stepping_jobs());
        }
        self.minors = host.gpu_minors();
        self.grants = granted.into_iter().map(|(job, devices)| JobGrant { job, devices }).collect();
    }

    fn read(&mut self, directory: &Path) -> Result<(), MappingError> {
        let path = || directory.to_owned();
        let absent = |source| MappingError::Absent { path: path(), source };
        let metadata = directory.metadata().map_err(absent)?;
        if metadata.uid() != ROOT || metadata.mode() & WRITABLE != 0 {
            return Err(MappingError::Distrusted { path: path() });
        }
        std::fs::read_dir(directory).map_err(absent)?;
        self.by_mapping.clear();
        (self.distrusted, self.unread) = (0, 0);
        for name in read::names_in(directory, MAX_FILES) {
            let Some(device) = device(&name) else { continue };
            let Some(text) = roots_own(&directory.join(&name)) else {
                self.distrusted += 1;
                continue;
            };
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
                match shape::number(line) {
                    Some(job) if self.by_mapping.len() < MAX_JOBS || self.by_mapping.contains_key(job) => {
                        self.by_mapping.entry(job.to_owned()).or_default().insert(device.clone());
                    }
                    _ => self.unread += 1,
                }
            }
        }
        Ok(())
    }
}

/// A file's name: a GPU by its index, as DCGM's exporter has it, or a GPU or MIG device by its UUID.
fn device(name: &str) -> Option<JobDevice> {
    if let Some(index) = shape::number(name) {
        return Some(JobDevice::Index(index.parse().ok()?));
    }
    match DeviceId::parse(name).ok()? {
        DeviceId {
            physical: Physical::Gpu(gpu) | Physical::Mig(gpu),
            gpu_instance: None,
            replica: None,
            ..
        } => Some(JobDevice::Uuid(gpu)),
        _ => None,
    }
}

fn roots_own(path: &Path) -> Option<String> {
    let content = read::bytes_of(path, MAX_FILE, ROOT).ok()?;
    let closed = path.metadata().ok()?.mode() & WRITABLE == 0;
    closed.then(|| String::from_utf8_lossy(&content).into_owned())
}

/// The GPUs of a `devices.list`. `None`: it holds no list, for nothing or only some devices are forbidden; the kernel
/// then shows `a *:* rwm` and keeps what is forbidden to itself.
fn listed(text: &str) -> Option<BTreeSet<JobDevice>> {
    let mut devices = BTreeSet::new();
    for line in text.lines() {
        let mut fields = line.split(' ');
        let (Some(kind), Some(numbers)) = (fields.next(), fields.next()) else { continue };
        let (major, minor) = numbers.split_once(':')?;
        match (kind, major, minor) {
            ("a", ..) | ("c", "*", _) | ("c", NVIDIA, "*") => return None,
            ("c", NVIDIA, minor) => {
                let minor = minor.parse().ok()?;
                if minor < NO_GPU {
                    devices.insert(JobDevice::Node(minor));
                }
            }
            _ => {}
        }
    }
    Some(devices)
}

impl Host {
    /// Below `slurm/uid_N/job_N` of a version 1 hierarchy.
    fn jobs_in(&self, hierarchy: &str) -> Vec<(String, PathBuf)> {
        let root = self.path(&format!("sys/fs/cgroup/{hierarchy}"));
        let within = |directory: PathBuf, prefix: &'static str| {
            read::names_in(&directory, MAX_ENTRIES)
                .into_iter()
                .filter(move |name| name.starts_with(prefix))
                .map(move |name| directory.join(name))
        };
        within(root, "slurm")
            .filter(|path| path.file_name().is_some_and(|name| shape::is_slurm_root(&name.to_string_lossy())))
            .flat_map(|slurm| within(slurm, "uid_"))
            .flat_map(|user| within(user, "job_"))
            .filter_map(|path| Some((job(&path)?, path)))
            .take(MAX_JOBS)
            .collect()
    }

    /// What `devices.list` says of jobs, where it says anything.
    fn constrained_jobs(&self) -> Vec<(String, BTreeSet<JobDevice>)> {
        let jobs = self.jobs_in("devices").into_iter();
        jobs.filter_map(|(job, path)| {
            let text = read::text(&path.join("devices.list"), MAX_DEVICES).ok()?;
            Some((job, listed(&text)?))
        })
        .collect()
    }

    /// Jobs that have cgroups here; `None` where no hierarchy can be read.
    pub fn live_jobs(&self) -> Option<BTreeSet<String>> {
        let hierarchies = read::names_in(&self.path("sys/fs/cgroup"), MAX_ENTRIES);
        let mut jobs: BTreeSet<String> =
            hierarchies.iter().flat_map(|name| self.jobs_in(name)).map(|(job, _)| job).collect();
        let unified = ["sys/fs/cgroup", "sys/fs/cgroup/unified"].map(|root| self.path(root));
        let unified = unified.into_iter().filter(|root| root.join("cgroup.procs").exists());
        let mut waiting: Vec<(PathBuf, u32)> = unified.map(|root| (root, 0)).collect();
        if waiting.is_empty() && hierarchies.is_empty() {
            return None;
        }
        while let Some((directory, depth)) = waiting.pop() {
            for name in read::names_in(&directory, MAX_ENTRIES) {
                let path = directory.join(&name);
                if shape::is_stepd_scope(&name) {
                    let within = read::names_in(&path, MAX_JOBS);
                    jobs.extend(within.iter().filter_map(|name| job(Path::new(name))));
                } else if shape::is_slice(&name) && depth < MAX_DEPTH {
                    waiting.push((path, depth + 1));
                }
            }
        }
        Some(jobs)
    }

    /// Jobs whose `slurmstepd` runs, for those without cgroups (proctrack/linuxproc). Reads every process's name.
    fn stepping_jobs(&self) -> BTreeSet<String> {
        let processes = self.processes().unwrap_or_default().into_iter();
        processes.filter_map(|pid| self.slurm_step(pid)).map(|(job, _)| job).collect()
    }
}

fn job(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    Some(shape::number(name.strip_prefix("job_")?)?.to_owned())
}

/// The thread that looks, and what it last found.
#[derive(Debug)]
pub struct Jobs {
    pub heard: Heard<JobListing>,
    stop: Arc<AtomicBool>,
}

impl Jobs {
    pub fn spawn(host: Host, config: JobsConfig) -> Result<Self, HostError> {
        let latest = Arc::new(ArcSwap::from_pointee(JobListing::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (told, stopped) = (Arc::clone(&latest), Arc::clone(&stop));
        let look = move || {
            while !stopped.load(Ordering::Relaxed) {
                let mut next = JobListing::clone(&told.load());
                next.look(&host, config.mapping.as_deref());
                told.store(Arc::new(next));
                std::thread::park_timeout(config.interval);
            }
        };
        let thread = std::thread::Builder::new()
            .name("slurm".to_owned())
            .spawn(look)
            .map_err(|source| HostError::Thread { what: "Slurm", source })?;
        Ok(Self { heard: Heard::new(latest, thread), stop })
    }
}

impl Asked for JobListing {
    fn rounds(&self) -> u64 {
        self.rounds
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.heard.wake();
    }
}

#[cfg(test)]
mod tests;
