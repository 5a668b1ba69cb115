//! Owns a receiver that speaks real OTLP: tonic's server for gRPC, axum for HTTP, both as a collector would.
//! Refuses kindness: it answers what it was told to, and keeps everything that it was sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use opentelemetry_proto::tonic::collector::{logs, metrics, trace};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::codec::CompressionEncoding;
use tonic::transport::server::{Router, TcpIncoming};
use tonic::{Code, Request, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// What the receiver says to one request. Without a plan it takes everything.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Take,
    /// Takes it but for so many items.
    Partial(i64),
    /// An HTTP status, with `Retry-After` if it is given.
    Status(u16, Option<&'static str>),
    /// A gRPC code, with a retry delay if it is given.
    Code(Code, Option<Duration>),
    Slow(Duration),
}

#[derive(Debug, Default)]
pub(crate) struct Received {
    pub(crate) metrics: Vec<metrics::v1::ExportMetricsServiceRequest>,
    pub(crate) traces: Vec<trace::v1::ExportTraceServiceRequest>,
    pub(crate) logs: Vec<logs::v1::ExportLogsServiceRequest>,
    /// Of each request, taken or not: when, and the headers that a test looks at.
    pub(crate) arrivals: Vec<(Instant, Vec<(String, String)>)>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Sink {
    pub(crate) received: Arc<Mutex<Received>>,
    pub(crate) plan: Arc<Mutex<VecDeque<Answer>>>,
}

impl Sink {
    pub(crate) fn planned(plan: impl IntoIterator<Item = Answer>) -> Self {
        Self { plan: Arc::new(Mutex::new(plan.into_iter().collect())), ..Self::default() }
    }

    pub(crate) fn arrivals(&self) -> Vec<Instant> {
        self.received.lock().unwrap().arrivals.iter().map(|(at, _)| *at).collect()
    }

    pub(crate) fn header(&self, name: &str) -> Option<String> {
        let received = self.received.lock().unwrap();
        let mut headers = received.arrivals.iter().flat_map(|(_, headers)| headers);
        headers.find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }

    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let received = self.received.lock().unwrap();
        let scopes = received.metrics.iter().flat_map(|request| &request.resource_metrics);
        scopes.flat_map(|resource| &resource.scope_metrics).flat_map(|scope| scope.metrics.clone()).collect()
    }

    pub(crate) fn metric_requests(&self) -> usize {
        self.received.lock().unwrap().metrics.len()
    }

    pub(crate) fn resource(&self) -> Resource {
        let received = self.received.lock().unwrap();
        received.metrics[0].resource_metrics[0].resource.clone().unwrap()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let received = self.received.lock().unwrap();
        let scopes = received.traces.iter().flat_map(|request| &request.resource_spans);
        scopes.flat_map(|resource| &resource.scope_spans).flat_map(|scope| scope.spans.clone()).collect()
    }

    pub(crate) fn records(&self) -> Vec<LogRecord> {
        let received = self.received.lock().unwrap();
        let scopes = received.logs.iter().flat_map(|request| &request.resource_logs);
        scopes.flat_map(|resource| &resource.scope_logs).flat_map(|scope| scope.log_records.clone()).collect()
    }

    fn arrive(&self, headers: &HeaderMap) -> Answer {
        let text = |value: &axum::http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
        let headers = headers.iter().map(|(name, value)| (name.as_str().to_owned(), text(value))).collect();
        self.received.lock().unwrap().arrivals.push((Instant::now(), headers));
        self.plan.lock().unwrap().pop_front().unwrap_or(Answer::Take)
    }

    /// Serves OTLP/HTTP until the runtime ends.
    pub(crate) async fn http(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        self.http_on(listener);
        address
    }

    pub(crate) async fn https(&self, certificate: &str, key: &str) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        self.http_on(Tls(listener, TlsAcceptor::from(Arc::new(config))));
        address
    }

    pub(crate) fn http_on<L>(&self, listener: L)
    where
        L: axum::serve::Listener<Addr = SocketAddr>,
    {
        let app = axum::Router::new()
            .route("/v1/{signal}", axum::routing::post(take_http))
            .layer(axum::extract::DefaultBodyLimit::max(4 << 20))
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    }

    pub(crate) fn grpc_router(&self, server: tonic::transport::Server) -> Router {
        let mut server = server;
        macro_rules! service {
            ($server:ty) => {
                <$server>::new(self.clone())
                    .accept_compressed(CompressionEncoding::Gzip)
                    .accept_compressed(CompressionEncoding::Zstd)
                    // As Go's servers do, though those ask nobody whether it is accepted.
                    .send_compressed(CompressionEncoding::Gzip)
                    .send_compressed(CompressionEncoding::Zstd)
            };
        }
        server
            .add_service(service!(metrics::v1::metrics_service_server::MetricsServiceServer<Self>))
            .add_service(service!(trace::v1::trace_service_server::TraceServiceServer<Self>))
            .add_service(service!(logs::v1::logs_service_server::LogsServiceServer<Self>))
    }

    /// Serves OTLP/gRPC until the runtime ends.
    pub(crate) async fn grpc(&self) -> SocketAddr {
        self.grpc_with(tonic::transport::Server::builder()).await
    }

    pub(crate) async fn grpc_with(&self, server: tonic::transport::Server) -> SocketAddr {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = incoming.local_addr().unwrap();
        let router = self.grpc_router(server);
        tokio::spawn(async move { router.serve_with_incoming(incoming).await.unwrap() });
        // The listener is bound: a client can connect from now on.
        tokio::task::yield_now().await;
        address
    }
}

