use std::time::Duration;

use super::*;
use crate::TenantKind;
use crate::risk::{GpuMemory, GpuMoment, Holding, TenantMoment};

const GIB: u64 = 1 << 30;
const LIMIT: u64 = 100 * GIB;

fn gpu() -> GpuId {
    GpuId::from_nvml("GPU-a")
}

fn tenant() -> Tenant {
    Tenant::plain(TenantKind::Docker, "leak")
}

/// One tenant that holds so much and has failed so often, second by second.
fn run(levels: impl IntoIterator<Item = (u64, u64)>) -> Vec<Moment> {
    let mut peak = 0;
    levels
        .into_iter()
        .enumerate()
        .map(|(second, (live, failures))| {
            let at = Duration::from_secs(second as u64);
            peak = peak.max(live);
            let memory = GpuMemory { limit: LIMIT, reserved: None, used: live, free: LIMIT - live };
            let holding = Holding {
                live,
                peak,
                allocated: live,
                allocations: second as u64,
                failures,
                ..Holding::on(gpu())
            };
            let tenant =
                TenantMoment { tenant: tenant(), holdings: vec![holding], reclaim_waits: 0, reclaim_ns: 0 };
            let gpu = GpuMoment { gpu: gpu(), polled: at, memory: Some(memory) };
            Moment { at, gpus: vec![gpu], tenants: vec![tenant], host: None }
        })
        .collect()
}

fn scored(moments: &[Moment]) -> BTreeMap<Rule, Score> {
    let mut scorer = Scorer::new(&Rule::ALL);
    for moment in moments {
        scorer.advance(moment);
    }
    scorer.finish(&Truth { drivers: vec![tenant()], began: Vec::new() }).into_iter().collect()
}

/// Ten minutes of nothing, then a leak of a fifth of a GiB a second into the wall.
fn leak() -> Vec<Moment> {
    let leak = (0..320u64).map(|second| {
        let live = (40 * GIB + second * GIB / 5).min(LIMIT - GIB / 5);
        (live, u64::from(second >= 300))
    });
    run(std::iter::repeat_n((40 * GIB, 0), 600).chain(leak))
}

#[test]
fn a_leak_is_one_event_that_built_up_and_was_warned_of() {
    let scores = scored(&leak());
    let risk = &scores[&Rule::Risk];
    assert_eq!(risk.events.len(), 1);
    assert!(risk.events[0].built_up);
    assert!(risk.events[0].lead.is_some(), "{:?}", risk.events[0]);
    assert_eq!(risk.events[0].driver_right, Some(true));
    assert_eq!(risk.false_warnings, 0);
    // It fills 95 % fifteen seconds before the end.
    assert_eq!(scores[&Rule::Used { percent: 95 }].events[0].lead, None);
}

#[test]
fn steady_memory_is_a_false_warning_for_a_threshold_and_not_for_a_forecast() {
    let scores = scored(&run(std::iter::repeat_n((96 * GIB, 0), 3600)));
    assert_eq!(scores[&Rule::Used { percent: 95 }].false_warnings, 1);
    assert_eq!(scores[&Rule::Risk].false_warnings, 0);
    assert!(scores[&Rule::Risk].brier() < scores[&Rule::Used { percent: 95 }].brier());
}

#[test]
fn one_request_too_large_came_without_notice() {
    let steady = std::iter::repeat_n((60 * GIB, 0), 900);
    let scores = scored(&run(steady.chain(std::iter::repeat_n((60 * GIB, 1), 60))));
    assert_eq!(scores[&Rule::Risk].events.len(), 1);
    assert!(!scores[&Rule::Risk].events[0].built_up);
}

#[test]
fn rules_are_read_by_the_names_they_are_shown_by() {
    for rule in Rule::ALL {
        assert_eq!(rule.to_string().parse(), Ok(rule));
    }
    for wrong in ["used>0%", "used>100%", "linear-m", "linear-99m", "", "risk "] {
        assert!(wrong.parse::<Rule>().is_err(), "{wrong}");
    }
}
