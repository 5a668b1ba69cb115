//! Owns the recorded cgroup shapes and the tenant that each must give.
//! Refuses a host: names come from a table.

use super::*;
use crate::names::PodName;

const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
const UID: &str = "6a1b2c3d-0000-4444-8888-123456789abc";
const HASH: &str = "0123456789abcdef0123456789abcdef";

struct Table;

impl Names for Table {
    fn user(&self, uid: u32) -> Option<String> {
        match uid {
            0 => Some("root".into()),
            1000 => Some("ann".into()),
            _ => None,
        }
    }

    fn pod(&self, uid: &str) -> Option<PodName> {
        let pod = match uid {
            UID => "trainer-0",
            HASH => "etcd-n1",
            _ => return None,
        };
        Some(PodName { namespace: "team-a".into(), pod: pod.into() })
    }

    fn pod_container(&self, _: &str, id: &str) -> Option<String> {
        (id == ID).then(|| "main".into())
    }

    fn container(&self, runtime: Runtime, id: &str, _: u32) -> Option<String> {
        (runtime == Runtime::Docker && id == ID).then(|| "web".into())
    }
}

fn at(path: &str) -> Identity {
    identify(&format!("0::{path}\n"), 0, CgroupView::Host, &Table)
}

/// Each path with the tenant it must give; `{id}`, `{uid}`, `{uid_}` and `{hash}` are filled in.
fn expect(rows: &[(&str, &str)]) {
    for (path, tenant) in rows {
        let fill = |text: &str| {
            text.replace("{id}", ID)
                .replace("{uid}", UID)
                .replace("{uid_}", &UID.replace('-', "_"))
                .replace("{hash}", HASH)
        };
        assert_eq!(at(&fill(path)).tenant.name, fill(tenant), "{path}");
    }
}

#[test]
fn c83_kubepods_of_both_drivers() {
    for (path, runtime) in [
        (format!("/kubepods/burstable/pod{UID}/{ID}"), None),
        (format!("/kubepods/pod{UID}/{ID}"), None),
        (
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-{ID}.scope",
                UID.replace('-', "_")
            ),
            Some(Runtime::Containerd),
        ),
        (
            format!("/kubepods.slice/kubepods-pod{}.slice/crio-{ID}.scope", UID.replace('-', "_")),
            Some(Runtime::Crio),
        ),
        (
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
                 kubelet-kubepods-besteffort-pod{}.slice/docker-{ID}.scope",
                UID.replace('-', "_")
            ),
            Some(Runtime::Docker),
        ),
        (format!("/docker/{OTHER}/kubelet/kubepods/besteffort/pod{UID}/{ID}"), None),
        (format!("/kubepods/burstable/pod{UID}/{ID}/docker/{OTHER}"), None),
        (format!("/kubepods/burstable/pod{UID}/{ID}/system.slice/inner.service"), None),
    ] {
        let identity = at(&path);
        assert_eq!(identity.tenant.name, "pod:team-a/trainer-0", "{path}");
        assert_eq!(identity.pod_uid.as_deref(), Some(UID), "{path}");
        assert_eq!(identity.container_id.as_deref(), Some(ID), "{path}");
        assert_eq!(identity.tenant.container.as_deref(), Some("main"), "{path}");
        assert_eq!(identity.runtime, runtime, "{path}");
    }
}

#[test]
fn c85_colon_form_under_containerds_own_unit() {
    let path = format!(
        "/system.slice/containerd.service/kubepods-burstable-pod{}.slice:cri-containerd:{ID}",
        UID.replace('-', "_")
    );
    let identity = at(&path);
    assert_eq!(identity.tenant.name, "pod:team-a/trainer-0");
    assert_eq!((identity.container_id.as_deref(), identity.runtime), (Some(ID), Some(Runtime::Containerd)));
}

#[test]
fn c87_a_private_namespaces_root_is_nobody() {
    let private = identify("0::/\n", 0, CgroupView::Private, &Table);
    assert_eq!((private.tenant.kind, private.reason), (TenantKind::Unknown, Some("cgroup_namespace")));
    assert_eq!(at("/").tenant.name, "user:root");
}

