//! The fields of tools, checked.

use super::parser::CallForm;
use crate::grammar::{Constraint, ConstraintKind, Marked};
use crate::openai::error::ApiError;
use crate::openai::fields::{self, Fields};
use oxide_bundle::manifest::ToolDialect;
use serde_json::{Map, Value, json};

/// Most tools of a request.
const TOOLS_MAX: usize = 128;
/// Longest name of a function.
const NAME_BYTES_MAX: usize = 64;
/// Most calls of a forced answer.
const CALLS_MAX: usize = 16;

/// Why strict functions are refused where calls have no mark.
const STRICT_WITHOUT_MARK: &str = "`tools` has a function with `strict: true`, but this model's calls begin with no mark of their own, so that \
a call which the model chooses cannot be told from text before it is written; send `tool_choice` (required or a function), or leave `strict` out";

/// Whether and how tools are called.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ToolMode {
    /// No tool was offered.
    #[default]
    Absent,
    /// Tools were offered and must not be called.
    Forbidden,
    /// The model chooses.
    Auto,
    /// Some tool must be called.
    Required,
    /// This tool must be called.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolPlan {
    functions: Vec<Function>,
    /// As the template sees them; `None` if it should not.
    pub rendered: Option<Value>,
    /// Whether they are called.
    pub mode: ToolMode,
    /// Whether one answer may hold several calls.
    pub parallel: bool,
    /// Whether calls are the whole answer or not in it.
    alone: bool,
}

/// A function that can be called.
#[derive(Clone, Debug, PartialEq)]
struct Function {
    name: String,
    /// Schema of its arguments.
    parameters: Value,
    /// Whether a call that the model chose must follow it too.
    strict: bool,
}

/// Takes the fields of tools.
///
/// # Errors
/// 400 that names the field.
pub fn take_tools(fields: &mut Fields, dialect: ToolDialect) -> Result<ToolPlan, ApiError> {
    for old in ["functions", "function_call"] {
        if fields.take(old).is_some_and(|value| value != "none") {
            return Err(ApiError::unsupported(old, format!("`{old}` is not supported; send `tools` and `tool_choice`")));
        }
    }
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let tools = fields.array("tools")?;
    let choice = fields.take("tool_choice");
    let Some(tools) = tools else { return without_tools(choice, parallel) };
    let functions = read_tools(&tools)?;
    let mode = read_choice(choice, &functions)?;
    if dialect == ToolDialect::None && mode != ToolMode::Forbidden {
        return Err(ApiError::unsupported(
            "tools",
            "`tools`: this model's template takes no tools; leave them out, or send `tool_choice: \"none\"`",
        ));
    }
    let rendered = (mode != ToolMode::Forbidden).then_some(Value::Array(tools));
    Ok(ToolPlan { functions, rendered, mode, parallel, alone: false })
}

fn without_tools(choice: Option<Value>, parallel: bool) -> Result<ToolPlan, ApiError> {
    match choice {
        Some(choice) if choice != "none" && choice != "auto" => {
            Err(ApiError::invalid("tool_choice", "`tool_choice` asks for a call, but `tools` offers nothing to call"))
        }
        _ => Ok(ToolPlan { parallel, ..ToolPlan::default() }),
    }
}

fn read_tools(tools: &[Value]) -> Result<Vec<Function>, ApiError> {
    if tools.is_empty() || tools.len() > TOOLS_MAX {
        return Err(ApiError::invalid("tools", format!("`tools` has {} entries, allowed are 1 to {TOOLS_MAX}", tools.len())));
    }
    let mut functions: Vec<Function> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let function = read_tool(&format!("tools[{index}]"), tool)?;
        if functions.iter().any(|known| known.name == function.name) {
            return Err(ApiError::invalid("tools", format!("`tools` has two functions with the name `{}`", function.name)));
        }
        functions.push(function);
    }
    Ok(functions)
}

