//! What the client of a request no longer wants of it: any of it, or single choices.
//!
//! Written by whoever holds the stream, read by the engine thread; nothing is ever wanted again.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The wishes of one request's client.
#[derive(Debug)]
pub(super) struct Cancel {
    /// When the last wish for any of it ended.
    all: OnceLock<Instant>,
    /// Choices that are complete to their reader.
    choices: Box<[AtomicBool]>,
}

impl Cancel {
    /// Of a request of `n` choices, all wanted.
    pub(super) fn new(n: u32) -> Self {
        Self { all: OnceLock::new(), choices: (0..n).map(|_| AtomicBool::new(false)).collect() }
    }

    /// Nothing is wanted any more.
    pub(super) fn cancel(&self) {
        let _ = self.all.set(Instant::now());
    }

    /// Whether nothing is wanted any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled_at().is_some()
    }

    /// Since when nothing is wanted any more.
    pub(super) fn cancelled_at(&self) -> Option<Instant> {
        self.all.get().copied()
    }

    /// No further token of `choice` is wanted; the others go on. A choice that does not exist changes nothing.
    pub(super) fn end_choice(&self, choice: u32) {
        if let Some(ended) = self.choices.get(choice as usize) {
            ended.store(true, Ordering::Release);
        }
    }

    /// Whether no further token of `choice` is wanted.
    pub(super) fn choice_ended(&self, choice: u32) -> bool {
        self.choices.get(choice as usize).is_some_and(|ended| ended.load(Ordering::Acquire))
    }
}
