//! Writes answers and stream chunks as JSON text, piece by piece: no tree is built per token.

use super::choice::{Choice, Ended, Entry, StopReason};
use super::error::ApiError;
use crate::tools::CallDelta;
use oxide_runtime::engine::ChoiceTrace;
use oxide_text::Tokenizer;
use std::fmt::Write;

/// The log-probability of an impossible token.
pub const LOGPROB_MIN: f32 = -9999.0;
/// The last event of every stream.
pub const DONE: &str = "data: [DONE]\n\n";
/// A comment that keeps proxies from closing a silent stream.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// Which of the two text endpoints answers.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// Tokens that an answer used.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt: u64,
    /// Tokens drawn in all choices.
    pub completion: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached: u64,
}

/// What every part of an answer repeats.
#[derive(Clone, Debug)]
pub struct Envelope {
    /// Endpoint.
    pub endpoint: Endpoint,
    /// Id of the answer.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// Name of the model.
    pub model: String,
    /// `system_fingerprint`: names the bundle.
    pub fingerprint: Option<String>,
}

/// Writes a JSON string.
pub fn push_string(out: &mut String, text: &str) {
    // Escaping a string cannot fail, and the result is UTF-8.
    out.push_str(&serde_json::to_string(text).unwrap_or_default());
}

macro_rules! put {
    ($out:expr, $($args:tt)*) => {
        write!($out, $($args)*).expect("writing to a string cannot fail")
    };
}

impl Usage {
    fn push(&self, out: &mut String) {
        let Self { prompt, completion, cached } = *self;
        let total = prompt + completion;
        put!(
            out,
            "{{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion},\"total_tokens\":{total},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}"
        );
    }
}

impl Envelope {
    /// The members before `choices`.
    fn head(&self, object: &str) -> String {
        let mut out = String::from("{\"id\":");
        push_string(&mut out, &self.id);
        put!(out, ",\"object\":\"{object}\",\"created\":{},\"model\":", self.created);
        push_string(&mut out, &self.model);
        out.push_str(",\"system_fingerprint\":");
        match &self.fingerprint {
            Some(fingerprint) => push_string(&mut out, fingerprint),
            None => out.push_str("null"),
        }
        out.push_str(",\"choices\":[");
        out
    }

    /// A whole answer.
    ///
    /// # Errors
    /// 500 if a log-probability is no number.
    pub fn answer<'a>(
        &self,
        tokenizer: &Tokenizer,
        choices: impl Iterator<Item = (&'a Choice, Option<&'a ChoiceTrace>)>,
        logprobs: bool,
        usage: &Usage,
    ) -> Result<String, ApiError> {
        let mut out = self.head(match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completion => "text_completion",
        });
        for (index, (choice, trace)) in choices.enumerate() {
            put!(out, "{}{{\"index\":{index},", if index == 0 { "" } else { "," });
            match self.endpoint {
                Endpoint::Chat => {
                    out.push_str("\"message\":{\"role\":\"assistant\",\"content\":");
                    match (choice.text.as_str(), &choice.calls[..]) {
                        ("", [_, ..]) => out.push_str("null"),
                        (text, _) => push_string(&mut out, text),
                    }
                    out.push_str(",\"refusal\":null");
                    push_calls(&mut out, &choice.calls);
                    out.push('}');
                }
                Endpoint::Completion => {
                    out.push_str("\"text\":");
                    push_string(&mut out, &choice.text);
                }
            }
            out.push_str(",\"logprobs\":");
            self.push_logprobs(&mut out, tokenizer, logprobs.then_some(&choice.entries[..]))?;
            push_end(&mut out, choice.ended.as_ref());
            push_trace(&mut out, trace);
            out.push('}');
        }
        out.push_str("],\"usage\":");
        usage.push(&mut out);
        out.push('}');
        Ok(out)
    }

    fn push_logprobs(&self, out: &mut String, tokenizer: &Tokenizer, entries: Option<&[Entry]>) -> Result<(), ApiError> {
        match (entries, self.endpoint) {
            (None, _) => {
                out.push_str("null");
                Ok(())
            }
            (Some(entries), Endpoint::Chat) => push_chat_logprobs(out, tokenizer, entries),
            (Some(entries), Endpoint::Completion) => push_completion_logprobs(out, tokenizer, entries),
        }
    }
}

/// Writes the events of one stream.
#[derive(Clone, Debug)]
pub struct Chunks {
    envelope: Envelope,
    head: String,
    include_usage: bool,
}

