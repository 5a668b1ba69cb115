//! Owns what stands before the pages: the web configuration in force, who is let in, how many at once.
//! Refuses to fall back: a configuration that became invalid leaves the last valid one in force, and says so.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use arc_swap::ArcSwap;
use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use cotenant_model::view::{Feature, FeatureState};
use tokio::sync::Semaphore;
use tracing::{info, warn};

use super::{
    auth::{Users, Verdict},
    held::Held,
    tls::Tls,
    web::{RateLimit, WebConfig},
};
use crate::features::feature;

/// Between two looks at the files.
const LOOK: Duration = Duration::from_secs(1);
/// Requests at once: each keeps a page, of megabytes on a large node, until it is taken.
const AT_ONCE: usize = 32;

/// A request that nobody vouches for, to a page that says less to such.
#[derive(Clone, Copy, Debug)]
pub(super) struct Anonymous;

/// One reading of the web configuration.
pub(super) struct Rules {
    pub(super) tls: Option<Tls>,
    users: Option<Users>,
    headers: Vec<(HeaderName, HeaderValue)>,
    bucket: Option<Bucket>,
}

impl Rules {
    /// Stamps are taken before the files are read: what changes meanwhile is seen as a change.
    fn read(file: &Path) -> Result<(Self, Known)> {
        let directory = file.parent().unwrap_or(Path::new("/"));
        let mut known = Known::of(vec![file.to_owned()]);
        let config = WebConfig::read(file)?;
        let mut tls = None;
        if let Some(server) = &config.tls_server_config {
            let Known { files, stamps } = Known::of(server.files(directory));
            known.files.extend(files);
            known.stamps.extend(stamps);
            tls = Some(Tls::new(server, directory).with_context(|| file.display().to_string())?);
        }
        let rules = Self {
            tls,
            users: Users::new(&config.basic_auth_users)?,
            headers: config.headers()?,
            bucket: config.rate().map(Bucket::new),
        };
        Ok((rules, known))
    }

    const fn open() -> Self {
        Self { tls: None, users: None, headers: Vec::new(), bucket: None }
    }
}

/// Requests that may be made: one more an interval, `burst` at most.
struct Bucket {
    rate: RateLimit,
    level: Mutex<(f64, Instant)>,
}

impl Bucket {
    fn new(rate: RateLimit) -> Self {
        Self { rate, level: Mutex::new((f64::from(rate.burst.max(1)), Instant::now())) }
    }

    fn take(&self, now: Instant) -> bool {
        let Ok(mut level) = self.level.lock() else { return true };
        let (tokens, since) = *level;
        let grown = now.saturating_duration_since(since).as_secs_f64() / self.rate.interval.as_secs_f64();
        let tokens = (tokens + grown).min(f64::from(self.rate.burst.max(1)));
        let enough = tokens >= 1.0;
        *level = (if enough { tokens - 1.0 } else { tokens }, now);
        enough
    }
}

