//! Owns the fold of the driver's record of waits: who made whom wait for what, and what calls took.
//! Refuses the agent's figures: whoever has both compares them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use anyhow::{Context, Result};
use cotenant_model::Operation;
use cotenant_sim_state::truth::{self, Call, Class, Wait};

/// The agent's settings on a simulated node: which kernel function a class of wait blocks in.
pub const SYMBOLS: &str = "[waits]\nsymbols = { \"locks_lock_inode_wait\" = \"rm_api_lock\", \"fcntl_setlk\" = \
                           \"gpu_lock\", \"hrtimer_nanosleep\" = \"reclaim\", \"do_sigtimedwait\" = \
                           \"uvm_eviction\", \"do_sys_poll\" = \"device\" }\n";

/// Who held what was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    Process(u32),
    /// A timer, as an interrupt of the device's would.
    Device,
}

/// The calls of one process and operation, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub count: u64,
    pub duration: u64,
    /// Of the duration: on a processor, spinning included.
    pub ran: u64,
    /// Of the duration: blocked, and spinning for a lock that another held.
    pub blocked: u64,
    pub spun: u64,
}

impl Calls {
    /// What such calls took on a processor beyond what they take alone. `None`: there is nothing to compare with.
    pub fn excess(&self, alone: &Self) -> Option<f64> {
        let each = (alone.count > 0).then(|| alone.ran as f64 / alone.count as f64)?;
        Some(self.ran as f64 - self.count as f64 * each)
    }
}

/// What really happened on a node, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct WaitTruth {
    pub blame: BTreeMap<(u32, Holder, Class), u64>,
    /// By victim and class, whoever it was.
    pub waited: BTreeMap<(u32, Class), u64>,
    pub calls: BTreeMap<(u32, Operation), Calls>,
}

impl WaitTruth {
    pub fn read(node: &Path) -> Result<Self> {
        let failed = || format!("cannot read the truth of {}", node.display());
        Ok(Self::of(&truth::waits(node).with_context(failed)?, &truth::calls(node).with_context(failed)?))
    }

    fn of(waits: &[Wait], calls: &[Call]) -> Self {
        let mut all = Self::default();
        for call in calls {
            let of = all.calls.entry((call.pid, call.operation)).or_default();
            of.count += 1;
            of.duration += call.end.saturating_sub(call.start);
            of.ran += call.ran;
        }
        for wait in waits {
            for turn in &wait.turns {
                let holder = if wait.class.is_device() { Holder::Device } else { Holder::Process(turn.pid) };
                *all.blame.entry((wait.pid, holder, wait.class)).or_default() += turn.to - turn.from;
            }
            if wait.blocked_ns() > 0 {
                *all.waited.entry((wait.pid, wait.class)).or_default() += wait.blocked_ns();
            }
            if let Some(operation) = wait.operation {
                let of = all.calls.entry((wait.pid, operation)).or_default();
                of.blocked += wait.blocked_ns();
                of.spun += wait.spun;
            }
        }
        all
    }

    /// Seconds by victim, culprit and class, as the agent's labels have them. A process without a tenant is `unlisted`.
    pub fn by_tenant(&self, tenants: &BTreeMap<u32, String>) -> BTreeMap<(String, String, Class), f64> {
        let mut all = BTreeMap::new();
        for ((victim, holder, class), ns) in &self.blame {
            let Some(victim) = tenants.get(victim) else { continue };
            let culprit = match holder {
                Holder::Device => "device",
                Holder::Process(pid) => tenants.get(pid).map_or("unlisted", String::as_str),
            };
            *all.entry((victim.clone(), culprit.to_owned(), *class)).or_default() += *ns as f64 / 1e9;
        }
        all
    }

    /// What happened since `earlier`, which was read from the same node.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let less = |now: u64, before: Option<&u64>| now - before.copied().unwrap_or(0);
        let calls = |key: &(u32, Operation), now: &Calls| {
            let before = earlier.calls.get(key).copied().unwrap_or_default();
            Calls {
                count: now.count - before.count,
                duration: now.duration - before.duration,
                ran: now.ran - before.ran,
                blocked: now.blocked - before.blocked,
                spun: now.spun - before.spun,
            }
        };
        Self {
            blame: self.blame.iter().map(|(key, ns)| (*key, less(*ns, earlier.blame.get(key)))).collect(),
            waited: self.waited.iter().map(|(key, ns)| (*key, less(*ns, earlier.waited.get(key)))).collect(),
            calls: self.calls.iter().map(|(key, now)| (*key, calls(key, now))).collect(),
        }
    }

    /// Every process that waited or called.
    pub fn processes(&self) -> BTreeSet<u32> {
        self.waited.keys().map(|(pid, _)| *pid).chain(self.calls.keys().map(|(pid, _)| *pid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_sim_state::Turn;

    fn wait(class: Class, turns: &[(u32, u64, u64)]) -> Wait {
        let turns: Vec<_> = turns
            .iter()
            .map(|(pid, from, to)| Turn { pid: *pid, thread: *pid, from: *from, to: *to })
            .collect();
        Wait {
            pid: 1,
            thread: 1,
            start: 5,
            operation: Some(Operation::MemAlloc),
            class,
            gpu: None,
            wanted: 90,
            spun: 10,
            blocked: 100,
            acquired: 500,
            turns,
        }
    }

    #[test]
    fn a_wait_is_its_turns_and_spinning_is_beside_it() {
        let waits = [
            wait(Class::RmApiLock, &[(2, 100, 200), (3, 200, 250), (9, 250, 300)]),
            wait(Class::Reclaim, &[(0, 100, 400)]),
        ];
        let call = Call {
            pid: 1,
            thread: 1,
            operation: Operation::MemAlloc,
            start: 0,
            end: 1_000,
            ran: 400,
            bytes: 0,
            code: 0,
        };
        let truth = WaitTruth::of(&waits, &[call]);
        assert_eq!(truth.waited, BTreeMap::from([((1, Class::RmApiLock), 200), ((1, Class::Reclaim), 300)]));
        let expected = Calls { count: 1, duration: 1_000, ran: 400, blocked: 500, spun: 20 };
        assert_eq!(truth.calls[&(1, Operation::MemAlloc)], expected);
        let alone = Calls { count: 10, ran: 3_000, ..Calls::default() };
        assert_eq!(expected.excess(&alone), Some(100.0));
        assert_eq!(expected.excess(&Calls::default()), None);
        let tenants = [(1, "a"), (2, "b"), (3, "b")].map(|(pid, name)| (pid, name.to_owned()));
        let by_tenant = truth.by_tenant(&tenants.into());
        let of = |culprit: &str, class| by_tenant.get(&("a".to_owned(), culprit.to_owned(), class)).copied();
        assert_eq!(of("b", Class::RmApiLock), Some(150e-9));
        assert_eq!(of("unlisted", Class::RmApiLock), Some(50e-9));
        assert_eq!(of("device", Class::Reclaim), Some(300e-9));
        let rest = truth.since(&truth);
        assert!(rest.blame.values().chain(rest.waited.values()).all(|ns| *ns == 0));
    }
}
