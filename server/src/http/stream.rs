//! The body of a streamed answer: server-sent events written as the engine's events arrive.
//!
//! ```text
//! poll ─▶ generation ─▶ role, deltas, finishes ─▶ one buffer ─▶ one write
//!            │ error                    │ silence for `keep_alive`
//!            ▼                          ▼
//!      error event, [DONE]         ": keep-alive"
//! ```
//!
//! The connection polls it; there is no task in between. Tokens that arrived together become one
//! event per choice and one write. When the client goes away the body is dropped, and with it the
//! generation.

use super::generation::{Generation, Slot};
use crate::openai::common::StreamOptions;
use crate::openai::error::ApiError;
use crate::openai::wire::{Chunks, DONE, KEEP_ALIVE, Usage};
use axum::body::Bytes;
use futures_core::Stream;
use oxide_text::Tokenizer;
use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// A stream of events.
pub(crate) struct EventBody {
    /// `None` once the stream ended.
    generation: Option<Generation>,
    writer: EventWriter,
    keep_alive: Duration,
    timer: Pin<Box<Sleep>>,
    last_write: Instant,
}

/// Turns the progress of choices into events.
pub(crate) struct EventWriter {
    chunks: Chunks,
    options: StreamOptions,
    logprobs: bool,
    /// What the client has seen of each choice.
    progress: Vec<Progress>,
    buffer: String,
}

#[derive(Copy, Clone, Default)]
struct Progress {
    began: bool,
    ended: bool,
}

impl EventBody {
    /// The rest of a generation; `writer` has written what it did so far, its end included.
    pub(crate) fn new(generation: Generation, writer: EventWriter, keep_alive: Duration) -> Self {
        let now = Instant::now();
        let timer = Box::pin(tokio::time::sleep_until(now + keep_alive));
        Self { generation: (!generation.is_done()).then_some(generation), writer, keep_alive, timer, last_write: now }
    }

    /// Writes what happened into the buffer; ends the stream on an error or a panic.
    fn advance(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Self { generation: Some(generation), writer, .. } = self else { return Poll::Ready(()) };
        let outcome =
            catch_unwind(AssertUnwindSafe(|| generation.poll(context).map(|outcome| outcome.and_then(|()| writer.write(generation)))));
        let outcome = match outcome {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(outcome)) => outcome,
            Err(_) => Err(ApiError::internal("the server failed while it answered this request")),
        };
        if let Err(error) = &outcome {
            writer.write_error(error);
        }
        if outcome.is_err() || generation.is_done() {
            generation.conclude();
            self.generation = None;
        }
        Poll::Ready(())
    }

    fn poll_keep_alive(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.timer.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            let due = self.last_write + self.keep_alive;
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(due);
        }
    }

    fn wrote(&mut self) {
        self.last_write = Instant::now();
    }
}

impl Stream for EventBody {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if !this.writer.buffer.is_empty() {
                this.wrote();
                return Poll::Ready(Some(Ok(Bytes::from(std::mem::take(&mut this.writer.buffer)))));
            }
            if this.generation.is_none() {
                return Poll::Ready(None);
            }
            if this.advance(context).is_pending() {
                break;
            }
        }
        if this.poll_keep_alive(context).is_ready() {
            this.wrote();
            this.timer.as_mut().reset(this.last_write + this.keep_alive);
            // Registers the timer's waker for the next time.
            let _ = this.timer.as_mut().poll(context);
            return Poll::Ready(Some(Ok(Bytes::from_static(KEEP_ALIVE.as_bytes()))));
        }
        Poll::Pending
    }
}

impl EventWriter {
    pub(crate) fn new(chunks: Chunks, options: StreamOptions, logprobs: bool, choices: usize) -> Self {
        Self { chunks, options, logprobs, progress: vec![Progress::default(); choices], buffer: String::new() }
    }

    /// Writes what is new in a generation, and its end.
    ///
    /// # Errors
    /// If a log-probability is no number, or the deadline passed before the first token.
    pub(crate) fn write(&mut self, generation: &mut Generation) -> Result<(), ApiError> {
        let done = generation.is_done();
        if done {
            generation.check_deadline()?;
        }
        let usage = self.options.continuous_usage.then(|| generation.usage());
        let rules = Arc::clone(&generation.rules);
        let tokenizer = self.logprobs.then_some(&*rules.tokenizer);
        let traced = generation.traced;
        for (index, slot) in generation.slots_mut().enumerate() {
            // An end that shall carry its trace waits for it.
            let may_end = done || !traced || slot.trace.is_some();
            self.write_choice(index, slot, tokenizer, usage.as_ref())?;
            if may_end {
                self.write_end(index, slot, traced, usage.as_ref());
            }
        }
        if done {
            if self.options.include_usage {
                self.chunks.usage(&mut self.buffer, &generation.usage());
            }
            self.buffer.push_str(DONE);
        }
        Ok(())
    }

    fn write_choice(
        &mut self,
        index: usize,
        slot: &mut Slot,
        tokenizer: Option<&Tokenizer>,
        usage: Option<&Usage>,
    ) -> Result<(), ApiError> {
        let Self { chunks, progress, buffer, .. } = self;
        let Some(progress) = progress.get_mut(index).filter(|progress| !progress.ended) else { return Ok(()) };
        let choice = &mut slot.choice;
        let news = !choice.text.is_empty() || !choice.entries.is_empty();
        if !progress.began && (news || !choice.calls.is_empty() || choice.tokens > 0 || choice.ended.is_some()) {
            progress.began = true;
            chunks.role(buffer, index, usage);
        }
        if news {
            let logprobs = tokenizer.map(|tokenizer| (tokenizer, &choice.entries[..]));
            chunks.delta(buffer, index, &choice.text, logprobs, usage)?;
            choice.text.clear();
            choice.entries.clear();
        }
        if !choice.calls.is_empty() {
            chunks.calls(buffer, index, &choice.calls, usage);
            choice.calls.clear();
        }
        Ok(())
    }

    fn write_end(&mut self, index: usize, slot: &Slot, traced: bool, usage: Option<&Usage>) {
        let Some(ended) = &slot.choice.ended else { return };
        if let Some(progress) = self.progress.get_mut(index).filter(|progress| !progress.ended) {
            progress.ended = true;
            self.chunks.finish(&mut self.buffer, index, ended, slot.trace.as_ref().filter(|_| traced), usage);
        }
    }

    fn write_error(&mut self, error: &ApiError) {
        Chunks::error(&mut self.buffer, error);
        self.buffer.push_str(DONE);
    }
}
