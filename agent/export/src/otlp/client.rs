//! Owns one attempt: a message out over gRPC or HTTP, and what the answer means.
//! Refuses patience: when to try again is the sender's business.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Buf, BufMut, Bytes};
use http::{HeaderValue, Request, Response, StatusCode, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use opentelemetry_proto::tonic::collector::{
    logs::v1::ExportLogsServiceResponse, metrics::v1::ExportMetricsServiceResponse,
    trace::v1::ExportTraceServiceResponse,
};
use prost::Message;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::settings::{Compression, Protocol, Signal, Target, Tls};
use super::tally::Failure;

/// Of an answer. They are some bytes long; a receiver that says more is not listened to.
const MAX_ANSWER: usize = 64 << 10;
/// A receiver that asks for more patience than this does not get it.
const MAX_RETRY_AFTER: Duration = Duration::from_hours(1);
/// Characters of a receiver's own words that are logged.
const MAX_WORDS: usize = 300;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot read the {what} {path}: give a readable PEM file")]
    Pem {
        what: &'static str,
        path: String,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("{path} has no certificate: give a PEM file with one or more")]
    NoCertificate { path: String },
    #[error(
        "the host has no list of certificate authorities: install ca-certificates, or set otlp.certificate"
    )]
    NoRoots,
    #[error("a certificate or key for OTLP cannot be used: check that certificate and key belong together")]
    Tls(#[from] rustls::Error),
}

/// What came of an attempt.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Taken, but for `rejected` of its items.
    Accepted { rejected: u64, words: String },
    /// Worth another try, not before `after` if the receiver said so.
    Retry { failure: Failure, after: Option<Duration>, words: String },
    /// The same would be refused again.
    Refused { words: String },
}

type Connector = HttpsConnector<HttpConnector>;

#[derive(Debug)]
enum Wire {
    Grpc(Grpc<Pool<Connector, tonic::body::Body>>),
    Http(Pool<Connector, Full<Bytes>>),
}

#[derive(Debug)]
pub(super) struct Client {
    signal: Signal,
    target: Target,
    wire: Wire,
}

impl Client {
    /// Connects at the first attempt, and again whenever the connection is gone.
    pub(super) fn new(signal: Signal, target: Target) -> Result<Self, ClientError> {
        let wire = wire(&target)?;
        Ok(Self { signal, target, wire })
    }

    pub(super) fn place(&self) -> String {
        self.target.place()
    }

    /// Reads the certificates again. Without certificates of its own there is nothing to do.
    pub(super) fn refresh(&mut self) -> Result<(), ClientError> {
        if self.target.tls != Tls::default() {
            self.wire = wire(&self.target)?;
        }
        Ok(())
    }

    pub(super) async fn attempt(&mut self, body: &Bytes) -> Outcome {
        let limit = self.target.timeout;
        let (signal, target) = (self.signal, &self.target);
        let exchange = async {
            match &mut self.wire {
                Wire::Grpc(grpc) => by_grpc(grpc, signal, target, body.clone()).await,
                Wire::Http(pool) => by_http(pool, signal, target, body).await,
            }
        };
        tokio::time::timeout(limit, exchange).await.unwrap_or_else(|_| Outcome::Retry {
            failure: Failure::Timeout,
            after: None,
            words: format!("no answer within {limit:?}"),
        })
    }
}

fn wire(target: &Target) -> Result<Wire, ClientError> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(target.timeout));
    let connector = HttpsConnectorBuilder::new().with_tls_config(tls(target)?).https_or_http();
    let mut pool = Pool::builder(TokioExecutor::new());
    pool.pool_timer(TokioTimer::new()).timer(TokioTimer::new());
    Ok(match target.protocol {
        Protocol::Http => Wire::Http(pool.build(connector.enable_http1().wrap_connector(http))),
        Protocol::Grpc => {
            // A peer that is gone without a word is found out, also between two exports.
            pool.http2_only(true)
                .http2_keep_alive_interval(Duration::from_mins(1))
                .http2_keep_alive_timeout(target.timeout);
            let pool = pool.build(connector.enable_http2().wrap_connector(http));
            // Go's servers answer in the compression of the request, whatever the client says it accepts. The bound is on what comes
            // out of it.
            let grpc = Grpc::with_origin(pool, target.endpoint.clone())
                .max_decoding_message_size(MAX_ANSWER)
                .accept_compressed(CompressionEncoding::Gzip)
                .accept_compressed(CompressionEncoding::Zstd);
            Wire::Grpc(match target.compression {
                Compression::None => grpc,
                Compression::Gzip => grpc.send_compressed(CompressionEncoding::Gzip),
                Compression::Zstd => grpc.send_compressed(CompressionEncoding::Zstd),
            })
        }
    })
}

