//! Owns the ioctls by which the driver tells the kernel what it maps where.
//! Refuses to look at the answer: there is no kernel module behind them.
//!
//! nvidia-uvm: 0x21 map {base, length, offset, UUID}, 0x22 free {base}, 0x42 unmap {base, length, UUID}, 0x49 create
//! range {base, length}.

use std::os::fd::AsRawFd;

use cotenant_sim_state::Node;

#[repr(C)]
struct Map {
    base: u64,
    length: u64,
    offset: u64,
    uuid: [u8; 16],
}

pub(crate) fn map(node: &Node, base: u64, length: u64, gpu: usize) {
    let range = [base, length];
    let map = Map { base, length, offset: 0, uuid: node.uuid(gpu) };
    // SAFETY: both arguments outlive the calls; the file is an ordinary one and refuses every ioctl.
    unsafe {
        libc::ioctl(node.boundary.as_raw_fd(), 0x49, &raw const range);
        libc::ioctl(node.boundary.as_raw_fd(), 0x21, &raw const map);
    }
}

/// Into an address range that is there: how pools grow.
pub(crate) fn grow(node: &Node, base: u64, length: u64, gpu: usize) {
    let map = Map { base, length, offset: 0, uuid: node.uuid(gpu) };
    // SAFETY: the argument outlives the call; the file is an ordinary one and refuses every ioctl.
    unsafe { libc::ioctl(node.boundary.as_raw_fd(), 0x21, &raw const map) };
}

#[repr(C)]
struct Unmap {
    base: u64,
    length: u64,
    uuid: [u8; 16],
}

/// The range stays: how pools give back.
pub(crate) fn shrink(node: &Node, base: u64, length: u64, gpu: usize) {
    let unmap = Unmap { base, length, uuid: node.uuid(gpu) };
    // SAFETY: as above.
    unsafe { libc::ioctl(node.boundary.as_raw_fd(), 0x42, &raw const unmap) };
}

pub(crate) fn unmap(node: &Node, base: u64) {
    // SAFETY: as above.
    unsafe { libc::ioctl(node.boundary.as_raw_fd(), 0x22, &raw const base) };
}
