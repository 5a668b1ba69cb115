//! Owns a libcuda whose GPUs are simulated: real semantics, return codes, locks and delays, no hardware.
//! Refuses to be loaded by accident: without `COTENANT_SIM_NODE` every call fails and says SIMULATED.
#![allow(unreachable_pub, reason = "exported to whoever loads the library")]
#![allow(non_snake_case, reason = "the driver's own spelling")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is cuda.h's")]

mod boundary;
mod call;
mod driver;
mod memory;
mod physical;
mod symbols;
mod turn;

/// `CUresult`.
pub(crate) type Code = i32;
pub(crate) type Outcome<T> = Result<T, Code>;

pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const DEINITIALIZED: Code = 4;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const UNKNOWN: Code = 999;
