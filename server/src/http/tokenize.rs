//! `/tokenize` and `/detokenize`, and where long texts are tokenized.

use super::body::read_fields;
use super::generate::{body_size, count_unknown};
use super::respond::json;
use super::served::Served;
use super::state::State;
use crate::faults::Place;
use crate::openai::chat_request::take_messages;
use crate::openai::error::ApiError;
use crate::openai::fields::{self, Fields};
use crate::openai::wire::token_text;
use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Texts up to this many bytes are tokenized where they are: it takes less time than handing them over.
const INLINE_BYTES_MAX: usize = 4096;

/// Runs tokenizing work, on a thread of its own if the text is long.
///
/// # Errors
/// What the work says, or 500 if it panicked.
pub(crate) async fn off_thread<T: Send + 'static>(
    state: &State,
    text_bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let faults = state.options.faults.clone();
    faults.pass(Place::Tokenize).await;
    if text_bytes <= INLINE_BYTES_MAX {
        return work();
    }
    let permit = Arc::clone(&state.tokenizing).acquire_owned().await.map_err(|_| ApiError::internal("the server is stopping"))?;
    let work = move || {
        // The thread keeps its permit for as long as it works, waited for or not.
        let _permit = permit;
        faults.hit(Place::TokenizeThread);
        work()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// `POST /tokenize`: ids of a prompt or of a conversation.
pub(crate) async fn tokenize(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.model()?);
    let size = body_size(&parts.headers);
    let mut fields = read_fields(&parts.headers, body, &state.options).await?;
    served.rules.check_model(&mut fields)?;
    let text_wanted = fields.boolean("return_token_strs")?.unwrap_or(false);
    let input = read_input(&mut fields)?;
    count_unknown(&state, served.rules.settle_unread(&fields)?);
    let ids = off_thread(&state, size, {
        let served = Arc::clone(&served);
        move || encode(&served, input)
    })
    .await?;
    let tokenizer = &served.model.text.tokenizer;
    let texts = text_wanted.then(|| ids.iter().map(|id| token_text(tokenizer, *id)).collect::<Vec<_>>());
    let body = serde_json::json!({"count": ids.len(), "max_model_len": served.rules.context_max, "tokens": ids, "token_strs": texts});
    Ok(json(StatusCode::OK, body.to_string()))
}

enum Input {
    Prompt { text: String, add_special_tokens: bool },
    Chat { messages: Vec<Value>, add_generation_prompt: bool, variables: Map<String, Value> },
}

fn read_input(fields: &mut Fields) -> Result<Input, ApiError> {
    let chat = fields.has("messages");
    let messages = if chat { take_messages(fields)? } else { fields.array("messages")?.unwrap_or_default() };
    let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let add_special_tokens = fields.boolean("add_special_tokens")?.unwrap_or(true);
    match (fields.string("prompt")?, chat) {
        (Some(_), true) => Err(ApiError::invalid("prompt", "send either `prompt` or `messages`, not both")),
        (None, true) => Ok(Input::Chat { messages, add_generation_prompt, variables }),
        (Some(text), false) => Ok(Input::Prompt { text, add_special_tokens }),
        (None, false) => Err(ApiError::invalid("prompt", "`prompt` (a string) or `messages` is required")),
    }
}

fn encode(served: &Served, input: Input) -> Result<Vec<u32>, ApiError> {
    match input {
        Input::Prompt { text, add_special_tokens } => served.encode_prompt(&text, add_special_tokens),
        Input::Chat { messages, add_generation_prompt, variables } => {
            served.encode_rendered(&served.render(messages, None, add_generation_prompt, variables)?)
        }
    }
}

/// `POST /detokenize`: the text of ids, special tokens included.
pub(crate) async fn detokenize(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let served = Arc::clone(state.model()?);
    let mut fields = read_fields(&parts.headers, body, &state.options).await?;
    served.rules.check_model(&mut fields)?;
    let tokens = fields.array("tokens")?.ok_or_else(|| ApiError::invalid("tokens", "`tokens` is required: an array of token ids"))?;
    let ids = fields::token_ids("tokens", &tokens, served.rules.vocab_known)?;
    count_unknown(&state, served.rules.settle_unread(&fields)?);
    let tokenizer = &served.model.text.tokenizer;
    let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.id_to_bytes(*id)).copied().collect();
    let body = serde_json::json!({"prompt": String::from_utf8_lossy(&bytes)});
    Ok(json(StatusCode::OK, body.to_string()))
}
