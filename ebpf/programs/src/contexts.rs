//! Owns contexts: which GPU a call is on, and what dies when a context does.
//! Refuses ordinals as GPUs: an ordinal is kept as such until the driver names its UUID.
//!
//! Relies on `cuda.h` of CUDA 13.0 for argument positions, given by the cookie.

use aya_ebpf::{macros::uretprobe, programs::RetProbeContext};
use cotenant_abi::{
    Action, Context, Cookie, Frame, GPU_ORDINAL, GPU_UNKNOWN, Loss, MAX_CONTEXTS, MemoryKind, Note,
    OrdinalKey, PointerKey, Thread,
};

use crate::{
    allocations::read_user,
    boundary,
    calls::{self, finish, leave},
    ledger,
    maps::{ANY, CONTEXTS, NOEXIST, ORDINALS, PRIMARIES, PROCESSES, lose, note},
    pools,
};

/// Where a call happens.
pub struct Place {
    pub gpu: u8,
    /// Unique id of the context, 0 when unknown.
    pub context: u64,
}

/// # Safety
/// `thread` is a live map value.
#[inline(always)]
unsafe fn slot(thread: *mut Thread, index: u32) -> *mut u64 {
    const { assert!(MAX_CONTEXTS == 4) };
    // SAFETY: the index is within the array.
    unsafe { (&raw mut (*thread).contexts).cast::<u64>().add(crate::atomic::below_four(index)) }
}

#[inline(always)]
fn current(thread: *mut Thread) -> u64 {
    // SAFETY: a live map value that only this thread touches.
    unsafe {
        let depth = (*thread).contexts_depth;
        if depth > 0 {
            let handle = *slot(thread, depth.wrapping_sub(1));
            if handle != 0 {
                return handle;
            }
        }
        match PROCESSES.get_ptr(&(*thread).process) {
            Some(process) if (*process).many_contexts == 0 => (*process).sole_context,
            _ => 0,
        }
    }
}

/// The GPU index of a process's ordinal, or the ordinal marked as such.
#[inline(always)]
pub fn gpu_of_ordinal(process: u64, ordinal: u32) -> u8 {
    match ORDINALS.get_ptr(&OrdinalKey { process, ordinal: u64::from(ordinal) }) {
        // SAFETY: a live map value.
        Some(index) => (unsafe { *index }) as u8,
        None if ordinal < 0x7f => GPU_ORDINAL | ordinal as u8,
        None => GPU_UNKNOWN,
    }
}

#[inline(always)]
fn learn(process: u64, ordinal: u32, gpu: u8) {
    let key = OrdinalKey { process, ordinal: u64::from(ordinal) };
    if ORDINALS.insert(&key, &u64::from(gpu), NOEXIST).is_err() && ORDINALS.get_ptr(&key).is_none() {
        lose(Loss::ContextMapFull);
    }
}

/// The kernel boundary speaks first, the context second; where both speak and differ it is counted.
#[inline(always)]
pub fn place(thread: *mut Thread, frame: &Frame) -> Place {
    // SAFETY: a live map value that only this thread touches.
    let process = unsafe { (*thread).process };
    let mut context = 0;
    let gpu = locate(process, current(thread), frame.gpu, &mut context);
    Place { gpu, context }
}

#[inline(never)]
fn locate(process: u64, handle: u64, boundary: u8, id: &mut u64) -> u8 {
    let Some(context) = CONTEXTS.get_ptr(&PointerKey { process, address: handle }) else {
        return boundary;
    };
    // SAFETY: a live map value.
    let ordinal = unsafe {
        *id = (*context).id;
        (*context).ordinal
    };
    let by_context = gpu_of_ordinal(process, ordinal);
    if boundary == GPU_UNKNOWN {
        return by_context;
    }
    if by_context & GPU_ORDINAL != 0 {
        learn(process, ordinal, boundary);
    } else if by_context != boundary {
        note(Note::GpuDisagreement);
    }
    boundary
}

