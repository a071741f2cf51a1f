//! Fields of tools and constraints that are refused, each by name.

use super::error::ApiError;
use super::fields::Fields;
use serde_json::Value;

/// Constraints that no endpoint takes.
const CONSTRAINTS: &[&str] = &["guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"];
/// Fields of tools, for the endpoint that has none.
const TOOLS: &[&str] = &["tools", "tool_choice", "functions", "function_call"];

/// Takes constraints that are not supported.
///
/// # Errors
/// 400 that names the field.
pub fn refuse_constraints(fields: &mut Fields) -> Result<(), ApiError> {
    refuse(fields, CONSTRAINTS)
}

/// Takes fields of tools where there are none.
///
/// # Errors
/// 400 that names the field.
pub fn refuse_tools(fields: &mut Fields) -> Result<(), ApiError> {
    fields.boolean("parallel_tool_calls")?;
    refuse(fields, TOOLS)
}

fn refuse(fields: &mut Fields, names: &[&str]) -> Result<(), ApiError> {
    for name in names {
        if let Some(value) = fields.take(name)
            && !asks_for_nothing(name, &value)
        {
            return Err(ApiError::unsupported(*name, format!("`{name}` is not supported here; leave it out")));
        }
    }
    Ok(())
}

fn asks_for_nothing(name: &str, value: &Value) -> bool {
    matches!(name, "tool_choice" | "function_call") && value == "none"
}
