//! Owns the figures of a device as a whole: memory, utilisation, power, heat, link, errors.
//! Refuses to invent what the state does not hold, beyond what an idle H200 says.

use std::ffi::{c_uint, c_ulonglong};

use cotenant_sim_state::monotonic_ns;

use crate::call::{Target, device};
use crate::faults::Busy;
use crate::host::{Memory, Process};
use crate::{Code, NOT_SUPPORTED, Outcome, sys, write};

type Device = sys::nvmlDevice_t;

const IDLE_WATTS: u32 = 75;
const FULL_WATTS: u32 = 700;
const IDLE_CELSIUS: u32 = 32;
const FULL_CELSIUS: u32 = 72;
/// `nvmlClocksEventReasonGpuIdle`.
const GPU_IDLE: u64 = 1;

fn memory(target: &Target) -> Outcome<Memory> {
    if let Some(mig) = target.instance()? {
        return Ok(Memory { total: mig.bytes, reserved: 0, used: mig.used });
    }
    let mut memory = target.call.host.memory(target.gpu);
    memory.used += target.call.faults.extra_unattributed.get(&target.gpu).copied().unwrap_or(0);
    Ok(memory)
}

fn free(memory: Memory) -> u64 {
    memory.total.saturating_sub(memory.reserved).saturating_sub(memory.used)
}

/// Percent of the multiprocessors and of the memory's time.
fn rates(target: &Target) -> (u32, u32) {
    let busy = |process: &Process| target.call.faults.busy(process.pid);
    let shares = target.call.host.processes(target.gpu).iter().map(busy).collect::<Vec<_>>();
    let sum = |figure: fn(&Busy) -> u32| shares.iter().map(figure).sum::<u32>().min(100);
    (sum(|share| share.sm), sum(|share| share.memory))
}

fn between(idle: u32, full: u32, percent: u32) -> u32 {
    idle + (full - idle) * percent / 100
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(at: Device, to: *mut sys::nvmlMemory_t) -> Code {
    device("nvmlDeviceGetMemoryInfo", at, |target| {
        let memory = memory(target)?;
        let (total, free) = (memory.total, free(memory));
        // SAFETY: nvml.h: one `nvmlMemory_t`.
        unsafe { write::put(to, sys::nvmlMemory_t { total, free, used: memory.used + memory.reserved }) }
    })
}

/// `NVML_STRUCT_VERSION(Memory, 2)`.
#[cfg(not(feature = "old"))]
const MEMORY_V2: u32 = 0x0200_0028;
#[cfg(not(feature = "old"))]
const _: () = assert!(size_of::<sys::nvmlMemory_v2_t>() == 0x28);

#[cfg(not(feature = "old"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(at: Device, to: *mut sys::nvmlMemory_v2_t) -> Code {
    device("nvmlDeviceGetMemoryInfo_v2", at, |target| {
        if to.is_null() {
            return Err(crate::INVALID_ARGUMENT);
        }
        // SAFETY: not null; nvml.h: the caller has set the version.
        if unsafe { (*to).version } != MEMORY_V2 {
            return Err(crate::ARGUMENT_VERSION_MISMATCH);
        }
        let memory = memory(target)?;
        let Memory { total, reserved, used } = memory;
        let info = sys::nvmlMemory_v2_t { version: MEMORY_V2, total, reserved, free: free(memory), used };
        // SAFETY: nvml.h: one `nvmlMemory_v2_t`, as its version says.
        unsafe { write::put(to, info) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(at: Device, to: *mut sys::nvmlUtilization_t) -> Code {
    device("nvmlDeviceGetUtilizationRates", at, |target| {
        target.whole()?;
        target.unsplit()?;
        let (gpu, memory) = rates(target);
        // SAFETY: nvml.h: one `nvmlUtilization_t`.
        unsafe { write::put(to, sys::nvmlUtilization_t { gpu, memory }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerUsage(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetPowerUsage", at, |target| {
        target.whole()?;
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, between(IDLE_WATTS, FULL_WATTS, rates(target).0) * 1000) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEnergyConsumption(at: Device, to: *mut c_ulonglong) -> Code {
    device("nvmlDeviceGetTotalEnergyConsumption", at, |target| {
        target.whole()?;
        // Idle since boot: no history is kept, and it must not go back.
        let millijoules = monotonic_ns() / 1_000_000 * u64::from(IDLE_WATTS);
        // SAFETY: nvml.h: one unsigned long long.
        unsafe { write::put(to, millijoules) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(at: Device, sensor: c_uint, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetTemperature", at, |target| {
        target.whole()?;
        if sensor != sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU {
            return Err(crate::INVALID_ARGUMENT);
        }
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, between(IDLE_CELSIUS, FULL_CELSIUS, rates(target).0)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPcieThroughput(at: Device, _counter: c_uint, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetPcieThroughput", at, |target| {
        target.whole()?;
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, 0) }
    })
}

unsafe fn clocks(target: &Target, to: *mut c_ulonglong) -> Outcome {
    target.whole()?;
    let idle = rates(target).0 == 0;
    let reasons = if idle { GPU_IDLE } else { 0 };
    // SAFETY: nvml.h: one unsigned long long.
    unsafe { write::put(to, reasons) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(at: Device, to: *mut c_ulonglong) -> Code {
    // SAFETY: the caller's promise, passed on.
    device("nvmlDeviceGetCurrentClocksThrottleReasons", at, |target| unsafe { clocks(target, to) })
}

#[cfg(not(feature = "old"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(at: Device, to: *mut c_ulonglong) -> Code {
    // SAFETY: the caller's promise, passed on.
    device("nvmlDeviceGetCurrentClocksEventReasons", at, |target| unsafe { clocks(target, to) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    at: Device,
    _error: c_uint,
    _counter: c_uint,
    to: *mut c_ulonglong,
) -> Code {
    device("nvmlDeviceGetTotalEccErrors", at, |target| {
        target.whole()?;
        // SAFETY: nvml.h: one unsigned long long.
        unsafe { write::put(to, 0) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeMode(at: Device, to: *mut sys::nvmlComputeMode_t) -> Code {
    device("nvmlDeviceGetComputeMode", at, |target| {
        target.whole()?;
        let mode = target.call.faults.compute_mode.get(&target.gpu).copied();
        // SAFETY: nvml.h: one `nvmlComputeMode_t`.
        unsafe { write::put(to, mode.unwrap_or(sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetAccountingMode(at: Device, _to: *mut c_uint) -> Code {
    device("nvmlDeviceGetAccountingMode", at, |_| Err(NOT_SUPPORTED))
}
