//! Owns how far apart each figure is read: as declared, as its own calls cost, and as others are held to pay for it.
//! Refuses to space out what the ledger is held against: memory and the compute list come with every poll.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cotenant_model::{Absence, GpuId};

use crate::config::MIN_INTERVAL;

/// Between two polls, or two readings of one figure, at most, however much they cost others.
pub(crate) const MAX_REST: Duration = Duration::from_mins(10);
/// What one figure may cost at each poll of 5 s: a hundred-thousandth of the time. A dearer one comes so much more seldom.
const ALLOWANCE: Duration = Duration::from_micros(50);
/// How much further apart than declared the first reading alone can push the second: it may have been a cold one.
const FIRST_STRETCH: u32 = 8;

/// What is not read at each poll. Costs on an H200 whose locks were wanted: energy 4.0 ms, process utilisation 1.7 ms,
/// handle 0.8 ms, utilisation 0.4 ms, a list 0.1 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Paced {
    /// Handle, UUID, name and PCI address: they change only when the library is opened anew, and a lost GPU shows elsewhere.
    Identity,
    /// A list that was empty last time. Any change in the compute list calls for both at once.
    EmptyGraphics,
    EmptyMps,
    ProcessUtilization,
    Utilization,
    Power,
    Energy,
    Temperature,
    Pcie,
    Clocks,
    EccCorrected,
    EccUncorrected,
    Mig,
    ComputeMode,
}

impl Paced {
    pub(crate) const ALL: &'static [Self] = &[
        Self::Identity,
        Self::EmptyGraphics,
        Self::EmptyMps,
        Self::ProcessUtilization,
        Self::Utilization,
        Self::Power,
        Self::Energy,
        Self::Temperature,
        Self::Pcie,
        Self::Clocks,
        Self::EccCorrected,
        Self::EccUncorrected,
        Self::Mig,
        Self::ComputeMode,
    ];

    /// Polls apart, when its calls cost nothing.
    const fn every(self) -> u32 {
        match self {
            Self::Utilization | Self::Power | Self::Temperature | Self::Clocks => 1,
            Self::Mig | Self::ComputeMode => 3,
            // Each PCIe figure blocks for 20 ms in the driver.
            Self::EmptyGraphics | Self::EmptyMps | Self::Pcie | Self::EccCorrected | Self::EccUncorrected => {
                6
            }
            // A sample of the last second: nothing adds it up, so seldom is as true as often.
            Self::ProcessUtilization => 12,
            // A counter: nothing is lost between two readings.
            Self::Energy => 24,
            Self::Identity => 120,
        }
    }

    /// The reading whose age is published.
    pub(crate) const fn reading(self) -> Option<&'static str> {
        match self {
            Self::Identity | Self::EmptyGraphics | Self::EmptyMps => None,
            Self::ProcessUtilization => Some("process_utilization"),
            Self::Utilization => Some("utilization"),
            Self::Power => Some("power"),
            Self::Energy => Some("energy"),
            Self::Temperature => Some("temperature"),
            Self::Pcie => Some("pcie"),
            Self::Clocks => Some("clocks_event_reasons"),
            Self::EccCorrected => Some("ecc_corrected"),
            Self::EccUncorrected => Some("ecc_uncorrected"),
            Self::Mig => Some("mig_enabled"),
            Self::ComputeMode => Some("compute_mode"),
        }
    }
}

/// How one reading went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    /// When it began.
    pub(crate) at: Instant,
    /// In NVML, all its calls.
    pub(crate) cost: Duration,
    pub(crate) failed: Option<Absence>,
}

/// What the polls as a whole are held to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) interval: Duration,
    /// How many times as seldom as declared, because tenants pay for it.
    pub(crate) held_back: u32,
}

#[derive(Clone, Copy, Debug)]
struct Pace {
    due: Instant,
    cost: Duration,
}

/// When each figure of each GPU is due.
#[derive(Debug, Default)]
pub(crate) struct Cadence(BTreeMap<(Paced, GpuId), Pace>);

impl Cadence {
    pub(crate) fn due(&self, what: Paced, gpu: &GpuId, now: Instant) -> bool {
        self.0.get(&(what, gpu.clone())).is_none_or(|pace| now >= pace.due)
    }

    pub(crate) fn read(&mut self, what: Paced, gpu: &GpuId, spent: Spent, terms: Terms) {
        let key = (what, gpu.clone());
        let before = self.0.get(&key).map(|pace| pace.cost);
        // The cheaper of two: one that waited for a busy CPU says nothing about the call.
        let cost = before.map_or(spent.cost, |before| before.min(spent.cost));
        let rest = rest(what, cost, before.is_none(), spent.failed, terms);
        // Half an interval early, for a poll that comes a little before its time.
        let due = spent.at + rest.saturating_sub(terms.interval / 2);
        self.0.insert(key, Pace { due, cost: spent.cost });
    }

