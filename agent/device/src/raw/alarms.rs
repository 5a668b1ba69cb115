//! Owns the real event set: which GPUs are registered in it, and the wait for the next event.
//! Refuses every event but faults (Xid).

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use cotenant_model::GpuId;
use nvml_wrapper::Nvml as Wrapper;
use nvml_wrapper_sys::bindings as sys;

use super::{check, fault};
use crate::alarms::gpu_of;
use crate::nvml::{Alarm, Alarms, Answer, Fault};

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
const TIMEOUT: u32 = sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
/// What an event of a whole GPU has for its instance.
const NO_INSTANCE: u32 = u32::MAX;
/// More GPUs than this are not believed.
const MAX_GPUS: u32 = 256;

/// Registers every GPU that tells of faults. Shares the library with the polls: it counts how often it was opened.
pub(crate) fn open(library: Option<&Path>) -> Answer<Box<dyn Alarms>> {
    let path = library.map_or(OsStr::new("libnvidia-ml.so.1"), Path::as_os_str);
    let wrapper = Wrapper::builder().lib_path(path).init().map_err(fault)?;
    let lib = wrapper.lib();
    let create = lib.nvmlEventSetCreate.as_ref().map_err(|_| Fault::SymbolMissing)?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: one handle to write to.
    check(unsafe { create(&raw mut handle) })?;
    let mut set = Set { wrapper, handle, gpus: Vec::new() };
    let mut refused = Fault::NotSupported;
    for index in 0..set.wrapper.device_count().map_err(fault)?.min(MAX_GPUS) {
        // One that is lost tells nothing; the others do.
        match set.register(index) {
            Ok(gpu) => set.gpus.push(gpu),
            Err(fault) => refused = fault,
        }
    }
    if set.gpus.is_empty() { Err(refused) } else { Ok(Box::new(set)) }
}

struct Set {
    wrapper: Wrapper,
    handle: sys::nvmlEventSet_t,
    gpus: Vec<(sys::nvmlDevice_t, GpuId)>,
}

// SAFETY: the pointers are handles of a library that may be called from any thread, and they go where `wrapper` goes.
unsafe impl Send for Set {}

impl Set {
    fn register(&self, index: u32) -> Answer<(sys::nvmlDevice_t, GpuId)> {
        let device = self.wrapper.device_by_index(index).map_err(fault)?;
        let id = GpuId::from_nvml(&device.uuid().map_err(fault)?);
        let lib = self.wrapper.lib();
        let register = lib.nvmlDeviceRegisterEvents.as_ref().map_err(|_| Fault::SymbolMissing)?;
        // SAFETY: the pointer goes back to the library that gave it.
        let pointer = unsafe { device.handle() };
        // SAFETY: a handle and a set of this library.
        check(unsafe { register(pointer, XID, self.handle) })?;
        Ok((pointer, id))
    }
}

impl Alarms for Set {
    fn watched(&self) -> usize {
        self.gpus.len()
    }

    fn wait(&mut self, at_most: Duration) -> Answer<Option<Alarm>> {
        let lib = self.wrapper.lib();
        let mut data = sys::nvmlEventData_t {
            device: std::ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        };
        let milliseconds = u32::try_from(at_most.as_millis()).unwrap_or(u32::MAX);
        // The older question fills less of the same struct.
        let wait = lib.nvmlEventSetWait_v2.as_ref().or(lib.nvmlEventSetWait.as_ref());
        let wait = wait.map_err(|_| Fault::SymbolMissing)?;
        // SAFETY: a set of this library and a whole `nvmlEventData_t` to write to.
        let code = unsafe { wait(self.handle, &raw mut data, milliseconds) };
        if code == TIMEOUT {
            return Ok(None);
        }
        check(code)?;
        let known = gpu_of(&self.gpus, data.device);
        let (Some(gpu), XID, Ok(code)) = (known, data.eventType, u32::try_from(data.eventData)) else {
            return Ok(None);
        };
        let gpu_instance = (data.gpuInstanceId != NO_INSTANCE).then_some(data.gpuInstanceId);
        Ok(Some(Alarm { gpu, code, gpu_instance }))
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        if let Ok(free) = self.wrapper.lib().nvmlEventSetFree.as_ref() {
            // SAFETY: a set of this library, which nobody uses any more. Nothing can be done about a failure.
            let _ = unsafe { free(self.handle) };
        }
    }
}
