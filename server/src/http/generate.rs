//! The two endpoints that generate: from a checked request to a running generation, and its answer.

use super::auth::Owner;
use super::body::read_fields;
use super::generation::{Echo, Generation, Run, Start, reject_error};
use super::respond::{json, typed};
use super::served::Served;
use super::state::State;
use super::stream::{EventBody, EventWriter};
use super::tokenize::off_thread;
use crate::faults::Place;
use crate::grammar::{Compiled, Constraint};
use crate::journal::Recording;
use crate::openai::chat_request::{ChatRequest, read_chat};
use crate::openai::choice::ChoiceRules;
use crate::openai::common::{Common, check_min_tokens};
use crate::openai::completion_request::{CompletionRequest, Prompt, read_completion};
use crate::openai::error::ApiError;
use crate::openai::fields;
use crate::openai::id::random_id;
use crate::openai::rules::DEADLINE_MS_MAX;
use crate::openai::wire::{Chunks, Endpoint, Envelope};
use crate::tools::CallForm;
use axum::body::Body;
use axum::extract::{Extension, Request, State as Shared};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use oxide_runtime::engine::{EngineRequest, EventStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a streamed request may turn out to be refused with a status of its own, before its head is sent.
const FIRST_EVENT_TIME: Duration = Duration::from_millis(200);

/// Who asks, under which id, since when.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) owner: Owner,
    pub(crate) request_id: String,
    pub(crate) accepted: Instant,
}

/// A request of either endpoint, tokenized.
pub(super) struct Work {
    pub(super) endpoint: Endpoint,
    pub(super) prompts: Vec<Tokens>,
    pub(super) max_tokens: Option<u64>,
    pub(super) max_tokens_param: &'static str,
    pub(super) prompt_param: &'static str,
    pub(super) logprobs: Option<u32>,
    pub(super) echo: bool,
    pub(super) calls: Option<CallForm>,
    pub(super) common: Common,
}

/// A tokenized prompt.
pub(super) struct Tokens {
    pub(super) ids: Arc<[u32]>,
    /// Leading ids that the text did not ask for.
    pub(super) added: usize,
}

/// `POST /v1/completions`.
pub(crate) async fn completions(
    Shared(state): Shared<Arc<State>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.ready_model()?);
    let fields = read_fields(&parts.headers, body, &state.options).await?;
    let mut read = read_completion(fields, &served.rules)?;
    count_unknown(&state, read.unknown_fields);
    apply_headers(&mut read.common, &parts.headers)?;
    let size = read.prompts.iter().map(prompt_bytes).sum();
    let work = off_thread(&state, size, {
        let served = Arc::clone(&served);
        move || completion_work(&served, read)
    })
    .await?;
    answer(&state, &served, caller, work).await
}

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(
    Shared(state): Shared<Arc<State>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.ready_model()?);
    let (size, fields) = {
        let size = body_size(&parts.headers);
        (size, read_fields(&parts.headers, body, &state.options).await?)
    };
    let mut read = read_chat(fields, &served.rules)?;
    count_unknown(&state, read.unknown_fields);
    apply_headers(&mut read.common, &parts.headers)?;
    let work = off_thread(&state, size, {
        let served = Arc::clone(&served);
        move || chat_work(&served, read)
    })
    .await?;
    answer(&state, &served, caller, work).await
}

/// `POST /v1/chat/completions/render`: the prompt of a chat request, as text and ids, without generating.
pub(crate) async fn render(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.model()?);
    let size = body_size(&parts.headers);
    let read = read_chat(read_fields(&parts.headers, body, &state.options).await?, &served.rules)?;
    count_unknown(&state, read.unknown_fields);
    let (text, ids) = off_thread(&state, size, {
        let served = Arc::clone(&served);
        move || {
            let rendered = served.render(read.messages, read.tools.rendered, read.add_generation_prompt, read.template_kwargs)?;
            Ok((rendered.text(), served.encode_rendered(&rendered)?))
        }
    })
    .await?;
    let body = serde_json::json!({
        "object": "chat.completion.prompt", "model": served.rules.model, "prompt": text, "tokens": ids, "token_ids": ids, "count": ids.len(),
        "max_model_len": served.rules.context_max,
    });
    Ok(json(StatusCode::OK, body.to_string()))
}

