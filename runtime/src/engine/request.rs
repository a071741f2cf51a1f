//! What makes a request acceptable: every id, count and bound checked once, at submission.

use super::api::{EngineRequest, RejectReason};
use super::options::EngineLimits;
use oxide_bundle::step::TOP_LOGPROBS_MAX;

/// Checks `request` against `limits`.
///
/// # Errors
/// [`RejectReason::Invalid`] names the field, the value and the bound; [`RejectReason::NeverFits`] if
/// the worst case is larger than the pool.
pub(super) fn check_request(request: &EngineRequest, limits: &EngineLimits) -> Result<(), RejectReason> {
    check_counts(request, limits)?;
    check_ids("prompt", request.prompt.iter(), limits)?;
    check_ids("stop_ids", request.stop_ids.iter(), limits)?;
    check_ids("logit_bias", request.sampling.logit_bias.iter().map(|(id, _)| id), limits)?;
    check_sampling(request, limits)?;
    let need = worst_pages(request, limits.page_tokens);
    if need > limits.kv_pages {
        return Err(RejectReason::NeverFits { need, pool: limits.kv_pages });
    }
    Ok(())
}

impl EngineRequest {
    /// KV pages that the request needs at most, sharing nothing with others: what admission reserves.
    pub fn pages_max(&self, page_tokens: u32) -> u32 {
        worst_pages(self, page_tokens)
    }
}

/// Pages that a request needs at most, sharing nothing: its prompt's full pages once, the rest for each choice.
pub(super) fn worst_pages(request: &EngineRequest, page_tokens: u32) -> u32 {
    let prompt = request.prompt.len() as u64;
    let page = u64::from(page_tokens.max(1));
    let shared = prompt / page;
    let each = kv_positions(request).div_ceil(page) - shared;
    u32::try_from(shared + each * u64::from(request.n)).unwrap_or(u32::MAX)
}

/// Positions that one choice writes at most: the last token drawn is never fed back.
pub(super) fn kv_positions(request: &EngineRequest) -> u64 {
    request.prompt.len() as u64 + u64::from(request.max_tokens.max(1)) - 1
}

fn check_counts(request: &EngineRequest, limits: &EngineLimits) -> Result<(), RejectReason> {
    let total = request.prompt.len() as u64 + u64::from(request.max_tokens);
    if request.prompt.is_empty() {
        return invalid("the prompt is empty".to_owned());
    }
    if total > u64::from(limits.context_max) {
        let (prompt, max_tokens, context) = (request.prompt.len(), request.max_tokens, limits.context_max);
        return invalid(format!("{prompt} prompt tokens and max_tokens {max_tokens} exceed the context of {context}"));
    }
    if request.n == 0 || request.n > limits.seqs_max {
        return invalid(format!("n is {}, allowed are 1 to {}", request.n, limits.seqs_max));
    }
    if request.max_tokens == 0 && request.prompt_logprobs.is_none() {
        return invalid("max_tokens is 0 and no prompt log-probabilities are asked for".to_owned());
    }
    Ok(())
}

fn check_ids<'a>(field: &str, mut ids: impl Iterator<Item = &'a u32>, limits: &EngineLimits) -> Result<(), RejectReason> {
    match ids.find(|id| **id >= limits.vocab_known) {
        Some(id) => invalid(format!("{field} holds id {id}, the vocabulary has {}", limits.vocab_known)),
        None => Ok(()),
    }
}

fn check_sampling(request: &EngineRequest, limits: &EngineLimits) -> Result<(), RejectReason> {
    let wanted = request.sampling.logprobs.max(request.prompt_logprobs).unwrap_or(0);
    if wanted > TOP_LOGPROBS_MAX {
        return invalid(format!("{wanted} log-probabilities are asked for, allowed are {TOP_LOGPROBS_MAX}"));
    }
    let bias = request.sampling.logit_bias.len() + request.stop_ids.len();
    if bias > limits.bias_max as usize {
        return invalid(format!("logit_bias and stop_ids hold {bias} ids, allowed are {}", limits.bias_max));
    }
    let history = (request.prompt.len() as u64 + u64::from(request.max_tokens)).min(u64::from(limits.vocab_known));
    if request.sampling.has_penalties() && history > u64::from(limits.history_max) {
        return invalid(format!("penalties would look at {history} ids, allowed are {}", limits.history_max));
    }
    Ok(())
}

fn invalid(message: String) -> Result<(), RejectReason> {
    Err(RejectReason::Invalid(message))
}
