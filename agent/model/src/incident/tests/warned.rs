//! Owns the proofs of the tie between incidents and the warnings before them.

use super::*;
use crate::incident::Scarce;
use crate::risk::warning::Severity;

fn note(at: f64, driver: &str, victim: &str) -> WarningNote {
    WarningNote {
        of: Scarce::Gpu { gpu: gpu(1) },
        raised_unix: at,
        severity: Severity::Critical,
        risk: 0.8,
        driver: Some(tenant(driver)),
        victims: vec![tenant(victim)],
        true_unix: None,
    }
}

/// `b` grew by 7 GiB and holds the room; `a` is refused on the first GPU.
fn warned(notes: &[WarningNote], on: u8) -> Vec<Warned> {
    let (mut world, mut failures) = (World::new(), Failures::new(Fold::default()));
    world.tick(|observation, at| {
        observation.failures = vec![refusal(&mut failures, at, "a", on, &[("b", 70 * GIB, 7 << 30)])];
        observation.warnings = notes.to_vec();
    });
    world.one().warnings
}

#[test]
fn an_incident_carries_the_warning_that_stood_on_its_gpu() {
    let [warned] = warned(&[note(T0 - 44.0, "b", "a")], 1).try_into().unwrap();
    assert!((warned.lead_seconds - 45.0).abs() < 0.1, "{warned:?}");
    assert_eq!((warned.driver_right, warned.victim_right), (Some(true), Some(true)));
    assert_eq!(warned.severity, Severity::Critical);
}

#[test]
fn wrong_names_are_said_to_be_wrong() {
    let [warned] = warned(&[note(T0 - 44.0, "c", "c")], 1).try_into().unwrap();
    assert_eq!((warned.driver_right, warned.victim_right), (Some(false), Some(false)));
}

#[test]
fn a_warning_elsewhere_or_afterwards_is_not_this_incidents() {
    assert_eq!(warned(&[note(T0 - 44.0, "b", "a")], 2), []);
    assert_eq!(warned(&[note(T0 + 5.0, "b", "a")], 1), []);
}

#[test]
fn a_kill_carries_the_warning_of_the_memory_it_was_for() {
    let of = |memory: Scarce, raised_unix: f64| WarningNote { of: memory, ..note(raised_unix, "a", "a") };
    let limit = |name: &str| Scarce::Limit { tenant: tenant(name) };
    let notes = [
        of(limit("a"), T0 - 44.0),
        of(limit("b"), T0 - 9.0),
        of(Scarce::Host, T0 - 30.0),
        note(T0 - 5.0, "a", "a"),
    ];
    let mut world = World::new();
    world.tick(|observation, at| {
        observation.kills = vec![kill(at, "a", None, Some("/a"))];
        observation.warnings = notes.to_vec();
    });
    let incident = world.one();
    let [warned] = &incident.warnings[..] else { panic!("{:?}", incident.warnings) };
    assert_eq!(warned.of, limit("a"));
    assert!((warned.lead_seconds - 45.0).abs() < 0.1, "{warned:?}");
    // A kill says nothing of who filled it.
    assert_eq!((warned.driver_right, warned.victim_right), (None, None));
    let words = crate::explain::explain(&incident).to_string();
    assert!(
        words.contains("docker:a fills the host memory it may hold was warned of 45.0 s before"),
        "{words}"
    );

    let mut world = World::new();
    world.tick(|observation, at| {
        observation.kills = vec![KillNote { scope: KillScope::Node, ..kill(at, "c", None, None) }];
        observation.warnings = notes.to_vec();
    });
    let incident = world.one();
    assert_eq!(incident.warnings.iter().map(|warned| &warned.of).collect::<Vec<_>>(), [&Scarce::Host]);
    let words = crate::explain::explain(&incident).to_string();
    assert!(words.contains("this host runs out of memory was warned of 31.0 s before"), "{words}");
    assert!(words.contains("docker:a grew fastest"), "{words}");
}

#[test]
fn a_kill_is_not_told_of_a_warning_that_came_true_by_another_or_came_after_it() {
    let of = |raised_unix: f64, true_unix: Option<f64>| WarningNote {
        of: Scarce::Limit { tenant: tenant("a") },
        true_unix,
        ..note(raised_unix, "a", "a")
    };
    let told = |before: WarningNote| {
        let mut world = World::new();
        // Without the kernel's log nobody says what ran out.
        let kill = |at: f64| KillNote { scope: KillScope::Unknown, ..kill(at, "a", None, Some("/a")) };
        world.tick(|observation, at| observation.kills = vec![kill(at - 0.5)]);
        world.tick(|observation, at| {
            (observation.kills, observation.warnings) = (vec![kill(at)], vec![before.clone()]);
        });
        world.one().warnings
    };
    assert_eq!(told(of(T0 - 900.0, Some(T0 - 60.0))), []);
    let [warned] = &told(of(T0 - 900.0, Some(T0 + 1.9)))[..] else { panic!("its own, a tick late") };
    assert!((warned.lead_seconds - 900.5).abs() < 0.1, "{warned:?}");
    // Raised between two kills: of the second.
    let [warned] = &told(of(T0 + 1.0, None))[..] else { panic!("of the second") };
    assert!((warned.lead_seconds - 1.0).abs() < 0.1, "{warned:?}");
}
