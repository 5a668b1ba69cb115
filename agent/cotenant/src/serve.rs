//! Owns the HTTP surface: /metrics, /healthz, /readyz, /status, /api/v1/node, /api/v1/incidents, /api/v1/kills,
//! /api/v1/risk, /api/v1/holders, /api/v1/recording.
//! Refuses to collect: a request reads the last view, whatever NVML or the kernel are doing.

mod auth;
mod gate;
mod held;
mod listen;
mod pace;
mod tls;
mod web;

use std::{
    convert::Infallible,
    fmt::Write,
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwapOption;
use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{Query, State, rejection::QueryRejection},
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use cotenant_export::{encode, negotiate, otlp::Exemplars, rows};
use cotenant_model::{
    Tenant,
    explain::Explained,
    kill::Kill,
    view::{Feature, View},
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};

pub(crate) use gate::Gate;
pub(crate) use listen::serve;

use crate::{
    events::{Story, told},
    features,
    pulse::Pulse,
    record::{self, Tap},
    snapshot::Snapshot,
};

/// What answers are made of.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) published: Arc<ArcSwapOption<View>>,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) story: Arc<Mutex<Story>>,
    pub(crate) tap: Arc<Tap>,
    pub(crate) exemplars: Arc<Mutex<Exemplars>>,
}

pub(crate) fn router(shared: Shared, gate: &Arc<Gate>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .route("/api/v1/node", get(node))
        .route("/api/v1/incidents", get(incidents))
        .route("/api/v1/kills", get(kills))
        .route("/api/v1/risk", get(risk))
        .route("/api/v1/holders", get(holders))
        .route(record::PATH, get(recording))
        .with_state(shared)
        .layer(middleware::from_fn_with_state(Arc::clone(gate), gate::admit))
}

/// What a probe asks, for a way in that has no gate of its own.
pub(crate) fn health(shared: Shared) -> Router {
    Router::new().route("/healthz", get(alive)).route("/readyz", get(ready)).with_state(shared)
}

fn not_yet() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "starting: nothing has been read yet, try again in a second\n")
        .into_response()
}

/// Whether the tick comes to its end: what is served is what it published last.
fn stuck(pulse: &Pulse) -> Option<Response> {
    let ago = pulse.stuck()?.as_secs();
    let text = format!("no tick has come to its end for {ago} s: the agent hangs, start it again\n");
    Some((StatusCode::SERVICE_UNAVAILABLE, text).into_response())
}

async fn alive(State(Shared { pulse, .. }): State<Shared>) -> Response {
    stuck(&pulse).unwrap_or_else(|| "ok\n".into_response())
}

async fn metrics(State(Shared { published, exemplars, .. }): State<Shared>, headers: HeaderMap) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = negotiate(accept);
    let marks = exemplars.lock().map(|marks| marks.clone()).unwrap_or_default();
    let encoded = tokio::task::spawn_blocking(move || encode(rows(&view).into(), format, &marks)).await;
    match encoded {
        Ok(Ok(page)) => ([(header::CONTENT_TYPE, format.content_type())], page).into_response(),
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn ready(
    State(Shared { published, pulse, .. }): State<Shared>,
    anonymous: Option<Extension<gate::Anonymous>>,
) -> Response {
    if let Some(stuck) = stuck(&pulse) {
        return stuck;
    }
    let Some(view) = published.load_full() else { return not_yet() };
    let features = &view.agent.features;
    let ready = features::ready(features);
    let mut text = String::from(if ready { "ready\n" } else { "not ready\n" });
    for Feature { name, state, reason, lost, remedy } in features {
        if anonymous.is_none() && features::bad(*state) {
            let _ = writeln!(text, "{name}: {}: {reason}; lost: {lost}; remedy: {remedy}", state.as_str());
        }
    }
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, text).into_response()
}

async fn status(State(Shared { published, .. }): State<Shared>) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    Json(describe(&view)).into_response()
}

