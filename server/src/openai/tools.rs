//! Tools and constrained output. Not implemented yet: each field gets a 400 that names it, never silence.
//!
//! The places where they slot in: [`refuse`] becomes the parser of these fields, its result carries a
//! `MaskFactory` for the engine request, and a streaming parser sits between the stream decoder and
//! the deltas of `openai::chat`.

use super::error::ApiError;
use super::fields::Fields;
use serde_json::Value;

const FIELDS: &[&str] = &[
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
];

/// Takes the fields and refuses each that asks for something.
///
/// # Errors
/// 400 that names the field.
pub fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    fields.boolean("parallel_tool_calls")?;
    for name in FIELDS {
        if let Some(value) = fields.take(name)
            && !asks_for_nothing(name, &value)
        {
            return Err(ApiError::unsupported(*name, format!("`{name}` is not supported by this version of the server; leave it out")));
        }
    }
    Ok(())
}

fn asks_for_nothing(name: &str, value: &Value) -> bool {
    match name {
        "tool_choice" | "function_call" => value == "none",
        "response_format" => *value == serde_json::json!({"type": "text"}),
        _ => false,
    }
}
