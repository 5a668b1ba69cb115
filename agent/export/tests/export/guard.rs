//! Owns what the cardinality guard promises: a cap, exact sums, and counters that never fall.
//! Refuses luck: tenants come, go, restart and return in every order.

use std::collections::BTreeSet;

use cotenant_export::{Format, Guard, Limits};
use cotenant_model::sample::{Confidence, GpuRef};
use cotenant_model::view::{TenantView, View};
use cotenant_model::{Absence, CudaError, MemoryKind, Operation, Tenant, TenantKind};

use crate::cases::assert_monotone;
use crate::fixture::{MIB, gpu, gpu_id, node, page, pod, samples, tenant};

fn one(name: &str, seed: u64) -> TenantView {
    tenant(pod(name), &[0], seed)
}

fn tick(guard: &mut Guard, tenants: Vec<TenantView>) -> View {
    let mut view = node(vec![gpu(0)], tenants);
    // Kills are counted apart from tenants and outlive them.
    view.events.kills.clear();
    guard.fold(&mut view);
    view
}

fn names(view: &View) -> BTreeSet<&str> {
    view.tenants.iter().map(|view| view.tenant.name.as_str()).collect()
}

fn other(view: &View) -> &TenantView {
    view.tenants.iter().find(|view| view.tenant == Tenant::other()).unwrap()
}

fn device(view: &TenantView) -> cotenant_model::view::MemoryTotals {
    view.memory[&(GpuRef::Known(gpu_id(0)), MemoryKind::Device)]
}

#[test]
fn below_the_cap_nothing_is_folded() {
    let mut guard = Guard::new(Limits::default());
    let view = tick(&mut guard, vec![one("a", 1), one("b", 2)]);
    assert_eq!(names(&view), BTreeSet::from(["pod:ml/a", "pod:ml/b"]));
    assert_eq!(view.agent.tenants_folded, 0);
}

#[test]
fn the_smallest_are_folded_and_sums_are_exact() {
    let mut guard = Guard::new(Limits { max_tenants: 2 });
    let mut late = one("d", 4);
    late.confidence = Confidence::JoinedLate;
    let view = tick(&mut guard, vec![one("a", 1), one("big", 50), one("c", 30), late]);
    assert_eq!(names(&view), BTreeSet::from(["pod:ml/big", "pod:ml/c", "other"]));
    assert_eq!(view.agent.tenants_folded, 2);
    let other = other(&view);
    assert_eq!(other.tenant.kind, TenantKind::Other);
    assert_eq!(other.processes, 4);
    assert_eq!(other.confidence, Confidence::JoinedLate);
    assert_eq!((device(other).live, device(other).allocated), (5 * MIB, 50 * MIB));
    assert_eq!(other.process_bytes[&gpu_id(0)], Ok(5 * MIB));
    assert_eq!(other.operations[&(GpuRef::Known(gpu_id(0)), Operation::MemAlloc)], 50);
    assert_eq!(other.residual[&gpu_id(0)].drift, -8192);
}

#[test]
fn membership_holds_while_sizes_change() {
    let mut guard = Guard::new(Limits { max_tenants: 1 });
    let first = tick(&mut guard, vec![one("a", 10), one("b", 5)]);
    let second = tick(&mut guard, vec![one("a", 11), one("b", 900)]);
    assert_eq!(names(&first), names(&second));
    // The place of `a` goes to a newcomer, not to `b`, whose counters are part of `other`.
    let third = tick(&mut guard, vec![one("b", 901), one("c", 1)]);
    assert_eq!(names(&third), BTreeSet::from(["pod:ml/c", "other"]));
    assert_eq!(device(other(&third)).allocated, 9_010 * MIB);
    assert_eq!(third.agent.tenants_folded, 1);
}

#[test]
fn other_never_falls_when_members_leave_restart_or_return() {
    let mut guard = Guard::new(Limits { max_tenants: 1 });
    let ticks = [
        vec![one("a", 100), one("b", 10), one("c", 20)],
        vec![one("a", 110), one("b", 12), one("c", 21)],
        // `c` leaves.
        vec![one("a", 120), one("b", 13)],
        // `b` starts again, `c` returns.
        vec![one("a", 130), one("b", 1), one("c", 2)],
        // Everybody folded leaves.
        vec![one("a", 140)],
        vec![one("a", 150), one("d", 7)],
    ];
    let views: Vec<View> = ticks.into_iter().map(|tenants| tick(&mut guard, tenants)).collect();
    for pair in views.windows(2) {
        assert_monotone(&pair[0], &pair[1]);
    }
    let allocated: Vec<u64> = views.iter().map(|view| device(other(view)).allocated / MIB / 10).collect();
    assert_eq!(allocated, [30, 33, 34, 37, 37, 44]);
    let live: Vec<u64> = views.iter().map(|view| device(other(view)).live / MIB).collect();
    assert_eq!(live, [30, 33, 13, 3, 0, 7]);
    let folded: Vec<u64> = views.iter().map(|view| view.agent.tenants_folded).collect();
    assert_eq!(folded, [2, 2, 2, 3, 3, 4]);
}

