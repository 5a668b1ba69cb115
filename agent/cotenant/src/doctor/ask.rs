//! Owns questions to the agent that runs on this node.
//! Refuses to wait long, and to take no agent for a fault: a host is looked at before one is installed.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;

use crate::explain::reachable;

const PATIENCE: Duration = Duration::from_secs(3);
/// 512 tenants on two GPUs make 7 MB of metrics.
const LONGEST: u64 = 32 << 20;

/// What answers where the agent should.
#[derive(Clone, Debug)]
pub(super) struct Agent {
    pub(super) address: SocketAddr,
    /// `/status`, or why there is none.
    pub(super) status: Result<Value, String>,
    /// The code and the text of `/readyz`.
    pub(super) readiness: Option<(u16, String)>,
}

pub(super) fn agent(listen: SocketAddr) -> Agent {
    let address = reachable(listen);
    let status = fetch(address, "/status").and_then(|(code, text)| match code {
        200 => serde_json::from_str(&text).map_err(|_| "what answers there is no cotenant agent".to_owned()),
        503 => Err("it is starting".to_owned()),
        code => Err(format!("what answers there says {code} to /status")),
    });
    let readiness = status.is_ok().then(|| fetch(address, "/readyz").ok()).flatten();
    Agent { address, status, readiness }
}

/// The code and the text of one page.
pub(super) fn fetch(address: SocketAddr, path: &str) -> Result<(u16, String), String> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        // A proxy of the user's environment knows no loopback.
        .proxy(None)
        .build()
        .into();
    let mut response =
        agent.get(format!("http://{address}{path}")).call().map_err(|error| error.to_string())?;
    let code = response.status().as_u16();
    let text = response.body_mut().with_config().limit(LONGEST).read_to_string();
    text.map(|text| (code, text)).map_err(|error| error.to_string())
}
