//! What `/v1/explain` says of a constraint: its field, its kind, the keywords enforced, the shortest output.

use super::generate::compile;
use super::served::Served;
use crate::grammar::{Compiled, Constraint, ConstraintKind, is_annotation};
use crate::openai::error::ApiError;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Compiles the constraint and describes it.
///
/// # Errors
/// 400 if it cannot be enforced as written.
pub(super) async fn explain_constraint(served: &Served, constraint: Option<Constraint>) -> Result<Value, ApiError> {
    let Some(constraint) = constraint else { return Ok(Value::Null) };
    let (kind, keywords) = match &constraint.kind {
        ConstraintKind::Schema(schema) => ("json_schema", keywords(schema)),
        ConstraintKind::Regex(_) => ("regex", BTreeSet::new()),
        ConstraintKind::Choice(_) => ("choice", BTreeSet::new()),
        ConstraintKind::Lark(_) => ("grammar", BTreeSet::new()),
        ConstraintKind::Marked(marked) => ("tool_calls", keywords(&marked.schema)),
    };
    let field = constraint.param.clone();
    let shortest = compile(served, Some(constraint)).await?.as_ref().and_then(Compiled::shortest);
    Ok(json!({"field": field, "kind": kind, "enforced_keywords": keywords, "shortest_tokens": shortest}))
}

/// Keywords of a schema that constrain; all of them are enforced, for one that is not is refused.
fn keywords(schema: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![schema];
    while let Some(schema) = open.pop() {
        match schema {
            Value::Object(members) => collect(members, &mut found, &mut open),
            Value::Array(items) => open.extend(items),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    found
}

fn collect<'a>(members: &'a Map<String, Value>, found: &mut BTreeSet<String>, open: &mut Vec<&'a Value>) {
    for (name, value) in members.iter().filter(|(name, _)| !is_annotation(name)) {
        found.insert(name.clone());
        match (name.as_str(), value) {
            // Their members are names of the user's.
            ("properties" | "$defs" | "definitions" | "patternProperties", Value::Object(named)) => open.extend(named.values()),
            ("enum" | "const" | "required", _) => {}
            _ => open.push(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keywords_are_those_of_the_schema_and_not_names_of_properties() {
        let schema = json!({
            "type": "object", "title": "t", "properties": {"pattern": {"type": "string", "maxLength": 3}, "b": {"anyOf": [{"const": {"minimum": 1}}]}},
            "required": ["b"], "$defs": {"x": {"enum": [1]}},
        });
        let found: Vec<String> = keywords(&schema).into_iter().collect();
        assert_eq!(found, ["$defs", "anyOf", "const", "enum", "maxLength", "properties", "required", "type"]);
    }
}
