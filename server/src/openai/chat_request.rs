//! `POST /v1/chat/completions`: the request.
//!
//! Messages are checked and brought into the form that chat templates expect: `developer` turned into
//! `system`, parts of every text kind into `text`, tool-call arguments decoded from JSON text. Joining
//! parts is the template's business.

use super::common::{Common, take_common};
use super::error::ApiError;
use super::fields::{self, Fields};
use super::rules::{LOGPROBS_MAX, MESSAGES_MAX, Rules};
use crate::tools::{ToolMode, ToolPlan, take_tools};
use oxide_bundle::manifest::ToolDialect;
use serde_json::{Map, Value};

/// A chat request, checked; the template is not rendered yet.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// Messages as the template sees them.
    pub messages: Vec<Value>,
    /// Completion tokens at most; `None` is up to the end of the context.
    pub max_tokens: Option<u64>,
    /// The field that `max_tokens` came from.
    pub max_tokens_param: &'static str,
    /// Alternatives of each token; `None` without log-probabilities.
    pub logprobs: Option<u32>,
    /// Whether the prompt ends with the beginning of an assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables of the template.
    pub template_kwargs: Map<String, Value>,
    /// The tools that it offers.
    pub tools: ToolPlan,
    /// Shared fields.
    pub common: Common,
    /// Unknown fields that were accepted.
    pub unknown_fields: usize,
}

/// Reads a chat request.
///
/// # Errors
/// 404 for another model, else 400 that names the field.
pub fn read_chat(mut fields: Fields, rules: &Rules) -> Result<ChatRequest, ApiError> {
    rules.check_model(&mut fields)?;
    let messages = take_messages(&mut fields)?;
    if rules.tool_dialect == ToolDialect::None {
        refuse_calls(&messages)?;
    }
    let mut tools = take_tools(&mut fields, rules.tool_dialect)?;
    let mut common = take_common(&mut fields, rules)?;
    settle_constraint(&mut common, &mut tools, rules.tool_dialect)?;
    refuse_continue(&mut fields)?;
    let (max_tokens, max_tokens_param) = take_max_tokens(&mut fields)?;
    Ok(ChatRequest {
        messages,
        max_tokens,
        max_tokens_param,
        logprobs: take_logprobs(&mut fields)?,
        add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(true),
        template_kwargs: fields.object("chat_template_kwargs")?.unwrap_or_default(),
        tools,
        common,
        unknown_fields: rules.settle_unread(&fields)?,
    })
}

/// A forced call settles what is written; where the model chooses, a constraint is on the text that it writes instead of calls.
fn settle_constraint(common: &mut Common, tools: &mut ToolPlan, dialect: ToolDialect) -> Result<(), ApiError> {
    match &tools.mode {
        ToolMode::Required | ToolMode::Named(_) => common.constraint = tools.constraint(),
        ToolMode::Auto => common.constraint = tools.choice_constraint(dialect, common.constraint.take())?,
        ToolMode::Absent | ToolMode::Forbidden => {}
    }
    Ok(())
}

/// A template that takes no tools would leave the calls of the history out.
fn refuse_calls(messages: &[Value]) -> Result<(), ApiError> {
    match messages.iter().position(|message| message.get("tool_calls").is_some()) {
        None => Ok(()),
        Some(index) => {
            let path = format!("messages[{index}].tool_calls");
            let reason = format!("`{path}`: this model's template takes no tools; leave calls out of the conversation");
            Err(ApiError::unsupported(path, reason))
        }
    }
}

fn refuse_continue(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["continue_final_message", "echo", "add_special_tokens"] {
        if fields.boolean(name)? == Some(true) {
            return Err(ApiError::unsupported(name, format!("`{name}` is not supported for chat completions")));
        }
    }
    Ok(())
}

/// The newer field wins.
fn take_max_tokens(fields: &mut Fields) -> Result<(Option<u64>, &'static str), ApiError> {
    let old = fields.integer("max_tokens", 1..=i64::MAX);
    let new = fields.integer("max_completion_tokens", 1..=i64::MAX);
    match (new?, old?) {
        (Some(count), _) => Ok((Some(count.cast_unsigned()), "max_completion_tokens")),
        (None, old) => Ok((old.map(i64::cast_unsigned), "max_tokens")),
    }
}