impl Chunks {
    /// A writer; with `include_usage` every chunk has a `usage` member, null but in the last.
    pub fn new(envelope: Envelope, include_usage: bool) -> Self {
        let object = match envelope.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completion => "text_completion",
        };
        let head = format!("data: {}", envelope.head(object));
        Self { envelope, head, include_usage }
    }

    /// The first chunk of a chat choice, which names the role. Completions have none.
    pub fn role(&self, out: &mut String, index: usize, usage: Option<&Usage>) {
        if self.envelope.endpoint == Endpoint::Chat {
            self.begin(out, index);
            out.push_str("\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}");
            self.close(out, usage);
        }
    }

    /// A chunk of text, with its log-probabilities if asked for.
    ///
    /// # Errors
    /// 500 if a log-probability is no number.
    pub fn delta(
        &self,
        out: &mut String,
        index: usize,
        text: &str,
        logprobs: Option<(&Tokenizer, &[Entry])>,
        usage: Option<&Usage>,
    ) -> Result<(), ApiError> {
        self.begin(out, index);
        match self.envelope.endpoint {
            Endpoint::Chat => {
                out.push_str("\"delta\":{\"content\":");
                push_string(out, text);
                out.push('}');
            }
            Endpoint::Completion => {
                out.push_str("\"text\":");
                push_string(out, text);
            }
        }
        out.push_str(",\"logprobs\":");
        match logprobs {
            Some((tokenizer, entries)) => self.envelope.push_logprobs(out, tokenizer, Some(entries))?,
            None => out.push_str("null"),
        }
        out.push_str(",\"finish_reason\":null}");
        self.close(out, usage);
        Ok(())
    }

    /// A chunk with news of tool calls.
    pub fn calls(&self, out: &mut String, index: usize, calls: &[CallDelta], usage: Option<&Usage>) {
        self.begin(out, index);
        out.push_str("\"delta\":{\"tool_calls\":[");
        for (place, call) in calls.iter().enumerate() {
            out.push_str(if place == 0 { "" } else { "," });
            put!(out, "{{\"index\":{}", call.index);
            push_call(out, call.head.as_ref(), &call.arguments);
            out.push('}');
        }
        out.push_str("]},\"logprobs\":null,\"finish_reason\":null}");
        self.close(out, usage);
    }

    /// The chunk that ends a choice.
    pub fn finish(&self, out: &mut String, index: usize, ended: &Ended, trace: Option<&ChoiceTrace>, usage: Option<&Usage>) {
        self.begin(out, index);
        out.push_str(match self.envelope.endpoint {
            Endpoint::Chat => "\"delta\":{}",
            Endpoint::Completion => "\"text\":\"\"",
        });
        out.push_str(",\"logprobs\":null");
        push_end(out, Some(ended));
        push_trace(out, trace);
        out.push('}');
        self.close(out, usage);
    }

    /// The chunk without choices that carries the usage.
    pub fn usage(&self, out: &mut String, usage: &Usage) {
        out.push_str(&self.head);
        self.close(out, Some(usage));
    }

    /// An error inside a stream whose head was sent.
    pub fn error(out: &mut String, error: &ApiError) {
        put!(out, "data: {}\n\n", error.to_json());
    }

    fn begin(&self, out: &mut String, index: usize) {
        out.push_str(&self.head);
        put!(out, "{{\"index\":{index},");
    }

    fn close(&self, out: &mut String, usage: Option<&Usage>) {
        out.push(']');
        if let (Some(usage), true) = (usage, self.include_usage) {
            out.push_str(",\"usage\":");
            usage.push(out);
        } else if self.include_usage {
            out.push_str(",\"usage\":null");
        }
        out.push_str("}\n\n");
    }
}

/// Writes the members of a call that are new.
fn push_call(out: &mut String, head: Option<&(String, String)>, arguments: &str) {
    if let Some((id, _)) = head {
        put!(out, ",\"id\":\"{id}\",\"type\":\"function\"");
    }
    out.push_str(",\"function\":{");
    if let Some((_, name)) = head {
        out.push_str("\"name\":");
        push_string(out, name);
        out.push(',');
    }
    out.push_str("\"arguments\":");
    push_string(out, arguments);
    out.push('}');
}

/// Writes the member `tool_calls` of a whole message: the news of each call put together.
fn push_calls(out: &mut String, news: &[CallDelta]) {
    let mut calls: Vec<CallDelta> = Vec::new();
    for delta in news {
        match (&delta.head, calls.last_mut()) {
            (None, Some(last)) => last.arguments.push_str(&delta.arguments),
            _ => calls.push(delta.clone()),
        }
    }
    if calls.is_empty() {
        return;
    }
    out.push_str(",\"tool_calls\":[");
    for (index, call) in calls.iter().enumerate() {
        put!(out, "{}{{\"index\":{index}", if index == 0 { "" } else { "," });
        push_call(out, call.head.as_ref(), &call.arguments);
        out.push('}');
    }
    out.push(']');
}