    /// Everything about these GPUs is due, and about others nothing is kept.
    pub(crate) fn retain(&mut self, known: impl Fn(&GpuId) -> bool) {
        self.0.retain(|(_, gpu), _| known(gpu));
    }

    /// Everything about this GPU is due.
    pub(crate) fn forget(&mut self, gpu: &GpuId) {
        for what in Paced::ALL {
            self.0.remove(&(*what, gpu.clone()));
        }
    }
}

/// From one reading to the next.
fn rest(what: Paced, cost: Duration, first: bool, failed: Option<Absence>, terms: Terms) -> Duration {
    // What is broken is looked at again soon; what this host does not have is not.
    let declared = match failed {
        None | Some(Absence::NotSupported | Absence::SymbolMissing | Absence::NoPermission) => what.every(),
        Some(_) => 1,
    };
    let allowance = ALLOWANCE.mul_f64((terms.interval.as_secs_f64() / MIN_INTERVAL.as_secs_f64()).max(1.0));
    let by_cost = u32::try_from(cost.as_nanos().div_ceil(allowance.as_nanos().max(1))).unwrap_or(u32::MAX);
    let most = if first { declared * FIRST_STRETCH } else { u32::MAX };
    let polls = declared.max(by_cost.min(most)).saturating_mul(terms.held_back.max(1));
    terms.interval.saturating_mul(polls).min(MAX_REST.max(terms.interval))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { interval: MIN_INTERVAL, held_back: 1 };

    fn gpu() -> GpuId {
        GpuId::from_nvml("GPU-0")
    }

    /// The shares of a day that a figure of this cost takes, and how often it is read.
    fn day(what: Paced, cost: Duration, terms: Terms) -> (f64, u32) {
        let mut cadence = Cadence::default();
        let begun = Instant::now();
        let (mut spent, mut readings) = (Duration::ZERO, 0);
        let mut since = Duration::ZERO;
        while since < Duration::from_hours(24) {
            let at = begun + since;
            if cadence.due(what, &gpu(), at) {
                cadence.read(what, &gpu(), Spent { at, cost, failed: None }, terms);
                spent += cost;
                readings += 1;
            }
            since += terms.interval;
        }
        (spent.as_secs_f64() / 86_400.0, readings)
    }

    #[test]
    fn c47_a_dear_figure_is_read_so_seldom_that_it_costs_as_little_as_a_cheap_one() {
        for (what, micros) in [
            (Paced::Energy, 4_000),
            (Paced::ProcessUtilization, 1_700),
            (Paced::Utilization, 400),
            (Paced::Power, 20),
        ] {
            let (share, readings) = day(what, Duration::from_micros(micros), TERMS);
            assert!(share < 1.1e-5, "{what:?}: {share}");
            assert!(readings > 100, "{what:?}: {readings} a day");
        }
        assert_eq!(day(Paced::Power, Duration::from_micros(20), TERMS).1, 17_280, "a cheap one, each poll");
    }

    #[test]
    fn c47_who_is_held_back_reads_in_proportion_and_never_stops() {
        let held = Terms { held_back: 4, ..TERMS };
        let cost = Duration::from_micros(400);
        let (free, slow) = (day(Paced::Utilization, cost, TERMS).1, day(Paced::Utilization, cost, held).1);
        assert!((3..=5).contains(&(free / slow)), "{free} and {slow} a day");
        let most = Terms { held_back: 128, ..TERMS };
        assert_eq!(day(Paced::Energy, Duration::from_millis(4), most).1, 144, "every ten minutes");
    }

    #[test]
    fn one_reading_that_was_held_up_does_not_put_the_figure_off_for_long() {
        let rest = |cost, first| rest(Paced::Power, Duration::from_millis(cost), first, None, TERMS);
        assert_eq!(rest(500, true), MIN_INTERVAL * FIRST_STRETCH);
        let mut cadence = Cadence::default();
        let mut at = Instant::now();
        for cost in [10, 10, 900_000, 10, 10] {
            let spent = Spent { at, cost: Duration::from_micros(cost), failed: None };
            cadence.read(Paced::Power, &gpu(), spent, TERMS);
            at += MIN_INTERVAL;
            assert!(cadence.due(Paced::Power, &gpu(), at), "after {cost} us");
        }
    }

    #[test]
    fn what_failed_is_asked_for_again_soon_and_what_is_not_there_is_not() {
        let rest = |failed| rest(Paced::Energy, Duration::ZERO, false, failed, TERMS);
        assert_eq!(rest(Some(Absence::Failed)), MIN_INTERVAL);
        assert_eq!(rest(Some(Absence::NotSupported)), MIN_INTERVAL * 24);
        assert_eq!(rest(None), MIN_INTERVAL * 24);
    }
}
