use std::time::Duration;

use super::*;
use crate::TenantKind;

const GIB: u64 = 1 << 30;

fn tenant(name: &str) -> Tenant {
    Tenant::plain(TenantKind::Docker, name)
}

fn moment(second: u64, available: Option<u64>, places: &[(&str, Option<u64>, u64)]) -> HostMoment {
    let of = |(name, limit, held): &(&str, Option<u64>, u64)| TenantMemory {
        tenant: tenant(name),
        pinned: 0,
        places: vec![Place { path: format!("/{name}"), limit: *limit, held: *held }],
    };
    HostMoment {
        taken: Duration::from_secs(second),
        memory: available.map(|available| HostMemory { total: 512 * GIB, available }),
        tenants: places.iter().map(of).collect(),
        kills: Kills::default(),
    }
}

/// The first second at which the risk within a minute is a half or more.
fn warned(seconds: u64, moment: impl Fn(u64) -> HostMoment) -> Option<u64> {
    let mut memory = Memory::default();
    (0..seconds).find(|second| {
        let forecast = memory.advance(&moment(*second));
        forecast.tenants.iter().any(|of| of.memory.risk[WARN] >= 0.5)
    })
}

#[test]
fn a_leak_into_its_limit_is_warned_of_half_a_minute_before_it_and_given_a_time() {
    // A tenth of a GiB a second from the second minute on: 64 GiB are full at 700 s.
    let held = |second: u64| 4 * GIB + second.saturating_sub(100) * GIB / 10;
    let at = warned(700, |second| moment(second, Some(400 * GIB), &[("leak", Some(64 * GIB), held(second))]));
    let at = at.expect("a warning");
    assert!((600..670).contains(&at), "{at}");
    let mut memory = Memory::default();
    let last = (0..=600).map(|second| {
        memory.advance(&moment(second, Some(400 * GIB), &[("leak", Some(64 * GIB), held(second))]))
    });
    let leak = last.last().unwrap().tenants.remove(0);
    let time = leak.memory.exhaustion.expect("it grows");
    assert!((90.0..110.0).contains(&time.seconds), "{time:?}");
    assert!(time.low < time.seconds && time.seconds < time.high);
}

#[test]
fn one_that_stands_at_its_limits_edge_is_left_alone() {
    let held = |second: u64| 63 * GIB + (second * 7919 % 97) * GIB / 1000;
    assert_eq!(
        warned(3600, |second| moment(second, Some(400 * GIB), &[("full", Some(64 * GIB), held(second))])),
        None
    );
}

#[test]
fn without_a_limit_the_host_is_the_bound() {
    let held = |second: u64| 4 * GIB + second.saturating_sub(100) * GIB / 10;
    let at = |available: fn(u64) -> u64| {
        warned(700, |second| moment(second, Some(available(held(second))), &[("leak", None, held(second))]))
    };
    assert!(at(|held| 64 * GIB - held).is_some_and(|at| (600..670).contains(&at)));
    assert_eq!(at(|held| 500 * GIB - held), None);
}

#[test]
fn unknown_is_absent() {
    let mut memory = Memory::default();
    let mut last = HostForecast::default();
    for second in 0..60 {
        last = memory.advance(&moment(second, None, &[("free", None, GIB), ("bound", Some(2 * GIB), GIB)]));
    }
    assert_eq!(last.node, None);
    let names: Vec<&str> = last.tenants.iter().map(|of| of.tenant.name.as_str()).collect();
    assert_eq!(names, ["docker:bound"], "nobody knows what bounds the other");
}

#[test]
fn one_reading_counts_once() {
    let mut memory = Memory::default();
    for second in 0..120 {
        memory.advance(&moment(second, Some(400 * GIB), &[("leak", Some(64 * GIB), second * GIB / 10)]));
    }
    let before = memory.clone();
    let again = moment(119, Some(400 * GIB), &[("leak", Some(64 * GIB), 119 * GIB / 10)]);
    (0..60).for_each(|_| drop(memory.advance(&again)));
    assert_eq!(memory, before);
}

