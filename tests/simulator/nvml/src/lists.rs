//! Owns the lists of processes, in every row layout that ever went out under a known symbol.
//! Refuses rows beyond the caller's room: it says how many there are instead.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::call::{Target, device};
use crate::faults::List;
use crate::{Code, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, Outcome, sys};

type Device = sys::nvmlDevice_t;

/// `NVML_VALUE_NOT_AVAILABLE`, and as an instance id: on no MIG device.
const NOT_AVAILABLE: u64 = u64::MAX;
const NO_INSTANCE: u32 = u32::MAX;

struct Row {
    pid: u32,
    bytes: u64,
    /// GPU instance and compute instance.
    instance: (u32, u32),
}

impl Row {
    /// The fields of the widest layout; narrower ones are its beginning.
    fn words(&self) -> [u64; 4] {
        let (gpu, compute) = self.instance;
        [u64::from(self.pid), self.bytes, u64::from(gpu) | u64::from(compute) << 32, NOT_AVAILABLE]
    }
}

fn rows(target: &Target, list: List) -> Vec<Row> {
    let faults = &target.call.faults;
    let extra: Vec<_> = faults.rows.iter().filter(|row| row.gpu == target.gpu && row.list == list).collect();
    let mut rows = vec![];
    if list == List::Compute && target.slot.is_none() {
        for process in target.call.host.query_processes(target.gpu) {
            if extra.iter().all(|row| row.pid != process.pid) {
                let instance = (NO_INSTANCE, NO_INSTANCE);
                rows.push(Row { pid: process.pid, bytes: process.bytes, instance });
            }
        }
    }
    // A whole GPU lists what its MIG devices do.
    for row in extra.iter().filter(|row| target.slot.is_none() || row.slot == target.slot) {
        let device = row.slot.and_then(|slot| target.mig()?.slots.get(&slot));
        let instance = device.map_or((NO_INSTANCE, NO_INSTANCE), |device| (device.gi, device.ci));
        rows.push(Row { pid: row.pid, bytes: row.bytes.unwrap_or(NOT_AVAILABLE), instance });
    }
    for row in &mut rows {
        if faults.not_available.contains(&row.pid) {
            row.bytes = NOT_AVAILABLE;
        }
    }
    rows
}

/// Says how many there are, and whether they fit into `room`.
unsafe fn fit(target: &Target, rows: usize, count: *mut c_uint) -> Outcome {
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let there = u32::try_from(rows).map_err(|_| INVALID_ARGUMENT)?;
    // SAFETY: not null; nvml.h: the caller's room, to be replaced by the count.
    let room = unsafe { count.replace(there) };
    if target.call.faults.outgrows(target.call.function, target.gpu, room) {
        // SAFETY: as above.
        unsafe { count.write(there.max(room) + 1) };
        return Err(INSUFFICIENT_SIZE);
    }
    if room < there { Err(INSUFFICIENT_SIZE) } else { Ok(()) }
}

/// # Safety
/// As nvml.h: `to` has room for `count` rows of `width` words.
unsafe fn put(target: &Target, list: List, width: usize, count: *mut c_uint, to: *mut u64) -> Outcome {
    let rows = rows(target, list);
    // SAFETY: the caller's promise, passed on.
    unsafe { fit(target, rows.len(), count) }?;
    if to.is_null() && !rows.is_empty() {
        return Err(INVALID_ARGUMENT);
    }
    for (at, row) in rows.iter().enumerate() {
        // SAFETY: row `at` is below the room just checked, and a row has `width` words.
        unsafe { to.add(at * width).copy_from_nonoverlapping(row.words().as_ptr(), width) };
    }
    Ok(())
}

/// One list under one symbol.
macro_rules! list {
    ($function:ident, $list:expr, $row:ty, $width:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $function(at: Device, count: *mut c_uint, to: *mut $row) -> Code {
            device(stringify!($function), at, |target| {
                // SAFETY: the caller's promise, passed on.
                unsafe { put(target, $list, $width(target), count, to.cast()) }
            })
        }
    };
}

const fn words<T>(_: &Target) -> usize {
    size_of::<T>() / size_of::<u64>()
}

type V1 = sys::nvmlProcessInfo_v1_t;
type V2 = sys::nvmlProcessInfo_v2_t;

list!(nvmlDeviceGetComputeRunningProcesses, List::Compute, V1, words::<V1>);
list!(nvmlDeviceGetComputeRunningProcesses_v2, List::Compute, V2, words::<V2>);
list!(nvmlDeviceGetGraphicsRunningProcesses, List::Graphics, V1, words::<V1>);
list!(nvmlDeviceGetGraphicsRunningProcesses_v2, List::Graphics, V2, words::<V2>);
list!(nvmlDeviceGetMPSComputeRunningProcesses, List::Mps, V1, words::<V1>);
list!(nvmlDeviceGetMPSComputeRunningProcesses_v2, List::Mps, V2, words::<V2>);

#[cfg(not(feature = "old"))]
mod v3 {
    use super::{Code, Device, List, Target, V2, c_uint, device, put};

    fn wanted(target: &Target) -> usize {
        target.call.faults.v3_words()
    }

    list!(nvmlDeviceGetComputeRunningProcesses_v3, List::Compute, V2, wanted);
    list!(nvmlDeviceGetGraphicsRunningProcesses_v3, List::Graphics, V2, wanted);
    list!(nvmlDeviceGetMPSComputeRunningProcesses_v3, List::Mps, V2, wanted);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    at: Device,
    to: *mut sys::nvmlProcessUtilizationSample_t,
    count: *mut c_uint,
    since: c_ulonglong,
) -> Code {
    device("nvmlDeviceGetProcessUtilization", at, |target| {
        target.whole()?;
        target.unsplit()?;
        let processes = target.call.host.query_processes(target.gpu);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let now = u64::try_from(now).unwrap_or(u64::MAX);
        if processes.is_empty() || since >= now {
            return Err(NOT_FOUND);
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { fit(target, processes.len(), count) }?;
        if to.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        for (at, process) in processes.iter().enumerate() {
            let busy = target.call.faults.busy(process.pid);
            let sample = sys::nvmlProcessUtilizationSample_t {
                pid: process.pid,
                timeStamp: now,
                smUtil: busy.sm,
                memUtil: busy.memory,
                encUtil: 0,
                decUtil: 0,
            };
            // SAFETY: not null, and sample `at` is below the room just checked.
            unsafe { to.add(at).write(sample) };
        }
        Ok(())
    })
}
