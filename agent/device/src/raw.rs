//! Owns the real NVML: the one place of this crate with `unsafe`.
//! Refuses judgement: it asks one function and hands back what was written.

pub(crate) mod alarms;

use std::cell::RefCell;
use std::ffi::OsStr;
use std::path::Path;

use cotenant_model::device::{ComputeMode, LibraryFacts};
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
/// Rows of the first question.
const ROOM: u32 = 64;
/// A list longer than this is not believed.
const MAX_ROWS: u32 = 8192;
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
    fn list_once(&self, device: Handle, list: List, version: ListVersion, room: u32) -> Listed<u64> {
        let lib = self.wrapper.lib();
        let mut count = room;
        let mut words = vec![0u64; room as usize * WIDEST_ROW_WORDS];
        let Ok(pointer) = self.pointer(device) else {
            return Listed { code: INVALID_ARGUMENT, count: 0, written: words };
        };
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
        Listed { code, count, written: words }
    }

    /// Asks once with room for `room` samples. The wrapper's own question has no second try, and processes come
    /// and go between the size and the samples.
    fn utilization_once(&self, device: Handle, since: u64, room: u32) -> Listed<Sample> {
        let mut count = room;
        let mut samples = vec![NO_SAMPLE; room as usize];
        let code = match (self.pointer(device), self.wrapper.lib().nvmlDeviceGetProcessUtilization.as_ref()) {
            // SAFETY: a handle of this library, `room` samples to write to, and `count` says so.
            (Ok(pointer), Ok(ask)) => unsafe { ask(pointer, samples.as_mut_ptr(), &raw mut count, since) },
            (Err(_), _) => INVALID_ARGUMENT,
            (_, Err(_)) => FUNCTION_NOT_FOUND,
        };
        Listed { code, count, written: samples }
    }
}

type Sample = sys::nvmlProcessUtilizationSample_t;
const NO_SAMPLE: Sample = Sample { pid: 0, timeStamp: 0, smUtil: 0, memUtil: 0, encUtil: 0, decUtil: 0 };

/// What one question for a list came to: the code, how many rows there are, and the room with what was written.
struct Listed<T> {
    code: u32,
    count: u32,
    written: Vec<T>,
}

/// Asks with ever more room until the list fits: how many rows there are, and what was written.
fn fitting<T>(mut ask: impl FnMut(u32) -> Listed<T>) -> Answer<(usize, Vec<T>)> {
    let mut room = ROOM;
    // Growth doubles at least, so this ends.
    loop {
        let Listed { code, count, written } = ask(room);
        if code == INSUFFICIENT_SIZE && room < MAX_ROWS {
            room = count.max(room).saturating_mul(2).saturating_add(SLACK).min(MAX_ROWS);
            continue;
        }
        check(code)?;
        return if count > room { Err(Fault::Implausible) } else { Ok((count as usize, written)) };
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
        let (count, words) = fitting(|room| self.list_once(device, list, version, room))?;
        Ok(RawRows { count, words })
    }

    fn process_utilization(&self, device: Handle, since: u64) -> Answer<Vec<UtilizationRow>> {
        let (count, mut samples) = fitting(|room| self.utilization_once(device, since, room))?;
        samples.truncate(count);
        let row = |sample: Sample| UtilizationRow {
            pid: sample.pid,
            timestamp: sample.timeStamp,
            sm_percent: sample.smUtil,
            memory_percent: sample.memUtil,
        };
        Ok(samples.into_iter().map(row).collect())
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

    fn compute_mode(&self, device: Handle) -> Answer<ComputeMode> {
        let pointer = self.pointer(device)?;
        let ask = self.wrapper.lib().nvmlDeviceGetComputeMode.as_ref().map_err(|_| Fault::SymbolMissing)?;
        let mut mode = 0;
        // SAFETY: a handle of this library and a whole `nvmlComputeMode_t` to write to.
        check(unsafe { ask(pointer, &raw mut mode) })?;
        match mode {
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT => Ok(ComputeMode::Default),
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_THREAD => Ok(ComputeMode::ExclusiveThread),
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED => Ok(ComputeMode::Prohibited),
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS => Ok(ComputeMode::ExclusiveProcess),
            _ => Err(Fault::Implausible),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A library whose list is `there` rows long, one more at each question.
    fn growing(mut there: u32) -> impl FnMut(u32) -> Listed<u32> {
        move |room| {
            there += 1;
            let code = if there > room { INSUFFICIENT_SIZE } else { sys::nvmlReturn_enum_NVML_SUCCESS };
            Listed { code, count: there, written: (0..room).collect() }
        }
    }

    #[test]
    fn a_list_that_grows_between_questions_is_asked_for_again() {
        for (there, room) in [(0, 64), (63, 64), (64, 146), (500, 1018)] {
            let (count, written) = fitting(growing(there)).expect("it fits in the end");
            assert!(count <= written.len());
            assert_eq!(written.len(), room, "{there} rows");
        }
    }

    #[test]
    fn a_list_without_end_is_given_up() {
        let mut questions = 0;
        let endless = fitting(|room| {
            questions += 1;
            Listed { code: INSUFFICIENT_SIZE, count: room, written: vec![0u32; room as usize] }
        });
        assert_eq!(endless.err(), Some(Fault::InsufficientSize));
        assert!(questions < 10);
    }

    #[test]
    fn more_rows_than_room_are_not_believed() {
        let lying = fitting(|room| Listed { code: 0, count: room + 1, written: vec![0u32; room as usize] });
        assert_eq!(lying.err(), Some(Fault::Implausible));
    }
}
