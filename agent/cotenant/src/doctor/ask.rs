//! Owns questions to the agent that runs on this node.
//! Refuses to wait long, and to take no agent for a fault: a host is looked at before one is installed.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;

use crate::{
    client::{Access, ClientError, Told, reachable},
    discovery::chain,
};

const PATIENCE: Duration = Duration::from_secs(3);
/// 512 tenants on two GPUs make 7 MB of metrics.
const LONGEST: usize = 32 << 20;

/// What answers where the agent should.
#[derive(Clone, Debug)]
pub(super) struct Agent {
    pub(super) address: SocketAddr,
    /// `/status`, or why there is none.
    pub(super) status: Result<Value, Unasked>,
    /// The code and the text of `/readyz`.
    pub(super) readiness: Option<(u16, String)>,
}

/// Why an agent said nothing of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unasked {
    /// Nobody, or nobody yet, who would say it.
    Absent(String),
    /// Somebody who does not let this question in: why, and what would open.
    Unadmitted { reason: String, remedy: String },
}

pub(super) fn agent(listen: SocketAddr, access: &Access) -> Agent {
    let address = reachable(listen);
    let status = match ask(address, "/status", access) {
        Ok(told) => read(&told),
        Err(error) => Err(missed(&error)),
    };
    let readiness = status.is_ok().then(|| fetch(address, "/readyz", access).ok()).flatten();
    Agent { address, status, readiness }
}

/// The code and the text of one page.
pub(super) fn fetch(address: SocketAddr, path: &str, access: &Access) -> Result<(u16, String), String> {
    ask(address, path, access).map(|told| (told.status, told.text)).map_err(|error| chain(&error))
}

fn ask(address: SocketAddr, path: &str, access: &Access) -> Result<Told, ClientError> {
    access.get(&address.to_string(), path, LONGEST, PATIENCE)
}

fn read(told: &Told) -> Result<Value, Unasked> {
    if let (400 | 401, Some(remedy)) = (told.status, told.remedy()) {
        let reason = format!("it says {} to /status", told.status);
        return Err(Unasked::Unadmitted { reason, remedy: remedy.to_owned() });
    }
    let absent = |reason: String| Err(Unasked::Absent(reason));
    match told.status {
        200 => serde_json::from_str(&told.text)
            .or_else(|_| absent("what answers there is no cotenant agent".to_owned())),
        503 => absent("it is starting, or busy".to_owned()),
        code => absent(format!("what answers there says {code} to /status")),
    }
}

fn missed(error: &ClientError) -> Unasked {
    let reason = chain(error);
    match error {
        ClientError::Connect(_) | ClientError::Answer(_) | ClientError::Late(_) | ClientError::Request(_) => {
            Unasked::Absent(reason)
        }
        // Somebody is there: it was TLS that failed, or a file for it.
        ClientError::Handshake(_)
        | ClientError::Http(_)
        | ClientError::Name { .. }
        | ClientError::Read { .. }
        | ClientError::Pem { .. }
        | ClientError::Tls(_) => Unasked::Unadmitted {
            reason,
            remedy: "cotenant doctor --ca FILE, with --cert and --key where client certificates are wanted, \
                     --user and --password-file where passwords are"
                .to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(status: u16, text: &str) -> Result<Value, Unasked> {
        read(&Told { status, text: text.to_owned() })
    }

    #[test]
    fn a_closed_door_is_told_from_an_empty_house() {
        assert!(told(200, "{}").is_ok());
        for (status, text, key) in [
            (401, "a user and a password are wanted\n", "--user"),
            (400, "Client sent an HTTP request to an HTTPS server.\n", "--ca"),
        ] {
            let closed = told(status, text);
            assert!(
                matches!(&closed, Err(Unasked::Unadmitted { remedy, .. }) if remedy.contains(key)),
                "{closed:?}"
            );
        }
        for (status, text) in [(200, "<html>"), (503, ""), (404, ""), (400, "since: what?")] {
            assert!(matches!(told(status, text), Err(Unasked::Absent(_))), "{status} {text}");
        }
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        assert!(matches!(missed(&ClientError::Connect(refused)), Unasked::Absent(_)));
        let cut = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        assert!(matches!(missed(&ClientError::Handshake(cut)), Unasked::Unadmitted { .. }));
    }
}
