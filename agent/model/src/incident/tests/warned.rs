//! Owns the proofs of the tie between incidents and the warnings before them.

use super::*;
use crate::risk::warning::Severity;

fn note(at: f64, driver: &str, victim: &str) -> WarningNote {
    WarningNote {
        gpu: gpu(1),
        raised_unix: at,
        severity: Severity::Critical,
        risk: 0.8,
        driver: Some(tenant(driver)),
        victims: vec![tenant(victim)],
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
