//! Owns Docker: `dockerd` with its own containerd, and one container.

use anyhow::Result;
use serde_json::json;

use crate::{
    Expected, HOST_PROC, Stage,
    enclosure::{Daemon, Leavings},
    image::{IMAGE, archive},
};

/// No networks and no layers in the kernel, which is more than sandboxes allow.
const DOCKERD: [&str; 6] =
    ["dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver", "vfs"];

/// A daemon with the image in it.
fn start(stage: &Stage, more: &[&str]) -> Result<Daemon> {
    let mut dockerd = stage.enclosure.daemon("dockerd", &[&DOCKERD, more].concat(), &[])?;
    dockerd.until(|| stage.enclosure.run(&["docker", "info"]).is_ok())?;
    let archive = archive(&stage.directory())?.display().to_string();
    stage.enclosure.run(&["docker", "load", "--input", &archive])?;
    Ok(dockerd)
}

/// A container's id.
fn container(stage: &Stage, name: &str) -> Result<String> {
    let directory = stage.directory().display().to_string();
    let environment: Vec<String> =
        stage.environment(true).iter().map(|(key, value)| format!("--env={key}={value}")).collect();
    let (own, proc) = (format!("{directory}:{directory}"), format!("/proc:{HOST_PROC}"));
    let script = stage.script()?;
    let mut words = vec!["docker", "run", "--detach", "--name", name, "--network", "none"];
    words.extend(["--volume", &own, "--volume", &proc]);
    words.extend(environment.iter().map(String::as_str));
    words.extend([IMAGE, "/tenant", &script]);
    stage.enclosure.run(&words)
}

fn holds(stage: &Stage, name: &str) -> Result<()> {
    let id = container(stage, name)?;
    let expected = Expected {
        tenant: &format!("docker:{name}"),
        labels: &[("tenant_kind", "docker")],
        identity: json!({
            "kind": "docker_container", "id": id, "name": name, "container_id": id, "runtime": "docker", "uid": 0,
        }),
    };
    let pid = stage.expect(&expected)?;
    let docker = stage.enclosure.run(&["docker", "inspect", "--format", "{{.State.Pid}}", name])?;
    anyhow::ensure!(docker == pid.to_string(), "Docker runs {docker}, the driver saw {pid}");
    stage.enclosure.run(&["docker", "rm", "--force", name])?;
    Ok(())
}

#[test]
#[ignore = "needs Docker: make test-runtimes"]
fn c26_a_docker_container_has_its_name() -> Result<()> {
    let _leavings = Leavings::of(&["docker"])?;
    let stage = Stage::set(&["dockerd", "docker", "containerd"], "")?;
    let _dockerd = start(&stage, &[])?;
    holds(&stage, "trainer")
}

#[test]
#[ignore = "needs Docker: make test-runtimes"]
fn c26_docker_may_keep_its_containers_elsewhere() -> Result<()> {
    let _leavings = Leavings::of(&["docker"])?;
    let stage = Stage::set(&["dockerd", "docker", "containerd"], "")?;
    let root = stage.directory().join("docker-root").display().to_string();
    let _dockerd = start(&stage, &["--data-root", &root])?;
    holds(&stage, "elsewhere")
}
