//! The fields that constrain the output: `response_format`, `structured_outputs` and the `guided_*` family.

use crate::openai::error::ApiError;
use crate::openai::fields::{self, Fields};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Most entries of a choice.
const CHOICES_MAX: usize = 4096;
/// Most bytes of all entries of a choice.
const CHOICE_BYTES_MAX: usize = 65_536;

/// What the output must be, and which field says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constraint {
    /// The field, for messages.
    pub param: String,
    /// What it asks for.
    pub kind: ConstraintKind,
}

/// Kinds of constraints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConstraintKind {
    /// JSON that a schema accepts.
    Schema(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a Lark grammar.
    Lark(String),
    /// Text with marked parts, or instead of text marked parts alone.
    Marked(Marked),
}

/// Parts that are JSON of a schema between marks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Marked {
    /// What the whole text must be if it is no parts; `None` is free text, with parts in it.
    pub text: Option<Box<ConstraintKind>>,
    /// What begins a part.
    pub open: String,
    /// What ends it.
    pub close: String,
    /// What stands between two parts that are the whole text.
    pub separator: String,
    /// What a part holds.
    pub schema: Value,
    /// Most parts.
    pub most: u32,
}

/// Takes the constraint of a request.
///
/// # Errors
/// 400 that names the field.
pub fn take_constraint(fields: &mut Fields) -> Result<Option<Constraint>, ApiError> {
    let mut found: Vec<Constraint> = Vec::new();
    found.extend(take_response_format(fields)?);
    for (name, kind) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
        ("guided_json_object", "json_object"),
    ] {
        if let Some(value) = fields.take(name) {
            found.extend(constraint_of(name, kind, value)?);
        }
    }
    if let Some(map) = fields.object("structured_outputs")? {
        found.extend(take_structured(map)?);
    }
    match (found.pop(), found.pop()) {
        (Some(last), Some(first)) => {
            let message = format!("`{}` and `{}` both constrain the output; send one of them", first.param, last.param);
            Err(ApiError::invalid(last.param, message))
        }
        (only, _) => Ok(only),
    }
}

fn take_response_format(fields: &mut Fields) -> Result<Option<Constraint>, ApiError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    let bad = |message: String| Err(ApiError::invalid("response_format", message));
    let kind = format.get("type").and_then(Value::as_str);
    if let Some(kind @ ("text" | "json_object")) = kind
        && let Some(member) = ["schema", "json_schema"].into_iter().find(|member| format.get(*member).is_some_and(|value| !value.is_null()))
    {
        return bad(format!("`response_format.{member}` is not enforced with the type {kind}; use the type json_schema"));
    }
    match kind {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(schema_constraint("response_format", json!({"type": "object"})))),
        Some("json_schema") => match format.remove("json_schema") {
            Some(Value::Object(named)) => named_schema(named).map(Some),
            _ => bad("`response_format.json_schema` is required and must be an object with the member `schema`".to_owned()),
        },
        Some(other) => bad(format!("`response_format.type` is `{other}`; it must be one of text, json_object, json_schema")),
        None => bad("`response_format.type` is required: one of text, json_object, json_schema".to_owned()),
    }
}

fn named_schema(mut named: Map<String, Value>) -> Result<Constraint, ApiError> {
    if named.get("strict").is_some_and(|strict| !strict.is_boolean() && !strict.is_null()) {
        return Err(ApiError::invalid("response_format", "`response_format.json_schema.strict` must be true or false"));
    }
    match named.remove("schema") {
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(schema_constraint("response_format", schema)),
        Some(other) => {
            let found = fields::kind(&other);
            Err(ApiError::invalid("response_format", format!("`response_format.json_schema.schema` must be an object, not {found}")))
        }
        None => Err(ApiError::invalid("response_format", "`response_format.json_schema.schema` is required")),
    }
}

fn take_structured(map: Map<String, Value>) -> Result<Vec<Constraint>, ApiError> {
    let mut found = Vec::new();
    for (member, value) in map {
        let param = format!("structured_outputs.{member}");
        match member.as_str() {
            _ if value.is_null() => {}
            "json" | "regex" | "choice" | "grammar" | "json_object" => found.extend(constraint_of(&param, &member, value)?),
            _ => {
                return Err(ApiError::unsupported(
                    &param,
                    format!("`{param}` is not supported; use json, regex, choice, grammar or json_object"),
                ));
            }
        }
    }
    Ok(found)
}

fn schema_constraint(param: &str, schema: Value) -> Constraint {
    Constraint { param: param.to_owned(), kind: ConstraintKind::Schema(schema) }
}

