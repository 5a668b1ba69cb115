//! Owns whose waits were whose doing, by tenants, since the agent started.
//! Refuses addresses and process ids in what it gives: stacks come with their class, processes with their tenant.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    Culprit, ProcessId, Tenant, TenantKind, WaitClass,
    sample::{KernelSample, StackId, Waker},
    wait::class_of,
};

/// Pairs that are kept apart; past them the culprit is `other`.
const MAX_PAIRS: usize = 4096;

/// Waits of one victim on one culprit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Waits that the culprit ended.
    pub waits: u64,
    /// Its part of the victim's blocked time.
    pub time_ns: u64,
}

impl Share {
    pub fn add(&mut self, more: Self) {
        self.waits += more.waits;
        self.time_ns += more.time_ns;
    }
}

pub type Edge = (Tenant, Culprit, WaitClass);
type Row = (ProcessId, Waker, Option<StackId>);

#[derive(Debug, Default)]
pub struct Blame {
    /// What each row of the kernel side held when it was last read.
    rows: BTreeMap<Row, Share>,
    /// Tenants of culprits, also of those that are gone, as long as a row names them.
    culprits: BTreeMap<ProcessId, Tenant>,
    edges: BTreeMap<Edge, Share>,
    seen: BTreeMap<Tenant, Duration>,
    /// Shares that went to `other` because there were too many pairs.
    pub folded: u64,
}

impl Blame {
    /// Adds what has happened since the last sample, and gives just that.
    pub fn advance(
        &mut self,
        kernel: &KernelSample,
        tenants: &BTreeMap<ProcessId, Tenant>,
        classes: &BTreeMap<StackId, WaitClass>,
        now: Duration,
        retention: Duration,
    ) -> BTreeMap<Edge, Share> {
        for tenant in tenants.values() {
            if self.seen.get(tenant) != Some(&now) {
                self.seen.insert(tenant.clone(), now);
            }
        }
        let mut rows = BTreeMap::new();
        let mut named = BTreeSet::new();
        let mut news: BTreeMap<Edge, Share> = BTreeMap::new();
        for process in &kernel.processes {
            let Some(victim) = tenants.get(&process.id) else { continue };
            for row in &process.blame {
                if let Waker::Process(id) = row.waker {
                    named.insert(id);
                    if let Some(tenant) = tenants.get(&id) {
                        // Names get better: a pod's own threads must not stay its neighbours.
                        self.culprits.insert(id, tenant.clone());
                    }
                }
                let key = (process.id, row.waker, row.stack);
                let total = Share { waits: row.waits, time_ns: row.time_ns };
                let before = self.rows.get(&key).copied().unwrap_or_default();
                rows.insert(key, total);
                let fresh = Share {
                    waits: total.waits.saturating_sub(before.waits),
                    time_ns: total.time_ns.saturating_sub(before.time_ns),
                };
                if fresh == Share::default() {
                    continue;
                }
                let culprit = match row.waker {
                    Waker::Process(id) => self
                        .culprits
                        .get(&id)
                        .map_or(Culprit::Unknown, |tenant| Culprit::Tenant(tenant.clone())),
                    Waker::Device => Culprit::Device,
                    Waker::Kernel => Culprit::Kernel,
                    Waker::Unseen => Culprit::Unknown,
                };
                let class = class_of(classes, row.stack);
                news.entry((victim.clone(), culprit, class)).or_default().add(fresh);
            }
        }
        self.rows = rows;
        self.culprits.retain(|id, _| named.contains(id));
        for (edge, share) in &news {
            let known = self.edges.contains_key(edge);
            if known || self.edges.len() < MAX_PAIRS {
                self.edges.entry(edge.clone()).or_default().add(*share);
            } else {
                self.folded += 1;
                let (victim, _, class) = edge.clone();
                self.edges.entry((victim, Culprit::Tenant(Tenant::other()), class)).or_default().add(*share);
            }
        }
        self.seen.retain(|_, seen| now.saturating_sub(*seen) <= retention);
        let seen = &self.seen;
        let there = |tenant: &Tenant| tenant.kind == TenantKind::Other || seen.contains_key(tenant);
        self.edges.retain(|(victim, culprit, _), _| {
            there(victim) && !matches!(culprit, Culprit::Tenant(culprit) if !there(culprit))
        });
        news
    }