/// What a request's text amounts to, before it is read.
pub(crate) fn body_size(headers: &HeaderMap) -> usize {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    length.unwrap_or(usize::MAX)
}

fn prompt_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Ids(_) => 0,
    }
}

pub(crate) fn count_unknown(state: &State, count: usize) {
    state.metrics.unknown_fields.fetch_add(count as u64, Ordering::Relaxed);
}

/// Headers that say the same as fields; the shorter time wins.
pub(super) fn apply_headers(common: &mut Common, headers: &HeaderMap) -> Result<(), ApiError> {
    let shorter = |field: Option<Duration>, header: Option<Duration>| match (field, header) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    common.deadline = shorter(common.deadline, header_millis(headers, "x-deadline-ms", 1)?);
    common.queue_time_max = shorter(common.queue_time_max, header_millis(headers, "x-max-queue-ms", 0)?);
    common.trace |= header_flag(headers, "x-trace")?;
    Ok(())
}

fn header_millis(headers: &HeaderMap, name: &'static str, least: i64) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| serde_json::from_str(text.trim()).ok());
    let number = number.filter(serde_json::Value::is_number).ok_or_else(|| bad_header(name, "an integer", value))?;
    fields::integer(name, &number, least..=DEADLINE_MS_MAX).map(|millis| Some(Duration::from_millis(millis as u64)))
}

/// `1` and `true`, or `0` and `false`.
fn header_flag(headers: &HeaderMap, name: &'static str) -> Result<bool, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(false) };
    let is = |words: [&str; 2]| words.iter().any(|word| value.as_bytes().trim_ascii().eq_ignore_ascii_case(word.as_bytes()));
    match (is(["1", "true"]), is(["0", "false"])) {
        (false, false) => Err(bad_header(name, "1 or 0", value)),
        (on, _) => Ok(on),
    }
}

fn bad_header(name: &'static str, wanted: &str, value: &header::HeaderValue) -> ApiError {
    const CHARS: usize = 40;
    let text: String = String::from_utf8_lossy(value.as_bytes()).chars().take(CHARS).collect();
    let found = if text.trim().is_empty() { "empty".to_owned() } else { format!("`{text}`") };
    ApiError { code: Some("invalid_type"), ..ApiError::invalid(name, format!("the header `{name}` must be {wanted}, not {found}")) }
}

pub(super) fn completion_work(served: &Served, read: CompletionRequest) -> Result<Work, ApiError> {
    let CompletionRequest { prompts, max_tokens, echo, logprobs, add_special_tokens, common, unknown_fields: _ } = read;
    let tokens = prompts.into_iter().map(|prompt| tokenize(served, prompt, add_special_tokens)).collect::<Result<Vec<_>, _>>()?;
    Ok(Work {
        endpoint: Endpoint::Completion,
        prompts: tokens,
        max_tokens: Some(max_tokens),
        max_tokens_param: "max_tokens",
        prompt_param: "prompt",
        logprobs,
        echo,
        calls: None,
        common,
    })
}

fn tokenize(served: &Served, prompt: Prompt, add_special_tokens: bool) -> Result<Tokens, ApiError> {
    let (ids, added) = match prompt {
        Prompt::Ids(ids) => (ids, 0),
        Prompt::Text(text) => {
            let added = usize::from(add_special_tokens && served.model.text.tokenizer.bos().is_some());
            (served.encode_prompt(&text, add_special_tokens)?, added)
        }
    };
    if ids.is_empty() {
        return Err(ApiError::invalid("prompt", "`prompt` is empty: it has no token, and this model's tokenizer adds none"));
    }
    Ok(Tokens { ids: ids.into(), added })
}

