//! Bodies and heads of responses.

use crate::openai::error::ApiError;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

/// A JSON response.
pub(crate) fn json(status: StatusCode, body: impl Into<Body>) -> Response {
    typed(status, "application/json", body)
}

/// A response of any content type.
pub(crate) fn typed(status: StatusCode, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self { code: Some("unknown_url"), param: None, ..Self::invalid("", format!("unreadable request URL: {}", rejection.body_text())) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, self.to_json());
        let headers = response.headers_mut();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds as u64));
            headers.insert("retry-after-ms", HeaderValue::from(wait.as_millis().max(1) as u64));
        }
        if self.status == 401 {
            headers.insert("www-authenticate", HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Refusal(self.to_string()));
        response
    }
}

/// Why a request was refused, for the log line.
#[derive(Clone, Debug)]
pub(crate) struct Refusal(pub(crate) String);
