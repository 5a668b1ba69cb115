//! Owns one question to the API server: the request, its deadline, and what a refusal means.
//! Refuses answers without end, redirects, and to decide when to ask again.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};

use super::{
    access::{Access, AccessError},
    decode::{DecodeError, status},
};

/// Pods of one page: a node rarely has more.
const PAGE: u32 = 500;
/// Annotations of one pod may have 256 KiB; those of real ones have some.
const MAX_PAGE: usize = 32 << 20;
/// Of an answer that refuses.
const MAX_REFUSAL: usize = 64 << 10;
/// A server that asks for more patience than this does not get it.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(5);
/// A peer that is gone without a word is found out.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Only what names a pod crosses the wire; a server that cannot do that sends whole pods.
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
const METADATA_LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("the API server at {server} cannot be reached")]
    Reach { server: String, source: hyper_util::client::legacy::Error },
    #[error("the API server at {server} did not answer within {deadline:?}")]
    Deadline { server: String, deadline: Duration },
    #[error("the API server answered {status}: {words}")]
    Refused { status: StatusCode, words: String, after: Option<Duration> },
    #[error("the API server's answer could not be read to its end")]
    Cut(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the API server has forgotten the version that the watch was at; the list is asked for again")]
    Expired,
    #[error("the API server's list went on for more than {pages} pages; is api_server the API server?")]
    Endless { pages: usize },
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

impl CallError {
    /// How long the server wants to be left alone.
    pub(super) fn after(&self) -> Option<Duration> {
        if let Self::Refused { after, .. } = self { *after } else { None }
    }

    /// What an operator can do about it.
    pub(super) fn remedy(&self, access: &Access) -> String {
        match self {
            Self::Refused { status: StatusCode::FORBIDDEN, .. } => {
                let namespace = access.namespace().unwrap_or_else(|| "cotenant".to_owned());
                format!(
                    "helm upgrade with apiWatch.enabled=true, or kubectl apply -f deploy/kubernetes/api-watch.yaml: a \
                     ClusterRole with get, list and watch on pods, bound to the agent's service account in namespace {namespace}"
                )
            }
            Self::Refused { status: StatusCode::UNAUTHORIZED, .. } => {
                "mount the token of a service account of this cluster: automountServiceAccountToken, or \
                 kubernetes.api_credentials; it is read again at each try"
                    .to_owned()
            }
            Self::Refused { status: StatusCode::TOO_MANY_REQUESTS, .. } => {
                "none needed: asked again when the server wants it; its flow control (kubectl get flowschemas) says why"
                    .to_owned()
            }
            Self::Access(_) => {
                "apiWatch.enabled=true in the chart sets environment, token and rights; or kubernetes.api_watch = false"
                    .to_owned()
            }
            Self::Reach { .. } | Self::Deadline { .. } | Self::Cut(_) => format!(
                "kubectl get --raw /readyz; a NetworkPolicy must let the agent reach {} (networkPolicy.egress)",
                access.server
            ),
            Self::Refused { .. } | Self::Expired | Self::Endless { .. } | Self::Decode(_) => {
                "kubectl get --raw /readyz".to_owned()
            }
        }
    }
}

/// The way to the server, with the certificates as they were when it was made.
#[derive(Debug)]
pub(super) struct Door {
    pool: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    access: Access,
    deadline: Duration,
}

impl Door {
    pub(super) fn open(access: &Access, deadline: Duration) -> Result<Self, AccessError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(access.authority()?)
            .with_no_client_auth();
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(deadline));
        http.set_keepalive(Some(KEEPALIVE));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_only()
            .enable_http1()
            .wrap_connector(http);
        let pool = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        Ok(Self { pool, access: access.clone(), deadline })
    }

    /// The bytes of one page of this node's pods. `more`: what the page before ended with.
    pub(super) async fn page(&self, more: &str) -> Result<Bytes, CallError> {
        let from = if more.is_empty() {
            // From the server's cache: the store behind it is not asked once for each node of the cluster.
            "resourceVersion=0".to_owned()
        } else {
            format!("continue={}", escaped(more))
        };
        let asked = async {
            let response = self.ask(&format!("{from}&limit={PAGE}"), METADATA_LIST).await?;
            let body = Limited::new(response.into_body(), MAX_PAGE).collect().await;
            Ok(body.map_err(CallError::Cut)?.to_bytes())
        };
        self.within(asked).await
    }

    /// What happens to them from `version` on, until the server ends it after `lasting`.
    pub(super) async fn watch(&self, version: &str, lasting: Duration) -> Result<Incoming, CallError> {
        let query = format!(
            "watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={}",
            escaped(version),
            lasting.as_secs()
        );
        Ok(self.within(self.ask(&query, METADATA)).await?.into_body())
    }

    async fn within<T>(&self, asked: impl Future<Output = Result<T, CallError>>) -> Result<T, CallError> {
        let late = || CallError::Deadline { server: self.access.server.clone(), deadline: self.deadline };
        tokio::time::timeout(self.deadline, asked).await.unwrap_or_else(|_| Err(late()))
    }

    async fn ask(&self, query: &str, accept: &str) -> Result<Response<Incoming>, CallError> {
        let Access { server, node, .. } = &self.access;
        let request =
            Request::get(format!("{server}/api/v1/pods?fieldSelector=spec.nodeName%3D{node}&{query}"))
                .header(header::AUTHORIZATION, self.access.token()?)
                .header(header::ACCEPT, accept)
                .header(header::USER_AGENT, "cotenant")
                .body(Empty::new())
                .map_err(|_| AccessError::Server { given: server.clone() })?;
        let reach = |source| CallError::Reach { server: server.clone(), source };
        let response = self.pool.request(request).await.map_err(reach)?;
        if response.status().is_success() { Ok(response) } else { Err(refusal(response).await) }
    }
}

async fn refusal(response: Response<Incoming>) -> CallError {
    let (parts, body) = response.into_parts();
    if parts.status == StatusCode::GONE {
        return CallError::Expired;
    }
    let seconds =
        parts.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let after = seconds.map(|seconds| Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    let body = Limited::new(body, MAX_REFUSAL).collect().await;
    let (_, words) = body.map(|body| status(&body.to_bytes())).unwrap_or_default();
    CallError::Refused { status: parts.status, words, after }
}

/// As a value in a query.
fn escaped(value: &str) -> String {
    use std::fmt::Write;
    let mut out = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_said_stays_one_value_of_the_query() {
        assert_eq!(escaped("eyJ2IjoxfQ=="), "eyJ2IjoxfQ%3D%3D");
        assert_eq!(escaped("1&watch=false é"), "1%26watch%3Dfalse%20%C3%A9");
    }

    #[test]
    fn a_refusal_says_what_to_apply() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("namespace"), "gpu-tools").unwrap();
        let access = Access::find("https://a", "n", directory.path(), |_| None).unwrap();
        let refused = |status| CallError::Refused { status, words: String::new(), after: None };
        let remedy = refused(StatusCode::FORBIDDEN).remedy(&access);
        assert!(remedy.contains("api-watch.yaml") && remedy.contains("namespace gpu-tools"), "{remedy}");
        assert!(refused(StatusCode::UNAUTHORIZED).remedy(&access).contains("token"));
        assert!(CallError::Expired.remedy(&access).contains("kubectl"));
    }
}
