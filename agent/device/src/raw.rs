//! Owns the real NVML: the one place of this crate with `unsafe`.
//! Refuses judgement: it asks one function and hands back what was written.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::path::Path;

use cotenant_model::device::LibraryFacts;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, PcieUtilCounter, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml as Wrapper};
use nvml_wrapper_sys::bindings as sys;

use crate::nvml::{
    Answer, Fault, Figure, Handle, List, ListVersion, MemoryRow, MemoryVersion, Nvml, RawRows, Text,
    UtilizationRow,
};

/// The widest process row ever shipped under a known symbol (early R535 `_v3`), in eight-byte words.
const WIDEST_ROW_WORDS: usize = 4;
/// A list longer than this is not believed.
const MAX_PROCESSES: u32 = 8192;
/// Rows of slack for processes that start between the question and the answer.
const SLACK: u32 = 16;

/// Loads `library` (or the loader's `libnvidia-ml.so.1`) and initialises it.
pub(crate) fn open(library: Option<&Path>) -> Answer<Box<dyn Nvml>> {
    let path = library.map_or(OsStr::new("libnvidia-ml.so.1"), Path::as_os_str);
    let wrapper = Wrapper::builder().lib_path(path).init().map_err(fault)?;
    Ok(Box::new(Raw { wrapper, handles: RefCell::default() }))
}

struct Raw {
    wrapper: Wrapper,
    /// [`Handle`] indexes this, so that no number from outside becomes a pointer.
    handles: RefCell<Vec<sys::nvmlDevice_t>>,
}

impl Raw {
    fn keep(&self, device: &Device<'_>) -> Handle {
        // SAFETY: the pointer is only kept; it goes back to the same library in `device_of`.
        let pointer = unsafe { device.handle() };
        let mut handles = self.handles.borrow_mut();
        let at = handles.iter().position(|known| *known == pointer).unwrap_or_else(|| {
            handles.push(pointer);
            handles.len() - 1
        });
        Handle(at)
    }

    fn pointer(&self, handle: Handle) -> Answer<sys::nvmlDevice_t> {
        self.handles.borrow().get(handle.0).copied().ok_or(Fault::InvalidArgument)
    }

    fn device_of(&self, handle: Handle) -> Answer<Device<'_>> {
        let pointer = self.pointer(handle)?;
        // SAFETY: this library gave the pointer while `self.wrapper` was open, and it still is.
        Ok(unsafe { Device::new(pointer, &self.wrapper) })
    }

    /// Asks a list function once with room for `room` rows.
    fn list_once(&self, device: Handle, list: List, version: ListVersion, room: u32) -> (u32, u32, Vec<u64>) {
        let lib = self.wrapper.lib();
        let mut count = room;
        let mut words = vec![0u64; room as usize * WIDEST_ROW_WORDS];
        let Ok(pointer) = self.pointer(device) else { return (INVALID_ARGUMENT, 0, words) };
        macro_rules! ask {
            ($function:ident) => {
                match lib.$function.as_ref() {
                    // SAFETY: `words` holds `room` rows of the widest layout any version writes, is aligned
                    // for u64, and `count` tells the library how many rows fit.
                    Ok(function) => unsafe { function(pointer, &raw mut count, words.as_mut_ptr().cast()) },
                    Err(_) => FUNCTION_NOT_FOUND,
                }
            };
        }
        let code = match (list, version) {
            (List::Compute, ListVersion::V3) => ask!(nvmlDeviceGetComputeRunningProcesses_v3),
            (List::Compute, ListVersion::V2) => ask!(nvmlDeviceGetComputeRunningProcesses_v2),
            (List::Compute, ListVersion::Unversioned) => ask!(nvmlDeviceGetComputeRunningProcesses),
            (List::Graphics, ListVersion::V3) => ask!(nvmlDeviceGetGraphicsRunningProcesses_v3),
            (List::Graphics, ListVersion::V2) => ask!(nvmlDeviceGetGraphicsRunningProcesses_v2),
            (List::Graphics, ListVersion::Unversioned) => ask!(nvmlDeviceGetGraphicsRunningProcesses),
            (List::Mps, ListVersion::V3) => ask!(nvmlDeviceGetMPSComputeRunningProcesses_v3),
            (List::Mps, ListVersion::V2) => ask!(nvmlDeviceGetMPSComputeRunningProcesses_v2),
            (List::Mps, ListVersion::Unversioned) => ask!(nvmlDeviceGetMPSComputeRunningProcesses),
        };
        (code, count, words)
    }
}

const INVALID_ARGUMENT: u32 = sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const INSUFFICIENT_SIZE: u32 = sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
const FUNCTION_NOT_FOUND: u32 = sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND;

impl Nvml for Raw {
    fn facts(&self) -> Answer<LibraryFacts> {
        Ok(LibraryFacts {
            driver_version: self.wrapper.sys_driver_version().map_err(fault)?,
            nvml_version: self.wrapper.sys_nvml_version().map_err(fault)?,
        })
    }

    fn count(&self) -> Answer<u32> {
        self.wrapper.device_count().map_err(fault)
    }

    fn device(&self, index: u32) -> Answer<Handle> {
        Ok(self.keep(&self.wrapper.device_by_index(index).map_err(fault)?))
    }

    fn text(&self, device: Handle, text: Text) -> Answer<String> {
        let device = self.device_of(device)?;
        match text {
            Text::Uuid => device.uuid(),
            Text::Name => device.name(),
            Text::Pci => device.pci_info().map(|pci| pci.bus_id),
        }
        .map_err(fault)
    }

