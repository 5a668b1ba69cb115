use super::*;
use crate::TenantKind;

const SECOND: u64 = 1_000_000_000;
/// Long enough after everything below.
const LATER: u64 = 100 * SECOND;

fn tenant(name: &str) -> Tenant {
    Tenant::plain(TenantKind::Docker, name)
}

fn marked(time_ns: u64, tgid: u32, name: &str, trigger: (u32, &str)) -> Marked {
    Marked {
        time_ns,
        tid: tgid,
        tgid,
        process: Some(ProcessId(u64::from(tgid))),
        comm: "python3".to_owned(),
        cgroup_id: 7,
        cgroup: Some(format!("/{name}")),
        tenant: Some(tenant(name)),
        trigger: Trigger { tgid: trigger.0, tenant: Some(tenant(trigger.1)) },
    }
}

fn summary(pid: u32, owner: &str, task: &str) -> OomLine {
    OomLine::Summary(OomSummary {
        scope: Scope::Memcg,
        limit_owner: Some(owner.to_owned()),
        task_cgroup: Some(task.to_owned()),
        comm: Some("python3".to_owned()),
        pid,
    })
}

fn killed(pid: u32) -> OomLine {
    OomLine::Killed(KillLine { memcg: true, pid, comm: "python3".to_owned() })
}

fn counter(time_ns: u64, cgroup: &str, kills: u64) -> CgroupKills {
    CgroupKills { since_ns: 0, time_ns, cgroup: cgroup.to_owned(), kills }
}

fn nobody(_: u32, _: Option<&str>) -> Option<Tenant> {
    None
}

fn one(settled: &Settled) -> &Kill {
    assert_eq!(settled.incidents.len(), 1, "{settled:?}");
    assert_eq!(settled.incidents[0].kills.len(), 1, "{settled:?}");
    &settled.incidents[0].kills[0]
}

#[test]
fn c97_the_victim_is_not_the_one_that_asked() {
    let mut kills = Kills::default();
    kills.mark(marked(10 * SECOND, 200, "b", (100, "a")));
    kills.log(10 * SECOND + 5000, 51, summary(200, "/", "/b"));
    kills.log(10 * SECOND + 9000, 52, killed(200));
    kills.count(counter(11 * SECOND, "/b", 1));
    let settled = kills.settle(LATER, nobody);
    let kill = one(&settled);
    assert_eq!(kill.tenant, Some(tenant("b")));
    assert_eq!(kill.trigger, Some(Trigger { tgid: 100, tenant: Some(tenant("a")) }));
    assert_eq!((kill.limit_owner.as_deref(), kill.task_cgroup.as_deref()), (Some("/"), Some("/b")));
    assert_eq!((kill.agreement, kill.scope), (Agreement::Confirmed, Some(Scope::Memcg)));
    assert_eq!((settled.unseen.len(), settled.contradicted.len()), (0, 0));
}

#[test]
fn c99_a_victim_that_is_gone_keeps_its_name() {
    let mut kills = Kills::default();
    for round in 0..5 {
        let at = (10 + 5 * round) * SECOND;
        let pid = 300 + u32::try_from(round).unwrap();
        kills.mark(marked(at, pid, "tail", (pid, "tail")));
        kills.log(at, 100 + 2 * round, summary(pid, "/tail", "/tail"));
        kills.log(at, 101 + 2 * round, killed(pid));
    }
    // No process of these PIDs is left to be asked.
    let settled = kills.settle(LATER, nobody);
    assert_eq!(settled.incidents.len(), 5);
    assert!(settled.incidents.iter().all(|incident| incident.kills[0].tenant == Some(tenant("tail"))));
    assert_eq!(kills.settle(2 * LATER, nobody), Settled::default());
}

#[test]
fn c100_the_pid_of_the_event_is_a_thread() {
    let mut kills = Kills::default();
    // The leader is gone: a thread still has the memory and is marked; the summary names the process that was chosen.
    kills.mark(Marked { tid: 4242, ..marked(10 * SECOND, 4000, "t", (4000, "t")) });
    kills.log(10 * SECOND, 70, summary(4000, "/t", "/t"));
    kills.log(10 * SECOND, 71, killed(4242));
    // Its other threads are marked as they die.
    kills.mark(Marked { tid: 4243, ..marked(10 * SECOND + 1000, 4000, "t", (4000, "t")) });
    let settled = kills.settle(LATER, nobody);
    let kill = one(&settled);
    assert_eq!((kill.tgid, kill.tid, kill.agreement), (4000, 4242, Agreement::Confirmed));
    assert_eq!(kill.limit_owner.as_deref(), Some("/t"));
    // One that is marked after the kill was told is no second kill either.
    kills.mark(Marked { tid: 4244, ..marked(12 * SECOND, 4000, "t", (4000, "t")) });
    kills.log(12 * SECOND, 90, killed(4242));
    assert_eq!(kills.settle(2 * LATER, nobody), Settled::default());
}

