//! Owns a simulated node for tests that are not written in Rust: it is there until standard input ends.
//! Refuses to start an agent or a tenant: that is what those tests are about.

use std::{io::Read, path::Path};

use anyhow::{Context, Result};
use cotenant_node::SimulatedNode;
use cotenant_sim_state::NodeConfig;

fn main() -> Result<()> {
    let directory = std::env::args().nth(1).context("usage: cotenant-sim-node DIRECTORY")?;
    let _node = SimulatedNode::create(Path::new(&directory), &NodeConfig::h200(2, 0.0))?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new()).context("standard input")?;
    Ok(())
}
