//! What a request may say on this server: the model's limits and defaults, and the operator's choices.

use super::error::ApiError;
use super::fields::Fields;
use oxide_bundle::manifest::ToolDialect;
use oxide_runtime::engine::SamplingParams;

/// Largest `n` that the API knows.
pub const CHOICES_MAX: u32 = 128;
/// Largest `top_logprobs` and `logprobs`.
pub const LOGPROBS_MAX: i64 = 20;
/// Most stop strings in strict mode.
pub const STRICT_STOPS_MAX: usize = 4;
/// Longest stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 1024;
/// Most entries of `logit_bias` and of `stop_token_ids`.
pub const ID_LIST_MAX: usize = 1024;
/// Longest `cache_salt`, in bytes.
pub const SALT_BYTES_MAX: usize = 256;
/// Most messages of a conversation.
pub const MESSAGES_MAX: usize = 4096;
/// Longest deadline that a request may name: a day.
pub const DEADLINE_MS_MAX: i64 = 86_400_000;

/// Limits and defaults that requests are read against.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Name of the served model.
    pub model: String,
    /// Longest sequence, prompt and completion together.
    pub context_max: u32,
    /// Ids that the tokenizer knows; larger ones are refused.
    pub vocab_known: u32,
    /// Ids that end a generation unless `ignore_eos`.
    pub eos: Vec<u32>,
    /// Sampling of requests that say nothing.
    pub defaults: SamplingParams,
    /// Refuse what OpenAI would refuse.
    pub strict: bool,
    /// Lower a `max_tokens` that does not fit instead of refusing it.
    pub clamp_max_tokens: bool,
    /// Largest `n`.
    pub choices_max: u32,
    /// Most prompts of one completion request.
    pub prompts_max: usize,
    /// Most stop strings.
    pub stops_max: usize,
    /// How the model writes tool calls.
    pub tool_dialect: ToolDialect,
}

impl Rules {
    /// Takes `model` and checks that it names the served one.
    ///
    /// # Errors
    /// 404 for another name, 400 in strict mode when it is absent.
    pub fn check_model(&self, fields: &mut Fields) -> Result<(), ApiError> {
        match fields.string("model")? {
            Some(name) if name == self.model => Ok(()),
            Some(name) => Err(ApiError::no_such_model(&name, &self.model)),
            None if self.strict => Err(ApiError::invalid("model", format!("`model` is required; this server serves `{}`", self.model))),
            None => Ok(()),
        }
    }

    /// Stop strings allowed in one request.
    pub fn stops_allowed(&self) -> usize {
        if self.strict { STRICT_STOPS_MAX } else { self.stops_max }
    }

    /// Deals with the fields that nobody read: their number, or a refusal in strict mode.
    ///
    /// # Errors
    /// 400 in strict mode that names the first.
    pub fn settle_unread(&self, fields: &Fields) -> Result<usize, ApiError> {
        match fields.unread().next() {
            Some(name) if self.strict => {
                Err(ApiError { code: Some("unknown_parameter"), ..ApiError::invalid(name, format!("unrecognised field `{name}`")) })
            }
            _ => Ok(fields.unread().count()),
        }
    }

    /// Completion tokens at most, for a prompt of `prompt` tokens.
    ///
    /// `asked` is what the request says; `None` means up to the end of the context.
    ///
    /// # Errors
    /// 400 `context_length_exceeded` if the prompt leaves no room, or `asked` does not fit and may not be lowered.
    pub fn fit_max_tokens(&self, prompt: usize, asked: Option<u64>, clamp: bool, param: &str, prompt_param: &str) -> Result<u32, ApiError> {
        let context = self.context_max as usize;
        let room = context.saturating_sub(prompt);
        let wanted = asked.unwrap_or(room as u64);
        if prompt > context || (room == 0 && wanted > 0) || (room == 0 && asked.is_none()) {
            return Err(prompt_too_long(prompt, context, prompt_param));
        }
        if wanted <= room as u64 {
            return Ok(wanted as u32);
        }
        if clamp || self.clamp_max_tokens {
            return Ok(room as u32);
        }
        Err(ApiError::context_length(
            param,
            format!(
                "this model's context is {context} tokens, but {} were requested ({prompt} in the prompt, {wanted} for the completion); \
                 lower `{param}` to at most {room}, or send `clamp_max_tokens: true`",
                wanted.saturating_add(prompt as u64)
            ),
        ))
    }
}

fn prompt_too_long(prompt: usize, context: usize, param: &str) -> ApiError {
    ApiError::context_length(
        param,
        format!(
            "this model's context is {context} tokens, but the prompt has {prompt} and needs room for at least one more; \
             shorten the prompt, or send `truncate_prompt_tokens`"
        ),
    )
}

#[cfg(test)]
pub(crate) fn test_rules() -> Rules {
    Rules {
        model: "m".to_owned(),
        context_max: 100,
        vocab_known: 1000,
        eos: vec![2],
        defaults: SamplingParams::default(),
        strict: false,
        clamp_max_tokens: false,
        choices_max: CHOICES_MAX,
        prompts_max: 4,
        stops_max: 8,
        tool_dialect: ToolDialect::Hermes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_that_is_too_long_is_told_both_numbers() {
        let error = test_rules().fit_max_tokens(286, None, false, "max_tokens", "messages").expect_err("too long");
        assert_eq!(error.code, Some("context_length_exceeded"));
        assert!(error.message.contains("286") && error.message.contains("100") && !error.message.contains('-'), "{}", error.message);
    }

    #[test]
    fn max_tokens_fits_is_refused_or_is_lowered() {
        let rules = test_rules();
        assert_eq!(rules.fit_max_tokens(40, None, false, "max_tokens", "prompt"), Ok(60));
        assert_eq!(rules.fit_max_tokens(40, Some(60), false, "max_tokens", "prompt"), Ok(60));
        assert_eq!(rules.fit_max_tokens(40, Some(61), true, "max_tokens", "prompt"), Ok(60));
        assert!(rules.fit_max_tokens(40, Some(61), false, "max_tokens", "prompt").is_err());
        assert!(rules.fit_max_tokens(100, None, true, "max_tokens", "prompt").is_err());
        assert_eq!(rules.fit_max_tokens(100, Some(0), false, "max_tokens", "prompt"), Ok(0));
    }
}