#[test]
fn r1_an_unknown_part_makes_the_sum_unknown() {
    let mut guard = Guard::new(Limits { max_tenants: 0 });
    let mut hidden = one("b", 2);
    hidden.process_bytes.insert(gpu_id(0), Err(Absence::NotAvailable));
    let view = tick(&mut guard, vec![one("a", 1), hidden, one("c", 3)]);
    assert_eq!(other(&view).process_bytes[&gpu_id(0)], Err(Absence::NotAvailable));
}

#[test]
fn names_that_publish_alike_are_one_tenant() {
    let mut guard = Guard::new(Limits { max_tenants: 1 });
    let view = tick(&mut guard, vec![one("a", 1), one("a", 2)]);
    assert_eq!(names(&view), BTreeSet::from(["pod:ml/a"]));
    assert_eq!(device(&view.tenants[0]).live, 3 * MIB);
}

#[test]
fn nonsense_error_codes_do_not_grow_other() {
    let mut guard = Guard::new(Limits { max_tenants: 0 });
    let mut noisy = one("a", 1);
    for code in 10_000..11_000 {
        noisy.failures.insert((GpuRef::Unknown, Operation::MemAlloc, CudaError(code)), 1);
    }
    let view = tick(&mut guard, vec![noisy]);
    let unnamed = (GpuRef::Unknown, Operation::MemAlloc, CudaError(u32::MAX));
    assert_eq!(other(&view).failures[&unnamed], 1_000);
    assert!(other(&view).failures.len() < 10);
}

#[test]
fn r5_a_thousand_tenants_stay_within_the_bound() {
    let mut guard = Guard::new(Limits { max_tenants: 8 });
    let view = tick(&mut guard, (1..=1_000).map(|seed| one(&format!("t{seed}"), seed)).collect());
    assert_eq!(view.tenants.len(), 9);
    assert!(names(&view).contains("pod:ml/t1000") && names(&view).contains("pod:ml/t993"));
    let samples = samples(&page(&view, Format::Text));
    assert_eq!(samples["cotenant_agent_tenants_folded_total"], 992.0);
    let series = samples.keys().filter(|series| series.starts_with("cotenant_gpu_tenant_processes{")).count();
    assert_eq!(series, 9);
}

#[test]
fn r5_blame_of_folded_tenants_is_others_and_never_falls() {
    let mut guard = Guard::new(Limits { max_tenants: 1 });
    let tenants = vec![one("big", 100), one("small", 1), one("tiny", 1)];
    let total = |view: &View| view.blame.values().map(|share| share.time_ns).sum::<u64>();
    let first = tick(&mut guard, tenants.clone());
    let names: BTreeSet<&str> = first.blame.keys().map(|(victim, ..)| victim.name.as_str()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names.contains("other"));
    assert_eq!(total(&first), 3 * 2 * 1_500_000_000);
    // A member leaves, and takes nothing away.
    let second = tick(&mut guard, tenants[..2].to_vec());
    assert_eq!(total(&second), total(&first));
}

#[test]
fn r5_grants_without_a_process_take_places_and_keep_them() {
    let mut guard = Guard::new(Limits { max_tenants: 3 });
    let granted = |guard: &mut Guard, names: &[&str]| -> View {
        let mut view = node(vec![gpu(0)], vec![one("big", 50)]);
        view.events.kills.clear();
        let row = view.grants.shares[0].clone();
        for name in names {
            view.grants.shares.push(cotenant_model::grant::ShareRow { tenant: pod(name), ..row.clone() });
        }
        guard.fold(&mut view);
        view
    };
    let of = |view: &View| -> Vec<String> {
        view.grants.shares.iter().map(|row| row.tenant.name.clone()).collect()
    };
    let view = granted(&mut guard, &["b", "c", "d"]);
    assert_eq!(of(&view), ["pod:ml/big", "pod:ml/b", "pod:ml/c", "other"]);
    // Who comes later gets the place that is left, whatever its name.
    let view = granted(&mut guard, &["a", "c"]);
    assert_eq!(of(&view), ["pod:ml/big", "pod:ml/a", "pod:ml/c"]);
    let view = granted(&mut guard, &["b", "a", "c"]);
    assert_eq!(of(&view), ["pod:ml/big", "other", "pod:ml/a", "pod:ml/c"]);
}
