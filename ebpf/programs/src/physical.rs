//! Owns physical memory by handle: `cuMemCreate` to the last release and unmap.
//! Refuses to count reservations and mappings as bytes.
//!
//! Relies on `cuda.h` of CUDA 13.0: CUmemAllocationProp {type u32, requestedHandleTypes u32,
//! location {type u32, id i32}, ..}; location type 1 is a device.

use aya_ebpf::{
    helpers::generated::bpf_loop,
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use core::ffi::c_void;
use cotenant_abi::{
    Action, Cookie, Frame, GPU_UNKNOWN, Handle, Loss, MAX_UNMAP_SPAN, Mapping, MemoryKind, Note, Physical,
    PointerKey, Table,
};

use crate::{
    allocations::read_user,
    atomic,
    calls::{enter, finish, leave},
    contexts, ledger,
    maps::{ANY, HANDLES, MAPPINGS, NOEXIST, PHYSICALS, lose, note},
    quota,
};

const LOCATION_DEVICE: u32 = 1;

#[inline(always)]
fn physical_of(process: u64, id: u64) -> Option<*mut Physical> {
    PHYSICALS.get_ptr_mut(&PointerKey { process, address: id })
}

/// One handle or mapping less; the last one frees the bytes.
#[inline(always)]
fn drop_reference(process: u64, id: u64) {
    let Some(physical) = physical_of(process, id) else {
        return;
    };
    // SAFETY: a live map value.
    unsafe {
        if atomic::fetch_add((&raw mut (*physical).references).cast(), -1) > 1 {
            return;
        }
        let Physical { bytes, gpu, kind, .. } = *physical;
        if PHYSICALS.remove(&PointerKey { process, address: id }).is_ok() {
            quota::count(process, Table::Physicals, -1);
        }
        if bytes > 0 {
            ledger::debit(process, 0, gpu, kind, bytes);
        }
    }
}

/// A handle value comes into use. An old one under the same value lost its release to us.
#[inline(always)]
fn add_handle(process: u64, handle: u64, physical: Physical) -> bool {
    let id = contexts::unique();
    if !quota::claim(process, Table::Physicals) {
        return false;
    }
    if PHYSICALS.insert(&PointerKey { process, address: id }, &physical, NOEXIST).is_err() {
        quota::count(process, Table::Physicals, -1);
        lose(Loss::HandleMapFull);
        ledger::mark_lost(process);
        return false;
    }
    let key = PointerKey { process, address: handle };
    if let Some(old) = HANDLES.get_ptr(&key) {
        // SAFETY: a live map value.
        let old = unsafe { (*old).physical };
        note(Note::ReplacedPointer);
        drop_reference(process, old);
    }
    if name(process, handle, id) {
        return true;
    }
    if PHYSICALS.remove(&PointerKey { process, address: id }).is_ok() {
        quota::count(process, Table::Physicals, -1);
    }
    false
}

/// A handle value means this memory from now on. False: there was no room for it.
#[inline(never)]
fn name(process: u64, handle: u64, id: u64) -> bool {
    let key = PointerKey { process, address: handle };
    let known = HANDLES.get_ptr(&key).is_some();
    if !known && !quota::claim(process, Table::Handles) {
        return false;
    }
    if HANDLES.insert(&key, &Handle { count: 1, physical: id }, ANY).is_ok() {
        return true;
    }
    if !known {
        quota::count(process, Table::Handles, -1);
    }
    lose(Loss::HandleMapFull);
    ledger::mark_lost(process);
    false
}

#[inline(always)]
fn create(process: u64, frame: &Frame) -> u8 {
    let Some(handle) = read_user::<u64>(frame.arguments[0]) else {
        ledger::mark_lost(process);
        return GPU_UNKNOWN;
    };
    let Some(location) = read_user::<u32>(frame.arguments[2].wrapping_add(8)) else {
        ledger::mark_lost(process);
        return GPU_UNKNOWN;
    };
    let Some(ordinal) = read_user::<u32>(frame.arguments[2].wrapping_add(12)) else {
        ledger::mark_lost(process);
        return GPU_UNKNOWN;
    };
    let bytes = frame.arguments[1];
    let (kind, gpu) = if location == LOCATION_DEVICE {
        (MemoryKind::Vmm as u8, contexts::gpu_of_ordinal(process, ordinal))
    } else {
        (MemoryKind::HostPinned as u8, GPU_UNKNOWN)
    };
    if add_handle(process, handle, Physical { bytes, references: 1, gpu, kind, pad: [0; 6] }) {
        ledger::credit(process, 0, gpu, kind, bytes);
    }
    gpu
}

#[inline(always)]
fn retain(process: u64, frame: &Frame) {
    let Some(handle) = read_user::<u64>(frame.arguments[0]) else {
        return;
    };
    let Some(mapping) = MAPPINGS.get_ptr(&PointerKey { process, address: frame.arguments[1] }) else {
        return;
    };
    // SAFETY: a live map value.
    let id = unsafe { (*mapping).physical };
    let Some(physical) = physical_of(process, id) else {
        return;
    };
    // SAFETY: a live map value.
    unsafe { atomic::add(&raw mut (*physical).references, 1) };
    let key = PointerKey { process, address: handle };
    match HANDLES.get_ptr_mut(&key) {
        // SAFETY: a live map value.
        Some(known) if unsafe { (*known).physical } == id => unsafe {
            atomic::add(&raw mut (*known).count, 1);
        },
        _ => {
            name(process, handle, id);
        }
    }
}

/// `cuMemRelease`: the handle leaves the map before the driver may give its value to another thread.
#[uprobe]
pub fn release_enter(ctx: ProbeContext) -> u32 {
    let Some((thread, frame)) = enter(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    unsafe {
        let key = PointerKey { process: (*thread).process, address: (*frame).arguments[0] };
        if let Some(handle) = HANDLES.get_ptr_mut(&key) {
            (*frame).stash.bytes = (*handle).physical;
            (*frame).stashed = 1;
            if atomic::fetch_add((&raw mut (*handle).count).cast(), -1) <= 1 && HANDLES.remove(&key).is_ok() {
                quota::count(key.process, Table::Handles, -1);
            }
        }
    }
    0
}

#[inline(always)]
fn release(process: u64, frame: *mut Frame, code: u32) -> u8 {
    // SAFETY: a live map value that only this thread touches.
    let (stashed, id, handle) = unsafe { ((*frame).stashed, (*frame).stash.bytes, (*frame).arguments[0]) };
    if stashed == 0 {
        if code == 0 {
            note(Note::UnmatchedFree);
        }
        return GPU_UNKNOWN;
    }
    // SAFETY: a live map value.
    let (gpu, bytes) = physical_of(process, id)
        .map_or((GPU_UNKNOWN, 0), |physical| unsafe { ((*physical).gpu, (*physical).bytes) });
    // What is reported of this call is what the handle stood for.
    // SAFETY: as above.
    unsafe { (*frame).stash.bytes = bytes };
    if code == 0 {
        drop_reference(process, id);
        return gpu;
    }
    let key = PointerKey { process, address: handle };
    match HANDLES.get_ptr_mut(&key) {
        // SAFETY: a live map value.
        Some(handle) => unsafe { atomic::add(&raw mut (*handle).count, 1) },
        None => {
            if HANDLES.insert(&key, &Handle { count: 1, physical: id }, NOEXIST).is_ok() {
                quota::count(process, Table::Handles, 1);
            } else {
                lose(Loss::HandleMapFull);
                ledger::mark_lost(process);
            }
        }
    }
    gpu
}

#[uretprobe]
pub fn handle_return(ctx: RetProbeContext) -> u32 {
    let Some((thread, frame, code)) = leave(&ctx) else {
        return 0;
    };
    let own = frame;
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, frame) = unsafe { ((*thread).process, &*frame) };
    let action = Cookie(frame.cookie).action();
    let mut gpu = GPU_UNKNOWN;
    if action == Action::HandleRelease as u8 {
        gpu = release(process, own, code);
    } else if code != 0 {
        gpu = contexts::place(thread, frame).gpu;
    } else if action == Action::HandleCreate as u8 {
        gpu = create(process, frame);
    } else if action == Action::HandleRetain as u8 {
        retain(process, frame);
    } else if action == Action::HandleImport as u8 {
        // The size of an import is known when it is mapped.
        if let Some(handle) = read_user::<u64>(frame.arguments[0]) {
            let kind = MemoryKind::Imported as u8;
            add_handle(process, handle, Physical { bytes: 0, references: 1, gpu, kind, pad: [0; 6] });
        }
    }
    finish(thread, own, gpu, code);
    0
}

#[inline(always)]
fn map(process: u64, frame: &Frame, gpu: u8) {
    let [address, bytes, _, handle, ..] = frame.arguments;
    let Some(entry) = HANDLES.get_ptr(&PointerKey { process, address: handle }) else {
        return;
    };
    // SAFETY: a live map value.
    let id = unsafe { (*entry).physical };
    let Some(physical) = physical_of(process, id) else {
        return;
    };
    // SAFETY: a live map value.
    unsafe {
        atomic::add(&raw mut (*physical).references, 1);
        if (*physical).bytes == 0 && (*physical).kind == MemoryKind::Imported as u8 {
            (*physical).bytes = bytes;
            (*physical).gpu = gpu;
            ledger::credit(process, 0, gpu, (*physical).kind, bytes);
        }
    }
    if !keep(process, address, &Mapping { bytes, physical: id }) {
        drop_reference(process, id);
    }
}

/// False: there was no room for the mapping.
#[inline(never)]
fn keep(process: u64, address: u64, mapping: &Mapping) -> bool {
    let key = PointerKey { process, address };
    let known = MAPPINGS.get_ptr(&key).is_some();
    if !known && !quota::claim(process, Table::Mappings) {
        return false;
    }
    if MAPPINGS.insert(&key, mapping, ANY).is_ok() {
        return true;
    }
    if !known {
        quota::count(process, Table::Mappings, -1);
    }
    lose(Loss::MappingMapFull);
    ledger::mark_lost(process);
    false
}

struct Span {
    process: u64,
    at: u64,
    end: u64,
}

/// One mapping of an unmapped span. 1 ends the loop.
#[inline(never)]
extern "C" fn unmap_one(_: u64, context: *mut c_void) -> i64 {
    let span = context.cast::<Span>();
    // SAFETY: `bpf_loop` hands back the pointer it was given, alive on the caller's stack.
    let Span { process, at, end } = unsafe { core::ptr::read(span) };
    if at >= end {
        return 1;
    }
    let key = PointerKey { process, address: at };
    let Some(mapping) = MAPPINGS.get_ptr(&key) else {
        // Mapped before the agent came: nothing of it is booked. Step by the smallest granularity.
        // SAFETY: as above.
        unsafe { (*span).at = at.wrapping_add(2 << 20) };
        return 0;
    };
    // SAFETY: a live map value.
    let Mapping { bytes, physical } = unsafe { *mapping };
    if MAPPINGS.remove(&key).is_ok() {
        quota::count(process, Table::Mappings, -1);
    }
    drop_reference(process, physical);
    // SAFETY: as above.
    unsafe { (*span).at = at.wrapping_add(if bytes == 0 { 2 << 20 } else { bytes }) };
    0
}

#[uretprobe]
pub fn map_return(ctx: RetProbeContext) -> u32 {
    let Some((thread, frame, code)) = leave(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, frame) = unsafe { ((*thread).process, &*frame) };
    let gpu = contexts::place(thread, frame).gpu;
    if code == 0 {
        map(process, frame, gpu);
    }
    finish(thread, frame, gpu, code);
    0
}

/// `bpf_loop` needs Linux 5.17: kept apart so that an older kernel loses this program alone.
#[uretprobe]
pub fn unmap_return(ctx: RetProbeContext) -> u32 {
    let Some((thread, frame, code)) = leave(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, frame) = unsafe { ((*thread).process, &*frame) };
    if code == 0 {
        let [address, bytes, ..] = frame.arguments;
        let mut span = Span { process, at: address, end: address.wrapping_add(bytes) };
        // SAFETY: the callback has the signature the helper wants and `span` outlives the loop.
        unsafe {
            bpf_loop(MAX_UNMAP_SPAN, unmap_one as *mut c_void, (&raw mut span).cast(), 0);
            if core::ptr::read_volatile(&raw const span.at) < span.end {
                lose(Loss::UnmapTruncated);
                ledger::mark_lost(process);
            }
        }
    }
    let gpu = contexts::place(thread, frame).gpu;
    finish(thread, frame, gpu, code);
    0
}
