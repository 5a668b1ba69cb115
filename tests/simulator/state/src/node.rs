//! Owns the node's shared memory: GPUs, the processes on them, and who holds how much.
//! Refuses to trust that a process cleans up: the dead are swept whenever memory is short or asked about.

use std::{
    env, fmt, fs,
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use serde::{Deserialize, Serialize};

use crate::{
    Held, LockName, Mode, NODE_VARIABLE, UVM_VARIABLE, Waited,
    lock::{Lock, Locked},
    number::{own_pid, proc_file},
    queue::Queue,
};

pub const MAX_GPUS: usize = 16;
const MAX_PROCESSES: usize = 1024;
const NAME: usize = 64;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct GpuConfig {
    pub capacity: u64,
    /// What the driver keeps for itself.
    #[serde(default)]
    pub reserved: u64,
    /// What a context costs a process.
    #[serde(default)]
    pub context_bytes: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct NodeConfig {
    pub gpus: Vec<GpuConfig>,
    /// 1 is calibrated to an H200; 0 is no delay at all.
    pub scale: f64,
    /// A waiter for the API lock spins for up to so many microseconds, at random, before it blocks.
    #[serde(default = "spin_us")]
    pub spin_us: u64,
    #[serde(default = "driver_version")]
    pub driver_version: String,
}

/// Measured with two idle processors: calls of two equal processes take 2.0 to 2.4 times as long (84 to 102 us, 43 alone)
/// and are blocked for 6 to 13 % of that, with 80 and with 60 us of spinning.
fn spin_us() -> u64 {
    70
}

fn driver_version() -> String {
    "580.159.04".to_owned()
}

impl NodeConfig {
    /// `count` GPUs of 141 GB, as an H200 has them.
    pub fn h200(count: usize, scale: f64) -> Self {
        let gpu = GpuConfig { capacity: 150_754_820_096, reserved: 645 << 20, context_bytes: 518 << 20 };
        Self { gpus: vec![gpu; count], scale, spin_us: spin_us(), driver_version: driver_version() }
    }
}

#[repr(C)]
struct Gpu {
    uuid: [u8; 16],
    capacity: u64,
    reserved: u64,
    context_bytes: u64,
    used: u64,
    name: [u8; NAME],
}

/// One process that uses the node.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Process {
    /// 0: the slot is free.
    pub pid: u32,
    pad: u32,
    pub start: u64,
    /// Device memory by GPU, contexts included.
    pub bytes: [u64; MAX_GPUS],
    pub contexts: [u32; MAX_GPUS],
}

#[repr(C)]
struct Shared {
    /// Guards everything below; never held while waiting.
    table: Lock,
    /// The locks that neighbours wait on: one for all, one a GPU.
    api: Queue,
    gpu_locks: [Queue; MAX_GPUS],
    gpu_count: u64,
    scale: f64,
    spin_ns: u64,
    gpus: [Gpu; MAX_GPUS],
    processes: [Process; MAX_PROCESSES],
}

#[derive(Debug)]
pub enum NodeError {
    /// `COTENANT_SIM_NODE` is not set: this is no simulated node.
    NotSimulated,
    Io(PathBuf, io::Error),
    Config(String),
}

impl fmt::Display for NodeError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotSimulated => write!(formatter, "{NODE_VARIABLE} is not set"),
            Self::Io(path, error) => write!(formatter, "{}: {error}", path.display()),
            Self::Config(reason) => write!(formatter, "{reason}"),
        }
    }
}

impl std::error::Error for NodeError {}

/// A process's view of the node.
pub struct Node {
    directory: PathBuf,
    /// Tells this view of a node from others of the process.
    view: u64,
    shared: *mut Shared,
    /// Held for the kernel boundary: mappings are announced on it.
    pub boundary: File,
}

// SAFETY: the mapping lives as long as the value, and what is in it is guarded by its locks.
unsafe impl Send for Node {}
// SAFETY: as above.
unsafe impl Sync for Node {}

