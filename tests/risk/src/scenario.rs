//! Owns the scenarios: which tenants share a GPU, and for how long.
//! Refuses a driver where there is none.

use std::ops::Range;

use cotenant_model::risk::Moment;
use cotenant_model::{Tenant, TenantKind};

use crate::chance::Chance;
use crate::tenant::{Behaviour, Extra, GIB, MIB};
use crate::world::{LIMIT, World};

/// In minutes, what is steady lasts: it is false warnings a day that count, and a start is no steady running.
pub(crate) const DAY: u64 = 24 * 60;

/// The seeds that the forecast was tuned on.
pub const TUNED_ON: Range<u64> = 0..32;
/// The seeds that nothing was chosen by: scored when a model is done, for the table.
pub const UNSEEN: Range<u64> = 1000..1016;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    LeakBesideTrainer,
    CacheOverload,
    ManyToTheWall,
    LengtheningSequences,
    StaircaseLeak,
    SlowLeak,
    /// It stops before the wall.
    LeakThatStops,
    /// It empties itself again and again.
    LeakThatFlushes,
    SteadyAt95,
    TrainersNearTheWall,
    BatchesThatFit,
    CacheThatFits,
    BatchTooLarge,
    NotebookBursts,
}

pub const SCENARIOS: [Scenario; 14] = [
    Scenario::LeakBesideTrainer,
    Scenario::CacheOverload,
    Scenario::ManyToTheWall,
    Scenario::LengtheningSequences,
    Scenario::StaircaseLeak,
    Scenario::SlowLeak,
    Scenario::LeakThatStops,
    Scenario::LeakThatFlushes,
    Scenario::SteadyAt95,
    Scenario::TrainersNearTheWall,
    Scenario::BatchesThatFit,
    Scenario::CacheThatFits,
    Scenario::BatchTooLarge,
    Scenario::NotebookBursts,
];

/// One run, not yet begun.
#[derive(Debug)]
pub struct Run {
    pub scenario: Scenario,
    pub drivers: Vec<Tenant>,
    world: World,
    seconds: u64,
}

impl Run {
    pub fn moments(mut self) -> impl Iterator<Item = Moment> {
        (0..self.seconds).map(move |_| self.world.step())
    }
}

impl Scenario {
    /// Nothing is to run out here, and nothing to be warned of.
    pub fn is_steady(self) -> bool {
        matches!(
            self,
            Self::LeakThatFlushes
                | Self::SteadyAt95
                | Self::TrainersNearTheWall
                | Self::BatchesThatFit
                | Self::CacheThatFits
        )
    }

    pub fn run(self, seed: u64) -> Run {
        let mut chance = Chance::new(seed.wrapping_mul(64).wrapping_add(self as u64));
        let (minutes, drivers, tenants) = self.cast(&mut chance);
        let drivers = drivers.iter().map(|name| Tenant::plain(TenantKind::Docker, name)).collect();
        Run { scenario: self, drivers, world: World::new(chance.bits(), tenants), seconds: 60 * minutes }
    }

