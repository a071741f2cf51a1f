//! What all clients saw, counted.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Broken promises whose words are kept.
const KEPT: usize = 40;

/// Counts and broken promises.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Requests by kind and outcome.
    pub(super) outcomes: BTreeMap<(&'static str, String), u64>,
    /// Broken promises, the first ones.
    pub(super) broken: Vec<String>,
    pub(super) broken_total: u64,
}

impl Seen {
    /// Requests whose outcome `wanted` accepts.
    pub(super) fn count(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        self.outcomes.iter().filter(|((_, outcome), _)| wanted(outcome)).map(|(_, count)| count).sum()
    }
}

/// A [`Seen`] that all clients write to.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<Seen>);

impl Ledger {
    /// Counts a request.
    pub(super) fn outcome(&self, kind: &'static str, outcome: String) {
        *self.lock().outcomes.entry((kind, outcome)).or_default() += 1;
    }

    /// Notes a broken promise.
    pub(super) fn broken(&self, what: String) {
        let mut seen = self.lock();
        seen.broken_total += 1;
        if seen.broken.len() < KEPT {
            eprintln!("broken: {what}");
            seen.broken.push(what);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
