//! Endpoints that say what the server is and how it does, and the one that aborts.

use super::generate::Caller;
use super::metrics::Info;
use super::respond::{json, typed};
use super::state::{Phase, State};
use crate::openai::error::ApiError;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, State as Shared};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Version of the server.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `GET /health`: alive. 503 until the bundle is loaded, and after the engine failed.
pub(crate) async fn health(Shared(state): Shared<Arc<State>>) -> Result<Response, ApiError> {
    match (state.loaded(), state.phase()) {
        (_, Phase::Failed) => Err(ApiError::unavailable("engine_failed", "the engine failed and the server is stopping")),
        (None, _) => state.model().map(|_| StatusCode::OK.into_response()),
        (Some(_), _) => Ok(json(StatusCode::OK, r#"{"status":"ok"}"#)),
    }
}

/// `GET /ready`: whether requests are taken.
pub(crate) async fn ready(Shared(state): Shared<Arc<State>>) -> Result<Response, ApiError> {
    state.ready_model().map(|_| json(StatusCode::OK, r#"{"status":"ready"}"#))
}

/// `GET /version`.
pub(crate) async fn version() -> Response {
    json(StatusCode::OK, json!({"version": VERSION, "name": "oxide"}).to_string())
}

/// `GET /openapi.json`.
pub(crate) async fn openapi() -> Response {
    json(StatusCode::OK, crate::openai::OPENAPI)
}

/// `GET /metrics`.
pub(crate) async fn metrics(Shared(state): Shared<Arc<State>>) -> Response {
    let served = state.loaded();
    let stats = served.map(|served| served.model.engine.stats());
    let launches = served.and_then(|served| served.model.engine.launches());
    let model = served.map_or("", |served| served.rules.model.as_str());
    let ready = state.ready_model().is_ok();
    let journal = state.journal.as_ref().map(crate::journal::Journal::counts);
    let mask_panics = served.map_or(0, |served| served.grammars.panics());
    let cancel_to_free = served.map(|served| served.model.engine.cancel_to_free());
    let info =
        Info { version: VERSION, model, ready, live: state.live(), started_unix: state.started_unix, mask_panics, cancel_to_free, journal };
    typed(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", state.metrics.render(&info, stats.as_ref(), launches))
}

/// `GET /v1/models`.
pub(crate) async fn models(Shared(state): Shared<Arc<State>>) -> Result<Response, ApiError> {
    let card = state.model()?.card();
    Ok(json(StatusCode::OK, json!({"object": "list", "data": [card]}).to_string()))
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(Shared(state): Shared<Arc<State>>, id: Result<Path<String>, PathRejection>) -> Result<Response, ApiError> {
    let Path(id) = id?;
    let served = state.model()?;
    if id != served.rules.model {
        return Err(ApiError::no_such_model(&id, &served.rules.model));
    }
    Ok(json(StatusCode::OK, served.card().to_string()))
}

/// `DELETE /v1/requests/{id}`: aborts the caller's live generations of that answer id or request id.
pub(crate) async fn abort(
    Shared(state): Shared<Arc<State>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = id?;
    let engine = &state.model()?.model.engine;
    let aborted = state.named(&id, caller.owner).iter().filter(|answer_id| engine.abort(answer_id)).count();
    if aborted == 0 {
        return Err(ApiError::no_such_request(&id));
    }
    state.metrics.aborts.fetch_add(aborted as u64, Ordering::Relaxed);
    Ok(json(StatusCode::OK, json!({"id": id, "object": "request", "aborted": true}).to_string()))
}
