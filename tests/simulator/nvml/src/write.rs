//! Owns what is written through and read from callers' pointers, and the line on stderr.
//! Refuses null, and a text that does not fit.

use std::ffi::{CStr, c_char};
use std::io::{self, Write};

use crate::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, Outcome};

/// One line on stderr, in one write.
pub(crate) fn warn(reason: &str) {
    let line = format!("SIMULATED libnvidia-ml.so.1: {reason}\n");
    // Nowhere is left to say that stderr is closed.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// # Safety
/// `to` is null or writable for a `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and otherwise the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// # Safety
/// `to` is null or writable for `length` bytes.
pub(crate) unsafe fn text(to: *mut c_char, length: u32, text: &str) -> Outcome {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if length as usize <= text.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: room for the text and its end was just checked; callers and this library share no memory.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// # Safety
/// `from` is null or a C string that lives through the call.
pub(crate) unsafe fn argument<'a>(from: *const c_char) -> Outcome<&'a str> {
    if from.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and otherwise the caller's promise.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

/// `text` in a fixed field, zero-filled. What does not fit is cut.
pub(crate) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from.cast_signed();
    }
    field
}