    #[allow(clippy::too_many_lines, reason = "one arm a scenario: the list is the table")]
    fn cast(self, chance: &mut Chance) -> (u64, &'static [&'static str], Vec<(&'static str, Behaviour)>) {
        // What is free beside the others, in bytes.
        let room = chance.between(0.08, 0.4) * LIMIT;
        let rest = LIMIT - room;
        let from = chance.between(300.0, 1500.0);
        match self {
            Self::LeakBesideTrainer => {
                let lasts = chance.spread(75.0, 900.0);
                let leak = Behaviour::Leak {
                    base: 0.3 * rest,
                    rate: room / lasts,
                    ask: chance.spread(2.0, 256.0) * MIB,
                    from,
                    until: f64::INFINITY,
                    flush: None,
                };
                (50, &["leak"], vec![("leak", leak), ("trainer", trainer(chance, 0.65 * rest))])
            }
            Self::CacheOverload => {
                let lasts = chance.spread(90.0, 900.0);
                let cache = Behaviour::Cache {
                    base: 0.4 * rest,
                    swing: chance.between(0.01, 0.06) * LIMIT,
                    period: chance.spread(60.0, 900.0),
                    drift: room / lasts,
                    from,
                    block: 64.0 * MIB,
                };
                let steady = Behaviour::Steady { bytes: 0.5 * rest, jitter: 0.0 };
                (45, &["cache"], vec![("cache", cache), ("steady", steady)])
            }
            Self::ManyToTheWall => {
                let lasts = chance.spread(90.0, 600.0);
                let mut leak = |part: f64| Behaviour::Leak {
                    base: 0.2 * rest,
                    rate: part * room / lasts,
                    ask: chance.spread(8.0, 512.0) * MIB,
                    from: from + chance.between(0.0, 0.2) * lasts,
                    until: f64::INFINITY,
                    flush: None,
                };
                let leaks = [leak(0.4), leak(0.3), leak(0.3)];
                let [one, two, three] = leaks;
                let rest = trainer(chance, 0.35 * rest);
                (
                    45,
                    &["one", "two", "three"],
                    vec![("one", one), ("two", two), ("three", three), ("trainer", rest)],
                )
            }
            Self::LengtheningSequences => {
                let train = Behaviour::Lengthen {
                    base: 0.5 * rest,
                    step: 0.1 * rest,
                    period: chance.spread(2.0, 30.0),
                    record: chance.spread(30.0, 240.0),
                    growth: room / chance.between(6.0, 20.0),
                };
                let steady = Behaviour::Steady { bytes: 0.35 * rest, jitter: 0.0 };
                (90, &["trainer"], vec![("trainer", train), ("steady", steady)])
            }
            Self::StaircaseLeak => {
                let step = chance.between(0.5, 2.0) * GIB;
                let leak = Behaviour::Leak {
                    base: 0.3 * rest,
                    rate: step / chance.between(15.0, 60.0),
                    ask: step,
                    from,
                    until: f64::INFINITY,
                    flush: None,
                };
                let room = Behaviour::Steady { bytes: 0.6 * rest + 0.5 * room, jitter: 64.0 * MIB };
                (90, &["leak"], vec![("leak", leak), ("steady", room)])
            }
            Self::SlowLeak => {
                let leak = Behaviour::Leak {
                    base: 0.2 * rest,
                    rate: room / chance.spread(1200.0, 5400.0),
                    ask: chance.spread(2.0, 64.0) * MIB,
                    from,
                    until: f64::INFINITY,
                    flush: None,
                };
                (120, &["leak"], vec![("leak", leak), ("trainer", trainer(chance, 0.7 * rest))])
            }
            Self::LeakThatStops => {
                let lasts = chance.spread(60.0, 900.0);
                let leak = Behaviour::Leak {
                    base: 0.3 * rest,
                    rate: chance.between(0.3, 0.8) * room / lasts,
                    ask: 64.0 * MIB,
                    from,
                    until: from + lasts,
                    flush: None,
                };
                (60, &[], vec![("leak", leak), ("trainer", trainer(chance, 0.65 * rest))])
            }
            Self::LeakThatFlushes => {
                let flush = chance.spread(40.0, 600.0).floor();
                let leak = Behaviour::Leak {
                    base: 0.3 * rest,
                    rate: 0.5 * room / flush,
                    ask: 64.0 * MIB,
                    from: 0.0,
                    until: f64::INFINITY,
                    flush: Some(flush),
                };
                (DAY, &[], vec![("leak", leak), ("trainer", trainer(chance, 0.65 * rest))])
            }
            Self::SteadyAt95 => {
                let all = chance.between(0.93, 0.98) * LIMIT;
                let one = Behaviour::Steady { bytes: 0.6 * all, jitter: chance.spread(16.0, 512.0) * MIB };
                let two = Behaviour::Steady { bytes: 0.39 * all, jitter: chance.spread(16.0, 512.0) * MIB };
                (DAY, &[], vec![("one", one), ("two", two)])
            }
            Self::TrainersNearTheWall => {
                // Whatever they do, their ceilings fit.
                let all = chance.between(0.93, 0.985) * LIMIT;
                let (one, two) = (trainer(chance, 0.5 * all), trainer(chance, 0.48 * all));
                (DAY, &[], vec![("one", one), ("two", two)])
            }
            Self::BatchesThatFit => {
                let batch = Behaviour::Batch {
                    size: (0.2 * room, 0.95 * room),
                    load: (5.0, 40.0),
                    work: (120.0, 900.0),
                    idle: 300.0,
                };
                (DAY, &[], vec![("batch", batch), ("trainer", trainer(chance, 0.97 * rest))])
            }
            Self::CacheThatFits => {
                let cache = Behaviour::Cache {
                    base: 0.4 * rest,
                    swing: 0.75 * room,
                    period: chance.spread(120.0, 3600.0),
                    drift: 0.0,
                    from: 0.0,
                    block: 64.0 * MIB,
                };
                let steady = Behaviour::Steady { bytes: 0.58 * rest, jitter: 0.0 };
                (DAY, &[], vec![("cache", cache), ("steady", steady)])
            }
            Self::BatchTooLarge => {
                let batch = Behaviour::Batch {
                    size: (0.3 * room, 1.6 * room),
                    load: (2.0, 40.0),
                    work: (120.0, 600.0),
                    idle: 400.0,
                };
                (120, &["batch"], vec![("batch", batch), ("trainer", trainer(chance, 0.95 * rest))])
            }
            Self::NotebookBursts => {
                let book =
                    Behaviour::Notebook { cell: (0.1 * room, 1.5 * room), every: 500.0, most: 3.0 * room };
                (120, &["notebook"], vec![("notebook", book), ("trainer", trainer(chance, 0.9 * rest))])
            }
        }
    }
}

/// A trainer whose highest level, with everything at once, is `ceiling`.
pub(crate) fn trainer(chance: &mut Chance, ceiling: f64) -> Behaviour {
    let step = if chance.happens(0.4) { 0.0 } else { chance.between(0.02, 0.2) * ceiling };
    let evaluate = Extra {
        bytes: chance.between(0.0, 0.1) * ceiling,
        every: chance.between(200.0, 1200.0),
        lasts: chance.between(15.0, 90.0),
    };
    let checkpoint = Extra {
        bytes: chance.between(0.0, 0.08) * ceiling,
        every: chance.between(300.0, 1800.0),
        lasts: chance.between(3.0, 15.0),
    };
    Behaviour::Train {
        base: ceiling - step - evaluate.bytes - checkpoint.bytes,
        step,
        period: chance.spread(0.3, 40.0),
        evaluate,
        checkpoint,
    }
}
