//! Owns pointers: allocations, frees, host memory, arrays, imports by pointer.
//! Refuses physical handles (see `physical`).
//!
//! Relies on `cuda.h` of CUDA 13.0: CUDA_ARRAY_DESCRIPTOR {Width u64, Height u64, Format u32, NumChannels u32},
//! CUDA_ARRAY3D_DESCRIPTOR {Width u64, Height u64, Depth u64, Format u32, NumChannels u32, Flags u32}.

use aya_ebpf::{
    helpers::bpf_probe_read_user,
    macros::{uprobe, uretprobe},
    programs::{ProbeContext, RetProbeContext},
};
use cotenant_abi::{
    ByteRule, Cookie, Frame, GPU_UNKNOWN, Loss, MAX_DEPTH, MemoryKind, Note, Pointer, PointerKey, Table,
    Thread,
};

use crate::{
    calls::{self, enter, finish, frame_below, leave},
    contexts, ledger,
    maps::{NOEXIST, POINTERS, lose, note},
    quota,
};

/// Reads one value of the tenant's memory; a failure is counted.
///
/// Look at each answer before the next question: the compiler saves a value that may not be there, and before Linux 6.3
/// the verifier takes no program that loads a stack slot which some path has not written.
#[inline(always)]
pub fn read_user<T>(address: u64) -> Option<T> {
    // SAFETY: the helper checks the address and fails on anything that is not mapped user memory.
    match unsafe { bpf_probe_read_user(address as *const T) } {
        Ok(value) => Some(value),
        Err(_) => {
            lose(Loss::ReadUser);
            None
        }
    }
}

/// Bytes of one element of a `CUarray_format`, for the plain formats (1 to 3: unsigned, 8 to 10: signed).
#[inline(always)]
fn element_bytes(format: u32) -> u64 {
    match format {
        0x01 | 0x08 | 0xc0 | 0xc1 | 0xc2 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    }
}

/// `max(value, 1)` without a branch: three branches in each of 32 levels are more paths than the verifier walks.
#[inline(always)]
fn at_least_one(value: u64) -> u64 {
    value + (crate::atomic::top_bit(value | value.wrapping_neg()) ^ 1)
}

/// What a size or an address is when the tenant's memory could not be read. Not an `Option`: the two halves of one
/// in registers are what the verifier trips over.
const UNREAD: u64 = u64::MAX;

#[inline(never)]
fn array_bytes(descriptor: u64, three: u64, levels: u64) -> u64 {
    let Some(mut width) = read_user::<u64>(descriptor) else {
        return UNREAD;
    };
    let Some(mut height) = read_user::<u64>(descriptor + 8) else {
        return UNREAD;
    };
    let mut depth = 0;
    if three != 0 {
        let Some(read) = read_user::<u64>(descriptor + 16) else {
            return UNREAD;
        };
        depth = read;
    }
    let tail = descriptor + if three != 0 { 24 } else { 16 };
    let Some(format) = read_user::<u32>(tail) else {
        return UNREAD;
    };
    let Some(channels) = read_user::<u32>(tail + 4) else {
        return UNREAD;
    };
    let element = element_bytes(format).wrapping_mul(u64::from(channels));
    let mut bytes = 0u64;
    // A mipmap of a 2^31 texture has 32 levels.
    for level in 0..32 {
        if level >= levels {
            break;
        }
        let volume = at_least_one(width).wrapping_mul(at_least_one(height)).wrapping_mul(at_least_one(depth));
        bytes = bytes.wrapping_add(volume.wrapping_mul(element));
        width /= 2;
        height /= 2;
        depth /= 2;
    }
    bytes
}

#[inline(always)]
fn bytes_of(frame: &Frame) -> u64 {
    let rule = Cookie(frame.cookie).rule();
    let [_, argument, levels, height, ..] = frame.arguments;
    // Sizes are always argument 1 in the table; a test of the table holds it to that.
    if rule == ByteRule::Argument as u8 {
        argument
    } else if rule == ByteRule::Argument32 as u8 {
        argument & 0xffff_ffff
    } else if rule == ByteRule::Pitch as u8 {
        let pitch = read_user::<u64>(argument).unwrap_or(UNREAD);
        if pitch == UNREAD { UNREAD } else { pitch.wrapping_mul(height) }
    } else if rule == ByteRule::Array2D as u8 {
        array_bytes(argument, 0, 1)
    } else if rule == ByteRule::Array3D as u8 {
        array_bytes(argument, 1, 1)
    } else if rule == ByteRule::Mipmapped as u8 {
        array_bytes(argument, 1, levels & 0xffff_ffff)
    } else {
        u64::from(frame.mapped_kib) << 10
    }
}

#[inline(always)]
fn address_of(frame: &Frame) -> u64 {
    let cookie = Cookie(frame.cookie);
    let out = frame.arguments[0];
    if cookie.narrow() {
        return out;
    }
    if cookie.rule() == ByteRule::Argument32 as u8 && cookie.kind() == MemoryKind::Device as u8 {
        // Version 1 writes a 32-bit CUdeviceptr_v1.
        return read_user::<u32>(out).map_or(UNREAD, u64::from);
    }
    read_user(out).unwrap_or(UNREAD)
}

