//! What happens around every request: id, authentication, limits of the head, CORS, panics contained, metrics and the log line.

use super::auth::Owner;
use super::generate::Caller;
use super::respond::Refusal;
use super::state::{Phase, State};
use crate::faults::Place;
use crate::openai::error::ApiError;
use crate::openai::id::random_id;
use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

const REQUEST_ID: &str = "x-request-id";
/// Longest request id of a client that is taken over.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// Headers that scripts of other origins may read.
const EXPOSED: &str = "x-request-id, retry-after, retry-after-ms";
/// How long a browser may remember a preflight, in seconds.
const PREFLIGHT_AGE: &str = "86400";

/// Wraps the router.
pub(crate) async fn around(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let accepted = Instant::now();
    let endpoint = endpoint(request.uri().path());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let request_id = request_id(request.headers());
    let answered =
        Contained(Box::pin(answer(&state, request, next, endpoint, Caller { owner: Owner(0), request_id: request_id.clone(), accepted })));
    let mut response = answered.await.unwrap_or_else(|Panicked| {
        state.count_panic();
        ApiError::panicked().into_response()
    });
    finish_head(&state, response.headers_mut(), origin.as_ref(), &request_id);
    state.metrics.answered(endpoint, response.status().as_u16());
    log(&response, &request_id, &method, &path, accepted);
    response
}

/// Refuses the request or has its handler answer it, as the key's owner.
async fn answer(state: &State, mut request: Request, next: Next, endpoint: &str, caller: Caller) -> Response {
    state.options.faults.pass(Place::Head).await;
    match admit(state, &request, endpoint) {
        Err(error) => error.into_response(),
        Ok(_) if request.method() == Method::OPTIONS => {
            let asked = request.headers().clone();
            preflight(&asked, next.run(request).await)
        }
        Ok(owner) => {
            request.extensions_mut().insert(Caller { owner, ..caller });
            next.run(request).await
        }
    }
}

/// Lets a request in: head within bounds, and a key where one is needed.
fn admit(state: &State, request: &Request, endpoint: &str) -> Result<Owner, ApiError> {
    check_head(state, request)?;
    let open = matches!(endpoint, "page" | "health" | "ready" | "version" | "metrics" | "openapi") || request.method() == Method::OPTIONS;
    if open { Ok(Owner(0)) } else { state.keys.check(request.headers()) }
}

fn check_head(state: &State, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    let bytes = bytes + request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    let (headers_max, bytes_max) = (state.options.headers_max, state.options.head_bytes_max);
    if headers.len() > headers_max || bytes > bytes_max {
        return Err(ApiError::head_too_large(headers.len(), headers_max, bytes, bytes_max));
    }
    Ok(())
}

/// The client's id if it is short and printable, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let sent = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let fits = |id: &&str| !id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX;
    sent.filter(fits).map_or_else(|| random_id("req-"), str::to_owned)
}

/// Answers OPTIONS with the methods that the router names when it refuses this one; what is no path stays refused.
/// What the origin may do is said by the headers that every response gets.
fn preflight(asked: &HeaderMap, refused: Response) -> Response {
    let methods = refused.headers().get(header::ALLOW).and_then(|methods| methods.to_str().ok());
    let Some(methods) = methods.and_then(|methods| HeaderValue::from_str(&format!("{methods},OPTIONS")).ok()) else { return refused };
    let mut response = StatusCode::NO_CONTENT.into_response();
    let answer = response.headers_mut();
    answer.insert(header::ALLOW, methods.clone());
    if asked.contains_key(header::ORIGIN) {
        let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(HeaderValue::from_static("authorization, content-type")));
        answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        answer.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_AGE));
    }
    response
}

fn finish_head(state: &State, headers: &mut HeaderMap, origin: Option<&HeaderValue>, request_id: &str) {
    if let Ok(id) = HeaderValue::from_str(request_id) {
        headers.insert(REQUEST_ID, id);
    }
    if let Some(allowed) = origin.and_then(|origin| allowed_origin(&state.options.cors_origins, origin)) {
        if allowed != "*" {
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    }
    if matches!(state.phase(), Phase::Draining | Phase::Failed) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}

fn allowed_origin(allowed: &[String], origin: &HeaderValue) -> Option<HeaderValue> {
    if allowed.iter().any(|entry| entry == "*") {
        return Some(HeaderValue::from_static("*"));
    }
    allowed.iter().any(|entry| entry.as_bytes() == origin.as_bytes()).then(|| origin.clone())
}

fn log(response: &Response<Body>, request_id: &str, method: &Method, path: &str, accepted: Instant) {
    let status = response.status().as_u16();
    let head_ms = accepted.elapsed().as_secs_f64() * 1e3;
    let refusal = response.extensions().get::<Refusal>().map(|refusal| refusal.0.as_str());
    if status >= 500 {
        tracing::warn!(%request_id, %method, path, status, head_ms, refusal, "request answered");
    } else if matches!(endpoint(path), "health" | "ready" | "metrics") {
        tracing::debug!(%request_id, %method, path, status, head_ms, refusal, "request answered");
    } else {
        tracing::info!(%request_id, %method, path, status, head_ms, refusal, "request answered");
    }
}

/// The label of a path in metrics: a closed set, whatever clients ask for.
fn endpoint(path: &str) -> &'static str {
    match path {
        "/" => "page",
        "/health" => "health",
        "/ready" => "ready",
        "/version" => "version",
        "/metrics" => "metrics",
        "/openapi.json" => "openapi",
        "/tokenize" => "tokenize",
        "/detokenize" => "detokenize",
        "/v1/completions" => "completions",
        "/v1/chat/completions" => "chat",
        "/v1/chat/completions/render" => "render",
        "/v1/explain" => "explain",
        "/v1/prefixes" => "prefixes",
        "/v1/models" => "models",
        _ if path.starts_with("/v1/models/") => "models",
        _ if path.starts_with("/v1/prefixes/") => "prefixes",
        _ if path.starts_with("/v1/requests/") => "requests",
        _ => "other",
    }
}

/// A future whose panic is an error.
pub(super) struct Contained<F>(pub(super) Pin<Box<F>>);

/// The panic; its message went to the panic hook.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Panicked;

impl<F: Future> Future for Contained<F> {
    type Output = Result<F::Output, Panicked>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(_) => Poll::Ready(Err(Panicked)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_contained() {
        assert_eq!(Contained(Box::pin(async { 7 })).await, Ok(7));
        let panicking = async {
            tokio::task::yield_now().await;
            assert!(std::hint::black_box(false), "expected by the test");
        };
        assert_eq!(Contained(Box::pin(panicking)).await, Err(Panicked));
    }

    #[test]
    fn ids_of_clients_are_taken_over_if_they_are_short_and_printable() {
        let id = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(value.as_bytes()).expect("header"));
            request_id(&headers)
        };
        assert_eq!(id("abc"), "abc");
        for bad in ["", "é", &"x".repeat(129)] {
            assert!(id(bad).starts_with("req-"), "{bad}");
        }
    }

    #[test]
    fn only_listed_origins_are_allowed() {
        let origin = HeaderValue::from_static("https://a.example");
        assert_eq!(allowed_origin(&["*".to_owned()], &origin), Some(HeaderValue::from_static("*")));
        assert_eq!(allowed_origin(&["https://a.example".to_owned()], &origin), Some(origin.clone()));
        assert_eq!(allowed_origin(&["https://b.example".to_owned()], &origin), None);
    }
}
