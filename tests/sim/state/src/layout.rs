//! Owns the layout of the mapped state file, and the mapping itself.
//! Refuses derived figures that could go stale, but for `used`, which is recounted after a holder's death.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::config::MAX_GPUS;
use crate::lock::RobustLock;

pub(crate) const MAX_PROCESSES: usize = 256;
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"cotsim01");

#[repr(C)]
pub(crate) struct Shared {
    /// Written last: a file without it is not a node yet.
    pub(crate) magic: AtomicU64,
    pub(crate) rm: RobustLock,
    pub(crate) gpus: [SharedGpu; MAX_GPUS],
    pub(crate) processes: [SharedProcess; MAX_PROCESSES],
}

#[repr(C)]
pub(crate) struct SharedGpu {
    pub(crate) lock: RobustLock,
    /// Sum of the rows of this GPU.
    pub(crate) used: AtomicU64,
}

#[repr(C)]
pub(crate) struct SharedProcess {
    /// 0 when the slot is free.
    pub(crate) pid: AtomicU32,
    pub(crate) contexts: AtomicU32,
    pub(crate) start: AtomicU64,
    pub(crate) rows: [Row; MAX_GPUS],
}

#[repr(C)]
pub(crate) struct Row {
    /// Device bytes in 2 MiB pieces, without the context's.
    pub(crate) bytes: AtomicU64,
    pub(crate) context_bytes: AtomicU64,
    /// Percent, as the tenant says: nothing is computed here.
    pub(crate) sm: AtomicU32,
    pub(crate) memory: AtomicU32,
}

/// Maps `len` bytes of `file` from `offset`, shared and for as long as the process lives or until `munmap`.
pub(crate) fn map(file: &File, offset: usize, len: usize) -> io::Result<*mut u8> {
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            offset,
        )
    };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address.cast()) }
}
