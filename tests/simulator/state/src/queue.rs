//! Owns the driver's kernel locks: file locks of the kernel's, so that each blocks in a function of its own.
//! Refuses queue-jumping: while the lock is on its way to a thread that was woken for it, newcomers hold back.
//!
//! The RM API lock is `flock` (`locks_lock_inode_wait`), a GPU's lock is `F_OFD_SETLKW` (`fcntl_setlk`). Both belong to
//! an open file of one thread, and the kernel releases them when their holder dies. Who waits in the kernel is woken in
//! the order of coming, one at each release.

use std::{
    cell::RefCell,
    collections::HashMap,
    fs::{File, OpenOptions},
    io,
    marker::PhantomData,
    os::fd::{AsRawFd, RawFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    Nap,
    holds::{Log, Turn, halves, turns},
    monotonic_ns,
    number::{own_pid, own_thread, proc_file},
};

const WAITERS: usize = 64;
/// A woken waiter is on its way for microseconds. One that takes longer than this may have died on it.
const COURTESY: u64 = 2_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockName {
    /// One for all GPUs of the node.
    Api,
    Gpu(usize),
}

impl LockName {
    pub(crate) fn path(self, node: &Path) -> PathBuf {
        match self {
            Self::Api => node.join("rm-api.lock"),
            Self::Gpu(gpu) => node.join(format!("gpu-{gpu}.lock")),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Shared,
    Exclusive,
}

/// What processes share of one lock. Valid when zeroed.
#[repr(C)]
pub(crate) struct Queue {
    /// 1 while somebody holds it alone.
    taken: AtomicU64,
    /// Who is blocked in the kernel.
    waiters: [AtomicU64; WAITERS],
    log: Log,
}

/// How a lock was come by that was not free.
#[derive(Clone, Debug)]
pub struct Waited {
    pub wanted: u64,
    /// Nanoseconds of spinning.
    pub spun: u64,
    /// When it fell asleep. Equal to `acquired`: it never blocked.
    pub blocked: u64,
    pub acquired: u64,
    pub turns: Vec<Turn>,
}

/// Holds a lock until dropped, in the thread that took it.
pub struct Held<'a> {
    queue: &'a Queue,
    name: LockName,
    file: RawFd,
    mode: Mode,
    number: u64,
    here: PhantomData<*const ()>,
}

/// By node, process (a fork's child has files of its own) and lock.
type Files = HashMap<(u64, u32, LockName), File>;

thread_local! {
    /// This thread's own open files.
    static FILES: RefCell<Files> = RefCell::default();
}

impl Queue {
    /// Blocks until it holds the lock, after `budget` ns of spinning at most.
    pub(crate) fn hold(
        &self,
        directory: &Path,
        node: u64,
        name: LockName,
        mode: Mode,
        budget: u64,
    ) -> io::Result<(Held<'_>, Option<Waited>)> {
        let pid = own_pid();
        let file = file(directory, node, pid, name)?;
        let me = u64::from(pid) << 32 | u64::from(own_thread());
        let wanted = monotonic_ns();
        let mut free = true;
        let blocked = loop {
            let coming = self.coming();
            if !coming && self.taken.load(Ordering::Acquire) == 0 && take(file, name, mode, false)? {
                break None;
            }
            free = false;
            let spun = monotonic_ns() - wanted;
            if coming {
                if spun > budget + COURTESY {
                    self.bury();
                    break Some(Nap::begin());
                }
                std::thread::yield_now();
            } else if spun >= budget {
                break Some(Nap::begin());
            } else {
                std::hint::spin_loop();
            }
        };
        let place = match &blocked {
            Some(_) => {
                let place = self.enrol(me);
                take(file, name, mode, true)?;
                place
            }
            None => None,
        };
        let exclusive = mode == Mode::Exclusive;
        if exclusive {
            self.taken.store(1, Ordering::Release);
        }
        // Not before: without either, a newcomer would think the lock free.
        if let Some(place) = place {
            self.waiters[place].store(0, Ordering::Release);
        }
        let acquired = monotonic_ns();
        let number = self.log.open(me, acquired, exclusive);
        let how = (!free).then(|| match blocked {
            None => {
                Waited { wanted, spun: acquired - wanted, blocked: acquired, acquired, turns: Vec::new() }
            }
            Some(nap) => {
                let mut holds = self.log.before(number, nap.begun());
                // Readers do not keep readers out.
                holds.retain(|hold| exclusive || hold.exclusive);
                let turns = turns(&holds, nap.begun(), acquired);
                let (blocked, turns) = asleep(turns, nap.begun(), nap.slept(), acquired);
                Waited { wanted, spun: nap.begun() - wanted, blocked, acquired, turns }
            }
        });
        Ok((Held { queue: self, name, file, mode, number, here: PhantomData }, how))
    }

    /// Whether somebody was woken for the lock and does not have it yet.
    fn coming(&self) -> bool {
        self.taken.load(Ordering::Acquire) == 0
            && self.waiters.iter().any(|waiter| waiter.load(Ordering::Acquire) != 0)
            && self.taken.load(Ordering::Acquire) == 0
    }

    /// `None`: too many wait for each to be known; those are only overtaken more easily.
    fn enrol(&self, me: u64) -> Option<usize> {
        self.waiters
            .iter()
            .position(|waiter| waiter.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Forgets waiters that died while they waited.
    fn bury(&self) {
        for waiter in &self.waiters {
            let who = waiter.load(Ordering::Acquire);
            let (pid, thread) = halves(who);
            if who != 0 && !proc_file(&format!("{pid}/task/{thread}")).exists() {
                let _ = waiter.compare_exchange(who, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

/// A holder that lost its processor between writing that it releases the lock and doing so.
const DELAYED_RELEASE: u64 = 100_000;

/// Brings a wait to the length that the thread slept: it fell asleep some time after `begun`, for `slept`.
pub fn asleep(mut turns: Vec<Turn>, begun: u64, slept: u64, acquired: u64) -> (u64, Vec<Turn>) {
    let Some(last) = turns.last_mut() else { return (begun, turns) };
    if begun + slept > last.to + DELAYED_RELEASE {
        last.to = (begun + slept).min(acquired);
    }
    let blocked = begun.max(last.to.saturating_sub(slept));
    turns.retain_mut(|turn| {
        turn.from = turn.from.max(blocked);
        turn.to > turn.from
    });
    (blocked, turns)
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.queue.log.close(self.number, monotonic_ns());
        if self.mode == Mode::Exclusive {
            self.queue.taken.store(0, Ordering::Release);
        }
        // A file of this thread that cannot be unlocked is closed with it.
        let _ = match self.name {
            // SAFETY: a descriptor that this thread keeps open.
            LockName::Api => unsafe { libc::flock(self.file, libc::LOCK_UN) },
            LockName::Gpu(_) => range(self.file, libc::F_OFD_SETLK, libc::F_UNLCK),
        };
    }
}

fn file(directory: &Path, node: u64, pid: u32, name: LockName) -> io::Result<RawFd> {
    FILES.with_borrow_mut(|files| {
        if let Some(file) = files.get(&(node, pid, name)) {
            return Ok(file.as_raw_fd());
        }
        let file = OpenOptions::new().read(true).write(true).open(name.path(directory))?;
        let descriptor = file.as_raw_fd();
        files.insert((node, pid, name), file);
        Ok(descriptor)
    })
}

/// False: somebody has it, and waiting was not wanted.
fn take(file: RawFd, name: LockName, mode: Mode, wait: bool) -> io::Result<bool> {
    loop {
        let code = match name {
            LockName::Api => {
                let operation = if mode == Mode::Exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
                // SAFETY: a descriptor that this thread keeps open.
                unsafe { libc::flock(file, operation | if wait { 0 } else { libc::LOCK_NB }) }
            }
            LockName::Gpu(_) => {
                let command = if wait { libc::F_OFD_SETLKW } else { libc::F_OFD_SETLK };
                range(file, command, if mode == Mode::Exclusive { libc::F_WRLCK } else { libc::F_RDLCK })
            }
        };
        if code == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied if !wait => return Ok(false),
            _ => return Err(error),
        }
    }
}

/// The whole file, as the open file's own.
fn range(file: RawFd, command: i32, kind: i32) -> i32 {
    // SAFETY: all zero is a valid `flock`; the kernel wants `l_pid` 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).unwrap_or(0);
    lock.l_whence = i16::try_from(libc::SEEK_SET).unwrap_or(0);
    // SAFETY: a descriptor that this thread keeps open, and a lock that outlives the call.
    unsafe { libc::fcntl(file, command, &raw const lock) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_begins_when_the_thread_slept_and_ends_when_it_was_woken() {
        let turn = |pid, from, to| Turn { pid, thread: pid, from, to };
        let told = || vec![turn(1, 1_000, 5_000), turn(2, 5_000, 9_000)];
        // On its way into sleep until 6,000: the first holder had nothing to do with it.
        assert_eq!(asleep(told(), 1_000, 3_000, 20_000), (6_000, vec![turn(2, 6_000, 9_000)]));
        // A little more than told is the wake-up's own time.
        assert_eq!(asleep(told(), 1_000, 8_900, 20_000), (1_000, told()));
        // Much more: the last one let go later than it wrote.
        let late = vec![turn(1, 1_000, 5_000), turn(2, 5_000, 201_000)];
        assert_eq!(asleep(told(), 1_000, 200_000, 900_000), (1_000, late));
    }
}
