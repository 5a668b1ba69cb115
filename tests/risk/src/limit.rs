//! Owns tenants under a limit of their memory cgroup: what they hold, and when the kernel kills them there.
//! Refuses the page cache and swap: what is held here cannot be taken back.

use std::time::Duration;

use cotenant_model::risk::{HostMemory, HostMoment, Kills, Moment, Place, TenantMemory};
use cotenant_model::{Tenant, TenantKind};

use crate::chance::Chance;
use crate::scenario::{DAY, trainer};
use crate::tenant::{Actor, Behaviour, GIB, MIB};
use crate::world::bytes;

/// What the host has: the limits are far below it.
const HOST: u64 = 1 << 40;

/// What is under the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounded {
    Leak,
    SlowLeak,
    /// A cache that follows a load, which grows.
    Cache,
    /// Records of a data set that get longer.
    Lengthening,
    StaircaseLeak,
    /// Data that fits, or does not.
    Batches,
    LeakThatStops,
    LeakThatFlushes,
    AtTheEdge,
    SwingsThatFit,
    CacheThatFits,
}

pub const BOUNDED: [Bounded; 11] = [
    Bounded::Leak,
    Bounded::SlowLeak,
    Bounded::Cache,
    Bounded::Lengthening,
    Bounded::StaircaseLeak,
    Bounded::Batches,
    Bounded::LeakThatStops,
    Bounded::LeakThatFlushes,
    Bounded::AtTheEdge,
    Bounded::SwingsThatFit,
    Bounded::CacheThatFits,
];

impl Bounded {
    /// Nothing is to be killed here, and nothing to be warned of.
    pub fn is_steady(self) -> bool {
        matches!(self, Self::LeakThatFlushes | Self::AtTheEdge | Self::SwingsThatFit | Self::CacheThatFits)
    }

    /// Its moments, one a second.
    pub fn moments(self, seed: u64) -> impl Iterator<Item = Moment> {
        let mut chance = Chance::new(seed.wrapping_mul(64).wrapping_add(32 + self as u64));
        let limit = chance.spread(4.0, 256.0) * GIB;
        let (minutes, behaviour) = self.behaviour(&mut chance, limit);
        let mut actor = Actor::new(behaviour, Chance::new(chance.bits()));
        let mut kills = 0;
        (0..60 * minutes).map(move |second| {
            let now = second as f64;
            let mut held = None;
            if !actor.down(now) {
                let (levels, _) = actor.wants(now);
                held = levels.last().copied();
                if levels.iter().any(|level| *level > limit) {
                    actor.killed(now);
                    kills += 1;
                    held = None;
                }
            }
            moment(second, limit, held, kills)
        })
    }

    fn behaviour(self, chance: &mut Chance, limit: f64) -> (u64, Behaviour) {
        let base = chance.between(0.2, 0.6) * limit;
        let room = limit - base;
        let from = chance.between(300.0, 1500.0);
        let leak = |lasts: f64, ask: f64, until: f64, flush: Option<f64>| Behaviour::Leak {
            base,
            rate: room / lasts,
            ask,
            from: if flush.is_some() { 0.0 } else { from },
            until,
            flush,
        };
        match self {
            // Memory comes in pages: steps are what a program reads at a time.
            Self::Leak => {
                (50, leak(chance.spread(75.0, 900.0), chance.spread(1.0, 64.0) * MIB, f64::INFINITY, None))
            }
            Self::SlowLeak => (
                120,
                leak(chance.spread(1200.0, 5400.0), chance.spread(1.0, 64.0) * MIB, f64::INFINITY, None),
            ),
            Self::Cache => {
                let drift = room / chance.spread(90.0, 900.0);
                let swing = chance.between(0.01, 0.1) * limit;
                let period = chance.spread(60.0, 900.0);
                (45, Behaviour::Cache { base, swing, period, drift, from, block: 16.0 * MIB })
            }
            Self::Lengthening => {
                let growth = room / chance.between(6.0, 20.0);
                let (period, record) = (chance.spread(2.0, 30.0), chance.spread(30.0, 240.0));
                (90, Behaviour::Lengthen { base, step: 0.1 * base, period, record, growth })
            }
            Self::StaircaseLeak => {
                let steps = chance.between(8.0, 40.0);
                (90, leak(steps * chance.between(15.0, 60.0), room / steps, f64::INFINITY, None))
            }
            Self::Batches => {
                let size = (0.4 * limit, 1.2 * limit);
                (120, Behaviour::Batch { size, load: (5.0, 60.0), work: (120.0, 600.0), idle: 400.0 })
            }
            Self::LeakThatStops => {
                let lasts = chance.spread(60.0, 900.0);
                let part = chance.between(0.3, 0.8);
                (60, leak(lasts / part, 16.0 * MIB, from + lasts, None))
            }
            Self::LeakThatFlushes => {
                let flush = chance.spread(40.0, 600.0).floor();
                (DAY, leak(2.0 * flush, 16.0 * MIB, f64::INFINITY, Some(flush)))
            }
            Self::AtTheEdge => {
                let bytes = chance.between(0.9, 0.97) * limit;
                (DAY, Behaviour::Steady { bytes, jitter: chance.between(0.001, 0.02) * limit })
            }
            Self::SwingsThatFit => {
                let ceiling = chance.between(0.85, 0.97) * limit;
                (DAY, trainer(chance, ceiling))
            }
            Self::CacheThatFits => {
                let period = chance.spread(120.0, 3600.0);
                let swing = 0.75 * room;
                (DAY, Behaviour::Cache { base, swing, period, drift: 0.0, from: 0.0, block: 16.0 * MIB })
            }
        }
    }
}

fn moment(second: u64, limit: f64, held: Option<f64>, kills: u64) -> Moment {
    let at = Duration::from_secs(second);
    let tenant = Tenant::plain(TenantKind::Docker, "bounded");
    let place = |held: f64| Place {
        path: "/docker/bounded".to_owned(),
        limit: Some(bytes(limit)),
        held: bytes(held),
    };
    let available = HOST - held.map_or(0, bytes);
    let host = HostMoment {
        taken: at,
        memory: Some(HostMemory { total: HOST, available }),
        tenants: held
            .map(|held| TenantMemory { tenant: tenant.clone(), pinned: 0, places: vec![place(held)] })
            .into_iter()
            .collect(),
        kills: Kills { by_tenant: [(tenant, kills)].into(), of_host: 0 },
    };
    Moment { at, gpus: Vec::new(), tenants: Vec::new(), host: Some(host) }
}
