//! What a schema may contain before anything compiles it.
//!
//! The checks are iterative, so that no input can exhaust a stack. A schema that passes has: bounded
//! size and depth, only keywords that are enforced, local references that exist, no reference that leads
//! back to itself without consuming anything, and only regular expressions that parse.

use super::regex_growth::{Spelling, regex_growth};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Most JSON values in a schema.
const NODES_MAX: usize = 50_000;
/// Deepest nesting of a schema.
const DEPTH_MAX: usize = 64;
/// Largest `max…` of a count.
const COUNT_MAX: u64 = i32::MAX as u64;
/// Largest `min…` of a count: more could not be written in any context.
const COUNT_MIN_MAX: u64 = 1_000_000;

/// Keywords that restrict values and are not enforced.
const UNSUPPORTED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$anchor",
];

/// Keywords that are enforced, or that hold what others refer to.
const ENFORCED: &[&str] = &[
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "$defs",
    "definitions",
    "components",
    "items",
    "additionalItems",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "additionalProperties",
    "patternProperties",
    "required",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// Keywords that restrict nothing; see [`is_annotation`].
const ANNOTATIONS: &[&str] = &[
    "title",
    "description",
    "default",
    "example",
    "examples",
    "$comment",
    "$schema",
    "$id",
    "id",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "discriminator",
];

/// Whether a keyword restricts nothing: it only describes, or is somebody's extension.
pub(crate) fn is_annotation(keyword: &str) -> bool {
    ANNOTATIONS.contains(&keyword) || (keyword.starts_with("x-") && keyword != "x-guidance")
}

/// Largest magnitude of a number up to which all whole numbers are told apart.
const EXACT_MAX: u64 = 1 << 53;

/// How a subschema relates to the one that holds it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Applies to the same value.
    SameValue,
    /// Applies to a part of the value.
    Part,
    /// Applies only where it is referred to.
    Definition,
}

/// Subschemas of a schema, in order.
pub(super) fn children(schema: &Map<String, Value>) -> Vec<(Place, &Value)> {
    let mut found = Vec::new();
    for (keyword, value) in schema {
        match (keyword.as_str(), value) {
            ("anyOf" | "oneOf" | "allOf", Value::Array(items)) => found.extend(items.iter().map(|item| (Place::SameValue, item))),
            ("prefixItems" | "items", Value::Array(items)) => found.extend(items.iter().map(|item| (Place::Part, item))),
            ("items" | "additionalItems" | "additionalProperties", value) => found.push((Place::Part, value)),
            ("properties" | "patternProperties", Value::Object(map)) => found.extend(map.values().map(|item| (Place::Part, item))),
            ("$defs" | "definitions", Value::Object(map)) => found.extend(map.values().map(|item| (Place::Definition, item))),
            _ => {}
        }
    }
    found
}

/// The same, to change them.
pub(super) fn children_mut(schema: &mut Map<String, Value>) -> Vec<(Place, &mut Value)> {
    let mut found = Vec::new();
    for (keyword, value) in schema {
        match (keyword.as_str(), value) {
            ("anyOf" | "oneOf" | "allOf", Value::Array(items)) => found.extend(items.iter_mut().map(|item| (Place::SameValue, item))),
            ("prefixItems" | "items", Value::Array(items)) => found.extend(items.iter_mut().map(|item| (Place::Part, item))),
            ("items" | "additionalItems" | "additionalProperties", value) => found.push((Place::Part, value)),
            ("properties" | "patternProperties", Value::Object(map)) => found.extend(map.values_mut().map(|item| (Place::Part, item))),
            ("$defs" | "definitions", Value::Object(map)) => found.extend(map.values_mut().map(|item| (Place::Definition, item))),
            _ => {}
        }
    }
    found
}

