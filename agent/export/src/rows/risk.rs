//! Owns the rows of the forecast: risk, time to exhaustion, shares, victims, headroom, and how often it came true.
//! Refuses a time where nothing grows: the series is not there.

use std::collections::BTreeSet;

use cotenant_model::Tenant;
use cotenant_model::risk::warning::{Severity, WarningCounts};
use cotenant_model::risk::{Calibration, GpuForecast, HORIZON_NAMES, quota};
use cotenant_model::view::View;

use super::tenant::tenant_labels;
use super::{Labels, Sheet};
use crate::Id;
use crate::catalogue::attributes::{
    FORECAST, FORECAST_OUTCOME, HEADROOM_PART, HORIZON, HW_ID, MIG_PROFILE, SEVERITY, WARNING_OUTCOME,
};
use crate::label::clean_tenant;

/// What was said, as words: a label that is a number is taken for one.
const FORECASTS: [&str; Calibration::BINS] =
    ["up_to_20_percent", "up_to_40_percent", "up_to_60_percent", "up_to_80_percent", "up_to_100_percent"];

pub(super) fn write(sheet: &mut Sheet, view: &View) {
    // A tenant's series go with it.
    let known: BTreeSet<&Tenant> = view.tenants.iter().map(|of| &of.tenant).collect();
    for gpu in &view.risk.gpus {
        let on = Labels::default().with(HW_ID, gpu.gpu.as_str());
        for (horizon, risk) in HORIZON_NAMES.into_iter().zip(gpu.risk) {
            sheet.put(Id::ReclaimRisk, on.clone().with(HORIZON, horizon), risk);
        }
        if let Some(time) = gpu.exhaustion {
            sheet.put(Id::ExhaustionTime, on.clone(), time.seconds);
            sheet.put(Id::ExhaustionTimeLow, on.clone(), time.low);
            sheet.put(Id::ExhaustionTimeHigh, on.clone(), time.high);
        }
        let managed = (gpu.headroom.managed > 0).then_some(gpu.headroom.managed);
        let parts = [("free", Some(gpu.headroom.free)), ("pool", gpu.headroom.pool), ("managed", managed)];
        for (part, bytes) in parts {
            if let Some(bytes) = bytes {
                sheet.put(Id::MemoryHeadroom, on.clone().with(HEADROOM_PART, part), bytes);
            }
        }
        tenants(sheet, gpu, &known);
        calibration(sheet, &on, &gpu.calibration);
        warnings(sheet, Id::ReclaimRiskWarnings, &on, &gpu.warnings);
    }
}

/// What became of warnings that are decided.
pub(super) fn warnings(
    sheet: &mut Sheet,
    id: Id,
    on: &Labels,
    counts: &[WarningCounts; Severity::ALL.len()],
) {
    for (severity, counts) in Severity::ALL.into_iter().zip(counts) {
        let of = on.clone().with(SEVERITY, severity.as_str());
        for (outcome, count) in [("exhausted", counts.came_true), ("cleared", counts.cleared)] {
            sheet.put(id, of.clone().with(WARNING_OUTCOME, outcome), count);
        }
    }
}

fn tenants(sheet: &mut Sheet, gpu: &GpuForecast, known: &BTreeSet<&Tenant>) {
    let of = |tenant: &Tenant| {
        let clean = clean_tenant(tenant);
        let tenant = clean.as_ref().unwrap_or(tenant);
        known.contains(tenant).then(|| tenant_labels(Labels::default(), tenant).with(HW_ID, gpu.gpu.as_str()))
    };
    let cuts = quota::profiles(gpu.headroom.limit);
    for tenant in &gpu.tenants {
        let Some(labels) = of(&tenant.tenant) else { continue };
        sheet.put(Id::ReclaimRiskShare, labels.clone(), tenant.share);
        for (horizon, growth) in HORIZON_NAMES.into_iter().zip(tenant.growth) {
            sheet.put(Id::TenantGrowth, labels.clone().with(HORIZON, horizon), growth.p90);
        }
        // Members' quotas are no quota of all of them.
        if tenant.tenant == Tenant::other() {
            continue;
        }
        let labels = match cuts.iter().find(|cut| cut.bytes >= tenant.quota) {
            Some(profile) => labels.with(MIG_PROFILE, &profile.name),
            None => labels,
        };
        sheet.put(Id::TenantQuota, labels, tenant.quota);
    }
    for labels in gpu.victims.iter().filter_map(of) {
        sheet.put(Id::ReclaimRiskVictim, labels, true);
    }
}

fn calibration(sheet: &mut Sheet, on: &Labels, Calibration(kept): &Calibration) {
    for (horizon, bins) in HORIZON_NAMES.into_iter().zip(kept) {
        for (bin, kept) in bins.iter().enumerate() {
            let labels = on.clone().with(HORIZON, horizon).with(FORECAST, FORECASTS[bin]);
            let outcomes =
                [("exhausted", kept.true_ones), ("spared", kept.forecasts.saturating_sub(kept.true_ones))];
            for (outcome, count) in outcomes {
                sheet.put(Id::ReclaimRiskForecasts, labels.clone().with(FORECAST_OUTCOME, outcome), count);
            }
        }
    }
}
