//! Owns the account of what was sent, what will never arrive and why, and which attempts failed.
//! Refuses reasons that are not in its lists: they are label values.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use cotenant_model::view::OtlpView;

use super::settings::Signal;

/// Why something will never arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dropped {
    /// Older things made room for newer ones; with delta temporality, series of tenants that are gone for those that are there.
    QueueFull,
    /// The receiver will not take it, now or later.
    Refused,
    /// The receiver took the request without these.
    Rejected,
    /// It could not be delivered for half an hour.
    TooOld,
    /// The agent stopped first.
    Stopped,
    /// With delta temporality: levels of a failed export, which newer ones replace.
    Superseded,
    /// Slow calls beyond the configured rate.
    SampledOut,
}

impl Dropped {
    const ALL: [Self; 7] = [
        Self::QueueFull,
        Self::Refused,
        Self::Rejected,
        Self::TooOld,
        Self::Stopped,
        Self::Superseded,
        Self::SampledOut,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Refused => "refused",
            Self::Rejected => "rejected",
            Self::TooOld => "too_old",
            Self::Stopped => "stopped",
            Self::Superseded => "superseded",
            Self::SampledOut => "sampled_out",
        }
    }
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Unreachable,
    /// The two sides did not agree on who they are.
    Tls,
    Timeout,
    /// The receiver asked for patience.
    Throttled,
    /// The receiver cannot at the moment.
    Unavailable,
    Refused,
}

impl Failure {
    const ALL: [Self; 6] =
        [Self::Unreachable, Self::Tls, Self::Timeout, Self::Throttled, Self::Unavailable, Self::Refused];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Throttled => "throttled",
            Self::Unavailable => "unavailable",
            Self::Refused => "refused",
        }
    }
}

/// Of one signal.
#[derive(Debug)]
pub(super) struct Tally {
    signal: Signal,
    exported: AtomicU64,
    dropped: [AtomicU64; Dropped::ALL.len()],
    failures: [AtomicU64; Failure::ALL.len()],
    pub(super) queued: AtomicU64,
    pub(super) queued_bytes: AtomicU64,
    last_success: Mutex<Option<Instant>>,
}

impl Tally {
    pub(super) fn new(signal: Signal) -> Self {
        Self {
            signal,
            exported: AtomicU64::new(0),
            dropped: Default::default(),
            failures: Default::default(),
            queued: AtomicU64::new(0),
            queued_bytes: AtomicU64::new(0),
            last_success: Mutex::new(None),
        }
    }

    pub(super) fn export(&self, items: u64) {
        self.exported.fetch_add(items, Relaxed);
        if let Ok(mut last) = self.last_success.lock() {
            *last = Some(Instant::now());
        }
    }

    pub(super) fn lose(&self, reason: Dropped, items: u64) {
        self.dropped[reason as usize].fetch_add(items, Relaxed);
    }

    pub(super) fn fail(&self, reason: Failure) {
        self.failures[reason as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn view(&self) -> OtlpView {
        let last = self.last_success.lock().ok().and_then(|last| *last);
        OtlpView {
            signal: self.signal.as_str(),
            exported: self.exported.load(Relaxed),
            dropped: Dropped::ALL
                .iter()
                .map(|reason| (reason.as_str(), self.dropped[*reason as usize].load(Relaxed)))
                .collect(),
            failures: Failure::ALL
                .iter()
                .map(|reason| (reason.as_str(), self.failures[*reason as usize].load(Relaxed)))
                .collect(),
            queued: self.queued.load(Relaxed),
            queued_bytes: self.queued_bytes.load(Relaxed),
            last_success_seconds: last.map(|last| last.elapsed().as_secs_f64()),
        }
    }
}