fn take_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=LOGPROBS_MAX)?;
    match (wanted, top) {
        (false, Some(count)) if count > 0 => Err(ApiError::invalid("top_logprobs", "`top_logprobs` is only allowed with `logprobs: true`")),
        (false, _) => Ok(None),
        (true, count) => Ok(Some(count.unwrap_or(0) as u32)),
    }
}

/// Takes `messages`, normalised.
///
/// # Errors
/// 400 that names the message and member at fault.
pub fn take_messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let items = fields.array("messages")?.ok_or_else(|| ApiError::invalid("messages", "`messages` is required: an array of messages"))?;
    if items.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; send at least one message"));
    }
    if items.len() > MESSAGES_MAX {
        return Err(ApiError::invalid("messages", format!("`messages` has {} messages, at most {MESSAGES_MAX} are allowed", items.len())));
    }
    items.into_iter().enumerate().map(|(index, item)| message(&format!("messages[{index}]"), item)).collect()
}

fn bad(path: &str, message: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(path, format!("`{path}` {message}"))
}

fn message(path: &str, item: Value) -> Result<Value, ApiError> {
    let Value::Object(mut map) = item else { return Err(bad(path, format_args!("must be an object, not {}", fields::kind(&item)))) };
    let role = take_role(path, &mut map)?;
    for name in ["audio", "function_call"] {
        if map.get(name).is_some_and(|value| !value.is_null()) {
            return Err(ApiError::unsupported(format!("{path}.{name}"), format!("`{path}.{name}` is not supported")));
        }
    }
    check_content(path, &role, &mut map)?;
    check_tool_calls(path, &role, &mut map)?;
    Ok(Value::Object(map))
}

fn take_role(path: &str, map: &mut Map<String, Value>) -> Result<String, ApiError> {
    let role = match map.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(other) => return Err(bad(&format!("{path}.role"), format_args!("must be a string, not {}", fields::kind(other)))),
        None => return Err(bad(&format!("{path}.role"), "is required")),
    };
    match role.as_str() {
        "system" | "user" | "tool" | "assistant" => {}
        "developer" => {
            map.insert("role".to_owned(), "system".into());
        }
        other => {
            let allowed = "must be one of system, developer, user, assistant, tool";
            return Err(bad(&format!("{path}.role"), format_args!("is `{other}`; it {allowed}")));
        }
    }
    Ok(role)
}

/// Checks `content`; parts stay parts, since some templates read them themselves.
fn check_content(path: &str, role: &str, map: &mut Map<String, Value>) -> Result<(), ApiError> {
    let path = format!("{path}.content");
    let calls_tools = map.get("tool_calls").and_then(Value::as_array).is_some_and(|calls| !calls.is_empty());
    match map.get_mut("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) if parts.is_empty() => Err(bad(&path, "is an empty array; send at least one text part")),
        Some(Value::Array(parts)) => {
            parts.iter_mut().enumerate().try_for_each(|(index, part)| check_part(&format!("{path}[{index}]"), part))
        }
        None | Some(Value::Null) if role == "assistant" && calls_tools => Ok(()),
        None | Some(Value::Null) => Err(bad(&path, "is required: a string or an array of text parts")),
        Some(other) => Err(bad(&path, format_args!("must be a string or an array of text parts, not {}", fields::kind(other)))),
    }
}

/// Checks that a part is text, and writes it as `{"type":"text","text":…}`.
fn check_part(path: &str, part: &mut Value) -> Result<(), ApiError> {
    let text = match (part.get("type").and_then(Value::as_str), &*part) {
        (_, Value::String(text)) => text.clone(),
        (Some(member @ ("text" | "refusal")), part) => match part.get(member) {
            Some(Value::String(text)) => text.clone(),
            _ => return Err(bad(&format!("{path}.{member}"), "is required and must be a string")),
        },
        (Some(other), _) => {
            let reason = format!("`{path}.type` is `{other}`; this model reads text only, so every part must be of type `text`");
            return Err(ApiError::unsupported(format!("{path}.type"), reason));
        }
        (None, _) => return Err(bad(&format!("{path}.type"), "is required; text parts are `{\"type\":\"text\",\"text\":…}`")),
    };
    *part = serde_json::json!({"type": "text", "text": text});
    Ok(())
}

