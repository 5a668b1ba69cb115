//! Owns the lock around the node's table: processes share it, and it survives the death of its holder.
//! Refuses to be waited for long: nobody sleeps with it.

use std::{cell::UnsafeCell, mem::MaybeUninit};

/// Lives in shared memory; made once by the node's creator.
#[repr(transparent)]
pub(crate) struct Lock(UnsafeCell<libc::pthread_mutex_t>);

// SAFETY: a process-shared pthread mutex is made for this.
unsafe impl Sync for Lock {}
// SAFETY: as above; it never moves once in the shared mapping.
unsafe impl Send for Lock {}

/// Holds the lock until dropped.
pub(crate) struct Locked<'a>(&'a Lock);

impl Lock {
    /// # Safety
    /// `self` is in zeroed shared memory that nobody else uses yet.
    pub(crate) unsafe fn make(&self) {
        let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        // SAFETY: the attributes are initialised by the first call, and the mutex memory is ours.
        unsafe {
            libc::pthread_mutexattr_init(attributes.as_mut_ptr());
            libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
            libc::pthread_mutex_init(self.0.get(), attributes.as_ptr());
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr());
        }
    }

    pub(crate) fn hold(&self) -> Locked<'_> {
        // SAFETY: an initialised mutex in a mapping that outlives `self`.
        unsafe {
            if libc::pthread_mutex_lock(self.0.get()) == libc::EOWNERDEAD {
                // The holder died. What it was doing is judged by the sweep of dead processes.
                libc::pthread_mutex_consistent(self.0.get());
            }
        }
        Locked(self)
    }

    /// As `hold`, without blocking in the kernel.
    pub(crate) fn hold_awake(&self) -> Locked<'_> {
        loop {
            // SAFETY: as in `hold`.
            match unsafe { libc::pthread_mutex_trylock(self.0.get()) } {
                libc::EBUSY => std::thread::yield_now(),
                libc::EOWNERDEAD => {
                    // SAFETY: as in `hold`.
                    unsafe { libc::pthread_mutex_consistent(self.0.get()) };
                    return Locked(self);
                }
                _ => return Locked(self),
            }
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: held by this thread since `hold`.
        unsafe { libc::pthread_mutex_unlock(self.0.0.get()) };
    }
}