/// Unique for a process: two CPUs do not create contexts of one process in the same nanosecond and slot.
#[inline(always)]
pub fn unique() -> u64 {
    // SAFETY: a helper without arguments.
    let cpu = unsafe { aya_ebpf::helpers::generated::bpf_get_smp_processor_id() };
    calls::now() << 10 | u64::from(cpu) & 1023
}

#[inline(always)]
fn open(process: u64, handle: u64, ordinal: u32) {
    let context = Context { id: unique(), references: 1, ordinal, gpu: GPU_UNKNOWN, pad: [0; 3] };
    if CONTEXTS.insert(&PointerKey { process, address: handle }, &context, ANY).is_err() {
        lose(Loss::ContextMapFull);
        ledger::mark_lost(process);
    }
    if let Some(entry) = PROCESSES.get_ptr_mut(&process) {
        // SAFETY: a live map value.
        unsafe {
            match (*entry).sole_context {
                0 => (*entry).sole_context = handle,
                known if known != handle => (*entry).many_contexts = 1,
                _ => {}
            }
        }
    }
}

/// What a context takes with it. Physical handles are the process's, not the context's.
const MORTAL: [MemoryKind; 7] = [
    MemoryKind::Device,
    MemoryKind::Managed,
    MemoryKind::Pool,
    MemoryKind::Array,
    MemoryKind::HostPinned,
    MemoryKind::HostRegistered,
    MemoryKind::Imported,
];

#[inline(always)]
fn bury(process: u64, context: &Context) {
    let gpu = gpu_of_ordinal(process, context.ordinal);
    let by_ordinal = if context.ordinal < 0x7f { GPU_ORDINAL | context.ordinal as u8 } else { GPU_UNKNOWN };
    for kind in MORTAL {
        ledger::debit_context(process, context.id, gpu, kind as u8);
        if by_ordinal != gpu {
            // Booked before the driver had named the GPU.
            ledger::debit_context(process, context.id, by_ordinal, kind as u8);
        }
        ledger::debit_context(process, context.id, GPU_UNKNOWN, kind as u8);
    }
}

#[inline(never)]
fn destroy(process: u64, handle: u64) {
    let key = PointerKey { process, address: handle };
    let Some(context) = CONTEXTS.get_ptr(&key) else {
        return;
    };
    // SAFETY: a live map value.
    let context = unsafe { *context };
    let _ = CONTEXTS.remove(&key);
    bury(process, &context);
    if let Some(entry) = PROCESSES.get_ptr_mut(&process) {
        // SAFETY: a live map value.
        unsafe {
            if (*entry).sole_context == handle {
                (*entry).sole_context = 0;
            }
        }
    }
}

#[inline(always)]
fn push(thread: *mut Thread, handle: u64) {
    // SAFETY: a live map value that only this thread touches.
    unsafe {
        let depth = (*thread).contexts_depth;
        if depth as usize >= MAX_CONTEXTS {
            lose(Loss::NestedTooDeep);
            return;
        }
        *slot(thread, depth) = handle;
        (*thread).contexts_depth = depth + 1;
    }
}

#[inline(always)]
fn pop(thread: *mut Thread) {
    // SAFETY: a live map value that only this thread touches.
    unsafe { (*thread).contexts_depth = (*thread).contexts_depth.saturating_sub(1) }
}

#[inline(always)]
fn primary(process: u64, ordinal: u32) -> Option<u64> {
    // SAFETY: a live map value.
    PRIMARIES.get_ptr(&OrdinalKey { process, ordinal: u64::from(ordinal) }).map(|handle| unsafe { *handle })
}

#[inline(always)]
fn retain(process: u64, ordinal: u32, handle: u64) {
    let key = PointerKey { process, address: handle };
    if primary(process, ordinal) == Some(handle)
        && let Some(context) = CONTEXTS.get_ptr_mut(&key)
    {
        // SAFETY: a live map value.
        unsafe { crate::atomic::add(&raw mut (*context).references, 1) };
        return;
    }
    if PRIMARIES.insert(&OrdinalKey { process, ordinal: u64::from(ordinal) }, &handle, ANY).is_err() {
        lose(Loss::ContextMapFull);
    }
    open(process, handle, ordinal);
}

