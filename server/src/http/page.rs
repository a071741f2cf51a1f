//! `GET /`: one page for people, with no file beside it and no address but this server's.

use super::respond::typed;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;

const PAGE: &str = include_str!("page.html");
/// Nothing is loaded from elsewhere, nothing is sent elsewhere, and no page may frame this one.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub(crate) async fn page() -> Response {
    let mut response = typed(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
