//! Owns a node's directory: its creation, its process table and how bytes are charged to a GPU.
//! Refuses stale processes: whoever no longer holds its lock on `alive` is swept and its memory returned.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::config::{ENV_NODE, NodeConfig};
use crate::layout::{self, MAGIC, MAX_PROCESSES, Row, Shared};
use crate::lock::{Guard, RobustLock};

/// The RM API lock: one for all GPUs of the host.
#[must_use]
pub struct RmGuard<'a>(#[allow(dead_code, reason = "held for its drop")] Guard<'a>);

/// This process's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

/// What one process has on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessRow {
    /// In the caller's PID namespace.
    pub pid: u32,
    pub bytes: u64,
    pub context_bytes: u64,
    pub sm: u32,
    pub memory: u32,
}

pub struct Node {
    directory: PathBuf,
    config: NodeConfig,
    shared: &'static Shared,
    /// Byte `slot` is write-locked by the living process in that slot. POSIX record locks go at death and, the
    /// descriptor being close-on-exec, at exec; unlike a PID check they hold across PID namespaces and zombies.
    alive: File,
}

fn open_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

impl Node {
    /// Makes (or makes anew) the node in `directory`.
    pub fn create(directory: &Path, config: &NodeConfig) -> io::Result<Self> {
        let config = config.clone().complete().map_err(io::Error::other)?;
        std::fs::create_dir_all(directory.join("truth"))?;
        std::fs::write(directory.join("node.json"), serde_json::to_vec_pretty(&config)?)?;
        for name in ["alive", "nvidia-uvm"] {
            File::create(directory.join(name))?;
        }
        // A new file: whoever still maps an old state must not see its locks made anew.
        let path = directory.join("state");
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = open_file(&path)?;
        file.set_len(size_of::<Shared>() as u64)?;
        let shared = map_shared(&file)?;
        // SAFETY: the file is new and without its magic number, so nobody else uses these locks.
        unsafe { RobustLock::init(&raw const shared.rm) };
        for gpu in &shared.gpus {
            // SAFETY: as above.
            unsafe { RobustLock::init(&raw const gpu.lock) };
        }
        shared.magic.store(MAGIC, Release);
        let alive = open_file(&directory.join("alive"))?;
        Ok(Self { directory: directory.to_owned(), config, shared, alive })
    }

    /// The node named by the environment; `None` when none is named.
    pub fn from_environment() -> Option<io::Result<Self>> {
        std::env::var_os(ENV_NODE).map(|directory| Self::open(Path::new(&directory)))
    }

    pub fn open(directory: &Path) -> io::Result<Self> {
        let config: NodeConfig = serde_json::from_slice(&std::fs::read(directory.join("node.json"))?)?;
        let file = OpenOptions::new().read(true).write(true).open(directory.join("state"))?;
        if file.metadata()?.len() != size_of::<Shared>() as u64 {
            return Err(io::Error::other("the state file is of another version; create the node anew"));
        }
        let shared = map_shared(&file)?;
        if shared.magic.load(Acquire) != MAGIC {
            return Err(io::Error::other("the state file is not a finished node; create the node anew"));
        }
        let alive = open_file(&directory.join("alive"))?;
        Ok(Self { directory: directory.to_owned(), config, shared, alive })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Blocks in the kernel while another thread of the host holds it.
    pub fn rm(&self) -> RmGuard<'_> {
        RmGuard(self.shared.rm.lock())
    }

