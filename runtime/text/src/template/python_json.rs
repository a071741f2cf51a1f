//! The `tojson` filter as `transformers` defines it: Python's `json.dumps(x, ensure_ascii, indent, separators, sort_keys)`
//! with `ensure_ascii=False` by default and keys in insertion order.

use super::python::{float_repr, invalid, items, str_of};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, Value};
use std::fmt::Write;

/// Nesting at most.
const DEPTH_MAX: usize = 200;

/// Arguments of `json.dumps`.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort: bool,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let style = Style::from_arguments(&positional, &kwargs)?;
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(out)
}

impl Style {
    fn from_arguments(positional: &[Value], kwargs: &Kwargs) -> Result<Self, Error> {
        let argument = |at: usize, name: &str| -> Result<Value, Error> {
            let named: Option<Value> = kwargs.get(name)?;
            Ok(named.or_else(|| positional.get(at).cloned()).unwrap_or_default())
        };
        let (ascii, indent) = (argument(0, "ensure_ascii")?, argument(1, "indent")?);
        let (separators, sort) = (argument(2, "separators")?, argument(3, "sort_keys")?);
        kwargs.assert_all_used()?;
        let indent = indent_of(&indent)?;
        let (item_separator, key_separator) = match items(&separators).as_slice() {
            [] => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
            [item, key] => (str_of(item), str_of(key)),
            other => return Err(invalid(format!("tojson: separators has {} entries, expected 2", other.len()))),
        };
        Ok(Self { ascii: ascii.is_true(), indent, item_separator, key_separator, sort: sort.is_true() })
    }
}

fn indent_of(value: &Value) -> Result<Option<String>, Error> {
    match (value.kind(), value.as_str(), value.as_i64()) {
        (ValueKind::None | ValueKind::Undefined, _, _) => Ok(None),
        (_, Some(text), _) => Ok(Some(text.to_owned())),
        (_, _, Some(width)) if width <= 64 => Ok(Some(" ".repeat(width.max(0) as usize))),
        _ => Err(invalid("tojson: indent must be a string or a number up to 64")),
    }
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(invalid(format!("tojson: nested deeper than {DEPTH_MAX}")));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool | ValueKind::Number => out.push_str(&scalar(value)),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            write_block(out, ('[', ']'), &items(value), style, depth, |out, item| write_value(out, item, style, depth + 1))?;
        }
        ValueKind::Map => {
            let mut keys = items(value);
            if style.sort {
                keys.sort_by_cached_key(str_of);
            }
            write_block(out, ('{', '}'), &keys, style, depth, |out, key| {
                write_string(out, &key_text(key)?, style.ascii);
                out.push_str(&style.key_separator);
                write_value(out, &value.get_item(key)?, style, depth + 1)
            })?;
        }
        other => return Err(invalid(format!("tojson: {other} is not JSON serializable"))),
    }
    Ok(())
}

fn write_block(
    out: &mut String,
    brackets: (char, char),
    entries: &[Value],
    style: &Style,
    depth: usize,
    mut write_entry: impl FnMut(&mut String, &Value) -> Result<(), Error>,
) -> Result<(), Error> {
    out.push(brackets.0);
    for (index, entry) in entries.iter().enumerate() {
        if index > 0 {
            out.push_str(&style.item_separator);
        }
        break_line(out, style, depth + 1);
        write_entry(out, entry)?;
    }
    if !entries.is_empty() {
        break_line(out, style, depth);
    }
    out.push(brackets.1);
    Ok(())
}

fn break_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.push_str(&indent.repeat(depth));
    }
}

fn scalar(value: &Value) -> String {
    match value.kind() {
        ValueKind::Bool => if value.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) if number.is_nan() => "NaN".into(),
            Ok(number) if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.into(),
            Ok(number) => float_repr(number),
            Err(_) => value.to_string(),
        },
        _ => value.to_string(),
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(str_of(key)),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool | ValueKind::Number => Ok(scalar(key)),
        other => Err(invalid(format!("tojson: a key of type {other} is not allowed"))),
    }
}

fn write_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x0c' => out.push_str("\\f"),
            '\x08' => out.push_str("\\b"),
            c if c < ' ' || (ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}").expect("writing to a string does not fail");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
