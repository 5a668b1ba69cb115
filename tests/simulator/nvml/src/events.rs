//! Owns event sets: which GPUs are registered in which, and the faults that `nvml.json` tells.
//! Refuses every event but faults (Xid).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::call::{device, handle, system};
use crate::{Code, INVALID_ARGUMENT, NOT_FOUND, TIMEOUT, sys, write};

type Device = sys::nvmlDevice_t;
type EventSet = sys::nvmlEventSet_t;

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
/// Between two looks at `nvml.json`.
const LOOK: Duration = Duration::from_millis(10);

#[derive(Default)]
struct Set {
    gpus: BTreeSet<usize>,
    /// Faults of the file that this set has told, or that were there before it.
    told: usize,
}

static SETS: Mutex<(usize, BTreeMap<usize, Set>)> = Mutex::new((0, BTreeMap::new()));

fn sets() -> MutexGuard<'static, (usize, BTreeMap<usize, Set>)> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(at: Device, to: *mut c_ulonglong) -> Code {
    // SAFETY: nvml.h: one unsigned long long.
    device("nvmlDeviceGetSupportedEventTypes", at, |_| unsafe { write::put(to, XID) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(to: *mut EventSet) -> Code {
    system("nvmlEventSetCreate", |call| {
        let mut sets = sets();
        sets.0 += 1;
        let number = sets.0;
        sets.1.insert(number, Set { told: call.faults.xids.len(), ..Set::default() });
        // SAFETY: nvml.h: one handle.
        unsafe { write::put(to, std::ptr::without_provenance_mut(number)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceRegisterEvents(at: Device, types: c_ulonglong, set: EventSet) -> Code {
    device("nvmlDeviceRegisterEvents", at, |target| {
        if types & !XID != 0 {
            return Err(crate::NOT_SUPPORTED);
        }
        let mut sets = sets();
        let set = sets.1.get_mut(&set.addr()).ok_or(INVALID_ARGUMENT)?;
        set.gpus.insert(target.gpu);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    set: EventSet,
    to: *mut sys::nvmlEventData_t,
    milliseconds: c_uint,
) -> Code {
    let until = Instant::now() + Duration::from_millis(milliseconds.into());
    loop {
        let code = system("nvmlEventSetWait_v2", |call| {
            let mut sets = sets();
            let set = sets.1.get_mut(&set.addr()).ok_or(INVALID_ARGUMENT)?;
            // A file that was written anew begins again.
            set.told = set.told.min(call.faults.xids.len());
            while let Some(xid) = call.faults.xids.get(set.told) {
                set.told += 1;
                if !set.gpus.contains(&xid.gpu) {
                    continue;
                }
                let data = sys::nvmlEventData_t {
                    device: handle(xid.gpu, None),
                    eventType: XID,
                    eventData: xid.code.into(),
                    gpuInstanceId: xid.gi.unwrap_or(u32::MAX),
                    computeInstanceId: u32::MAX,
                };
                // SAFETY: nvml.h: one `nvmlEventData_t`.
                return unsafe { write::put(to, data) };
            }
            Err(TIMEOUT)
        });
        if code != TIMEOUT || Instant::now() >= until {
            return code;
        }
        thread::sleep(LOOK);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: EventSet) -> Code {
    system("nvmlEventSetFree", |_| sets().1.remove(&set.addr()).map(|_| ()).ok_or(NOT_FOUND))
}
