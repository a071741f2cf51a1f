//! Two hundred schemas: families of features, each with variants.

use serde_json::{Value, json};

/// The schemas, by name.
pub(crate) fn schemas() -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for size in 0..10_u64 {
        for (name, schema) in family(size) {
            all.push((format!("{name} {size}"), schema));
        }
    }
    all
}

fn family(size: u64) -> Vec<(&'static str, Value)> {
    let some = size as usize;
    vec![
        ("flat object", flat_object(some + 1, some)),
        ("all optional", flat_object(some + 1, 0)),
        (
            "closed object",
            json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"], "additionalProperties": false}),
        ),
        (
            "typed extras",
            json!({"type": "object", "minProperties": size % 2, "additionalProperties": {"type": "integer", "minimum": size}}),
        ),
        ("string lengths", json!({"type": "string", "minLength": size * 3, "maxLength": size * 3 + 5})),
        ("pattern", json!({"type": "string", "pattern": pattern(some)})),
        (
            "format",
            json!({"type": "object", "properties": {"at": {"type": "string", "format": format_name(some)}}, "required": ["at"], "additionalProperties": false}),
        ),
        ("integer bounds", json!({"type": "integer", "minimum": -(size as i64) * 17, "exclusiveMaximum": (size as i64) * 131 + 1})),
        ("number bounds", json!({"type": "number", "minimum": size as f64 / 4.0, "maximum": size as f64 * 10.0 + 0.5})),
        ("multiple", json!({"type": "integer", "multipleOf": size + 1, "minimum": 0, "maximum": 1000})),
        ("enum", json!({"enum": ["é", "日本語", "🫠 melt", "a\"b\\c", size, null, true, [1, {"x": "ü"}], {"k": ["v"]}]})),
        (
            "const",
            json!({"type": "object", "properties": {"kind": {"const": format!("κ{size}")}}, "required": ["kind"], "additionalProperties": false}),
        ),
        ("array bounds", json!({"type": "array", "items": {"type": "boolean"}, "minItems": size, "maxItems": size + 3})),
        (
            "tuple",
            json!({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}, {"type": "null"}], "items": {"type": "number"}, "minItems": size % 5}),
        ),
        (
            "any of",
            json!({"anyOf": [{"type": "string", "minLength": size}, {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": false}, {"type": "array", "items": {"type": "null"}, "minItems": size}]}),
        ),
        ("tree", tree(size)),
        (
            "list",
            json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, "required": ["v", "next"], "additionalProperties": false}}, "title": format!("list {size}")}),
        ),
        (
            "all of",
            json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": size}}, "required": ["a"]}, {"type": "object", "properties": {"b": {"type": "string", "maxLength": size + 1}}, "required": ["b"]}]}),
        ),
        ("nested", nested(some)),
        (
            "pattern properties",
            json!({"type": "object", "patternProperties": {"^x_[a-z]{1,4}$": {"type": "integer"}}, "additionalProperties": false, "minProperties": size % 2}),
        ),
    ]
}

fn flat_object(properties: usize, required: usize) -> Value {
    let kinds = [
        json!({"type": "string"}),
        json!({"type": "integer"}),
        json!({"type": "boolean"}),
        json!({"type": "number"}),
        json!({"type": ["string", "null"]}),
        json!({"type": "array", "items": {"type": "integer"}}),
    ];
    let members =
        (0..properties).map(|index| (format!("field_{index}"), kinds[index % kinds.len()].clone())).collect::<serde_json::Map<_, _>>();
    let required: Vec<String> = (0..required).map(|index| format!("field_{index}")).collect();
    json!({"type": "object", "properties": members, "required": required, "additionalProperties": false})
}

fn pattern(index: usize) -> String {
    let patterns = [
        "^[a-z]+$",
        "^[A-Z]{2}[0-9]{4}$",
        r"^\d{3}-\d{4}$",
        "^(red|green|blue)$",
        "^a*b$",
        "^(ab|c[0-9]{30})+$",
        r"^[^\s]{1,8}$",
        "^é+日?$",
        r"^\w+@\w+\.(com|org)$",
        "^x.{0,5}y$",
    ];
    patterns[index % patterns.len()].to_owned()
}

fn format_name(index: usize) -> &'static str {
    ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "date", "uuid"][index % 10]
}

fn tree(size: u64) -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": size % 4},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
        },
        "required": ["name", "children"],
        "additionalProperties": false,
    })
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(json!({"type": "integer"}), |inner, level| {
        if level % 2 == 0 {
            json!({"type": "object", "properties": {"inner": inner}, "required": ["inner"], "additionalProperties": false})
        } else {
            json!({"type": "array", "items": inner, "minItems": 1})
        }
    })
}
