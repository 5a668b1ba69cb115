//! Owns the proofs of the JSON shape and of the list.

use super::*;

fn keys(value: &serde_json::Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn json_keys_are_those_documented() {
    let mut world = World::new();
    let mut failures = Failures::new(Fold::default());
    let record = refusal(&mut failures, world.at, "a", 1, &[("b", 78 * GIB, 5)]);
    world.tick(|observation, at| {
        observation.waits = vec![wait("a", by("b"), 1, 0.9), wait("a", Culprit::Device, 1, 0.1)];
        observation.failures = vec![record];
        observation.kills = vec![kill(at, "a", Some(1), None)];
        observation.xids = vec![xid(at, 1, 31, false)];
        observation.stalls = vec![Stall {
            victim: tenant("a"),
            class: WaitClass::Reclaim,
            gpus: vec![gpu(1)],
            since_unix: at - 9.0,
            holder: Some(by("b")),
        }];
    });
    let value = serde_json::to_value(world.one()).unwrap();
    let mut expected = vec![
        "id",
        "kind",
        "state",
        "start_unix",
        "last_unix",
        "end_unix",
        "host_lock",
        "gpus",
        "memory_limits",
        "victims",
        "culprits",
        "wait_shares",
        "warnings",
        "memory_shares",
        "evidence",
        "timeline",
        "chains",
        "actions",
        "merged",
        "unlisted",
    ];
    expected.sort_unstable();
    let mut found = keys(&value);
    found.sort_unstable();
    assert_eq!(found, expected);
    assert_eq!(value["kind"], "xid");
    assert_eq!(value["state"], "open");
    assert_eq!(value["end_unix"], serde_json::Value::Null);
    assert_eq!(value["gpus"][0], "GPU-01010101-0101-0101-0101-010101010101");
    assert_eq!(value["victims"][0]["tenant"], serde_json::json!({"name": "docker:a", "kind": "docker"}));
    assert_eq!(value["wait_shares"]["self"], 0.0);
    assert_eq!(value["memory_shares"]["neighbours"], 1.0);
    let sorts: Vec<_> =
        value["evidence"].as_array().unwrap().iter().map(|line| line["evidence"].as_str().unwrap()).collect();
    assert_eq!(sorts, ["xid", "kill", "failure", "stall", "wait", "wait"]);
    let failure = &value["evidence"][2];
    assert_eq!(
        (failure["operation"].as_str(), failure["error"].as_str()),
        (Some("cuMemAlloc"), Some("CUDA_ERROR_OUT_OF_MEMORY"))
    );
    assert_eq!(failure["verdict"]["kind"], "neighbour");
    assert_eq!(failure["verdict"]["because"][0]["fact"], "shortfall");
    assert_eq!(value["evidence"][4]["class"], "gpu_lock");
    assert_eq!(value["id"], world.one().id.to_string());
    assert_eq!(IncidentId::parse(value["id"].as_str().unwrap()), Some(world.one().id));
}

#[test]
fn ids_parse_only_as_written() {
    let id = IncidentId { start: 1_796_030_001, sequence: 7 };
    assert_eq!(IncidentId::parse("1796030001-7"), Some(id));
    for junk in ["", "-", "1-", "-1", "a-b", "1-2-3", "99999999999999999999-1"] {
        assert_eq!(IncidentId::parse(junk), None, "{junk}");
    }
}

#[test]
fn the_list_is_by_time_and_by_tenant() {
    let mut world = World::new();
    world.waits(vec![wait("a", by("b"), 1, 0.9)]);
    world.quiet(60);
    let middle = world.at;
    world.waits(vec![wait("c", by("d"), 2, 0.9)]);
    let starts: Vec<_> = world.all().iter().map(|incident| incident.victims[0].tenant.name.clone()).collect();
    assert_eq!(starts, ["docker:c", "docker:a"], "newest first");
    assert_eq!(world.incidents.list(Some(middle), None).len(), 1);
    assert_eq!(world.incidents.list(None, Some("docker:b")).len(), 1, "culprits too");
    assert_eq!(world.incidents.list(Some(middle), Some("docker:b")).len(), 0);
    assert_eq!(world.incidents.list(None, Some("docker:nobody")).len(), 0);
}