/// Checks `tool_calls`, and decodes `arguments`: the API carries them as JSON text, templates want the object.
fn check_tool_calls(path: &str, role: &str, map: &mut Map<String, Value>) -> Result<(), ApiError> {
    let path = format!("{path}.tool_calls");
    let Some(calls) = map.get_mut("tool_calls").filter(|calls| !calls.is_null()) else {
        map.shift_remove("tool_calls");
        return Ok(());
    };
    if role != "assistant" {
        return Err(bad(&path, "belongs to assistant messages only"));
    }
    let found = fields::kind(calls);
    let Value::Array(calls) = calls else { return Err(bad(&path, format_args!("must be an array, not {found}"))) };
    calls.iter_mut().enumerate().try_for_each(|(index, call)| decode_arguments(&format!("{path}[{index}].function"), call))
}

fn decode_arguments(path: &str, call: &mut Value) -> Result<(), ApiError> {
    let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
        return Err(bad(path, "is required and must be an object"));
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err(bad(&format!("{path}.name"), "is required and must be a string"));
    }
    let path = format!("{path}.arguments");
    let decoded = match function.get("arguments") {
        None => return Ok(()),
        Some(Value::Object(_)) => return Ok(()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|error| bad(&path, format_args!("is not valid JSON: {error}")))?,
        Some(other) => return Err(bad(&path, format_args!("must be JSON text, not {}", fields::kind(other)))),
    };
    if !decoded.is_object() {
        return Err(bad(&path, format_args!("must hold a JSON object, not {}", fields::kind(&decoded))));
    }
    function.insert("arguments".to_owned(), decoded);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::rules::test_rules;
    use super::*;

    fn check(body: &str) -> Result<ChatRequest, ApiError> {
        read_chat(fields::parse_body(body.as_bytes()).expect("json"), &test_rules())
    }

    fn with(rest: &str) -> Result<ChatRequest, ApiError> {
        check(&format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{rest}}}"#))
    }

    #[test]
    fn bad_messages_are_named() {
        for (messages, param) in [
            ("[]", "messages"),
            (r#""hi""#, "messages"),
            ("[7]", "messages[0]"),
            (r#"[{"content":"a"}]"#, "messages[0].role"),
            (r#"[{"role":"alien","content":"a"}]"#, "messages[0].role"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"role":"assistant","content":null}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":[]}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#, "messages[0].content[0].type"),
            (r#"[{"role":"user","content":[{"type":"text"}]}]"#, "messages[0].content[0].text"),
            (
                r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}]"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
            (r#"[{"role":"user","content":"a","tool_calls":[]}]"#, "messages[0].tool_calls"),
        ] {
            let error = check(&format!(r#"{{"messages":{messages}}}"#)).expect_err(messages);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{messages}: {error}");
        }
        assert_eq!(check("{}").expect_err("absent").param.as_deref(), Some("messages"));
    }

    #[test]
    fn messages_reach_the_template_in_its_own_form() {
        let request = check(
            r#"{"messages":[{"role":"developer","content":"d"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"b\":1,\"a\":2}"}}]},
            {"role":"tool","tool_call_id":"1","content":"ok"}]}"#,
        )
        .expect("valid");
        assert_eq!(request.messages[0]["role"], "system");
        assert_eq!(request.messages[1]["content"][1], serde_json::json!({"type": "text", "text": "b"}));
        assert_eq!(request.messages[2]["tool_calls"][0]["function"]["arguments"].to_string(), r#"{"b":1,"a":2}"#);
    }

    #[test]
    fn limits_of_chat_fields() {
        for (rest, param) in [
            (r#","max_tokens":0"#, "max_tokens"),
            (r#","max_tokens":-1"#, "max_tokens"),
            (r#","max_completion_tokens":0"#, "max_completion_tokens"),
            (r#","top_logprobs":3"#, "top_logprobs"),
            (r#","logprobs":true,"top_logprobs":21"#, "top_logprobs"),
            (r#","logprobs":1"#, "logprobs"),
            (r#","chat_template":"x""#, "chat_template"),
        ] {
            assert_eq!(with(rest).expect_err(rest).param.as_deref(), Some(param), "{rest}");
        }
        let both = with(r#","max_tokens":5,"max_completion_tokens":3"#).expect("both");
        assert_eq!((both.max_tokens, both.max_tokens_param), (Some(3), "max_completion_tokens"));
    }
}
