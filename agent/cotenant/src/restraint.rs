//! Owns how often NVML may be asked, given what its tenants pay for it: a thousandth of what they wait for altogether.
//! Refuses to guess the price: it is the blame that falls on the agent itself.
//!
//! NVML's process queries take the driver's locks. On an H200 a poll cost each process that allocated all the time 2.5 to 8 ms of
//! waiting.

use std::{collections::BTreeMap, time::Duration};

use cotenant_model::{
    Culprit, Tenant,
    blame::{Edge, Share},
};

/// Of all that tenants wait for one another.
const SHARE: f64 = 0.001;
/// Less than this in all is nothing to anybody.
const NOTHING: f64 = 0.001;
/// What is this old counts for a third.
const MEMORY: Duration = Duration::from_mins(5);
/// Between two changes: a poll or two must show what the last one did.
const PAUSE: Duration = Duration::from_secs(15);
/// Polls of memory then come 32 intervals apart; see `Device::hold_back`.
const MOST: u32 = 128;
/// Of the first step: what waits for the agent at all waits for several calls of each poll.
const FIRST: u32 = 8;

#[derive(Debug)]
pub(crate) struct Restraint {
    own: f64,
    all: f64,
    times: u32,
    weighed: Duration,
    changed: Duration,
}

impl Default for Restraint {
    fn default() -> Self {
        Self { own: 0.0, all: 0.0, times: 1, weighed: Duration::ZERO, changed: Duration::ZERO }
    }
}

impl Restraint {
    /// How many times as seldom as declared NVML should be asked, after another tick's blame.
    pub(crate) fn weigh(&mut self, agent: &Tenant, blame: &BTreeMap<Edge, Share>, now: Duration) -> u32 {
        let kept = (-now.saturating_sub(self.weighed).as_secs_f64() / MEMORY.as_secs_f64()).exp();
        self.weighed = now;
        self.own *= kept;
        self.all *= kept;
        for ((victim, culprit, _), share) in blame {
            let Culprit::Tenant(culprit) = culprit else { continue };
            if culprit != victim {
                let seconds = Duration::from_nanos(share.time_ns).as_secs_f64();
                self.all += seconds;
                self.own += if culprit == agent { seconds } else { 0.0 };
            }
        }
        let dear = self.own > NOTHING && self.own > self.all * SHARE;
        let cheap = self.own < NOTHING / 4.0 || self.own < self.all * SHARE / 4.0;
        // Slower to ask more often again than to ask less: forgetting alone must not make it swing.
        let pause = if dear { PAUSE } else { PAUSE * 8 };
        if now.saturating_sub(self.changed) >= pause && (dear || cheap) {
            let next = if dear { (self.times * 2).max(FIRST) } else { self.times / 2 }.clamp(1, MOST);
            if next != self.times {
                self.changed = now;
            }
            self.times = next;
        }
        self.times
    }
}

#[cfg(test)]
mod tests {
    use cotenant_model::{TenantKind, WaitClass};

    use super::*;

    fn blame(on_agent_us: u64, on_neighbour_us: u64) -> BTreeMap<Edge, Share> {
        let tenant = |name| Tenant::plain(TenantKind::Docker, name);
        let edge = |culprit, us: u64| {
            let culprit = Culprit::Tenant(culprit);
            ((tenant("victim"), culprit, WaitClass::RmApiLock), Share { waits: 1, time_ns: us * 1000 })
        };
        BTreeMap::from([edge(agent(), on_agent_us), edge(tenant("neighbour"), on_neighbour_us)])
    }

    fn agent() -> Tenant {
        Tenant::agent()
    }

    fn after(seconds: u64, on_agent_us: u64, on_neighbour_us: u64) -> u32 {
        let mut restraint = Restraint::default();
        let blame = blame(on_agent_us, on_neighbour_us);
        let ticks = 1..=seconds;
        ticks.map(|at| restraint.weigh(&agent(), &blame, Duration::from_secs(at))).last().unwrap_or(1)
    }

    #[test]
    fn c47_polls_that_cost_more_than_a_thousandth_come_further_apart() {
        assert_eq!(after(600, 2_000, 100_000), MOST);
    }

    #[test]
    fn polls_that_cost_next_to_nothing_keep_their_interval() {
        assert_eq!(after(600, 20, 100_000), 1);
        assert_eq!(after(600, 0, 0), 1);
    }

    #[test]
    fn when_the_waiting_ends_they_come_back() {
        let mut restraint = Restraint::default();
        for at in 0..300 {
            restraint.weigh(&agent(), &blame(2_000, 100_000), Duration::from_secs(at));
        }
        let quiet = BTreeMap::new();
        let last = (300..6000).map(|at| restraint.weigh(&agent(), &quiet, Duration::from_secs(at))).last();
        assert_eq!(last, Some(1));
    }
}