#[test]
fn memory_of_a_tenant_is_fixed() {
    let many = |second: u64| HostMoment {
        taken: Duration::from_secs(second),
        memory: None,
        tenants: vec![TenantMemory {
            tenant: tenant("many"),
            pinned: 0,
            places: (0..100)
                .map(|place| Place { path: format!("/{place}"), limit: None, held: second })
                .collect(),
        }],
        kills: Kills::default(),
    };
    let mut memory = Memory::default();
    (0..10).for_each(|second| drop(memory.advance(&many(second))));
    assert_eq!(memory.tenants[&tenant("many")].places.len(), PLACES);
}

/// A leak into its limit of 64 GiB, killed there with its tenant or not.
fn leaked(killed: bool) -> HostForecast {
    let held = |second: u64| 4 * GIB + second.saturating_sub(100) * GIB / 10;
    let mut memory = Memory::default();
    let mut last = HostForecast::default();
    for second in 0..=1100 {
        let places = [("leak", Some(64 * GIB), held(second.min(695)))];
        // Stopped short of the limit it frees all; killed there it is gone.
        let places = if second < 700 { &places[..] } else { &[] };
        let kills = Kills {
            by_tenant: BTreeMap::from([(tenant("leak"), u64::from(killed && second >= 700))]),
            of_host: 0,
        };
        last = memory.advance(&HostMoment { kills, ..moment(second, Some(400 * GIB), places) });
        if second == 690 {
            let [warning] = &last.warnings[..] else { panic!("{:?}", last.warnings) };
            assert_eq!(warning.tenant, Some(tenant("leak")));
            assert_eq!(warning.warning.severity, Severity::Critical);
            assert_eq!(last.limit_warnings, [WarningCounts::default(); 2]);
        }
    }
    last
}

#[test]
fn a_warning_comes_true_with_a_kill_at_its_limit_and_outlives_its_tenant() {
    let kept = |came_true, cleared| [WarningCounts { came_true, cleared }; 2];
    let killed = leaked(true);
    assert_eq!((killed.limit_warnings, killed.host_warnings), (kept(1, 0), kept(0, 0)));
    assert_eq!((killed.warnings, killed.tenants), (Vec::new(), Vec::new()));
    assert_eq!(leaked(false).limit_warnings, kept(0, 1));
}

#[test]
fn the_hosts_warning_names_who_grows_and_comes_true_with_anybodys_kill() {
    let used = |second: u64| (second.saturating_sub(100) * GIB / 2).min(300 * GIB);
    let mut memory = Memory::default();
    for second in 0..=720 {
        let places = [("leak", None, used(second)), ("still", None, 2 * GIB)];
        let kills = Kills { of_host: u64::from(second >= 700), ..Kills::default() };
        let forecast =
            memory.advance(&HostMoment { kills, ..moment(second, Some(301 * GIB - used(second)), &places) });
        if second == 690 {
            let host = forecast.warnings.iter().find(|of| of.tenant.is_none()).expect("the host's");
            assert_eq!(host.warning.driver, Some(tenant("leak")));
        }
        if second == 720 {
            assert_eq!(forecast.host_warnings.map(|of| (of.came_true, of.cleared)), [(1, 0); 2]);
            assert_eq!(forecast.limit_warnings, [WarningCounts::default(); 2], "nobody of these was killed");
        }
    }
}

#[test]
fn kills_are_sorted_by_what_ran_out() {
    let kills = BTreeMap::from([
        ((Some(tenant("a")), Some(Scope::Memcg)), 2),
        ((Some(tenant("a")), Some(Scope::Global)), 1),
        ((Some(tenant("a")), Some(Scope::Cpuset)), 9),
        ((Some(tenant("b")), None), 1),
        ((None, Some(Scope::Global)), 4),
    ]);
    let sorted = Kills::of(&kills);
    assert_eq!(sorted.by_tenant, BTreeMap::from([(tenant("a"), 3), (tenant("b"), 1)]));
    assert_eq!(sorted.of_host, 5);
}