    /// The lock of one GPU. After its holder's death the sum is made again from the rows.
    pub fn gpu_lock(&self, gpu: usize) -> Guard<'_> {
        let guard = self.shared.gpus[gpu].lock.lock();
        if guard.orphaned {
            let sum = self.shared.processes.iter().map(|process| {
                let row = &process.rows[gpu];
                row.bytes.load(Relaxed) + row.context_bytes.load(Relaxed)
            });
            self.shared.gpus[gpu].used.store(sum.sum(), Relaxed);
        }
        guard
    }

    /// Enters this process into the table.
    pub fn claim(&self, rm: &RmGuard<'_>) -> io::Result<Slot> {
        self.sweep(rm);
        for (at, process) in self.shared.processes.iter().enumerate() {
            if process.pid.load(Relaxed) == 0 && self.record_lock(at, libc::F_SETLK)?.is_some() {
                process.start.store(start_time(std::process::id()).unwrap_or(0), Relaxed);
                process.pid.store(std::process::id(), Release);
                return Ok(Slot(at));
            }
        }
        Err(io::Error::other("the simulated node's process table is full"))
    }

    /// `F_SETLK`: the lock taken, or `None` when it is another's. `F_GETLK`: the holder, or `None`.
    fn record_lock(&self, slot: usize, command: i32) -> io::Result<Option<libc::flock>> {
        // SAFETY: all-zero is a valid `flock`.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        // Both constants are 0 and 1: they fit.
        lock.l_type = libc::F_WRLCK.try_into().unwrap_or_default();
        lock.l_whence = libc::SEEK_SET.try_into().unwrap_or_default();
        lock.l_start = slot.try_into().map_err(io::Error::other)?;
        lock.l_len = 1;
        // SAFETY: an open descriptor and a whole `flock`.
        if unsafe { libc::fcntl(self.alive.as_raw_fd(), command, &raw mut lock) } != 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EACCES | libc::EAGAIN) => Ok(None),
                _ => Err(error),
            };
        }
        Ok((command == libc::F_SETLK || i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock))
    }

    /// The PID of a slot's living process as this process sees it.
    fn living(&self, slot: usize) -> Option<u32> {
        let process = &self.shared.processes[slot];
        let pid = process.pid.load(Acquire);
        if pid == 0 {
            return None;
        }
        // A process is not told of its own locks.
        if pid == std::process::id() && start_time(pid) == Some(process.start.load(Relaxed)) {
            return Some(pid);
        }
        // The kernel translates the holder's PID to our namespace; 0 means that it is not visible here.
        let holder = self.record_lock(slot, libc::F_GETLK).ok()??;
        Some(u32::try_from(holder.l_pid).ok().filter(|pid| *pid != 0).unwrap_or(pid))
    }

    /// Returns what dead processes held.
    pub fn sweep(&self, _rm: &RmGuard<'_>) {
        for slot in 0..MAX_PROCESSES {
            if self.shared.processes[slot].pid.load(Acquire) != 0 && self.living(slot).is_none() {
                self.clear(slot);
            }
        }
    }

    fn clear(&self, slot: usize) {
        let process = &self.shared.processes[slot];
        for (gpu, row) in process.rows.iter().enumerate().take(self.config.gpus.len()) {
            let _lock = self.gpu_lock(gpu);
            let gone = row.bytes.swap(0, Relaxed) + row.context_bytes.swap(0, Relaxed);
            self.shared.gpus[gpu].used.fetch_sub(gone, Relaxed);
            row.sm.store(0, Relaxed);
            row.memory.store(0, Relaxed);
        }
        process.pid.store(0, Release);
    }

    /// Takes `bytes` of a GPU for a process.
    pub fn charge(&self, rm: &RmGuard<'_>, slot: Slot, gpu: usize, bytes: u64) -> Result<(), OutOfMemory> {
        self.take(rm, slot, gpu, bytes, |row| &row.bytes)
    }

    /// As [`Self::charge`], for what a context itself takes.
    pub fn charge_context(&self, rm: &RmGuard<'_>, slot: Slot, gpu: usize) -> Result<(), OutOfMemory> {
        self.take(rm, slot, gpu, self.config.gpus[gpu].context_bytes, |row| &row.context_bytes)
    }

    fn take(
        &self,
        rm: &RmGuard<'_>,
        slot: Slot,
        gpu: usize,
        bytes: u64,
        field: impl Fn(&Row) -> &std::sync::atomic::AtomicU64,
    ) -> Result<(), OutOfMemory> {
        for swept in [false, true] {
            {
                let _lock = self.gpu_lock(gpu);
                if self.room(gpu).is_some_and(|room| bytes <= room) {
                    field(&self.shared.processes[slot.0].rows[gpu]).fetch_add(bytes, Relaxed);
                    self.shared.gpus[gpu].used.fetch_add(bytes, Relaxed);
                    return Ok(());
                }
            }
            if !swept {
                self.sweep(rm);
            }
        }
        Err(OutOfMemory)
    }

    fn room(&self, gpu: usize) -> Option<u64> {
        let config = &self.config.gpus[gpu];
        config.capacity.checked_sub(config.reserved)?.checked_sub(self.used(gpu))
    }

    pub fn give_back(&self, slot: Slot, gpu: usize, bytes: u64) {
        let _lock = self.gpu_lock(gpu);
        self.shared.processes[slot.0].rows[gpu].bytes.fetch_sub(bytes, Relaxed);
        self.shared.gpus[gpu].used.fetch_sub(bytes, Relaxed);
    }

    pub fn give_back_context(&self, slot: Slot, gpu: usize) {
        let _lock = self.gpu_lock(gpu);
        let gone = self.shared.processes[slot.0].rows[gpu].context_bytes.swap(0, Relaxed);
        self.shared.gpus[gpu].used.fetch_sub(gone, Relaxed);
    }

    /// Bytes of all processes on a GPU, contexts included, without the driver's own.
    pub fn used(&self, gpu: usize) -> u64 {
        self.shared.gpus[gpu].used.load(Relaxed)
    }

    pub fn free(&self, gpu: usize) -> u64 {
        self.room(gpu).unwrap_or(0)
    }

    pub fn set_utilization(&self, slot: Slot, gpu: usize, sm: u32, memory: u32) {
        let row = &self.shared.processes[slot.0].rows[gpu];
        row.sm.store(sm, Relaxed);
        row.memory.store(memory, Relaxed);
    }

    /// The living processes with anything on a GPU.
    pub fn processes(&self, rm: &RmGuard<'_>, gpu: usize) -> Vec<ProcessRow> {
        self.sweep(rm);
        let _lock = self.gpu_lock(gpu);
        let row_of = |slot| {
            let pid = self.living(slot)?;
            let row = &self.shared.processes[slot].rows[gpu];
            let (bytes, context_bytes) = (row.bytes.load(Relaxed), row.context_bytes.load(Relaxed));
            let (sm, memory) = (row.sm.load(Relaxed), row.memory.load(Relaxed));
            (bytes + context_bytes > 0).then_some(ProcessRow { pid, bytes, context_bytes, sm, memory })
        };
        (0..MAX_PROCESSES).filter_map(row_of).collect()
    }

    /// Whether a process that made itself known is still there; for handles passed between processes.
    pub fn is_alive(&self, pid: u32, start: u64) -> bool {
        self.shared.processes.iter().enumerate().any(|(slot, process)| {
            process.pid.load(Acquire) == pid
                && process.start.load(Relaxed) == start
                && self.living(slot).is_some()
        })
    }
}

fn map_shared(file: &File) -> io::Result<&'static Shared> {
    let address = layout::map(file, 0, size_of::<Shared>())?;
    // SAFETY: the mapping has the size of `Shared`, is page-aligned and is never unmapped; all-zero is a valid
    // `Shared`, and everything in it is atomic or a lock.
    Ok(unsafe { &*address.cast::<Shared>() })
}

/// Field 22 of `/proc/<pid>/stat`. `None` when there is no such process.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command may hold spaces and brackets: count from its end.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The clock of the eBPF programs (`bpf_ktime_get_ns`).
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a whole `timespec` to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
