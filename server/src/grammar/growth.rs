//! How much a single token can add to what an output still needs, bounded from the schema.
//!
//! For every subschema: the bytes of a shortest value (`shortest`), and the most bytes that are still
//! needed once a value of it began in the least lucky way and is closed in the luckiest (`committed`).
//! A byte of structure (`"`, `{`, `[`, `,`, `:`) commits to at most one new value or member, so a token
//! with `n` such bytes adds at most `(n + 1) × largest committed`, and a little for an escape.
//! Both are bounds from above. What only several regular expressions together ask for is not read from them:
//! then the automata of the compiled grammar are looked at.

use super::bounds::{children, resolve};
use super::regex_growth::{Spelling, regex_growth};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Bytes of a number without bounds.
const NUMBER_BYTES: u64 = 12;
/// A value that no finite text satisfies.
const ENDLESS: u64 = u64::MAX;
/// Most bytes that JSON takes for a byte of text.
const QUOTED: u64 = 6;

/// Bounds of a schema, in bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    /// Of a shortest value; `None` if none is finite.
    pub(super) shortest: Option<u64>,
    /// Added by one commitment.
    pub(super) committed: u64,
    /// Whether several restrictions of one text hold at once, so that what is needed inside it may be more.
    pub(super) tangled: bool,
}

/// Bounds of a schema that passed its checks.
pub(super) fn schema_growth(root: &Value) -> Growth {
    let mut analysis = Analysis { root, shortest: HashMap::new() };
    let schemas = reachable(root);
    // Values converge from the leaves up; each pass settles at least one schema that was endless.
    for _ in 0..schemas.len().saturating_add(1) {
        let mut changed = false;
        for schema in schemas.iter().rev() {
            let cost = analysis.cost(schema).0;
            changed |= analysis.shortest.insert(std::ptr::from_ref(*schema), cost) != Some(cost);
        }
        if !changed {
            break;
        }
    }
    let added = |schema: &&Value| match analysis.cost(schema) {
        // What a value at the top needs is part of the bound from the start; it is never entered again.
        (least, most) if std::ptr::eq(*schema, root) && begins_once(root, &schemas) => most.saturating_sub(least),
        (_, most) => most,
    };
    let committed = schemas.iter().map(added).filter(|cost| *cost != ENDLESS).max().unwrap_or(0);
    let shortest = Some(analysis.known(root)).filter(|cost| *cost != ENDLESS);
    let tangled = schemas.iter().any(|schema| schema.as_object().is_some_and(is_tangled));
    Growth { shortest, committed: committed.max(8), tangled }
}

/// Whether a schema has strings or names that more than one thing restricts, other than a pattern and a largest length.
fn is_tangled(map: &Map<String, Value>) -> bool {
    let of_text = |map: &Map<String, Value>| ["pattern", "minLength", "maxLength"].iter().any(|keyword| map.contains_key(*keyword));
    let growth = map.get("pattern").and_then(Value::as_str).and_then(|pattern| regex_growth(pattern, Spelling::Json).ok());
    let longer = growth.is_some_and(|growth| map.get("minLength").and_then(Value::as_u64).unwrap_or(0) > growth.characters);
    let parts = map.get("allOf").and_then(Value::as_array).into_iter().flatten();
    let in_parts = parts.filter(|part| part.as_object().is_some_and(|part| of_text(part) || part.contains_key("$ref"))).count();
    let applied = ["$ref", "anyOf", "oneOf", "allOf"].iter().any(|keyword| map.contains_key(*keyword));
    let names = map.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len);
    let others = map.get("additionalProperties") != Some(&Value::Bool(false)) || map.contains_key("properties");
    longer || in_parts > 1 || (applied && of_text(map)) || names > 1 || (names == 1 && others)
}

/// Whether a schema is of objects or of arrays alone, by its own keywords, and no reference leads to it.
fn begins_once(root: &Value, schemas: &[&Value]) -> bool {
    let plain = root.get("type").is_some_and(|kind| kind == "object" || kind == "array")
        && ["$ref", "anyOf", "oneOf", "allOf", "enum", "const"].iter().all(|keyword| root.get(*keyword).is_none());
    let references = schemas.iter().filter_map(|schema| schema.get("$ref")?.as_str());
    plain && !references.into_iter().any(|reference| resolve(root, reference).is_some_and(|target| std::ptr::eq(target, root)))
}

struct Analysis<'a> {
    root: &'a Value,
    shortest: HashMap<*const Value, u64>,
}

