//! Owns the way to the node's shared state: all that this library knows of `cotenant-sim-state`.
//! Refuses NVML spelling, and figures that neither the state nor `nvml.json` holds.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cotenant_sim_state::{LockName, Mode, Node, NodeConfig, monotonic_ns};

use crate::faults::FaultFile;

/// A process query on an idle H200 (facts.md §4), under the lock that every tenant's calls wait for.
const PROCESS_QUERY: Duration = Duration::from_micros(60);

/// Bytes of one GPU: `total = reserved + used + free`.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) used: u64,
}

/// A living process with anything on a GPU.
#[derive(Clone, Copy)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) bytes: u64,
}

pub(crate) struct Host {
    pub(crate) driver_version: String,
    pub(crate) faults: FaultFile,
    directory: PathBuf,
    node: Node,
}

impl Host {
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        let config: NodeConfig = serde_json::from_slice(&std::fs::read(directory.join("node.json"))?)?;
        Ok(Self {
            driver_version: config.driver_version,
            faults: FaultFile::new(directory.join("nvml.json")),
            directory: directory.to_owned(),
            node: Node::at(directory).map_err(io::Error::other)?,
        })
    }

    /// The node's device files, opened; a node without any has none to open.
    pub(crate) fn devices(&self) -> io::Result<Vec<File>> {
        let Ok(entries) = std::fs::read_dir(self.directory.join("dev")) else { return Ok(Vec::new()) };
        entries.map(|entry| File::open(entry?.path())).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.node.gpu_count()
    }

    pub(crate) fn name(&self, gpu: usize) -> String {
        self.node.name(gpu)
    }

    pub(crate) fn uuid(&self, gpu: usize) -> String {
        let hex = |bytes: &[u8]| bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        let uuid = self.node.uuid(gpu);
        let [first, second, third, fourth, last] =
            [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
        format!("GPU-{first}-{second}-{third}-{fourth}-{last}")
    }

    pub(crate) fn memory(&self, gpu: usize) -> Memory {
        let (total, reserved, used) = self.node.memory(gpu);
        Memory { total, reserved, used }
    }

    /// As the driver answers a process query: in the queue of everybody's calls.
    pub(crate) fn query_processes(&self, gpu: usize) -> Vec<Process> {
        if self.node.scale() <= 0.0 {
            return self.processes(gpu);
        }
        self.hold(PROCESS_QUERY.mul_f64(self.node.scale()));
        self.processes(gpu)
    }

    /// Keeps everybody else out of the driver for so long: its source asserts the API lock and every GPU's.
    pub(crate) fn hold(&self, takes: Duration) {
        let names = [LockName::Api].into_iter().chain((0..self.count()).map(LockName::Gpu));
        let _held: Vec<_> = names.map(|name| self.node.hold(name, Mode::Exclusive)).collect();
        let until = monotonic_ns() + u64::try_from(takes.as_nanos()).unwrap_or(0);
        while monotonic_ns() < until {
            std::hint::spin_loop();
        }
    }

    pub(crate) fn processes(&self, gpu: usize) -> Vec<Process> {
        let there = self.node.processes().into_iter();
        there
            .filter(|process| process.contexts[gpu] > 0 || process.bytes[gpu] > 0)
            .map(|process| Process { pid: process.pid, bytes: process.bytes[gpu] })
            .collect()
    }
}
