//! Python's ways with values and strings, where minijinja's differ: `str()` and `repr()`, whitespace, missing methods.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Python's `str(value)`; an undefined value is empty, as in jinja2.
pub(super) fn str_of(value: &Value) -> String {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => text.to_owned(),
        (ValueKind::Undefined, _) => String::new(),
        _ => repr_of(value),
    }
}

/// Python's `repr(value)`.
fn repr_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float_repr),
        ValueKind::String => string_repr(value.as_str().unwrap_or_default()),
        ValueKind::Seq => format!("[{}]", items(value).iter().map(repr_of).collect::<Vec<_>>().join(", ")),
        ValueKind::Map => {
            let pairs = items(value).into_iter().map(|key| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr_of(&key), repr_of(&item))
            });
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// Elements of a sequence, keys of a map.
pub(super) fn items(value: &Value) -> Vec<Value> {
    value.try_iter().map(|iter| iter.collect()).unwrap_or_default()
}

fn string_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c < ' ' || c == '\x7f' => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// Python's `repr(float)`: shortest digits, an exponent below 1e-4 and from 1e16.
pub(super) fn float_repr(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() {
            "nan"
        } else if number > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let scientific = format!("{number:e}");
        let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    let plain = number.to_string();
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

/// Python's `str.isspace` for one character.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Which ends `strip` works on.
#[derive(Copy, Clone)]
pub(super) enum Ends {
    Both,
    Left,
    Right,
}

/// Python's `str.strip`, `lstrip`, `rstrip`.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, ends: Ends) -> &'a str {
    let unwanted = |c: char| chars.map_or_else(|| is_space(c), |set| set.contains(c));
    match ends {
        Ends::Both => text.trim_matches(unwanted),
        Ends::Left => text.trim_start_matches(unwanted),
        Ends::Right => text.trim_end_matches(unwanted),
    }
}

/// Methods of Python values: the ones below, then minijinja-contrib's.
pub(super) fn call_method(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)
    {
        return Ok(result);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Value> {
    let first = args.first().and_then(Value::as_str);
    let ends = match method {
        "strip" => Some(Ends::Both),
        "lstrip" => Some(Ends::Left),
        "rstrip" => Some(Ends::Right),
        _ => None,
    };
    if let Some(ends) = ends {
        return (args.is_empty() || first.is_some()).then(|| strip(text, first, ends).into());
    }
    let argument = first?;
    match method {
        "removeprefix" => Some(text.strip_prefix(argument).unwrap_or(text).into()),
        "removesuffix" => Some(text.strip_suffix(argument).unwrap_or(text).into()),
        "partition" if !argument.is_empty() => Some(match text.split_once(argument) {
            Some((head, tail)) => strings([head, argument, tail]),
            None => strings([text, "", ""]),
        }),
        "rpartition" if !argument.is_empty() => Some(match text.rsplit_once(argument) {
            Some((head, tail)) => strings([head, argument, tail]),
            None => strings(["", "", text]),
        }),
        "rsplit" if !argument.is_empty() => Some(rsplit(text, argument, args.get(1)).into()),
        _ => None,
    }
}

fn strings(parts: [&str; 3]) -> Value {
    parts.map(str::to_owned).to_vec().into()
}

fn rsplit(text: &str, separator: &str, limit: Option<&Value>) -> Vec<String> {
    let limit = limit.and_then(Value::as_usize).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<String> = text.rsplitn(limit.saturating_add(1), separator).map(str::to_owned).collect();
    parts.reverse();
    parts
}

/// The error of a wrong argument.
pub(super) fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        let cases = [(1.0, "1.0"), (0.1, "0.1"), (1e16, "1e+16"), (123456789012345680.0, "1.2345678901234568e+17"), (1e-5, "1e-05")];
        for (number, expect) in
            cases.into_iter().chain([(0.0001, "0.0001"), (-0.0, "-0.0"), (1e300, "1e+300"), (1e15, "1000000000000000.0")])
        {
            assert_eq!(float_repr(number), expect);
        }
    }

    #[test]
    fn values_print_as_in_python() {
        let json = serde_json::json!({"a": [true, null, "it's", 1.5], "b": {}});
        let value = Value::from(minijinja::value::Serde(&json));
        assert_eq!(str_of(&value), r#"{'a': [True, None, "it's", 1.5], 'b': {}}"#);
        assert_eq!(str_of(&Value::UNDEFINED), "");
    }
}