fn tls(target: &Target) -> Result<ClientConfig, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(target)?);
    let (Some(certificate), Some(key)) = (&target.tls.client_certificate, &target.tls.client_key) else {
        return Ok(config.with_no_client_auth());
    };
    let chain = certificates("client certificate", certificate)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|source| ClientError::Pem {
        what: "client key",
        path: key.display().to_string(),
        source,
    })?;
    Ok(config.with_client_auth_cert(chain, key)?)
}

fn roots(target: &Target) -> Result<RootCertStore, ClientError> {
    let mut roots = RootCertStore::empty();
    if target.endpoint.scheme_str() != Some("https") {
        return Ok(roots);
    }
    if let Some(file) = &target.tls.certificate {
        for certificate in certificates("certificate", file)? {
            roots.add(certificate)?;
        }
        return Ok(roots);
    }
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() { Err(ClientError::NoRoots) } else { Ok(roots) }
}

fn certificates(
    what: &'static str,
    file: &std::path::Path,
) -> Result<Vec<CertificateDer<'static>>, ClientError> {
    let path = || file.display().to_string();
    let wrong = |source| ClientError::Pem { what, path: path(), source };
    let list =
        CertificateDer::pem_file_iter(file).map_err(wrong)?.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    if list.is_empty() { Err(ClientError::NoCertificate { path: path() }) } else { Ok(list) }
}

async fn by_grpc(
    grpc: &mut Grpc<Pool<Connector, tonic::body::Body>>,
    signal: Signal,
    target: &Target,
    body: Bytes,
) -> Outcome {
    let path = PathAndQuery::from_static(match signal {
        Signal::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        Signal::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        Signal::Logs => "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    });
    let metadata = MetadataMap::from_headers(target.headers.clone());
    let mut request = tonic::Request::from_parts(metadata, tonic::Extensions::default(), body);
    request.set_timeout(target.timeout);
    if let Err(error) = grpc.ready().await {
        return unreachable(&error);
    }
    match grpc.unary(request, path, AsItIs).await {
        Ok(answer) => accepted(signal, answer.into_inner()),
        Err(status) => match std::error::Error::source(&status) {
            // Our own side of the connection: the receiver said nothing.
            Some(error) => unreachable(error),
            None => by_status(&status),
        },
    }
}

/// What OTLP says of gRPC's codes.
fn by_status(status: &Status) -> Outcome {
    let words = format!("{:?}: {}", status.code(), short(status.message()));
    let after = status
        .get_details_retry_info()
        .and_then(|info| info.retry_delay)
        .map(|delay| delay.min(MAX_RETRY_AFTER));
    let failure = match status.code() {
        Code::ResourceExhausted if after.is_some() => Failure::Throttled,
        Code::DeadlineExceeded => Failure::Timeout,
        Code::Cancelled | Code::Aborted | Code::OutOfRange | Code::Unavailable | Code::DataLoss => {
            if after.is_some() { Failure::Throttled } else { Failure::Unavailable }
        }
        _ => return Outcome::Refused { words },
    };
    Outcome::Retry { failure, after, words }
}

async fn by_http(
    pool: &Pool<Connector, Full<Bytes>>,
    signal: Signal,
    target: &Target,
    body: &Bytes,
) -> Outcome {
    let (body, encoding) = match compressed(body, target.compression) {
        Ok(compressed) => compressed,
        Err(error) => return Outcome::Refused { words: format!("cannot be compressed: {error}") },
    };
    let mut request = Request::post(target.endpoint.clone());
    if let Some(headers) = request.headers_mut() {
        headers.extend(target.headers.clone());
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static("cotenant"));
        if let Some(encoding) = encoding {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(encoding));
        }
    }
    let request = match request.body(Full::new(body)) {
        Ok(request) => request,
        Err(error) => return Outcome::Refused { words: error.to_string() },
    };
    match pool.request(request).await {
        Ok(response) => by_response(signal, response).await,
        Err(error) => unreachable(&error),
    }
}

