//! Owns an API server for the pods of one node: real TLS, a token, lists by pages, watches, and everything that goes wrong.
//! Refuses to stand in for the client: what it hears is what a real server would.
#![allow(dead_code, reason = "two crates' tests share it, and neither uses all of it")]

use std::{
    convert::Infallible,
    fs, io,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::{StreamExt, wrappers::UnboundedReceiverStream};

type Body = BoxBody<Bytes, io::Error>;
type Failure = Box<dyn std::error::Error>;

/// What goes down an open watch: text, or `None` for a broken connection.
type Sent = Option<String>;

#[derive(Clone)]
pub(crate) struct Pod {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) labels: Vec<(String, String)>,
}

impl Pod {
    pub(crate) fn new(uid: &str, namespace: &str, name: &str, labels: &[(&str, &str)]) -> Self {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Self { uid: uid.to_owned(), namespace: namespace.to_owned(), name: name.to_owned(), labels }
    }

    /// As the server writes it down.
    pub(crate) fn object(&self, version: u64) -> String {
        let Self { uid, namespace, name, labels } = self;
        let labels: Vec<String> =
            labels.iter().map(|(key, value)| format!("{}:{}", quoted(key), quoted(value))).collect();
        format!(
            r#"{{"metadata":{{"uid":"{uid}","namespace":"{namespace}","name":"{name}","resourceVersion":"{version}","labels":{{{}}}}}}}"#,
            labels.join(",")
        )
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A code, words, and how many seconds the client is to wait.
type Refusal = (u16, &'static str, Option<u64>);

#[derive(Default)]
pub(crate) struct State {
    pub(crate) token: String,
    /// Answers to what comes next, before any other.
    pub(crate) refusals: Vec<Refusal>,
    /// The answer to everything, while there is one.
    pub(crate) refusing: Option<Refusal>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) version: u64,
    /// Path and query of everything that was asked.
    pub(crate) asked: Vec<String>,
    /// A list that goes on and on.
    pub(crate) endless: bool,
    watches: Vec<mpsc::UnboundedSender<Sent>>,
}

impl State {
    /// To everybody who watches, and says how many these are.
    fn send(&mut self, sent: &Sent) -> usize {
        self.watches.retain(|watch| watch.send(sent.clone()).is_ok());
        self.watches.len()
    }
}

pub(crate) struct Fake {
    state: Arc<Mutex<State>>,
    address: SocketAddr,
    directory: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    serving: Option<tokio::task::JoinHandle<()>>,
}

fn whole(status: u16, text: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(text.into()).map_err(|never: Infallible| match never {}).boxed();
    let mut response = Response::new(body);
    *response.status_mut() = status.try_into().unwrap_or_default();
    response
}

fn answer(state: &mut State, request: &Request<Incoming>) -> Response<Body> {
    let query = request.uri().to_string();
    state.asked.push(query.clone());
    let bearer = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    if bearer != Some(format!("Bearer {}", state.token).as_bytes()) {
        return whole(401, r#"{"kind":"Status","message":"Unauthorized","code":401}"#);
    }
    let next = if state.refusals.is_empty() { state.refusing } else { Some(state.refusals.remove(0)) };
    if let Some((status, message, after)) = next {
        let words = format!(r#"{{"kind":"Status","message":"{message}","code":{status}}}"#);
        let mut response = whole(status, words);
        if let Some(after) = after {
            response.headers_mut().insert(header::RETRY_AFTER, after.into());
        }
        return response;
    }
    if query.contains("watch=true") {
        let (watch, sent) = mpsc::unbounded_channel();
        state.watches.push(watch);
        let frames = UnboundedReceiverStream::new(sent).map(|sent| match sent {
            Some(text) => Ok(Frame::data(Bytes::from(text))),
            None => Err(io::Error::other("the connection breaks")),
        });
        return Response::new(BodyExt::boxed(StreamBody::new(frames)));
    }
    if state.endless {
        let chunk = || Ok(Frame::data(Bytes::from(vec![b' '; 1 << 20])));
        let chunks = tokio_stream::iter(std::iter::repeat_with(chunk));
        return Response::new(BodyExt::boxed(StreamBody::new(chunks)));
    }
    let items: Vec<String> = state.pods.iter().map(|pod| pod.object(state.version)).collect();
    // Two pages, where there is enough for two.
    let (first, second) = items.split_at(items.len().min(1));
    let (items, more) = match (query.contains("continue="), second.is_empty()) {
        (true, _) => (second, ""),
        (false, true) => (first, ""),
        (false, false) => (first, "a+b="),
    };
    let page = format!(
        r#"{{"metadata":{{"resourceVersion":"{}","continue":"{more}"}},"items":[{}]}}"#,
        state.version,
        items.join(",")
    );
    whole(200, page)
}

/// With a certificate of an authority that it makes, and whose certificate it leaves in the directory.
fn acceptor(directory: &Path) -> Result<tokio_rustls::TlsAcceptor, Failure> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    fs::write(directory.join("ca.crt"), issuer.pem())?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.subject_alt_names.push(SanType::IpAddress("127.0.0.1".parse()?));
    let key = KeyPair::generate()?;
    let certificate = CertificateDer::from(params.signed_by(&key, &issuer)?.der().to_vec());
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    Ok(tokio_rustls::TlsAcceptor::from(Arc::new(tls)))
}

impl Fake {
    pub(crate) fn start(pods: Vec<Pod>) -> Result<Self, Failure> {
        let directory = tempfile::tempdir()?;
        fs::write(directory.path().join("token"), "one\n")?;
        let state = State { token: "one".to_owned(), version: 10, pods, ..State::default() };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let address = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut fake =
            Self { state: Arc::new(Mutex::new(state)), address, directory, runtime, serving: None };
        fake.serve()?;
        Ok(fake)
    }

    /// As a server that was made anew: under the same address, by another authority.
    pub(crate) fn serve(&mut self) -> Result<(), Failure> {
        let acceptor = acceptor(self.directory.path())?;
        let listener = self.runtime.block_on(TcpListener::bind(self.address))?;
        let state = Arc::clone(&self.state);
        self.serving = Some(self.runtime.spawn(async move {
            // All end with this task.
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, state) = (acceptor.clone(), Arc::clone(&state));
                connections.spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = hyper::service::service_fn(move |request| {
                        let response =
                            answer(&mut state.lock().unwrap_or_else(PoisonError::into_inner), &request);
                        async move { Ok::<_, Infallible>(response) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        }));
        Ok(())
    }

    pub(crate) fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            let _ = self.runtime.block_on(serving);
        }
    }

    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Says how many heard it.
    pub(crate) fn send(&self, kind: &str, object: &str) -> usize {
        self.text(&format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
    }

    pub(crate) fn text(&self, text: &str) -> usize {
        self.with(|state| state.send(&Some(text.to_owned())))
    }

    /// Breaks every watch off.
    pub(crate) fn cut(&self) {
        self.with(|state| state.send(&None));
    }

    /// Ends every watch as a server does whose time is up.
    pub(crate) fn end(&self) {
        self.with(|state| state.watches.clear());
    }

    /// What was asked since the last time.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.with(|state| std::mem::take(&mut state.asked))
    }

    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    pub(crate) fn credentials(&self) -> &Path {
        self.directory.path()
    }

    /// What is in the file from here on; the server is told by [`Self::with`].
    pub(crate) fn write_token(&self, token: &str) -> io::Result<()> {
        fs::write(self.directory.path().join("token.new"), token)?;
        fs::rename(self.directory.path().join("token.new"), self.directory.path().join("token"))
    }
}
