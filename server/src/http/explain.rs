//! `POST /v1/explain`: what a request would do, without doing it.
//!
//! Takes the body of either text endpoint and refuses what that would refuse. Says the prompt as text
//! and ids, every sampling value in force with its origin, what ends the text, the memory needed, and
//! what admission and the prefix cache would say now.

use super::auth::Owner;
use super::body::read_fields;
use super::explain_constraint::explain_constraint;
use super::generate::{self, Caller, Tokens, Work, apply_headers, body_size, count_unknown};
use super::respond::json;
use super::served::{Served, rounded};
use super::state::State;
use super::tokenize::off_thread;
use crate::faults::Place;
use crate::openai::chat_request::read_chat;
use crate::openai::choice::ChoiceRules;
use crate::openai::common::check_min_tokens;
use crate::openai::completion_request::read_completion;
use crate::openai::error::ApiError;
use crate::openai::fields::Fields;
use crate::openai::wire::{Endpoint, token_text};
use axum::extract::{Extension, Request, State as Shared};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use oxide_runtime::engine::{EngineRequest, Miss, PrefixProbe, SamplingParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Fields whose origin is told.
const TOLD: [&str; 11] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "max_completion_tokens",
];
/// Which told fields the request names.
struct Named(BTreeMap<&'static str, bool>);

impl Named {
    fn of(fields: &Fields) -> Self {
        Self(TOLD.into_iter().map(|name| (name, fields.has(name))).collect())
    }

    fn has(&self, name: &str) -> bool {
        self.0.get(name).copied().unwrap_or(false)
    }
}

/// The handler.
pub(crate) async fn explain(
    Shared(state): Shared<Arc<State>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.model()?);
    let size = body_size(&parts.headers);
    let fields = read_fields(&parts.headers, body, &state.options).await?;
    let named = Named::of(&fields);
    let mut work = read_work(&state, &served, &parts.headers, size, fields).await?;
    let constraint = explain_constraint(&served, work.common.constraint.clone()).await?;
    let rules = choice_rules(&served, &mut work);
    let mut prompts = Vec::with_capacity(work.prompts.len());
    for index in 0..work.prompts.len() {
        prompts.push(explain_prompt(&state, &served, &caller, &rules, &mut work, index).await?);
    }
    let body = json!({
        "object": "explanation", "model": served.rules.model, "seal": served.model.seal,
        "endpoint": match work.endpoint { Endpoint::Chat => "chat.completions", Endpoint::Completion => "completions" },
        "prompts": prompts, "n": work.common.n, "sampling": sampling(&state, &work, &named), "stop": stops(&rules),
        "min_tokens": work.common.min_tokens, "constraint": constraint, "stream": work.common.stream.is_some(),
    });
    Ok(json(StatusCode::OK, body.to_string()))
}

/// Reads and tokenizes the body of either text endpoint: a conversation if it has `messages`.
pub(super) async fn read_work(
    state: &State,
    served: &Arc<Served>,
    headers: &HeaderMap,
    size: usize,
    fields: Fields,
) -> Result<Work, ApiError> {
    let theirs = Arc::clone(served);
    if fields.has("messages") {
        let mut read = read_chat(fields, &served.rules)?;
        count_unknown(state, read.unknown_fields);
        apply_headers(&mut read.common, headers)?;
        off_thread(state, size, move || generate::chat_work(&theirs, read)).await
    } else {
        let mut read = read_completion(fields, &served.rules)?;
        count_unknown(state, read.unknown_fields);
        apply_headers(&mut read.common, headers)?;
        off_thread(state, size, move || generate::completion_work(&theirs, read)).await
    }
}

pub(super) fn choice_rules(served: &Served, work: &mut Work) -> ChoiceRules {
    ChoiceRules {
        tokenizer: Arc::clone(&served.model.text.tokenizer),
        stop: work.common.stop.clone(),
        eos: served.rules.eos.clone(),
        skip_special_tokens: work.common.skip_special_tokens,
        calls: work.calls.take(),
    }
}

