//! Owns how long a thread really slept in a system call, by the kernel's own account.
//! Refuses to count its way into sleep and out of it: on a busy machine those take longer than many a wait.

use std::{cell::RefCell, fs::File, os::unix::fs::FileExt};

use crate::monotonic_ns;

/// Taken before a call that may sleep, in the thread that makes it.
pub struct Nap {
    begun: u64,
    ran: u64,
    queued: u64,
}

thread_local! {
    /// This thread's own; a fork's child has another.
    static ACCOUNT: RefCell<Option<(i32, File)>> = const { RefCell::new(None) };
}

impl Nap {
    pub fn begin() -> Self {
        let queued = queued();
        Self { ran: ran(), begun: monotonic_ns(), queued }
    }

    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Nanoseconds since `begin` that the thread neither ran nor waited for a processor.
    pub fn slept(&self) -> u64 {
        // The two clocks side by side, as in `begin`.
        let queued = queued() - self.queued;
        let ran = ran() - self.ran;
        (monotonic_ns() - self.begun).saturating_sub(ran + queued)
    }
}

/// How long this thread was on a processor so far.
pub fn ran() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Runnable and not running so far; 0 on a kernel that does not say.
fn queued() -> u64 {
    ACCOUNT.with_borrow_mut(|account| {
        // SAFETY: takes no argument and cannot fail.
        let thread = unsafe { libc::gettid() };
        if account.as_ref().is_none_or(|(whose, _)| *whose != thread) {
            *account = File::open("/proc/thread-self/schedstat").ok().map(|file| (thread, file));
        }
        let mut text = [0; 64];
        let length = account.as_ref().and_then(|(_, file)| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let fields = std::str::from_utf8(&text[..length]).unwrap_or_default();
        fields.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn sleeping_counts_and_running_does_not() {
        let nap = Nap::begin();
        std::thread::sleep(Duration::from_millis(20));
        let until = monotonic_ns() + 20_000_000;
        while monotonic_ns() < until {
            std::hint::spin_loop();
        }
        let slept = nap.slept();
        assert!((20_000_000..25_000_000).contains(&slept), "{slept} ns");
    }
}