fn reachable(root: &Value) -> Vec<&Value> {
    let mut seen: HashMap<*const Value, ()> = HashMap::new();
    let (mut found, mut stack) = (Vec::new(), vec![root]);
    while let Some(schema) = stack.pop() {
        if seen.insert(schema, ()).is_some() {
            continue;
        }
        found.push(schema);
        if let Value::Object(map) = schema {
            stack.extend(children(map).into_iter().map(|(_, child)| child));
            stack.extend(map.get("$ref").and_then(Value::as_str).and_then(|reference| resolve(root, reference)));
        }
    }
    found
}

impl<'a> Analysis<'a> {
    fn known(&self, schema: &Value) -> u64 {
        self.shortest.get(&std::ptr::from_ref(schema)).copied().unwrap_or(ENDLESS)
    }

    /// Shortest and committed bytes of a schema, from what is known of its parts.
    fn cost(&self, schema: &Value) -> (u64, u64) {
        let Value::Object(map) = schema else {
            return if schema == &Value::Bool(false) { (ENDLESS, 0) } else { (1, NUMBER_BYTES) };
        };
        let (mut shortest, mut committed) = (0_u64, 0_u64);
        let mut add = |(least, most): (u64, u64)| {
            shortest = shortest.saturating_add(least);
            committed = committed.saturating_add(most);
        };
        let mut applied = false;
        if let Some(target) = map.get("$ref").and_then(Value::as_str).and_then(|reference| resolve(self.root, reference)) {
            add((self.known(target), 0));
            applied = true;
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(options) = map.get(keyword).and_then(Value::as_array) {
                add((options.iter().map(|option| self.known(option)).min().unwrap_or(ENDLESS), 0));
                applied = true;
            }
        }
        for part in map.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            let (least, most) = self.cost(part);
            add((least, most));
            applied = true;
        }
        let values = map.get("enum").and_then(Value::as_array).into_iter().flatten().chain(map.get("const"));
        let lengths: Vec<u64> = values.map(|value| value.to_string().len() as u64 * 2).collect();
        if let (Some(least), Some(most)) = (lengths.iter().min(), lengths.iter().max()) {
            add((*least, *most));
            applied = true;
        }
        let own = ["properties", "required", "items", "prefixItems", "minItems", "pattern", "minLength", "minProperties", "type"];
        if !applied || own.iter().any(|keyword| map.contains_key(*keyword)) {
            // Where another keyword settles the type, a type that costs nothing may be excluded by it.
            let (least, most) = self.typed_cost(map);
            add((least, most));
        }
        (shortest, committed)
    }

    fn typed_cost(&self, map: &Map<String, Value>) -> (u64, u64) {
        let all = ["null", "boolean", "number", "string", "array", "object"];
        let types: Vec<&str> = match map.get("type") {
            Some(Value::String(name)) => vec![name],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => all.to_vec(),
        };
        let costs = types.iter().map(|name| match *name {
            "null" | "boolean" => (5, 5),
            "string" => string_cost(map),
            "array" => self.array_cost(map),
            "object" => self.object_cost(map),
            _ => number_cost(map),
        });
        costs.fold((ENDLESS, 0), |(least, most), (short, long)| (least.min(short), if long == ENDLESS { most } else { most.max(long) }))
    }

    fn array_cost(&self, map: &Map<String, Value>) -> (u64, u64) {
        let count = map.get("minItems").and_then(Value::as_u64).unwrap_or(0);
        let list = map.get("prefixItems").or_else(|| map.get("items").filter(|items| items.is_array())).and_then(Value::as_array);
        let prefix: Vec<u64> = list.into_iter().flatten().map(|item| self.known(item)).collect();
        let rest = map.get("items").filter(|items| !items.is_array()).or_else(|| map.get("additionalItems"));
        let item = rest.map_or(1, |schema| self.known(schema));
        let fixed = prefix.iter().take(count as usize).fold(0_u64, |sum, cost| sum.saturating_add(cost.saturating_add(1)));
        let further = count.saturating_sub(prefix.len() as u64);
        let shortest =
            fixed.saturating_add(if further == 0 { 0 } else { further.saturating_mul(item.saturating_add(1)) }).saturating_add(2);
        let next = prefix.iter().copied().chain([item]).filter(|cost| *cost != ENDLESS).max().unwrap_or(0);
        (shortest, shortest.saturating_add(next))
    }

    fn object_cost(&self, map: &Map<String, Value>) -> (u64, u64) {
        let properties = map.get("properties").and_then(Value::as_object);
        let other = map.get("additionalProperties").map_or(1, |schema| self.known(schema));
        let member = |name: &str, cost: u64| cost.saturating_add(name.len() as u64 * 2 + 4);
        let required = map.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let patterned = self.patterned_cost(map);
        let cost_of = |name: &str| match properties.and_then(|properties| properties.get(name)) {
            Some(schema) => self.known(schema),
            None => other.min(patterned),
        };
        let needed = required.iter().filter_map(Value::as_str).fold(2_u64, |sum, name| sum.saturating_add(member(name, cost_of(name))));
        let optional: Vec<u64> = properties.into_iter().flatten().map(|(name, schema)| member(name, self.known(schema))).collect();
        let longest =
            optional.iter().copied().chain([other.saturating_add(12), patterned]).filter(|cost| *cost != ENDLESS).max().unwrap_or(0);
        let further = map.get("minProperties").and_then(Value::as_u64).unwrap_or(0).saturating_sub(required.len() as u64);
        let shortest = needed.saturating_add(further.saturating_mul(if further == 0 { 0 } else { longest }));
        (shortest, shortest.saturating_add(longest))
    }

    /// A member whose key matches a pattern.
    fn patterned_cost(&self, map: &Map<String, Value>) -> u64 {
        let patterns = map.get("patternProperties").and_then(Value::as_object).into_iter().flatten();
        let costs = patterns.filter_map(|(pattern, schema)| {
            let key = regex_growth(pattern, Spelling::Json).ok()?.remaining;
            Some(self.known(schema).saturating_add(key).saturating_add(4))
        });
        costs.max().unwrap_or(ENDLESS)
    }
}