pub(super) fn chat_work(served: &Served, read: ChatRequest) -> Result<Work, ApiError> {
    let ChatRequest {
        messages,
        tools,
        max_tokens,
        max_tokens_param,
        logprobs,
        add_generation_prompt,
        template_kwargs,
        common,
        unknown_fields: _,
    } = read;
    let calls = tools.form(served.model.tool_dialect);
    let rendered = served.render(messages, tools.rendered, add_generation_prompt, template_kwargs)?;
    let ids = served.encode_rendered(&rendered)?;
    if ids.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` render to an empty prompt"));
    }
    Ok(Work {
        endpoint: Endpoint::Chat,
        prompts: vec![Tokens { ids: ids.into(), added: 0 }],
        max_tokens,
        max_tokens_param,
        prompt_param: "messages",
        logprobs,
        echo: false,
        calls,
        common,
    })
}

impl Tokens {
    /// Keeps the last `count` ids.
    pub(super) fn truncate(&mut self, count: usize) {
        let cut = self.ids.len().saturating_sub(count);
        self.added = self.added.saturating_sub(cut);
        self.ids = self.ids.get(cut..).unwrap_or_default().into();
    }
}

/// Submits the work and answers it, streamed or whole.
async fn answer(state: &Arc<State>, served: &Arc<Served>, caller: Caller, mut work: Work) -> Result<Response, ApiError> {
    let live = state.enter(caller.owner)?;
    let compiled = compile(served, work.common.constraint.clone()).await?;
    state.options.faults.pass(Place::Submit).await;
    let prefix = match work.endpoint {
        Endpoint::Chat => "chatcmpl-",
        Endpoint::Completion => "cmpl-",
    };
    let envelope = Envelope {
        endpoint: work.endpoint,
        id: random_id(prefix),
        created: super::state::unix_seconds(),
        model: served.rules.model.clone(),
        fingerprint: served.fingerprint.clone(),
    };
    let rules = Arc::new(ChoiceRules {
        tokenizer: Arc::clone(&served.model.text.tokenizer),
        stop: std::mem::take(&mut work.common.stop),
        eos: served.rules.eos.clone(),
        skip_special_tokens: work.common.skip_special_tokens,
        calls: work.calls.take(),
    });
    let runs = start_runs(state, served, &caller, &envelope.id, &rules, &mut work, compiled.as_ref())?;
    let names = state.name(&envelope.id, &caller.request_id, caller.owner);
    let start = Start {
        state: Arc::clone(state),
        rules: Arc::clone(&rules),
        traced: work.common.trace,
        accepted: caller.accepted,
        request_id: caller.request_id,
        live,
        names,
    };
    let generation = Generation::new(start, runs);
    match work.common.stream {
        None => answer_whole(generation, &envelope, work.logprobs.is_some()).await,
        Some(options) => {
            let writer = EventWriter::new(Chunks::new(envelope, options.include_usage), options, work.logprobs.is_some(), generation.len());
            answer_streamed(generation, writer, state.options.keep_alive).await
        }
    }
}

/// Compiles a request's constraint, away from the server's own threads.
pub(super) async fn compile(served: &Served, constraint: Option<Constraint>) -> Result<Option<Compiled>, ApiError> {
    let Some(constraint) = constraint else { return Ok(None) };
    let compiled = served.grammars.compile_apart(constraint).await;
    compiled.map(Some).map_err(|error| ApiError::invalid(error.param.clone(), error.to_string()))
}

/// Refuses a limit below the shortest output that satisfies the constraint. A forced call may break off.
fn check_shortest(compiled: Option<&Compiled>, forced_call: bool, limit: u32, param: &str) -> Result<(), ApiError> {
    match compiled.and_then(Compiled::shortest) {
        Some(shortest) if shortest > u64::from(limit) && !forced_call => Err(ApiError::invalid(
            param,
            format!(
                "the completion may have {limit} tokens, but the shortest output that satisfies its constraint has {shortest}; raise `{param}`"
            ),
        )),
        _ => Ok(()),
    }
}

/// Checks every prompt against the limits, then submits them all.
fn start_runs(
    state: &State,
    served: &Served,
    caller: &Caller,
    id: &str,
    rules: &Arc<ChoiceRules>,
    work: &mut Work,
    compiled: Option<&Compiled>,
) -> Result<Vec<Run>, ApiError> {
    let Work { common, max_tokens_param, prompt_param, .. } = work;
    let mut requests = Vec::with_capacity(work.prompts.len());
    for tokens in &mut work.prompts {
        if let Some(count) = common.truncate_prompt_tokens {
            tokens.truncate(count as usize);
        }
        let limit =
            served.rules.fit_max_tokens(tokens.ids.len(), work.max_tokens, common.clamp_max_tokens, max_tokens_param, prompt_param)?;
        check_min_tokens(common.min_tokens, limit)?;
        check_shortest(compiled, rules.calls.as_ref().is_some_and(CallForm::is_forced), limit, max_tokens_param)?;
        requests.push(limit);
    }
    let template = engine_request(state, caller, id, rules, work);
    let constraint = work.common.constraint.as_ref();
    let record = |request: &EngineRequest| record(state, served, caller, request, constraint);
    let prompts = work.prompts.iter().zip(requests);
    prompts
        .map(|(tokens, max_tokens)| {
            start_run(served, rules, work, &with_mask(&template, compiled, max_tokens), tokens, max_tokens, &record)
        })
        .collect()
}

fn with_mask(template: &EngineRequest, compiled: Option<&Compiled>, max_tokens: u32) -> EngineRequest {
    EngineRequest { mask: compiled.map(|compiled| compiled.clone().masks(max_tokens)), ..template.clone() }
}

fn start_run(
    served: &Served,
    rules: &Arc<ChoiceRules>,
    work: &Work,
    template: &EngineRequest,
    tokens: &Tokens,
    max_tokens: u32,
    record: &dyn Fn(&EngineRequest) -> Option<Recording>,
) -> Result<Run, ApiError> {
    let mut recording = None;
    let echo = work.echo.then(|| Echo {
        text: rules.tokenizer.decode(tokens.ids.get(tokens.added..).unwrap_or_default(), false),
        logprobs: work.logprobs.map(|_| Vec::new()),
        skipped: tokens.added,
    });
    let stream: Option<EventStream> = if max_tokens == 0 && template.prompt_logprobs.is_none() {
        None
    } else {
        let request = EngineRequest { prompt: tokens.ids.to_vec(), max_tokens, ..template.clone() };
        recording = record(&request);
        let stream = served.model.engine.submit(request);
        Some(stream.inspect_err(|_| recording.iter_mut().for_each(Recording::discard)).map_err(reject_error)?)
    };
    let mut run = Run::new(rules, work.common.n, Arc::clone(&tokens.ids), stream, echo);
    run.recording = recording;
    Ok(run)
}

/// Starts the journal's entry, if there is a journal.
fn record(state: &State, served: &Served, caller: &Caller, request: &EngineRequest, constraint: Option<&Constraint>) -> Option<Recording> {
    let seal = served.model.seal.as_deref().unwrap_or_default();
    state.journal.as_ref().map(|journal| journal.record(request, constraint, seal, &caller.request_id))
}

/// The engine request of every prompt but for the prompt and its limit.
pub(super) fn engine_request(state: &State, caller: &Caller, id: &str, rules: &ChoiceRules, work: &Work) -> EngineRequest {
    let Common { n, sampling, min_tokens, cache_salt, deadline, queue_time_max, .. } = &work.common;
    let mut sampling = sampling.clone();
    sampling.logprobs = work.logprobs;
    let options = &state.options;
    EngineRequest {
        id: id.to_owned(),
        prompt: Vec::new(),
        n: *n,
        max_tokens: 0,
        min_tokens: *min_tokens,
        stop_ids: rules.engine_stop_ids(),
        sampling,
        prompt_logprobs: work.logprobs.filter(|_| work.echo),
        mask: None,
        cache_salt: cache_salt.clone(),
        fair_key: caller.owner.0,
        deadline: deadline.or(options.deadline_default).and_then(|time| caller.accepted.checked_add(time)),
        queue_time_max: queue_time_max.or(options.queue_time_max),
    }
}

async fn answer_whole(mut generation: Generation, envelope: &Envelope, logprobs: bool) -> Result<Response, ApiError> {
    generation.state().options.faults.pass(Place::Wait).await;
    generation.finish().await?;
    let traced = generation.traced;
    let choices = generation.choices().map(|slot| (&slot.choice, slot.trace.as_ref().filter(|_| traced)));
    let body = envelope.answer(&generation.rules.tokenizer, choices, logprobs, &generation.usage())?;
    Ok(json(StatusCode::OK, body))
}

/// Sends the head once something happened, or soon: a refusal that comes at once keeps its status.
async fn answer_streamed(mut generation: Generation, mut writer: EventWriter, keep_alive: Duration) -> Result<Response, ApiError> {
    generation.state().options.faults.pass(Place::Wait).await;
    let first = std::future::poll_fn(|context| generation.poll(context));
    if let Ok(first) = tokio::time::timeout(FIRST_EVENT_TIME.min(keep_alive), first).await {
        first?;
        writer.write(&mut generation)?;
    }
    let body = Body::from_stream(EventBody::new(generation, writer, keep_alive));
    let mut response = typed(StatusCode::OK, "text/event-stream", body);
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}
