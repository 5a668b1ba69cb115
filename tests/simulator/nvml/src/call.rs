//! Owns how a call goes: the library is initialised, the device is there, the wanted fault strikes.
//! Refuses to answer for a lost GPU or a MIG device that is gone.

use std::sync::Arc;

use crate::faults::{Faults, Mig, MigSlot, Scope};
use crate::host::Host;
use crate::{
    Code, GPU_IS_LOST, INVALID_ARGUMENT, NO_PERMISSION, NOT_SUPPORTED, Outcome, session, sys, write,
};

/// Low bits of a handle: 0 for the whole GPU, else one more than the MIG slot.
const SLOT_BITS: u32 = 12;

/// A call under way.
pub(crate) struct Call {
    pub(crate) function: &'static str,
    pub(crate) host: Arc<Host>,
    pub(crate) faults: Arc<Faults>,
}

/// A call on a device.
pub(crate) struct Target {
    pub(crate) call: Call,
    pub(crate) gpu: usize,
    pub(crate) slot: Option<u32>,
}

pub(crate) fn code(outcome: Outcome) -> Code {
    outcome.err().unwrap_or(sys::nvmlReturn_enum_NVML_SUCCESS)
}

/// A number that says which device; nothing is behind it.
pub(crate) fn handle(gpu: usize, slot: Option<u32>) -> sys::nvmlDevice_t {
    let slot = slot.map_or(0, |slot| slot as usize + 1);
    std::ptr::without_provenance_mut(((gpu + 1) << SLOT_BITS) | slot)
}

fn start(function: &'static str) -> Outcome<Call> {
    let host = session::current()?;
    let faults = host.faults.now()?;
    Ok(Call { function, host, faults })
}

pub(crate) fn system(function: &'static str, answer: impl FnOnce(&Call) -> Outcome) -> Code {
    let answered = start(function).and_then(|call| {
        call.faults.strike(function, None, |takes| call.host.hold(takes))?;
        answer(&call)
    });
    code(answered)
}

/// A call that finds a device: its fault is that of the device found.
///
/// # Safety
/// `to` is null or writable for a handle.
pub(crate) unsafe fn find(
    function: &'static str,
    to: *mut sys::nvmlDevice_t,
    search: impl FnOnce(&Call) -> Outcome<(usize, Option<u32>)>,
) -> Code {
    code(start(function).and_then(|call| {
        let found = search(&call);
        let Ok((gpu, slot)) = found else {
            call.faults.strike(function, None, |takes| call.host.hold(takes))?;
            return found.map(|_| ());
        };
        call.reach(gpu, slot)?;
        // SAFETY: the caller's promise, passed on.
        unsafe { write::put(to, handle(gpu, slot)) }
    }))
}

pub(crate) fn device(
    function: &'static str,
    device: sys::nvmlDevice_t,
    answer: impl FnOnce(&Target) -> Outcome,
) -> Code {
    code(start(function).and_then(|call| answer(&call.target(device)?)))
}

impl Call {
    fn target(self, device: sys::nvmlDevice_t) -> Outcome<Target> {
        let number = device.addr();
        let gpu = (number >> SLOT_BITS).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
        let slot = (number & ((1 << SLOT_BITS) - 1)).checked_sub(1);
        let slot = slot.map(u32::try_from).transpose().map_err(|_| INVALID_ARGUMENT)?;
        self.reach(gpu, slot)?;
        let target = Target { call: self, gpu, slot };
        target.instance()?;
        Ok(target)
    }

    /// Whether the GPU answers at all.
    fn reach(&self, gpu: usize, slot: Option<u32>) -> Outcome {
        if gpu >= self.host.count() {
            return Err(INVALID_ARGUMENT);
        }
        let scope = if slot.is_some() { Scope::Mig } else { Scope::Gpu };
        self.faults.strike(self.function, Some((gpu, scope)), |takes| self.host.hold(takes))?;
        if self.faults.no_permission {
            return Err(NO_PERMISSION);
        }
        if self.faults.lost.contains(&gpu) {
            return Err(GPU_IS_LOST);
        }
        Ok(())
    }
}

impl Target {
    pub(crate) fn mig(&self) -> Option<&Mig> {
        self.call.faults.mig.get(&self.gpu)
    }

    /// The MIG device, if it is one.
    pub(crate) fn instance(&self) -> Outcome<Option<&MigSlot>> {
        let Some(slot) = self.slot else { return Ok(None) };
        let there = self.mig().and_then(|mig| mig.slots.get(&slot));
        there.map(Some).ok_or(INVALID_ARGUMENT)
    }

    /// For what only a whole GPU has.
    pub(crate) fn whole(&self) -> Outcome {
        if self.slot.is_some() { Err(NOT_SUPPORTED) } else { Ok(()) }
    }

    /// For what a GPU does not measure once it is split.
    pub(crate) fn unsplit(&self) -> Outcome {
        if self.mig().is_some() { Err(NOT_SUPPORTED) } else { Ok(()) }
    }
}