    fn memory(&self, device: Handle, version: MemoryVersion) -> Answer<MemoryRow> {
        match version {
            MemoryVersion::V2 => {
                let info = self.device_of(device)?.memory_info().map_err(fault)?;
                let reserved = Some(info.reserved);
                Ok(MemoryRow { total: info.total, used: info.used, free: info.free, reserved })
            }
            MemoryVersion::V1 => {
                let pointer = self.pointer(device)?;
                let function =
                    self.wrapper.lib().nvmlDeviceGetMemoryInfo.as_ref().map_err(|_| Fault::SymbolMissing)?;
                let mut info = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
                // SAFETY: a handle of this library and a whole `nvmlMemory_t` to write to.
                check(unsafe { function(pointer, &raw mut info) })?;
                Ok(MemoryRow { total: info.total, used: info.used, free: info.free, reserved: None })
            }
        }
    }

    fn processes(&self, device: Handle, list: List, version: ListVersion) -> Answer<RawRows> {
        let mut room = 64;
        // Growth doubles at least, so this ends.
        loop {
            let (code, count, words) = self.list_once(device, list, version, room);
            if code == INSUFFICIENT_SIZE && room < MAX_PROCESSES {
                room = count.max(room).saturating_mul(2).saturating_add(SLACK).min(MAX_PROCESSES);
                continue;
            }
            check(code)?;
            if count > room {
                return Err(Fault::Implausible);
            }
            return Ok(RawRows { count: count as usize, words });
        }
    }

    fn process_utilization(&self, device: Handle, since: u64) -> Answer<Vec<UtilizationRow>> {
        let rows = self.device_of(device)?.process_utilization_stats(since).map_err(fault)?;
        let row = |sample: nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample| UtilizationRow {
            pid: sample.pid,
            timestamp: sample.timestamp,
            sm_percent: sample.sm_util,
            memory_percent: sample.mem_util,
        };
        Ok(rows.into_iter().map(row).collect())
    }

    fn utilization(&self, device: Handle) -> Answer<(u32, u32)> {
        let rates = self.device_of(device)?.utilization_rates().map_err(fault)?;
        Ok((rates.gpu, rates.memory))
    }

    fn figure(&self, device: Handle, figure: Figure) -> Answer<u64> {
        let device = self.device_of(device)?;
        let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Aggregate);
        match figure {
            Figure::PowerMilliwatts => device.power_usage().map(u64::from),
            Figure::EnergyMillijoules => device.total_energy_consumption(),
            Figure::TemperatureCelsius => device.temperature(TemperatureSensor::Gpu).map(u64::from),
            Figure::PcieTransmitKilobytes => device.pcie_throughput(PcieUtilCounter::Send).map(u64::from),
            Figure::PcieReceiveKilobytes => device.pcie_throughput(PcieUtilCounter::Receive).map(u64::from),
            Figure::ClocksEventReasons => device.current_throttle_reasons().map(|bits| bits.bits()),
            Figure::EccCorrected => ecc(MemoryError::Corrected),
            Figure::EccUncorrected => ecc(MemoryError::Uncorrected),
        }
        .map_err(fault)
    }

    fn mig_enabled(&self, device: Handle) -> Answer<bool> {
        Ok(self.device_of(device)?.mig_mode().map_err(fault)?.current == 1)
    }

    fn mig_slots(&self, device: Handle) -> Answer<u32> {
        self.device_of(device)?.mig_device_count().map_err(fault)
    }

    fn mig_device(&self, device: Handle, slot: u32) -> Answer<Handle> {
        Ok(self.keep(&self.device_of(device)?.mig_device_by_index(slot).map_err(fault)?))
    }

    fn mig_parent(&self, instance: Handle) -> Answer<Handle> {
        Ok(self.keep(&self.device_of(instance)?.mig_parent_device().map_err(fault)?))
    }

    fn mig_ids(&self, instance: Handle) -> Answer<(u32, u32)> {
        let pointer = self.pointer(instance)?;
        let lib = self.wrapper.lib();
        let gpu = lib.nvmlDeviceGetGpuInstanceId.as_ref().map_err(|_| Fault::SymbolMissing)?;
        let compute = lib.nvmlDeviceGetComputeInstanceId.as_ref().map_err(|_| Fault::SymbolMissing)?;
        let (mut gpu_id, mut compute_id) = (0, 0);
        // SAFETY: a handle of this library and a u32 to write to.
        check(unsafe { gpu(pointer, &raw mut gpu_id) })?;
        // SAFETY: as above.
        check(unsafe { compute(pointer, &raw mut compute_id) })?;
        Ok((gpu_id, compute_id))
    }
}

fn check(code: u32) -> Answer<()> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS { Ok(()) } else { Err(Fault::from_code(code)) }
}

fn fault(error: NvmlError) -> Fault {
    match error {
        NvmlError::LibloadingError(error) => Fault::LibraryMissing { reason: error.to_string() },
        NvmlError::LibraryNotFound => {
            Fault::LibraryMissing { reason: "NVML lacks a library of its own".into() }
        }
        NvmlError::FailedToLoadSymbol(_) => Fault::SymbolMissing,
        NvmlError::Utf8Error(_) => Fault::Implausible,
        other => Fault::from_code(other.into()),
    }
}
