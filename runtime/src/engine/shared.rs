//! What handles, streams and the engine thread share.
//!
//! The thread is woken by unparking it, never by a message, so that nothing here can fill up.

use super::api::EngineStats;
use super::cancel::Cancel;
use super::histogram::Histogram;
use super::options::{EngineHealth, EngineLimits, EngineOptions};
use super::stats::{Load, SharedStats};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;

/// How far the engine is asked to wind down.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WindDown {
    No,
    /// Finish what was accepted.
    Drain,
    /// Cancel it.
    Stop,
}

/// Cancel flags of open streams with the streams' serials, by request id.
type OpenStreams = HashMap<String, Vec<(u64, Arc<Cancel>)>>;

/// What handles, streams and the engine thread share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) limits: EngineLimits,
    pub(super) options: EngineOptions,
    pub(super) stats: SharedStats,
    pub(super) load: Load,
    /// Raised whenever some request's cancel flag was; the engine then looks at all of them.
    pub(super) cancels: AtomicU64,
    /// From a cancellation to the return of the request's slots and pages, in admitted requests.
    pub(super) cancel_to_free: Histogram,
    pub(super) paused: AtomicBool,
    pub(super) drain: AtomicBool,
    pub(super) stop: AtomicBool,
    health: Mutex<EngineHealth>,
    pub(super) thread: OnceLock<Thread>,
    pub(super) serial: AtomicU64,
    /// Cancel flags by request id; touched at submission, abort and stream drop, never by the engine thread.
    open: Mutex<OpenStreams>,
}

impl Shared {
    pub(super) fn new(limits: EngineLimits, options: EngineOptions) -> Self {
        let total = limits.kv_pages;
        let shared = Self {
            limits,
            options,
            stats: SharedStats::default(),
            load: Load::default(),
            cancels: AtomicU64::new(0),
            cancel_to_free: Histogram::default(),
            paused: AtomicBool::new(false),
            drain: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            health: Mutex::new(EngineHealth::Running),
            thread: OnceLock::new(),
            serial: AtomicU64::new(0),
            open: Mutex::new(HashMap::new()),
        };
        shared.stats.publish(&EngineStats { pages_total: total, pages_free: total, ..EngineStats::default() });
        shared
    }

    pub(super) fn wind_down(&self) -> WindDown {
        if self.stop.load(Ordering::Acquire) {
            WindDown::Stop
        } else if self.drain.load(Ordering::Acquire) {
            WindDown::Drain
        } else {
            WindDown::No
        }
    }

    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    pub(super) fn announce_cancel(&self) {
        self.cancels.fetch_add(1, Ordering::AcqRel);
        self.wake();
    }

    /// Cancels a request whose client is gone or too slow, at the engine's next sweep.
    pub(super) fn give_up(&self, cancel: &Cancel) {
        cancel.cancel();
        self.cancels.fetch_add(1, Ordering::AcqRel);
    }

    /// Message of the failure that ended the engine.
    pub(super) fn failure(&self) -> Option<String> {
        match &*self.lock_health() {
            EngineHealth::Failed(message) => Some(message.clone()),
            EngineHealth::Running | EngineHealth::Draining | EngineHealth::Stopped => None,
        }
    }

    /// Drops the cancel flag of a stream.
    pub(super) fn forget(&self, id: &str, serial: u64) {
        let mut open = self.lock_open();
        if let Some(flags) = open.get_mut(id) {
            flags.retain(|(entry, _)| *entry != serial);
            if flags.is_empty() {
                open.remove(id);
            }
        }
    }

    pub(super) fn lock_health(&self) -> MutexGuard<'_, EngineHealth> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_open(&self) -> MutexGuard<'_, OpenStreams> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
