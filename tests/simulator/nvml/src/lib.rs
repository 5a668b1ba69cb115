//! Owns an NVML whose GPUs are simulated: the figures of a node's shared state under NVIDIA's own symbols.
//! Refuses to be taken for real: without `COTENANT_SIM_NODE` it does not initialise and says SIMULATED.
#![allow(non_snake_case, reason = "NVIDIA's own spelling")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is nvml.h's")]
#![allow(unreachable_pub, reason = "the symbols are the doors; a cdylib has no Rust callers")]

mod call;
mod events;
mod faults;
mod figures;
mod handles;
mod host;
mod identity;
mod lists;
mod mig;
mod session;
mod system;
mod write;

use nvml_wrapper_sys::bindings as sys;

/// `nvmlReturn_t`.
type Code = sys::nvmlReturn_t;
type Outcome<T = ()> = Result<T, Code>;

const UNINITIALIZED: Code = sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED;
const INVALID_ARGUMENT: Code = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_SUPPORTED: Code = sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const NO_PERMISSION: Code = sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION;
const NOT_FOUND: Code = sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const INSUFFICIENT_SIZE: Code = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const DRIVER_NOT_LOADED: Code = sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED;
const TIMEOUT: Code = sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
const GPU_IS_LOST: Code = sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST;
const LIB_RM_VERSION_MISMATCH: Code = sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH;
#[cfg(not(feature = "old"))]
const ARGUMENT_VERSION_MISMATCH: Code = sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
const UNKNOWN: Code = sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN;
