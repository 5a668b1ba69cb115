//! Owns what simulated tenants do to memory, second by second: one behaviour a variant.
//! Refuses to know the GPU: a tenant asks and is told yes or no.

use crate::chance::Chance;

pub const MIB: f64 = 1024.0 * 1024.0;
pub const GIB: f64 = 1024.0 * MIB;

/// What one tenant wants to hold at a second, as levels it goes through within it.
#[derive(Clone, Debug)]
pub enum Behaviour {
    /// Holds what it holds; now and then a little more and less.
    Steady { bytes: f64, jitter: f64 },
    /// Grows by `rate` from `from` to `until`, in asks of `ask`; flushes every so often, if it does.
    Leak { base: f64, rate: f64, ask: f64, from: f64, until: f64, flush: Option<f64> },
    /// Steps of a period: up by `step`, down again. Evaluation and checkpoints take more for a while.
    Train { base: f64, step: f64, period: f64, evaluate: Extra, checkpoint: Extra },
    /// Sequences get longer: each record raises the step for good.
    Lengthen { base: f64, step: f64, period: f64, record: f64, growth: f64 },
    /// Follows its load, a slow wave with noise; `drift` is growth of the load per second.
    Cache { base: f64, swing: f64, period: f64, drift: f64, from: f64, block: f64 },
    /// Comes, loads, works, goes; then waits for the next.
    Batch { size: (f64, f64), load: (f64, f64), work: (f64, f64), idle: f64 },
    /// A person: cells that take much at once, at any time.
    Notebook { cell: (f64, f64), every: f64, most: f64 },
}

/// Something that takes more for some seconds, every so often.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extra {
    pub bytes: f64,
    pub every: f64,
    pub lasts: f64,
}

impl Extra {
    fn at(self, second: f64) -> f64 {
        if self.every > 0.0 && second > self.every && second % self.every < self.lasts {
            self.bytes
        } else {
            0.0
        }
    }
}

/// A tenant's state between seconds.
#[derive(Clone, Debug)]
pub struct Actor {
    pub behaviour: Behaviour,
    chance: Chance,
    /// Own clock: set back by a crash.
    begun: f64,
    phase: f64,
    grown: f64,
    /// For batches: when the present stage ends, and what it is.
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Idle { until: f64 },
    Load { from: f64, until: f64, size: f64 },
    Work { until: f64, size: f64 },
}

impl Actor {
    pub fn new(behaviour: Behaviour, mut chance: Chance) -> Self {
        let phase = chance.unit();
        let until = match &behaviour {
            Behaviour::Batch { idle, .. } => chance.wait(*idle),
            _ => 0.0,
        };
        Self { behaviour, chance, begun: 0.0, phase, grown: 0.0, stage: Stage::Idle { until } }
    }

