//! Owns the kernel boundary: the UVM ioctl that names the GPU of a mapping by UUID.
//! Refuses ioctls outside a traced call.
//!
//! Relies on nvidia-uvm ioctl 0x21 (UVM_MAP_EXTERNAL_ALLOCATION): u64 base, u64 length, u64 offset, 16 bytes GPU
//! UUID; the same prefix in open driver releases 515.105.01 through 595.45.04. The kprobe is on
//! `uvm_unlocked_ioctl_entry(struct file *, unsigned int cmd, unsigned long arg)`.

use aya_ebpf::{
    helpers::{bpf_get_current_pid_tgid, bpf_probe_read_user},
    macros::{kprobe, tracepoint},
    programs::{ProbeContext, TracePointContext},
};
use cotenant_abi::{GPU_UNKNOWN, Loss, MAX_DEPTH, MAX_GPUS, Note};

use crate::{
    atomic,
    calls::frame_below,
    maps::{GPUS, NEXT_GPU, NOEXIST, SETTINGS, THREADS, lose, note},
};

const MAP_EXTERNAL_ALLOCATION: u32 = 0x21;

#[repr(C)]
#[derive(Clone, Copy)]
struct MapArgument {
    base: u64,
    length: u64,
    offset: u64,
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
        }
    }
}

/// `syscalls:sys_enter_ioctl`: cmd at 24, arg at 32 on every 64-bit kernel.
#[tracepoint]
pub fn ioctl_enter(ctx: TracePointContext) -> u32 {
    // SAFETY: the record of this tracepoint is longer than 40 bytes.
    let Ok(command) = (unsafe { ctx.read_at::<u32>(24) }) else {
        return 0;
    };
    if command != MAP_EXTERNAL_ALLOCATION {
        return 0;
    }
    // SAFETY: as above.
    if let Ok(argument) = unsafe { ctx.read_at::<u64>(32) } {
        mapped(argument);
    }
    0
}

#[kprobe]
pub fn uvm_ioctl(ctx: ProbeContext) -> u32 {
    if ctx.arg::<u32>(1) == Some(MAP_EXTERNAL_ALLOCATION)
        && let Some(argument) = ctx.arg::<u64>(2)
    {
        mapped(argument);
    }
    0
}
