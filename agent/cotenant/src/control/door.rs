//! Owns the socket on which commands are heard, and who is let in.
//! Refuses everybody but root and the agent's own user, whatever the file's mode has become.

use std::{
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use axum::{
    Json, Router,
    extract::{Query, State, rejection::QueryRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use cotenant_model::view::{Feature, FeatureState};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde::Deserialize;
use tokio::net::{UnixListener, UnixStream, unix::UCred};
use tracing::warn;

use super::{Asker, LOOK, Release, WITHIN};
use crate::features::feature;

const NAME: &str = "control";
/// One command takes milliseconds to say.
const PATIENCE: Duration = Duration::from_secs(2);
/// A longer release is a mistake: without an end is the other way to say it.
const LONGEST: Duration = Duration::from_hours(24);

/// The listening socket. Its file goes with it.
pub(crate) struct Door {
    listener: UnixListener,
    path: PathBuf,
}

impl Door {
    /// Within the runtime. A door that cannot be opened costs itself only.
    pub(crate) fn open(path: &Path) -> (Option<Self>, Feature) {
        if path.as_os_str().is_empty() {
            return (None, feature(NAME, FeatureState::Disabled, "agent.control = \"\"".into()));
        }
        match listen(path) {
            Ok(listener) => (
                Some(Self { listener, path: path.to_owned() }),
                feature(NAME, FeatureState::Active, String::new()),
            ),
            Err(error) => {
                let fixed = error
                    .downcast_ref::<std::io::Error>()
                    .is_some_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem);
                let state = if fixed { FeatureState::Unsupported } else { FeatureState::Broken };
                (None, feature(NAME, state, format!("{error:#}; the signals USR1 and USR2 work")))
            }
        }
    }

    /// Until the runtime ends. `health` are the pages that say how the agent is, for whoever has no key to the others.
    pub(crate) async fn hear(self, release: Arc<Release>, health: Router) {
        let router = Router::new()
            .route("/release", get(state).post(let_go))
            .route("/resume", post(take_up))
            .with_state(release)
            .merge(health);
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!(%error, "a command could not be heard");
                    tokio::time::sleep(LOOK).await;
                    continue;
                }
            };
            if !stream.peer_cred().is_ok_and(|peer| may(&peer)) {
                continue;
            }
            let service = TowerToHyperService::new(router.clone());
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).keep_alive(false);
            tokio::spawn(tokio::time::timeout(
                WITHIN + PATIENCE,
                http.serve_connection(TokioIo::new(stream), service),
            ));
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn may(peer: &UCred) -> bool {
    peer.uid() == 0 || peer.uid() == rustix::process::geteuid().as_raw()
}

fn listen(path: &Path) -> Result<UnixListener> {
    if let Some(directory) = path.parent().filter(|directory| !directory.exists()) {
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).with_context(|| {
            format!("cannot make {}: create it, or set agent.control", directory.display())
        })?;
    }
    if path.exists() {
        // Of an agent that was killed; one that lives answers.
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            bail!("another agent listens on {}: set agent.control", path.display());
        }
        std::fs::remove_file(path).with_context(|| format!("cannot replace {}", path.display()))?;
    }
    let listener = UnixListener::bind(path)
        .with_context(|| format!("cannot listen on {}: set agent.control", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot close {} to others", path.display()))?;
    Ok(listener)
}

async fn state(State(release): State<Arc<Release>>) -> Response {
    Json(release.describe()).into_response()
}

/// `?for=10m`; without it until a resume.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Length {
    #[serde(rename = "for", default)]
    length: Option<String>,
}

async fn let_go(
    State(release): State<Arc<Release>>,
    length: Result<Query<Length>, QueryRejection>,
) -> Response {
    let refused = |reason: String| (StatusCode::BAD_REQUEST, format!("{reason}\n")).into_response();
    let length = match length {
        Ok(Query(Length { length })) => length,
        Err(error) => return refused(error.body_text()),
    };
    let length = match length.map(|text| humantime::parse_duration(&text)).transpose() {
        Ok(Some(length)) if length > LONGEST => {
            return refused(format!("for at most {} hours; or without an end", LONGEST.as_secs() / 3600));
        }
        Ok(length) => length,
        Err(error) => return refused(format!("for: {error}; write a duration such as 10m")),
    };
    release.release(Asker::Command, length);
    release.look();
    let done = async {
        while !release.is_done() {
            tokio::time::sleep(LOOK / 4).await;
        }
    };
    if tokio::time::timeout(WITHIN, done).await.is_err() {
        let reason = "the driver is still held: an NVML call has not come back; it is let go when it does\n";
        return (StatusCode::SERVICE_UNAVAILABLE, reason).into_response();
    }
    Json(release.describe()).into_response()
}

async fn take_up(State(release): State<Arc<Release>>) -> Response {
    release.resume(Asker::Command);
    release.look();
    Json(release.describe()).into_response()
}

/// For the command's side.
pub(super) async fn knock(path: &Path) -> Result<UnixStream> {
    UnixStream::connect(path).await.with_context(|| {
        format!(
            "no agent is heard on {}: start one with `cotenant run`, run this as root, or name its socket with --socket",
            path.display()
        )
    })
}
