//! What all clients do at a time: anything, only well-behaved requests, or nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What clients do.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The whole mix.
    Storm,
    /// Load of the same size in which nobody leaves, so that a cancellation is a probe's.
    Calm,
    /// No request and no connection.
    Rest,
    /// The end.
    Stop,
}

struct Now {
    mode: Mode,
    /// Counts changes of the mode.
    epoch: u64,
    parked: usize,
}

/// The mode, and who follows it already.
pub(super) struct Pace {
    now: Mutex<Now>,
    changed: Condvar,
    /// The epoch in which each client began its latest request.
    seen: Vec<AtomicU64>,
}

impl Pace {
    pub(super) fn new(clients: usize) -> Self {
        let now = Now { mode: Mode::Rest, epoch: 1, parked: 0 };
        Self { now: Mutex::new(now), changed: Condvar::new(), seen: (0..clients).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Waits for `client`'s next turn; `None` is the end. `leave` is called before it parks.
    pub(super) fn turn(&self, client: usize, leave: impl FnOnce()) -> Option<Mode> {
        let mut now = self.lock();
        if now.mode == Mode::Rest {
            leave();
            now.parked += 1;
            self.changed.notify_all();
            now = self.changed.wait_while(now, |now| now.mode == Mode::Rest).unwrap_or_else(PoisonError::into_inner);
            now.parked -= 1;
        }
        if let Some(seen) = self.seen.get(client) {
            seen.store(now.epoch, Ordering::Release);
        }
        Some(now.mode).filter(|mode| *mode != Mode::Stop)
    }

    /// Changes the mode.
    pub(super) fn set(&self, mode: Mode) {
        let mut now = self.lock();
        now.mode = mode;
        now.epoch += 1;
        self.changed.notify_all();
    }

    /// Waits until every client rests; `false` if it takes longer than `patience`.
    pub(super) fn all_rest(&self, patience: Duration) -> bool {
        let clients = self.seen.len();
        let waited = self.changed.wait_timeout_while(self.lock(), patience, |now| now.parked < clients);
        let (now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        now.parked == clients
    }

    /// Waits until every client began a request in the present mode; `false` if it takes longer than `patience`.
    pub(super) fn all_follow(&self, patience: Duration) -> bool {
        let (epoch, started) = (self.lock().epoch, Instant::now());
        while started.elapsed() < patience {
            if self.seen.iter().all(|seen| seen.load(Ordering::Acquire) >= epoch) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