#[inline(always)]
fn release(process: u64, ordinal: u32) {
    let Some(handle) = primary(process, ordinal) else {
        return;
    };
    let Some(context) = CONTEXTS.get_ptr_mut(&PointerKey { process, address: handle }) else {
        return;
    };
    // SAFETY: a live map value.
    let before = unsafe { crate::atomic::fetch_add((&raw mut (*context).references).cast(), -1) };
    if before <= 1 {
        destroy(process, handle);
        pools::forget(process, gpu_of_ordinal(process, ordinal));
    }
}

/// What the context held dies; the context itself stays, as new.
#[inline(always)]
fn reset(process: u64, ordinal: u32) {
    let Some(handle) = primary(process, ordinal) else {
        return;
    };
    let Some(context) = CONTEXTS.get_ptr_mut(&PointerKey { process, address: handle }) else {
        return;
    };
    // SAFETY: a live map value.
    unsafe {
        let old = *context;
        (*context).id = unique();
        bury(process, &old);
    }
    pools::forget(process, gpu_of_ordinal(process, ordinal));
}

#[uretprobe]
pub fn context_return(ctx: RetProbeContext) -> u32 {
    let Some((thread, frame, code)) = leave(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, frame) = unsafe { ((*thread).process, &*frame) };
    let cookie = Cookie(frame.cookie);
    let action = cookie.action();
    let handle = frame.arguments[0];
    let device = match cookie.size() {
        0 => frame.arguments[0],
        1 => frame.arguments[1],
        2 => frame.arguments[2],
        3 => frame.arguments[3],
        _ => frame.arguments[4],
    } as u32;
    // Labelled before the change: a destroyed context has no GPU afterwards.
    let mut gpu = contexts_gpu(thread, frame, action, process, device);
    if code == 0 {
        if action == Action::ContextCreate as u8 {
            if let Some(created) = read_user::<u64>(handle) {
                open(process, created, device);
                push(thread, created);
                gpu = gpu_of_ordinal(process, device);
            }
        } else if action == Action::PrimaryRetain as u8 {
            if let Some(retained) = read_user::<u64>(handle) {
                retain(process, device, retained);
            }
        } else if action == Action::PrimaryRelease as u8 {
            release(process, device);
        } else if action == Action::PrimaryReset as u8 {
            reset(process, device);
        } else if action == Action::ContextDestroy as u8 {
            if current(thread) == handle {
                pop(thread);
            }
            destroy(process, handle);
            // What that does to the device's pools was not looked at.
            pools::doubt(process, gpu);
        } else if action == Action::ContextSet as u8 {
            pop(thread);
            if handle != 0 {
                push(thread, handle);
            }
        } else if action == Action::ContextPush as u8 {
            push(thread, handle);
        } else if action == Action::ContextPop as u8 {
            pop(thread);
        } else if action == Action::DeviceUuid as u8
            && let Some(uuid) = read_user::<[u8; 16]>(handle)
        {
            let index = boundary::index_of(&uuid);
            if index != GPU_UNKNOWN {
                learn(process, device, index);
                gpu = index;
            }
        }
    }
    finish(thread, frame, gpu, code);
    0
}

#[inline(always)]
fn contexts_gpu(thread: *mut Thread, frame: &Frame, action: u8, process: u64, device: u32) -> u8 {
    let by_device = action == Action::ContextCreate as u8
        || action == Action::PrimaryRetain as u8
        || action == Action::PrimaryRelease as u8
        || action == Action::PrimaryReset as u8
        || action == Action::DeviceUuid as u8;
    if by_device { gpu_of_ordinal(process, device) } else { place(thread, frame).gpu }
}
