//! Owns the table of situations, each with its verdict.

use super::*;
use crate::TenantKind;
use VerdictKind::Neighbour;

mod situations;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// An H200 as NVML tells it.
const H200: u64 = 150_754_820_096;
const RESERVED: u64 = 645 * MIB;

fn tenant(name: &str) -> Tenant {
    Tenant::plain(TenantKind::Docker, name)
}

fn ask(operation: Operation, requested: u64) -> Ask {
    Ask {
        requested: Some(requested),
        gpu: Some(GpuId::from_uuid([1; 16])),
        process: Some(ProcessId(1)),
        ..Ask::new(tenant("a"), operation, CudaError::OUT_OF_MEMORY)
    }
}

/// Device memory on an H200, everything known: free is what is left, nobody grew.
fn h200(requested: u64, own: u64, others: &[(&str, u64)]) -> Ask {
    let held: u64 = others.iter().map(|(_, bytes)| *bytes).sum();
    Ask {
        capacity: Some(H200),
        reserved: Some(RESERVED),
        free: Some(H200 - RESERVED - own - held),
        free_age_seconds: Some(0.5),
        own_live: Some(own),
        own_cached: Some(0),
        own_growth: Some(0),
        holders: Some(others.iter().map(|(name, bytes)| (tenant(name), *bytes)).collect()),
        growth: Some(Vec::new()),
        ..ask(Operation::MemAlloc, requested)
    }
}

#[allow(clippy::unnecessary_wraps, reason = "the shape of the field")]
fn limit(bytes: u64, source: LimitSource, scope: LimitScope) -> Option<Limit> {
    Some(Limit { bytes, source, scope, used: None })
}

#[test]
fn c104_verdicts_of_scripted_situations() {
    let situations = situations::all();
    assert!(situations.len() >= 40, "{}", situations.len());
    let mut wrong = Vec::new();
    for (name, ask, kind, certainty) in &situations {
        let verdict = judge(ask).expect(name);
        if (verdict.kind, verdict.certainty) != (*kind, *certainty) {
            wrong
                .push(format!("{name}: {:?} {:?}\n  {:?}", verdict.kind, verdict.certainty, verdict.because));
        }
        assert!(!verdict.because.is_empty(), "{name}: no reason");
        assert!(
            verdict.holders.iter().all(|holder| holder.tenant != ask.tenant),
            "{name}: blames itself by name"
        );
        let shares: f64 = verdict.culprits().iter().map(|(_, share)| share).sum();
        assert!(shares <= 1.0 + 1e-9, "{name}: {shares}");
        assert_eq!(verdict.culprits().is_empty(), verdict.kind != Neighbour, "{name}: culprits");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn c59_codes_that_are_not_refusals_have_no_verdict() {
    let cases = [
        (Operation::PrimaryCtxRelease, 4, "every exit"),
        (Operation::MemCreate, 800, "PyTorch probes handle types"),
        (Operation::MemCreate, 801, "not supported"),
        (Operation::MemAlloc, 1, "invalid value"),
        (Operation::MemAlloc, 201, "no context"),
        (Operation::MemAlloc, 700, "an earlier fault of the program"),
        (Operation::MemFree, 2, "a free takes nothing"),
        (Operation::Init, 2, "not an allocation"),
    ];
    for (operation, code, why) in cases {
        let ask = Ask { error: CudaError(code), operation, ..h200(GIB, GIB, &[("b", 138 * GIB)]) };
        assert_eq!(judge(&ask), None, "{why}");
    }
    let refused = Ask { operation: Operation::MemCreate, ..h200(20 * MIB, GIB, &[("b", 138 * GIB)]) };
    assert!(judge(&refused).is_some());
}

#[test]
fn every_operation_is_sorted() {
    let taking = Operation::ALL.iter().filter(|operation| Arena::of(**operation).is_some()).count();
    assert_eq!(taking, 21);
    for operation in Operation::ALL {
        let frees = operation.as_str().contains("Free")
            || operation.as_str().contains("Release")
            || operation.as_str().contains("Destroy")
            || operation.as_str().contains("Unmap");
        assert!(!(frees && Arena::of(*operation).is_some()), "{operation:?}");
    }
}

#[test]
fn holders_and_growers_are_named_and_bounded() {
    let others: Vec<(Tenant, u64)> =
        (0..40).map(|n| (tenant(&format!("t{n:02}")), (n + 1) * GIB / 8)).collect();
    let growth = vec![
        (tenant("t00"), (GIB / 8).cast_signed()),
        (tenant("late"), 9 * GIB.cast_signed()),
        (tenant("a"), 50),
    ];
    let verdict = judge(&Ask {
        capacity: Some(128 * GIB),
        reserved: Some(0),
        free: Some(GIB),
        holders: Some(others),
        growth: Some(growth),
        own_live: Some(20 * GIB),
        ..ask(Operation::MemAlloc, 5 * GIB)
    })
    .unwrap();
    assert_eq!(verdict.kind, Neighbour);
    assert_eq!(verdict.holders.len(), NAMED);
    assert_eq!(verdict.holders[0].tenant, tenant("t39"), "largest first");
    let names: Vec<_> = verdict.holders.iter().map(|holder| holder.tenant.name.as_str()).collect();
    assert!(names.contains(&"docker:t00") && names.contains(&"docker:late"), "growers too: {names:?}");
    let culprits = verdict.culprits();
    assert_eq!(culprits[0].0, &tenant("late"), "who grew most comes first");
    assert_eq!(culprits.len(), 2);
    let late = verdict.holders.iter().find(|holder| holder.tenant == tenant("late")).unwrap();
    assert_eq!(
        (late.bytes, late.grew),
        (None, Some(9 * GIB.cast_signed())),
        "what it holds is unknown, not 0"
    );
}

#[test]
fn unknown_growth_is_not_zero_growth() {
    let verdict = judge(&Ask { growth: None, ..h200(10 * GIB, GIB, &[("b", 130 * GIB)]) }).unwrap();
    assert_eq!(verdict.holders[0].grew, None);
    let verdict = judge(&h200(10 * GIB, GIB, &[("b", 130 * GIB)])).unwrap();
    assert_eq!(verdict.holders[0].grew, Some(0));
}

#[test]
fn hostile_sizes_do_not_overflow() {
    for requested in [0, 1, u64::MAX - 1, u64::MAX] {
        for free in [None, Some(0), Some(u64::MAX)] {
            for held in [0, u64::MAX] {
                let ask = Ask {
                    free,
                    own_live: Some(held),
                    own_cached: Some(held),
                    holders: Some(vec![(tenant("b"), held), (tenant("c"), held)]),
                    growth: Some(vec![
                        (tenant("b"), i64::MAX),
                        (tenant("c"), i64::MAX),
                        (tenant("c"), i64::MIN),
                    ]),
                    limit: limit(1, LimitSource::Mps, LimitScope::Tenant),
                    own_processes: vec![(ProcessId(2), held), (ProcessId(3), held)],
                    ..ask(Operation::MemAlloc, requested)
                };
                assert!(judge(&ask).is_some());
                assert!(judge(&Ask { limit: None, ..ask }).is_some());
            }
        }
    }
}

#[test]
fn near_miss_stays_with_the_verdict() {
    let miss = NearMiss { after_seconds: 0.1, freed: None };
    let verdict = judge(&Ask { retried: Some(miss), ..h200(10 * GIB, GIB, &[("b", 130 * GIB)]) }).unwrap();
    assert_eq!((verdict.kind, verdict.near_miss), (Neighbour, Some(miss)));
}