/// What a local reference refers to.
pub(super) fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    if pointer.is_empty() { Some(root) } else { root.pointer(&percent_decoded(pointer)?) }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        match (byte, tail) {
            (b'%', [high, low, tail @ ..]) => {
                let digits = [*high, *low];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
                rest = tail;
            }
            _ => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

/// Checks a schema.
///
/// # Errors
/// What is wrong with it, in words that follow its name.
pub(super) fn check_schema(root: &Value) -> Result<(), String> {
    check_size(root)?;
    let mut seen: HashSet<*const Value> = HashSet::new();
    let mut stack = vec![root];
    while let Some(schema) = stack.pop() {
        if !seen.insert(schema) {
            continue;
        }
        let Value::Object(map) = schema else { continue };
        check_keywords(root, schema, map)?;
        stack.extend(children(map).into_iter().map(|(_, child)| child));
        stack.extend(map.get("$ref").and_then(Value::as_str).and_then(|reference| resolve(root, reference)));
    }
    check_progress(root)
}

fn check_size(root: &Value) -> Result<(), String> {
    let mut stack = vec![(root, 1_usize)];
    let mut nodes = 0_usize;
    while let Some((value, depth)) = stack.pop() {
        nodes += 1;
        if depth > DEPTH_MAX {
            return Err(format!("nests deeper than {DEPTH_MAX} levels"));
        }
        if nodes > NODES_MAX {
            return Err(format!("has more than {NODES_MAX} values"));
        }
        match value {
            Value::Array(items) => stack.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(map) => stack.extend(map.values().map(|item| (item, depth + 1))),
            _ => {}
        }
    }
    Ok(())
}

fn check_keywords(root: &Value, schema: &Value, map: &Map<String, Value>) -> Result<(), String> {
    if let Some(keyword) = UNSUPPORTED.iter().find(|keyword| map.contains_key(**keyword)) {
        return Err(format!("uses the unsupported keyword `{keyword}`"));
    }
    if !std::ptr::eq(root, schema) && map.get("$id").is_some_and(Value::is_string) {
        return Err("uses the unsupported keyword `$id` below its root".to_owned());
    }
    let known = |name: &str| ENFORCED.contains(&name) || is_annotation(name);
    if let Some(keyword) = map.keys().find(|name| !known(name)) {
        return Err(format!("uses the unsupported keyword `{}`", cut(keyword)));
    }
    check_reference(root, map)?;
    check_values(map)?;
    for (keyword, max) in [
        ("minItems", COUNT_MIN_MAX),
        ("maxItems", COUNT_MAX),
        ("minLength", COUNT_MIN_MAX),
        ("maxLength", COUNT_MAX),
        ("minProperties", COUNT_MIN_MAX),
        ("maxProperties", COUNT_MAX),
    ] {
        check_count(keyword, map.get(keyword), max)?;
    }
    check_members(map)?;
    let patterns = map.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let pattern = map.get("pattern").map(|pattern| pattern.as_str().ok_or("has a `pattern` that is not a string")).transpose()?;
    if let Some(text) = pattern {
        regex_growth(text, Spelling::Json).map_err(|reason| format!("has a `pattern` that {reason}"))?;
    }
    for text in patterns {
        regex_growth(text, Spelling::Json).map_err(|reason| format!("has a key of `patternProperties` that {reason}"))?;
    }
    Ok(())
}

fn check_reference(root: &Value, map: &Map<String, Value>) -> Result<(), String> {
    let Some(reference) = map.get("$ref") else { return Ok(()) };
    let Some(reference) = reference.as_str() else { return Err("has a `$ref` that is not a string".to_owned()) };
    if !reference.starts_with('#') {
        return Err(format!(
            "has the `$ref` `{}`, which is not inside it; only references that begin with `#` are followed",
            cut(reference)
        ));
    }
    match resolve(root, reference) {
        Some(Value::Object(_) | Value::Bool(_)) => Ok(()),
        Some(_) => Err(format!("has the `$ref` `{}`, which refers to something that is no schema", cut(reference))),
        None => Err(format!("has the `$ref` `{}`, which refers to nothing", cut(reference))),
    }
}

/// Checks the values that a schema names: some, each other's, and none that would be rounded.
fn check_values(map: &Map<String, Value>) -> Result<(), String> {
    for keyword in ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"] {
        if let Some(number) = map.get(keyword).and_then(inexact).filter(|_| !is_wide(map, keyword)) {
            return Err(format!("has `{keyword}` with the number {number}, whose magnitude is above 2^53, which is not supported"));
        }
    }
    let Some(values) = map.get("enum") else { return Ok(()) };
    let Some(values) = values.as_array().filter(|values| !values.is_empty()) else {
        return Err("has an `enum` that is no array with values".to_owned());
    };
    match map.get("const") {
        Some(only) if !values.iter().any(|value| same(value, only)) => Err("has a `const` that is none of its `enum`".to_owned()),
        _ => Ok(()),
    }
}

