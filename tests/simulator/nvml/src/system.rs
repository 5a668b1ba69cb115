//! Owns the calls that are about no device: start, end, versions, words for codes.
//! Refuses anything that needs a GPU.

use std::ffi::{c_char, c_int, c_uint};

use crate::call::{code, system};
use crate::{Code, session, sys, write};

/// Of the CUDA release that came with the driver.
const CUDA_MAJOR: c_int = if cfg!(feature = "old") { 11 } else { 13 };
const CUDA_MINOR: c_int = if cfg!(feature = "old") { 4 } else { 0 };

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Code {
    code(session::initialise("nvmlInit_v2"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> Code {
    code(session::initialise("nvmlInit"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Code {
    code(session::initialise("nvmlInitWithFlags"))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Code {
    code(session::shut_down("nvmlShutdown"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> Code {
    system("nvmlSystemGetDriverVersion", |call| {
        // SAFETY: nvml.h: `version` has `length` bytes.
        unsafe { write::text(version, length, &call.host.driver_version) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> Code {
    system("nvmlSystemGetNVMLVersion", |call| {
        let text = format!("{CUDA_MAJOR}.{}", call.host.driver_version);
        // SAFETY: nvml.h: `version` has `length` bytes.
        unsafe { write::text(version, length, &text) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> Code {
    system("nvmlSystemGetCudaDriverVersion", |_| {
        // SAFETY: nvml.h: one int.
        unsafe { write::put(version, CUDA_MAJOR * 1000 + CUDA_MINOR * 10) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> Code {
    system("nvmlSystemGetCudaDriverVersion_v2", |_| {
        // SAFETY: nvml.h: one int.
        unsafe { write::put(version, CUDA_MAJOR * 1000 + CUDA_MINOR * 10) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: Code) -> *const c_char {
    let words = match code {
        sys::nvmlReturn_enum_NVML_SUCCESS => c"Success",
        sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => c"Uninitialized",
        sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => c"Invalid Argument",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => c"Not Supported",
        sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => c"Insufficient Permissions",
        sys::nvmlReturn_enum_NVML_ERROR_ALREADY_INITIALIZED => c"Already Initialized",
        sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => c"Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => c"Insufficient Size",
        sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER => c"Insufficient External Power",
        sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => c"Driver Not Loaded",
        sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => c"Timeout",
        sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE => c"Interrupt Request Issue",
        sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND => c"NVML Shared Library Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => c"Function Not Found",
        sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM => c"Corrupted infoROM",
        sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => c"GPU is lost",
        sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => c"GPU requires reset",
        sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM => c"GPU access blocked by the operating system",
        sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => c"Driver/library version mismatch",
        sys::nvmlReturn_enum_NVML_ERROR_IN_USE => c"In use by another client",
        sys::nvmlReturn_enum_NVML_ERROR_MEMORY => c"Insufficient Memory",
        sys::nvmlReturn_enum_NVML_ERROR_NO_DATA => c"No data",
        sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => c"API version mismatch",
        _ => c"Unknown Error",
    };
    words.as_ptr()
}
