//! Owns the kernel's log as `syslog(2)` gives it: its last lines, and how many bytes the kernel keeps.
//! Refuses to consume or clear anything: others read the log too.

use std::io;

/// `SYSLOG_ACTION_READ_ALL` and `SYSLOG_ACTION_SIZE_BUFFER`: with `CAP_SYSLOG`, or where `kernel.dmesg_restrict` is 0.
const READ_ALL: libc::c_int = 3;
const SIZE_BUFFER: libc::c_int = 10;

/// Fills the buffer with the log's last whole records; the number of bytes.
pub fn log_tail(buffer: &mut [u8]) -> io::Result<usize> {
    let length = libc::c_int::try_from(buffer.len()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel writes at most `length` bytes, which are the buffer's.
    answer(unsafe { libc::klogctl(READ_ALL, buffer.as_mut_ptr().cast(), length) })
}

/// Bytes that the kernel keeps of its log.
pub fn log_size() -> io::Result<usize> {
    // SAFETY: with this action no buffer is looked at.
    answer(unsafe { libc::klogctl(SIZE_BUFFER, std::ptr::null_mut(), 0) })
}

fn answer(code: libc::c_int) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| io::Error::last_os_error())
}
