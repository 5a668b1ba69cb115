//! Owns the stores of each runtime as they lie on a host, and the name that each must give.

use std::fs;

use super::*;

const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";

fn fixture(files: &[(&str, &str)]) -> (tempfile::TempDir, HostNames) {
    let root = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let names = HostNames::new(Host::at(root.path()));
    (root, names)
}

fn pod(names: &HostNames, uid: &str, container: Option<&str>) -> Option<(String, String)> {
    names.pod(uid, container).map(|pod| (pod.namespace, pod.pod))
}

#[test]
fn c82_pods_are_named_by_their_log_directories() {
    let logs = format!("var/log/pods/team-a_trainer-0_{UID}/main/0.log");
    let (_root, names) = fixture(&[(&logs, "")]);
    assert_eq!(pod(&names, UID, None), Some(("team-a".into(), "trainer-0".into())));
    assert_eq!(names.pod_container(UID, "ab").as_deref(), Some("main"));
    assert_eq!(pod(&names, "6a1b2c3d-0000-4444-8888-000000000000", None), None);
}

#[test]
fn c92_static_pods_are_named_by_their_hash() {
    let hash = "0123456789abcdef0123456789abcdef";
    let (_root, names) = fixture(&[(&format!("var/log/pods/kube-system_etcd-n1_{hash}/etcd/0.log"), "")]);
    assert_eq!(pod(&names, hash, None), Some(("kube-system".into(), "etcd-n1".into())));
}

#[test]
fn of_several_containers_the_link_says_which() {
    let (root, names) = fixture(&[
        (&format!("var/log/pods/a_b_{UID}/one/0.log"), ""),
        (&format!("var/log/pods/a_b_{UID}/two/0.log"), ""),
        ("var/log/containers/b_a_two-cafe.log", ""),
    ]);
    assert_eq!(names.pod_container(UID, "cafe").as_deref(), Some("two"));
    assert_eq!(names.pod_container(UID, "beef"), None);
    // Docker's logs are links to the container.
    let logs = root.path().join(format!("var/log/pods/a_b_{UID}/one/1.log"));
    std::os::unix::fs::symlink("/var/lib/docker/containers/beef/beef-json.log", logs).unwrap();
    assert_eq!(names.pod_container(UID, "beef").as_deref(), Some("one"));
}

