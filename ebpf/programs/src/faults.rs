//! Owns faults that the driver announces by tracepoint.
//! Refuses to say whose they are: the message names a process, the current task does not.
//!
//! Relies on `nvidia:nvidia_dev_xid` (open and proprietary kernel modules since 550): `__data_loc char[] dev`,
//! `u32 error_code`, `__data_loc char[] msg`, at the offsets its format file gives. A `__data_loc` word has the offset
//! of its string from the start of the record in its low half.

use aya_ebpf::{
    EbpfContext, helpers::generated::bpf_probe_read_kernel_str, macros::tracepoint,
    programs::TracePointContext,
};
use cotenant_abi::{EVENT_XID, Loss, XidFault};

use crate::{
    calls::now,
    maps::{EVENTS, SETTINGS, lose},
};

/// Copies the string that the word at `offset` points to.
///
/// # Safety
/// `to` has room for `size` bytes.
#[inline(always)]
unsafe fn copy(ctx: &TracePointContext, offset: u32, to: *mut u8, size: u32) {
    // SAFETY: the agent took the offset from this tracepoint's format file.
    let Ok(word) = (unsafe { ctx.read_at::<u32>(offset as usize) }) else {
        lose(Loss::ReadKernel);
        return;
    };
    // SAFETY: the helper checks the address, and the caller vouches for the room.
    let read = unsafe {
        bpf_probe_read_kernel_str(
            to.cast(),
            size,
            ctx.as_ptr().wrapping_byte_add((word & 0xffff) as usize).cast(),
        )
    };
    if read < 0 {
        lose(Loss::ReadKernel);
    }
}

#[tracepoint]
pub fn xid(ctx: TracePointContext) -> u32 {
    let Some(settings) = SETTINGS.get(0) else {
        return 0;
    };
    // SAFETY: the agent took the offset from this tracepoint's format file.
    let Ok(code) = (unsafe { ctx.read_at::<u32>(settings.xid_code as usize) }) else {
        lose(Loss::ReadKernel);
        return 0;
    };
    let Some(mut slot) = EVENTS.reserve::<XidFault>(0) else {
        lose(Loss::RingFull);
        return 0;
    };
    let fault = slot.as_mut_ptr();
    // SAFETY: a reserved record, written as a whole: what is not read stays 0.
    unsafe {
        core::ptr::write_bytes(fault, 0, 1);
        (*fault).tag = EVENT_XID;
        (*fault).code = code;
        (*fault).at = now();
        copy(&ctx, settings.xid_device, (&raw mut (*fault).device).cast(), 32);
        copy(&ctx, settings.xid_message, (&raw mut (*fault).message).cast(), 128);
    }
    slot.submit(0);
    0
}
