//! Owns how a device is counted and found.
//! Refuses MIG devices by index of the node: those are found by UUID, or through their GPU in `mig.rs`.

use std::ffi::{c_char, c_uint};

use crate::call::{Call, find, system};
use crate::identity::bus_of;
use crate::{Code, INVALID_ARGUMENT, NOT_FOUND, Outcome, sys, write};

type Device = sys::nvmlDevice_t;

unsafe fn count(call: &Call, to: *mut c_uint) -> Outcome {
    let count = u32::try_from(call.host.count()).map_err(|_| INVALID_ARGUMENT)?;
    // SAFETY: nvml.h: one unsigned int.
    unsafe { write::put(to, count) }
}

/// The domain may be left out, or be written with four digits or eight.
unsafe fn by_bus(call: &Call, bus: *const c_char) -> Outcome<(usize, Option<u32>)> {
    // SAFETY: nvml.h: a C string.
    let wanted = unsafe { write::argument(bus) }?;
    let mut parts = wanted.rsplit(':');
    let (Some(function), Some(bus), domain) = (parts.next(), parts.next(), parts.next()) else {
        return Err(INVALID_ARGUMENT);
    };
    let number = |digits| u32::from_str_radix(digits, 16).map_err(|_| INVALID_ARGUMENT);
    let bus = number(bus)?;
    if domain.map_or(Ok(0), number)? != 0 || !function.starts_with("00") {
        return Err(NOT_FOUND);
    }
    (0..call.host.count()).find(|gpu| bus_of(*gpu) == bus).map(|gpu| (gpu, None)).ok_or(NOT_FOUND)
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
    unsafe { find("nvmlDeviceGetHandleByIndex_v2", to, |_| Ok((index as usize, None))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex(index: c_uint, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    unsafe { find("nvmlDeviceGetHandleByIndex", to, |_| Ok((index as usize, None))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, to: *mut Device) -> Code {
    let search = |call: &Call| {
        // SAFETY: nvml.h: a C string.
        let wanted = unsafe { write::argument(uuid) }?;
        let whole = (0..call.host.count()).find(|gpu| call.host.uuid(*gpu) == wanted);
        let split = || {
            let mut slots = call.faults.mig.iter().flat_map(|(gpu, mig)| {
                mig.slots.iter().map(|(slot, device)| (*gpu, *slot, device.uuid.as_str()))
            });
            slots.find(|(.., uuid)| *uuid == wanted).map(|(gpu, slot, _)| (gpu, Some(slot)))
        };
        whole.map(|gpu| (gpu, None)).or_else(split).ok_or(NOT_FOUND)
    };
    // SAFETY: the caller's promise, passed on.
    unsafe { find("nvmlDeviceGetHandleByUUID", to, search) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    unsafe { find("nvmlDeviceGetHandleByPciBusId_v2", to, |call| by_bus(call, bus)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId(bus: *const c_char, to: *mut Device) -> Code {
    // SAFETY: the caller's promise, passed on.
    unsafe { find("nvmlDeviceGetHandleByPciBusId", to, |call| by_bus(call, bus)) }
}