/// What a file was when it was read: links are followed, so that a secret that is swapped has changed.
type Stamp = Option<(u64, u64, i64, i64)>;

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    let of = |file: &PathBuf| {
        let data = fs::metadata(file).ok()?;
        Some((data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
    };
    files.iter().map(of).collect()
}

/// The configuration's files as they were at the last look.
#[derive(Default)]
struct Known {
    files: Vec<PathBuf>,
    stamps: Vec<Stamp>,
}

impl Known {
    fn of(files: Vec<PathBuf>) -> Self {
        let stamps = stamps(&files);
        Self { files, stamps }
    }
}

pub(crate) struct Gate {
    file: Option<PathBuf>,
    /// Anybody who can reach the host can reach the pages.
    exposed: bool,
    rules: ArcSwap<Rules>,
    known: Mutex<Known>,
    trouble: Mutex<Option<String>>,
    pages: Arc<Semaphore>,
}

impl Gate {
    /// A configuration that is not valid at start is refused.
    pub(crate) fn new(file: &Path, listen: SocketAddr) -> Result<Self> {
        let file = (!file.as_os_str().is_empty()).then(|| file.to_owned());
        let (rules, known) = match &file {
            Some(file) => Rules::read(file)?,
            None => (Rules::open(), Known::default()),
        };
        let exposed = !listen.ip().is_loopback();
        if exposed && let Some(what) = lacking(&rules) {
            warn!(address = %listen, "tenants' names are served to anybody who reaches this address, {what}: see server.web_config");
        }
        Ok(Self {
            file,
            exposed,
            rules: ArcSwap::from_pointee(rules),
            known: Mutex::new(known),
            trouble: Mutex::default(),
            pages: Arc::new(Semaphore::new(AT_ONCE)),
        })
    }

    /// Whether a web configuration could be put in force; for `config check`.
    pub(crate) fn check(file: &Path) -> Result<()> {
        if file.as_os_str().is_empty() { Ok(()) } else { Rules::read(file).map(drop) }
    }

    pub(super) fn rules(&self) -> Arc<Rules> {
        self.rules.load_full()
    }

    /// Until the runtime ends: reads the files again when one of them is another.
    pub(crate) async fn keep(self: Arc<Self>) {
        if self.file.is_none() {
            return;
        }
        let mut clock = tokio::time::interval(LOOK);
        loop {
            clock.tick().await;
            let gate = Arc::clone(&self);
            // Reading files and making users' hashes takes a while.
            let _ = tokio::task::spawn_blocking(move || gate.look()).await;
        }
    }

    fn look(&self) {
        let (Some(file), Ok(mut known)) = (&self.file, self.known.lock()) else { return };
        let now = stamps(&known.files);
        if now == known.stamps {
            return;
        }
        known.stamps = now;
        let trouble = match Rules::read(file) {
            Ok((rules, read)) => {
                *known = read;
                self.rules.store(Arc::new(rules));
                info!(file = %file.display(), "the web configuration was read again");
                None
            }
            Err(error) => {
                warn!(
                    error = format!("{error:#}"),
                    "the web configuration is not valid; the last valid one stays in force"
                );
                Some(format!("{error:#}"))
            }
        };
        if let Ok(mut current) = self.trouble.lock() {
            *current = trouble;
        }
    }

    pub(crate) fn feature(&self) -> Feature {
        let trouble = self.trouble.lock().ok().and_then(|trouble| trouble.clone());
        let (state, reason) = match (trouble, lacking(&self.rules())) {
            (Some(trouble), _) => (
                FeatureState::Degraded,
                format!("the last valid web configuration is in force, not this one: {trouble}"),
            ),
            (None, Some(what)) if self.exposed => {
                (FeatureState::Active, format!("served to anybody who reaches the address, {what}"))
            }
            (None, _) => (FeatureState::Active, String::new()),
        };
        feature("endpoint", state, reason)
    }
}

fn lacking(rules: &Rules) -> Option<&'static str> {
    let verified = rules.tls.as_ref().is_some_and(Tls::verifies);
    match (&rules.tls, rules.users.is_some() || verified) {
        (Some(_), true) => None,
        (Some(_), false) => Some("without a password or client certificates"),
        (None, true) => Some("with passwords in the clear (no TLS)"),
        (None, false) => Some("without TLS or a password"),
    }
}

/// Before every page.
pub(super) async fn admit(State(gate): State<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let rules = gate.rules();
    let path = request.uri().path();
    // A probe of the kubelet has no password, and is told nothing.
    let (alive, readiness) = (path == "/healthz", path == "/readyz");
    let mut response = if has_body(request.headers()) {
        let reason = "no page takes a body\n";
        (StatusCode::PAYLOAD_TOO_LARGE, [(header::CONNECTION, "close")], reason).into_response()
    } else if alive {
        next.run(request).await
    } else if rules.bucket.as_ref().is_some_and(|bucket| !bucket.take(Instant::now())) {
        (StatusCode::TOO_MANY_REQUESTS, "the web configuration's rate_limit is reached\n").into_response()
    } else {
        let verdict = match (&rules.users, request.headers().get(header::AUTHORIZATION)) {
            (None, _) => Verdict::Right,
            (Some(_), None) => Verdict::Wrong,
            (Some(users), Some(value)) => users.judge(value.to_str().unwrap_or_default()).await,
        };
        match verdict {
            Verdict::Right => page(&gate, request, next).await,
            Verdict::Wrong if readiness => {
                request.extensions_mut().insert(Anonymous);
                page(&gate, request, next).await
            }
            Verdict::Wrong => {
                let challenge = [(header::WWW_AUTHENTICATE, "Basic realm=\"cotenant\"")];
                (StatusCode::UNAUTHORIZED, challenge, "a user and a password are wanted\n").into_response()
            }
            Verdict::Busy => busy("too many passwords are being checked"),
        }
    };
    for (name, value) in &rules.headers {
        response.headers_mut().insert(name, value.clone());
    }
    response
}

/// One of so many at once; its place is free again when its answer has been taken.
async fn page(gate: &Gate, request: Request, next: Next) -> Response {
    let Ok(place) = Arc::clone(&gate.pages).try_acquire_owned() else {
        return busy("too many requests at once");
    };
    let response = next.run(request).await;
    response.map(|body| Body::new(Held::new(body, place)))
}

fn busy(reason: &str) -> Response {
    let later = [(header::RETRY_AFTER, "1")];
    (StatusCode::SERVICE_UNAVAILABLE, later, format!("{reason}: try again in a second\n")).into_response()
}

fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_a_bucket() {
        let bucket = Bucket::new(RateLimit { interval: Duration::from_secs(1), burst: 2 });
        let now = Instant::now();
        assert!(bucket.take(now) && bucket.take(now) && !bucket.take(now));
        assert!(bucket.take(now + Duration::from_millis(1100)));
        assert!(!bucket.take(now + Duration::from_millis(1200)));
        let later = now + Duration::from_mins(1);
        assert!(bucket.take(later) && bucket.take(later) && !bucket.take(later));
    }
}
