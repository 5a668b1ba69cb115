//! Owns what is remembered of one GPU, and the forecast made of it.
//! Refuses to name a driver where no ledger grew: growth that only NVML sees has no tenant here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::forecast::{GpuForecast, Growth, Headroom, TenantForecast};
use super::identity;
use super::lasting::Lasting;
use super::moment::{GpuMemory, Holding};
use super::quota;
use super::record::Record;
use super::refusals::Refusals;
use super::series::Series;
use super::spread::Spread;
use super::victims::{self, Stand};
use super::warning::{WarningCounts, Warnings};
use super::{FOLLOWED, HORIZONS, VICTIMS, WATCH};
use crate::{GpuId, Tenant};

const MIB: f64 = 1024.0 * 1024.0;
/// Seconds in which the weight of an old ask or failure falls to a third.
const ASKS_SECONDS: f64 = 15.0;
const FAILURES_SECONDS: f64 = 60.0;
/// Evaluation and checkpoints come back within some minutes.
const SELDOM_SECONDS: f64 = HORIZONS[HORIZONS.len() - 1];
/// The largest ask of a tenant is believed for about this long.
const NEED_SECONDS: f64 = 120.0;
/// An ask whose size nobody knows counts as one of these.
const LEAST_ASK: f64 = 1024.0 * MIB;
/// Waiting for reclaim all the time makes the odds this many times as high.
const RECLAIM_ODDS: f64 = 4.0;

/// A tenant on this GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Resident {
    series: Series,
    last: Holding,
    refusals: Refusals,
    /// Seconds with an ask per second, of late and over some minutes, and bytes of the largest ask of late.
    asks: f64,
    seldom: f64,
    need: f64,
    /// The mean of its level of late.
    usual: f64,
    /// Failed asks per second, and the room when the last one failed.
    failing: f64,
    refused_at: f64,
    /// The room before the last tick: a refusal may be decided a tick late.
    room: f64,
}

impl Resident {
    fn new(at: f64, holding: &Holding) -> Self {
        let mut refusals = Refusals::default();
        refusals.advance(holding);
        Self {
            refusals,
            series: Series::new(at, holding.live as f64),
            last: holding.clone(),
            asks: 0.0,
            seldom: 0.0,
            need: 0.0,
            usual: holding.live as f64,
            failing: 0.0,
            refused_at: 0.0,
            room: f64::INFINITY,
        }
    }

    /// Takes the holding in; gives the asks that failed since the last one. `room` is what was free before.
    fn advance(&mut self, at: f64, elapsed: f64, holding: &Holding, room: f64) -> u64 {
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let failures = self.refusals.advance(holding);
        let asks = since(holding.allocations, self.last.allocations);
        let size = since(holding.allocated, self.last.allocated) as f64 / asks.max(1) as f64;
        let asked = if asks + failures > 0 { elapsed } else { 0.0 };
        fade(&mut self.asks, elapsed, ASKS_SECONDS, asked);
        fade(&mut self.seldom, elapsed, SELDOM_SECONDS, asked);
        fade(&mut self.failing, elapsed, FAILURES_SECONDS, failures as f64);
        if failures > 0 {
            self.refused_at = room.min(self.room);
        }
        self.room = room;
        // It got what it asked for, or it is gone: nothing is unmet.
        if holding.live < self.last.live / 2 || (failures == 0 && asks > 0) {
            self.failing = 0.0;
        }
        self.need = (self.need * (-elapsed / NEED_SECONDS).exp()).max(size);
        self.usual += (1.0 - (-elapsed / ASKS_SECONDS).exp()) * (holding.live as f64 - self.usual);
        // Between two ticks the level was as high as a new peak says, or as either end.
        let high =
            if holding.peak > self.last.peak { holding.peak } else { holding.live.max(self.last.live) };
        self.series.advance(at, holding.live as f64, high as f64, None, failures > 0);
        self.last = holding.clone();
        failures
    }
}

impl Resident {
    /// Failed asks per second that would fail again: not those for which there is room by now.
    fn unmet(&self, free: f64) -> f64 {
        if free > self.refused_at + 2.0 * self.need.max(LEAST_ASK) { 0.0 } else { self.failing }
    }
}

/// A rate per second over the last `span` seconds.
fn fade(rate: &mut f64, elapsed: f64, span: f64, events: f64) {
    *rate = *rate * (-elapsed / span).exp() + events / span;
}