#[test]
fn a_summary_is_not_lent_to_the_next_victim() {
    let mut kills = Kills::default();
    kills.log(10 * SECOND, 70, summary(1, "/a", "/a"));
    // "OOM victim 1 is already exiting" came between, then another OOM whose summary was rate-limited.
    kills.log(10 * SECOND, 72, killed(2));
    kills.log(10 * SECOND, 73, OomLine::Killed(KillLine { memcg: false, pid: 3, comm: "x".to_owned() }));
    let settled = kills.settle(LATER, nobody);
    let kills: Vec<&Kill> = settled.incidents.iter().flat_map(|incident| &incident.kills).collect();
    assert_eq!(kills.len(), 2, "a summary alone is no kill");
    assert_eq!(
        (kills[0].tgid, kills[0].limit_owner.as_deref(), kills[0].scope),
        (2, None, Some(Scope::Memcg))
    );
    assert_eq!((kills[1].tgid, kills[1].scope), (3, None), "global or cpuset: the line does not say");
}

#[test]
fn c101_a_kill_that_pod_and_container_count_is_one_kill() {
    let mut kills = Kills::default();
    let task = "/kubepods/pod1/main";
    kills.mark(Marked { cgroup: Some(task.to_owned()), ..marked(10 * SECOND, 500, "p", (500, "p")) });
    for cgroup in ["/kubepods", "/kubepods/pod1", task] {
        kills.count(counter(10 * SECOND + 1, cgroup, 1));
    }
    let settled = kills.settle(LATER, nobody);
    assert_eq!(
        one(&settled).agreement,
        Agreement::Confirmed,
        "the counter bears the probe out without a log"
    );
    assert_eq!(settled.unseen, []);
}

#[test]
fn c101_what_nobody_saw_is_told_once_at_the_innermost_cgroup() {
    let mut kills = Kills::default();
    kills.count(counter(10 * SECOND, "/pod1", 3));
    kills.count(counter(10 * SECOND, "/pod1/main", 1));
    kills.count(counter(10 * SECOND, "/pod10", 0));
    let settled = kills.settle(LATER, nobody);
    let unseen: Vec<(&str, u64)> =
        settled.unseen.iter().map(|missing| (missing.cgroup.as_str(), missing.kills)).collect();
    assert_eq!(unseen, [("/pod1/main", 1), ("/pod1", 2)]);
    assert_eq!(settled.incidents, []);
}

#[test]
fn c101_a_kill_without_a_place_is_not_told_again_by_the_counter() {
    let mut kills = Kills::default();
    // Rate-limited: no summary, so no cgroup; and the probe was not there.
    kills.log(10 * SECOND, 5, killed(1));
    kills.count(counter(11 * SECOND, "/pod1/main", 2));
    kills.count(counter(11 * SECOND, "/pod1", 2));
    let settled = kills.settle(LATER, nobody);
    assert_eq!(one(&settled).task_cgroup, None);
    assert_eq!(settled.unseen, [counter(11 * SECOND, "/pod1/main", 1)]);
    // It is not kept for counters to come.
    kills.count(counter(2 * LATER, "/pod1", 1));
    assert_eq!(kills.settle(3 * LATER, nobody).unseen, [counter(2 * LATER, "/pod1", 1)]);
}

#[test]
fn c101_a_group_is_one_incident() {
    let mut kills = Kills::default();
    let at = |step: u64| 10 * SECOND + step * 1_000_000;
    kills.mark(marked(at(0), 1, "job", (9, "job")));
    kills.log(at(0), 100, summary(1, "/job", "/job/rank0"));
    kills.log(at(0), 101, killed(1));
    kills.log(at(1), 102, OomLine::Group { cgroup: "/job".to_owned() });
    // As Linux 6.1 does on cgroup v2: the chosen one is a member as well, and is killed again.
    kills.log(at(1), 103, killed(1));
    for pid in 2..=4 {
        kills.log(at(u64::from(pid)), 101 + u64::from(pid) * 2, killed(pid));
        if pid != 3 {
            kills.mark(marked(at(u64::from(pid)), pid, "job", (9, "job")));
        }
    }
    // While the group dies another cgroup's victim has no summary: the storm was rate-limited.
    kills.log(at(5), 120, killed(77));
    kills.mark(marked(at(5), 77, "other", (77, "other")));
    let resolve = |pid: u32, _: Option<&str>| (pid == 3).then(|| tenant("job"));
    let settled = kills.settle(LATER, resolve);
    assert_eq!(settled.incidents.len(), 2, "{settled:?}");
    let incident = &settled.incidents[0];
    let victims: Vec<(u32, Agreement)> =
        incident.kills.iter().map(|kill| (kill.tgid, kill.agreement)).collect();
    let (both, log) = (Agreement::Confirmed, Agreement::LogOnly);
    assert_eq!(victims, [(1, both), (2, both), (3, log), (4, both)]);
    assert!(incident.group && incident.kills.iter().all(|kill| kill.tenant == Some(tenant("job"))));
    assert_eq!(incident.limit_owner.as_deref(), Some("/job"));
    assert_eq!((incident.first_ns, incident.last_ns), (at(0), at(4)));
    let stray = &settled.incidents[1].kills[0];
    assert_eq!((stray.tgid, stray.limit_owner.as_deref(), settled.incidents[1].group), (77, None, false));
}