impl Node {
    /// Makes a node in a fresh directory.
    pub fn create(directory: &Path, config: &NodeConfig) -> Result<Self, NodeError> {
        if config.gpus.is_empty() || config.gpus.len() > MAX_GPUS {
            return Err(NodeError::Config(format!(
                "{} GPUs: allowed are 1 to {MAX_GPUS}",
                config.gpus.len()
            )));
        }
        let failed = |error| NodeError::Io(directory.to_owned(), error);
        fs::create_dir_all(directory.join("truth")).map_err(failed)?;
        let text =
            serde_json::to_string_pretty(config).map_err(|error| NodeError::Config(error.to_string()))?;
        fs::write(directory.join("node.json"), text).map_err(failed)?;
        let state = File::create(directory.join("state")).map_err(failed)?;
        state.set_len(size_of::<Shared>() as u64).map_err(failed)?;
        let boundary = directory.join("nvidia-uvm");
        match env::var_os(UVM_VARIABLE) {
            Some(device) => std::os::unix::fs::symlink(device, boundary).map_err(failed)?,
            None => drop(File::create(boundary).map_err(failed)?),
        }
        let gpu_locks = (0..config.gpus.len()).map(LockName::Gpu);
        for name in gpu_locks.chain([LockName::Api]) {
            File::create(name.path(directory)).map_err(failed)?;
        }
        let node = Self::at(directory)?;
        // SAFETY: zeroed memory that no other process knows of yet.
        unsafe {
            let shared = &mut *node.shared;
            shared.table.make();
            shared.gpu_count = config.gpus.len() as u64;
            shared.scale = config.scale;
            shared.spin_ns = config.spin_us * 1_000;
            for (index, (gpu, from)) in shared.gpus.iter_mut().zip(&config.gpus).enumerate() {
                gpu.uuid = [0x51; 16];
                gpu.uuid[15] = u8::try_from(index).unwrap_or(0);
                gpu.capacity = from.capacity;
                gpu.reserved = from.reserved;
                gpu.context_bytes = from.context_bytes;
                let name = format!("SIMULATED H200 {index}");
                gpu.name[..name.len()].copy_from_slice(name.as_bytes());
            }
        }
        Ok(node)
    }

    /// The node that the environment names.
    pub fn open() -> Result<Self, NodeError> {
        let directory = env::var_os(NODE_VARIABLE).ok_or(NodeError::NotSimulated)?;
        Self::at(Path::new(&directory))
    }

    pub fn at(directory: &Path) -> Result<Self, NodeError> {
        static VIEWS: AtomicU64 = AtomicU64::new(0);
        let path = directory.join("state");
        let failed = |error| NodeError::Io(path.clone(), error);
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        // SAFETY: a shared mapping of a file made by `create` with this very length.
        let shared = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<Shared>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if shared == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let boundary = File::open(directory.join("nvidia-uvm")).map_err(failed)?;
        let view = VIEWS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { directory: directory.to_owned(), view, shared: shared.cast(), boundary })
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped for as long as `self`; values read outside the table lock are set once at creation.
        unsafe { &*self.shared }
    }

    fn locked<T>(&self, work: impl FnOnce(&mut Shared) -> T) -> T {
        let _held = self.table();
        // SAFETY: the table lock makes this the only reference that writes, in any process.
        work(unsafe { &mut *self.shared })
    }

    /// Where calls take time, waiting for the table must not look like waiting for the driver: it does not block.
    fn table(&self) -> Locked<'_> {
        if self.scale() > 0.0 { self.shared().table.hold_awake() } else { self.shared().table.hold() }
    }

    pub fn gpu_count(&self) -> usize {
        usize::try_from(self.shared().gpu_count).unwrap_or(0)
    }

    pub fn scale(&self) -> f64 {
        self.shared().scale
    }

    /// Waits for a lock of the driver's. Gives how it was come by as well, if it was not free.
    pub fn hold(&self, name: LockName, mode: Mode) -> io::Result<(Held<'_>, Option<Waited>)> {
        let shared = self.shared();
        let (queue, budget) = match name {
            LockName::Api => (&shared.api, random(shared.spin_ns)),
            // A semaphore in the real driver: nobody spins on it.
            LockName::Gpu(gpu) => (&shared.gpu_locks[gpu], 0),
        };
        queue.hold(&self.directory, self.view, name, mode, budget)
    }

    pub fn uuid(&self, gpu: usize) -> [u8; 16] {
        self.shared().gpus[gpu].uuid
    }

    pub fn name(&self, gpu: usize) -> String {
        String::from_utf8_lossy(&self.shared().gpus[gpu].name).trim_end_matches('\0').to_owned()
    }

    /// Capacity, reserved, used; the dead are swept first.
    pub fn memory(&self, gpu: usize) -> (u64, u64, u64) {
        self.locked(|shared| {
            sweep(shared);
            let gpu = &shared.gpus[gpu];
            (gpu.capacity, gpu.reserved, gpu.used)
        })
    }

    /// Everybody alive on the node.
    pub fn processes(&self) -> Vec<Process> {
        self.locked(|shared| {
            sweep(shared);
            shared.processes.iter().filter(|process| process.pid != 0).copied().collect()
        })
    }

    /// Takes device memory for this process. False: out of memory.
    pub fn take(&self, slot: usize, gpu: usize, bytes: u64) -> bool {
        self.locked(|shared| {
            if !fits(shared, gpu, bytes) {
                sweep(shared);
                if !fits(shared, gpu, bytes) {
                    return false;
                }
            }
            shared.gpus[gpu].used += bytes;
            shared.processes[slot].bytes[gpu] += bytes;
            true
        })
    }

    pub fn give(&self, slot: usize, gpu: usize, bytes: u64) {
        self.locked(|shared| {
            shared.gpus[gpu].used -= bytes;
            shared.processes[slot].bytes[gpu] -= bytes;
        });
    }

    /// A context comes to life: its overhead is taken once a process and GPU.
    pub fn open_context(&self, slot: usize, gpu: usize) -> bool {
        let bytes = self.shared().gpus[gpu].context_bytes;
        let first = self.locked(|shared| {
            shared.processes[slot].contexts[gpu] += 1;
            shared.processes[slot].contexts[gpu] == 1
        });
        if !first || self.take(slot, gpu, bytes) {
            return true;
        }
        self.locked(|shared| shared.processes[slot].contexts[gpu] -= 1);
        false
    }

    pub fn close_context(&self, slot: usize, gpu: usize) {
        let bytes = self.shared().gpus[gpu].context_bytes;
        let last = self.locked(|shared| {
            shared.processes[slot].contexts[gpu] -= 1;
            shared.processes[slot].contexts[gpu] == 0
        });
        if last {
            self.give(slot, gpu, bytes);
        }
    }

    /// This process's place in the table. `None`: the table is full.
    pub fn join(&self) -> Option<usize> {
        let pid = own_pid();
        let start = start_time(pid)?;
        self.locked(|shared| {
            sweep(shared);
            // After exec the process is the same to the kernel and new to the driver.
            if let Some(slot) = shared.processes.iter().position(|p| p.pid == pid && p.start == start) {
                clear(shared, slot);
            }
            let slot = shared.processes.iter().position(|process| process.pid == 0)?;
            shared.processes[slot].pid = pid;
            shared.processes[slot].start = start;
            Some(slot)
        })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `at`.
        unsafe { libc::munmap(self.shared.cast(), size_of::<Shared>()) };
    }
}