#[test]
fn what_kubelets_runtimes_noted_names_pods_without_logs() {
    let containerd = format!(
        r#"{{"annotations":{{"io.kubernetes.cri.sandbox-uid":"{UID}","io.kubernetes.cri.sandbox-namespace":"n",
            "io.kubernetes.cri.sandbox-name":"p","io.kubernetes.cri.container-name":"c",
            "io.kubernetes.cri.container-type":"container"}}}}"#
    );
    let labels = format!(
        r#"{{\"io.kubernetes.pod.uid\":\"{UID}\",\"io.kubernetes.pod.namespace\":\"n\",\"io.kubernetes.pod.name\":\"q\",
            \"io.kubernetes.container.name\":\"d\"}}"#
    )
    .replace('\n', "");
    let crio = format!(
        r#"{{"annotations":{{"io.kubernetes.cri-o.ContainerID":"bb","io.kubernetes.cri-o.Labels":"{labels}"}}}}"#
    );
    let docker = format!(
        r#"{{"Name":"/k8s_e","Config":{{"Labels":{{"io.kubernetes.docker.type":"container",
            "io.kubernetes.pod.uid":"{UID}","io.kubernetes.pod.namespace":"n","io.kubernetes.pod.name":"r",
            "io.kubernetes.container.name":"e"}}}}}}"#
    );
    let (_root, names) = fixture(&[
        ("run/containerd/io.containerd.runtime.v2.task/k8s.io/aa/config.json", &containerd),
        // The same claim in a namespace that anybody with containerd may use.
        ("run/containerd/io.containerd.runtime.v2.task/default/dd/config.json", &containerd),
        ("run/containers/storage/overlay-containers/bb/userdata/config.json", &crio),
        // The same claim by a podman container.
        ("run/containers/storage/overlay-containers/ee/userdata/config.json", &crio),
        ("var/lib/docker/containers/cc/config.v2.json", &docker),
        ("var/lib/docker/containers/cc/hostconfig.json", r#"{"CgroupParent":"/kubepods/besteffort/podx"}"#),
        // The same claim by `docker run --label`.
        ("var/lib/docker/containers/ff/config.v2.json", &docker),
        ("var/lib/docker/containers/ff/hostconfig.json", r#"{"CgroupParent":""}"#),
    ]);
    for (id, pod_name, container) in [("aa", "p", "c"), ("bb", "q", "d"), ("cc", "r", "e")] {
        assert_eq!(names.pod_of(id).as_deref(), Some(UID), "{id}");
        assert_eq!(pod(&names, UID, Some(id)), Some(("n".into(), pod_name.into())), "{id}");
        assert_eq!(names.pod_container(UID, id).as_deref(), Some(container), "{id}");
        // Only for the pod that it was made for.
        assert_eq!(pod(&names, "ffffffff-0000-4444-8888-000000000000", Some(id)), None, "{id}");
    }
    for id in ["dd", "ee", "ff"] {
        assert_eq!((names.pod_of(id), names.pod_container(UID, id)), (None, None), "{id}");
    }
}

#[test]
fn containers_are_named_by_their_runtime() {
    let (_root, names) = fixture(&[
        ("var/lib/docker/containers/aa/config.v2.json", r#"{"ID":"aa","Name":"/web"}"#),
        ("var/lib/docker/containers/bb/config.v2.json", r#"{"Name":"#),
        (
            "var/lib/containers/storage/overlay-containers/containers.json",
            r#"[{"id":"cc","names":["db"]},{"id":"dd"}]"#,
        ),
        (
            "var/lib/containers/storage/vfs-containers/volatile-containers.json",
            r#"[{"id":"ee","names":["once"]}]"#,
        ),
        (
            "run/containerd/io.containerd.runtime.v2.task/default/ff/config.json",
            r#"{"annotations":{"nerdctl/name":"job"}}"#,
        ),
        (
            "var/lib/containers/storage/overlay-containers/cc/userdata/config.json",
            r#"{"linux":{"cgroupsPath":"system.slice/db.service/libpod-payload-cc"}}"#,
        ),
    ]);
    let name = |runtime, id| names.container(runtime, id, &Owner::Root).map(|named| named.name);
    assert_eq!(name(Runtime::Docker, "aa").as_deref(), Some("web"));
    assert_eq!(name(Runtime::Docker, "bb"), None);
    assert_eq!(name(Runtime::Podman, "cc").as_deref(), Some("db"));
    assert_eq!(name(Runtime::Podman, "dd"), None);
    assert_eq!(name(Runtime::Podman, "ee").as_deref(), Some("once"));
    assert_eq!(name(Runtime::Containerd, "ff").as_deref(), Some("job"));
    let of_unit = |unit: &str| names.container(Runtime::Podman, "cc", &Owner::Unit(unit.into()));
    assert_eq!(of_unit("db.service").map(|named| named.name).as_deref(), Some("db"));
    assert_eq!(of_unit("evil.service"), None);
}

#[test]
fn a_namespace_of_containerds_is_believed_if_its_bundle_agrees() {
    let bundle = |path: &str| {
        format!(r#"{{"annotations":{{"nerdctl/name":"job"}},"linux":{{"cgroupsPath":"{path}"}}}}"#)
    };
    let (_root, names) = fixture(&[
        ("run/containerd/io.containerd.runtime.v2.task/gpu/aa/config.json", &bundle("/gpu/aa")),
        ("run/containerd/io.containerd.runtime.v2.task/gpu/bb/config.json", &bundle("/other/bb")),
    ]);
    let name = |id, parent| names.adopted(id, parent).map(|(runtime, named)| (runtime, named.name));
    assert_eq!(name("aa", "/gpu"), Some((Runtime::Containerd, "job".into())));
    assert_eq!(name("bb", "/gpu"), None);
    assert_eq!(name("aa", "/other"), None);
    assert_eq!(name("aa", "/gpu/gpu"), None);
}

#[test]
fn whose_namespace_a_pod_is_in_makes_a_team_only_where_it_is_asked_for() {
    let (root, _) = fixture(&[]);
    let name = PodName { namespace: "team-a".into(), pod: "p".into(), from: "table" };
    let team = |asked, name| HostNames::new(Host::at(root.path())).with_namespaces(asked).team("u", name);
    assert_eq!(team(true, Some(&name)), Team::Known("team-a".into()));
    assert_eq!(team(true, None), Team::NotAsked);
    assert_eq!(team(false, Some(&name)), Team::NotAsked);
}

#[test]
fn stores_that_were_moved_are_found() {
    let (_root, names) = fixture(&[
        ("etc/docker/daemon.json", r#"{"data-root":"/data/docker"}"#),
        ("data/docker/containers/aa/config.v2.json", r#"{"Name":"/web"}"#),
        ("data/docker/containers/aa/hostconfig.json", r#"{"CgroupParent":"/actions_job"}"#),
        ("etc/containers/storage.conf", "[storage]\ngraphroot = \"/data/podman\"\n"),
        ("data/podman/overlay-containers/containers.json", r#"[{"id":"cc","names":["db"]}]"#),
    ]);
    let name = |runtime, id| names.container(runtime, id, &Owner::Root).map(|named| named.name);
    assert_eq!(name(Runtime::Docker, "aa").as_deref(), Some("web"));
    assert_eq!(name(Runtime::Podman, "cc").as_deref(), Some("db"));
    assert_eq!(names.adopted("aa", "/actions_job").map(|(_, named)| named.name).as_deref(), Some("web"));
    assert_eq!(names.adopted("aa", "/mine"), None);
}

#[test]
fn a_users_store_names_only_that_users_and_only_from_own_files() {
    let own = rustix::process::getuid().as_raw();
    let (root, names) = fixture(&[
        ("etc/passwd", &format!("ann:x:{own}:1000::/home/ann:/bin/sh\nbob:x:77:77::/home/bob:/bin/sh\n")),
        (
            "home/ann/.local/share/containers/storage/overlay-containers/containers.json",
            r#"[{"id":"ee","names":["mine"]}]"#,
        ),
        (
            "var/lib/containers/storage/overlay-containers/containers.json",
            r#"[{"id":"cc","names":["roots"]}]"#,
        ),
        ("home/ann/.local/share/docker/containers/aa/config.v2.json", r#"{"Name":"/web"}"#),
    ]);
    // bob's store is a link to root's.
    fs::create_dir_all(root.path().join("home/bob/.local/share/containers")).unwrap();
    std::os::unix::fs::symlink(
        root.path().join("var/lib/containers/storage"),
        root.path().join("home/bob/.local/share/containers/storage"),
    )
    .unwrap();
    let name = |runtime, id, uid| names.container(runtime, id, &Owner::User(uid)).map(|named| named.name);
    assert_eq!(name(Runtime::Podman, "ee", own).as_deref(), Some("mine"));
    assert_eq!(name(Runtime::Docker, "aa", own).as_deref(), Some("web"));
    assert_eq!(name(Runtime::Podman, "cc", own), None);
    assert_eq!(name(Runtime::Podman, "cc", 77), None);
    assert_eq!(names.container(Runtime::Podman, "ee", &Owner::Root), None);
    assert_eq!(names.user(77).as_deref(), Some("bob"));
    assert_eq!(names.user(1001), None);
}

#[test]
fn units_are_described_by_their_files() {
    let (_root, names) = fixture(&[
        ("usr/lib/systemd/system/a.service", "[Unit]\nDescription=Vendor\n"),
        ("etc/systemd/system/a.service", "[Unit]\nDescription=Ours\n"),
        ("usr/lib/systemd/system/foo@.service", "[Unit]\nDescription=Foo number %i\n"),
    ]);
    assert_eq!(names.unit_description("a.service").as_deref(), Some("Ours"));
    assert_eq!(names.unit_description("foo@3.service").as_deref(), Some("Foo number 3"));
    assert_eq!(names.unit_description("../../etc/passwd"), None);
}

#[test]
fn hostile_names_are_cleaned_and_cut() {
    assert_eq!(clean("a\nb\u{1b}[31m\u{202e}"), "a\\u{a}b\\u{1b}[31m\\u{202e}");
    assert_eq!(clean("größe"), "größe");
    assert!(clean(&"é".repeat(500)).len() <= MAX_NAME);
    assert!(clean(&"\n".repeat(500)).len() <= MAX_NAME);
    assert_ne!(clean(&format!("{}a", "x".repeat(300))), clean(&format!("{}b", "x".repeat(300))));
}

/// A `dockerd` with PID 70 as files: its user, its cgroup, its command line; and where its PID namespace is not the host's.
fn dockerd(uid: u32, cgroup: &str, line: &str, namespace: &str) -> (tempfile::TempDir, HostNames) {
    let store = r#"{"Name":"/web"}"#;
    let (root, names) = fixture(&[
        ("run/docker.pid", "70\n"),
        ("proc/70/comm", "dockerd\n"),
        ("proc/70/status", &format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")),
        ("proc/70/cgroup", &format!("0::{cgroup}\n")),
        ("proc/70/cmdline", line),
        ("srv/docker.json", r#"{"data-root":"/srv/b"}"#),
        ("srv/a/containers/aa/config.v2.json", store),
        ("srv/b/containers/bb/config.v2.json", store),
    ]);
    let place = root.path().join("proc/70/ns");
    fs::create_dir_all(&place).unwrap();
    std::os::unix::fs::symlink(namespace, place.join("pid")).unwrap();
    (root, names)
}

#[test]
fn c26_docker_says_where_it_keeps_its_containers() {
    const HOST: &str = "pid:[4026531836]";
    let name = |id: &str, uid, cgroup: &str, line: &str, namespace| {
        let (_root, names) = dockerd(uid, cgroup, line, namespace);
        names.container(Runtime::Docker, id, &Owner::Root).map(|named| named.name)
    };
    let unit = "/system.slice/docker.service";
    let of = |id, line| name(id, 0, unit, line, HOST).as_deref() == Some("web");
    assert!(of("aa", "dockerd\0--data-root\0/srv/a\0"));
    assert!(of("aa", "/usr/bin/dockerd\0-H\0fd://\0--data-root=/srv/a\0"));
    assert!(of("aa", "dockerd\0-g\0/srv/a\0"));
    assert!(of("bb", "dockerd\0--config-file=/srv/docker.json\0"));
    assert!(of("aa", "dockerd\0--config-file=/srv/docker.json\0--data-root=/srv/a\0"), "the flag counts");
    for nothing in
        ["dockerd\0", "dockerd\0--data-root\0", "dockerd\0--data-root=\0", "", "dockerd\0--data-root=srv/a\0"]
    {
        assert!(!of("aa", nothing), "{nothing:?}");
    }
    // A stale PID file, and whom that PID may be by now.
    let line = "dockerd\0--data-root=/srv/a\0";
    assert_eq!(name("aa", 1000, unit, line, HOST), None);
    assert_eq!(name("aa", 0, unit, line, "pid:[4026532181]"), None);
    let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    assert_eq!(name("aa", 0, &format!("/docker/{id}"), line, HOST), None);
    assert_eq!(name("aa", 0, "/user.slice/user-1000.slice/session-1.scope", line, HOST), None);
}
