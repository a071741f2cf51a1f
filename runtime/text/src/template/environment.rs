//! The jinja environment, set up as `transformers` sets up jinja2, with a step limit that is always on.

use super::conversation::Conversation;
use super::python::{self, Ends};
use super::python_json;
use super::{TemplateTokens, UtcTime};
use crate::error::TemplateError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use std::collections::BTreeMap;

/// Steps that one rendering may take (an instruction is one; long strings cost more).
pub const FUEL_MAX: u64 = 4_000_000;

const NAME: &str = "chat_template";

/// A compiled template with its environment.
pub(super) struct Engine {
    environment: Environment<'static>,
    source: String,
    tokens: TemplateTokens,
}

/// The message of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Engine {
    pub(super) fn new(source: &str, tokens: TemplateTokens) -> Result<Self, TemplateError> {
        let mut environment = environment()?;
        environment.add_template_owned(NAME, without_generation_tags(source)).map_err(|e| TemplateError::Compile(describe(&e)))?;
        Ok(Self { environment, source: source.to_owned(), tokens })
    }

    /// Template source.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// One plain rendering.
    pub(super) fn render(&self, conversation: &Conversation) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|e| TemplateError::Compile(describe(&e)))?;
        template.render(self.context(conversation)).map_err(|e| classify(&e))
    }

    fn context(&self, conversation: &Conversation) -> Value {
        let mut context: BTreeMap<String, Value> = BTreeMap::new();
        let tokens = [("bos_token", &self.tokens.bos), ("eos_token", &self.tokens.eos)];
        context.extend(tokens.into_iter().filter_map(|(name, text)| Some((name.to_owned(), Value::from(text.as_ref()?.as_str())))));
        context.extend(conversation.variables.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value)))));
        context.insert("messages".into(), Value::from(Serde(&conversation.messages)));
        context.insert("tools".into(), Value::from(Serde(&conversation.tools)));
        context.insert("documents".into(), Value::from(Serde(&conversation.documents)));
        context.insert("add_generation_prompt".into(), Value::from(conversation.add_generation_prompt));
        let now: UtcTime = conversation.now;
        context.insert("strftime_now".into(), Value::from_function(move |pattern: String| now.format(&pattern)));
        Value::from_pairs(context)
    }
}

fn environment() -> Result<Environment<'static>, TemplateError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|e| TemplateError::Compile(describe(&e)))?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::str_of(value))?),
    });
    environment.set_fuel(Some(FUEL_MAX));
    environment.set_unknown_method_callback(python::call_method);
    environment.add_filter("tojson", python_json::tojson);
    environment.add_filter("string", |value: &Value| python::str_of(value));
    environment.add_filter("trim", |value: &Value, chars: Option<String>| {
        python::strip(&python::str_of(value), chars.as_deref(), Ends::Both).to_owned()
    });
    environment.add_test("iterable", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Undefined) || value.try_iter().is_ok() && !value.is_none()
    });
    // In Python whatever has a length and takes an index is a sequence, strings and dicts included.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Undefined | ValueKind::Seq | ValueKind::Map)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(python::invalid("raise_exception").with_source(Raised(message)))
    });
    Ok(environment)
}

/// `{% generation %}` only marks text for training: an always-true `if` keeps its whitespace control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (tag, after) = tag.split_at(end + 2);
        out.push_str(&match tag[2..end].trim_matches(['-', '+', ' ', '\t', '\n']) {
            "generation" => tag.replacen("generation", "if true", 1),
            "endgeneration" => tag.replacen("endgeneration", "endif", 1),
            _ => tag.to_owned(),
        });
        rest = after;
    }
    out.push_str(rest);
    out
}

fn classify(error: &Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Fuel { limit: FUEL_MAX };
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = source {
        if let Some(Raised(message)) = inner.downcast_ref::<Raised>() {
            return TemplateError::Raised(message.clone());
        }
        source = inner.source();
    }
    TemplateError::Render(describe(error))
}

fn describe(error: &Error) -> String {
    let detail = error.detail().map(str::to_owned).unwrap_or_else(|| error.kind().to_string());
    match error.line() {
        Some(line) => format!("{detail} (line {line} of the template)"),
        None => detail,
    }
}
