//! Owns the kernel boundary: the UVM ioctls that name the GPU of a mapping by UUID, and say what goes.
//! Refuses ioctls outside a traced call, but for the unmapping of what a pool has mapped.
//!
//! Relies on nvidia-uvm ioctls 0x21 (UVM_MAP_EXTERNAL_ALLOCATION): u64 base, u64 length, u64 offset, 16 bytes GPU
//! UUID; 0x49 (UVM_CREATE_EXTERNAL_RANGE): u64 base, u64 length; 0x42 (UVM_UNMAP_EXTERNAL): u64 base, u64 length,
//! 16 bytes GPU UUID; the same prefixes in open driver releases 515.105.01 through 595.45.04. The kprobe is on
//! `uvm_unlocked_ioctl_entry(struct file *, unsigned int cmd, unsigned long arg)`.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_probe_read_user},
    macros::{kprobe, tracepoint},
    programs::{ProbeContext, TracePointContext},
};
use cotenant_abi::{Cookie, GPU_UNKNOWN, Loss, MAX_DEPTH, MAX_GPUS, MemoryKind, Note};

use crate::{
    atomic,
    calls::frame_below,
    maps::{GPUS, NEXT_GPU, NOEXIST, PROCESS_IDS, SETTINGS, THREADS, lose, note},
    pools,
};

const MAP_EXTERNAL_ALLOCATION: u32 = 0x21;
const UNMAP_EXTERNAL: u32 = 0x42;
const CREATE_EXTERNAL_RANGE: u32 = 0x49;

#[repr(C)]
#[derive(Clone, Copy)]
struct MapArgument {
    base: u64,
    length: u64,
    offset: u64,
    uuid: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UnmapArgument {
    base: u64,
    length: u64,
    uuid: [u8; 16],
}

/// The index of a UUID. One that NVML does not list is taken only where there is no NVML to ask.
#[inline(always)]
pub fn index_of(uuid: &[u8; 16]) -> u8 {
    if let Some(index) = GPUS.get_ptr(uuid) {
        // SAFETY: a live map value.
        return (unsafe { *index }) as u8;
    }
    // SAFETY: a live map value.
    if SETTINGS.get_ptr(0).is_none_or(|settings| unsafe { (*settings).uuids_closed } != 0) {
        note(Note::ForeignUuid);
        return GPU_UNKNOWN;
    }
    let Some(next) = NEXT_GPU.get_ptr_mut(0) else {
        return GPU_UNKNOWN;
    };
    // SAFETY: a live map value.
    let index = unsafe { atomic::fetch_add(next.cast(), 1) } as u64;
    if index >= u64::from(MAX_GPUS) || GPUS.insert(uuid, &index, NOEXIST).is_err() {
        lose(Loss::GpuTableFull);
        return GPU_UNKNOWN;
    }
    index as u8
}

#[inline(always)]
fn mapped(argument: u64) {
    let tid = bpf_get_current_pid_tgid() as u32;
    let Some(thread) = THREADS.get_ptr_mut(&tid) else {
        return;
    };
    // SAFETY: a live map value that only this thread touches.
    let depth = unsafe { (*thread).depth };
    if depth == 0 || depth as usize > MAX_DEPTH {
        return;
    }
    note(Note::BoundaryHits);
    // SAFETY: the helper checks the address.
    let Ok(argument) = (unsafe { bpf_probe_read_user(argument as *const MapArgument) }) else {
        lose(Loss::ReadUser);
        return;
    };
    let gpu = index_of(&argument.uuid);
    // SAFETY: 1 <= depth <= MAX_DEPTH.
    unsafe {
        let frame = frame_below(thread, depth);
        // The first mapping is the owner's; later ones in the same call are peers'.
        if (*frame).gpu == GPU_UNKNOWN {
            (*frame).gpu = gpu;
        }
        if (*frame).gpu == gpu {
            (*frame).mapped_kib = (*frame).mapped_kib.saturating_add((argument.length >> 10) as u32);
            let pooled = Cookie((*frame).cookie).kind() == MemoryKind::Pool as u8;
            if pooled && argument.base != (*frame).ranged && gpu != GPU_UNKNOWN {
                pools::grow((*thread).process, gpu, argument.base, argument.length);
            }
        }
    }
}

/// The driver makes an address range during a traced call.
#[inline(always)]
fn ranged(argument: u64) {
    let tid = bpf_get_current_pid_tgid() as u32;
    let Some(thread) = THREADS.get_ptr_mut(&tid) else {
        return;
    };
    // SAFETY: a live map value that only this thread touches.
    let depth = unsafe { (*thread).depth };
    if depth == 0 || depth as usize > MAX_DEPTH {
        return;
    }
    // SAFETY: the helper checks the address; 1 <= depth <= MAX_DEPTH.
    unsafe {
        match bpf_probe_read_user(argument as *const u64) {
            Ok(base) => (*frame_below(thread, depth)).ranged = base,
            Err(_) => lose(Loss::ReadUser),
        }
    }
}

/// In whatever call, or in none: a pool gives back when its stream is synchronised.
#[inline(always)]
fn unmapped(argument: u64) {
    let tgid = (bpf_get_current_pid_tgid() >> 32) as u32;
    let Some(process) = PROCESS_IDS.get_ptr(&tgid) else {
        return;
    };
    // SAFETY: the helper checks the address.
    let Ok(argument) = (unsafe { bpf_probe_read_user(argument as *const UnmapArgument) }) else {
        return;
    };
    if let Some(index) = GPUS.get_ptr(&argument.uuid) {
        // SAFETY: live map values.
        let (process, gpu) = unsafe { (*process, *index as u8) };
        pools::shrink(process, gpu, argument.base, argument.length);
    }
}

#[inline(always)]
fn ioctl(command: u32, argument: u64) {
    if command == MAP_EXTERNAL_ALLOCATION {
        mapped(argument);
    } else if command == CREATE_EXTERNAL_RANGE {
        ranged(argument);
    } else if command == UNMAP_EXTERNAL {
        unmapped(argument);
    }
}

/// `syscalls:sys_enter_ioctl`: cmd at 24, arg at 32 on every 64-bit kernel.
#[tracepoint]
pub fn ioctl_enter(ctx: TracePointContext) -> u32 {
    // SAFETY: the record of this tracepoint is longer than 40 bytes.
    let Ok(command) = (unsafe { ctx.read_at::<u32>(24) }) else {
        return 0;
    };
    if command != MAP_EXTERNAL_ALLOCATION && command != CREATE_EXTERNAL_RANGE && command != UNMAP_EXTERNAL {
        return 0;
    }
    // SAFETY: as above.
    if let Ok(argument) = unsafe { ctx.read_at::<u64>(32) } {
        ioctl(command, argument);
    }
    0
}

#[kprobe]
pub fn uvm_ioctl(ctx: ProbeContext) -> u32 {
    if let (Some(command), Some(argument)) = (ctx.arg::<u32>(1), ctx.arg::<u64>(2)) {
        ioctl(command, argument);
    }
    0
}
