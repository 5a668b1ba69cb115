//! Owns what a device is called: UUID, name, index, place on the bus.
//! Refuses figures that move.

use std::ffi::{c_char, c_uint};

use crate::call::{Target, device};
use crate::{Code, INVALID_ARGUMENT, Outcome, sys, write};

type Device = sys::nvmlDevice_t;

/// An H200 SXM, as the PCI ID database has it.
const PCI_DEVICE: u32 = 0x2335_10de;
const PCI_SUBSYSTEM: u32 = 0x18be_10de;

pub(crate) fn bus_of(gpu: usize) -> u32 {
    u32::try_from(gpu + 1).unwrap_or(u32::MAX)
}

fn pci(target: &Target) -> sys::nvmlPciInfo_t {
    let bus = bus_of(target.gpu);
    sys::nvmlPciInfo_t {
        busIdLegacy: write::field(&format!("0000:{bus:02X}:00.0")),
        domain: 0,
        bus,
        device: 0,
        pciDeviceId: PCI_DEVICE,
        pciSubSystemId: PCI_SUBSYSTEM,
        busId: write::field(&format!("00000000:{bus:02X}:00.0")),
    }
}

/// The structs of before `_v3` end in four reserved words where the longer bus id now is.
unsafe fn put_short(to: *mut sys::nvmlPciInfo_t, info: &sys::nvmlPciInfo_t) -> Outcome {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: nvml.h: the struct of before, which has these fields at these places.
    unsafe {
        (&raw mut (*to).busIdLegacy).write(info.busIdLegacy);
        (&raw mut (*to).domain).write(info.domain);
        (&raw mut (*to).bus).write(info.bus);
        (&raw mut (*to).device).write(info.device);
        (&raw mut (*to).pciDeviceId).write(info.pciDeviceId);
        (&raw mut (*to).pciSubSystemId).write(info.pciSubSystemId);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(at: Device, to: *mut c_char, length: c_uint) -> Code {
    device("nvmlDeviceGetUUID", at, |target| {
        let uuid =
            target.instance()?.map_or_else(|| target.call.host.uuid(target.gpu), |mig| mig.uuid.clone());
        // SAFETY: nvml.h: `to` has `length` bytes.
        unsafe { write::text(to, length, &uuid) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(at: Device, to: *mut c_char, length: c_uint) -> Code {
    device("nvmlDeviceGetName", at, |target| {
        let name = target.call.host.name(target.gpu);
        let name = match target.instance()? {
            Some(mig) => format!("{name} MIG {}gb", mig.bytes >> 30),
            None => name,
        };
        // SAFETY: nvml.h: `to` has `length` bytes.
        unsafe { write::text(to, length, &name) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetIndex", at, |target| {
        let gpu = u32::try_from(target.gpu).map_err(|_| INVALID_ARGUMENT)?;
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, target.slot.unwrap_or(gpu)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMinorNumber(at: Device, to: *mut c_uint) -> Code {
    device("nvmlDeviceGetMinorNumber", at, |target| {
        target.whole()?;
        let minor = u32::try_from(target.gpu).map_err(|_| INVALID_ARGUMENT)?;
        // SAFETY: nvml.h: one unsigned int.
        unsafe { write::put(to, minor) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(at: Device, to: *mut sys::nvmlPciInfo_t) -> Code {
    device("nvmlDeviceGetPciInfo_v3", at, |target| {
        // SAFETY: nvml.h: one `nvmlPciInfo_t`.
        unsafe { write::put(to, pci(target)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v2(at: Device, to: *mut sys::nvmlPciInfo_t) -> Code {
    // SAFETY: the caller's promise, passed on.
    device("nvmlDeviceGetPciInfo_v2", at, |target| unsafe { put_short(to, &pci(target)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo(at: Device, to: *mut sys::nvmlPciInfo_t) -> Code {
    // SAFETY: the caller's promise, passed on.
    device("nvmlDeviceGetPciInfo", at, |target| unsafe { put_short(to, &pci(target)) })
}
