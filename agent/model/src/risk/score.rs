//! Owns the score of forecasts on recorded moments: events, warnings, lead times, false warnings, Brier, calibration.
//! Refuses hindsight: a rule sees one moment at a time, and outcomes are matched when the run is over.

mod rule;
mod tally;
mod track;

use std::collections::BTreeMap;
use std::time::Duration;

pub use rule::{Rule, RuleError};
pub use tally::{Bin, EventScore, Score};

use super::warning::{Bar, Change, Watch};
use super::{
    Forecast, Forecaster, HORIZONS, HostForecast, HostMoment, MemoryForecast, Moment, Refusals, WARN,
};
use crate::{GpuId, Tenant};
use rule::Line;
use track::{Sighting, Track};

/// A warning counts for an event when it came this long before: not earlier, nobody acts on older ones.
pub const LEAD_LEAST: f64 = 30.0;
pub const LEAD_MOST: f64 = 900.0;

/// What the programs of a run tell of it; nothing where nobody does.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    /// Who filled the memory: any of them is right.
    pub drivers: Vec<Tenant>,
    /// When growth began that was to fill it, or a burst: seconds on the run's clock, in their order.
    pub began: Vec<f64>,
}

impl Truth {
    /// When began what ended at that moment; `None` where nobody tells.
    fn began(&self, at: f64) -> Option<f64> {
        self.began.iter().copied().rfind(|began| *began < at)
    }
}

/// One run under every rule.
#[derive(Debug)]
pub struct Scorer {
    forecaster: Forecaster,
    rules: Vec<Rule>,
    gpus: BTreeMap<GpuId, Track>,
    refusals: BTreeMap<(GpuId, Tenant), Refusals>,
    limits: BTreeMap<Tenant, Limit>,
    /// When host memory was read last.
    taken: Option<Duration>,
}

/// A tenant's memory cgroups.
#[derive(Debug)]
struct Limit {
    track: Track,
    /// Its processes that were killed there, as of the last reading.
    kills: u64,
}

impl Scorer {
    pub fn new(rules: &[Rule]) -> Self {
        Self {
            forecaster: Forecaster::default(),
            rules: rules.to_vec(),
            gpus: BTreeMap::new(),
            refusals: BTreeMap::new(),
            limits: BTreeMap::new(),
            taken: None,
        }
    }

    /// Goes on from what a forecaster knew when the recording began.
    pub fn resume(&mut self, forecaster: Forecaster) {
        self.forecaster = forecaster;
    }

    pub fn advance(&mut self, moment: &Moment) -> Forecast {
        let forecast = self.forecaster.advance(moment);
        let at = moment.at.as_secs_f64();
        for gpu in &moment.gpus {
            let Some(memory) = gpu.memory else { continue };
            let said = forecast.gpus.iter().find(|said| said.gpu == gpu.gpu);
            let free = said.map_or(memory.free, |said| said.headroom.free) as f64;
            self.gpus.entry(gpu.gpu.clone()).or_insert_with(|| Track::new(&self.rules)).room(at, free);
        }
        for gpu in &forecast.gpus {
            let mut failed = Vec::new();
            for tenant in &moment.tenants {
                let Some(holding) = tenant.holdings.iter().find(|of| of.gpu == gpu.gpu) else { continue };
                let key = (gpu.gpu.clone(), tenant.tenant.clone());
                if self.refusals.entry(key).or_default().advance(holding) > 0 {
                    failed.push(tenant.tenant.clone());
                }
            }
            let track = self.gpus.entry(gpu.gpu.clone()).or_insert_with(|| Track::new(&self.rules));
            let (limit, free) = (gpu.headroom.limit as f64, gpu.headroom.free as f64);
            let said = track.said(&self.rules, at, limit, free, gpu.risk[WARN]);
            track.see(Sighting {
                at,
                exhausted: gpu.exhausted,
                longest: gpu.risk[HORIZONS.len() - 1],
                said,
                driver: gpu.driver().cloned(),
                victims: gpu.victims.clone(),
                tenants: gpu.tenants.len(),
                failed,
            });
        }
        if let (Some(host), Some(said)) = (&moment.host, &forecast.host)
            && self.taken != Some(host.taken)
        {
            self.taken = Some(host.taken);
            self.limits(host, said);
        }
        forecast
    }

    /// One reading of host memory: who has a limit, and who was killed at it.
    fn limits(&mut self, host: &HostMoment, said: &HostForecast) {
        let at = host.taken.as_secs_f64();
        let kills = |tenant: &Tenant| host.kills.by_tenant.get(tenant).copied().unwrap_or(0);
        let said: BTreeMap<&Tenant, &MemoryForecast> =
            said.tenants.iter().map(|of| (&of.tenant, &of.memory)).collect();
        for (tenant, _) in said.iter().filter(|(_, memory)| memory.limit.is_some()) {
            if !self.limits.contains_key(*tenant) {
                let limit = Limit { track: Track::new(&self.rules), kills: kills(tenant) };
                self.limits.insert((*tenant).clone(), limit);
            }
        }
        for (tenant, Limit { track, kills: known }) in &mut self.limits {
            let now = kills(tenant);
            let exhausted = now > std::mem::replace(known, now);
            let mut risk = [0.0; HORIZONS.len()];
            // Whom a kill ended is not there any more, and in no danger.
            let mut words = vec![0.0; self.rules.len()];
            if let Some(memory) = said.get(tenant) {
                let Some(limit) = memory.limit else { continue };
                (risk, words) = (
                    memory.risk,
                    track.said(&self.rules, at, limit as f64, memory.room as f64, memory.risk[WARN]),
                );
                track.room(at, memory.room as f64);
            }
            let longest = risk[HORIZONS.len() - 1];
            let (driver, victims, tenants, failed) = (None, Vec::new(), 1, Vec::new());
            track.see(Sighting { at, exhausted, longest, said: words, driver, victims, tenants, failed });
        }
    }

    /// How GPUs were forecast.
    pub fn finish(&self, truth: &Truth) -> Vec<(Rule, Score)> {
        self.scores(&self.of_gpus(), truth)
    }

    /// How the limits of tenants' memory cgroups were forecast; nothing where none was seen.
    pub fn finish_limits(&self, truth: &Truth) -> Vec<(Rule, Score)> {
        let tracks: Vec<&Track> = self.limits.values().map(|limit| &limit.track).collect();
        if tracks.is_empty() { Vec::new() } else { self.scores(&tracks, truth) }
    }

    /// The score of the forecast of GPUs if it warned at another bar; `None` when it is not among the rules.
    pub fn at_bar(&self, bar: &Bar, truth: &Truth) -> Option<Score> {
        let index = self.rules.iter().position(|rule| *rule == Rule::Risk)?;
        Some(sum(&self.of_gpus(), index, Rule::Risk, truth, bar))
    }

    fn of_gpus(&self) -> Vec<&Track> {
        self.gpus.values().collect()
    }

    fn scores(&self, tracks: &[&Track], truth: &Truth) -> Vec<(Rule, Score)> {
        let score = |(index, rule): (usize, &Rule)| (*rule, sum(tracks, index, *rule, truth, &Bar::WARNING));
        self.rules.iter().enumerate().map(score).collect()
    }
}

fn sum(tracks: &[&Track], index: usize, rule: Rule, truth: &Truth, bar: &Bar) -> Score {
    let mut score = Score::default();
    for track in tracks {
        score.add(&track.score(index, rule, truth, bar));
    }
    score
}

#[cfg(test)]
mod tests;
