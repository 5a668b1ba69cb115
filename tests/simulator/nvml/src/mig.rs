//! Owns MIG: the mode, the slots and the way between a GPU and its MIG devices.
//! Refuses to make or end MIG devices: `nvml.json` says which there are.

use std::ffi::c_uint;

use crate::call::{Target, device, handle};
use crate::{Code, INVALID_ARGUMENT, NOT_FOUND, Outcome, sys, write};

type Device = sys::nvmlDevice_t;

/// For what only a MIG device has.
fn instance(target: &Target) -> Outcome<&crate::faults::MigSlot> {
    target.instance()?.ok_or(INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(at: Device, now: *mut c_uint, next: *mut c_uint) -> Code {
    device("nvmlDeviceGetMigMode", at, |target| {
        target.whole()?;
        let mode = u32::from(target.mig().is_some());
        // SAFETY: nvml.h: one unsigned int each.
        unsafe {
            write::put(now, mode)?;
            write::put(next, mode)
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetMaxMigDeviceCount", at, |target| {
        target.whole()?;
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, target.mig().map_or(0, |mig| mig.max)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    at: Device,
    index: c_uint,
    to: *mut Device,
) -> Code {
    device("nvmlDeviceGetMigDeviceHandleByIndex", at, |target| {
        target.whole()?;
        let mig = target.mig().ok_or(NOT_FOUND)?;
        if index >= mig.max {
            return Err(INVALID_ARGUMENT);
        }
        if !mig.slots.contains_key(&index) {
            return Err(NOT_FOUND);
        }
        // SAFETY: nvml.h: one handle.
        unsafe { write::put(to, handle(target.gpu, Some(index))) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(at: Device, to: *mut Device) -> Code {
    device("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", at, |target| {
        instance(target)?;
        // SAFETY: nvml.h: one handle.
        unsafe { write::put(to, handle(target.gpu, None)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetGpuInstanceId", at, |target| {
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, instance(target)?.gi) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetComputeInstanceId", at, |target| {
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, instance(target)?.ci) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceIsMigDeviceHandle", at, |target| {
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, u32::from(target.slot.is_some())) }
    })
}
