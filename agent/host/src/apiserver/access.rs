//! Owns where the API server is and as whom it is asked: from the pod's environment and its service account's files.
//! Refuses plain HTTP, which would show the token, and to keep a token: kubelet replaces the file.

use std::path::{Path, PathBuf};

use http::{HeaderValue, Uri};
use rustls::pki_types::{CertificateDer, pem::PemObject};

use crate::read;

const MAX_TOKEN: u64 = 64 << 10;
/// Names of nodes are DNS subdomains.
const MAX_NODE: usize = 253;

#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error(
        "KUBERNETES_SERVICE_HOST is not set, so this is no pod; set kubernetes.api_server, or api_watch = false"
    )]
    NoServer,
    #[error("the API server's address {given:?} is not usable; give one such as https://10.0.0.1:6443")]
    Server { given: String },
    #[error(
        "this node's name is not known; set K8S_NODE_NAME from spec.nodeName (Downward API), or kubernetes.node"
    )]
    NoNode,
    #[error("{given:?} is not a node's name; kubectl get nodes lists them")]
    Node { given: String },
    #[error("cannot read the service account's token {}; is automountServiceAccountToken on?", path.display())]
    Token { path: PathBuf, source: crate::HostError },
    #[error("the service account's token {} is empty or no token", path.display())]
    NoToken { path: PathBuf },
    #[error("cannot read the API server's certificate authority {}", path.display())]
    Authority { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("{} has no certificate that can be used", path.display())]
    NoAuthority { path: PathBuf },
    #[error("TLS to the API server cannot be set up")]
    Tls(#[from] rustls::Error),
}

/// Whom to ask about which node, as far as configuration and environment say.
#[derive(Clone, Debug)]
pub(super) struct Access {
    /// Without a slash at its end.
    pub(super) server: String,
    pub(super) node: String,
    credentials: PathBuf,
}

impl Access {
    /// `variable` looks into the environment. What is configured goes first.
    pub(super) fn find(
        server: &str,
        node: &str,
        credentials: &Path,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, AccessError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let server = if server.is_empty() {
            let host = variable("KUBERNETES_SERVICE_HOST").ok_or(AccessError::NoServer)?;
            let port = variable("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".to_owned());
            let host = if host.contains(':') { format!("[{host}]") } else { host };
            format!("https://{host}:{port}")
        } else {
            server.trim_end_matches('/').to_owned()
        };
        let wrong = || AccessError::Server { given: server.clone() };
        let uri: Uri = server.parse().map_err(|_| wrong())?;
        if uri.scheme_str() != Some("https") || uri.host().is_none_or(str::is_empty) || uri.query().is_some()
        {
            return Err(wrong());
        }
        let node = if node.is_empty() {
            let named = ["K8S_NODE_NAME", "NODE_NAME"].into_iter().find_map(variable);
            named.ok_or(AccessError::NoNode)?
        } else {
            node.to_owned()
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        if node.len() > MAX_NODE || !node.bytes().all(plain) {
            return Err(AccessError::Node { given: node.chars().take(80).collect() });
        }
        Ok(Self { server, node, credentials: credentials.to_owned() })
    }

    /// As the file has it now: kubelet writes a new one before the old one is over.
    pub(super) fn token(&self) -> Result<HeaderValue, AccessError> {
        let path = self.credentials.join("token");
        let token = match read::text(&path, MAX_TOKEN) {
            Ok(token) => token,
            Err(source) => return Err(AccessError::Token { path, source }),
        };
        let token = token.trim();
        let value = HeaderValue::try_from(format!("Bearer {token}")).ok().filter(|_| !token.is_empty());
        let mut value = value.ok_or(AccessError::NoToken { path })?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Who may have signed the server's certificate.
    pub(super) fn authority(&self) -> Result<rustls::RootCertStore, AccessError> {
        let path = self.credentials.join("ca.crt");
        let certificates =
            CertificateDer::pem_file_iter(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let certificates = match certificates {
            Ok(certificates) => certificates,
            Err(source) => return Err(AccessError::Authority { path, source }),
        };
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(certificates);
        if roots.is_empty() { Err(AccessError::NoAuthority { path }) } else { Ok(roots) }
    }

    /// `<namespace>:<name>` of the account, as RBAC's commands take it, if the token's directory says the namespace.
    pub(super) fn namespace(&self) -> Option<String> {
        let text = read::text(&self.credentials.join("namespace"), 256).ok()?;
        let text = text.trim();
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (!text.is_empty() && text.bytes().all(plain)).then(|| text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(server: &str, node: &str, environment: &[(&str, &str)]) -> Result<Access, AccessError> {
        let variable =
            |name: &str| environment.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned());
        Access::find(server, node, Path::new("/nowhere"), variable)
    }

    #[test]
    fn c04_a_pods_environment_says_where_and_which_node() {
        let pod = [
            ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
            ("KUBERNETES_SERVICE_PORT", "6443"),
            ("K8S_NODE_NAME", "gpu-1"),
        ];
        let access = find("", "", &pod).unwrap();
        assert_eq!((access.server.as_str(), access.node.as_str()), ("https://10.0.0.1:6443", "gpu-1"));
        let six = find("", "n", &[("KUBERNETES_SERVICE_HOST", "fd00::1")]).unwrap();
        assert_eq!(six.server, "https://[fd00::1]:443");
        let given = find("https://rancher.example/k8s/clusters/c-1/", "n", &pod).unwrap();
        assert_eq!(
            (given.server.as_str(), given.node.as_str()),
            ("https://rancher.example/k8s/clusters/c-1", "n")
        );
    }

    #[test]
    fn what_is_missing_is_named_with_the_remedy() {
        let said = |server: &str, node: &str| find(server, node, &[]).unwrap_err().to_string();
        assert!(said("", "n").contains("kubernetes.api_server"));
        assert!(said("https://a", "").contains("K8S_NODE_NAME"));
        for wrong in ["http://10.0.0.1:8080", "10.0.0.1:6443", "https://", "https://a?b=c", "ftp://a"] {
            assert!(matches!(find(wrong, "n", &[]), Err(AccessError::Server { .. })), "{wrong}");
        }
        // What would ask about other nodes, or for something else.
        for wrong in ["a,b", "n&limit=1", "a b", "", "n\n", &"x".repeat(254)] {
            assert!(find("https://a", wrong, &[]).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_token_is_read_anew_and_never_shown() {
        let directory = tempfile::tempdir().unwrap();
        let access = Access::find("https://a", "n", directory.path(), |_| None).unwrap();
        let write = |text: &str| std::fs::write(directory.path().join("token"), text).unwrap();
        assert!(matches!(access.token(), Err(AccessError::Token { .. })));
        write("one\n");
        assert_eq!(access.token().unwrap().as_bytes(), b"Bearer one");
        write("two");
        let token = access.token().unwrap();
        assert_eq!((token.as_bytes(), format!("{token:?}").contains("two")), (&b"Bearer two"[..], false));
        for wrong in ["", " \n", "a\nb"] {
            write(wrong);
            assert!(matches!(access.token(), Err(AccessError::NoToken { .. })), "{wrong:?}");
        }
        std::fs::write(directory.path().join("ca.crt"), "no certificate").unwrap();
        assert!(matches!(access.authority(), Err(AccessError::NoAuthority { .. })));
    }
}
