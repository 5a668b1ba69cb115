//! Owns the proofs of what belongs together and what does not.

use super::*;

#[test]
fn two_gpus_with_unrelated_trouble_are_two_incidents() {
    let mut world = World::new();
    for _ in 0..20 {
        world.waits(vec![wait("a", by("b"), 1, 0.5), wait("c", by("d"), 2, 0.5)]);
    }
    let all = world.all();
    assert_eq!(all.len(), 2);
    for incident in &all {
        assert_eq!((incident.gpus.len(), incident.victims.len(), incident.culprits.len()), (1, 1, 1));
    }
}

#[test]
fn the_hosts_lock_is_one_place_for_all_gpus() {
    let mut world = World::new();
    for _ in 0..3 {
        world.waits(vec![api_wait("a", by("b"), 1, 0.5), api_wait("c", by("b"), 2, 0.5)]);
    }
    let incident = world.one();
    assert!(incident.host_lock);
    assert_eq!(incident.victims.len(), 2);
    assert_eq!(incident.gpus, [gpu(1), gpu(2)], "shown, though the lock is neither's");
}

#[test]
fn the_hosts_lock_does_not_draw_in_other_tenants_trouble_on_a_gpu() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    world.waits(vec![api_wait("a", by("b"), 1, 0.5)]);
    let record = refusal(&mut failures, world.at, "c", 1, &[("d", 78 * GIB, 0)]);
    world.tick(|observation, _| observation.failures = vec![record]);
    assert_eq!(world.all().len(), 2);
}

#[test]
fn one_pair_in_two_places_is_one_incident() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    world.waits(vec![api_wait("a", by("b"), 1, 0.5)]);
    world.waits(vec![wait("a", by("b"), 1, 0.9)]);
    let record = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 0)]);
    world.tick(|observation, _| observation.failures = vec![record]);
    let incident = world.one();
    assert_eq!(incident.kind, Kind::AllocationFailure);
    assert!(incident.host_lock);
    assert_eq!(incident.culprits[0].tenant, tenant("b"));
    assert_eq!(incident.culprits[0].held_bytes, Some(78 * GIB));
    assert_eq!(incident.culprits[0].grew_bytes, Some(0));
    assert!((incident.culprits[0].wait_share.unwrap() - 1.0).abs() < 1e-9);
}

#[test]
fn a_culprit_in_passing_ties_nothing_together() {
    let mut world = World::new();
    // "x" hurts "a" a little on GPU 1, and is its victim on GPU 2.
    for _ in 0..10 {
        world.waits(vec![
            wait("a", by("b"), 1, 0.8),
            wait("a", by("x"), 1, 0.05),
            wait("x", by("a"), 2, 0.8),
        ]);
    }
    assert_eq!(world.all().len(), 2);
}

#[test]
fn two_incidents_become_one_when_an_event_is_in_both() {
    let mut world = World::new();
    world.waits(vec![wait("a", by("b"), 1, 0.5)]);
    world.waits(vec![wait("c", by("d"), 2, 0.5)]);
    let all = world.all();
    let (younger, older) = (all[0].id, all[1].id);
    let changes = world.tick(|observation, at| {
        let mut both = kill(at, "e", Some(1), None);
        both.gpu_live.push((gpu(2), GIB));
        observation.kills = vec![both];
    });
    assert_eq!(changes.merged, [(younger, older)]);
    let incident = world.one();
    assert_eq!((incident.id, incident.merged.as_slice()), (older, [younger].as_slice()));
    assert_eq!((incident.victims.len(), incident.culprits.len()), (3, 2));
    assert!((incident.wait_shares.unwrap().neighbours - 1.0).abs() < 1e-9);
    assert_eq!(world.incidents.find(younger).unwrap().id, older, "an old link still leads there");
    // Trouble on either place is now the one incident's.
    world.waits(vec![wait("c", by("d"), 2, 0.5), wait("a", by("b"), 1, 0.5)]);
    assert_eq!(world.all().len(), 1);
    assert_eq!(world.quiet(40).len(), 1);
}

#[test]
fn what_tied_events_to_the_absorbed_one_ties_them_to_the_other() {
    let mut world = World::new();
    world.waits(vec![wait("a", by("b"), 1, 0.5)]);
    world.waits(vec![wait("c", by("d"), 2, 0.5)]);
    let over = |at, name: &str, gpus: [u8; 2]| KillNote {
        gpu_live: gpus.map(|n| (gpu(n), GIB)).to_vec(),
        ..kill(at, name, None, None)
    };
    world.tick(|observation, at| observation.kills = vec![over(at, "e", [2, 3])]);
    world.tick(|observation, at| observation.kills = vec![over(at, "f", [1, 2])]);
    assert_eq!(world.all().len(), 1);
    world.tick(|observation, at| observation.xids = vec![xid(at, 3, 31, false)]);
    assert_eq!(world.all().len(), 1, "a place of the absorbed one");
    world.waits(vec![api_wait("c", by("d"), 2, 0.5)]);
    let incident = world.one();
    assert!(incident.host_lock && incident.kind == Kind::Xid, "a place, then a pair of the absorbed one");
    let waited: f64 = incident.culprits.iter().map(|blame| blame.blocked_seconds).sum();
    assert!((waited - 1.5).abs() < 1e-9, "{waited}");
}

