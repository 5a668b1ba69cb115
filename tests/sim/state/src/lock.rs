//! Owns a lock that lives in shared memory, blocks in the kernel and survives the death of its holder.
//! Refuses recursion: a thread that locks twice waits for itself.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// A robust, process-shared pthread mutex: glibc waits for it in `futex`, and its holder's unlock wakes.
#[repr(C)]
pub(crate) struct RobustLock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a process-shared mutex is made for concurrent use; the cell is only touched through pthread calls.
unsafe impl Sync for RobustLock {}

impl RobustLock {
    /// # Safety
    /// `this` points at writable memory that no thread uses as a lock yet.
    pub(crate) unsafe fn init(this: *const Self) {
        let mut attributes = MaybeUninit::uninit();
        // SAFETY: `attributes` is initialised by the first call; `this` is the caller's promise.
        let code = unsafe {
            libc::pthread_mutexattr_init(attributes.as_mut_ptr());
            libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init((*this).0.get(), attributes.as_ptr())
        };
        assert_eq!(code, 0, "pthread_mutex_init failed with {code}");
    }

    pub(crate) fn lock(&self) -> Guard<'_> {
        // SAFETY: initialised by `init` before the node was published.
        let code = unsafe { libc::pthread_mutex_lock(self.0.get()) };
        let orphaned = code == libc::EOWNERDEAD;
        if orphaned {
            // SAFETY: this thread holds the mutex, which EOWNERDEAD says needs this mark.
            unsafe { libc::pthread_mutex_consistent(self.0.get()) };
        }
        assert!(code == 0 || orphaned, "pthread_mutex_lock failed with {code}");
        Guard { lock: self, orphaned }
    }
}

#[must_use]
pub struct Guard<'a> {
    lock: &'a RobustLock,
    /// The last holder died inside: what the lock protects may be half done.
    pub(crate) orphaned: bool,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // SAFETY: this guard is the proof that this thread holds it.
        unsafe { libc::pthread_mutex_unlock(self.lock.0.get()) };
    }
}
