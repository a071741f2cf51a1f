//! Which path is answered by whom.

use super::state::State;
use super::{explain, generate, info, layer, page, prefixes, tokenize};
use crate::openai::error::ApiError;
use axum::Router;
use axum::extract::Request;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};
use std::sync::Arc;

/// The routes, with everything around them: what refuses a method has named the allowed ones before that.
pub(crate) fn router(state: Arc<State>) -> Router {
    let routes = Router::new()
        .route("/", get(page::page))
        .route("/health", get(info::health))
        .route("/ready", get(info::ready))
        .route("/version", get(info::version))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(info::openapi))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/chat/completions/render", post(generate::render))
        .route("/v1/explain", post(explain::explain))
        .route("/v1/prefixes", post(prefixes::create).get(prefixes::list))
        .route("/v1/prefixes/{name}", delete(prefixes::remove))
        .route("/v1/requests/{id}", delete(info::abort))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .fallback(no_such_path)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(&state));
    Router::new().fallback_service(routes).layer(from_fn_with_state(state, layer::around))
}

async fn no_such_path(request: Request) -> ApiError {
    ApiError::no_such_path(request.method().as_str(), request.uri().path())
}

async fn method_not_allowed(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}
