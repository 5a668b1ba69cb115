//! Owns what NVML says about the GPUs: a trait before it, its own thread, deadlines and ages.
//! Refuses tenants and processes' names: a PID with bytes is as far as this room sees.

mod alarms;
mod cadence;
mod config;
mod costs;
mod desk;
pub mod nvml;
mod poll;
mod processes;
mod raw;
mod state;
mod watch;

pub use alarms::{Hearing, Rung};
pub use config::{MIN_INTERVAL, NvmlConfig, ProcessCheck};
pub use state::{Outcome, State, next_state};
pub use watch::{Condition, Device, DeviceError, Health};