fn fits(shared: &Shared, gpu: usize, bytes: u64) -> bool {
    let gpu = &shared.gpus[gpu];
    gpu.used.saturating_add(gpu.reserved).saturating_add(bytes) <= gpu.capacity
}

fn clear(shared: &mut Shared, slot: usize) {
    for (gpu, bytes) in shared.gpus.iter_mut().zip(shared.processes[slot].bytes) {
        gpu.used -= bytes;
    }
    shared.processes[slot] =
        Process { pid: 0, pad: 0, start: 0, bytes: [0; MAX_GPUS], contexts: [0; MAX_GPUS] };
}

/// Gives back what dead processes held.
fn sweep(shared: &mut Shared) {
    for slot in 0..MAX_PROCESSES {
        let Process { pid, start, .. } = shared.processes[slot];
        if pid != 0 && start_time(pid) != Some(start) {
            clear(shared, slot);
        }
    }
}

/// Field 22 of `/proc/PID/stat`; `None` for a process that is gone or a zombie.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(proc_file(&format!("{pid}/stat"))).ok()?;
    let fields = stat.rsplit_once(") ")?.1;
    let mut fields = fields.split_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Up to `limit`: a real spinner gives up when the holder sleeps or the scheduler wants the processor.
fn random(limit: u64) -> u64 {
    if limit == 0 {
        return 0;
    }
    let mut mixed = monotonic_ns().wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^= mixed >> 29;
    mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) % (limit + 1)
}

pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_that_dies_does_not_wedge_the_node_and_its_memory_comes_back() {
        let directory = env::temp_dir().join(format!("sim-node-{}", std::process::id()));
        let node = Node::create(&directory, &NodeConfig::h200(1, 0.0)).expect("created");
        // SAFETY: the child only touches the shared node and then ends without cleaning up.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let slot = node.join().expect("a slot");
            assert!(node.take(slot, 0, 1 << 30));
            std::mem::forget(node.hold(LockName::Api, Mode::Exclusive).expect("free"));
            // SAFETY: ends at once, as a kill does.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        drop(node.hold(LockName::Api, Mode::Exclusive).expect("free again"));
        assert_eq!(node.memory(0).2, 0);
        assert!(node.processes().is_empty());
        fs::remove_dir_all(&directory).expect("removed");
    }
}
