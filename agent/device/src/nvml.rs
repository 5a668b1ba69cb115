//! Owns the few questions that are asked of NVML, and the faults it answers with.
//! Refuses policy: fallbacks, merging, timing and retries are the poll's.

use std::time::Duration;

use cotenant_model::{
    Absence, GpuId,
    device::{ComputeMode, LibraryFacts},
};

pub type Answer<T> = Result<T, Fault>;

/// Loads and initialises the library. Runs on the polling thread, as often as needed.
pub type Opener = Box<dyn Fn() -> Answer<Box<dyn Nvml>> + Send>;

/// Opens the library for its events. Runs on the listening thread, as often as needed.
pub type Bell = Box<dyn Fn() -> Answer<Box<dyn Alarms>> + Send>;

/// A fault (Xid) that NVML tells of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    pub gpu: GpuId,
    pub code: u32,
    pub gpu_instance: Option<u32>,
}

/// An NVML opened for its events. Dropping it frees the set and lets the library go.
pub trait Alarms: Send {
    /// GPUs that tell of their faults.
    fn watched(&self) -> usize;
    /// The next fault, or none within `at_most`.
    fn wait(&mut self, at_most: Duration) -> Answer<Option<Alarm>>;
}

/// A GPU or a MIG instance within one opened library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(pub usize);

/// An opened NVML. Dropping it shuts the library down and unloads it. Each method is one NVML function.
pub trait Nvml {
    fn facts(&self) -> Answer<LibraryFacts>;
    fn count(&self) -> Answer<u32>;
    fn device(&self, index: u32) -> Answer<Handle>;
    fn text(&self, device: Handle, text: Text) -> Answer<String>;
    fn memory(&self, device: Handle, version: MemoryVersion) -> Answer<MemoryRow>;
    fn processes(&self, device: Handle, list: List, version: ListVersion) -> Answer<RawRows>;
    /// Samples newer than `since` (NVML's own microseconds).
    fn process_utilization(&self, device: Handle, since: u64) -> Answer<Vec<UtilizationRow>>;
    /// Percent of time: kernels running, memory being read or written.
    fn utilization(&self, device: Handle) -> Answer<(u32, u32)>;
    fn figure(&self, device: Handle, figure: Figure) -> Answer<u64>;
    fn compute_mode(&self, device: Handle) -> Answer<ComputeMode>;
    fn mig_enabled(&self, device: Handle) -> Answer<bool>;
    /// How many slots there can be, not how many are taken.
    fn mig_slots(&self, device: Handle) -> Answer<u32>;
    fn mig_device(&self, device: Handle, slot: u32) -> Answer<Handle>;
    fn mig_parent(&self, instance: Handle) -> Answer<Handle>;
    /// GPU instance and compute instance.
    fn mig_ids(&self, instance: Handle) -> Answer<(u32, u32)>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Text {
    Uuid,
    Name,
    Pci,
}

impl Text {
    pub const fn function(self) -> &'static str {
        match self {
            Self::Uuid => "nvmlDeviceGetUUID",
            Self::Name => "nvmlDeviceGetName",
            Self::Pci => "nvmlDeviceGetPciInfo_v3",
        }
    }
}

/// A single number, in NVML's unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Figure {
    PowerMilliwatts,
    EnergyMillijoules,
    TemperatureCelsius,
    PcieTransmitKilobytes,
    PcieReceiveKilobytes,
    ClocksEventReasons,
    EccCorrected,
    EccUncorrected,
}

impl Figure {
    pub const fn function(self) -> &'static str {
        match self {
            Self::PowerMilliwatts => "nvmlDeviceGetPowerUsage",
            Self::EnergyMillijoules => "nvmlDeviceGetTotalEnergyConsumption",
            Self::TemperatureCelsius => "nvmlDeviceGetTemperature",
            Self::PcieTransmitKilobytes | Self::PcieReceiveKilobytes => "nvmlDeviceGetPcieThroughput",
            Self::ClocksEventReasons => "nvmlDeviceGetCurrentClocksThrottleReasons",
            Self::EccCorrected | Self::EccUncorrected => "nvmlDeviceGetTotalEccErrors",
        }
    }
}

