//! Owns the tie between an incident and the warning before it: when it was raised, whom it named, and whether rightly.
//! Refuses to judge a name where nothing says who it was: verdicts do of refusals, nobody does of kills.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{KillNote, KillScope};
use crate::risk::warning::{Severity, Warning};
use crate::verdict::{FailureRecord, VerdictKind};
use crate::{GpuId, Tenant};

/// What an event may be told of later than the forecast saw it, in seconds.
const LATE: f64 = 5.0;

/// The memory that a warning says will run out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "memory", rename_all = "snake_case")]
pub enum Scarce {
    Gpu {
        gpu: GpuId,
    },
    /// What a tenant may hold of the host's: its memory cgroup's limit, or what the host has.
    Limit {
        tenant: Tenant,
    },
    Host,
}

impl Scarce {
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Gpu { .. } => "gpu",
            Self::Limit { .. } => "limit",
            Self::Host => "host",
        }
    }

    /// Whether this is what the kernel killed for.
    pub(super) fn killed(&self, kill: &KillNote) -> bool {
        match self {
            Self::Gpu { .. } => false,
            // Without a limit the host is the bound; without the kernel's log nobody says which it was.
            Self::Limit { tenant } => kill.scope != KillScope::Numa && kill.victim == *tenant,
            Self::Host => kill.scope == KillScope::Node,
        }
    }
}

/// A warning that stands.
#[derive(Clone, Debug, PartialEq)]
pub struct WarningNote {
    pub of: Scarce,
    pub raised_unix: f64,
    pub severity: Severity,
    /// The probability that was said, of running out within the minute.
    pub risk: f64,
    pub driver: Option<Tenant>,
    pub victims: Vec<Tenant>,
    /// When it came true, if it did: it stands on for a while.
    pub true_unix: Option<f64>,
}

impl WarningNote {
    /// `ago` seconds before `now_unix`.
    pub fn new(of: Scarce, warning: &Warning, now: f64, now_unix: f64) -> Self {
        Self {
            of,
            raised_unix: now_unix - (now - warning.raised),
            severity: warning.severity,
            risk: warning.risk,
            driver: warning.driver.clone(),
            victims: warning.victims.clone(),
            true_unix: warning.came_true.map(|then| now_unix - (now - then)),
        }
    }

    /// Whether it was of this event: raised before it, and not come true by an earlier one.
    pub(super) fn foretold(&self, at_unix: f64) -> bool {
        self.raised_unix < at_unix && self.true_unix.is_none_or(|then| at_unix <= then + LATE)
    }
}

/// A warning that came before this incident.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Warned {
    #[serde(flatten)]
    pub of: Scarce,
    pub raised_unix: f64,
    /// From the warning to the first refusal on that GPU, or the first kill.
    pub lead_seconds: f64,
    pub severity: Severity,
    pub risk: f64,
    pub driver: Option<Tenant>,
    /// Whether the refusals' verdicts blame it. `None`: it named nobody, or they blame nobody, as kills do.
    pub driver_right: Option<bool>,
    /// The first one was expected to be refused first.
    pub victims: Vec<Tenant>,
    /// Whether the first one refused was among them. `None`: nobody was named, or it is the limit's own tenant.
    pub victim_right: Option<bool>,
}

/// The warnings of an incident, held against its refusals and kills.
pub(super) fn judge(
    warnings: &BTreeMap<Scarce, WarningNote>,
    failures: &BTreeMap<u64, FailureRecord>,
    kills: &[KillNote],
) -> Vec<Warned> {
    let told = |note: &WarningNote, first_unix: f64| Warned {
        of: note.of.clone(),
        raised_unix: note.raised_unix,
        lead_seconds: (first_unix - note.raised_unix).max(0.0),
        severity: note.severity,
        risk: note.risk,
        driver: note.driver.clone(),
        driver_right: None,
        victims: note.victims.clone(),
        victim_right: None,
    };
    let judged = |note: &WarningNote| match &note.of {
        Scarce::Gpu { gpu } => {
            let here = || failures.values().filter(|record| record.gpu.as_ref() == Some(gpu));
            let after = here().filter(|record| record.first_unix > note.raised_unix);
            let first = after.min_by(|one, two| one.first_unix.total_cmp(&two.first_unix))?;
            Some(Warned {
                driver_right: note.driver.as_ref().and_then(|driver| blamed(driver, here())),
                victim_right: (!note.victims.is_empty()).then(|| note.victims.contains(&first.tenant)),
                ..told(note, first.first_unix)
            })
        }
        memory => {
            let killed = kills.iter().filter(|kill| memory.killed(kill)).map(|kill| kill.at_unix);
            let after = killed.filter(|at| *at > note.raised_unix);
            Some(told(note, after.min_by(f64::total_cmp)?))
        }
    };
    warnings.values().filter_map(judged).collect()
}

/// Whether the verdicts hold this tenant responsible; `None` where they hold nobody.
fn blamed<'a>(driver: &Tenant, records: impl Iterator<Item = &'a FailureRecord>) -> Option<bool> {
    let mut blamed = None;
    for record in records {
        let right = match record.verdict.kind {
            VerdictKind::Own => record.tenant == *driver,
            // Who drives it may be refused itself, for room that its neighbours hold.
            VerdictKind::Neighbour => {
                record.tenant == *driver
                    || record.verdict.culprits().iter().any(|(culprit, _)| *culprit == driver)
            }
            _ => continue,
        };
        blamed = Some(right || blamed == Some(true));
    }
    blamed
}
