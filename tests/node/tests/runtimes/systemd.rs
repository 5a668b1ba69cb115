//! Owns units and scopes by hand-made cgroups: systemd is no process that a test can start on a host that it does not run.

use anyhow::Result;
use cotenant_node::Cgroup;
use serde_json::{Value, json};

use crate::{Expected, Stage};

fn holds(path: &str, tenant: &str, kind: &str, identity: Value) -> Result<()> {
    let stage = Stage::set(&[], "")?;
    let script = std::fs::read_to_string(stage.script()?)?;
    let cgroup = Cgroup::create(path)?;
    let mut workload = stage.world.node.tenant("workload", &cgroup, &script, &[])?;
    let held = stage.expect(&Expected { tenant, labels: &[("tenant_kind", kind)], identity });
    workload.kill()?;
    held.map(|_| ())
}

#[test]
#[ignore = "with the others: make test-runtimes"]
fn a_service_and_a_scope_have_their_names() -> Result<()> {
    let own = std::process::id();
    for unit in
        [format!("triton-{own}.service"), format!("trainer@{own}.service"), format!("run-r{own}.scope")]
    {
        let identity = json!({ "kind": "systemd_unit", "id": unit, "name": unit, "unit": unit, "uid": 0 });
        holds(&format!("system.slice/{unit}"), &format!("systemd:{unit}"), "systemd", identity)?;
    }
    Ok(())
}

#[test]
#[ignore = "with the others: make test-runtimes"]
fn a_session_is_its_users() -> Result<()> {
    // Whoever the process runs as: the slice says whose session it is. 65534 is nobody's on every distribution.
    let unit = format!("session-{}.scope", std::process::id());
    let identity = json!({ "kind": "user", "id": "65534", "name": "nobody", "unit": unit, "uid": 65534 });
    holds(&format!("user.slice/user-65534.slice/{unit}"), "user:nobody", "user", identity)
}
