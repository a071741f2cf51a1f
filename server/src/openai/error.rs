//! Errors as the OpenAI API words them: `{"error":{"message","type","param","code"}}`.
//!
//! Every response above 399 that the server sends, whatever the cause, is one of these.

use std::fmt;
use std::time::Duration;

/// An error of the API: HTTP status and the members of its JSON object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// `error.type`.
    pub kind: &'static str,
    /// `error.code`.
    pub code: Option<&'static str>,
    /// `error.param`: the field at fault.
    pub param: Option<String>,
    /// `error.message`.
    pub message: String,
    /// Sent as `Retry-After` (seconds, rounded up) and `retry-after-ms`.
    pub retry_after: Option<Duration>,
}

/// `error.type` of everything that the client must change.
pub const INVALID_REQUEST: &str = "invalid_request_error";
/// `error.type` of everything that the client may try again.
pub const SERVER_ERROR: &str = "server_error";
/// `error.type` of an exceeded quota.
pub const RATE_LIMIT: &str = "rate_limit_error";

impl ApiError {
    fn new(status: u16, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, kind, code, param: None, message: message.into(), retry_after: None }
    }

    /// 400 that blames field `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, INVALID_REQUEST, Some("invalid_value"), message) }
    }

    /// 400 for a body that is not a JSON object.
    pub fn bad_json(message: impl Into<String>) -> Self {
        Self::new(400, INVALID_REQUEST, Some("invalid_json"), message)
    }

    /// 400 for a field that exists elsewhere and not here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 400 for a prompt, or a prompt and its completion, that do not fit the context.
    pub fn context_length(param: &str, message: impl Into<String>) -> Self {
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// 401.
    pub fn unauthorized(message: &str) -> Self {
        Self::new(401, INVALID_REQUEST, Some("invalid_api_key"), message)
    }

    /// 404 for a model that is not served here.
    pub fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("the model `{asked}` does not exist; this server serves `{served}`");
        Self { param: Some("model".to_owned()), ..Self::new(404, INVALID_REQUEST, Some("model_not_found"), message) }
    }

    /// 404 for a path.
    pub fn no_such_path(method: &str, path: &str) -> Self {
        Self::new(404, INVALID_REQUEST, Some("unknown_url"), format!("unknown request URL: {method} {path}"))
    }

    /// 404 for a request id that is not live.
    pub fn no_such_request(id: &str) -> Self {
        Self::new(404, INVALID_REQUEST, Some("request_not_found"), format!("no live request has the id `{id}`"))
    }

    /// 405.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        Self::new(405, INVALID_REQUEST, Some("method_not_allowed"), format!("{path} does not answer {method}; see the Allow header"))
    }

    /// 408 for a body that does not arrive.
    pub fn body_timeout(limit: Duration) -> Self {
        Self::new(408, INVALID_REQUEST, Some("body_timeout"), format!("the request body did not arrive within {} s", limit.as_secs_f32()))
    }

    /// 413.
    pub fn body_too_large(limit: usize) -> Self {
        Self::new(413, INVALID_REQUEST, Some("body_too_large"), format!("the request body is larger than the limit of {limit} bytes"))
    }

    /// 415.
    pub fn not_json(content_type: &str) -> Self {
        let message = format!("content type `{content_type}` is not supported; send `Content-Type: application/json`");
        Self::new(415, INVALID_REQUEST, Some("unsupported_media_type"), message)
    }

    /// 415 for a compressed body.
    pub fn encoded(encoding: &str) -> Self {
        let message = format!("content encoding `{encoding}` is not supported; send the body uncompressed");
        Self::new(415, INVALID_REQUEST, Some("unsupported_media_type"), message)
    }

    /// 431.
    pub fn head_too_large(headers: usize, headers_max: usize, bytes: usize, bytes_max: usize) -> Self {
        let message =
            format!("the request head has {headers} headers of {bytes} bytes; at most {headers_max} of {bytes_max} bytes are allowed");
        Self::new(431, INVALID_REQUEST, Some("head_too_large"), message)
    }

    /// 429 for a key with too many requests in flight.
    pub fn quota(limit: usize, retry_after: Duration) -> Self {
        let message = format!("this key already has {limit} requests in flight, which is its limit; wait for one to finish");
        Self { retry_after: Some(retry_after), ..Self::new(429, RATE_LIMIT, Some("rate_limit_exceeded"), message) }
    }

    /// 503 for a full queue, or a wait that took too long.
    pub fn overloaded(message: impl Into<String>, retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(503, SERVER_ERROR, Some("server_is_overloaded"), message) }
    }

    /// 503 while the model loads, the server drains, or after the engine failed.
    pub fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self { retry_after: Some(Duration::from_secs(1)), ..Self::new(503, SERVER_ERROR, Some(code), message) }
    }

    /// 503 for a request that there is no memory for.
    pub fn out_of_memory() -> Self {
        Self::unavailable("out_of_memory", "the server has no memory for this request now; try again")
    }

    /// 504 for a deadline that passed before anything was produced.
    pub fn deadline() -> Self {
        Self::new(504, SERVER_ERROR, Some("deadline_exceeded"), "the request's deadline passed before a token was produced")
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, SERVER_ERROR, Some("internal_error"), message)
    }

    /// 500 for a request whose handling panicked.
    pub fn panicked() -> Self {
        Self::internal("the server failed while it answered this request")
    }

    /// The JSON object, as sent in a body or in a stream.
    pub fn to_json(&self) -> String {
        let Self { kind, code, param, message, .. } = self;
        serde_json::json!({"error": {"message": message, "type": kind, "param": param, "code": code}}).to_string()
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.status, self.code.unwrap_or(self.kind), self.message)
    }
}

impl std::error::Error for ApiError {}