async fn explain_prompt(
    state: &State,
    served: &Served,
    caller: &Caller,
    rules: &ChoiceRules,
    work: &mut Work,
    index: usize,
) -> Result<Value, ApiError> {
    let (max_tokens_param, prompt_param, asked) = (work.max_tokens_param, work.prompt_param, work.max_tokens);
    let (clamp, min_tokens, keep) = (work.common.clamp_max_tokens, work.common.min_tokens, work.common.truncate_prompt_tokens);
    let Some(tokens) = work.prompts.get_mut(index) else { return Ok(Value::Null) };
    if let Some(count) = keep {
        tokens.truncate(count as usize);
    }
    let Tokens { ids, .. } = tokens;
    let ids = Arc::clone(ids);
    let max_tokens = served.rules.fit_max_tokens(ids.len(), asked, clamp, max_tokens_param, prompt_param)?;
    check_min_tokens(min_tokens, max_tokens)?;
    let request = EngineRequest { prompt: ids.to_vec(), max_tokens, ..generate::engine_request(state, caller, "explain", rules, work) };
    state.options.faults.pass(Place::Probe).await;
    let probe = probe(served, &request).await?;
    Ok(json!({
        "text": rules.tokenizer.decode(&ids, false), "tokens": *ids, "count": ids.len(), "max_tokens": max_tokens,
        "memory": memory(served, &request), "admission": admission(state, served, caller.owner, &request, &probe),
        "prefix_cache": prefix(served, &request, &probe),
    }))
}

/// Asks the engine thread, between two steps.
pub(super) async fn probe(served: &Served, request: &EngineRequest) -> Result<PrefixProbe, ApiError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    served.model.engine.probe_prefix(&request.prompt, &request.cache_salt, move |probe| {
        let _ = sender.send(probe);
    });
    receiver.await.map_err(|_| ApiError::unavailable("engine_failed", "the engine has stopped"))
}

fn memory(served: &Served, request: &EngineRequest) -> Value {
    let manifest = &served.model.manifest;
    let page_tokens = served.model.engine.limits().page_tokens;
    let pages = request.pages_max(page_tokens);
    let page_bytes = manifest.ledger.kv_bytes_per_token.saturating_mul(u64::from(page_tokens));
    json!({"kv_pages_max": pages, "kv_bytes_max": page_bytes.saturating_mul(u64::from(pages)), "page_tokens": page_tokens})
}

/// What would happen to the request if it came now.
fn admission(state: &State, served: &Served, owner: Owner, request: &EngineRequest, probe: &PrefixProbe) -> Value {
    let refused = |code: Option<&str>, reason: String| json!({"verdict": "refused", "code": code, "reason": reason});
    if let Err(error) = state.ready_model() {
        return refused(error.code, error.message);
    }
    let engine = &served.model.engine;
    let limits = engine.limits();
    if let Err(reason) = engine.would_take(request) {
        let error = super::generation::reject_error(reason);
        return refused(error.code, error.message);
    }
    if let Err(error) = state.has_quota(owner) {
        return refused(error.code, error.message);
    }
    let (stats, backlog) = (engine.stats(), engine.backlog());
    let need = request.pages_max(limits.page_tokens).saturating_sub(probe.cached_tokens / limits.page_tokens.max(1));
    let reason = if stats.waiting > 0 {
        Some(format!("{} requests wait before it", stats.waiting))
    } else if stats.running + request.n > limits.seqs_max {
        Some(format!("{} of {} sequences run", stats.running, limits.seqs_max))
    } else if need > probe.pages_available {
        Some(format!("it needs {need} KV pages, {} are not spoken for", probe.pages_available))
    } else {
        None
    };
    let wait = reason.is_some().then_some(backlog.drain.as_secs_f64() * 1e3);
    json!({
        "verdict": if reason.is_some() { "waits" } else { "at once" }, "reason": reason, "expected_wait_ms": wait,
        "kv_pages_needed": need, "kv_pages_available": probe.pages_available, "running": stats.running, "waiting": stats.waiting,
    })
}