fn read_tool(path: &str, tool: &Value) -> Result<Function, ApiError> {
    let bad = |message: String| ApiError::invalid("tools", message);
    if tool.get("type").and_then(Value::as_str) != Some("function") {
        return Err(bad(format!("`{path}.type` must be `function`")));
    }
    let Some(Value::Object(function)) = tool.get("function") else {
        return Err(bad(format!("`{path}.function` is required and must be an object")));
    };
    let Some(Value::String(name)) = function.get("name") else {
        return Err(bad(format!("`{path}.function.name` is required and must be a string")));
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(plain) {
        return Err(bad(format!("`{path}.function.name` must be 1 to {NAME_BYTES_MAX} letters, digits, `_`, `-` or `.`")));
    }
    if function.get("description").is_some_and(|text| !text.is_string() && !text.is_null()) {
        return Err(bad(format!("`{path}.function.description` must be a string")));
    }
    let strict = match function.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(other) => return Err(bad(format!("`{path}.function.strict` must be true or false, not {}", fields::kind(other)))),
    };
    Ok(Function { name: name.clone(), parameters: read_parameters(path, function)?, strict })
}

fn read_parameters(path: &str, function: &Map<String, Value>) -> Result<Value, ApiError> {
    match function.get("parameters") {
        None | Some(Value::Null) => Ok(json!({"type": "object", "properties": {}, "additionalProperties": false})),
        Some(Value::Object(schema)) => {
            let mut schema = schema.clone();
            match schema.get("type") {
                Some(kind) if kind != "object" => {
                    Err(ApiError::invalid("tools", format!("`{path}.function.parameters.type` must be `object`")))
                }
                Some(_) => Ok(Value::Object(schema)),
                None => {
                    schema.insert("type".to_owned(), "object".into());
                    Ok(Value::Object(schema))
                }
            }
        }
        Some(other) => {
            Err(ApiError::invalid("tools", format!("`{path}.function.parameters` must be a JSON schema, not {}", fields::kind(other))))
        }
    }
}

fn read_choice(choice: Option<Value>, functions: &[Function]) -> Result<ToolMode, ApiError> {
    let bad = |message: String| Err(ApiError::invalid("tool_choice", message));
    match choice {
        None => Ok(ToolMode::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => Ok(ToolMode::Forbidden),
            "auto" => Ok(ToolMode::Auto),
            "required" => Ok(ToolMode::Required),
            _ => bad(format!("`tool_choice` is `{word}`; it must be none, auto, required or a function")),
        },
        Some(Value::Object(map)) => {
            let name = map.get("function").and_then(|function| function.get("name")).and_then(Value::as_str);
            match (map.get("type").and_then(Value::as_str), name) {
                (Some("function"), Some(name)) if functions.iter().any(|known| known.name == name) => Ok(ToolMode::Named(name.to_owned())),
                (Some("function"), Some(name)) => bad(format!("`tool_choice` names the function `{name}`, which `tools` does not offer")),
                _ => bad("`tool_choice` must be `{\"type\":\"function\",\"function\":{\"name\":…}}`, or none, auto, required".to_owned()),
            }
        }
        Some(other) => bad(format!("`tool_choice` must be a string or an object, not {}", fields::kind(&other))),
    }
}

impl ToolPlan {
    /// The constraint that forces calls; `None` where the model chooses.
    pub fn constraint(&self) -> Option<Constraint> {
        let schema = match &self.mode {
            ToolMode::Absent | ToolMode::Forbidden | ToolMode::Auto => return None,
            ToolMode::Named(name) => self.functions.iter().find(|known| known.name == *name)?.parameters.clone(),
            ToolMode::Required => {
                let (call, definitions) = self.call_schema("arguments", |function| function.parameters.clone());
                json!({"type": "array", "minItems": 1, "maxItems": self.calls_max(), "items": call, "$defs": definitions})
            }
        };
        Some(Constraint { param: "tools".to_owned(), kind: ConstraintKind::Schema(schema) })
    }

