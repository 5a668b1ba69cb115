//! Owns the proofs that nothing grows without end, and that what is cut is counted.

use super::*;

#[test]
fn ten_thousand_observations_stay_bounded() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    for n in 0..10_000_u32 {
        let (victim, culprit) = (format!("v{}", n % 700), format!("c{}", n % 900));
        let on = u8::try_from(n % 200).unwrap();
        let mut records = Vec::new();
        if n % 3 == 0 {
            records = vec![refusal(&mut failures, world.at, &victim, on, &[(&culprit, 78 * GIB, 0)])];
        }
        world.tick(|observation, at| {
            observation.waits =
                vec![wait(&victim, by(&culprit), on, 0.6), api_wait(&victim, by(&culprit), on, 0.001)];
            observation.failures = records;
            if n % 7 == 0 {
                observation.kills = vec![kill(at, &victim, Some(on), Some(&format!("/limit{n}")))];
            }
            if n % 11 == 0 {
                observation.xids = vec![xid(at, on, n, false)];
            }
            observation.movements =
                vec![Movement { tenant: tenant(&victim), gpu: gpu(on), bytes: i64::from(n) << 24 }];
        });
        assert!(world.incidents.len() <= 256);
        assert!(world.incidents.watched() <= 4096);
    }
    let all = world.all();
    assert_eq!(all.len(), 256, "full, and not above");
    for incident in &all {
        assert!(incident.victims.len() <= 16 && incident.culprits.len() <= 16);
        assert!(
            incident.evidence.len() <= 5 * 32 && incident.timeline.len() <= 32 && incident.chains.len() <= 16
        );
    }
    let ids: std::collections::BTreeSet<_> = all.iter().map(|incident| incident.id).collect();
    assert_eq!(ids.len(), all.len(), "ids are not reused");
}

#[test]
fn more_tenants_than_are_listed_are_counted_and_the_sum_stays_right() {
    let mut world = World::new();
    let rows: Vec<_> =
        (0..100).map(|n| wait("a", by(&format!("c{n:03}")), 1, 0.01 + f64::from(n) / 1e4)).collect();
    let total: f64 = rows.iter().map(|row| row.seconds).sum();
    world.waits(rows);
    let incident = world.one();
    assert_eq!(incident.culprits.len(), 16);
    // 64 are told apart, and the rest is one more.
    assert_eq!((incident.unlisted.culprits, incident.unlisted.rows), (64 + 1 - 16, 36));
    assert_eq!(incident.culprits[0].tenant, Tenant::other());
    assert_eq!(incident.culprits[1].tenant, tenant("c099"), "the small ones are summed, not the large");
    assert!((incident.wait_shares.unwrap().neighbours - 1.0).abs() < 1e-9);
    assert!((incident.victims[0].blocked_seconds - total).abs() < 1e-9);
    let listed: f64 = incident.culprits.iter().filter_map(|blame| blame.wait_share).sum();
    assert!(listed <= 1.0 + 1e-9);
}

#[test]
fn many_victims_of_one_culprit() {
    let mut world = World::new();
    for _ in 0..3 {
        world.waits((0..100).map(|n| api_wait(&format!("v{n:03}"), by("b"), 1, 0.6)).collect());
    }
    let incident = world.one();
    assert_eq!(incident.victims.len(), 16);
    assert_eq!(incident.unlisted.victims, 64 + 1 - 16);
    assert!((incident.culprits[0].blocked_seconds - 180.0).abs() < 1e-6, "everybody's time is counted");
}

#[test]
fn with_no_room_for_another_open_one_the_loss_is_counted() {
    let mut incidents = Incidents::new(Rules { capacity: 4, ..Rules::default() });
    let kills = (0..10).map(|n| kill(T0, &format!("v{n}"), None, Some(&format!("/limit{n}")))).collect();
    let changes =
        incidents.observe(&Observation { at_unix: T0, elapsed: 1.0, kills, ..Observation::default() });
    assert_eq!(changes.opened.len(), 4);
    assert_eq!((incidents.open(), incidents.losses().incidents), (4, 6));
}

