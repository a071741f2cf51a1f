//! Reads a request's body: JSON only, bounded in size and time.

use super::options::ServeOptions;
use crate::faults::{Faults, Place};
use crate::openai::error::ApiError;
use crate::openai::fields::{Fields, parse_body};
use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use futures_core::Stream;
use std::pin::Pin;
use std::time::Duration;

/// How long the rest of a body that is too large is read and thrown away beside the answer, so that the client gets to
/// read it instead of a reset connection.
const DISCARD_TIME: Duration = Duration::from_secs(2);

/// Reads the fields of a JSON body.
///
/// # Errors
/// 415 for another content type, 413, 408, or 400 for anything but one JSON object.
pub(crate) async fn read_fields(headers: &HeaderMap, body: Body, options: &ServeOptions) -> Result<Fields, ApiError> {
    let bytes = read_bytes(headers, body, options).await?;
    check_content_type(headers)?;
    check_encoding(headers)?;
    parse_body(&bytes)
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let value = value.to_str().unwrap_or("?");
    let essence = value.split(';').next().unwrap_or_default().trim();
    let json = essence.eq_ignore_ascii_case("application/json") || essence.to_ascii_lowercase().ends_with("+json");
    if json { Ok(()) } else { Err(ApiError::not_json(value)) }
}

/// A compressed body would be read as broken JSON.
fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(CONTENT_ENCODING) else { return Ok(()) };
    let value = value.to_str().unwrap_or("?");
    if value.eq_ignore_ascii_case("identity") { Ok(()) } else { Err(ApiError::encoded(value)) }
}

async fn read_bytes(headers: &HeaderMap, body: Body, options: &ServeOptions) -> Result<Vec<u8>, ApiError> {
    let limit = options.body_bytes_max;
    let declared = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
    let mut chunks = body.into_data_stream();
    let read = async {
        if declared > limit as u64 {
            return None;
        }
        let mut bytes = Vec::new();
        loop {
            options.faults.pass(Place::Body).await;
            match next(&mut chunks).await {
                None => return Some(Ok(bytes)),
                Some(Err(error)) => return Some(Err(error)),
                Some(Ok(chunk)) if bytes.len() + chunk.len() > limit => return None,
                Some(Ok(chunk)) if !keep(&mut bytes, &chunk, &options.faults) => return Some(Err(ApiError::out_of_memory())),
                Some(Ok(_)) => {}
            }
        }
    };
    match tokio::time::timeout(options.body_timeout, read).await {
        Err(_) => Err(ApiError::body_timeout(options.body_timeout)),
        Ok(Some(bytes)) => bytes,
        Ok(None) => {
            // Reading on would say `100 Continue` to a client that waits to hear whether it shall send at all.
            if !(declared > limit as u64 && headers.contains_key(EXPECT)) {
                tokio::spawn(tokio::time::timeout(DISCARD_TIME, discard(chunks, limit.saturating_mul(4))));
            }
            Err(ApiError::body_too_large(limit))
        }
    }
}

/// Appends what was received; `false` if there is no memory for it. It grows with what came, not with
/// what was announced.
fn keep(bytes: &mut Vec<u8>, chunk: &[u8], faults: &Faults) -> bool {
    let room = !faults.refuses_memory(Place::BodyMemory) && bytes.try_reserve(chunk.len()).is_ok();
    if room {
        bytes.extend_from_slice(chunk);
    }
    room
}

async fn discard(mut chunks: BodyDataStream, mut left: usize) {
    while let Some(Ok(chunk)) = next(&mut chunks).await {
        left = left.saturating_sub(chunk.len());
        if left == 0 {
            return;
        }
    }
}

async fn next(chunks: &mut BodyDataStream) -> Option<Result<Bytes, ApiError>> {
    let chunk = std::future::poll_fn(|context| Pin::new(&mut *chunks).poll_next(context)).await?;
    Some(chunk.map_err(|error| ApiError::bad_json(format!("the request body broke off: {error}"))))
}
