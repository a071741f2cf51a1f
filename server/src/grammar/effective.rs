//! The schema that is enforced: formats written as patterns, and classes of patterns in the meaning of
//! JSON Schema.
//!
//! A format's pattern accepts a part of what the format does, never more: each text is valid for every
//! validator. `\d` and `\w` mean ASCII in JSON Schema (ECMA-262) and Unicode to the grammar library.

use super::bounds::{Place, children_mut, is_wide};
use serde_json::{Map, Value, json};

/// One part of a domain name.
const LABEL: &str = "[A-Za-z][A-Za-z0-9]{0,20}(-[A-Za-z0-9]{1,10}){0,2}";
const DATE: &str = "[12][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))";
const TIME: &str = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const OCTET: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const GROUP: &str = "[0-9A-Fa-f]{1,4}";

/// Largest whole number of which the next one is another number too, wherever it is read.
const WHOLE_MAX: i64 = (1 << 53) - 1;

/// The pattern of a format; `None` if it is not supported.
fn format_pattern(format: &str) -> Option<String> {
    let body = match format {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}T{TIME}"),
        "duration" => {
            let years = "[0-9]{1,4}Y([0-9]{1,2}M([0-9]{1,2}D)?)?";
            let days = "[0-9]{1,4}D(T[0-9]{1,2}H([0-9]{1,2}M)?)?";
            let time = "T([0-9]{1,3}H([0-9]{1,2}M([0-9]{1,2}S)?)?|[0-9]{1,3}M([0-9]{1,2}S)?|[0-9]{1,5}S)";
            format!("P({years}|{days}|{time}|[0-9]{{1,3}}W)")
        }
        "uuid" => "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}".to_owned(),
        "email" => format!(r"[A-Za-z0-9][A-Za-z0-9_+-]{{0,14}}(\.[A-Za-z0-9_+-]{{1,14}}){{0,2}}@{LABEL}(\.{LABEL}){{1,3}}"),
        "hostname" => format!(r"{LABEL}(\.{LABEL}){{0,3}}"),
        "ipv4" => format!(r"({OCTET}\.){{3}}{OCTET}"),
        "ipv6" => format!("(({GROUP}:){{7}}{GROUP}|({GROUP}:){{1,6}}:{GROUP}|::1)"),
        "uri" => format!(
            r"https?://{LABEL}(\.{LABEL}){{1,3}}(:[1-9][0-9]{{1,3}})?(/[A-Za-z0-9._~-]{{1,40}}){{0,6}}/?(\?[a-z]{{1,12}}=[A-Za-z0-9]{{1,30}})?"
        ),
        _ => return None,
    };
    Some(format!("^({body})$"))
}

/// Writes formats as patterns and patterns as the library understands them, everywhere in a schema.
///
/// # Errors
/// The name of a format that is not supported.
pub(super) fn make_effective(schema: &mut Value) -> Result<(), String> {
    let Value::Object(map) = schema else { return Ok(()) };
    if let Some(Value::String(pattern)) = map.get_mut("pattern") {
        *pattern = schema_pattern(pattern);
    }
    if let Some(Value::Object(patterns)) = map.get_mut("patternProperties") {
        *patterns = std::mem::take(patterns).into_iter().map(|(pattern, schema)| (schema_pattern(&pattern), schema)).collect();
    }
    replace_format(map)?;
    narrow(map);
    children_mut(map).into_iter().try_for_each(|(_, child): (Place, _)| make_effective(child))
}

/// Brings bounds of whole numbers that lie beyond what is told apart down to the last numbers that are.
fn narrow(map: &mut Map<String, Value>) {
    for (keyword, exclusive, last) in [("minimum", "exclusiveMinimum", -WHOLE_MAX), ("maximum", "exclusiveMaximum", WHOLE_MAX)] {
        let wide = [keyword, exclusive].map(|keyword| is_wide(map, keyword));
        if wide[1] {
            map.shift_remove(exclusive);
        }
        if wide[0] || (wide[1] && !map.contains_key(keyword)) {
            map.insert(keyword.to_owned(), last.into());
        }
    }
}

fn replace_format(map: &mut Map<String, Value>) -> Result<(), String> {
    let Some(format) = map.shift_remove("format") else { return Ok(()) };
    let name = format.as_str().unwrap_or_default();
    // Formats of numbers say no more than their type does to a validator.
    if matches!(name, "int32" | "int64" | "float" | "double") {
        return Ok(());
    }
    let pattern = format_pattern(name).ok_or_else(|| format!("has the unsupported `format` {format}"))?;
    if map.contains_key("pattern") {
        let further = json!({"type": map.get("type").cloned().unwrap_or_else(|| "string".into()), "pattern": pattern});
        match map.entry("allOf").or_insert_with(|| json!([])) {
            Value::Array(parts) => parts.push(further),
            _ => return Err("has an `allOf` that is no array".to_owned()),
        }
    } else {
        map.insert("pattern".to_owned(), pattern.into());
    }
    Ok(())
}