#[test]
fn victims_of_one_trigger_are_one_incident_and_of_another_limit_are_not() {
    let mut kills = Kills::default();
    for (step, (pid, owner)) in [(1, "/x"), (2, "/x"), (3, "/y")].into_iter().enumerate() {
        let at = 10 * SECOND + step as u64 * 100_000_000;
        kills.mark(marked(at, pid, "v", (50, "a")));
        kills.log(at, 10 * step as u64, summary(pid, owner, "/v"));
        kills.log(at, 10 * step as u64 + 1, killed(pid));
    }
    // The same trigger, but not the same second.
    kills.mark(marked(14 * SECOND, 4, "v", (50, "a")));
    let settled = kills.settle(LATER, nobody);
    let victims: Vec<Vec<u32>> = settled
        .incidents
        .iter()
        .map(|incident| incident.kills.iter().map(|kill| kill.tgid).collect())
        .collect();
    assert_eq!(victims, [vec![1, 2], vec![3], vec![4]]);
    assert!(!settled.incidents[0].group);
}

#[test]
fn c103_a_sigkill_without_an_oom_event_is_not_an_oom_kill() {
    let mut kills = Kills::default();
    kills.mark(marked(10 * SECOND, 1, "a", (1, "a")));
    let settled = kills.settle(LATER, nobody);
    let told = &settled.incidents[0].kills;
    let sigkill = Ending::from_exit_code(9);
    assert_eq!(Death::of(1, 11 * SECOND, sigkill, told), Death::OomKill);
    assert_eq!(Death::of(2, 11 * SECOND, sigkill, told), Death::Signal(9), "another process");
    assert_eq!(Death::of(1, 9 * SECOND, sigkill, told), Death::Signal(9), "before the kill");
    assert_eq!(Death::of(1, 1000 * SECOND, sigkill, told), Death::Signal(9), "another life of the PID");
    assert_eq!(Death::of(2, 11 * SECOND, Ending::from_exit_code(137 << 8), told), Death::Exit(137));
    assert_eq!(Death::of(1, 11 * SECOND, Ending::from_exit_code(0x80 | 0x0b), told), Death::Signal(11));
}

#[test]
fn c103_a_process_that_was_dying_anyway_is_not_killed_again() {
    // `kill -9` under memory pressure: the dying process is marked so that it may use the reserves.
    let mut kills = Kills::default();
    kills.mark(marked(10 * SECOND, 1, "a", (1, "a")));
    kills.count(counter(11 * SECOND, "/a", 0));
    let settled = kills.settle(LATER, nobody);
    assert_eq!(settled.incidents, []);
    assert_eq!(settled.contradicted[0].agreement, Agreement::Contradicted);
    assert_eq!(Death::of(1, 11 * SECOND, Ending::Signal(9), &settled.contradicted), Death::Signal(9));
    let mut counters = KillCounters::default();
    counters.add(&settled.contradicted[0]);
    assert_eq!(counters.rows().count(), 0);
    // A reading from before the kill says nothing about it.
    let mut kills = Kills::default();
    kills.count(counter(10 * SECOND - 1, "/a", 0));
    kills.mark(marked(10 * SECOND, 1, "a", (1, "a")));
    assert_eq!(one(&kills.settle(LATER, nobody)).agreement, Agreement::ProbeOnly);
    // Nor does one that begins after it: the kill is in the reading that it is compared with.
    let mut kills = Kills::default();
    kills.mark(marked(10 * SECOND, 1, "a", (1, "a")));
    kills.count(CgroupKills { since_ns: 10 * SECOND + 1, ..counter(11 * SECOND, "/a", 0) });
    assert_eq!(one(&kills.settle(LATER, nobody)).agreement, Agreement::ProbeOnly);
}