/// NVML's figures, and what the ledgers held when they were taken.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Poll {
    at: f64,
    memory: GpuMemory,
    ledger: f64,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Gpu {
    #[serde(with = "identity::map")]
    residents: BTreeMap<Tenant, Resident>,
    begun: Option<f64>,
    total: Option<Series>,
    /// What NVML has and no ledger: contexts, modules, who came before the agent.
    rest: Option<Series>,
    poll: Option<Poll>,
    /// Time and sum of the ledgers at the last tick.
    last: Option<(f64, f64)>,
    /// What was free then.
    free: f64,
    /// Seconds of waiting for reclaim, per second.
    reclaim: f64,
    lasting: Lasting,
    record: Record,
    warnings: Warnings,
}

impl Gpu {
    /// One tick; `None` while the GPU has not been watched for long enough. `reclaim` is the time that the tenants here waited for reclaim since the last one, in seconds.
    pub(super) fn advance(
        &mut self,
        id: &GpuId,
        at: f64,
        polled: f64,
        memory: GpuMemory,
        holdings: &BTreeMap<&Tenant, &Holding>,
        reclaim: f64,
    ) -> Option<GpuForecast> {
        let begun = *self.begun.get_or_insert(at);
        let elapsed = self.last.map_or(0.0, |(last, _)| at - last).max(0.0);
        fade(&mut self.reclaim, elapsed, ASKS_SECONDS, reclaim);
        let failures = self.take(at, elapsed, holdings);
        let ledger: f64 = holdings.values().map(|holding| holding.live as f64).sum();
        let used = self.used(at, polled, memory, ledger);
        self.last = Some((at, ledger));

        let rates: f64 = self.runs().map(|series| series.run.rate()).sum();
        let total = self.total.get_or_insert_with(|| Series::new(at, used));
        total.advance(at, used, used, Some(rates), failures > 0);

        let free = (memory.used + memory.free) as f64 - used;
        self.free = free;
        let exhausted = failures > 0;
        self.record.judge(at, exhausted);
        if at - begun < WATCH {
            return None;
        }
        let mut risk = self.risk(free);
        self.lasting.advance(&mut risk, elapsed);
        self.record.say(at, &risk);
        let headroom = headroom(memory, used, free, holdings);
        let mut forecast = GpuForecast {
            gpu: id.clone(),
            headroom,
            risk,
            exhaustion: self.total.as_ref().and_then(|total| total.exhaustion(free, rates)),
            tenants: self.tenants(free, &headroom),
            victims: self.victims(free, rates),
            exhausted,
            calibration: self.record.kept(),
            warning: None,
            warnings: <[WarningCounts; 2]>::default(),
        };
        let name = || (forecast.driver().cloned(), forecast.victims.clone());
        self.warnings.advance(at, &risk, exhausted, name);
        forecast.warning = self.warnings.standing();
        forecast.warnings = self.warnings.counts();
        Some(forecast)
    }

    fn take(&mut self, at: f64, elapsed: f64, holdings: &BTreeMap<&Tenant, &Holding>) -> u64 {
        self.residents.retain(|tenant, _| holdings.contains_key(tenant));
        let mut failures = 0;
        for (tenant, holding) in holdings {
            if let Some(resident) = self.residents.get_mut(*tenant) {
                failures += resident.advance(at, elapsed, holding, self.free);
            } else if self.residents.len() < FOLLOWED {
                self.residents.insert((*tenant).clone(), Resident::new(at, holding));
            }
        }
        failures
    }

    /// NVML's used, carried on by the ledger since its poll: a poll is up to ten seconds old.
    fn used(&mut self, at: f64, polled: f64, memory: GpuMemory, ledger: f64) -> f64 {
        if self.poll.is_none_or(|poll| polled > poll.at) {
            // The tick before may have been the nearer one.
            let then = match self.last {
                Some((last, sum)) if polled - last < at - polled => sum,
                _ => ledger,
            };
            self.poll = Some(Poll { at: polled, memory, ledger: then });
            let rest = memory.used as f64 - then;
            self.rest.get_or_insert_with(|| Series::new(at, rest)).advance(at, rest, rest, None, false);
        }
        let since = self.poll.map_or(0.0, |poll| ledger - poll.ledger);
        (memory.used as f64 + since).clamp(0.0, (memory.used + memory.free) as f64)
    }

    /// Everything that may have a run of growth.
    fn runs(&self) -> impl Iterator<Item = &Series> {
        self.residents.values().map(|resident| &resident.series).chain(&self.rest)
    }

