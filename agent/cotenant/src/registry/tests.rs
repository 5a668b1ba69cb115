//! Owns lives and deaths of processes on a host of files, and the tenants that are left of them.

use std::{fs, path::Path};

use cotenant_host::CgroupView;

use super::*;

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";

fn live(root: &Path, pid: u32, start: u64, uid: u32, cgroup: &str) {
    let directory = root.join(format!("proc/{pid}"));
    fs::create_dir_all(&directory).unwrap();
    let fields: Vec<String> =
        (4..=52).map(|field| if field == 22 { start.to_string() } else { "1".to_owned() }).collect();
    fs::write(directory.join("stat"), format!("{pid} (x) S {}", fields.join(" "))).unwrap();
    fs::write(directory.join("status"), format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")).unwrap();
    fs::write(directory.join("comm"), "x\n").unwrap();
    fs::write(directory.join("cmdline"), "x\0").unwrap();
    fs::write(directory.join("cgroup"), cgroup).unwrap();
}

fn die(root: &Path, pid: u32) {
    fs::remove_dir_all(root.join(format!("proc/{pid}"))).unwrap();
}

fn sample(id: u64, tgid: u32, uid: u32, cgroup_id: u64) -> ProcessSample {
    ProcessSample {
        id: ProcessId(id),
        tgid,
        uid,
        cgroup_id,
        comm: "x".into(),
        first_seen: 0,
        ended: None,
        ended_at: 0,
        confidence: Confidence::Complete,
        before_memory: false,
        last_calls: Vec::new(),
        pools: Vec::new(),
        ledger: Vec::new(),
        calls: Vec::new(),
        failures: Vec::new(),
        latency: Vec::new(),
        waits: Vec::new(),
        blame: Vec::new(),
        effort: Vec::new(),
    }
}

fn registry() -> (tempfile::TempDir, Registry) {
    let root = tempfile::tempdir().unwrap();
    let host = Host::at(root.path());
    let names = HostNames::new(host.clone());
    let registry = Registry::with(Eyes { host, names, view: CgroupView::Host });
    (root, registry)
}

fn resolved(registry: &mut Registry, process: ProcessSample) -> String {
    let id = process.id;
    registry.resolve(&[process], &BTreeSet::new(), &BTreeSet::new()).by_process[&id].name.clone()
}

#[test]
fn c99_a_process_that_is_gone_is_its_cgroups_tenant_only_for_the_same_user() {
    let (root, mut registry) = registry();
    // Hand-made, so that the tenant is the user.
    live(root.path(), 10, 1, 1000, "0::/mine\n");
    assert_eq!(resolved(&mut registry, sample(1, 10, 1000, 77)), "user:1000");
    assert_eq!(resolved(&mut registry, sample(2, 11, 1000, 77)), "user:1000");
    assert_eq!(resolved(&mut registry, sample(3, 12, 1001, 77)), "unknown:gone");
    assert_eq!(resolved(&mut registry, sample(4, 13, 1000, 78)), "unknown:gone");
    assert_eq!(resolved(&mut registry, sample(5, 14, 1000, ROOT_CGROUP)), "unknown:gone");
}

#[test]
fn a_cgroup_id_means_nothing_where_version_1_named_the_tenant() {
    let (root, mut registry) = registry();
    let hybrid = format!("4:memory:/docker/{ID}\n0::/system.slice/docker.service\n");
    live(root.path(), 10, 1, 0, &hybrid);
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 77)), "docker:0123456789ab");
    // Another container's process, in the same cgroup of the unified hierarchy.
    assert_eq!(resolved(&mut registry, sample(2, 11, 0, 77)), "unknown:gone");
}

#[test]
fn c99_a_process_that_nobody_saw_is_named_by_its_cgroups_path() {
    let (root, mut registry) = registry();
    let cgroups = root.path().join("sys/fs/cgroup");
    let path = cgroups.join(format!("system.slice/docker-{ID}.scope"));
    fs::create_dir_all(&path).unwrap();
    fs::write(cgroups.join("cgroup.procs"), "").unwrap();
    fs::write(cgroups.join("cgroup.controllers"), "").unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
    // The root of this hierarchy is no cgroup root, so its paths are not believed.
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, inode)), "unknown:gone");
}

#[test]
fn a_pid_that_is_used_again_is_somebody_else() {
    let (root, mut registry) = registry();
    live(root.path(), 10, 1, 0, "0::/system.slice/a.service\n");
    assert_eq!(registry.tenant(10).name, "systemd:a.service");
    live(root.path(), 10, 2, 0, "0::/system.slice/b.service\n");
    assert_eq!(registry.tenant(10).name, "systemd:b.service");
    // The burial of the first does not take the second.
    registry.bury(&[(10, 1)]);
    assert_eq!(registry.known(10).unwrap().name, "systemd:b.service");
}

