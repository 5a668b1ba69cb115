//! Owns waiting for the device: each kind blocks in a kernel function of its own, and a timer ends it like an interrupt.
//! Refuses to count how long the thread then takes to run again.

use std::{cell::Cell, time::Duration};

use crate::{Nap, monotonic_ns};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// `hrtimer_nanosleep`: pages are scrubbed.
    Reclaim,
    /// `do_sigtimedwait`: managed memory is evicted.
    UvmEviction,
    /// `do_sys_poll`: anything else of the device.
    Device,
}

thread_local! {
    static PUNCTUAL: Cell<bool> = const { Cell::new(false) };
}

impl Sleep {
    pub const ALL: [Self; 3] = [Self::Reclaim, Self::UvmEviction, Self::Device];

    /// Gives when the thread fell asleep and when its timer woke it: when that was due, or by how long the kernel says that it
    /// slept where the timer was late (100 us and more in an emulated machine).
    pub fn wait(self, duration: Duration) -> (u64, u64) {
        if !PUNCTUAL.replace(true) {
            // SAFETY: plain integers. Else the kernel lets a timer be 50 us late.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        }
        let nap = Nap::begin();
        let due = nap.begun().saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
        loop {
            let now = monotonic_ns();
            if now >= due {
                let slept = nap.slept();
                let from = nap.begun().max(due.saturating_sub(slept));
                return (from, due.max(from + slept));
            }
            self.block(Duration::from_nanos(due - now));
        }
    }

    /// A signal may end it early.
    fn block(self, duration: Duration) {
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: duration.subsec_nanos().into(),
        };
        // SAFETY: times and sets that outlive the calls; an empty set of signals never comes.
        unsafe {
            match self {
                Self::Reclaim => {
                    libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, &raw const time, std::ptr::null_mut());
                }
                Self::UvmEviction => {
                    let mut none: libc::sigset_t = std::mem::zeroed();
                    libc::sigemptyset(&raw mut none);
                    libc::sigtimedwait(&raw const none, std::ptr::null_mut(), &raw const time);
                }
                Self::Device => {
                    libc::ppoll(std::ptr::null_mut(), 0, &raw const time, std::ptr::null());
                }
            }
        }
    }
}
