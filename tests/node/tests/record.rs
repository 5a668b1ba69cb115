//! Owns the claim that the recorded runs of a GPU host come about as they are written down, on a simulated node: the
//! same takes, tenants and clock, their bytes from the driver instead of `PyTorch`, in half the time.
//! Refuses to say anything of a GPU, or of `PyTorch`.

use std::{
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use cotenant_model::GpuId;
use cotenant_node::{SimulatedNode, artefacts};
use cotenant_sim_state::{NODE_VARIABLE, NodeConfig};

/// Several that fill one GPU together, and one request too large for the other. A forecaster says nothing for 30 s, so a
/// take must not be much shorter than it is.
const TAKES: &str = "6-several";

#[test]
fn takes_of_a_gpu_host_end_as_they_are_written_down() -> Result<()> {
    let place = tempfile::tempdir()?;
    let node = SimulatedNode::create(&place.path().join("node"), &NodeConfig::h200(2, 1.0))?;
    let library = node.directory.join("lib/libcuda.so.1");
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let config = format!(
        "[server]\nlisten = \"{address}\"\n[agent]\ninterval = \"200ms\"\n[nvml]\nlibrary = \"{}\"\ninterval = \"1s\"\n",
        node.directory.join("lib/libnvidia-ml.so.1").display()
    );
    // Another place keeps the recordings, to look at them.
    let out = std::env::var_os("OUT").map_or_else(|| place.path().join("out"), Into::into);
    let takes = std::env::var("COTENANT_TAKES").unwrap_or_else(|_| TAKES.to_owned());
    let answer = Command::new("bash")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu/record.sh"))
        .arg(artefacts()?.join("cotenant"))
        .args(["--backend", "driver", "--pace", "0.5", "--config", &config])
        .args(["--address", &format!("http://{address}"), "--gpus"])
        .args((0..2).map(|index| GpuId::from_uuid(node.state.uuid(index)).to_string()))
        .arg("--only")
        .args(takes.split_whitespace())
        .env("OUT", &out)
        .env(NODE_VARIABLE, &node.directory)
        .env("COTENANT_WORKLOAD_LIBCUDA", library)
        .stdin(Stdio::null())
        .output()
        .context("cannot run the takes")?;
    let said = String::from_utf8_lossy(&answer.stdout);
    println!("{said}{}", String::from_utf8_lossy(&answer.stderr));
    ensure!(answer.status.success(), "record.sh ended with {}", answer.status);
    for wrong in ["NOT AS MEANT", "FAILED", "TOO SHORT", "LEFT OUT", "replay says"] {
        ensure!(!said.contains(wrong), "{wrong}");
    }
    let (tenants, exact) = said
        .lines()
        .filter(|line| line.contains(" further than "))
        .fold((0, 0), |sum, line| (sum.0 + 1, sum.1 + usize::from(line.contains("; 0 of "))));
    ensure!(tenants >= 2 * takes.split_whitespace().count(), "only {tenants} tenants were compared");
    ensure!(tenants == exact, "of {tenants} tenants, {exact} are in the recording as they were");
    Ok(())
}
