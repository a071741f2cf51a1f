//! `POST /v1/completions`: the request.

use super::common::{Common, take_common};
use super::error::ApiError;
use super::fields::{self, Fields};
use super::rules::{LOGPROBS_MAX, Rules};
use serde_json::Value;

/// Completion tokens of a request that names no number.
pub const MAX_TOKENS_DEFAULT: u64 = 16;

/// A completion request, checked; prompts are not tokenized yet.
#[derive(Clone, Debug)]
pub struct CompletionRequest {
    /// Prompts, each answered by `n` choices.
    pub prompts: Vec<Prompt>,
    /// Completion tokens at most.
    pub max_tokens: u64,
    /// Whether the text starts with the prompt.
    pub echo: bool,
    /// Alternatives of each token.
    pub logprobs: Option<u32>,
    /// Whether the tokenizer's BOS is prepended to text prompts.
    pub add_special_tokens: bool,
    /// Shared fields.
    pub common: Common,
    /// Unknown fields that were accepted.
    pub unknown_fields: usize,
}

/// A prompt as it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids, each known to the tokenizer.
    Ids(Vec<u32>),
}

/// Reads a completion request.
///
/// # Errors
/// 404 for another model, else 400 that names the field.
pub fn read_completion(mut fields: Fields, rules: &Rules) -> Result<CompletionRequest, ApiError> {
    rules.check_model(&mut fields)?;
    super::tools::refuse_tools(&mut fields)?;
    let common = take_common(&mut fields, rules)?;
    let prompts = take_prompts(&mut fields, rules)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let request = CompletionRequest {
        prompts,
        max_tokens: fields.integer("max_tokens", 0..=i64::MAX)?.map_or(MAX_TOKENS_DEFAULT, i64::cast_unsigned),
        echo,
        logprobs: take_logprobs(&mut fields)?,
        add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        common,
        unknown_fields: rules.settle_unread(&fields)?,
    };
    if request.max_tokens == 0 && !echo {
        return Err(ApiError::invalid("max_tokens", "`max_tokens` must be at least 1; 0 is only allowed with `echo: true`"));
    }
    Ok(request)
}

fn take_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    Ok(fields.integer("logprobs", 0..=LOGPROBS_MAX)?.map(|count| count as u32))
}

/// Takes `prompt`: a string, an array of strings, a list of ids or a list of such lists.
fn take_prompts(fields: &mut Fields, rules: &Rules) -> Result<Vec<Prompt>, ApiError> {
    match fields.take("prompt") {
        None => Err(ApiError::invalid("prompt", "`prompt` is required: a string, an array of strings, or token ids")),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(items)) => prompt_list(items, rules),
        Some(other) => Err(ApiError::invalid(
            "prompt",
            format!("`prompt` must be a string, an array of strings, or token ids, not {}", fields::kind(&other)),
        )),
    }
}

fn prompt_list(items: Vec<Value>, rules: &Rules) -> Result<Vec<Prompt>, ApiError> {
    match items.first() {
        None => Err(ApiError::invalid("prompt", "`prompt` is an empty array")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Ids(fields::token_ids("prompt", &items, rules.vocab_known)?)]),
        Some(_) if items.len() > rules.prompts_max => {
            let message = format!("`prompt` has {} prompts, at most {} are allowed in one request", items.len(), rules.prompts_max);
            Err(ApiError::invalid("prompt", message))
        }
        Some(_) => items.into_iter().enumerate().map(|(index, item)| one_prompt(index, item, rules)).collect(),
    }
}

fn one_prompt(index: usize, item: Value, rules: &Rules) -> Result<Prompt, ApiError> {
    match item {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) if ids.is_empty() => Err(ApiError::invalid("prompt", format!("`prompt[{index}]` is an empty list of token ids"))),
        Value::Array(ids) => Ok(Prompt::Ids(fields::token_ids("prompt", &ids, rules.vocab_known)?)),
        other => {
            let message = format!("`prompt[{index}]` must be a string or a list of token ids, not {}", fields::kind(&other));
            Err(ApiError::invalid("prompt", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rules::test_rules;
    use super::*;

    fn check(body: &str) -> Result<CompletionRequest, ApiError> {
        read_completion(fields::parse_body(body.as_bytes()).expect("json"), &test_rules())
    }

    #[test]
    fn every_form_of_prompt_is_read() {
        for (prompt, count) in [(r#""a""#, 1), (r#"["a","b"]"#, 2), ("[1,2,3]", 1), ("[[1],[2,3]]", 2), (r#"["a",[1]]"#, 2)] {
            assert_eq!(check(&format!(r#"{{"prompt":{prompt}}}"#)).expect(prompt).prompts.len(), count, "{prompt}");
        }
    }

    #[test]
    fn bad_prompts_and_limits_are_named() {
        for (body, param) in [
            (r"{}", "prompt"),
            (r#"{"prompt":[]}"#, "prompt"),
            (r#"{"prompt":[[]]}"#, "prompt"),
            (r#"{"prompt":[-1]}"#, "prompt"),
            (r#"{"prompt":[1000000000]}"#, "prompt"),
            (r#"{"prompt":[1,"a"]}"#, "prompt[1]"),
            (r#"{"prompt":["a",7]}"#, "prompt"),
            (r#"{"prompt":{"a":1}}"#, "prompt"),
            (r#"{"prompt":["1","2","3","4","5"]}"#, "prompt"),
            (r#"{"prompt":"a","max_tokens":0}"#, "max_tokens"),
            (r#"{"prompt":"a","max_tokens":-1}"#, "max_tokens"),
            (r#"{"prompt":"a","logprobs":21}"#, "logprobs"),
            (r#"{"prompt":"a","logprobs":true}"#, "logprobs"),
            (r#"{"prompt":"a","echo":1}"#, "echo"),
        ] {
            let error = check(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}: {error}");
        }
    }

    #[test]
    fn unknown_fields_are_counted_and_another_model_is_not_found() {
        assert_eq!(check(r#"{"prompt":"a","model":"m","frobnicate":1,"x":null}"#).expect("lenient").unknown_fields, 2);
        let error = check(r#"{"prompt":"a","model":"other"}"#).expect_err("other model");
        assert_eq!((error.status, error.code, error.param.as_deref()), (404, Some("model_not_found"), Some("model")));
    }
}