fn prefix(served: &Served, request: &EngineRequest, probe: &PrefixProbe) -> Value {
    let PrefixProbe { cached_tokens, cacheable_tokens, pinned_tokens, miss, .. } = *probe;
    // Prompt log-probabilities need every prompt token computed.
    let used = if request.prompt_logprobs.is_some() { 0 } else { cached_tokens };
    json!({
        "expected_cached_tokens": used, "cacheable_tokens": cacheable_tokens, "pinned_tokens": pinned_tokens,
        "miss": if used < cached_tokens {
            json!({"reason": "prompt_logprobs", "message": "log-probabilities of the prompt are asked for, so all of it is computed"})
        } else {
            miss.map_or(Value::Null, |miss| explain_miss(served, request, cached_tokens, miss))
        },
    })
}

fn explain_miss(served: &Served, request: &EngineRequest, cached: u32, miss: Miss) -> Value {
    let page = served.model.engine.limits().page_tokens;
    match miss {
        Miss::Disabled => json!({"reason": "disabled", "message": "the prefix cache is switched off (--no-prefix-cache)"}),
        Miss::TooShort => json!({
            "reason": "too_short",
            "message": format!("only whole pages of {page} tokens before the last token are shared; the prompt has {}", request.prompt.len()),
        }),
        Miss::Differs { token } => {
            let id = request.prompt.get(token as usize).copied().unwrap_or_default();
            let text = token_text(&served.model.text.tokenizer, id);
            json!({
                "reason": "differs", "token": token,
                "message": format!("the nearest cached prompt differs from token {token} on ({id}, {text:?}); sharing ends at the page before"),
            })
        }
        Miss::Absent => json!({
            "reason": "absent",
            "message": format!("nothing is cached after token {cached}: not computed yet with this `cache_salt`, or evicted ({} pages were)",
                served.model.engine.stats().evictions),
        }),
    }
}

/// Every sampling value in force, and where it came from.
fn sampling(state: &State, work: &Work, named: &Named) -> Value {
    let SamplingParams {
        temperature,
        top_p,
        top_k,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        ref logit_bias,
        seed,
        ..
    } = work.common.sampling;
    let model = if state.options.neutral_sampling { "server (--openai-defaults)" } else { "generation_config" };
    let told =
        |name: &str, otherwise: &str, value: Value| json!({"value": value, "from": if named.has(name) { "request" } else { otherwise }});
    let bias: Vec<Value> = logit_bias.iter().map(|(id, bias)| json!([id, rounded(*bias)])).collect();
    json!({
        "temperature": told("temperature", model, rounded(temperature)),
        "top_p": told("top_p", model, rounded(top_p)),
        "top_k": told("top_k", model, top_k.into()),
        "min_p": told("min_p", model, rounded(min_p)),
        "repetition_penalty": told("repetition_penalty", model, rounded(repetition_penalty)),
        "presence_penalty": told("presence_penalty", "default", rounded(presence_penalty)),
        "frequency_penalty": told("frequency_penalty", "default", rounded(frequency_penalty)),
        "logit_bias": told("logit_bias", "default", bias.into()),
        // A seed of the server's is drawn anew for each request.
        "seed": told("seed", "random", if named.has("seed") { (seed as i64).into() } else { Value::Null }),
        "max_tokens": max_tokens(work, named),
        "greedy": temperature == 0.0,
    })
}

fn max_tokens(work: &Work, named: &Named) -> Value {
    let from = match (named.has("max_tokens") || named.has("max_completion_tokens"), work.max_tokens) {
        (true, _) => "request",
        (false, Some(_)) => "default",
        (false, None) => "context",
    };
    json!({"value": work.max_tokens, "from": from})
}

/// What ends the text, and by whose wish.
fn stops(rules: &ChoiceRules) -> Value {
    let tokenizer = &rules.tokenizer;
    let own = |id: &u32| !rules.stop.ignore_eos && rules.eos.contains(id);
    let ids: Vec<Value> = rules
        .engine_stop_ids()
        .iter()
        .map(|id| json!({"id": id, "text": token_text(tokenizer, *id), "from": if own(id) { "model" } else { "request" }}))
        .collect();
    json!({"ids": ids, "strings": rules.stop.strings, "ignore_eos": rules.stop.ignore_eos, "kept_in_text": rules.stop.include_in_output})
}
