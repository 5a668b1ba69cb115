//! Owns how a device is counted and found.
//! Refuses MIG devices by index of the node: those are found by UUID, or through their GPU in `mig.rs`.

use std::ffi::{c_char, c_uint};

use crate::call::{Call, handle, system};
use crate::identity::bus_of;
use crate::{Code, INVALID_ARGUMENT, NOT_FOUND, Outcome, sys, write};

type Device = sys::nvmlDevice_t;

unsafe fn count(call: &Call, to: *mut c_uint) -> Outcome {
    let count = u32::try_from(call.host.count()).map_err(|_| INVALID_ARGUMENT)?;
    // SAFETY: nvml.h: one unsigned int.
    unsafe { write::put(to, count) }
}

/// The fault of a call by index, UUID or bus is that of the GPU it finds.
unsafe fn give(call: &Call, gpu: usize, slot: Option<u32>, to: *mut Device) -> Outcome {
    call.reach(gpu, slot)?;
    // SAFETY: nvml.h: one handle.
    unsafe { write::put(to, handle(gpu, slot)) }
}

unsafe fn by_bus(call: &Call, bus: *const c_char, to: *mut Device) -> Outcome {
    // SAFETY: nvml.h: a C string.
    let wanted = unsafe { write::argument(bus) }?;
    // The domain may be left out, or be written with four digits or eight.
    let mut parts = wanted.rsplit(':');
    let (Some(function), Some(bus), domain) = (parts.next(), parts.next(), parts.next()) else {
        return Err(INVALID_ARGUMENT);
    };
    let bus = u32::from_str_radix(bus, 16).map_err(|_| INVALID_ARGUMENT)?;
    let domain = domain.map_or(Ok(0), |domain| u32::from_str_radix(domain, 16));
    let there = (0..call.host.count()).find(|gpu| bus_of(*gpu) == bus);
    match there {
        // SAFETY: the caller's promise, passed on.
        Some(gpu) if domain == Ok(0) && function.starts_with("00") => unsafe { give(call, gpu, None, to) },
        _ => Err(NOT_FOUND),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(to: *mut c_uint) -> Code {
    // SAFETY: the caller's promise, passed on.
    system("nvmlDeviceGetCount_v2", |call| unsafe { count(call, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount(to: *mut c_uint) -> Code {
    // SAFETY: the caller's promise, passed on.
    system("nvmlDeviceGetCount", |call| unsafe { count(call, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    system("nvmlDeviceGetHandleByIndex_v2", |call| unsafe { give(call, index as usize, None, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    system("nvmlDeviceGetHandleByIndex", |call| unsafe { give(call, index as usize, None, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut Device) -> Code {
    system("nvmlDeviceGetHandleByUUID", |call| {
        // SAFETY: nvml.h: a C string.
        let wanted = unsafe { write::argument(uuid) }?;
        let whole = (0..call.host.count()).find(|gpu| call.host.uuid(*gpu) == wanted);
        let found = whole.map(|gpu| (gpu, None)).or_else(|| {
            let mut slots = call.faults.mig.iter().flat_map(|(gpu, mig)| {
                mig.slots.iter().map(|(slot, device)| (*gpu, *slot, device.uuid.as_str()))
            });
            slots.find(|(.., uuid)| *uuid == wanted).map(|(gpu, slot, _)| (gpu, Some(slot)))
        });
        let (gpu, slot) = found.ok_or(NOT_FOUND)?;
        // SAFETY: the caller's promise, passed on.
        unsafe { give(call, gpu, slot, to) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    system("nvmlDeviceGetHandleByPciBusId_v2", |call| unsafe { by_bus(call, bus, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId(bus: *const c_char, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    system("nvmlDeviceGetHandleByPciBusId", |call| unsafe { by_bus(call, bus, to) })
}
