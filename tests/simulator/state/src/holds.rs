//! Owns the log of who held one lock of the driver: a ring in shared memory, and how a wait is split by it.
//! Refuses to decide who gets the lock: that is the kernel's, and this is written beside it.

use std::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 2048;
const HOLDS: u64 = SLOTS as u64;

#[repr(C)]
struct Slot {
    /// Of the hold, 1 and up; 0 while it is being written.
    number: AtomicU64,
    /// PID in the high half, thread in the low one.
    holder: AtomicU64,
    acquired: AtomicU64,
    /// 0: still held, or its holder died and nobody has noticed yet.
    released: AtomicU64,
    exclusive: AtomicU64,
}

/// Valid when zeroed.
#[repr(C)]
pub(crate) struct Log {
    last: AtomicU64,
    slots: [Slot; SLOTS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) holder: u64,
    pub(crate) acquired: u64,
    /// `u64::MAX`: still held.
    pub(crate) released: u64,
    pub(crate) exclusive: bool,
}

/// Part of a wait that was one holder's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub pid: u32,
    pub thread: u32,
    pub from: u64,
    pub to: u64,
}

impl Log {
    fn slot(&self, number: u64) -> &Slot {
        &self.slots[usize::try_from(number % HOLDS).unwrap_or(0)]
    }

    /// The caller holds the lock from `acquired` on. What is still open and cannot be beside it was the dead's.
    pub(crate) fn open(&self, holder: u64, acquired: u64, exclusive: bool) -> u64 {
        let number = self.last.fetch_add(1, Ordering::AcqRel) + 1;
        let slot = self.slot(number);
        slot.number.store(0, Ordering::Release);
        slot.holder.store(holder, Ordering::Relaxed);
        slot.acquired.store(acquired, Ordering::Relaxed);
        slot.released.store(0, Ordering::Relaxed);
        slot.exclusive.store(u64::from(exclusive), Ordering::Relaxed);
        slot.number.store(number, Ordering::Release);
        for earlier in (1..number).rev().take(64) {
            let slot = self.slot(earlier);
            if slot.number.load(Ordering::Acquire) != earlier {
                continue;
            }
            let alone = slot.exclusive.load(Ordering::Relaxed) == 1;
            if slot.released.load(Ordering::Acquire) != 0 {
                // Everything before it had ended when it began.
                if alone {
                    break;
                }
            } else if exclusive || alone {
                slot.released.store(acquired, Ordering::Release);
            }
        }
        number
    }

    pub(crate) fn close(&self, number: u64, released: u64) {
        self.slot(number).released.store(released, Ordering::Release);
    }

    /// What was held at `since` or later and before hold `number`, oldest first.
    pub(crate) fn before(&self, number: u64, since: u64) -> Vec<Hold> {
        let mut holds = Vec::new();
        let oldest = number.saturating_sub(HOLDS - 1).max(1);
        for earlier in (oldest..number).rev() {
            let slot = self.slot(earlier);
            if slot.number.load(Ordering::Acquire) != earlier {
                continue;
            }
            let released = slot.released.load(Ordering::Acquire);
            let hold = Hold {
                holder: slot.holder.load(Ordering::Relaxed),
                acquired: slot.acquired.load(Ordering::Relaxed),
                released: if released == 0 { u64::MAX } else { released },
                exclusive: slot.exclusive.load(Ordering::Relaxed) == 1,
            };
            if hold.released > since {
                holds.push(hold);
            }
            if hold.exclusive && hold.acquired <= since {
                break;
            }
        }
        holds.reverse();
        holds
    }
}

/// Splits the wait from `from` to `to`: each moment is the longest holder's. Between a release and the next one's
/// start the moment is the next one's, whose turn had come. After the last release nobody is waited for any more.
pub(crate) fn turns(holds: &[Hold], from: u64, to: u64) -> Vec<Turn> {
    let mut at = from;
    let mut turns = Vec::new();
    for hold in holds {
        let end = hold.released.min(to);
        if end > at {
            let (pid, thread) = halves(hold.holder);
            turns.push(Turn { pid, thread, from: at, to: end });
            at = end;
        }
    }
    turns
}

pub(crate) fn halves(holder: u64) -> (u32, u32) {
    (u32::try_from(holder >> 32).unwrap_or(0), u32::try_from(holder & u64::from(u32::MAX)).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(pid: u64, acquired: u64, released: u64) -> Hold {
        Hold { holder: pid << 32 | pid, acquired, released, exclusive: true }
    }

    fn split(holds: &[Hold], from: u64, to: u64) -> Vec<(u32, u64, u64)> {
        turns(holds, from, to).iter().map(|turn| (turn.pid, turn.from, turn.to)).collect()
    }

    #[test]
    fn a_wait_is_split_among_those_who_held_the_lock_in_turn() {
        let holds = [hold(1, 10, 100), hold(2, 105, 200), hold(3, 201, 260)];
        // The gap is the next one's; what follows the last release is nobody's.
        assert_eq!(split(&holds, 50, 300), [(1, 50, 100), (2, 100, 200), (3, 200, 260)]);
        assert_eq!(split(&holds, 102, 150), [(2, 102, 150)]);
        assert_eq!(split(&holds, 270, 300), []);
    }

    #[test]
    fn of_two_at_once_it_is_the_longer_holders() {
        let holds = [hold(1, 10, 100), hold(2, 20, 60), hold(3, 30, 140)];
        assert_eq!(split(&holds, 50, 150), [(1, 50, 100), (3, 100, 140)]);
    }

    #[test]
    fn a_dead_holders_hold_is_closed_by_the_next() {
        // SAFETY: valid when zeroed.
        let log: Box<Log> = unsafe { Box::new_zeroed().assume_init() };
        let dead = log.open(7 << 32, 10, true);
        let next = log.open(8 << 32, 50, true);
        log.close(next, 70);
        let shared = log.open(9 << 32, 80, false);
        // A reader beside a reader is alive.
        log.open(10 << 32, 85, false);
        let last = log.open(11 << 32, 90, false);
        let seen: Vec<_> =
            log.before(last, 40).iter().map(|hold| (hold.holder >> 32, hold.released)).collect();
        assert_eq!(seen, [(7, 50), (8, 70), (9, u64::MAX), (10, u64::MAX)]);
        assert_eq!((dead, shared), (1, 3));
        assert_eq!(turns(&log.before(next, 20), 20, 60), [Turn { pid: 7, thread: 0, from: 20, to: 50 }]);
    }

    #[test]
    fn the_ring_wraps_and_keeps_the_newest() {
        // SAFETY: valid when zeroed.
        let log: Box<Log> = unsafe { Box::new_zeroed().assume_init() };
        for number in 1..=3 * HOLDS {
            assert_eq!(log.open(number << 32, number * 10, true), number);
            log.close(number, number * 10 + 5);
        }
        let holds = log.before(3 * HOLDS, 0);
        assert_eq!(holds.len() as u64, HOLDS - 1);
        assert_eq!(log.before(3 * HOLDS, 3 * HOLDS * 10 - 26).len(), 3);
    }
}