impl Figure {
    /// Whether NVML gives it in 32 bits, with its own all-ones for "not available".
    pub const fn is_narrow(self) -> bool {
        matches!(
            self,
            Self::PowerMilliwatts
                | Self::TemperatureCelsius
                | Self::PcieTransmitKilobytes
                | Self::PcieReceiveKilobytes
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryVersion {
    /// `reserved` apart from `used`.
    V2,
    /// `reserved` inside `used`.
    V1,
}

impl MemoryVersion {
    pub const fn function(self) -> &'static str {
        match self {
            Self::V2 => "nvmlDeviceGetMemoryInfo_v2",
            Self::V1 => "nvmlDeviceGetMemoryInfo",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRow {
    pub total: u64,
    pub used: u64,
    pub free: u64,
    pub reserved: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum List {
    Compute,
    Graphics,
    Mps,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ListVersion {
    V3,
    V2,
    Unversioned,
}

impl ListVersion {
    /// Newest first: the order in which to try.
    pub const ALL: [Self; 3] = [Self::V3, Self::V2, Self::Unversioned];

    pub const fn function(self, list: List) -> &'static str {
        match (list, self) {
            (List::Compute, Self::V3) => "nvmlDeviceGetComputeRunningProcesses_v3",
            (List::Compute, Self::V2) => "nvmlDeviceGetComputeRunningProcesses_v2",
            (List::Compute, Self::Unversioned) => "nvmlDeviceGetComputeRunningProcesses",
            (List::Graphics, Self::V3) => "nvmlDeviceGetGraphicsRunningProcesses_v3",
            (List::Graphics, Self::V2) => "nvmlDeviceGetGraphicsRunningProcesses_v2",
            (List::Graphics, Self::Unversioned) => "nvmlDeviceGetGraphicsRunningProcesses",
            (List::Mps, Self::V3) => "nvmlDeviceGetMPSComputeRunningProcesses_v3",
            (List::Mps, Self::V2) => "nvmlDeviceGetMPSComputeRunningProcesses_v2",
            (List::Mps, Self::Unversioned) => "nvmlDeviceGetMPSComputeRunningProcesses",
        }
    }
}

/// What the library wrote, before anybody believes a row width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawRows {
    pub count: usize,
    /// Eight-byte words as written; room for the widest row known.
    pub words: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtilizationRow {
    pub pid: u32,
    pub timestamp: u64,
    pub sm_percent: u32,
    pub memory_percent: u32,
}

/// Why NVML did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("NVML is not initialised")]
    Uninitialized,
    #[error("NVML refused an argument")]
    InvalidArgument,
    #[error("this device or driver does not support it")]
    NotSupported,
    #[error("not permitted; run as root, and for MIG parents set NVIDIA_MIG_MONITOR_DEVICES=all")]
    NoPermission,
    #[error("NVML knows no such thing")]
    NotFound,
    #[error("the list did not fit")]
    InsufficientSize,
    #[error("the NVIDIA kernel module is not loaded; run `modprobe nvidia` or check `dmesg`")]
    DriverNotLoaded,
    #[error("NVML itself timed out")]
    NvmlTimeout,
    #[error("this library does not export the function")]
    SymbolMissing,
    #[error("the GPU fell off the bus or needs a reset; check `dmesg` for Xid 79")]
    GpuLost,
    #[error("NVML and the kernel module are of different versions; reload the module or reboot")]
    VersionMismatch,
    #[error("the NVML library could not be loaded: {reason}; install the driver or set the library's path")]
    LibraryMissing { reason: String },
    #[error("NVML reported an unknown error")]
    Unknown,
    #[error("NVML answered with something that cannot be")]
    Implausible,
    #[error("NVML failed with code {code}")]
    Code { code: u32 },
    #[error("the poll was given up after an earlier call passed its deadline")]
    Abandoned,
}

impl Fault {
    /// `nvmlReturn_t` other than success.
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Uninitialized,
            2 => Self::InvalidArgument,
            3 => Self::NotSupported,
            4 => Self::NoPermission,
            6 => Self::NotFound,
            7 => Self::InsufficientSize,
            9 => Self::DriverNotLoaded,
            10 => Self::NvmlTimeout,
            // FUNCTION_NOT_FOUND, and ARGUMENT_VERSION_MISMATCH: this library wants an older question.
            13 | 25 => Self::SymbolMissing,
            // GPU_IS_LOST, RESET_REQUIRED.
            15 | 16 => Self::GpuLost,
            18 => Self::VersionMismatch,
            999 => Self::Unknown,
            code => Self::Code { code },
        }
    }

    pub const fn absence(&self) -> Absence {
        match self {
            Self::NotSupported => Absence::NotSupported,
            Self::NoPermission => Absence::NoPermission,
            Self::NvmlTimeout | Self::Abandoned => Absence::Timeout,
            Self::SymbolMissing => Absence::SymbolMissing,
            Self::GpuLost => Absence::GpuLost,
            Self::VersionMismatch => Absence::VersionMismatch,
            Self::LibraryMissing { .. } => Absence::LibraryMissing,
            Self::Implausible => Absence::Implausible,
            Self::Uninitialized
            | Self::InvalidArgument
            | Self::NotFound
            | Self::InsufficientSize
            | Self::DriverNotLoaded
            | Self::Unknown
            | Self::Code { .. } => Absence::Failed,
        }
    }

    /// Whether the call failed, as opposed to saying "no such thing here".
    pub const fn is_error(&self) -> bool {
        !matches!(
            self,
            Self::NotSupported
                | Self::NotFound
                | Self::InvalidArgument
                | Self::InsufficientSize
                | Self::SymbolMissing
                | Self::Abandoned
        )
    }
}