#[test]
fn growth_after_a_pause_is_another_step() {
    let mut world = World::new();
    let grow = |world: &mut World| {
        world.tick(|observation, _| {
            let bytes = GIB.cast_signed();
            observation.movements = vec![Movement { tenant: tenant("b"), gpu: gpu(1), bytes }];
        });
    };
    grow(&mut world);
    world.quiet(3);
    grow(&mut world);
    world.quiet(30);
    grow(&mut world);
    let bytes: Vec<_> = world.incidents.timeline(&gpu(1), T0).iter().map(|step| step.bytes).collect();
    assert_eq!(bytes, [2 * GIB.cast_signed(), GIB.cast_signed()]);
}

#[test]
fn the_worst_thing_names_it_and_each_name_counts_once() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let expect = |world: &World, kind| assert_eq!(world.one().kind, kind);
    let mut record = refusal(&mut failures, T0, "a", 1, &[("b", 78 * GIB, 0)]);
    record.recovered = true;
    world.tick(|observation, _| observation.failures = vec![record.clone()]);
    expect(&world, Kind::NearMiss);
    world.waits(vec![wait("a", by("b"), 1, 0.6)]);
    expect(&world, Kind::NoisyNeighbour);
    record.recovered = false;
    record.count += 1;
    world.tick(|observation, _| observation.failures = vec![record]);
    expect(&world, Kind::AllocationFailure);
    world.tick(|observation, at| observation.xids = vec![xid(at, 1, 45, true)]);
    expect(&world, Kind::AllocationFailure);
    world.tick(|observation, at| observation.kills = vec![kill(at, "a", Some(1), None)]);
    expect(&world, Kind::OomKill);
    world.tick(|observation, at| observation.xids = vec![xid(at, 1, 79, false)]);
    expect(&world, Kind::Xid);
    let totals = world.incidents.totals();
    for kind in [Kind::NearMiss, Kind::NoisyNeighbour, Kind::AllocationFailure, Kind::OomKill, Kind::Xid] {
        assert_eq!(totals[&kind], 1, "{kind:?}");
    }
    let mut sorted = Kind::ALL.to_vec();
    sorted.sort_unstable();
    assert_eq!(sorted, Kind::ALL);
}

#[test]
fn a_record_told_again_is_replaced_and_not_added() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    for n in 1..=50_u64 {
        let record = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 0)]);
        assert_eq!(record.count, n);
        world.tick(|observation, _| observation.failures = vec![record]);
    }
    let incident = world.one();
    assert_eq!(incident.victims[0].failures, 50);
    assert_eq!(incident.victims[0].largest_refused_bytes, Some(2 * GIB));
    assert_eq!(incident.evidence.len(), 1);
}

#[test]
fn a_near_miss_is_not_a_failure() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let record = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 0)]);
    world.tick(|observation, _| observation.failures = vec![record]);
    assert_eq!(world.one().kind, Kind::AllocationFailure);
    assert!(failures.succeeded(&crate::verdict::Success {
        at_unix: world.at - 0.5,
        tenant: tenant("a"),
        process: crate::ProcessId(1),
        gpu: Some(gpu(1)),
        operation: Operation::MemAlloc,
        bytes: 2 * GIB,
        freed: Some(GIB),
    }));
    let changed = failures.drain(world.at);
    world.tick(|observation, _| observation.failures = changed);
    let incident = world.one();
    assert_eq!(incident.kind, Kind::NearMiss);
    assert_eq!((incident.victims[0].failures, incident.victims[0].near_misses), (0, 1));
}

#[test]
fn a_run_of_refusals_that_ends_with_a_grant_is_a_near_miss() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    for _ in 0..4 {
        let record = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 0)]);
        world.tick(|observation, _| observation.failures = vec![record]);
    }
    assert_eq!(world.one().victims[0].failures, 4);
    assert!(failures.succeeded(&crate::verdict::Success {
        at_unix: world.at,
        tenant: tenant("a"),
        process: crate::ProcessId(1),
        gpu: Some(gpu(1)),
        operation: Operation::MemAllocAsync,
        bytes: 2 * GIB,
        freed: None,
    }));
    let changed = failures.drain(world.at);
    world.tick(|observation, _| observation.failures = changed);
    let incident = world.one();
    assert_eq!(incident.kind, Kind::NearMiss);
    assert_eq!((incident.victims[0].failures, incident.victims[0].near_misses), (0, 1));
    // Refused again: it is a failure again.
    let record = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 0)]);
    world.tick(|observation, _| observation.failures = vec![record]);
    assert_eq!(world.one().kind, Kind::AllocationFailure);
}