#[test]
fn c88_paths_from_a_readers_own_namespace() {
    expect(&[
        (
            "/../../../kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice/cri-containerd-{id}.scope",
            "pod:team-a/trainer-0",
        ),
        ("/../../pod{uid}/{id}", "pod:team-a/trainer-0"),
        ("/../cri-containerd-{id}.scope", "containerd:0123456789ab"),
    ]);
    for path in ["/..", "/../..", "/../../sibling"] {
        let identity = at(path);
        assert_eq!(identity.tenant.kind, TenantKind::Unknown, "{path}");
        assert_eq!(identity.reason, Some("cgroup_outside_namespace"), "{path}");
    }
}

#[test]
fn c89_podman_rootful_rootless_and_its_helper() {
    expect(&[
        ("/machine.slice/libpod-{id}.scope", "podman:0123456789ab"),
        ("/machine.slice/libpod-{id}.scope/container", "podman:0123456789ab"),
        (
            "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{id}.scope/container",
            "podman:0123456789ab",
        ),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/x.service/libpod-payload-{id}",
            "podman:0123456789ab",
        ),
        ("/libpod_parent/libpod-{id}", "podman:0123456789ab"),
        ("/machine.slice/machine-libpod_pod_{id}.slice/libpod-{id}.scope", "podman:0123456789ab"),
        ("/machine.slice/libpod-conmon-{id}.scope", "system:conmon"),
        (
            "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-conmon-{id}.scope",
            "system:conmon",
        ),
    ]);
}

#[test]
fn c92_static_pods_keep_their_hash() {
    let identity = at(&format!("/kubepods/burstable/pod{HASH}/{ID}"));
    assert_eq!(identity.tenant.name, "pod:team-a/etcd-n1");
    assert_eq!(identity.pod_uid.as_deref(), Some(HASH));
}

#[test]
fn c92_a_pod_without_a_name_keeps_its_uid() {
    let uid = "ffffffff-0000-4444-8888-123456789abc";
    let identity = at(&format!("/kubepods/pod{uid}/{ID}"));
    assert_eq!(identity.tenant.name, format!("pod:{uid}"));
    assert_eq!(identity.reason, Some("pod_without_name"));
}

#[test]
fn c95_a_runtimes_own_unit_is_a_unit() {
    expect(&[
        ("/system.slice/containerd.service", "systemd:containerd.service"),
        ("/system.slice/docker.service", "systemd:docker.service"),
        ("/system.slice/crio.service", "systemd:crio.service"),
    ]);
}

#[test]
fn c96_units_sessions_and_the_host() {
    expect(&[
        ("/system.slice/ollama.service", "systemd:ollama.service"),
        ("/system.slice/ollama.service/worker", "systemd:ollama.service"),
        ("/system.slice/system-foo.slice/foo@3.service", "systemd:foo@3.service"),
        ("/gpu.slice/train.service", "systemd:train.service"),
        ("/system.slice/run-r0a1b.scope", "systemd:run-r0a1b.scope"),
        ("/user.slice/user-1000.slice/session-3.scope", "user:ann"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope", "user:ann"),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", "user:ann"),
        ("/user.slice/user-1001.slice/session-4.scope", "user:1001"),
        ("/init.scope", "user:root"),
        ("/", "user:root"),
    ]);
    let app = at("/user.slice/user-1000.slice/user@1000.service/app.slice/app-x.scope");
    assert_eq!(app.unit.as_deref(), Some("app-x.scope"));
    assert_eq!(at("/user.slice/user-1000.slice/session-3.scope").unit, None);
}

#[test]
fn docker_by_name_or_by_twelve_digits() {
    expect(&[
        ("/docker/{id}", "docker:web"),
        ("/system.slice/docker-{id}.scope", "docker:web"),
        ("/system.slice/docker-{id}.scope/system.slice/inner.service", "docker:web"),
        (
            "/docker/{id}/docker/fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210",
            "docker:web",
        ),
    ]);
    assert_eq!(at(&format!("/docker/{OTHER}")).tenant.name, "docker:fedcba987654");
}

