//! Owns what names and views add to a path. The shapes themselves are in `tests/paths.tsv`.
//! Refuses a host: names come from a table.

use super::*;
use crate::names::PodName;

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";
const NOTED: &str = "11111111-0000-4444-8888-123456789abc";

/// Root's Docker and Podman know `ID` as `web` and `db`; so does ann's Podman, as `db`.
struct Table;

impl Names for Table {
    fn user(&self, uid: u32) -> Option<String> {
        match uid {
            0 => Some("root".into()),
            1000 => Some("ann".into()),
            _ => None,
        }
    }

    fn pod(&self, uid: &str, _: Option<&str>) -> Option<PodName> {
        (uid == UID || uid == NOTED).then(|| PodName {
            namespace: "team-a".into(),
            pod: "trainer-0".into(),
            from: "table",
        })
    }

    fn pod_container(&self, _: &str, id: &str) -> Option<String> {
        (id == ID).then(|| "main".into())
    }

    fn pod_of(&self, id: &str) -> Option<String> {
        (id == OTHER).then(|| NOTED.into())
    }

    fn container(&self, runtime: Runtime, id: &str, owner: &Owner) -> Option<Named> {
        let name = match (runtime, owner) {
            (Runtime::Docker, Owner::Root) => "web",
            (Runtime::Podman, Owner::Root | Owner::User(1000)) => "db",
            (Runtime::Podman, Owner::Unit(unit)) if unit == "db.service" => "db",
            _ => return None,
        };
        (id == ID).then(|| Named { name: name.into(), from: "table" })
    }

    fn adopted(&self, id: &str, parent: &str) -> Option<(Runtime, Named)> {
        (id == ID && parent == "/actions_job")
            .then(|| (Runtime::Docker, Named { name: "job".into(), from: "table" }))
    }
}

fn at(path: &str) -> Identity {
    identify(&format!("0::{path}\n"), Some(0), &CgroupView::Host, &Table)
}

fn tenant(path: &str) -> String {
    at(path).tenant.name
}

#[test]
fn a_pod_and_its_container_are_named() {
    let identity = at(&format!("/kubepods/burstable/pod{UID}/{ID}"));
    assert_eq!(identity.tenant.name, "pod:team-a/trainer-0");
    assert_eq!(identity.tenant.container.as_deref(), Some("main"));
    assert_eq!(identity.name.as_deref(), Some("team-a/trainer-0"));
    assert_eq!((identity.reason, identity.named_by), (None, Some("table")));
}

#[test]
fn c87_a_private_namespaces_root_is_nobody() {
    let private = identify("0::/\n", Some(0), &CgroupView::Private { pod: None }, &Table);
    assert_eq!((private.kind, private.reason), (Kind::Unknown, Some("cgroupns")));
    assert_eq!(private.tenant.name, "unknown:cgroupns");
    assert_eq!(tenant("/"), "user:root");
}

#[test]
fn c88_a_container_beside_the_reader_is_of_the_readers_pod() {
    let view = CgroupView::Private { pod: Some(UID.into()) };
    for path in [format!("/../cri-containerd-{OTHER}.scope"), format!("/../{OTHER}")] {
        let identity = identify(&format!("0::{path}\n"), Some(0), &view, &Table);
        assert_eq!(identity.pod_uid.as_deref(), Some(UID), "{path}");
        assert_eq!(identity.container_id.as_deref(), Some(OTHER), "{path}");
    }
    // Two levels up is somebody else's.
    let identity = identify(&format!("0::/../../{OTHER}\n"), Some(0), &view, &Table);
    assert_eq!(identity.pod_uid, None);
}

#[test]
fn what_the_runtime_noted_names_the_pod_that_the_path_does_not() {
    let identity = at(&format!("/system.slice/cri-containerd-{OTHER}.scope"));
    assert_eq!((identity.kind, identity.pod_uid.as_deref()), (Kind::KubernetesContainer, Some(NOTED)));
    // A user's container is never asked for a pod.
    let users =
        at(&format!("/user.slice/user-1000.slice/user@1000.service/user.slice/nerdctl-{OTHER}.scope"));
    assert_eq!((users.pod_uid, users.tenant.name), (None, "containerd:ann/fedcba987654".into()));
}

#[test]
fn a_users_container_never_takes_roots_name() {
    const MINE: &str = "/user.slice/user-1000.slice/user@1000.service/user.slice";
    assert_eq!(tenant(&format!("/docker/{ID}")), "docker:web");
    assert_eq!(tenant(&format!("{MINE}/docker-{ID}.scope")), "docker:ann/0123456789ab");
    assert_eq!(tenant(&format!("/machine.slice/libpod-{ID}.scope")), "podman:db");
    assert_eq!(tenant(&format!("{MINE}/libpod-{ID}.scope")), "podman:ann/db");
    assert_eq!(tenant(&format!("/user.slice/user-1001.slice/libpod-{ID}.scope")), "podman:1001/0123456789ab");
}