#[test]
fn the_oldest_closed_one_makes_room() {
    let mut incidents = Incidents::new(Rules { capacity: 4, ..Rules::default() });
    let mut opened = Vec::new();
    for n in 0..6_u32 {
        let at_unix = T0 + f64::from(n) * 100.0;
        let kills = vec![kill(at_unix, "v", None, Some("/limit"))];
        opened.extend(
            incidents.observe(&Observation { at_unix, elapsed: 1.0, kills, ..Observation::default() }).opened,
        );
        incidents.observe(&Observation { at_unix: at_unix + 50.0, elapsed: 50.0, ..Observation::default() });
    }
    let ids: Vec<_> = incidents.list(None, None).iter().map(|incident| incident.id).collect();
    assert_eq!(ids, opened.iter().rev().take(4).copied().collect::<Vec<_>>(), "newest first");
    assert_eq!(incidents.find(opened[0]), None);
    assert_eq!(incidents.totals()[&Kind::OomKill], 6, "counters do not forget");
}

#[test]
fn a_tenants_long_names_are_cut() {
    let mut world = World::new();
    world.tick(|observation, at| {
        observation.kills = vec![kill(at, "a", None, Some(&"/x".repeat(100_000)))];
    });
    assert_eq!(world.one().memory_limits[0].len(), 256);
}

#[test]
fn the_same_observations_give_the_same_incidents() {
    let run = || {
        let mut world = World::new();
        let mut failures = Failures::new(Fold::default());
        for n in 0..300_u32 {
            let record = refusal(&mut failures, world.at, "a", 1, &[("b", 40 * GIB, 0), ("c", 40 * GIB, 0)]);
            world.tick(|observation, _| {
                let name = format!("v{}", n % 40);
                observation.waits = vec![wait(&name, by("b"), 1, 0.3), wait(&name, by("c"), 1, 0.3)];
                observation.failures = vec![record];
            });
        }
        world.all()
    };
    assert_eq!(run(), run());
}

/// A small generator, so that the run is the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    fn name(&mut self) -> String {
        format!("t{}", self.roll(9))
    }

    fn gpu(&mut self) -> u8 {
        u8::try_from(self.roll(5)).unwrap()
    }
}

#[test]
fn whatever_comes_the_books_balance() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let mut dice = Dice(7);
    let (mut opened, mut closed, mut merged) = (0, 0, 0);
    for _ in 0..3000 {
        let mut waits = Vec::new();
        for _ in 0..dice.roll(4) {
            let culprit = match dice.roll(8) {
                0 => Culprit::Device,
                1 => Culprit::Unknown,
                2 => Culprit::Kernel,
                _ => by(&dice.name()),
            };
            let mut row = wait(&dice.name(), culprit, dice.gpu(), dice.roll(700) as f64 / 1000.0);
            row.class = WaitClass::ALL[usize::try_from(dice.roll(7)).unwrap()];
            waits.push(row);
        }
        let records = if dice.roll(20) == 0 {
            let (victim, on, culprit) = (dice.name(), dice.gpu(), dice.name());
            vec![refusal(&mut failures, world.at, &victim, on, &[(&culprit, 78 * GIB, 0)])]
        } else {
            Vec::new()
        };
        let (killed, on, pause) = (dice.roll(50) == 0, dice.gpu(), dice.roll(60) == 0);
        let victim = dice.name();
        let changes = world.tick(|observation, at| {
            observation.waits = waits;
            observation.failures = records;
            if killed {
                observation.kills = vec![kill(at, &victim, Some(on), None)];
            }
        });
        opened += changes.opened.len();
        closed += changes.closed.len();
        merged += changes.merged.len();
        if pause {
            closed += world.quiet(45).len();
        }
        assert_eq!(opened - closed - merged, world.incidents.open());
    }
    assert!(closed > 20 && merged > 20, "{opened} {closed} {merged}: a run that tries what it should");
    for incident in world.all() {
        let of = |shares: Option<WaitShares>| {
            shares.map_or(1.0, |s| s.neighbours + s.own + s.device + s.kernel + s.unknown)
        };
        assert!((of(incident.wait_shares) - 1.0).abs() < 1e-6, "{incident:#?}");
        let by_culprits: f64 = incident.culprits.iter().map(|blame| blame.blocked_seconds).sum();
        let of_victims: f64 = incident.victims.iter().map(|victim| victim.neighbour_seconds).sum();
        assert!((by_culprits - of_victims).abs() < 1e-6, "{by_culprits} {of_victims}");
        assert!(
            incident.victims.iter().all(|victim| victim.neighbour_seconds <= victim.blocked_seconds + 1e-9)
        );
        let memory: f64 = incident.culprits.iter().filter_map(|blame| blame.memory_share).sum();
        assert!(memory <= 1.0 + 1e-9);
        assert!(incident.start_unix <= incident.last_unix + 1e-9);
        assert!(crate::explain::headline(&incident).ends_with(")."));
    }
}