#[test]
fn other_runtimes() {
    expect(&[
        ("/default/{id}", "containerd:0123456789ab"),
        ("/system.slice/nerdctl-{id}.scope", "containerd:0123456789ab"),
        ("/machine.slice/crio-{id}.scope", "crio:0123456789ab"),
        ("/ecs/{uid}/{id}", "ecs:{uid}"),
        ("/ecs/cluster/{hash}/{id}", "ecs:{hash}"),
        ("/ecs/{hash}/{hash}-2531612879", "ecs:{hash}"),
        ("/ecstasks.slice/ecstasks-{hash}.slice/docker-{id}.scope", "ecs:{hash}"),
        ("/lxc/web", "lxc:web"),
        ("/lxc.payload.web/system.slice/x.service", "lxc:web"),
        ("/lxc.payload/web/init.scope", "lxc:web"),
        ("/lxc.monitor.web", "system:lxc-monitor"),
    ]);
    assert_eq!(at(&format!("/nomad/{ID}")).reason, Some("container_of_unknown_runtime"));
}

#[test]
fn slurm_of_both_versions() {
    expect(&[
        ("/slurm/uid_1000/job_42/step_0/task_0", "slurm:42"),
        ("/slurm_node7/uid_0/job_1/step_batch", "slurm:1"),
        ("/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", "slurm:42"),
        ("/system.slice/node7_slurmstepd.scope/job_42/step_extern/user", "slurm:42"),
        ("/system.slice/slurmstepd.scope/system", "systemd:slurmstepd.scope"),
        ("/user.slice/job_42", "user:root"),
    ]);
}

#[test]
fn of_several_hierarchies_the_most_telling_is_believed() {
    let hybrid =
        "9:name=systemd:/system.slice/slurmd.service\n8:pids:/\n6:freezer:/slurm/uid_0/job_7/step_0\n0::/\n";
    assert_eq!(identify(hybrid, 0, CgroupView::Host, &Table).tenant.name, "slurm:7");
    let docker =
        format!("4:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/docker.service\n");
    assert_eq!(identify(&docker, 0, CgroupView::Host, &Table).tenant.name, "docker:web");
    let plain = "4:memory:/process_api/5c8b1fd8268540de7bd64a46bad33d47\n0::/\n";
    let identity = identify(plain, 1000, CgroupView::Host, &Table);
    assert_eq!((identity.tenant.name.as_str(), identity.reason), ("user:ann", Some("cgroup_not_recognised")));
}

#[test]
fn a_user_cannot_pose_as_a_pod_a_job_or_a_machine() {
    const MINE: &str = "/user.slice/user-1000.slice/user@1000.service";
    for forged in ["kubepods/pod{uid}/{id}", "slurm/uid_0/job_1/step_0", "lxc/web", "ecs/{uid}/{id}"] {
        let path = format!("{MINE}/{}", forged.replace("{uid}", UID).replace("{id}", ID));
        assert!(matches!(at(&path).tenant.kind, TenantKind::User | TenantKind::Unknown), "{path}");
    }
}

#[test]
fn hostile_paths_never_panic_and_never_become_somebody_else() {
    for path in [
        "",
        "/pod",
        "/kubepods/pod",
        "/kubepods/podzzzzzzzz-0000-4444-8888-123456789abc",
        "/docker/short",
        "/a:b:c",
        "/x-é.scope\u{202e}",
        "/job_1",
        "/user-99999999999.slice/x",
        "/libpod-conmon",
    ] {
        let identity = at(path);
        assert!(
            !matches!(identity.tenant.kind, TenantKind::Pod | TenantKind::Docker | TenantKind::Slurm),
            "{path}"
        );
        assert!(identity.tenant.name.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{path}");
    }
    assert_eq!(identify("", 0, CgroupView::Host, &Table).reason, Some("no_cgroup"));
    assert_eq!(identify("junk", 0, CgroupView::Host, &Table).reason, Some("no_cgroup"));
}