fn constraint_of(param: &str, kind: &str, value: Value) -> Result<Option<Constraint>, ApiError> {
    let kind = match (kind, value) {
        ("json", schema @ (Value::Object(_) | Value::Bool(_))) => ConstraintKind::Schema(schema),
        ("json", Value::String(text)) => ConstraintKind::Schema(parse_schema(param, &text)?),
        ("json_object", Value::Bool(false)) => return Ok(None),
        ("json_object", Value::Bool(true)) => ConstraintKind::Schema(json!({"type": "object"})),
        ("regex", Value::String(text)) => ConstraintKind::Regex(text),
        ("grammar", Value::String(text)) => ConstraintKind::Lark(text),
        ("choice", Value::Array(items)) => ConstraintKind::Choice(choice(param, items)?),
        (kind, other) => {
            let wanted = match kind {
                "json" => "a JSON schema",
                "json_object" => "true or false",
                "choice" => "an array of strings",
                _ => "a string",
            };
            return Err(ApiError::invalid(param, format!("`{param}` must be {wanted}, not {}", fields::kind(&other))));
        }
    };
    Ok(Some(Constraint { param: param.to_owned(), kind }))
}

fn parse_schema(param: &str, text: &str) -> Result<Value, ApiError> {
    match serde_json::from_str(text) {
        Ok(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(schema),
        Ok(other) => Err(ApiError::invalid(param, format!("`{param}` must hold a JSON schema, not {}", fields::kind(&other)))),
        Err(error) => Err(ApiError::invalid(param, format!("`{param}` is not valid JSON: {error}"))),
    }
}

fn choice(param: &str, items: Vec<Value>) -> Result<Vec<String>, ApiError> {
    let bad = |message: String| ApiError::invalid(param, format!("`{param}` {message}"));
    if items.is_empty() || items.len() > CHOICES_MAX {
        return Err(bad(format!("has {} entries, allowed are 1 to {CHOICES_MAX}", items.len())));
    }
    let texts: Vec<String> = items
        .into_iter()
        .map(|item| match item {
            Value::String(text) if !text.is_empty() => Ok(text),
            Value::String(_) => Err(bad("holds an empty string".to_owned())),
            other => Err(bad(format!("must be an array of strings, but one entry is {}", fields::kind(&other)))),
        })
        .collect::<Result<_, _>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes > CHOICE_BYTES_MAX {
        return Err(bad(format!("holds {bytes} bytes, at most {CHOICE_BYTES_MAX} are allowed")));
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::fields::parse_body;

    fn take(body: &str) -> Result<Option<Constraint>, ApiError> {
        take_constraint(&mut parse_body(body.as_bytes()).expect("json"))
    }

    #[test]
    fn bad_constraints_are_named() {
        for (body, param) in [
            (r#"{"response_format":{"type":"json_schema"}}"#, "response_format"),
            (r#"{"response_format":{"type":"json_schema","json_schema":{"name":"a"}}}"#, "response_format"),
            (r#"{"response_format":{"type":"xml"}}"#, "response_format"),
            (r#"{"response_format":{}}"#, "response_format"),
            (r#"{"response_format":"json_object"}"#, "response_format"),
            (r#"{"response_format":{"type":"json_object","schema":{"type":"object"}}}"#, "response_format"),
            (r#"{"response_format":{"type":"text","json_schema":{"schema":{}}}}"#, "response_format"),
            (r#"{"guided_json":"{"}"#, "guided_json"),
            (r#"{"guided_json":7}"#, "guided_json"),
            (r#"{"guided_regex":7}"#, "guided_regex"),
            (r#"{"guided_choice":[]}"#, "guided_choice"),
            (r#"{"guided_choice":[""]}"#, "guided_choice"),
            (r#"{"guided_choice":["a",1]}"#, "guided_choice"),
            (r#"{"structured_outputs":{"structural_tag":{}}}"#, "structured_outputs.structural_tag"),
            (r#"{"structured_outputs":{"json":1}}"#, "structured_outputs.json"),
            (r#"{"guided_regex":"a","guided_choice":["a"]}"#, "guided_choice"),
            (r#"{"guided_regex":"a","response_format":{"type":"json_object"}}"#, "guided_regex"),
        ] {
            let error = take(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}: {error}");
        }
    }

    #[test]
    fn each_form_is_read() {
        let kind = |body: &str| take(body).expect(body).map(|constraint| constraint.kind);
        assert_eq!(kind("{}"), None);
        assert_eq!(kind(r#"{"response_format":{"type":"text"},"guided_json_object":false}"#), None);
        assert_eq!(kind(r#"{"response_format":{"type":"json_object"}}"#), Some(ConstraintKind::Schema(json!({"type": "object"}))));
        assert_eq!(kind(r#"{"guided_json":"{\"type\":\"null\"}"}"#), Some(ConstraintKind::Schema(json!({"type": "null"}))));
        assert_eq!(kind(r#"{"structured_outputs":{"choice":["a"],"regex":null}}"#), Some(ConstraintKind::Choice(vec!["a".into()])));
    }
}
