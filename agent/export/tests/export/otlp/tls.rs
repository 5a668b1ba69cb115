//! Owns who trusts whom: a receiver that nobody vouches for, one that wants to know the agent, and the right ones.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cotenant_export::otlp::{Sender, Settings, Signal, Wishes};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

use super::sink::Sink;
use super::{Node, exported, failures, resource, settings, stop, until};

/// An authority, a receiver's certificate and an agent's, as files.
struct Papers {
    folder: tempfile::TempDir,
    receiver: (String, String),
    authority: String,
}

impl Papers {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let issue = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
        };
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = issue("agent");
        std::fs::write(folder.path().join("ca.crt"), authority.pem()).unwrap();
        std::fs::write(folder.path().join("tls.crt"), certificate).unwrap();
        std::fs::write(folder.path().join("tls.key"), key).unwrap();
        Self { receiver: issue("localhost"), authority: authority.pem(), folder }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn grpc(&self, sink: &Sink, wants_agent: bool) -> SocketAddr {
        let (certificate, key) = &self.receiver;
        let mut tls = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
        if wants_agent {
            tls = tls.client_ca_root(Certificate::from_pem(&self.authority));
        }
        sink.grpc_with(Server::builder().tls_config(tls).unwrap()).await
    }

    fn wishes(&self, address: SocketAddr, trusted: bool, known: bool) -> Wishes {
        let file = |name: &str| Some(self.file(name));
        Wishes {
            endpoint: Some(format!("https://localhost:{}", address.port())),
            certificate: if trusted { file("ca.crt") } else { None },
            client_certificate: if known { file("tls.crt") } else { None },
            client_key: if known { file("tls.key") } else { None },
            without: vec![Signal::Traces, Signal::Logs],
            ..Wishes::default()
        }
    }
}

fn grpc(wishes: Wishes, address: SocketAddr) -> Settings {
    settings("grpc", address, wishes)
}

async fn arrives(settings: &Settings) {
    let sender = Node::new().start(settings);
    let account = sender.account();
    until("the delivery", || exported(&account, "metrics") > 0).await;
    stop(sender).await;
}

async fn is_refused(settings: &Settings) {
    let sender = Node::new().start(settings);
    let account = sender.account();
    until("the refusal", || failures(&account, "metrics", "tls") > 1).await;
    assert_eq!(exported(&account, "metrics"), 0);
    stop(sender).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_the_given_authority_vouches_for_is_trusted() {
    let papers = Papers::new();
    let sink = Sink::default();
    let address = papers.grpc(&sink, false).await;
    arrives(&grpc(papers.wishes(address, true, false), address)).await;
    assert_eq!(sink.metric_requests(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_nobody_vouches_for_gets_nothing() {
    let (papers, strangers) = (Papers::new(), Papers::new());
    let sink = Sink::default();
    let address = papers.grpc(&sink, false).await;
    is_refused(&grpc(strangers.wishes(address, true, false), address)).await;
    assert_eq!(sink.metric_requests(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_wants_to_know_the_agent_is_told() {
    let papers = Papers::new();
    let sink = Sink::default();
    let address = papers.grpc(&sink, true).await;
    arrives(&grpc(papers.wishes(address, true, true), address)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_that_are_replaced_are_read_again() {
    let (papers, strangers) = (Papers::new(), Papers::new());
    let sink = Sink::default();
    let address = papers.grpc(&sink, false).await;
    let sender = Node::new().start(&grpc(strangers.wishes(address, true, false), address));
    let account = sender.account();
    until("the refusal", || failures(&account, "metrics", "tls") > 0).await;
    std::fs::copy(papers.file("ca.crt"), strangers.file("ca.crt")).unwrap();
    until("the delivery", || exported(&account, "metrics") > 0).await;
    stop(sender).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_goes_over_tls_too() {
    let papers = Papers::new();
    let sink = Sink::default();
    let address = sink.https(&papers.receiver.0, &papers.receiver.1).await;
    arrives(&settings("http/protobuf", address, papers.wishes(address, true, false))).await;
    let strangers = Papers::new();
    is_refused(&settings("http/protobuf", address, strangers.wishes(address, true, false))).await;
}

#[test]
fn a_file_that_cannot_be_read_is_named_at_the_start() {
    let papers = Papers::new();
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let mut wishes = papers.wishes(address, true, true);
    wishes.client_key = Some(Path::new("/nowhere/tls.key").to_owned());
    let settings = grpc(wishes, address);
    let error = Sender::start(&settings, resource(), Box::new(|| None)).unwrap_err();
    let chain = format!("{error}: {}", std::error::Error::source(&error).unwrap());
    assert!(chain.contains("/nowhere/tls.key"), "{chain}");
}