/// A listener that shakes hands first. Who does not is let go.
struct Tls(tokio::net::TcpListener, TlsAcceptor);

impl axum::serve::Listener for Tls {
    type Io = TlsStream<tokio::net::TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, peer) = self.0.accept().await.unwrap();
            if let Ok(stream) = self.1.accept(stream).await {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

async fn take_http(
    State(sink): State<Sink>,
    Path(signal): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let rejected = match sink.arrive(&headers) {
        Answer::Status(code, after) => {
            let mut response = (StatusCode::from_u16(code).unwrap(), "not now").into_response();
            if let Some(after) = after {
                response.headers_mut().insert("retry-after", after.parse().unwrap());
            }
            return response;
        }
        Answer::Slow(time) => {
            tokio::time::sleep(time).await;
            0
        }
        Answer::Partial(items) => items,
        Answer::Take | Answer::Code(..) => 0,
    };
    assert_eq!(headers["content-type"], "application/x-protobuf");
    let body = match headers.get("content-encoding").map(|value| value.to_str().unwrap()) {
        None => body.to_vec(),
        Some("gzip") => {
            let mut plain = Vec::new();
            std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(body.as_ref()), &mut plain).unwrap();
            plain
        }
        Some("zstd") => zstd::decode_all(body.as_ref()).unwrap(),
        Some(other) => panic!("encoding {other}"),
    };
    let mut received = sink.received.lock().unwrap();
    let answer = match signal.as_str() {
        "metrics" => {
            received.metrics.push(Message::decode(body.as_slice()).unwrap());
            metrics_answer(rejected).encode_to_vec()
        }
        "traces" => {
            received.traces.push(Message::decode(body.as_slice()).unwrap());
            trace::v1::ExportTraceServiceResponse::default().encode_to_vec()
        }
        "logs" => {
            received.logs.push(Message::decode(body.as_slice()).unwrap());
            logs::v1::ExportLogsServiceResponse::default().encode_to_vec()
        }
        other => panic!("signal {other}"),
    };
    ([("content-type", "application/x-protobuf")], answer).into_response()
}

fn metrics_answer(rejected: i64) -> metrics::v1::ExportMetricsServiceResponse {
    let partial = metrics::v1::ExportMetricsPartialSuccess {
        rejected_data_points: rejected,
        error_message: "too many attributes".to_owned(),
    };
    metrics::v1::ExportMetricsServiceResponse { partial_success: (rejected > 0).then_some(partial) }
}

impl Sink {
    async fn answer<T>(&self, request: &Request<T>) -> Result<i64, Status> {
        match self.arrive(&request.metadata().clone().into_headers()) {
            Answer::Code(code, after) => Err(match after {
                Some(after) => {
                    Status::with_error_details(code, "not now", ErrorDetails::with_retry_info(Some(after)))
                }
                None => Status::new(code, "not now"),
            }),
            Answer::Slow(time) => {
                tokio::time::sleep(time).await;
                Ok(0)
            }
            Answer::Partial(items) => Ok(items),
            Answer::Take | Answer::Status(..) => Ok(0),
        }
    }
}

#[tonic::async_trait]
impl metrics::v1::metrics_service_server::MetricsService for Sink {
    async fn export(
        &self,
        request: Request<metrics::v1::ExportMetricsServiceRequest>,
    ) -> Result<tonic::Response<metrics::v1::ExportMetricsServiceResponse>, Status> {
        let rejected = self.answer(&request).await?;
        self.received.lock().unwrap().metrics.push(request.into_inner());
        Ok(tonic::Response::new(metrics_answer(rejected)))
    }
}

#[tonic::async_trait]
impl trace::v1::trace_service_server::TraceService for Sink {
    async fn export(
        &self,
        request: Request<trace::v1::ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<trace::v1::ExportTraceServiceResponse>, Status> {
        self.answer(&request).await?;
        self.received.lock().unwrap().traces.push(request.into_inner());
        Ok(tonic::Response::new(trace::v1::ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl logs::v1::logs_service_server::LogsService for Sink {
    async fn export(
        &self,
        request: Request<logs::v1::ExportLogsServiceRequest>,
    ) -> Result<tonic::Response<logs::v1::ExportLogsServiceResponse>, Status> {
        self.answer(&request).await?;
        self.received.lock().unwrap().logs.push(request.into_inner());
        Ok(tonic::Response::new(logs::v1::ExportLogsServiceResponse::default()))
    }
}

/// An attribute as text, whatever its type.
pub(crate) fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|pair| pair.key == key)?;
    Some(shown(found.value.as_ref()?))
}

fn shown(value: &AnyValue) -> String {
    match value.value.as_ref().unwrap() {
        any_value::Value::StringValue(text) => text.clone(),
        any_value::Value::IntValue(number) => number.to_string(),
        any_value::Value::DoubleValue(number) => number.to_string(),
        any_value::Value::BoolValue(truth) => truth.to_string(),
        any_value::Value::ArrayValue(list) => list.values.iter().map(shown).collect::<Vec<_>>().join(","),
        other => format!("{other:?}"),
    }
}
