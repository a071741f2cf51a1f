//! Reads a JSON object field by field, with errors that name the field, what was found and what is allowed.
//!
//! A `null` is an absent field everywhere. Fields that nobody asked for are left over, so that the
//! caller can count or refuse them.

use super::error::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Deepest nesting of a request body.
pub const JSON_DEPTH_MAX: usize = 64;

/// The fields of a request that were not read yet.
#[derive(Debug)]
pub struct Fields(Map<String, Value>);

/// Parses a body into its fields.
///
/// # Errors
/// If the body is not one JSON object, or nests deeper than [`JSON_DEPTH_MAX`].
pub fn parse_body(body: &[u8]) -> Result<Fields, ApiError> {
    check_depth(body)?;
    let value: Value = serde_json::from_slice(body).map_err(|error| bad_json(body, &error))?;
    match value {
        Value::Object(map) => Ok(Fields(map)),
        other => Err(ApiError::bad_json(format!("the request body must be a JSON object, not {}", kind(&other)))),
    }
}

/// Bounds nesting before anything recursive sees the text.
fn check_depth(body: &[u8]) -> Result<(), ApiError> {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => depth += 1,
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > JSON_DEPTH_MAX {
            return Err(ApiError::bad_json(format!("the request body nests deeper than {JSON_DEPTH_MAX} levels")));
        }
    }
    Ok(())
}

fn bad_json(body: &[u8], error: &serde_json::Error) -> ApiError {
    if body.iter().all(u8::is_ascii_whitespace) {
        return ApiError::bad_json("the request body is empty; send a JSON object");
    }
    let hint = match line_tail(body, error) {
        Some(tail) if ["NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"].iter().any(|word| tail.starts_with(word)) => {
            " (JSON has no NaN or Infinity)"
        }
        _ => "",
    };
    ApiError::bad_json(format!("the request body is not valid JSON: {error}{hint}"))
}

/// The text just before the place of a syntax error, from the start of the offending literal on.
fn line_tail<'a>(body: &'a [u8], error: &serde_json::Error) -> Option<&'a str> {
    let line = body.split(|byte| *byte == b'\n').nth(error.line().checked_sub(1)?)?;
    let at = error.column().saturating_sub(1).min(line.len());
    let start = line.get(..at)?.iter().rposition(|byte| b":,[ \t{".contains(byte)).map_or(0, |position| position + 1);
    let tail = line.get(start..)?;
    std::str::from_utf8(tail.get(..tail.len().min(16))?).ok()
}

/// What a JSON value is, in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a decimal number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn wrong_type(name: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError { code: Some("invalid_type"), ..ApiError::invalid(name, format!("`{name}` must be {wanted}, not {}", kind(found))) }
}

fn out_of_range(name: &str, found: &dyn std::fmt::Display, low: &dyn std::fmt::Display, high: &dyn std::fmt::Display) -> ApiError {
    ApiError::invalid(name, format!("`{name}` must be from {low} to {high}, not {found}"))
}

impl Fields {
    /// Wraps an object that is nested in a request.
    pub fn of(map: Map<String, Value>) -> Self {
        Self(map)
    }