fn string_cost(map: &Map<String, Value>) -> (u64, u64) {
    let length = map.get("minLength").and_then(Value::as_u64).unwrap_or(0);
    let (mut shortest, mut committed) = (2 + length, 2 + length + QUOTED);
    if let Some(growth) = map.get("pattern").and_then(Value::as_str).and_then(|pattern| regex_growth(pattern, Spelling::Json).ok()) {
        shortest = shortest.saturating_add(growth.shortest);
        // A largest length asks for the fewest characters, which may be the longest ones.
        let bounded = if map.contains_key("maxLength") { QUOTED } else { 1 };
        committed = committed.saturating_add(growth.remaining.saturating_mul(bounded));
    }
    (shortest, committed)
}

fn number_cost(map: &Map<String, Value>) -> (u64, u64) {
    let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
    let digits: u64 = bounds.iter().filter_map(|keyword| map.get(*keyword)).map(|bound| bound.to_string().len() as u64 + 2).sum();
    (1 + digits, NUMBER_BYTES + digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_schema_without_finite_values_is_told() {
        let endless = json!({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}});
        assert_eq!(schema_growth(&endless).shortest, None);
        let optional = json!({"type": "object", "properties": {"a": {"$ref": "#"}}});
        assert_eq!(schema_growth(&optional).shortest, Some(2));
    }

    #[test]
    fn what_a_value_at_the_top_needs_is_no_commitment() {
        let records = json!({"type": "array", "minItems": 40, "items": {"type": "string", "maxLength": 8}});
        let growth = schema_growth(&records);
        assert!(growth.shortest.is_some_and(|bytes| bytes >= 40 * 3) && growth.committed < 40, "{growth:?}");
        let nested = json!({"type": "array", "items": records});
        assert!(schema_growth(&nested).committed >= 40 * 3, "an array that is entered again is one");
    }

    #[test]
    fn restrictions_of_one_text_that_meet_are_told() {
        for (schema, tangled) in [
            (json!({"pattern": "^a+$", "maxLength": 5}), false),
            (json!({"pattern": "^a{3}$", "minLength": 3}), false),
            (json!({"pattern": "^a{3,}$", "minLength": 4}), true),
            (json!({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}), true),
            (json!({"allOf": [{"properties": {"a": {"pattern": "a"}}}, {"minProperties": 1}]}), false),
            (json!({"pattern": "a", "allOf": [{"type": "string"}]}), true),
            (json!({"patternProperties": {"a": {}}, "additionalProperties": false}), false),
            (json!({"patternProperties": {"a": {}}}), true),
            (json!({"properties": {"b": {"patternProperties": {"a": {}, "b": {}}}}}), true),
        ] {
            assert_eq!(schema_growth(&schema).tangled, tangled, "{schema}");
        }
    }

    #[test]
    fn an_optional_member_commits_to_its_required_parts() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "string", "minLength": 500}}});
        let growth = schema_growth(&schema);
        assert_eq!(growth.shortest, Some(2));
        assert!(growth.committed >= 500, "{growth:?}");
    }
}
