//! Owns the HTTP surface: /metrics, /healthz, /readyz, /status.
//! Refuses to collect: a request reads the last view, whatever NVML or the kernel are doing.

use std::{fmt::Write, sync::Arc};

use arc_swap::ArcSwapOption;
use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use cotenant_export::{encode, negotiate, rows};
use cotenant_model::view::{FeatureState, View};
use serde_json::{Value, json};

type Published = Arc<ArcSwapOption<View>>;

/// Attribution rests on these; without one of them `/readyz` says no.
const NEEDED: [&str; 3] = ["allocation_probes", "process_life", "host_pid_namespace"];

pub(crate) fn router(published: Published) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .with_state(published)
}

fn not_yet() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "starting: nothing has been read yet, try again in a second\n")
        .into_response()
}

async fn metrics(State(published): State<Published>, headers: HeaderMap) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = negotiate(accept);
    let encoded = tokio::task::spawn_blocking(move || encode(rows(&view).into(), format)).await;
    match encoded {
        Ok(Ok(page)) => ([(header::CONTENT_TYPE, format.content_type())], page).into_response(),
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn ready(State(published): State<Published>) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    let bad = |state| !matches!(state, FeatureState::Active | FeatureState::Disabled);
    let ready =
        !view.agent.features.iter().any(|feature| NEEDED.contains(&feature.name) && bad(feature.state));
    let mut text = String::from(if ready { "ready\n" } else { "not ready\n" });
    for feature in view.agent.features.iter().filter(|feature| bad(feature.state)) {
        let _ = writeln!(text, "{}: {}: {}", feature.name, feature.state.as_str(), feature.reason);
    }
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, text).into_response()
}

async fn status(State(published): State<Published>) -> Response {
    let Some(view) = published.load_full() else { return not_yet() };
    Json(describe(&view)).into_response()
}

fn describe(view: &View) -> Value {
    let agent = &view.agent;
    json!({
        "version": agent.version,
        "taken": view.taken_unix,
        "started": view.started_unix,
        "features": agent.features.iter().map(|feature| json!({
            "name": feature.name, "state": feature.state.as_str(), "reason": feature.reason,
        })).collect::<Vec<_>>(),
        "nvml": match &agent.nvml {
            Ok(facts) => json!({ "driver": facts.driver_version, "nvml": facts.nvml_version }),
            Err(reason) => json!({ "absent": reason.as_str() }),
        },
        "gpus": view.gpus.iter().map(|gpu| json!({
            "id": gpu.sample.id.as_str(), "name": gpu.sample.name, "pci": gpu.sample.pci,
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