/// Whether a bound of whole numbers lies beyond all that are told apart, and so excludes none of them.
pub(super) fn is_wide(map: &Map<String, Value>, keyword: &str) -> bool {
    let whole = match map.get("type") {
        Some(Value::String(name)) => name == "integer",
        Some(Value::Array(names)) => names.iter().any(|name| name == "integer") && names.iter().all(|name| name != "number"),
        _ => false,
    };
    let Some(bound) = map.get(keyword).filter(|bound| bound.is_number() && inexact(bound).is_some()) else { return false };
    let negative = bound.as_f64().is_some_and(|bound| bound < 0.0);
    whole
        && match keyword {
            "minimum" | "exclusiveMinimum" => negative,
            "maximum" | "exclusiveMaximum" => !negative,
            _ => false,
        }
}

/// A number in a value, at any depth, that is too large to be told from its neighbours.
fn inexact(value: &Value) -> Option<&Value> {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::Number(number) => {
                let whole = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
                // A decimal as large as that was rounded when it was read.
                let exact =
                    whole.map_or_else(|| number.as_f64().is_some_and(|float| float.abs() < EXACT_MAX as f64), |whole| whole <= EXACT_MAX);
                if !exact {
                    return Some(value);
                }
            }
            Value::Array(items) => open.extend(items),
            Value::Object(members) => open.extend(members.values()),
            Value::Null | Value::Bool(_) | Value::String(_) => {}
        }
    }
    None
}

/// Whether two values are equal to a validator, for which 1 is 1.0.
fn same(one: &Value, other: &Value) -> bool {
    let numbers = (one.is_number() && other.is_number()).then(|| (one.as_f64(), other.as_f64()));
    one == other || numbers.is_some_and(|(one, other)| one == other)
}

/// A grammar cannot keep free names apart, so it cannot count members that may have the same name.
fn check_members(map: &Map<String, Value>) -> Result<(), String> {
    let least = map.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = map.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let free = map.get("additionalProperties") != Some(&Value::Bool(false)) || map.contains_key("patternProperties");
    if free && least > required.max(1) {
        return Err(format!("has `minProperties` {least} with members of free names, where at most {} is supported", required.max(1)));
    }
    Ok(())
}

fn check_count(keyword: &str, value: Option<&Value>, max: u64) -> Result<(), String> {
    match value {
        None => Ok(()),
        Some(value) => match value.as_u64() {
            Some(count) if count <= max => Ok(()),
            _ => Err(format!("has `{keyword}` {}, allowed are whole numbers from 0 to {max}", cut(&value.to_string()))),
        },
    }
}

/// Refuses references that lead back to themselves through keywords that all apply to one value.
fn check_progress(root: &Value) -> Result<(), String> {
    /// Whether a schema is still being followed, or is known to be fine.
    #[derive(PartialEq)]
    enum Mark {
        Open,
        Closed,
    }
    enum Visit<'a> {
        Enter(&'a Value),
        Leave(*const Value),
    }
    let mut marks: HashMap<*const Value, Mark> = HashMap::new();
    let mut starts = vec![root];
    let mut known: HashSet<*const Value> = HashSet::new();
    while let Some(start) = starts.pop() {
        if !known.insert(start) {
            continue;
        }
        let mut visits = vec![Visit::Enter(start)];
        while let Some(visit) = visits.pop() {
            let schema = match visit {
                Visit::Leave(schema) => {
                    marks.insert(schema, Mark::Closed);
                    continue;
                }
                Visit::Enter(schema) => schema,
            };
            match marks.get(&std::ptr::from_ref(schema)) {
                Some(Mark::Open) => return Err("has a `$ref` that leads back to itself without consuming anything".to_owned()),
                Some(Mark::Closed) => continue,
                None => {}
            }
            let Value::Object(map) = schema else { continue };
            marks.insert(schema, Mark::Open);
            visits.push(Visit::Leave(schema));
            let target = map.get("$ref").and_then(Value::as_str).and_then(|reference| resolve(root, reference));
            visits.extend(target.map(Visit::Enter));
            for (place, child) in children(map) {
                if place == Place::SameValue {
                    visits.push(Visit::Enter(child));
                } else {
                    starts.push(child);
                }
            }
            starts.extend(target);
        }
    }
    Ok(())
}