    pub fn edges(&self) -> &BTreeMap<Edge, Share> {
        &self.edges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{BlameRow, tests::process};

    const FOREVER: Duration = Duration::from_hours(1);

    fn tenant(name: &str) -> Tenant {
        Tenant::plain(TenantKind::Docker, name)
    }

    fn sample(rows: &[(u64, Waker, u64)]) -> KernelSample {
        let mut victim = process(1);
        for (waits, waker, time_ns) in rows {
            victim.blame.push(BlameRow {
                waker: *waker,
                stack: Some(StackId(4)),
                waits: *waits,
                time_ns: *time_ns,
            });
        }
        KernelSample { processes: vec![victim], ..KernelSample::default() }
    }

    fn names() -> BTreeMap<ProcessId, Tenant> {
        BTreeMap::from([(ProcessId(1), tenant("victim")), (ProcessId(2), tenant("neighbour"))])
    }

    fn classes() -> BTreeMap<StackId, WaitClass> {
        BTreeMap::from([(StackId(4), WaitClass::RmApiLock)])
    }

    #[test]
    fn c108_the_waker_is_named_beside_the_victim() {
        let mut blame = Blame::default();
        let rows = sample(&[(3, Waker::Process(ProcessId(2)), 900), (1, Waker::Device, 100)]);
        blame.advance(&rows, &names(), &classes(), Duration::ZERO, FOREVER);
        let to = |culprit| (tenant("victim"), culprit, WaitClass::RmApiLock);
        let of_neighbour = &blame.edges()[&to(Culprit::Tenant(tenant("neighbour")))];
        assert_eq!(*of_neighbour, Share { waits: 3, time_ns: 900 });
        assert_eq!(blame.edges()[&to(Culprit::Device)], Share { waits: 1, time_ns: 100 });
    }

    #[test]
    fn a_culprit_that_dies_keeps_its_name_for_what_it_did() {
        let mut blame = Blame::default();
        let waker = Waker::Process(ProcessId(2));
        blame.advance(&sample(&[(1, waker, 100)]), &names(), &classes(), Duration::ZERO, FOREVER);
        let survivors = BTreeMap::from([(ProcessId(1), tenant("victim"))]);
        let news =
            blame.advance(&sample(&[(2, waker, 150)]), &survivors, &classes(), Duration::ZERO, FOREVER);
        let edge = (tenant("victim"), Culprit::Tenant(tenant("neighbour")), WaitClass::RmApiLock);
        assert_eq!(news, BTreeMap::from([(edge.clone(), Share { waits: 1, time_ns: 50 })]));
        assert_eq!(blame.edges()[&edge], Share { waits: 2, time_ns: 150 });
    }

    #[test]
    fn an_unclassified_stack_and_an_unseen_waker_are_said_to_be_so() {
        let mut blame = Blame::default();
        blame.advance(&sample(&[(1, Waker::Unseen, 7)]), &names(), &BTreeMap::new(), Duration::ZERO, FOREVER);
        let edge = (tenant("victim"), Culprit::Unknown, WaitClass::Other);
        assert_eq!(blame.edges()[&edge].time_ns, 7);
    }

    #[test]
    fn the_edges_of_a_victim_that_is_gone_end_after_the_retention() {
        let mut blame = Blame::default();
        let rows = sample(&[(1, Waker::Kernel, 7)]);
        blame.advance(&rows, &names(), &classes(), Duration::ZERO, Duration::from_mins(1));
        let (none, nobody) = (KernelSample::default(), BTreeMap::new());
        blame.advance(&none, &nobody, &classes(), Duration::from_secs(30), Duration::from_mins(1));
        assert_eq!(blame.edges().len(), 1);
        blame.advance(&none, &nobody, &classes(), Duration::from_secs(61), Duration::from_mins(1));
        assert!(blame.edges().is_empty());
    }
}
