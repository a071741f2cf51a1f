//! One completion from submission to its end: engine events in, text and ids out.

use super::error::CliError;
use crate::model::LoadedModel;
use oxide_runtime::engine::{EngineEvent, EventStream, FinishReason};
use oxide_text::{DecodeOptions, StreamDecoder};
use serde_json::{Value, json};
use std::sync::Arc;

/// How a completion ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Stop,
    Length,
    Cancelled,
}

impl Ending {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A finished completion.
#[derive(Clone, Debug)]
pub(super) struct Completion {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    pub(super) ending: Ending,
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: u32,
}

impl Completion {
    pub(super) fn to_json(&self) -> Value {
        let completion_tokens = self.ids.len();
        json!({
            "token_ids": self.ids,
            "text": self.text,
            "finish_reason": self.ending.name(),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": self.prompt_tokens + completion_tokens,
                "prompt_tokens_details": { "cached_tokens": self.cached_tokens },
            },
        })
    }
}

/// Follows one stream of events.
pub(super) struct Follower {
    decoder: StreamDecoder,
    eos: Vec<u32>,
    done: Completion,
}

/// What an event means to the reader.
pub(super) enum Progress {
    /// Text to show now, possibly empty.
    Text(String),
    /// The end, with the last text.
    End(String),
}

impl Follower {
    /// `eos` are the ids that end the completion and are not part of its text.
    pub(super) fn new(model: &LoadedModel, prompt_tokens: usize, options: DecodeOptions, eos: &[u32]) -> Self {
        let decoder = StreamDecoder::new(Arc::clone(&model.text.tokenizer), options);
        let done = Completion { ids: Vec::new(), text: String::new(), ending: Ending::Stop, prompt_tokens, cached_tokens: 0 };
        Self { decoder, eos: eos.to_vec(), done }
    }

    /// Takes an event.
    pub(super) fn take(&mut self, event: EngineEvent) -> Result<Progress, CliError> {
        match event {
            EngineEvent::Admitted { cached_tokens } => {
                self.done.cached_tokens = cached_tokens;
                Ok(Progress::Text(String::new()))
            }
            EngineEvent::PromptLogprobs { .. } => Ok(Progress::Text(String::new())),
            EngineEvent::Token { id, .. } => Ok(self.token(id)),
            EngineEvent::Finished { reason, .. } => Ok(self.finish(match reason {
                FinishReason::Stop => Ending::Stop,
                FinishReason::Length => Ending::Length,
                FinishReason::Cancelled | FinishReason::Deadline => Ending::Cancelled,
            })),
            EngineEvent::Failed { message, .. } => Err(CliError::Engine(message)),
            EngineEvent::Rejected(reason) => Err(reason.into()),
        }
    }

    /// The completion so far.
    pub(super) fn into_completion(self) -> Completion {
        self.done
    }

    fn token(&mut self, id: u32) -> Progress {
        self.done.ids.push(id);
        if self.eos.contains(&id) {
            return Progress::Text(String::new());
        }
        let decoded = self.decoder.push(id);
        self.done.text.push_str(&decoded.text);
        match decoded.stop {
            Some(_) => {
                self.done.ending = Ending::Stop;
                Progress::End(decoded.text)
            }
            None => Progress::Text(decoded.text),
        }
    }

    fn finish(&mut self, ending: Ending) -> Progress {
        let tail = self.decoder.finish().text;
        self.done.text.push_str(&tail);
        self.done.ending = ending;
        Progress::End(tail)
    }
}

/// Follows a stream to its end, calling `show` with text as it comes. Dropping the stream at a stop string cancels it.
pub(super) async fn follow(
    mut stream: EventStream,
    mut follower: Follower,
    mut show: impl FnMut(&str) -> Result<(), CliError>,
) -> Result<Completion, CliError> {
    while let Some(event) = stream.recv().await {
        match follower.take(event)? {
            Progress::Text(text) => show(&text)?,
            Progress::End(text) => {
                show(&text)?;
                break;
            }
        }
    }
    Ok(follower.into_completion())
}
