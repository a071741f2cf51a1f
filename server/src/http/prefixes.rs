//! Named prefixes: `POST /v1/prefixes` computes a prompt into the prefix cache and pins it there,
//! `GET` lists them, `DELETE /v1/prefixes/{name}` takes the pin away.
//!
//! A pinned page is evicted only when no other cached page is left, so a pin never takes memory from a
//! running request. Names belong to the caller's key.

use super::auth::Owner;
use super::body::read_fields;
use super::explain::{choice_rules, probe, read_work};
use super::generate::{self, Caller, Work, body_size};
use super::generation::reject_error;
use super::respond::json;
use super::served::Served;
use super::state::State;
use crate::faults::Place;
use crate::openai::error::ApiError;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use oxide_runtime::engine::{EngineEvent, EngineHandle, EngineRequest, EventStream, SamplingParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Named prefixes at most, of all keys together.
const PREFIXES_MAX: usize = 256;
/// Longest name, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// The named prefixes of a server.
#[derive(Debug, Default)]
pub(crate) struct Prefixes(Mutex<BTreeMap<(u64, String), Prefix>>);

#[derive(Clone, Debug)]
struct Prefix {
    prompt: Arc<[u32]>,
    salt: Vec<u8>,
    /// Tokens pinned when it was made.
    tokens: u32,
}

impl Prefixes {
    /// Names a prefix; the one that had its name.
    fn insert(&self, key: (u64, String), prefix: Prefix) -> Result<Option<Prefix>, ApiError> {
        let mut prefixes = self.lock();
        check_room(&prefixes, &key)?;
        Ok(prefixes.insert(key, prefix))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u64, String), Prefix>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `POST /v1/prefixes`: `name`, and the prompt as either text endpoint takes it.
pub(crate) async fn create(
    Shared(state): Shared<Arc<State>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.ready_model()?);
    let size = body_size(&parts.headers);
    let mut fields = read_fields(&parts.headers, body, &state.options).await?;
    let name = check_name(fields.string("name")?)?;
    let mut work = read_work(&state, &served, &parts.headers, size, fields).await?;
    let prompt = the_prompt(&work)?;
    let key = (caller.owner.0, name);
    check_room(&state.prefixes.lock(), &key)?;
    let _live = state.enter(caller.owner)?;
    let cached = prewarm(&state, &served, &caller, &mut work, &prompt).await?;
    let faults = &state.options.faults;
    faults.pass(Place::Pin).await;
    let salt = std::mem::take(&mut work.common.cache_salt);
    let unnamed = Unnamed { engine: &served.model.engine, prompt: &prompt, salt: &salt };
    let tokens = pin(&served, &prompt, &salt, true).await?;
    faults.pass(Place::Pinned).await;
    let prefix = Prefix { prompt: Arc::clone(&prompt), salt: salt.clone(), tokens };
    let body = card(&key.1, &prefix, tokens, Some(cached));
    let replaced = state.prefixes.insert(key, prefix)?;
    std::mem::forget(unnamed);
    if let Some(Prefix { prompt, salt, .. }) = replaced {
        pin(&served, &prompt, &salt, false).await?;
    }
    Ok(json(StatusCode::OK, body.to_string()))
}

/// A pin that has no name yet. Dropped, it is taken away again: nobody could ask for that.
struct Unnamed<'a> {
    engine: &'a EngineHandle,
    prompt: &'a [u32],
    salt: &'a [u8],
}

impl Drop for Unnamed<'_> {
    fn drop(&mut self) {
        self.engine.pin_prefix(self.prompt, self.salt, false, |_| {});
    }
}

/// `GET /v1/prefixes`: the caller's, and how much of each is cached and pinned now.
pub(crate) async fn list(Shared(state): Shared<Arc<State>>, Extension(caller): Extension<Caller>) -> Result<Response, ApiError> {
    let served = Arc::clone(state.model()?);
    let owned: Vec<(String, Prefix)> = state
        .prefixes
        .lock()
        .iter()
        .filter(|((owner, _), _)| *owner == caller.owner.0)
        .map(|((_, name), prefix)| (name.clone(), prefix.clone()))
        .collect();
    let mut data = Vec::with_capacity(owned.len());
    for (name, prefix) in owned {
        let found = probe(&served, &request_of(&prefix.prompt, &prefix.salt, caller.owner)).await?;
        data.push(card(&name, &prefix, found.pinned_tokens, None));
    }
    Ok(json(StatusCode::OK, json!({"object": "list", "data": data}).to_string()))
}

