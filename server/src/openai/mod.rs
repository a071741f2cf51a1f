//! The OpenAI wire format: requests validated into engine requests, responses, stream chunks and errors.
//!
//! Knows tokenizer and engine request; knows no socket. Reading is done by hand, field by field, so
//! that every refusal names the field, what was found and what is allowed.

pub mod chat_request;
pub mod choice;
pub mod common;
pub mod completion_request;
pub mod error;
pub mod fields;
pub mod id;
pub mod rules;
pub mod tools;
pub mod wire;

/// The server's own description of its endpoints.
pub const OPENAPI: &str = include_str!("openapi.json");