    /// The constraint of an answer that may hold calls: `content` is what the rest must be. Calls follow the
    /// parameters of strict functions, and are JSON objects otherwise. `None` where nothing is enforced.
    ///
    /// # Errors
    /// 400 where the dialect has no form in which text and calls can be told apart.
    pub fn choice_constraint(&mut self, dialect: ToolDialect, content: Option<Constraint>) -> Result<Option<Constraint>, ApiError> {
        let strict = self.functions.iter().any(|function| function.strict);
        let (open, close, separator, key) = match (dialect, &content) {
            (ToolDialect::None, _) => return Ok(content),
            (_, None) if !strict => return Ok(None),
            (ToolDialect::Hermes, _) => ("<tool_call>", "</tool_call>", "\n", "arguments"),
            (ToolDialect::Llama3, Some(_)) => ("", "", "; ", "parameters"),
            (ToolDialect::Llama3, None) => return Err(ApiError::unsupported("tools", STRICT_WITHOUT_MARK)),
        };
        let (call, definitions) = self.call_schema(key, |function| match function.strict {
            true => function.parameters.clone(),
            false => json!({"type": "object"}),
        });
        let mut schema = call;
        if let Value::Object(map) = &mut schema {
            map.insert("$defs".to_owned(), definitions);
        }
        let (param, text) = match content {
            Some(Constraint { param, kind }) => {
                if let ConstraintKind::Lark(_) = kind {
                    let message = format!("`{param}` cannot be combined with tools that may or may not be called; send `tool_choice`");
                    return Err(ApiError::invalid(param, message));
                }
                self.alone = true;
                (param, Some(Box::new(kind)))
            }
            None => ("tools".to_owned(), None),
        };
        let (open, close, separator, most) = (open.to_owned(), close.to_owned(), separator.to_owned(), self.calls_max() as u32);
        let kind = ConstraintKind::Marked(Marked { text, open, close, separator, schema, most });
        Ok(Some(Constraint { param, kind }))
    }

    fn calls_max(&self) -> usize {
        if self.parallel { CALLS_MAX } else { 1 }
    }

    /// One call, whose arguments are the member `key`, and the definitions that it refers to.
    fn call_schema(&self, key: &str, arguments: impl Fn(&Function) -> Value) -> (Value, Value) {
        let mut definitions = Map::new();
        let calls: Vec<Value> = self
            .functions
            .iter()
            .enumerate()
            .map(|(index, function)| {
                let place = format!("f{index}");
                definitions.insert(place.clone(), moved(&arguments(function), &format!("#/$defs/{place}")));
                let mut properties = Map::new();
                properties.insert("name".to_owned(), json!({"const": function.name}));
                properties.insert(key.to_owned(), json!({"$ref": format!("#/$defs/{place}")}));
                json!({"type": "object", "additionalProperties": false, "required": ["name", key], "properties": properties})
            })
            .collect();
        (json!({"anyOf": calls}), Value::Object(definitions))
    }

    /// How the calls are written; `None` if none can come.
    pub fn form(&self, dialect: ToolDialect) -> Option<CallForm> {
        match &self.mode {
            ToolMode::Absent => None,
            ToolMode::Forbidden => Some(CallForm::Forbidden),
            ToolMode::Named(name) => Some(CallForm::Arguments(name.clone())),
            ToolMode::Required => Some(CallForm::List),
            ToolMode::Auto => match dialect {
                ToolDialect::Hermes => Some(CallForm::Hermes { parallel: self.parallel, alone: self.alone }),
                ToolDialect::Llama3 => {
                    let names = self.functions.iter().map(|function| function.name.clone()).collect();
                    Some(CallForm::Llama3 { names, parallel: self.parallel })
                }
                ToolDialect::None => None,
            },
        }
    }
}

