//! Owns the tie between an incident and the warning before it: when it was raised, whom it named, and whether rightly.
//! Refuses to judge a name where the verdicts say nothing of it.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::risk::warning::{Severity, Warning};
use crate::verdict::{FailureRecord, VerdictKind};
use crate::{GpuId, Tenant};

/// A warning that stands on a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct WarningNote {
    pub gpu: GpuId,
    pub raised_unix: f64,
    pub severity: Severity,
    /// The probability that was said, of running out within the minute.
    pub risk: f64,
    pub driver: Option<Tenant>,
    pub victims: Vec<Tenant>,
}

impl WarningNote {
    /// `ago` seconds before `now_unix`.
    pub fn of(gpu: &GpuId, warning: &Warning, now: f64, now_unix: f64) -> Self {
        Self {
            gpu: gpu.clone(),
            raised_unix: now_unix - (now - warning.raised),
            severity: warning.severity,
            risk: warning.risk,
            driver: warning.driver.clone(),
            victims: warning.victims.clone(),
        }
    }
}

/// A warning that came before this incident.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Warned {
    pub gpu: GpuId,
    pub raised_unix: f64,
    /// From the warning to the first refusal on that GPU.
    pub lead_seconds: f64,
    pub severity: Severity,
    pub risk: f64,
    pub driver: Option<Tenant>,
    /// Whether the refusals' verdicts blame it. `None`: it named nobody, or they blame nobody.
    pub driver_right: Option<bool>,
    /// The first one was expected to be refused first.
    pub victims: Vec<Tenant>,
    /// Whether the first one refused was among them.
    pub victim_right: Option<bool>,
}

/// The warnings of an incident, by GPU, held against its refusals.
pub(super) fn judge(
    warnings: &BTreeMap<GpuId, WarningNote>,
    failures: &BTreeMap<u64, FailureRecord>,
) -> Vec<Warned> {
    let of = |note: &WarningNote| {
        let here = || failures.values().filter(|record| record.gpu.as_ref() == Some(&note.gpu));
        let first = here().min_by(|one, two| one.first_unix.total_cmp(&two.first_unix))?;
        Some(Warned {
            gpu: note.gpu.clone(),
            raised_unix: note.raised_unix,
            lead_seconds: (first.first_unix - note.raised_unix).max(0.0),
            severity: note.severity,
            risk: note.risk,
            driver: note.driver.clone(),
            driver_right: note.driver.as_ref().and_then(|driver| blamed(driver, here())),
            victims: note.victims.clone(),
            victim_right: (!note.victims.is_empty()).then(|| note.victims.contains(&first.tenant)),
        })
    };
    warnings.values().filter_map(of).collect()
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