fn push_end(out: &mut String, ended: Option<&Ended>) {
    let Some(Ended { finish, reason }) = ended else {
        out.push_str(",\"finish_reason\":null,\"stop_reason\":null");
        return;
    };
    put!(out, ",\"finish_reason\":\"{finish}\",\"stop_reason\":");
    match reason {
        StopReason::Model => out.push_str("null"),
        StopReason::Text(text) => push_string(out, text),
        StopReason::Id(id) => put!(out, "{id}"),
        StopReason::Deadline => out.push_str("\"deadline\""),
        StopReason::Aborted => out.push_str("\"aborted\""),
    }
}

fn push_trace(out: &mut String, trace: Option<&ChoiceTrace>) {
    let Some(trace) = trace else { return };
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    put!(
        out,
        ",\"trace\":{{\"queue_ms\":{:.3},\"prefill_ms\":{:.3},\"decode_ms\":{:.3},\"cached_tokens\":{},\"kv_page_seconds\":{:.6},\"preemptions\":{}}}",
        ms(trace.queue),
        ms(trace.prefill),
        ms(trace.decode),
        trace.cached_tokens,
        trace.kv_page_seconds,
        trace.preemptions
    );
}

/// A log-probability as JSON can carry it.
fn finite(logprob: f32) -> Result<f32, ApiError> {
    if logprob.is_nan() {
        return Err(ApiError::internal("the model gave a log-probability that is not a number; this request was given up"));
    }
    Ok(logprob.clamp(LOGPROB_MIN, 0.0))
}

/// The text of a token; bytes that are not UTF-8 by themselves are spelled `bytes:\xNN`.
pub fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.id_to_bytes(id);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(String::from("bytes:"), |mut text, byte| {
            put!(text, "\\x{byte:02x}");
            text
        }),
    }
}

fn push_bytes(out: &mut String, bytes: &[u8]) {
    out.push('[');
    for (index, byte) in bytes.iter().enumerate() {
        put!(out, "{}{byte}", if index == 0 { "" } else { "," });
    }
    out.push(']');
}

fn push_chat_logprobs(out: &mut String, tokenizer: &Tokenizer, entries: &[Entry]) -> Result<(), ApiError> {
    out.push_str("{\"content\":[");
    for (index, entry) in entries.iter().enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        let bytes = tokenizer.id_to_bytes(entry.id);
        let shown = bytes.get(..entry.bytes_shown).unwrap_or(bytes);
        push_chat_token(out, tokenizer, entry.id, entry.logprob.unwrap_or(LOGPROB_MIN), shown)?;
        out.push_str(",\"top_logprobs\":[");
        for (place, (id, logprob)) in entry.top.iter().enumerate() {
            out.push_str(if place == 0 { "" } else { "," });
            push_chat_token(out, tokenizer, *id, *logprob, tokenizer.id_to_bytes(*id))?;
            out.push('}');
        }
        out.push_str("]}");
    }
    out.push_str("],\"refusal\":null}");
    Ok(())
}

/// Writes the members of a token, its object left open.
fn push_chat_token(out: &mut String, tokenizer: &Tokenizer, id: u32, logprob: f32, bytes: &[u8]) -> Result<(), ApiError> {
    out.push_str("{\"token\":");
    push_string(out, &token_text(tokenizer, id));
    put!(out, ",\"logprob\":{},\"bytes\":", finite(logprob)?);
    push_bytes(out, bytes);
    Ok(())
}

fn push_completion_logprobs(out: &mut String, tokenizer: &Tokenizer, entries: &[Entry]) -> Result<(), ApiError> {
    out.push_str("{\"tokens\":[");
    for (index, entry) in entries.iter().enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        push_string(out, &token_text(tokenizer, entry.id));
    }
    out.push_str("],\"token_logprobs\":[");
    for (index, entry) in entries.iter().enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        match entry.logprob {
            Some(logprob) => put!(out, "{}", finite(logprob)?),
            None => out.push_str("null"),
        }
    }
    out.push_str("],\"top_logprobs\":[");
    for (index, entry) in entries.iter().enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        push_alternatives(out, tokenizer, entry)?;
    }
    out.push_str("],\"text_offset\":[");
    for (index, entry) in entries.iter().enumerate() {
        put!(out, "{}{}", if index == 0 { "" } else { "," }, entry.offset);
    }
    out.push_str("]}");
    Ok(())
}

/// The alternatives of a token by their text, the token itself always among them.
fn push_alternatives(out: &mut String, tokenizer: &Tokenizer, entry: &Entry) -> Result<(), ApiError> {
    let Some(logprob) = entry.logprob else {
        out.push_str("null");
        return Ok(());
    };
    let own = (!entry.top.iter().any(|(id, _)| *id == entry.id)).then_some((entry.id, logprob));
    out.push('{');
    for (index, (id, logprob)) in entry.top.iter().copied().chain(own).enumerate() {
        out.push_str(if index == 0 { "" } else { "," });
        push_string(out, &token_text(tokenizer, id));
        put!(out, ":{}", finite(logprob)?);
    }
    out.push('}');
    Ok(())
}