/// `DELETE /v1/prefixes/{name}`: takes the pin away; the pages stay cached until they are evicted.
pub(crate) async fn remove(
    Shared(state): Shared<Arc<State>>,
    Extension(caller): Extension<Caller>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(name) = name?;
    let served = Arc::clone(state.model()?);
    let removed = state.prefixes.lock().remove(&(caller.owner.0, name.clone()));
    let Some(Prefix { prompt, salt, .. }) = removed else {
        return Err(ApiError {
            status: 404,
            code: Some("prefix_not_found"),
            ..ApiError::invalid("name", format!("there is no prefix `{name}`"))
        });
    };
    pin(&served, &prompt, &salt, false).await?;
    Ok(json(StatusCode::OK, json!({"name": name, "object": "prefix", "deleted": true}).to_string()))
}

fn card(name: &str, prefix: &Prefix, pinned: u32, already: Option<u32>) -> Value {
    let Prefix { prompt, tokens, .. } = prefix;
    json!({
        "object": "prefix", "name": name, "prompt_tokens": prompt.len(), "pinned_tokens": pinned, "pinned_at_creation": tokens,
        "cached_before": already,
    })
}

fn check_name(name: Option<String>) -> Result<String, ApiError> {
    match name {
        Some(name) if (1..=NAME_BYTES_MAX).contains(&name.len()) => Ok(name),
        Some(name) => Err(ApiError::invalid("name", format!("`name` has {} bytes, allowed are 1 to {NAME_BYTES_MAX}", name.len()))),
        None => Err(ApiError::invalid("name", "`name` is required: the name of the prefix")),
    }
}

fn the_prompt(work: &Work) -> Result<Arc<[u32]>, ApiError> {
    match &*work.prompts {
        [only] => Ok(Arc::clone(&only.ids)),
        several => Err(ApiError::invalid("prompt", format!("a prefix is one prompt, not {}", several.len()))),
    }
}

fn check_room(prefixes: &BTreeMap<(u64, String), Prefix>, key: &(u64, String)) -> Result<(), ApiError> {
    if prefixes.len() >= PREFIXES_MAX && !prefixes.contains_key(key) {
        return Err(ApiError::invalid("name", format!("{PREFIXES_MAX} prefixes are pinned, more are not allowed; delete one")));
    }
    Ok(())
}

/// Computes the prompt by drawing one token; the prompt tokens that were cached before.
async fn prewarm(state: &State, served: &Served, caller: &Caller, work: &mut Work, prompt: &Arc<[u32]>) -> Result<u32, ApiError> {
    served.rules.fit_max_tokens(prompt.len(), Some(1), false, "max_tokens", work.prompt_param)?;
    let rules = choice_rules(served, work);
    let template = generate::engine_request(state, caller, "prefix", &rules, work);
    let request = EngineRequest {
        prompt: prompt.to_vec(),
        n: 1,
        max_tokens: 1,
        min_tokens: 0,
        sampling: SamplingParams::default(),
        prompt_logprobs: None,
        mask: None,
        ..template
    };
    let mut stream: EventStream = served.model.engine.submit(request).map_err(reject_error)?;
    let mut cached = 0;
    while let Some(event) = stream.recv().await {
        match event {
            EngineEvent::Admitted { cached_tokens } => cached = cached_tokens,
            EngineEvent::Failed { message, .. } => return Err(ApiError::internal(format!("the prefix could not be computed: {message}"))),
            EngineEvent::Rejected(reason) => return Err(reject_error(reason)),
            EngineEvent::Finished { .. } => break,
            EngineEvent::PromptLogprobs { .. } | EngineEvent::Token { .. } => {}
        }
    }
    Ok(cached)
}

async fn pin(served: &Served, prompt: &[u32], salt: &[u8], pinned: bool) -> Result<u32, ApiError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    served.model.engine.pin_prefix(prompt, salt, pinned, move |tokens| {
        let _ = sender.send(tokens);
    });
    receiver.await.map_err(|_| ApiError::unavailable("engine_failed", "the engine has stopped"))
}

fn request_of(prompt: &[u32], salt: &[u8], owner: Owner) -> EngineRequest {
    EngineRequest { cache_salt: salt.to_vec(), fair_key: owner.0, ..EngineRequest::greedy("prefix", prompt.to_vec(), 1) }
}