#[inline(always)]
fn is_host(kind: u8) -> bool {
    kind == MemoryKind::HostPinned as u8 || kind == MemoryKind::HostRegistered as u8
}

#[inline(always)]
fn book(process: u64, frame: &Frame, context: u64, gpu: u8) {
    let kind = Cookie(frame.cookie).kind();
    let address = address_of(frame);
    let bytes = bytes_of(frame);
    if address == UNREAD || bytes == UNREAD {
        ledger::mark_lost(process);
        return;
    }
    let key = PointerKey { process, address };
    let pointer = Pointer { bytes, booked_at: calls::now(), context, gpu, kind, pad: [0; 6] };
    if insert(&key, &pointer, frame.start)
        && !ledger::credit(process, context, gpu, kind, bytes)
        && let Some(booked) = POINTERS.get_ptr_mut(&key)
    {
        // SAFETY: a live map value; nobody frees an address before its allocation has returned.
        unsafe { (*booked).context = 0 };
    }
}

/// False when the pointer is not to be credited.
#[inline(never)]
fn insert(key: &PointerKey, pointer: &Pointer, start: u64) -> bool {
    if !quota::claim(key.process, Table::Pointers) {
        return false;
    }
    if POINTERS.insert(key, pointer, NOEXIST).is_ok() {
        return true;
    }
    quota::count(key.process, Table::Pointers, -1);
    let Some(held) = POINTERS.get_ptr(key) else {
        lose(Loss::PointerMapFull);
        ledger::mark_lost(key.process);
        return false;
    };
    // SAFETY: a live map value.
    let Pointer { bytes, booked_at, context, gpu, kind, .. } = unsafe { *held };
    if booked_at >= start {
        // A traced call inside this one has booked it already.
        note(Note::NestedDuplicate);
        return false;
    }
    // Its context died with it, or its free was not seen.
    if ledger::debit(key.process, context, gpu, kind, bytes) {
        note(Note::ReplacedPointer);
    }
    let _ = POINTERS.insert(key, pointer, crate::maps::ANY);
    true
}

#[uretprobe]
pub fn allocate_return(ctx: RetProbeContext) -> u32 {
    let Some((thread, frame, code)) = leave(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, frame) = unsafe { ((*thread).process, &*frame) };
    let place = contexts::place(thread, frame);
    let gpu = if is_host(Cookie(frame.cookie).kind()) { GPU_UNKNOWN } else { place.gpu };
    if code == 0 {
        book(process, frame, place.context, gpu);
    }
    finish(thread, frame, gpu, code);
    0
}

/// The entry leaves the map before the driver may hand its address to another thread, and comes back if the
/// free fails. Its bytes stay booked until the return code.
#[uprobe]
pub fn free_enter(ctx: ProbeContext) -> u32 {
    let Some((thread, frame)) = enter(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    unsafe {
        let key = PointerKey { process: (*thread).process, address: (*frame).arguments[0] };
        if let Some(pointer) = POINTERS.get_ptr(&key) {
            (*frame).stash = *pointer;
            if POINTERS.remove(&key).is_ok() {
                (*frame).stashed = 1;
                quota::count(key.process, Table::Pointers, -1);
            }
        }
    }
    0
}

/// True when a call around this one is freeing the same address.
#[inline(always)]
fn freed_outside(thread: *mut Thread, address: u64) -> bool {
    // SAFETY: a live map value that only this thread touches.
    let depth = unsafe { (*thread).depth };
    for level in 1..=MAX_DEPTH as u32 {
        if level > depth {
            break;
        }
        // SAFETY: 1 <= level <= MAX_DEPTH.
        let outer = unsafe { &*frame_below(thread, level) };
        if outer.stashed == 1 && outer.arguments[0] == address {
            return true;
        }
    }
    false
}

#[uretprobe]
pub fn free_return(ctx: RetProbeContext) -> u32 {
    let Some((thread, frame, code)) = leave(&ctx) else {
        return 0;
    };
    // SAFETY: both point into one live map value that only this thread touches.
    let (process, frame) = unsafe { ((*thread).process, &*frame) };
    let address = frame.arguments[0];
    let stash = frame.stash;
    let gpu;
    if frame.stashed == 1 {
        gpu = stash.gpu;
        if code == 0 {
            ledger::debit(process, stash.context, stash.gpu, stash.kind, stash.bytes);
        } else if POINTERS.insert(&PointerKey { process, address }, &stash, NOEXIST).is_ok() {
            quota::count(process, Table::Pointers, 1);
        } else {
            lose(Loss::PointerMapFull);
            ledger::mark_lost(process);
        }
    } else {
        if code == 0 && address != 0 {
            note(if freed_outside(thread, address) { Note::NestedDuplicate } else { Note::UnmatchedFree });
        }
        gpu = contexts::place(thread, frame).gpu;
    }
    finish(thread, frame, gpu, code);
    0
}