#[test]
fn a_units_container_is_named_only_if_the_store_put_it_there() {
    let quadlet = at(&format!("/system.slice/db.service/libpod-payload-{ID}"));
    assert_eq!((quadlet.tenant.name.as_str(), quadlet.reason), ("podman:db", None));
    let forged = at(&format!("/system.slice/evil.service/libpod-payload-{ID}"));
    assert_eq!(forged.tenant.name, "systemd:evil.service");
    assert_eq!((forged.name, forged.reason), (None, Some("container_not_confirmed")));
}

#[test]
fn a_container_below_a_parent_of_its_own_is_asked_for() {
    assert_eq!(tenant(&format!("/actions_job/{ID}")), "docker:job");
    assert_eq!(tenant(&format!("/mine/{ID}")), "unknown:container_of_unknown_runtime");
}

#[test]
fn what_is_nested_is_told_and_not_believed() {
    let kind = at(&format!("/docker/{ID}/kubelet/kubepods/besteffort/pod{UID}/{OTHER}"));
    assert_eq!((kind.tenant.name.as_str(), kind.pod_uid), ("docker:web", None));
    assert_eq!(kind.nested, Some(format!("pod {UID}")));
    let alone = at(&format!("/docker/{ID}"));
    assert_eq!(alone.nested, None);
}

#[test]
fn a_path_alone_has_no_user() {
    let identity = |path: &str| identify(&format!("0::{path}\n"), None, &CgroupView::Host, &Table);
    assert_eq!(identity("/").tenant.name, "system:host");
    assert_eq!((identity("/").kind, identity("/").uid), (Kind::Host, None));
    assert_eq!(identity("/nobody/knows").kind, Kind::Unknown);
    assert_eq!(identity("/user.slice/user-1000.slice/session-1.scope").uid, Some(1000));
}

#[test]
fn hostile_names_are_printable_bounded_and_apart() {
    let long = "x".repeat(200);
    for path in [
        "/system.slice/a\u{202e}b.service".to_owned(),
        format!("/system.slice/{long}.service"),
        format!("/lxc/{long}"),
        format!("/default/{}", "\u{1b}".repeat(300)),
        format!("/{}", "é/".repeat(2000)),
    ] {
        let identity = at(&path);
        let shown = [Some(identity.tenant.name), identity.id, identity.name, identity.path];
        for text in shown.into_iter().flatten() {
            assert!(text.len() <= 1024, "{path}");
            assert!(text.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{path}");
        }
    }
    assert_ne!(
        tenant(&format!("/system.slice/{long}a.service")),
        tenant(&format!("/system.slice/{long}b.service"))
    );
    // Deep paths cost no stack.
    assert_eq!(tenant(&"/a.service".repeat(20_000)), "systemd:a.service");
}

/// The table, and what the API server says of every pod.
struct Labelled(Team);

impl Names for Labelled {
    fn user(&self, uid: u32) -> Option<String> {
        Table.user(uid)
    }

    fn pod(&self, uid: &str, container: Option<&str>) -> Option<PodName> {
        Table.pod(uid, container)
    }

    fn pod_container(&self, uid: &str, id: &str) -> Option<String> {
        Table.pod_container(uid, id)
    }

    fn pod_of(&self, id: &str) -> Option<String> {
        Table.pod_of(id)
    }

    fn container(&self, runtime: Runtime, id: &str, owner: &Owner) -> Option<Named> {
        Table.container(runtime, id, owner)
    }

    fn adopted(&self, id: &str, parent: &str) -> Option<(Runtime, Named)> {
        Table.adopted(id, parent)
    }

    fn team(&self, _: &str, _: Option<&PodName>) -> Team {
        self.0.clone()
    }
}

#[test]
fn c05_a_label_makes_a_pod_a_teams_and_takes_nobody_elses_name() {
    let at = |team: Team, path: &str| {
        identify(&format!("0::{path}\n"), Some(0), &CgroupView::Host, &Labelled(team))
    };
    let pod = format!("/kubepods/burstable/pod{UID}/{ID}");
    for claimed in ["blue", "system:mps-server", "pod:team-b/other", "other"] {
        let identity = at(Team::Known(claimed.into()), &pod);
        assert_eq!(
            (identity.tenant.name.as_str(), identity.tenant.kind),
            (&*format!("team:{claimed}"), TenantKind::Team)
        );
        // Who claims it stays to be seen.
        let Tenant { namespace, pod, container, .. } = &identity.tenant;
        assert_eq!(
            (namespace.as_deref(), pod.as_deref(), container.as_deref()),
            (Some("team-a"), Some("trainer-0"), Some("main"))
        );
        assert_eq!(
            (identity.pod_uid.as_deref(), identity.name.as_deref()),
            (Some(UID), Some("team-a/trainer-0"))
        );
        assert!(!identity.unsettled);
    }
    for (team, unsettled) in [(Team::NotAsked, false), (Team::None, false), (Team::NotYet, true)] {
        let identity = at(team, &pod);
        assert_eq!((identity.tenant.name.as_str(), identity.unsettled), ("pod:team-a/trainer-0", unsettled));
    }
    let unit = at(Team::Known("blue".into()), "/system.slice/ollama.service");
    assert_eq!(unit.tenant.name, "systemd:ollama.service");
}
