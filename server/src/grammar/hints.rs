//! Texts that complete what a regular expression begins: read from the expression itself.
//!
//! An automaton can have so many states beside the way to its end that a search in breadth does not get there.
//! A shortest match of the expression then shows the way; whatever is tried is checked on the automaton.

use super::effective::{ascii_classes, make_effective};
use super::regex_growth::shortest_text;
use super::request::ConstraintKind;
use serde_json::{Value, json};

/// Most hints.
const HINTS_MAX: usize = 64;

/// The hints of a constraint, the shortest first. In JSON each begins and ends with the quotes of its string.
pub(super) fn hints(kind: &ConstraintKind) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    collect(kind, &mut found);
    found.sort_by(|one, other| (one.len(), one).cmp(&(other.len(), other)));
    found.dedup();
    found.truncate(HINTS_MAX);
    found
}

fn collect(kind: &ConstraintKind, found: &mut Vec<Vec<u8>>) {
    match kind {
        ConstraintKind::Regex(pattern) => found.extend(shortest_text(&ascii_classes(pattern)).map(String::into_bytes)),
        ConstraintKind::Schema(schema) => of_schema(schema, found),
        ConstraintKind::Marked(marked) => {
            of_schema(&marked.schema, found);
            marked.text.iter().for_each(|text| collect(text, found));
        }
        ConstraintKind::Choice(_) | ConstraintKind::Lark(_) => {}
    }
}

fn of_schema(schema: &Value, found: &mut Vec<Vec<u8>>) {
    let mut schema = schema.clone();
    if make_effective(&mut schema).is_err() {
        return;
    }
    let mut open = vec![&schema];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(map) => {
                let keys = map.get("patternProperties").and_then(Value::as_object).into_iter().flatten().map(|(key, _)| key.as_str());
                let patterns = map.get("pattern").and_then(Value::as_str).into_iter().chain(keys);
                found.extend(patterns.filter_map(shortest_text).map(|text| json!(text).to_string().into_bytes()));
                open.extend(map.values());
            }
            Value::Array(items) => open.extend(items),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_shortest_matches_as_they_are_written() {
        let schema = json!({"properties": {"a": {"pattern": "x+\"y"}, "b": {"format": "ipv6"}}, "patternProperties": {"^k_": {}}});
        let found = hints(&ConstraintKind::Schema(schema));
        assert_eq!(found, [&b"\"k_\""[..], b"\"::1\"", b"\"x\\\"y\""]);
        assert_eq!(hints(&ConstraintKind::Regex("a.*b".to_owned())), [b"ab"]);
    }
}