async fn by_response(signal: Signal, response: Response<hyper::body::Incoming>) -> Outcome {
    let (parts, body) = response.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await.map(http_body_util::Collected::to_bytes);
    if parts.status.is_success() {
        return accepted(signal, body.unwrap_or_default());
    }
    let after = parts.headers.get(header::RETRY_AFTER).and_then(retry_after);
    let said = body.ok().filter(|body| !body.is_empty());
    let said = said.map(|body| format!(": {}", short(&String::from_utf8_lossy(&body)))).unwrap_or_default();
    let words = format!("{}{said}", parts.status);
    let failure = match parts.status {
        StatusCode::TOO_MANY_REQUESTS => Failure::Throttled,
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
            if after.is_some() { Failure::Throttled } else { Failure::Unavailable }
        }
        _ => return Outcome::Refused { words },
    };
    Outcome::Retry { failure, after, words }
}

/// Seconds, or a date.
fn retry_after(value: &HeaderValue) -> Option<Duration> {
    let value = value.to_str().ok()?.trim();
    let wait = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            httpdate::parse_http_date(value).ok()?.duration_since(SystemTime::now()).unwrap_or_default()
        }
    };
    Some(wait.min(MAX_RETRY_AFTER))
}

fn compressed(body: &Bytes, how: Compression) -> std::io::Result<(Bytes, Option<&'static str>)> {
    match how {
        Compression::None => Ok((body.clone(), None)),
        Compression::Gzip => {
            let mut encoder = flate2::read::GzEncoder::new(body.as_ref(), flate2::Compression::new(3));
            let mut out = Vec::with_capacity(body.len() / 4);
            std::io::Read::read_to_end(&mut encoder, &mut out)?;
            Ok((out.into(), Some("gzip")))
        }
        Compression::Zstd => Ok((zstd::encode_all(body.as_ref(), 1)?.into(), Some("zstd"))),
    }
}

/// An answer that cannot be read is one without a complaint.
fn accepted(signal: Signal, answer: Bytes) -> Outcome {
    let complaint = match signal {
        Signal::Metrics => ExportMetricsServiceResponse::decode(answer)
            .ok()
            .and_then(|answer| answer.partial_success)
            .map(|partial| (partial.rejected_data_points, partial.error_message)),
        Signal::Traces => ExportTraceServiceResponse::decode(answer)
            .ok()
            .and_then(|answer| answer.partial_success)
            .map(|partial| (partial.rejected_spans, partial.error_message)),
        Signal::Logs => ExportLogsServiceResponse::decode(answer)
            .ok()
            .and_then(|answer| answer.partial_success)
            .map(|partial| (partial.rejected_log_records, partial.error_message)),
    };
    let (rejected, words) = complaint.unwrap_or_default();
    Outcome::Accepted { rejected: u64::try_from(rejected).unwrap_or(0), words: short(&words) }
}

fn unreachable(error: &(dyn std::error::Error + 'static)) -> Outcome {
    let mut failure = Failure::Unreachable;
    let mut words = error.to_string();
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<rustls::Error>() {
            failure = Failure::Tls;
        }
        // An io::Error gives the source of what it wraps as its own, and what it wraps is what we look for.
        next = match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
        if let Some(cause) = next {
            let cause = cause.to_string();
            if !words.ends_with(&cause) {
                words = format!("{words}: {cause}");
            }
        }
    }
    Outcome::Retry { failure, after: None, words: short(&words) }
}

/// A receiver's words, fit for a log line.
fn short(words: &str) -> String {
    words.chars().take(MAX_WORDS).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Messages are encoded when they are made, so that a queue has a size; here they pass as they are.
#[derive(Clone, Copy, Debug)]
struct AsItIs;

impl Codec for AsItIs {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for AsItIs {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for AsItIs {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
