//! Owns Podman, run by root: conmon, runc and one container.

use anyhow::Result;
use serde_json::json;

use crate::{
    Expected, HOST_PROC, Stage,
    enclosure::Leavings,
    image::{IMAGE, archive},
};

/// Not above what this process may: a sandbox lets nobody raise a limit.
const LIMITS: [&str; 2] = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"];

#[test]
#[ignore = "needs Podman: make test-runtimes"]
fn c89_a_podman_container_has_its_name() -> Result<()> {
    let _leavings = Leavings::of(&["libpod_parent", "machine.slice"])?;
    let stage = Stage::set(&["podman", "conmon", "runc"], "")?;
    let podman = ["podman", "--cgroup-manager=cgroupfs", "--storage-driver=vfs"];
    let run = |words: &[&str]| stage.enclosure.run(&[&podman, words].concat());
    run(&["load", "--quiet", "--input", &archive(&stage.directory())?.display().to_string()])?;
    let directory = stage.directory().display().to_string();
    let environment: Vec<String> =
        stage.environment(true).iter().map(|(key, value)| format!("--env={key}={value}")).collect();
    let (own, proc) = (format!("{directory}:{directory}"), format!("/proc:{HOST_PROC}"));
    let script = stage.script()?;
    let mut words = vec!["run", "--detach", "--name", "batch", "--network", "none"];
    words.extend(LIMITS);
    words.extend(["--volume", &own, "--volume", &proc]);
    words.extend(environment.iter().map(String::as_str));
    words.extend([IMAGE, "/tenant", &script]);
    let id = run(&words)?;
    let expected = Expected {
        tenant: "podman:batch",
        labels: &[("tenant_kind", "podman")],
        identity: json!({
            "kind": "podman_container", "id": id, "name": "batch", "container_id": id, "runtime": "podman", "uid": 0,
        }),
    };
    let held = stage.expect(&expected);
    run(&["rm", "--force", "--time", "0", "batch"])?;
    held.map(|_| ())
}