/// The beginning of a text from outside.
fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Checks the text of a Lark grammar for what may not be reached from a request.
///
/// # Errors
/// What is wrong with it, in words that follow its name.
pub(super) fn check_lark(text: &str) -> Result<(), String> {
    /// Longest grammar, in bytes.
    const LARK_BYTES_MAX: usize = 131_072;
    /// Deepest nesting of groups.
    const LARK_NEST_MAX: usize = 64;
    if text.len() > LARK_BYTES_MAX {
        return Err(format!("has {} bytes, at most {LARK_BYTES_MAX} are allowed", text.len()));
    }
    for directive in ["%llguidance", "%json", "%lark", "%regex", "x-guidance"] {
        if text.contains(directive) {
            return Err(format!("uses `{directive}`, which is not supported here"));
        }
    }
    let (mut depth, mut deepest) = (0_usize, 0_usize);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > LARK_NEST_MAX {
        return Err(format!("nests deeper than {LARK_NEST_MAX} levels"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_cannot_be_enforced_is_named() {
        for (schema, word) in [
            (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
            (json!({"properties": {"a": {"not": {}}}}), "`not`"),
            (json!({"$ref": "http://example.com/a"}), "$ref"),
            (json!({"$ref": "#/$defs/none"}), "$ref"),
            (json!({"$ref": "#"}), "leads back"),
            (
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}),
                "leads back",
            ),
            (json!({"pattern": "("}), "pattern"),
            (json!({"pattern": "(".repeat(60_000)}), "pattern"),
            (json!({"patternProperties": {"[": {}}}), "patternProperties"),
            (json!({"maxItems": u64::MAX}), "maxItems"),
            (json!({"minLength": -1}), "minLength"),
            (json!({"minProperties": 2}), "minProperties"),
            (json!({"x-guidance": {"lenient": true}}), "x-guidance"),
            (json!({"items": {"x-guidance": {"lenient": true}}}), "x-guidance"),
            (json!({"type": "string", "maxLenght": 1}), "`maxLenght`"),
            (json!({"properties": {"a": {"type": "string", "nullable": true}}}), "`nullable`"),
            (json!({"const": 9_007_199_254_740_993_u64}), "`const` with the number 9007199254740993"),
            (json!({"enum": [1, [{"a": u64::MAX}]]}), "`enum` with the number 18446744073709551615"),
            (json!({"type": "number", "minimum": i64::MIN}), "`minimum`"),
            (json!({"minimum": i64::MIN}), "`minimum`"),
            (json!({"type": ["integer", "number"], "maximum": 1e20}), "`maximum`"),
            (json!({"type": "integer", "minimum": i64::MAX}), "`minimum`"),
            (json!({"type": "integer", "maximum": -1e20}), "`maximum`"),
            (json!({"type": "integer", "multipleOf": u64::MAX}), "`multipleOf`"),
            (json!({"type": "integer", "const": i64::MIN}), "`const`"),
            (json!({"exclusiveMinimum": 9_007_199_254_740_993_u64}), "`exclusiveMinimum`"),
            (json!({"exclusiveMaximum": -1e16}), "`exclusiveMaximum`"),
            (json!({"multipleOf": 1e17}), "`multipleOf`"),
            (json!({"enum": []}), "`enum`"),
            (json!({"const": 1, "enum": [2, "1"]}), "`const`"),
        ] {
            let error = check_schema(&schema).expect_err(word);
            assert!(error.contains(word), "{schema}: {error}");
        }
    }

    #[test]
    fn annotations_and_exact_numbers_are_fine() {
        let schema = json!({
            "title": "t", "description": "d", "default": 1e300, "examples": [u64::MAX], "$comment": "c", "deprecated": true,
            "readOnly": false, "contentEncoding": "base64", "x-order": 3, "properties": {"foo": {"type": "null"}, "maxLenght": {}},
            "patternProperties": {"^foo$": {"const": 9_007_199_254_740_992_u64}}, "items": {"const": 1, "enum": [1.0]},
            "$defs": {"foo": {"minimum": -9_007_199_254_740_992_i64, "maximum": 1e15, "multipleOf": 0.5}},
        });
        assert_eq!(check_schema(&schema), Ok(()));
    }

    #[test]
    fn recursion_that_consumes_is_fine() {
        let tree = json!({"type": "object", "properties": {"left": {"$ref": "#"}, "not": {"type": "null"}}});
        assert_eq!(check_schema(&tree), Ok(()));
        let list =
            json!({"$ref": "#/$defs/l", "$defs": {"l": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/l"}}]}}});
        assert_eq!(check_schema(&list), Ok(()));
    }

    #[test]
    fn a_deep_schema_is_refused_without_recursion() {
        let mut schema = json!({});
        for _ in 0..100 {
            schema = json!({"items": schema});
        }
        assert!(check_schema(&schema).expect_err("deep").contains("nests deeper"));
    }
}