#[test]
fn moving_a_process_does_not_move_its_account() {
    let (root, mut registry) = registry();
    live(root.path(), 10, 1, 0, "0::/system.slice/a.service\n");
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 77)), "systemd:a.service");
    live(root.path(), 10, 1, 0, "0::/system.slice/b.service\n");
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 78)), "systemd:a.service");
    assert_eq!(registry.tenant(10).name, "systemd:a.service");
}

#[test]
fn the_dead_keep_their_names_for_a_while_and_then_cost_nothing() {
    let (root, mut registry) = registry();
    live(root.path(), 10, 1, 0, "0::/system.slice/a.service\n");
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 77)), "systemd:a.service");
    die(root.path(), 10);
    registry.bury(&[(10, 1)]);
    registry.forget(&BTreeSet::from([ProcessId(1)]));
    assert_eq!(registry.known(10).unwrap().name, "systemd:a.service");
    // A victim's wait on it is read after its death.
    let mut victim = sample(2, 11, 0, 77);
    victim.blame.push(cotenant_model::sample::BlameRow {
        waker: Waker::Process(ProcessId(1)),
        stack: None,
        waits: 1,
        time_ns: 1,
    });
    let resolved = registry.resolve(&[victim], &BTreeSet::new(), &BTreeSet::new());
    assert_eq!(resolved.by_process[&ProcessId(1)].name, "systemd:a.service");
}

#[test]
fn c07_an_mps_server_is_nobodys_whoever_started_it() {
    let (root, mut registry) = registry();
    live(root.path(), 10, 1, 0, "0::/system.slice/a.service\n");
    let of = |registry: &mut Registry, servers: &[u32]| {
        let pids = BTreeSet::from([10]);
        let servers = servers.iter().copied().collect();
        let resolved = registry.resolve(&[sample(1, 10, 0, 77)], &pids, &servers);
        (resolved.by_process[&ProcessId(1)].name.clone(), resolved.by_pid[&10].name.clone())
    };
    let (service, server) = ("systemd:a.service".to_owned(), "system:mps-server".to_owned());
    assert_eq!(of(&mut registry, &[]), (service.clone(), service));
    assert_eq!(of(&mut registry, &[10]), (server.clone(), server.clone()));
    // A poll that could not list it takes nothing back.
    assert_eq!(of(&mut registry, &[]).0, server);
}

#[test]
fn c111_a_hundred_thousand_short_lives_leave_a_bounded_memory() {
    let (_root, mut registry) = registry();
    let sight = |start| Sight {
        start,
        uid: 0,
        tenant: Tenant::plain(TenantKind::Docker, &start.to_string()),
        nameless: false,
        unsettled: false,
        heard: 0,
        by_cgroup: true,
    };
    for at in 0..100_000_u64 {
        let pid = u32::try_from(at % 32_768).unwrap();
        registry.foresee(pid, Some(sight(at)), Some(at));
        registry.meet(ProcessId(at), pid, at + 2, Some(sight(at)));
        registry.bury(&[(pid, at)]);
        registry.forget(&BTreeSet::from([ProcessId(at)]));
        // The newest is always right, whatever was forgotten.
        assert_eq!(registry.known(pid).unwrap().name, format!("docker:{at}"));
    }
    assert!(registry.by_pid.len() <= MAX_DEAD && registry.by_process.len() <= MAX_DEAD);
    assert!(registry.by_cgroup.len() <= MAX_CGROUPS);
    assert!(registry.dead_pids.len() <= MAX_DEAD && registry.dead_processes.len() <= MAX_DEAD);
    assert!(registry.witnessed.is_empty() && registry.nameless.is_empty() && registry.running().is_empty());
}

#[test]
fn c08_a_pod_gets_its_name_once_and_keeps_it() {
    let (root, mut registry) = registry();
    live(root.path(), 10, 1, 0, &format!("0::/kubepods/pod{UID}/{ID}\n"));
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 77)), format!("pod:{UID}"));
    let logs = root.path().join(format!("var/log/pods/team-a_trainer-0_{UID}/main"));
    fs::create_dir_all(&logs).unwrap();
    std::thread::sleep(AGAIN);
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 77)), "pod:team-a/trainer-0");
    fs::remove_dir_all(root.path().join("var")).unwrap();
    std::thread::sleep(AGAIN);
    assert_eq!(resolved(&mut registry, sample(1, 10, 0, 77)), "pod:team-a/trainer-0");
    assert_eq!(registry.tenant(10).name, "pod:team-a/trainer-0");
    assert!(registry.nameless.is_empty());
}
