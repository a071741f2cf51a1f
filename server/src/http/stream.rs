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
use super::state::State;
use crate::faults::{Place, Turn};
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
use std::task::{Context, Poll, ready};
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
    state: Arc<State>,
    turn: Turn,
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
        let state = Arc::clone(generation.state());
        let generation = (!generation.is_done()).then_some(generation);
        Self { generation, writer, keep_alive, timer, last_write: now, state, turn: Turn::default() }
    }

    /// Writes what happened into the buffer; ends the stream on an error.
    fn advance(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Self { generation: Some(generation), writer, state, .. } = self else { return Poll::Ready(()) };
        state.options.faults.hit(Place::Produce);
        let outcome = ready!(generation.poll(context)).and_then(|()| writer.write(generation));
        if let Err(error) = &outcome {
            writer.write_error(error);
        }
        if outcome.is_err() || generation.is_done() {
            generation.conclude();
            self.generation = None;
        }
        Poll::Ready(())
    }

    /// Ends the stream after a panic, in its own words unless its end is written already.
    fn give_up(&mut self) -> Option<Bytes> {
        self.state.count_panic();
        if let Some(mut generation) = self.generation.take() {
            generation.conclude();
            self.writer.write_error(&ApiError::panicked());
        }
        self.take_buffer()
    }

    /// What is to be sent, if anything is.
    fn take_buffer(&mut self) -> Option<Bytes> {
        self.last_write = Instant::now();
        let buffer = std::mem::take(&mut self.writer.buffer);
        (!buffer.is_empty()).then(|| Bytes::from(buffer))
    }

    /// The next part; `None` after the last.
    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.generation.is_some() {
            ready!(self.turn.poll(&self.state.options.faults, Place::Stream, context));
        }
        while self.writer.buffer.is_empty() && self.generation.is_some() {
            if self.advance(context).is_pending() {
                ready!(self.poll_keep_alive(context));
                return Poll::Ready(Some(self.comment(context)));
            }
        }
        if self.generation.is_none() {
            ready!(self.turn.poll(&self.state.options.faults, Place::Flush, context));
        }
        Poll::Ready(self.take_buffer())
    }

    /// A comment instead of an event.
    fn comment(&mut self, context: &mut Context<'_>) -> Bytes {
        self.last_write = Instant::now();
        self.timer.as_mut().reset(self.last_write + self.keep_alive);
        // Registers the timer's waker for the next time.
        let _ = self.timer.as_mut().poll(context);
        Bytes::from_static(KEEP_ALIVE.as_bytes())
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
}

impl Stream for EventBody {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let part = catch_unwind(AssertUnwindSafe(|| this.poll_part(context)));
        part.unwrap_or_else(|_| Poll::Ready(this.give_up())).map(|part| part.map(Ok))
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

    /// Ends the stream with an error; an event that was not finished is taken back.
    fn write_error(&mut self, error: &ApiError) {
        // JSON has no line break outside its strings' escapes, so this is where the last whole event ends.
        let whole = self.buffer.rfind("\n\n").map_or(0, |end| end + 2);
        self.buffer.truncate(whole);
        Chunks::error(&mut self.buffer, error);
        self.buffer.push_str(DONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::wire::{Endpoint, Envelope};

    fn writer() -> EventWriter {
        let envelope = Envelope { endpoint: Endpoint::Chat, id: "a".to_owned(), created: 0, model: "m".to_owned(), fingerprint: None };
        let options = StreamOptions { include_usage: false, continuous_usage: false };
        EventWriter::new(Chunks::new(envelope, false), options, false, 1)
    }

    #[test]
    fn an_error_takes_back_the_event_that_was_not_finished() {
        for (written, kept) in [("", ""), ("data: {\"id", ""), ("data: 1\n\n", "data: 1\n\n"), ("data: 1\n\ndata: {\"id", "data: 1\n\n")] {
            let mut writer = writer();
            writer.buffer.push_str(written);
            writer.write_error(&ApiError::panicked());
            let end = writer.buffer.strip_prefix(kept).expect("whole events stay");
            let error = end.strip_suffix(DONE).and_then(|end| end.strip_prefix("data: ")).expect("an error and the end");
            assert!(serde_json::from_str::<serde_json::Value>(error).is_ok_and(|error| error["error"].is_object()), "{end}");
        }
    }
}
