//! Owns the last calls of each process that moved memory, for the day it is killed.
//! Refuses to be a history: eight calls, the oldest is overwritten.

use cotenant_abi::{Action, Cookie, Frame, Loss, RecentCall};

use crate::{
    atomic::{self, below_eight},
    calls::now,
    maps::{NOEXIST, RECENT, ZERO_RECENT, lose},
    reports::bytes_of,
};

#[inline(always)]
fn moves_memory(action: u8) -> bool {
    action >= Action::Allocate as u8 && action <= Action::HandleRelease as u8
}

/// A call has returned.
#[inline(never)]
pub fn remember(process: u64, frame: *const Frame, gpu: u8, code: u32) {
    // SAFETY: the caller's frame is a live map value.
    let frame = unsafe { &*frame };
    let cookie = Cookie(frame.cookie);
    if !moves_memory(cookie.action()) {
        return;
    }
    if RECENT.get_ptr(&process).is_none()
        && let Some(zero) = ZERO_RECENT.get(0)
    {
        let _ = RECENT.insert(&process, zero, NOEXIST);
    }
    let Some(recent) = RECENT.get_ptr_mut(&process) else {
        lose(Loss::RecentMapFull);
        return;
    };
    let (operation, bytes) = (cookie.operation(), bytes_of(frame));
    let call = RecentCall { at: now(), bytes, code, operation, gpu, pad: [0; 2] };
    // SAFETY: a live map value; the index is within the array. Two threads that are eight calls apart may mix theirs.
    unsafe {
        let place = below_eight(atomic::fetch_add(&raw mut (*recent).next, 1) as u64);
        *(&raw mut (*recent).calls).cast::<RecentCall>().add(place) = call;
    }
}