#[test]
fn kills_under_one_limit_are_one_incident_and_under_two_are_two() {
    let mut world = World::new();
    world.tick(|observation, at| {
        observation.kills = vec![
            kill(at, "a", None, Some("/pods")),
            kill(at, "b", None, Some("/pods")),
            kill(at, "c", None, Some("/else")),
            kill(at, "d", None, None),
        ];
    });
    let all = world.all();
    assert_eq!(all.len(), 3);
    let group = all.iter().find(|incident| incident.memory_limits == ["/pods"]).unwrap();
    assert_eq!(group.victims.len(), 2);
    assert_eq!(world.incidents.totals()[&Kind::OomKill], 3);
}

#[test]
fn c104_a_host_kill_and_a_device_refusal_are_told_apart() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let refused = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 0)]);
    world.tick(|observation, at| {
        observation.failures = vec![refused];
        observation.kills = vec![kill(at, "c", None, Some("/c"))];
    });
    let kinds: Vec<_> = world.all().iter().map(|incident| incident.kind).collect();
    assert_eq!(kinds.len(), 2);
    assert!(kinds.contains(&Kind::OomKill) && kinds.contains(&Kind::AllocationFailure));
}

#[test]
fn c22_who_grew_and_who_shrank_is_on_the_timeline_and_linked_to_the_refusal() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let movement = |name: &str, bytes: i64| Movement { tenant: tenant(name), gpu: gpu(1), bytes };
    let gib = |n: u64| (n * GIB).cast_signed();
    // "b" gives back 7 GiB while "a" starts, then "c" takes 9 GiB in three steps, and "d" a little.
    world.tick(|observation, _| observation.movements = vec![movement("b", -gib(7))]);
    for _ in 0..3 {
        world.tick(|observation, _| observation.movements = vec![movement("c", gib(3)), movement("d", 4096)]);
    }
    let steps = world.incidents.timeline(&gpu(1), T0);
    let told: Vec<_> = steps.iter().map(|step| (step.tenant.name.as_str(), step.bytes)).collect();
    assert_eq!(told, [("docker:b", -gib(7)), ("docker:c", gib(9))], "without any incident");
    world.quiet(2);
    let record =
        refusal(&mut failures, world.at, "a", 1, &[("b", 30 * GIB, -gib(7)), ("c", 48 * GIB, gib(9))]);
    world.tick(|observation, _| observation.failures = vec![record]);
    let incident = world.one();
    assert_eq!(incident.timeline.len(), 2);
    assert!(
        (incident.timeline[0].from_unix - T0).abs() < 1e-9
            && (incident.timeline[0].to_unix - T0 - 1.0).abs() < 1e-9
    );
    assert_eq!(incident.chains.len(), 1, "the one that grew");
    let chain = &incident.chains[0];
    assert_eq!(
        (chain.cause.tenant.clone(), chain.cause.bytes, chain.victim.clone()),
        (tenant("c"), gib(9), tenant("a"))
    );
    assert!((chain.seconds_before - 2.0).abs() < 1e-9);
    assert_eq!(incident.culprits[0].tenant, tenant("c"), "who grew, not who holds and shrank");
    // Growth on another GPU has nothing to do with it.
    assert!(world.incidents.timeline(&gpu(2), T0).is_empty());
    // The timeline forgets; the incident does not.
    world.quiet(200);
    assert!(world.incidents.timeline(&gpu(1), T0).is_empty());
    assert_eq!(world.one().timeline.len(), 2);
}

#[test]
fn a_limit_is_nobody_elses_fault() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let ask = Ask {
        requested: Some(2 * GIB),
        gpu: Some(gpu(1)),
        free: Some(50 * GIB),
        own_live: Some(9 * GIB),
        limit: Some(Limit {
            bytes: 10 * GIB,
            source: LimitSource::Mps,
            scope: LimitScope::Tenant,
            used: None,
        }),
        holders: Some(vec![(tenant("b"), 20 * GIB)]),
        ..Ask::new(tenant("a"), Operation::MemAlloc, CudaError::OUT_OF_MEMORY)
    };
    failures.failed(T0, 3, &ask);
    let records = failures.drain(T0);
    world.tick(|observation, _| observation.failures = records);
    let incident = world.one();
    assert!(incident.culprits.is_empty());
    assert_eq!(incident.actions[0].remedy, Remedy::RaiseLimit);
    assert!((incident.memory_shares.unwrap().other_causes - 1.0).abs() < 1e-9);
}