/// The same pattern with `\d` and `\w` (and what they exclude) spelled out.
pub(super) fn ascii_classes(pattern: &str) -> String {
    spelled_out(pattern, &|class| match class {
        'd' => Some("0-9"),
        'w' => Some("0-9A-Za-z_"),
        _ => None,
    })
}

/// A pattern of a schema in the meaning of ECMA-262: of `.` and `\s` too, unless its flags say otherwise.
fn schema_pattern(pattern: &str) -> String {
    let all_lines = has_flag_s(pattern);
    spelled_out(pattern, &|class| match class {
        'd' => Some("0-9"),
        'w' => Some("0-9A-Za-z_"),
        's' => Some(r"\t\n\x0B\f\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"),
        // The ends of lines, which `.` excludes.
        '.' if !all_lines => Some(r"\n\r\u{2028}\u{2029}"),
        _ => None,
    })
}

/// Whether a pattern has the flag with which `.` is any character.
fn has_flag_s(pattern: &str) -> bool {
    pattern.split("(?").skip(1).any(|rest| rest.chars().take_while(char::is_ascii_alphabetic).any(|flag| flag == 's'))
}

/// A pattern with some classes spelled out as the insides of a class.
fn spelled_out(pattern: &str, class: &dyn Fn(char) -> Option<&'static str>) -> String {
    let (mut out, mut in_class) = (String::with_capacity(pattern.len()), false);
    let mut chars = pattern.chars();
    while let Some(char) = chars.next() {
        match char {
            '\\' => match chars.next() {
                Some('/') => out.push('/'),
                Some(other) => match (class(other.to_ascii_lowercase()).filter(|_| other.is_ascii_alphabetic()), in_class) {
                    (Some(inside), true) if other.is_lowercase() => out.push_str(inside),
                    (Some(inside), false) if other.is_lowercase() => out.extend(["[", inside, "]"]),
                    (Some(inside), _) => out.extend(["[^", inside, "]"]),
                    (None, _) => out.extend(['\\', other]),
                },
                None => out.push('\\'),
            },
            '.' if !in_class && class('.').is_some() => out.extend(["[^", class('.').unwrap_or_default(), "]"]),
            '[' => {
                // A class holds other classes only where they were spelled out here.
                out.push_str(if in_class { r"\[" } else { "[" });
                in_class = true;
            }
            ']' => {
                in_class = false;
                out.push(']');
            }
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_spelled_out() {
        assert_eq!(ascii_classes(r"^\d+[\w-]\\d[[]$"), r"^[0-9]+[0-9A-Za-z_-]\\d[\[]$");
    }

    #[test]
    fn patterns_of_schemas_mean_what_they_mean_to_validators() {
        assert_eq!(
            schema_pattern(r"^.[.\s]\.$"),
            r"^[^\n\r\u{2028}\u{2029}][.\t\n\x0B\f\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}]\.$"
        );
        assert_eq!(schema_pattern(r"(?s).\D"), r"(?s).[^0-9]");
        assert_eq!(schema_pattern(r"(?:.)(?<s>a)"), r"(?:[^\n\r\u{2028}\u{2029}])(?<s>a)");
    }

    #[test]
    fn wide_bounds_of_whole_numbers_are_narrowed() {
        let last = 9_007_199_254_740_991_i64;
        for (schema, expected) in [
            (
                json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
                json!({"type": "integer", "minimum": -last, "maximum": last}),
            ),
            (json!({"type": ["integer", "null"], "exclusiveMaximum": 1e19}), json!({"type": ["integer", "null"], "maximum": last})),
            (json!({"type": "integer", "exclusiveMaximum": u64::MAX, "maximum": 7}), json!({"type": "integer", "maximum": 7})),
            (json!({"type": "integer", "minimum": 5}), json!({"type": "integer", "minimum": 5})),
        ] {
            let mut effective = schema.clone();
            make_effective(&mut effective).expect("supported");
            assert_eq!(effective, expected, "{schema}");
        }
    }

    #[test]
    fn a_format_becomes_a_pattern_beside_another() {
        let mut schema = json!({"properties": {"format": {"type": "string", "format": "date", "pattern": "^2"}}});
        make_effective(&mut schema).expect("supported");
        assert_eq!(schema["properties"]["format"]["allOf"][0]["pattern"].as_str(), format_pattern("date").as_deref());
        assert!(make_effective(&mut json!({"format": "iri"})).expect_err("unsupported").contains("format"));
    }
}
