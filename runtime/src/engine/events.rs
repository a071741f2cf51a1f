//! The stream of one request's events, from the engine thread to whoever asked.
//!
//! Bounded, and never waited for: a stream has room for all that its request may send up to
//! `EngineOptions::events_max`; a client that lets that many pile up is cancelled. Room for the
//! terminal events is always kept. If the engine thread ends without a word, the stream makes up the
//! missing terminal events itself, so that each choice has exactly one in every case.

use super::api::{EngineEvent, EngineRequest, RejectReason};
use super::cancel::Cancel;
use super::shared::Shared;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;

/// The engine's end.
#[derive(Clone, Debug)]
pub(super) struct EventSender {
    events: mpsc::Sender<EngineEvent>,
}

impl EventSender {
    /// Sends an event that is not terminal, keeping room for `terminals`. `false` if the client is gone or too slow.
    pub(super) fn send(&self, event: EngineEvent, terminals: usize) -> bool {
        self.events.capacity() > terminals && self.events.try_send(event).is_ok()
    }

    /// Sends a terminal event; its room was kept. A client that is gone does not matter.
    pub(super) fn finish(&self, event: EngineEvent) {
        let _ = self.events.try_send(event);
    }
}

/// Makes both ends. `cancel` is raised when the stream is dropped.
pub(super) fn channel(request: &EngineRequest, shared: Arc<Shared>, cancel: Arc<Cancel>, serial: u64) -> (EventSender, EventStream) {
    let (events, receiver) = mpsc::channel(capacity(request, shared.options.events_max));
    let stream =
        EventStream { events: receiver, open: vec![true; request.n as usize], any: false, id: request.id.clone(), serial, cancel, shared };
    (EventSender { events }, stream)
}

/// Everything that the request can send: `Admitted`, prompt chunks, tokens and terminals; at most `events_max`.
fn capacity(request: &EngineRequest, events_max: usize) -> usize {
    let choices = request.n as usize;
    let prompt = if request.prompt_logprobs.is_some() { request.prompt.len() } else { 0 };
    let all = choices.saturating_mul(request.max_tokens as usize + 1).saturating_add(prompt + 1);
    all.min(events_max).max(choices + 1)
}

/// Events of one request, in order. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream {
    events: mpsc::Receiver<EngineEvent>,
    /// Choices without a terminal event so far.
    open: Vec<bool>,
    /// Whether any event came.
    any: bool,
    id: String,
    serial: u64,
    cancel: Arc<Cancel>,
    shared: Arc<Shared>,
}

impl EventStream {
    /// The request's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The next event; `None` after the last terminal one. Cancel-safe.
    pub async fn recv(&mut self) -> Option<EngineEvent> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// [`EventStream::recv`] for hand-written streams.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<EngineEvent>> {
        if self.is_done() {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.poll_recv(context));
        Poll::Ready(Some(self.note(event)))
    }

    /// The next event, blocking the thread. Not for async code.
    pub fn blocking_recv(&mut self) -> Option<EngineEvent> {
        if self.is_done() {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.note(event))
    }

    /// The next event if it is there already.
    pub fn try_recv(&mut self) -> Option<EngineEvent> {
        if self.is_done() {
            return None;
        }
        match self.events.try_recv() {
            Ok(event) => Some(self.note(Some(event))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(self.note(None)),
        }
    }

    /// Asks the engine to stop; terminal events still come.
    pub fn cancel(&self) {
        self.cancel.cancel();
        self.shared.announce_cancel();
    }

    /// Asks the engine to end `choice` as stopped, because its reader found its end; the other choices go
    /// on as they would have. Its terminal event still comes. A choice that drew nothing yet ends with its
    /// first token.
    pub fn end_choice(&self, choice: u32) {
        self.cancel.end_choice(choice);
        self.shared.announce_cancel();
    }

    fn is_done(&self) -> bool {
        !self.open.contains(&true)
    }

    /// Marks what is terminal in `event`; makes one up if the engine is gone.
    fn note(&mut self, event: Option<EngineEvent>) -> EngineEvent {
        let event = event.unwrap_or_else(|| self.farewell());
        self.any = true;
        match &event {
            EngineEvent::Rejected(_) => self.open.fill(false),
            EngineEvent::Finished { choice, .. } | EngineEvent::Failed { choice, .. } => {
                if let Some(open) = self.open.get_mut(*choice as usize) {
                    *open = false;
                }
            }
            EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. } | EngineEvent::Token { .. } => {}
        }
        event
    }

    /// What the engine would have said, had it not ended.
    fn farewell(&self) -> EngineEvent {
        match self.shared.failure() {
            None if !self.any => EngineEvent::Rejected(RejectReason::Draining),
            failure => EngineEvent::Failed {
                choice: self.open.iter().position(|open| *open).unwrap_or(0) as u32,
                message: failure.unwrap_or_else(|| "the engine stopped".to_owned()),
            },
        }
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.shared.forget(&self.id, self.serial);
        if !self.is_done() {
            self.cancel();
        }
    }
}
