//! What a template is given: the request's messages in the shape that templates expect.

use super::environment::Engine;
use super::{ChatInput, UtcTime};
use crate::error::TemplateError;
use serde_json::{Map, Value, json};

/// How a template wants content that comes in parts.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum PartsStyle {
    /// As one string.
    Joined,
    /// As the list of parts.
    List,
}

/// Inputs of a rendering.
#[derive(Clone, Debug)]
pub(super) struct Conversation {
    pub(super) messages: Value,
    pub(super) tools: Value,
    pub(super) documents: Value,
    pub(super) add_generation_prompt: bool,
    pub(super) variables: Map<String, Value>,
    pub(super) now: UtcTime,
}

impl PartsStyle {
    /// A template reads parts if it makes the same prompt of a string and of the same text as a part.
    pub(super) fn probe(engine: &Engine) -> Self {
        let render = |content: Value| {
            let input = ChatInput::new(json!([{"role": "user", "content": content}]));
            Conversation::new(&input, Self::List).and_then(|c| engine.render(&c)).ok()
        };
        let plain = render(json!("oxide-probe"));
        let parts = render(json!([{"type": "text", "text": "oxide-probe"}]));
        if plain.is_some() && plain == parts { Self::List } else { Self::Joined }
    }
}

impl Conversation {
    pub(super) fn new(input: &ChatInput, parts: PartsStyle) -> Result<Self, TemplateError> {
        let Value::Array(messages) = &input.messages else {
            return Err(malformed("messages", "must be a list"));
        };
        let messages = messages.iter().enumerate().map(|(index, message)| prepare(message, index, parts)).collect::<Result<_, _>>()?;
        Ok(Self {
            messages: Value::Array(messages),
            tools: input.tools.clone().unwrap_or_default(),
            documents: input.documents.clone().unwrap_or_default(),
            add_generation_prompt: input.add_generation_prompt,
            variables: input.variables.clone(),
            now: input.now,
        })
    }

    /// The same with empty text in place of absent contents, for templates that cannot add nothing to a string.
    /// `None` if no content is absent.
    pub(super) fn with_empty_contents(&self) -> Option<Self> {
        let mut retry = self.clone();
        let mut changed = false;
        for message in retry.messages.as_array_mut()?.iter_mut().filter_map(Value::as_object_mut) {
            if message.get("content").is_none_or(Value::is_null) {
                message.insert("content".into(), json!(""));
                changed = true;
            }
        }
        changed.then_some(retry)
    }
}

fn malformed(path: impl Into<String>, reason: impl Into<String>) -> TemplateError {
    TemplateError::Input { path: path.into(), reason: reason.into() }
}

fn prepare(message: &Value, index: usize, parts: PartsStyle) -> Result<Value, TemplateError> {
    let path = format!("messages[{index}]");
    let Value::Object(message) = message else {
        return Err(malformed(path, "must be an object"));
    };
    let mut message = message.clone();
    if let Some(Value::Array(content)) = message.get("content")
        && parts == PartsStyle::Joined
    {
        let joined = join_parts(content, &path)?;
        message.insert("content".into(), Value::String(joined));
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for (call_index, call) in calls.iter_mut().enumerate() {
            decode_arguments(call, &format!("{path}.tool_calls[{call_index}]"))?;
        }
    }
    Ok(Value::Object(message))
}

fn join_parts(content: &[Value], path: &str) -> Result<String, TemplateError> {
    let texts = content.iter().enumerate().map(|(index, part)| match part {
        Value::String(text) => Ok(text.as_str()),
        part => part
            .get("text")
            .and_then(Value::as_str)
            .ok_or_else(|| malformed(format!("{path}.content[{index}]"), "must be a text part: this model reads text only")),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Histories carry arguments as JSON text; templates want the object.
fn decode_arguments(call: &mut Value, path: &str) -> Result<(), TemplateError> {
    let (holder, path) = match call.get("function").is_some() {
        true => (call.get_mut("function"), format!("{path}.function.arguments")),
        false => (Some(call), format!("{path}.arguments")),
    };
    let Some(arguments) = holder.and_then(|h| h.get_mut("arguments")) else {
        return Ok(());
    };
    if let Value::String(text) = arguments {
        let text = if text.trim().is_empty() { "{}" } else { text };
        *arguments = serde_json::from_str(text).map_err(|e| malformed(path, format!("is not JSON: {e}")))?;
    }
    Ok(())
}