#[test]
fn c103_counts_outlive_the_container_and_child_kills_count() {
    let mut counters = KillCounters::default();
    let mut kills = Kills::default();
    // A child of PID 1 dies, then after a restart another one.
    for (at, pid) in [(10, 31), (30, 57)] {
        kills.mark(marked(at * SECOND, pid, "web", (pid, "web")));
    }
    let settled = kills.settle(LATER, nobody);
    settled.incidents.iter().flat_map(|incident| &incident.kills).for_each(|kill| counters.add(kill));
    let rows: Vec<_> = counters.rows().collect();
    assert_eq!(rows, [(Some(&tenant("web")), None, KillCount { kills: 2, last_ns: 30 * SECOND })]);
    counters.forget(LATER, |_| true);
    counters.forget(20 * SECOND, |_| false);
    assert_eq!(counters.rows().count(), 1);
    counters.forget(LATER, |_| false);
    assert_eq!(counters.rows().count(), 0);
}

#[test]
fn only_the_log_saw_it_and_the_host_knows_the_cgroup() {
    let mut kills = Kills::default();
    kills.log(10 * SECOND, 8, summary(66, "/docker", "/docker/abc"));
    kills.log(10 * SECOND, 9, killed(66));
    kills.count(counter(11 * SECOND, "/docker/abc", 1));
    let settled = kills.settle(LATER, |pid, cgroup| {
        assert_eq!((pid, cgroup), (66, Some("/docker/abc")));
        Some(tenant("abc"))
    });
    let kill = one(&settled);
    assert_eq!(
        (kill.agreement, kill.tenant.clone(), kill.trigger.clone()),
        (Agreement::LogOnly, Some(tenant("abc")), None)
    );
    assert_eq!(settled.unseen, []);
}

#[test]
fn nothing_is_told_before_its_witnesses_had_time() {
    let mut kills = Kills::default();
    kills.mark(marked(10 * SECOND, 1, "a", (1, "a")));
    assert_eq!(kills.settle(11 * SECOND, nobody), Settled::default());
    kills.log(10 * SECOND + 1, 5, summary(1, "/a", "/a"));
    kills.log(10 * SECOND + 2, 6, killed(1));
    assert_eq!(one(&kills.settle(13 * SECOND, nobody)).agreement, Agreement::Confirmed);
    // A storm that does not end is told in parts.
    for step in 0..40 {
        kills.mark(marked(
            20 * SECOND + step * 400_000_000,
            100 + u32::try_from(step).unwrap(),
            "a",
            (1, "a"),
        ));
    }
    assert_eq!(kills.settle(29 * SECOND, nobody).incidents.len(), 0);
    assert_eq!(kills.settle(36 * SECOND, nobody).incidents[0].kills.len(), 40);
}

#[test]
fn a_storm_is_bounded_and_counted() {
    let mut kills = Kills::default();
    let past = u32::try_from(Kills::MOST).unwrap() + 100;
    for pid in 1..=past {
        kills.mark(marked(10 * SECOND, pid, "a", (1, "a")));
    }
    assert_eq!(kills.dropped(), 100);
    let settled = kills.settle(LATER, nobody);
    assert_eq!(settled.incidents[0].kills.len(), Kills::MOST);
    let mut counters = KillCounters::default();
    for (at, kill) in settled.incidents[0].kills.iter().cycle().take(2 * KillCounters::MOST).enumerate() {
        counters.add(&Kill { tenant: Some(tenant(&at.to_string())), ..kill.clone() });
    }
    assert_eq!(counters.rows().count(), KillCounters::MOST + 1);
    assert_eq!(counters.rows().map(|(_, _, count)| count.kills).sum::<u64>(), 2 * KillCounters::MOST as u64);
}

#[test]
fn what_a_victim_held_is_told_by_gpu_and_kind() {
    let row = |gpu, kind, live| LedgerRow {
        gpu,
        kind,
        live,
        peak: live,
        allocated: live,
        freed: 0,
        allocations: 1,
        frees: 0,
    };
    let gpu = GpuId::from_uuid([1; 16]);
    let held = Held::of(&[
        row(GpuRef::Known(gpu.clone()), MemoryKind::Device, 64),
        row(GpuRef::Known(gpu.clone()), MemoryKind::Vmm, 0),
        row(GpuRef::Unknown, MemoryKind::Device, 32),
        row(GpuRef::Host, MemoryKind::HostPinned, 8),
        row(GpuRef::Known(gpu.clone()), MemoryKind::HostRegistered, 4),
    ]);
    assert_eq!(held.live, BTreeMap::from([((gpu, MemoryKind::Device), 64)]));
    assert_eq!((held.elsewhere, held.pinned), (32, 12));
}
