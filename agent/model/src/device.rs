//! Owns what NVML said about the GPUs, and why it did not say something.
//! Refuses defaults: a figure that was not read is an [`Absence`], never a zero.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::GpuId;

/// Why a figure is not there. Bounded: this is a label value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Absence {
    /// The device or driver does not have this figure.
    NotSupported,
    /// NVML answered "not available" (all ones) for it.
    NotAvailable,
    NoPermission,
    /// The call did not come back within its deadline.
    Timeout,
    GpuLost,
    /// NVML and the kernel module are of different versions.
    VersionMismatch,
    /// The library could not be loaded.
    LibraryMissing,
    /// This library is too old to export the function.
    SymbolMissing,
    /// The answer contradicted itself (a PID that cannot be, more bytes than the card has).
    Implausible,
    /// The agent is not in the host's PID namespace, so process lists mean nothing here.
    ForeignPidNamespace,
    /// Any other NVML error.
    Failed,
    /// Not asked yet.
    NotYet,
    /// Handles are dropped on request (driver upgrade).
    Released,
    /// Switched off by configuration.
    Disabled,
}

impl Absence {
    pub const ALL: &'static [Self] = &[
        Self::NotSupported,
        Self::NotAvailable,
        Self::NoPermission,
        Self::Timeout,
        Self::GpuLost,
        Self::VersionMismatch,
        Self::LibraryMissing,
        Self::SymbolMissing,
        Self::Implausible,
        Self::ForeignPidNamespace,
        Self::Failed,
        Self::NotYet,
        Self::Released,
        Self::Disabled,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotSupported => "not_supported",
            Self::NotAvailable => "not_available",
            Self::NoPermission => "no_permission",
            Self::Timeout => "timeout",
            Self::GpuLost => "gpu_lost",
            Self::VersionMismatch => "version_mismatch",
            Self::LibraryMissing => "library_missing",
            Self::SymbolMissing => "symbol_missing",
            Self::Implausible => "implausible",
            Self::ForeignPidNamespace => "foreign_pid_namespace",
            Self::Failed => "failed",
            Self::NotYet => "not_yet",
            Self::Released => "released",
            Self::Disabled => "disabled",
        }
    }
}

/// A figure, or the reason why there is none.
pub type Reading<T> = Result<T, Absence>;

/// Everything NVML said in one poll.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSample {
    /// Monotonic time since the agent started at which the poll began.
    pub taken: Duration,
    /// `Ok` when the library answers; otherwise why there are no GPUs here.
    pub library: Reading<LibraryFacts>,
    pub gpus: Vec<GpuSample>,
    pub calls: Vec<CallCost>,
}

impl DeviceSample {
    /// Before the first poll, or when NVML cannot be had.
    pub fn absent(taken: Duration, reason: Absence) -> Self {
        Self { taken, library: Err(reason), gpus: Vec::new(), calls: Vec::new() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryFacts {
    pub driver_version: String,
    pub nvml_version: String,
}

/// What the agent's own NVML calls cost, cumulative since start, by function name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCost {
    pub function: &'static str,
    pub calls: u64,
    pub errors: u64,
    pub timeouts: u64,
    pub total: Duration,
    /// Cumulative counts of calls at or below 10 us, 100 us, 1 ms, 10 ms, 100 ms, 1 s, then the rest.
    pub buckets: [u64; 7],
}

#[derive(Clone, Debug, PartialEq)]
pub struct GpuSample {
    pub id: GpuId,
    pub index: u32,
    pub name: String,
    /// PCI address, `00000000:01:00.0`.
    pub pci: String,
    /// For a MIG instance: the whole GPU it is cut from.
    pub parent: Option<GpuId>,
    pub memory: Reading<DeviceMemory>,
    pub processes: Reading<Vec<GpuProcess>>,
    pub process_utilization: Reading<Vec<ProcessUtilization>>,
    /// Share of the last sample period with a kernel running, 0 to 1.
    pub utilization: Reading<f64>,
    /// Share of the last sample period with memory being read or written, 0 to 1. Never bytes.
    pub memory_bandwidth_utilization: Reading<f64>,
    pub power_watts: Reading<f64>,
    pub energy_joules: Reading<f64>,
    pub temperature_celsius: Reading<f64>,
    pub pcie_transmit_bytes_per_second: Reading<f64>,
    pub pcie_receive_bytes_per_second: Reading<f64>,
    /// NVML's clocks-event (throttle) reason bits.
    pub clocks_event_reasons: Reading<u64>,
    pub ecc_corrected: Reading<u64>,
    pub ecc_uncorrected: Reading<u64>,
    pub mig_enabled: Reading<bool>,
    pub compute_mode: Reading<ComputeMode>,
    /// When figures that do not come with every poll were read, by reading, since the agent's start. Whatever is not in here
    /// is as old as the poll.
    pub read: BTreeMap<&'static str, Duration>,
}

impl GpuSample {
    /// One of which nothing is read.
    pub fn absent(id: GpuId, index: u32, reason: Absence) -> Self {
        Self {
            id,
            index,
            name: String::new(),
            pci: String::new(),
            parent: None,
            memory: Err(reason),
            processes: Err(reason),
            process_utilization: Err(reason),
            utilization: Err(reason),
            memory_bandwidth_utilization: Err(reason),
            power_watts: Err(reason),
            energy_joules: Err(reason),
            temperature_celsius: Err(reason),
            pcie_transmit_bytes_per_second: Err(reason),
            pcie_receive_bytes_per_second: Err(reason),
            clocks_event_reasons: Err(reason),
            ecc_corrected: Err(reason),
            ecc_uncorrected: Err(reason),
            mig_enabled: Err(reason),
            compute_mode: Err(reason),
            read: BTreeMap::new(),
        }
    }
}

/// Who may have contexts on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ComputeMode {
    /// Anybody, any number.
    Default,
    /// One thread. Drivers of this decade take it for one process.
    ExclusiveThread,
    /// Nobody.
    Prohibited,
    /// One process; an MPS server is one.
    ExclusiveProcess,
}

impl ComputeMode {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ExclusiveThread => "exclusive_thread",
            Self::Prohibited => "prohibited",
            Self::ExclusiveProcess => "exclusive_process",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    pub total: u64,
    /// As NVML gives it: without `reserved` when that is known, with it when not.
    pub used: u64,
    pub free: u64,
    /// `None` with the version-1 call, which counts it into `used`.
    pub reserved: Option<u64>,
}

/// One process on one GPU, merged from the compute, graphics and MPS lists by PID.
#[allow(
    clippy::struct_excessive_bools,
    reason = "NVML's lists are four, and a process may be in any of them"
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    pub pid: u32,
    pub bytes: Reading<u64>,
    pub compute: bool,
    pub graphics: bool,
    pub mps_client: bool,
    pub mps_server: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessUtilization {
    pub pid: u32,
    /// 0 to 1.
    pub sm: f64,
    /// 0 to 1, memory bandwidth time; never bytes.
    pub memory: f64,
}
