//! From flags and the model's defaults to an engine request.

use super::args::SamplingArgs;
use super::error::CliError;
use crate::model::LoadedModel;
use oxide_bundle::manifest::GenerationDefaults;
use oxide_runtime::engine::{EngineRequest, SamplingParams};
use std::time::{SystemTime, UNIX_EPOCH};

/// Checks ranges and fills in the model's defaults.
pub(super) fn sampling(args: &SamplingArgs, defaults: &GenerationDefaults) -> Result<SamplingParams, CliError> {
    let params = SamplingParams {
        temperature: args.temperature.unwrap_or(defaults.temperature.get()),
        top_p: args.top_p.unwrap_or(defaults.top_p.get()),
        top_k: args.top_k.unwrap_or(defaults.top_k),
        min_p: args.min_p.unwrap_or(defaults.min_p.get()),
        repetition_penalty: args.repetition_penalty.unwrap_or(defaults.repetition_penalty.get()),
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        logit_bias: Vec::new(),
        seed: args.seed.unwrap_or_else(clock_seed),
        logprobs: None,
    };
    check("--temperature", params.temperature, 0.0, 100.0)?;
    check("--top-p", params.top_p, 0.0, 1.0)?;
    check("--min-p", params.min_p, 0.0, 1.0)?;
    check("--repetition-penalty", params.repetition_penalty, 0.01, 10.0)?;
    check("--presence-penalty", params.presence_penalty, -2.0, 2.0)?;
    check("--frequency-penalty", params.frequency_penalty, -2.0, 2.0)?;
    if args.stop.iter().any(String::is_empty) {
        return Err(CliError::Request("--stop is empty: give at least one character".into()));
    }
    Ok(params)
}

fn check(flag: &str, value: f32, low: f32, high: f32) -> Result<(), CliError> {
    match (low..=high).contains(&value) {
        true => Ok(()),
        false => Err(CliError::Request(format!("{flag} is {value}, allowed are {low} to {high}"))),
    }
}

fn clock_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// The engine request of a prompt, checked against the model's limits with messages for people.
pub(super) fn request(
    model: &LoadedModel,
    id: String,
    prompt: Vec<u32>,
    args: &SamplingArgs,
    sampling: SamplingParams,
    max_tokens: Option<u32>,
) -> Result<EngineRequest, CliError> {
    let max_tokens = budget(model, &prompt, max_tokens)?;
    Ok(EngineRequest {
        min_tokens: args.min_tokens.min(max_tokens),
        stop_ids: if args.ignore_eos { Vec::new() } else { model.eos().to_vec() },
        sampling,
        ..EngineRequest::greedy(id, prompt, max_tokens)
    })
}

/// Completion tokens allowed: what was asked for if it fits, all that fits if nothing was asked for.
fn budget(model: &LoadedModel, prompt: &[u32], asked: Option<u32>) -> Result<u32, CliError> {
    let limits = model.engine.limits();
    let (context, origin) = (limits.context_max, &model.manifest().limits.context_origin);
    let length = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    if length == 0 {
        return Err(CliError::Request("the prompt has no tokens: give at least one".into()));
    }
    if let Some(&id) = prompt.iter().find(|&&id| id >= limits.vocab_known) {
        return Err(CliError::Request(format!(
            "token id {id} is outside the vocabulary: ids are 0 to {}",
            limits.vocab_known.saturating_sub(1)
        )));
    }
    if length >= context {
        return Err(CliError::Request(format!(
            "the prompt has {length} tokens, but the context of {context} (from {origin}) must hold prompt and answer: \
             shorten it to {} or fewer, or compile with a larger --max-context",
            context.saturating_sub(1)
        )));
    }
    let room = context - length;
    match asked {
        Some(0) => Err(CliError::Request("--max-tokens is 0: ask for at least one token".into())),
        Some(asked) if asked > room => Err(CliError::Request(format!(
            "prompt ({length} tokens) and --max-tokens {asked} exceed the context of {context} (from {origin}): ask for {room} or fewer"
        ))),
        Some(asked) => Ok(asked),
        None => Ok(room),
    }
}