    /// Takes a field; `None` if absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.swap_remove(name).filter(|value| !value.is_null())
    }

    /// Whether the field is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// Takes a boolean.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.take(name)
            .map(|value| match value {
                Value::Bool(flag) => Ok(flag),
                other => Err(wrong_type(name, "true or false", &other)),
            })
            .transpose()
    }

    /// Takes a string.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take(name)
            .map(|value| match value {
                Value::String(text) => Ok(text),
                other => Err(wrong_type(name, "a string", &other)),
            })
            .transpose()
    }

    /// Takes an object.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.take(name)
            .map(|value| match value {
                Value::Object(map) => Ok(map),
                other => Err(wrong_type(name, "an object", &other)),
            })
            .transpose()
    }

    /// Takes an array.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.take(name)
            .map(|value| match value {
                Value::Array(items) => Ok(items),
                other => Err(wrong_type(name, "an array", &other)),
            })
            .transpose()
    }

    /// Takes a number within `range`.
    ///
    /// # Errors
    /// If it is no number, or outside.
    pub fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        self.take(name).map(|value| number(name, &value, range)).transpose()
    }

    /// Takes an integer within `range`. `2.0` is an integer, `2.5` and `"2"` are not.
    ///
    /// # Errors
    /// If it is no integer, or outside.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.take(name).map(|value| integer(name, &value, range)).transpose()
    }

    /// Names of the fields that nobody read, nulls included.
    pub fn unread(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// Reads a number within `range`.
///
/// # Errors
/// If it is no number, or outside.
pub fn number(name: &str, value: &Value, range: RangeInclusive<f64>) -> Result<f64, ApiError> {
    let found = value.as_f64().ok_or_else(|| wrong_type(name, "a number", value))?;
    if range.contains(&found) { Ok(found) } else { Err(out_of_range(name, value, range.start(), range.end())) }
}

/// Reads an integer within `range`; integers beyond 64 bits are out of range, not wrong in type.
///
/// # Errors
/// If it is no integer, or outside.
pub fn integer(name: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
    let Value::Number(digits) = value else { return Err(wrong_type(name, "an integer", value)) };
    let found = match (digits.as_i64(), digits.as_f64()) {
        (Some(found), _) => Some(found),
        (None, Some(float)) if float.fract() != 0.0 => return Err(wrong_type(name, "an integer", value)),
        (None, Some(float)) if float.abs() < 9.0e15 => Some(float as i64),
        (None, _) => None,
    };
    found.filter(|found| range.contains(found)).ok_or_else(|| out_of_range(name, value, range.start(), range.end()))
}

/// Reads a list of token ids, each below `limit`.
///
/// # Errors
/// If the value is no list of integers, or an id is outside.
pub fn token_ids(name: &str, items: &[Value], limit: u32) -> Result<Vec<u32>, ApiError> {
    items
        .iter()
        .enumerate()
        .map(|(index, item)| match item.as_u64() {
            Some(id) if id < u64::from(limit) => Ok(id as u32),
            _ => Err(bad_token(name, index, item, limit)),
        })
        .collect()
}

fn bad_token(name: &str, index: usize, item: &Value, limit: u32) -> ApiError {
    match item {
        Value::Number(number) if !number.is_f64() => {
            ApiError::invalid(name, format!("`{name}[{index}]` is token id {item}; this model's ids are 0 to {}", limit.saturating_sub(1)))
        }
        other => wrong_type(&format!("{name}[{index}]"), "a token id (an integer)", other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(body: &[u8]) -> ApiError {
        parse_body(body).expect_err("must be refused")
    }

    #[test]
    fn bodies_that_are_no_json_object_are_refused_with_a_reason() {
        for (body, words) in [
            (&b""[..], "is empty"),
            (b" \n", "is empty"),
            (b"{\"model\":", "EOF"),
            (b"[]", "not an array"),
            (b"{\"temperature\": NaN}", "no NaN"),
            (b"{\"temperature\":-Infinity}", "no NaN"),
            (b"{\"a\":1e999}", "number out of range"),
            (b"{\"a\":\"\xff\"}", "not valid JSON"),
        ] {
            let error = refusal(body);
            assert_eq!(error.status, 400);
            assert!(error.message.contains(words), "{words}: {}", error.message);
        }
    }

    #[test]
    fn ten_thousand_brackets_are_refused_and_brackets_in_strings_are_not_counted() {
        assert!(refusal(&[b'['; 10_000]).message.contains("nests deeper"));
        let text = format!("{{\"a\":\"\\\"{}\"}}", "[".repeat(10_000));
        assert!(parse_body(text.as_bytes()).is_ok());
    }

    #[test]
    fn integers_do_not_wrap() {
        let mut fields =
            parse_body(b"{\"a\":1099511627776,\"b\":99999999999999999999999,\"c\":2.0,\"d\":2.5,\"e\":-1,\"f\":\"1\"}").expect("json");
        assert!(fields.integer("a", 0..=100).is_err());
        assert_eq!(fields.integer("b", 0..=100).expect_err("huge").code, Some("invalid_value"));
        assert_eq!(fields.integer("c", 0..=100).expect("two"), Some(2));
        assert_eq!(fields.integer("d", 0..=100).expect_err("fraction").code, Some("invalid_type"));
        assert!(fields.integer("e", 0..=100).is_err());
        assert_eq!(fields.integer("f", 0..=100).expect_err("text").param.as_deref(), Some("f"));
    }

    #[test]
    fn null_is_absent() {
        let mut fields = parse_body(b"{\"n\":null}").expect("json");
        assert_eq!(fields.integer("n", 0..=1).expect("absent"), None);
        assert_eq!(fields.unread().count(), 0);
    }
}
