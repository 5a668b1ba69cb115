//! Owns what the simulated GPUs of one node share: memory, locks, processes, and the driver's own record.
//! Refuses to exist by accident: without `COTENANT_SIM_NODE` there is no node, and every device name says SIMULATED.

mod holds;
mod lock;
mod nap;
mod node;
mod number;
mod queue;
mod sleeps;
pub mod truth;

pub use holds::Turn;
pub use nap::{Nap, ran};
pub use number::{PROC_VARIABLE, own_pid, own_thread};
pub use queue::{Held, LockName, Mode, Waited, asleep};
pub use sleeps::Sleep;

pub use node::{GpuConfig, MAX_GPUS, Node, NodeConfig, NodeError, Process, monotonic_ns, start_time};

/// Names the directory of the node that a process takes part in.
pub const NODE_VARIABLE: &str = "COTENANT_SIM_NODE";
/// Names a device for the kernel boundary when a node is made; without it that is an ordinary file, which refuses every
/// ioctl. For tests/kernels, where a module stands in for nvidia-uvm.
pub const UVM_VARIABLE: &str = "COTENANT_SIM_UVM";
/// Device memory is handed out in pieces of this size.
pub const PAGE: u64 = 2 << 20;

/// `bytes` in whole pages.
pub const fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE).saturating_mul(PAGE)
}
