use super::*;

const ALL: u64 = u64::MAX;

const fn bit(capability: Capability) -> u64 {
    1 << capability as u8
}

fn host() -> Surroundings {
    Surroundings {
        kernel: Some(KernelVersion { major: 6, minor: 18, patch: 4 }),
        btf: Some(Ok(())),
        symbols: Some(Ok(())),
        tracefs: Some(Ok(())),
        uprobes: true,
        rights: rights(ALL, Some(0)),
        lockdown: Some(Lockdown::None),
        switches: Switches { perf_event_paranoid: Some(2), ..Switches::default() },
        pid_namespace: Some(Ok(true)),
        cgroup_namespace: Some(Ok(true)),
        cgroups: CgroupMode::V2,
        cluster: Cluster::default(),
        clock: Some("tsc".into()),
    }
}

#[allow(clippy::unnecessary_wraps, reason = "as the facts have it")]
fn rights(effective: u64, seccomp: Option<u32>) -> Option<Rights> {
    Some(Rights::of(effective, seccomp == Some(2), false))
}

fn of(facts: &Surroundings, trials: Trials, name: &str) -> Feature {
    judge(facts, &trials).into_iter().find(|feature| feature.name == name).expect(name)
}

/// Names that are not as they should be.
fn wrong(facts: &Surroundings) -> Vec<&'static str> {
    let features = judge(facts, &Trials::default()).into_iter();
    features.filter(|feature| crate::features::bad(feature.state)).map(|feature| feature.name).collect()
}

#[test]
fn a_good_host_loses_nothing() {
    assert_eq!(wrong(&host()), [""; 0]);
}

#[test]
fn whatever_is_wrong_says_what_is_lost_and_what_helps() {
    let bad = Surroundings {
        kernel: Some(KernelVersion { major: 5, minor: 4, patch: 0 }),
        btf: Some(Err("none".into())),
        symbols: Some(Err("hidden".into())),
        tracefs: Some(Err("none".into())),
        rights: rights(0, Some(2)),
        lockdown: Some(Lockdown::Confidentiality),
        switches: Switches { perf_event_paranoid: Some(4), ..Switches::default() },
        pid_namespace: Some(Ok(false)),
        cgroup_namespace: Some(Ok(false)),
        cgroups: CgroupMode::Absent,
        cluster: Cluster { is_node: true, ..Cluster::default() },
        clock: Some("hpet".into()),
        ..host()
    };
    let features = judge(&bad, &Trials::default());
    let wrong: Vec<&Feature> =
        features.iter().filter(|feature| crate::features::bad(feature.state)).collect();
    assert_eq!(wrong.len(), features.len() - 1, "all but seccomp");
    for feature in wrong {
        assert!(
            !feature.reason.is_empty() && !feature.lost.is_empty() && !feature.remedy.is_empty(),
            "{feature:?}"
        );
    }
}

#[test]
fn c77_the_floor_is_5_15() {
    let at = |major, minor| {
        let kernel = Some(KernelVersion { major, minor, patch: 0 });
        of(&Surroundings { kernel, ..host() }, Trials::default(), "kernel").state
    };
    assert_eq!(at(5, 4), FeatureState::Unsupported);
    assert_eq!(at(5, 10), FeatureState::Unsupported);
    for (major, minor) in [(5, 15), (6, 1), (6, 12), (6, 18)] {
        assert_eq!(at(major, minor), FeatureState::Active);
    }
    let unknown = Surroundings { kernel: None, ..host() };
    assert_eq!(of(&unknown, Trials::default(), "kernel").state, FeatureState::Broken);
}

#[test]
fn c72_the_capability_that_is_missing_is_named_with_its_purpose() {
    for (missing, state) in [
        (Capability::Bpf, FeatureState::Broken),
        (Capability::Perfmon, FeatureState::Broken),
        (Capability::SysPtrace, FeatureState::Degraded),
        (Capability::DacReadSearch, FeatureState::Degraded),
        (Capability::Syslog, FeatureState::Degraded),
    ] {
        let rights = rights(ALL & !bit(missing) & !bit(Capability::SysAdmin), Some(0));
        let feature = of(&Surroundings { rights, ..host() }, Trials::default(), "capabilities");
        assert_eq!(feature.state, state, "{missing:?}");
        assert_eq!(feature.reason, format!("missing {}", missing.short()));
        assert!(feature.lost.starts_with(missing.short()) && feature.remedy.contains(missing.short()));
    }
}

#[test]
fn sys_admin_stands_for_both_and_is_itself_wanted_only_where_there_is_nothing_finer() {
    let finer = bit(Capability::Bpf) | bit(Capability::Perfmon);
    let without = Surroundings { rights: rights(ALL & !finer, Some(0)), ..host() };
    assert_eq!(of(&without, Trials::default(), "capabilities").state, FeatureState::Active);
    let no_admin = Surroundings { rights: rights(ALL & !bit(Capability::SysAdmin), Some(0)), ..host() };
    assert_eq!(of(&no_admin, Trials::default(), "capabilities").state, FeatureState::Active);
    let old = |minor| Surroundings {
        kernel: Some(KernelVersion { major: 5, minor, patch: 0 }),
        ..no_admin.clone()
    };
    let feature = of(&old(4), Trials::default(), "capabilities");
    assert_eq!((feature.state, feature.reason.as_str()), (FeatureState::Broken, "missing SYS_ADMIN"));
    // Single probes: the trial says.
    let state = |uprobe| of(&old(15), Trials { uprobe, ..Trials::default() }, "capabilities").state;
    assert_eq!(state(Tried::NotTried), FeatureState::Degraded);
    assert_eq!(state(Tried::Works), FeatureState::Active);
    assert_eq!(state(Tried::Refused(13)), FeatureState::Broken);
}

