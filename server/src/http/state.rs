//! What all requests share: options, keys, metrics, the model once it is there, and the life cycle.

use super::auth::{ApiKeys, Owner};
use super::metrics::Metrics;
use super::options::ServeOptions;
use super::prefixes::Prefixes;
use super::served::{Served, ServedModel};
use crate::journal::Journal;
use crate::openai::error::ApiError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Semaphore, watch};

/// Where the server is in its life.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The bundle loads.
    Loading,
    /// Requests are taken.
    Ready,
    /// Live requests finish; new ones are refused.
    Draining,
    /// The engine failed.
    Failed,
}

/// Shared by all requests.
pub(crate) struct State {
    pub(crate) options: ServeOptions,
    pub(crate) keys: ApiKeys,
    pub(crate) metrics: Metrics,
    pub(crate) journal: Option<Journal>,
    pub(crate) prefixes: Prefixes,
    pub(crate) started_unix: u64,
    /// Bounds the threads that tokenize long texts.
    pub(crate) tokenizing: Arc<Semaphore>,
    model: OnceLock<Arc<Served>>,
    phase: watch::Sender<Phase>,
    live: watch::Sender<usize>,
    /// Requests in flight by owner.
    by_owner: Vec<AtomicUsize>,
    /// Live generations by every id that names them.
    names: Mutex<HashMap<String, Vec<Named>>>,
}

struct Named {
    answer_id: Arc<str>,
    owner: Owner,
}

/// Seconds since the epoch.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

impl State {
    pub(crate) fn new(options: ServeOptions, journal: Option<Journal>) -> Self {
        let keys = ApiKeys::new(&options.api_keys);
        let threads = std::thread::available_parallelism().map_or(2, |count| count.get());
        Self {
            by_owner: (0..keys.owners()).map(|_| AtomicUsize::new(0)).collect(),
            keys,
            options,
            metrics: Metrics::default(),
            journal,
            prefixes: Prefixes::default(),
            started_unix: unix_seconds(),
            tokenizing: Arc::new(Semaphore::new(threads)),
            model: OnceLock::new(),
            phase: watch::Sender::new(Phase::Loading),
            live: watch::Sender::new(0),
            names: Mutex::new(HashMap::new()),
        }
    }

    /// Takes the loaded model and starts answering, unless a drain began meanwhile.
    pub(crate) fn install(&self, model: ServedModel) {
        let served = Served::new(model, &self.options, self.started_unix);
        let _ = self.model.set(Arc::new(served));
        self.phase.send_if_modified(|phase| {
            let loading = *phase == Phase::Loading;
            if loading {
                *phase = Phase::Ready;
            }
            loading
        });
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// The model, in whatever phase.
    pub(crate) fn loaded(&self) -> Option<&Arc<Served>> {
        self.model.get()
    }

    /// The model, for requests that read from it.
    ///
    /// # Errors
    /// 503 while it loads.
    pub(crate) fn model(&self) -> Result<&Arc<Served>, ApiError> {
        self.loaded().ok_or_else(|| ApiError::unavailable("model_loading", "the model is still loading; try again soon"))
    }

    /// The model, for requests that make it work.
    ///
    /// # Errors
    /// 503 while it loads, the server drains, or after the engine failed.
    pub(crate) fn ready_model(&self) -> Result<&Arc<Served>, ApiError> {
        match self.phase() {
            Phase::Draining => {
                Err(ApiError::unavailable("server_draining", "the server is shutting down; send the request to another one"))
            }
            Phase::Failed => Err(ApiError::unavailable("engine_failed", "the engine failed and the server is stopping")),
            Phase::Loading | Phase::Ready => self.model(),
        }
    }

    /// Counts a request of `owner` until the guard is dropped.
    ///
    /// # Errors
    /// 429 if the owner has its fill.
    pub(crate) fn enter(self: &Arc<Self>, owner: Owner) -> Result<LiveGuard, ApiError> {
        let guard = LiveGuard { state: Arc::clone(self), owner };
        self.live.send_modify(|live| *live += 1);
        let before = self.owned(owner).map_or(0, |count| count.fetch_add(1, Ordering::AcqRel));
        match self.options.requests_per_key_max {
            Some(limit) if before >= limit => {
                let wait = self.loaded().map_or(Duration::from_secs(1), |served| served.model.engine.backlog().room);
                Err(ApiError::quota(limit, wait))
            }
            _ => Ok(guard),
        }
    }

    /// Whether [`State::enter`] would let a request in now.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn has_quota(&self, owner: Owner) -> Result<(), ApiError> {
        let live = self.owned(owner).map_or(0, |count| count.load(Ordering::Acquire));
        match self.options.requests_per_key_max {
            Some(limit) if live >= limit => Err(ApiError::quota(limit, Duration::from_secs(1))),
            _ => Ok(()),
        }
    }

    fn owned(&self, owner: Owner) -> Option<&AtomicUsize> {
        self.by_owner.get(owner.0 as usize)
    }

    /// Counts a panic that was contained.
    pub(crate) fn count_panic(&self) {
        self.metrics.panics.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until no generation is live.
    pub(crate) async fn idle(&self) {
        // The sender lives as long as `self`, so the wait cannot fail.
        let _ = self.live.subscribe().wait_for(|live| *live == 0).await;
    }

    /// Live generations.
    pub(crate) fn live(&self) -> usize {
        *self.live.borrow()
    }

    /// Makes a generation abortable by its names until the guard is dropped.
    pub(crate) fn name(self: &Arc<Self>, answer_id: &str, request_id: &str, owner: Owner) -> NameGuard {
        let answer_id: Arc<str> = answer_id.into();
        let guard =
            NameGuard { state: Arc::clone(self), names: [answer_id.to_string(), request_id.to_owned()], answer_id: Arc::clone(&answer_id) };
        let mut names = self.lock_names();
        for name in &guard.names {
            names.entry(name.clone()).or_default().push(Named { answer_id: Arc::clone(&answer_id), owner });
        }
        guard
    }

    /// Answer ids of `owner`'s live generations that `name` names.
    pub(crate) fn named(&self, name: &str, owner: Owner) -> Vec<Arc<str>> {
        let names = self.lock_names();
        let named = names.get(name).map_or(&[][..], Vec::as_slice);
        named.iter().filter(|entry| entry.owner == owner).map(|entry| Arc::clone(&entry.answer_id)).collect()
    }

    fn lock_names(&self) -> MutexGuard<'_, HashMap<String, Vec<Named>>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A live generation, for draining and quotas.
pub(crate) struct LiveGuard {
    state: Arc<State>,
    owner: Owner,
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        if let Some(count) = self.state.owned(self.owner) {
            count.fetch_sub(1, Ordering::AcqRel);
        }
        self.state.live.send_modify(|live| *live -= 1);
    }
}

/// The names of a live generation.
pub(crate) struct NameGuard {
    state: Arc<State>,
    names: [String; 2],
    answer_id: Arc<str>,
}

impl Drop for NameGuard {
    fn drop(&mut self) {
        let mut names = self.state.lock_names();
        for name in &self.names {
            if let Some(entries) = names.get_mut(name) {
                entries.retain(|entry| entry.answer_id != self.answer_id);
                if entries.is_empty() {
                    names.remove(name);
                }
            }
        }
    }
}