    /// Runs of the tenants, bursts of the sum: tenants' peaks seldom coincide, and the sum knows how they do.
    fn risk(&self, free: f64) -> [f64; HORIZONS.len()] {
        let mut risk = [0.0; HORIZONS.len()];
        let Some(total) = &self.total else { return risk };
        let room = free.max(MIB);
        let failing: f64 = self.residents.values().map(|resident| resident.unmet(free)).sum();
        for (horizon, risk) in risk.iter_mut().enumerate() {
            let mut sum = Spread::by(room, f64::INFINITY, |bytes| total.bursts(horizon, bytes));
            for series in self.runs().filter(|series| series.run.rate() > 0.0) {
                let most = series.most(horizon) - series.gap(horizon);
                if most <= 0.0 {
                    continue;
                }
                sum = sum.plus(&Spread::by(room, most, |bytes| series.grows(horizon, bytes)));
            }
            // Refused asks are asked again, at the pace of the last minute.
            let unmet = 1.0 - (-failing * HORIZONS[horizon]).exp();
            let spared = (1.0 - sum.beyond) * (1.0 - unmet);
            *risk = raised(1.0 - spared, 1.0 + (RECLAIM_ODDS - 1.0) * self.reclaim.min(1.0));
        }
        risk
    }

    fn tenants(&self, free: f64, headroom: &Headroom) -> Vec<TenantForecast> {
        let weights: Vec<f64> = self.residents.values().map(|of| weight(&of.series, free)).collect();
        let rest = self.rest.as_ref().map_or(0.0, |rest| weight(rest, free));
        let sum = weights.iter().sum::<f64>() + rest;
        let longest = HORIZONS.len() - 1;
        let mut tenants: Vec<TenantForecast> = self
            .residents
            .iter()
            .zip(weights)
            .map(|((tenant, resident), weight)| {
                let mut growth = [Growth::default(); HORIZONS.len()];
                for (horizon, growth) in growth.iter_mut().enumerate() {
                    let [median, p90, p99] = resident.series.quantiles(horizon, [0.5, 0.1, 0.01]).map(bytes);
                    *growth = Growth { median, p90, p99 };
                }
                let (live, peak) = (resident.last.live, resident.last.peak.max(resident.last.live));
                TenantForecast {
                    tenant: tenant.clone(),
                    share: if sum > 0.0 { weight / sum } else { 0.0 },
                    live,
                    peak,
                    ceiling: bytes(resident.series.range(longest).1),
                    rate: resident.series.run.rate(),
                    growth,
                    need: quota::need(peak, live + growth[longest].p99),
                    quota: 0,
                }
            })
            .collect();
        quota::share_out(headroom, &mut tenants);
        tenants
    }

    fn victims(&self, free: f64, pace: f64) -> Vec<Tenant> {
        let residents: Vec<(&Tenant, &Resident)> = self.residents.iter().collect();
        // On average one asks half of its interval later.
        let stand = |of: &Resident| Stand::of(&of.series, of.usual, of.need, 0.5 / of.asks.max(of.seldom));
        let stands: Vec<Stand> = residents.iter().map(|(_, of)| stand(of)).collect();
        let bursts = |place: usize| residents[place].1.series.bursts(HORIZONS.len() - 1, free);
        let named = victims::named(&victims::times(free, pace, &stands, bursts), VICTIMS);
        named.into_iter().map(|place| residents[place].0.clone()).collect()
    }
}

/// What a tenant adds to the room's end: what its run and its bursts beyond its own ceiling will take, and what it has
/// just taken for good. Coming back to a level that was there before adds nothing.
fn weight(series: &Series, free: f64) -> f64 {
    let minute = 1;
    let floor = series.range(minute).0;
    let (old_floor, _) = series.range(HORIZONS.len() - 1);
    // Taken for good: the floor of late above the floor of before.
    series.mean(minute, free.max(MIB)) + 0.1 * (floor - old_floor).max(0.0)
}

fn raised(risk: f64, odds: f64) -> f64 {
    let risk = risk.clamp(0.0, 1.0);
    risk * odds / (1.0 - risk + risk * odds)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, not below zero")]
fn bytes(value: f64) -> u64 {
    value.max(0.0) as u64
}

fn headroom(memory: GpuMemory, used: f64, free: f64, holdings: &BTreeMap<&Tenant, &Holding>) -> Headroom {
    let pools = holdings.values().filter_map(|holding| holding.pool);
    Headroom {
        limit: memory.limit,
        reserved: memory.reserved,
        used: bytes(used),
        free: bytes(free),
        pool: pools.reduce(|sum, pool| sum + pool),
        managed: holdings.values().map(|holding| holding.managed).sum(),
    }
}