#[test]
fn capabilities_in_a_user_namespace_count_for_nothing() {
    let mut facts = host();
    facts.rights = Some(Rights::of(ALL, false, true));
    let feature = of(&facts, Trials::default(), "capabilities");
    assert_eq!(feature.state, FeatureState::Broken);
    assert!(feature.reason.contains("user namespace") && !facts.may(Capability::Bpf));
}

#[test]
fn c72_paranoia_above_the_mainlines_is_judged_by_the_trial() {
    let switches = Switches { perf_event_paranoid: Some(4), ..Switches::default() };
    let facts =
        Surroundings { rights: rights(ALL & !bit(Capability::SysAdmin), Some(0)), switches, ..host() };
    let state = |perf_all| of(&facts, Trials { perf_all, ..Trials::default() }, "perf_event_paranoid").state;
    assert_eq!(state(Tried::Refused(13)), FeatureState::Broken);
    assert_eq!(state(Tried::Works), FeatureState::Active);
    assert_eq!(state(Tried::NotTried), FeatureState::Degraded);
    let refused =
        of(&facts, Trials { perf_all: Tried::Refused(13), ..Trials::default() }, "perf_event_paranoid");
    assert!(refused.reason.contains("CAP_SYS_ADMIN") && refused.remedy.contains("sysctl"));
    let admin = Surroundings { switches, ..host() };
    assert_eq!(of(&admin, Trials::default(), "perf_event_paranoid").state, FeatureState::Active);
}

#[test]
fn c73_a_filter_is_blamed_only_for_what_the_rights_would_allow() {
    let trials = Trials { bpf: Tried::Refused(1), perf: Tried::Works, ..Trials::default() };
    let filtered = Surroundings { rights: rights(ALL, Some(2)), ..host() };
    let feature = of(&filtered, trials, "seccomp");
    assert_eq!((feature.state, feature.reason.as_str()), (FeatureState::Broken, "a filter refuses bpf"));
    let powerless = Surroundings { rights: rights(0, Some(2)), ..host() };
    assert_eq!(of(&powerless, trials, "seccomp").state, FeatureState::Active);
    assert_eq!(of(&filtered, Trials::default(), "seccomp").state, FeatureState::Active);
}

#[test]
fn c74_a_host_without_btf_or_tracefs_loses_those() {
    let facts = Surroundings { btf: Some(Err("no file".into())), ..host() };
    assert_eq!(wrong(&facts), ["btf"]);
    let facts = Surroundings { tracefs: Some(Err("not mounted".into())), ..host() };
    assert_eq!(wrong(&facts), ["tracefs"]);
}

#[test]
fn cgroups_of_either_version_are_told_apart() {
    let state = |cgroups| of(&Surroundings { cgroups, ..host() }, Trials::default(), "cgroups").state;
    assert_eq!(state(CgroupMode::V2), FeatureState::Active);
    assert_eq!(state(CgroupMode::Hybrid), FeatureState::Active);
    assert_eq!(state(CgroupMode::V1), FeatureState::Degraded);
    assert_eq!(state(CgroupMode::Absent), FeatureState::Broken);
}

#[test]
fn c29_a_pid_namespace_of_its_own_is_told() {
    let facts = Surroundings { pid_namespace: Some(Ok(false)), ..host() };
    let feature = of(&facts, Trials::default(), "host_pid_namespace");
    assert_eq!(feature.state, FeatureState::Degraded);
    assert!(feature.remedy.contains("hostPID: true"));
    assert!(!crate::features::ready(&[feature]));
}

#[test]
fn a_private_cgroup_namespace_matters_only_where_the_hosts_cannot_be_entered() {
    let private = Surroundings { cgroup_namespace: Some(Ok(false)), ..host() };
    assert_eq!(wrong(&private), [""; 0]);
    let bound = Surroundings { rights: rights(ALL & !bit(Capability::SysAdmin), Some(0)), ..private };
    assert_eq!(wrong(&bound), ["cgroup_namespace"]);
}

#[test]
fn a_cluster_is_missed_only_on_its_nodes() {
    let node = Cluster { is_node: true, ..Cluster::default() };
    let facts = |cluster| Surroundings { cluster, ..host() };
    assert_eq!(wrong(&facts(node.clone())), ["pod_names", "kubelet"]);
    assert_eq!(wrong(&facts(Cluster { logs: true, ..node.clone() })), ["kubelet"]);
    let whole = Cluster { logs: true, pod_resources: Some("/kubelet.sock".into()), ..node };
    assert_eq!(wrong(&facts(whole)), [""; 0]);
}