/// The node in figures: what `cotenant top` shows.
async fn node(State(Shared { published, .. }): State<Shared>) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    Json(Snapshot::of(&view)).into_response()
}

/// The last forecast, in the words of a replay.
async fn risk(State(Shared { published, .. }): State<Shared>) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    Json(&view.risk).into_response()
}

/// Processes that hold memory and do nothing, the most bytes first.
async fn holders(State(Shared { published, .. }): State<Shared>) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    let rows = view.holders.idle.iter().map(|holder| {
        json!({
            "pid": holder.pid, "tenant": holder.tenant.name, "container": holder.tenant.container,
            "gpu": holder.gpu.as_str(), "bytes": holder.bytes, "idle_seconds": holder.idle_seconds,
        })
    });
    let rows: Vec<Value> = rows.collect();
    Json(json!({ "idle_after_seconds": view.holders.after_seconds, "holders": rows })).into_response()
}

/// A recording, for as long as the reader reads.
async fn recording(State(Shared { tap, .. }): State<Shared>) -> Response {
    let Some(blocks) = tap.listen() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "enough recorders listen already: stop one of them\n")
            .into_response();
    };
    let stream = stream::unfold(blocks, |mut blocks| async move {
        blocks.recv().await.map(|block| (Ok::<_, Infallible>(block), blocks))
    });
    ([(header::CONTENT_TYPE, "application/octet-stream")], Body::from_stream(stream)).into_response()
}

/// `?since=15m&tenant=docker:db`: both may be left out.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Which {
    since: Option<String>,
    tenant: Option<String>,
}

/// What somebody asked for cannot be read.
fn refused(reason: &str) -> Response {
    (StatusCode::BAD_REQUEST, format!("{reason}\n")).into_response()
}

