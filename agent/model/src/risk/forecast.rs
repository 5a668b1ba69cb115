//! Owns the words of a forecast: what is said of a GPU and of each tenant on it.
//! Refuses arithmetic: these are results.

use std::time::Duration;

use serde::Serialize;

use super::HORIZONS;
use super::host::HostForecast;
use super::warning::{Severity, Warning, WarningCounts};
use crate::{GpuId, Tenant};

/// What is to be expected of every GPU, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Forecast {
    /// Since the agent started.
    pub at: Duration,
    /// GPUs whose memory NVML told; of the others nothing is said.
    pub gpus: Vec<GpuForecast>,
    /// `None` where host memory is not watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostForecast>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuForecast {
    pub gpu: GpuId,
    pub headroom: Headroom,
    /// The probability that an allocation finds no room, within each of [`HORIZONS`].
    pub risk: [f64; HORIZONS.len()],
    /// When the room is gone if the present growth goes on. `None` while nothing grows.
    pub exhaustion: Option<Exhaustion>,
    /// Who holds memory here, in the order of names.
    pub tenants: Vec<TenantForecast>,
    /// Who would be refused first, the likeliest first, or one that follows it closely. At most [`super::VICTIMS`].
    pub victims: Vec<Tenant>,
    /// Allocations were refused here and, as of this moment, stayed so: of a single one that is known a tick later.
    pub exhausted: bool,
    pub calibration: Calibration,
    /// The warning that stands.
    pub warning: Option<Warning>,
    /// By severity, in the order of [`Severity::ALL`].
    pub warnings: [WarningCounts; Severity::ALL.len()],
}

impl GpuForecast {
    /// Who drives it most; `None` while nobody does.
    pub fn driver(&self) -> Option<&Tenant> {
        let most = self.tenants.iter().max_by(|one, two| one.share.total_cmp(&two.share))?;
        (most.share > 0.0).then_some(&most.tenant)
    }
}

/// Room on a GPU and where the rest is, in bytes. `limit = reserved + used + free`, where `reserved` is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Headroom {
    pub limit: u64,
    /// What driver and firmware keep; unknown, it is in `used`.
    pub reserved: Option<u64>,
    /// NVML's figure, carried on by what the ledger saw since its poll.
    pub used: u64,
    pub free: u64,
    /// What pools keep beyond what is live, and could give back. Not in `free`; `None` where no pool told.
    pub pool: Option<u64>,
    /// Managed memory, virtual: the most that could be evicted. Not in `free`.
    pub managed: u64,
}

/// Seconds from now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Exhaustion {
    pub seconds: f64,
    /// Nine times in ten not before this, by the bursts and the pace of before.
    pub low: f64,
    /// At half of the present pace.
    pub high: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TenantForecast {
    pub tenant: Tenant,
    /// Its part in what fills the room, 0 to 1. What no ledger has takes its part too, so the sum may be below 1.
    pub share: f64,
    pub live: u64,
    /// The highest level since the agent came.
    pub peak: u64,
    /// The highest level of the last ten minutes.
    pub ceiling: u64,
    /// Growth by a run, in bytes per second.
    pub rate: f64,
    /// Growth within each of [`HORIZONS`].
    pub growth: [Growth; HORIZONS.len()],
    /// What it needs by its peak and for the longest of [`HORIZONS`], with its context.
    pub need: u64,
    /// What it should be allowed: less than it needs where there is not room for all.
    pub quota: u64,
}

/// Growth above the present level, in bytes: exceeded once in two, in ten, in a hundred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Growth {
    pub median: u64,
    pub p90: u64,
    pub p99: u64,
}

/// How often forecasts came true, by what they had said. Counters since the agent started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Calibration(pub [[Kept; Calibration::BINS]; HORIZONS.len()]);

impl Calibration {
    /// 0 to 0.2, to 0.4, to 0.6, to 0.8, to 1.
    pub const BINS: usize = 5;

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded by the clamp")]
    pub fn bin(risk: f64) -> usize {
        (risk * Self::BINS as f64).clamp(0.0, (Self::BINS - 1) as f64) as usize
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Kept {
    /// Forecasts whose horizon is over.
    pub forecasts: u64,
    /// Of these, those whose GPU ran out in time.
    pub true_ones: u64,
}
