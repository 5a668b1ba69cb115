//! Owns who may hold what a stalled thread waits for.
//! Refuses to choose: where two may, and where it is not a lock between processes, nobody is named.

use std::collections::BTreeSet;

use crate::{
    ProcessId, WaitClass,
    sample::{KernelSample, StackId, StallRow},
};

/// The only other process in the driver that can have the lock: one at work, or one that itself waits for something
/// else with it. A thread of the victim's own process may have it as well.
pub fn holder(
    stall: &StallRow,
    kernel: &KernelSample,
    class_of: impl Fn(Option<StackId>) -> WaitClass,
) -> Option<ProcessId> {
    let class = class_of(stall.stack);
    if !matches!(class, WaitClass::RmApiLock | WaitClass::GpuLock) {
        return None;
    }
    let elsewhere = kernel.stalls.iter().filter(|other| class_of(other.stack) != class);
    let able: BTreeSet<ProcessId> =
        elsewhere.map(|other| other.process).chain(kernel.at_work.iter().copied()).collect();
    let mut able = able.into_iter();
    able.next().filter(|only| able.next().is_none() && *only != stall.process)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASSES: [WaitClass; 3] = [WaitClass::RmApiLock, WaitClass::Reclaim, WaitClass::UserspaceLock];

    fn stalled(process: u64, class: usize) -> StallRow {
        StallRow {
            process: ProcessId(process),
            stack: StackId::new(i32::try_from(class).unwrap()),
            blocked_ns: 0,
        }
    }

    /// Whom the first of `stalls` is held up by.
    fn held_by(stalls: Vec<StallRow>, at_work: &[u64]) -> Option<u64> {
        let at_work = at_work.iter().map(|id| ProcessId(*id)).collect();
        let kernel = KernelSample { stalls, at_work, ..KernelSample::default() };
        let class_of = |stack: Option<StackId>| CLASSES[usize::try_from(stack.unwrap().0).unwrap()];
        holder(&kernel.stalls[0], &kernel, class_of).map(|process| process.0)
    }

    #[test]
    fn c108_the_only_other_one_in_the_driver_is_named() {
        assert_eq!(held_by(vec![stalled(1, 0), stalled(2, 0)], &[3]), Some(3));
        assert_eq!(held_by(vec![stalled(1, 0)], &[2, 3]), None);
        assert_eq!(held_by(vec![stalled(1, 0)], &[]), None);
    }

    #[test]
    fn c108_a_holder_that_waits_for_the_device_is_not_passed_over_for_a_bystander() {
        assert_eq!(held_by(vec![stalled(1, 0), stalled(2, 1)], &[]), Some(2));
        assert_eq!(held_by(vec![stalled(1, 0), stalled(2, 1)], &[3]), None);
    }

    #[test]
    fn c109_what_is_no_lock_between_processes_has_no_other_process_behind_it() {
        assert_eq!(held_by(vec![stalled(1, 2)], &[3]), None);
        assert_eq!(held_by(vec![stalled(1, 1)], &[3]), None);
    }

    #[test]
    fn a_thread_of_the_victim_may_have_it_as_well() {
        assert_eq!(held_by(vec![stalled(1, 0)], &[1, 3]), None);
        assert_eq!(held_by(vec![stalled(1, 0)], &[1]), None);
    }
}