/// The moment from which on, and the tenant of whom, something is wanted.
fn wanted(which: Result<Query<Which>, QueryRejection>) -> Result<(Option<f64>, Option<String>), String> {
    let Query(Which { since, tenant }) = which.map_err(|error| error.body_text())?;
    let Some(text) = since else { return Ok((None, tenant)) };
    let ago = humantime::parse_duration(&text)
        .map_err(|error| format!("since: {error}; write a duration such as 15m or 2h"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok((Some(now.saturating_sub(ago).as_secs_f64()), tenant))
}

async fn incidents(
    State(Shared { story, published, .. }): State<Shared>,
    which: Result<Query<Which>, QueryRejection>,
) -> Response {
    let (since, tenant) = match wanted(which) {
        Ok(wanted) => wanted,
        Err(reason) => return refused(&reason),
    };
    let Ok(story) = story.lock() else {
        return (StatusCode::INTERNAL_SERVER_ERROR, "the incidents are not readable\n").into_response();
    };
    let list = story.incidents.list(since, tenant.as_deref());
    drop(story);
    let view = published.load_full();
    let gpus = view.iter().flat_map(|view| &view.gpus);
    let sharing = gpus.map(|gpu| (gpu.sample.id.clone(), gpu.sharing)).collect();
    let explained: Vec<Explained> =
        list.into_iter().map(|incident| Explained::told(incident, &sharing)).collect();
    Json(json!({ "incidents": explained })).into_response()
}

async fn kills(
    State(Shared { story, .. }): State<Shared>,
    which: Result<Query<Which>, QueryRejection>,
) -> Response {
    let (since, tenant) = match wanted(which) {
        Ok(wanted) => wanted,
        Err(reason) => return refused(&reason),
    };
    let Ok(story) = story.lock() else {
        return (StatusCode::INTERNAL_SERVER_ERROR, "the kills are not readable\n").into_response();
    };
    let asked_for = |(at, kill): &&(f64, Kill)| {
        let of = kill.tenant.as_ref().map(|tenant| tenant.name.as_str());
        since.is_none_or(|since| *at >= since) && tenant.as_deref().is_none_or(|name| of == Some(name))
    };
    let kills: Vec<Value> =
        story.kills.iter().filter(asked_for).map(|(at, kill)| kill_json(*at, kill)).collect();
    Json(json!({ "kills": kills })).into_response()
}

fn kill_json(at: f64, kill: &Kill) -> Value {
    let name = |tenant: &Option<Tenant>| tenant.as_ref().map(|tenant| tenant.name.clone());
    json!({
        "time_unix": at,
        "tenant": name(&kill.tenant),
        "pid": kill.tgid,
        "command": kill.comm,
        "scope": kill.scope.map(cotenant_model::kill::Scope::as_str),
        "limit_owner": kill.limit_owner,
        "cgroup": kill.task_cgroup,
        "trigger": kill.trigger.as_ref().map(|trigger| json!({ "pid": trigger.tgid, "tenant": name(&trigger.tenant) })),
        "agreement": kill.agreement.as_str(),
        "held": kill.held.as_ref().map(|held| json!({
            "live": held.live.iter().map(|((gpu, kind), bytes)| json!({
                "gpu": gpu.as_str(), "memory_kind": kind.as_str(), "bytes": bytes,
            })).collect::<Vec<_>>(),
            "on_unknown_gpu": held.elsewhere,
            "host_pinned": held.pinned,
            "last_calls": held.last_calls.iter().map(|call| told(call, kill)).collect::<Vec<_>>(),
            "neighbours": held.neighbours.iter().map(|(gpu, tenant)| json!({
                "gpu": gpu.as_str(), "tenant": tenant.name,
            })).collect::<Vec<_>>(),
        })),
    })
}

fn describe(view: &View) -> Value {
    let agent = &view.agent;
    json!({
        "version": agent.version,
        "taken": view.taken_unix,
        "started": view.started_unix,
        "features": agent.features.iter().map(|feature| json!({
            "name": feature.name, "state": feature.state.as_str(), "reason": feature.reason,
            "lost": feature.lost, "remedy": feature.remedy,
        })).collect::<Vec<_>>(),
        "nvml": match &agent.nvml {
            Ok(facts) => json!({ "driver": facts.driver_version, "nvml": facts.nvml_version }),
            Err(reason) => json!({ "absent": reason.as_str() }),
        },
        "gpus": view.gpus.iter().map(|gpu| json!({
            "id": gpu.sample.id.as_str(), "name": gpu.sample.name, "pci": gpu.sample.pci,
            "parent": gpu.sample.parent.as_ref().map(cotenant_model::GpuId::as_str),
            "compute_mode": gpu.sample.compute_mode.map_or_else(
                |reason| json!({ "absent": reason.as_str() }),
                |mode| json!(mode.as_str()),
            ),
            "sharing": {
                "mode": gpu.sharing.mode.as_str(),
                "basis": gpu.sharing.basis.as_str(),
                "tenants": gpu.sharing.tenants,
            },
            "ages": gpu.figure_ages,
        })).collect::<Vec<_>>(),
        "libraries": agent.libraries.iter().map(|library| json!({
            "path": library.path, "device": library.device, "inode": library.inode,
            "attached": library.attached, "missing": library.missing, "failed": library.failed,
            "processes": library.processes, "refused": library.refused,
        })).collect::<Vec<_>>(),
        "losses": agent.losses.iter().map(|(loss, count)| (loss.as_str(), json!(count)))
            .collect::<std::collections::BTreeMap<_, _>>(),
        "notes": agent.notes.iter().map(|(note, count)| (note.as_str(), json!(count)))
            .collect::<std::collections::BTreeMap<_, _>>(),
        "holder_candidates": agent.holder_candidates.iter().map(|holder| json!({
            "pid": holder.pid, "comm": holder.comm, "tenant": holder.tenant.name,
        })).collect::<Vec<_>>(),
        "tenants": view.tenants.len(),
    })
}