    /// The levels it wants to pass through in this second, and how large one ask is.
    pub fn wants(&mut self, now: f64) -> (Vec<f64>, f64) {
        let second = now - self.begun;
        // Start: what is resident comes in over some seconds.
        let start = |base: f64| base * (second / 12.0).clamp(0.05, 1.0);
        match self.behaviour.clone() {
            Behaviour::Steady { bytes, jitter } => {
                let noise = if self.chance.happens(0.05) { self.chance.between(-1.0, 1.0) } else { 0.0 };
                (vec![start(bytes) + jitter * noise], 256.0 * MIB)
            }
            Behaviour::Leak { base, rate, ask, from, until, flush } => {
                if now >= from && now < until {
                    self.grown += rate * self.chance.between(0.5, 1.5);
                }
                if let Some(flush) = flush
                    && now % flush < 1.0
                {
                    self.grown = 0.0;
                }
                // An ask comes when it is full.
                (vec![start(base) + (self.grown / ask).floor() * ask], ask)
            }
            Behaviour::Train { base, step, period, evaluate, checkpoint } => {
                let extra = evaluate.at(second) + checkpoint.at(second);
                (self.steps(start(base) + extra, step, period, second), (step / 4.0).max(2.0 * MIB))
            }
            Behaviour::Lengthen { base, step, period, record, growth } => {
                if second > 60.0 && self.chance.happens(1.0 / record) {
                    self.grown += growth * self.chance.between(0.2, 1.8);
                }
                (
                    self.steps(start(base), step + self.grown, period, second),
                    ((step + self.grown) / 4.0).max(2.0 * MIB),
                )
            }
            Behaviour::Cache { base, swing, period, drift, from, block } => {
                let wave = 0.5 + 0.5 * (std::f64::consts::TAU * (second / period + self.phase)).sin();
                self.grown = 0.9 * self.grown + 0.1 * swing * self.chance.between(-0.4, 0.4);
                let load = swing * wave + self.grown + drift * (now - from).max(0.0);
                (vec![start(base) + (load.max(0.0) / block).floor() * block], block)
            }
            Behaviour::Batch { size, load, work, idle } => {
                (vec![self.batch(now, size, load, work, idle)], 512.0 * MIB)
            }
            Behaviour::Notebook { cell, every, most } => {
                if self.chance.happens(1.0 / every) {
                    let bytes = self.chance.spread(cell.0, cell.1);
                    // Half of the cells only take the place of an older one.
                    let kept = if self.chance.happens(0.5) { 0.0 } else { self.grown };
                    self.grown = (kept + bytes).min(most);
                }
                (vec![start(600.0 * MIB) + self.grown], 2.0 * GIB)
            }
        }
    }

    fn steps(&mut self, base: f64, step: f64, period: f64, second: f64) -> Vec<f64> {
        if period < 1.0 {
            // Several steps a second: up and down within it.
            return vec![base + step * self.chance.between(0.9, 1.0), base + step * self.chance.unit()];
        }
        let place = (second / period + self.phase).fract();
        // Forward fills, backward empties.
        let level = if place < 0.6 { place / 0.6 } else { (1.0 - place) / 0.4 };
        vec![base + step * level]
    }

    fn batch(&mut self, now: f64, size: (f64, f64), load: (f64, f64), work: (f64, f64), idle: f64) -> f64 {
        match self.stage {
            Stage::Idle { until } if now >= until => {
                let size = self.chance.spread(size.0, size.1);
                self.stage =
                    Stage::Load { from: now, until: now + self.chance.between(load.0, load.1), size };
                0.0
            }
            Stage::Idle { .. } => 0.0,
            Stage::Load { until, size, .. } if now >= until => {
                self.stage = Stage::Work { until: now + self.chance.between(work.0, work.1), size };
                size
            }
            Stage::Load { from, until, size } => size * (now - from) / (until - from),
            Stage::Work { until, .. } if now >= until => {
                self.stage = Stage::Idle { until: now + self.chance.wait(idle) };
                0.0
            }
            Stage::Work { size, .. } => size,
        }
    }

    /// An ask was refused. `true` if it dies of it and starts anew after a while.
    pub fn refused(&mut self, now: f64) -> bool {
        let dies = match self.behaviour {
            // A server sheds load, a person gives up.
            Behaviour::Cache { .. } | Behaviour::Notebook { .. } | Behaviour::Steady { .. } => false,
            _ => self.chance.happens(0.5),
        };
        match self.behaviour {
            Behaviour::Notebook { .. } => self.grown = 0.0,
            Behaviour::Batch { idle, .. } => {
                self.stage = Stage::Idle { until: now + 30.0 + self.chance.wait(idle) };
            }
            _ if dies => {
                self.begun = now + 20.0;
                self.grown = 0.0;
            }
            _ => {}
        }
        dies || matches!(self.behaviour, Behaviour::Batch { .. } | Behaviour::Notebook { .. })
    }

    /// The kernel killed it; it is started again.
    pub fn killed(&mut self, now: f64) {
        self.begun = now + 20.0;
        self.grown = 0.0;
        if let Behaviour::Batch { idle, .. } = self.behaviour {
            self.stage = Stage::Idle { until: now + 30.0 + self.chance.wait(idle) };
        }
    }

    /// Down after a crash.
    pub fn down(&self, now: f64) -> bool {
        now < self.begun
    }
}
