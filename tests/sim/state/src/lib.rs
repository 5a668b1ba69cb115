//! Owns the state that the simulated GPUs of one node share across processes, and the truth their driver writes.
//! Refuses CUDA and NVML spelling: those are the two libraries' own, see `tests/sim/{cuda,nvml}`.

mod config;
mod layout;
mod lock;
mod node;
mod records;
mod replay;
mod truth;

pub use config::{ENV_NODE, GpuConfig, MAX_GPUS, NodeConfig, Uuid};
pub use lock::Guard;
pub use node::{Node, OutOfMemory, ProcessRow, RmGuard, Slot, monotonic_ns, start_time};
pub use records::{NO_GPU, Record, Writer};
pub use truth::{Ledger, ProcessTruth, Truth};