/// The same schema at another place: its own references follow it.
fn moved(schema: &Value, place: &str) -> Value {
    match schema {
        Value::Object(map) => map
            .iter()
            .map(|(key, value)| match (key.as_str(), value) {
                ("$ref", Value::String(reference)) => {
                    let moved = reference.strip_prefix('#').map_or_else(|| reference.clone(), |rest| format!("{place}{rest}"));
                    (key.clone(), moved.into())
                }
                ("enum" | "const" | "default" | "examples", value) => (key.clone(), value.clone()),
                (_, value) => (key.clone(), moved(value, place)),
            })
            .collect(),
        Value::Array(items) => items.iter().map(|item| moved(item, place)).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::fields::parse_body;

    const TOOL: &str = r#"{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}"#;

    fn take(body: &str) -> Result<ToolPlan, ApiError> {
        take_tools(&mut parse_body(body.as_bytes()).expect("json"), ToolDialect::Hermes)
    }

    #[test]
    fn bad_tools_are_named() {
        for (body, param) in [
            (r#"{"tools":[]}"#.to_owned(), "tools"),
            (r#"{"tools":{}}"#.to_owned(), "tools"),
            (r#"{"tools":[{"type":"web"}]}"#.to_owned(), "tools"),
            (r#"{"tools":[{"type":"function"}]}"#.to_owned(), "tools"),
            (r#"{"tools":[{"type":"function","function":{"name":"a b"}}]}"#.to_owned(), "tools"),
            (r#"{"tools":[{"type":"function","function":{"name":"a","parameters":[]}}]}"#.to_owned(), "tools"),
            (format!(r#"{{"tools":[{TOOL},{TOOL}]}}"#), "tools"),
            (r#"{"tool_choice":"required"}"#.to_owned(), "tool_choice"),
            (format!(r#"{{"tools":[{TOOL}],"tool_choice":"any"}}"#), "tool_choice"),
            (format!(r#"{{"tools":[{TOOL}],"tool_choice":{{"type":"function","function":{{"name":"g"}}}}}}"#), "tool_choice"),
            (format!(r#"{{"tools":[{TOOL}],"functions":[]}}"#), "functions"),
        ] {
            let error = take(&body).expect_err(&body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}: {error}");
        }
    }

    #[test]
    fn strict_functions_are_refused_only_where_their_calls_have_no_mark() {
        let strict = TOOL.replace(r#""name""#, r#""strict":true,"name""#);
        let plan = || take(&format!(r#"{{"tools":[{strict}]}}"#)).expect("valid");
        let content = || Some(Constraint { param: "guided_choice".to_owned(), kind: ConstraintKind::Choice(vec!["a".to_owned()]) });
        for (dialect, content, marks) in [
            (ToolDialect::Hermes, None, "<tool_call>"),
            (ToolDialect::Hermes, content(), "<tool_call>"),
            (ToolDialect::Llama3, content(), ""),
        ] {
            let constraint = plan().choice_constraint(dialect, content).expect("can be told apart").expect("something is enforced");
            let ConstraintKind::Marked(marked) = constraint.kind else { panic!("calls have marks") };
            assert_eq!(marked.open, marks);
        }
        let error = plan().choice_constraint(ToolDialect::Llama3, None).expect_err("no mark");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("tools")));
        let mut loose = take(&format!(r#"{{"tools":[{TOOL}]}}"#)).expect("valid");
        assert_eq!(loose.choice_constraint(ToolDialect::Llama3, None), Ok(None));
        assert_eq!(loose.choice_constraint(ToolDialect::Hermes, None), Ok(None));
    }

    #[test]
    fn references_follow_parameters_that_move() {
        let schema = json!({"properties": {"a": {"$ref": "#/$defs/x"}, "b": {"enum": [{"$ref": "#"}]}}});
        assert_eq!(
            moved(&schema, "#/$defs/f0"),
            json!({"properties": {"a": {"$ref": "#/$defs/f0/$defs/x"}, "b": {"enum": [{"$ref": "#"}]}}})
        );
    }

    #[test]
    fn forbidden_tools_are_kept_from_the_template() {
        let plan = take(&format!(r#"{{"tools":[{TOOL}],"tool_choice":"none"}}"#)).expect("valid");
        assert_eq!((plan.mode, plan.rendered), (ToolMode::Forbidden, None));
    }
}
