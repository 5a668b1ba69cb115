//! Owns how this program asks an agent: in plain HTTP or by TLS, and as whom.
//! Refuses a certificate that nobody vouches for: there is no flag for that.

mod place;

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use clap::Args;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

pub(crate) use place::{AskError, Place, reachable};

/// How to get in where the agent's web configuration asks for it.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Access {
    /// Ask by TLS; the PEM file says who may have signed the agent's certificate
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Ask by TLS; the host's own list says who may have signed the agent's certificate
    #[arg(long)]
    tls: bool,
    /// The name in the agent's certificate, where it is not the address's
    #[arg(long, value_name = "NAME")]
    server_name: Option<String>,
    /// This client's certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// The key of this client's certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// User to ask as
    #[arg(long, value_name = "NAME", requires = "password_file")]
    user: Option<String>,
    /// File whose first line is the user's password
    #[arg(long, value_name = "FILE", requires = "user")]
    password_file: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    #[error(
        "TLS failed: does the agent speak TLS, is --ca the right authority, and does the agent want --cert?"
    )]
    Handshake(#[source] io::Error),
    #[error("{name:?} is no name that a certificate could have: give --server-name")]
    Name { name: String },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a PEM file with what is wanted", path.display())]
    Pem { path: PathBuf, source: rustls::pki_types::pem::Error },
    #[error("certificates cannot be used: do --cert and --key belong together?")]
    Tls(#[from] rustls::Error),
    #[error("it did not speak HTTP to the end (where client certificates are wanted: give --cert and --key)")]
    Http(#[from] hyper::Error),
    #[error("the question is no HTTP request")]
    Request(#[from] hyper::http::Error),
    #[error("no whole answer came: {0}")]
    Answer(String),
    #[error("no answer within {0:?}")]
    Late(Duration),
}

/// An answer as text.
pub(crate) struct Told {
    pub(crate) status: u16,
    pub(crate) text: String,
}

impl Told {
    /// What to do about a refusal of the door rather than of the question.
    pub(crate) fn remedy(&self) -> Option<&'static str> {
        match self.status {
            400 if self.text.contains("HTTPS server") => Some("the agent speaks TLS: give --ca (or --tls)"),
            401 => Some("the agent wants a user and a password: give --user and --password-file"),
            429 => Some("the agent's rate_limit is reached: try again"),
            503 => Some("the agent is busy or has just started: try again in a second"),
            _ => None,
        }
    }
}

impl Access {
    /// One question, for programs that wait for its answer.
    pub(crate) fn get(
        &self,
        address: &str,
        target: &str,
        longest: usize,
        patience: Duration,
    ) -> Result<Told, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(ClientError::Connect)?;
        let ask = async {
            let response = self.ask(address, target).await?;
            let status = response.status().as_u16();
            let body = Limited::new(response.into_body(), longest).collect().await;
            let body = body.map_err(|error| ClientError::Answer(error.to_string()))?.to_bytes();
            Ok(Told { status, text: String::from_utf8_lossy(&body).into_owned() })
        };
        runtime.block_on(async {
            tokio::time::timeout(patience, ask).await.unwrap_or(Err(ClientError::Late(patience)))
        })
    }

    /// Asks, and leaves the answer's body to be read as it comes.
    pub(crate) async fn ask(&self, address: &str, target: &str) -> Result<Response<Incoming>, ClientError> {
        let mut request = Request::get(target).header(header::HOST, address);
        if let (Some(user), Some(file)) = (&self.user, &self.password_file) {
            let text = std::fs::read_to_string(file)
                .map_err(|source| ClientError::Read { path: file.clone(), source })?;
            let password = text.lines().next().unwrap_or_default();
            let encoded = BASE64_STANDARD.encode(format!("{user}:{password}"));
            request = request.header(header::AUTHORIZATION, format!("Basic {encoded}"));
        }
        let request = request.body(Empty::<Bytes>::new())?;
        let stream = TcpStream::connect(address).await.map_err(ClientError::Connect)?;
        if !self.tls && self.ca.is_none() {
            return send(stream, request).await;
        }
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let name = self.server_name.as_deref().unwrap_or(host);
        let name =
            ServerName::try_from(name.to_owned()).map_err(|_| ClientError::Name { name: name.to_owned() })?;
        let connector = TlsConnector::from(Arc::new(self.config()?));
        let stream = connector.connect(name, stream).await.map_err(ClientError::Handshake)?;
        send(stream, request).await
    }

    fn config(&self) -> Result<ClientConfig, ClientError> {
        let mut roots = RootCertStore::empty();
        if let Some(file) = &self.ca {
            roots.add_parsable_certificates(certificates(file)?);
        } else {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let (Some(certificate), Some(key)) = (&self.cert, &self.key) else {
            return Ok(builder.with_no_client_auth());
        };
        let key = PrivateKeyDer::from_pem_file(key)
            .map_err(|source| ClientError::Pem { path: key.clone(), source })?;
        Ok(builder.with_client_auth_cert(certificates(certificate)?, key)?)
    }
}

fn certificates(file: &PathBuf) -> Result<Vec<CertificateDer<'static>>, ClientError> {
    let failed = |source| ClientError::Pem { path: file.clone(), source };
    CertificateDer::pem_file_iter(file).map_err(failed)?.collect::<Result<_, _>>().map_err(failed)
}

async fn send<S>(stream: S, request: Request<Empty<Bytes>>) -> Result<Response<Incoming>, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(driver);
    Ok(sender.send_request(request).await?)
}

/// A value as it stands in a query.
pub(crate) fn quoted(value: &str) -> String {
    value.bytes().fold(String::new(), |text, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text + std::str::from_utf8(&[byte]).unwrap_or_default()
        } else {
            text + &format!("%{byte:02X}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tenants_survive_a_query() {
        assert_eq!(quoted("pod:a-b/c d"), "pod%3Aa-b%2Fc%20d");
        assert_eq!(quoted("é&x=1"), "%C3%A9%26x%3D1");
    }

    #[test]
    fn a_refusal_of_the_door_says_which_key_is_missing() {
        let told = |status, text: &str| Told { status, text: text.into() }.remedy();
        assert!(told(401, "").is_some_and(|remedy| remedy.contains("--user")));
        assert!(
            told(400, "Client sent an HTTP request to an HTTPS server")
                .is_some_and(|remedy| remedy.contains("--ca"))
        );
        assert_eq!(told(400, "since: what?"), None);
    }
}
