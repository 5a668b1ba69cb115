//! Owns what a wait inside a driver call is: its class by the kernel stack at blocking, and who ended it.
//! Refuses addresses: frames come in as symbol names, innermost first.

use std::fmt;

use crate::Tenant;

/// What a thread in a driver call was blocked on. Ordered as published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WaitClass {
    /// The driver's API lock, one for all GPUs of the host.
    RmApiLock,
    GpuLock,
    /// The GPU's memory manager scrubs pages before it hands them out.
    Reclaim,
    UvmEviction,
    /// A lock of the driver's user-space part (futex).
    UserspaceLock,
    /// Blocked in the driver's kernel modules on none of the above.
    Device,
    Other,
}

impl WaitClass {
    pub const ALL: &'static [Self] = &[
        Self::RmApiLock,
        Self::GpuLock,
        Self::Reclaim,
        Self::UvmEviction,
        Self::UserspaceLock,
        Self::Device,
        Self::Other,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RmApiLock => "rm_api_lock",
            Self::GpuLock => "gpu_lock",
            Self::Reclaim => "reclaim",
            Self::UvmEviction => "uvm_eviction",
            Self::UserspaceLock => "userspace_lock",
            Self::Device => "device",
            Self::Other => "other",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|class| class.as_str() == name)
    }
}

impl fmt::Display for WaitClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// Who ended a wait, or held what was waited for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Culprit {
    Tenant(Tenant),
    /// An interrupt or a timer: the hardware was done.
    Device,
    /// A kernel thread.
    Kernel,
    /// Nobody was seen.
    Unknown,
}

impl Culprit {
    /// The `culprit` label.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Tenant(tenant) => &tenant.name,
            Self::Device => "device",
            Self::Kernel => "kernel",
            Self::Unknown => "unknown",
        }
    }

    /// How the culprit stands to a victim: only a neighbour is somebody else's fault.
    pub fn relation(&self, victim: &Tenant) -> &'static str {
        match self {
            Self::Tenant(tenant) if tenant == victim => "self",
            Self::Tenant(_) => "neighbour",
            Self::Device => "device",
            Self::Kernel => "kernel",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}
