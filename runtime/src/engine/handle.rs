//! The engine as others see it: start, submit, abort, drain, stop.

use super::api::{EngineRequest, EngineStats, RejectReason};
use super::cancel::Cancel;
use super::core::Core;
use super::events::{EventSender, EventStream, channel};
use super::histogram::Histogram;
use super::options::{Backlog, EngineHealth, EngineLimits, EngineOptions};
use super::request::check_request;
use super::scheduler::Scheduler;
use super::shared::{Shared, WindDown};
use super::stats::Place;
use crate::device::{Device, LaunchCounters};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Starts the engine thread, which owns `device` until it ends.
    ///
    /// # Panics
    /// If the operating system gives no thread.
    pub fn start(device: Box<dyn Device>, limits: EngineLimits, options: EngineOptions) -> EngineHandle {
        let launches = device.launch_counters();
        let shared = Arc::new(Shared::new(limits, options));
        let (submissions, inbox) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("oxide-engine".to_owned())
            .spawn(move || run(device, theirs, inbox))
            .expect("the operating system gives a thread at start");
        shared.thread.get_or_init(|| thread.thread().clone());
        EngineHandle { inner: Arc::new(Inner { shared, submissions, launches, thread: Mutex::new(Some(thread)) }) }
    }
}

/// Body of the engine thread: whatever happens, health says it and every open request hears it.
fn run(device: Box<dyn Device>, shared: Arc<Shared>, inbox: mpsc::Receiver<Message>) {
    shared.thread.get_or_init(std::thread::current);
    let classes = device.plan().entries().iter().map(|entry| entry.class);
    let Some(scheduler) = Scheduler::new(classes, device.plan().bounds(), shared.options.chunk_tokens) else {
        *shared.lock_health() = EngineHealth::Failed("the plan has no mixed batch class, so nothing can be prefilled".to_owned());
        return;
    };
    let mut core = Core::new(device, Arc::clone(&shared), inbox, scheduler);
    let health = match catch_unwind(AssertUnwindSafe(|| core.run())) {
        Ok(Ok(())) => EngineHealth::Stopped,
        Ok(Err(error)) => EngineHealth::Failed(error.to_string()),
        Err(panic) => EngineHealth::Failed(format!("engine bug: {}", panic_text(panic.as_ref()))),
    };
    if let EngineHealth::Failed(message) = &health {
        tracing::error!(%message, "engine failed");
    }
    *shared.lock_health() = health.clone();
    let farewell = catch_unwind(AssertUnwindSafe(|| core.close(&health)));
    if farewell.is_err() {
        tracing::error!("engine state was beyond repair; streams end by themselves");
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&'static str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic")
}

/// What reaches the engine thread.
pub(super) enum Message {
    Submit(Box<Submission>),
    /// Something to do between two steps.
    Errand(Box<dyn FnOnce(&mut Core) + Send>),
}

/// A request on its way to the engine thread.
pub(super) struct Submission {
    pub(super) request: EngineRequest,
    pub(super) events: EventSender,
    pub(super) cancel: Arc<Cancel>,
    pub(super) submitted: Instant,
    pub(super) place: Place,
}

/// A handle to the engine thread. When the last one is dropped the engine drains and ends.
#[derive(Clone)]
pub struct EngineHandle {
    inner: Arc<Inner>,
}

struct Inner {
    launches: Option<Arc<LaunchCounters>>,
    shared: Arc<Shared>,
    submissions: mpsc::Sender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.drain.store(true, Ordering::Release);
        self.shared.wake();
    }
}

impl EngineHandle {
    /// Hands a request to the engine. Never blocks.
    ///
    /// # Errors
    /// If the request is outside the limits, can never fit, the queue is full, or the engine winds down.
    pub fn submit(&self, request: EngineRequest) -> Result<EventStream, RejectReason> {
        let result = self.try_submit(request);
        if result.is_err() {
            self.inner.shared.load.rejected.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// Whether [`EngineHandle::submit`] would take a request now.
    ///
    /// # Errors
    /// As there.
    pub fn would_take(&self, request: &EngineRequest) -> Result<(), RejectReason> {
        let shared = &self.inner.shared;
        self.check(request)?;
        let has_room = shared.load.has_room(shared.options.queue_max, shared.limits.seqs_max, u64::from(request.n));
        if has_room { Ok(()) } else { Err(self.queue_full()) }
    }

    fn check(&self, request: &EngineRequest) -> Result<(), RejectReason> {
        if self.health() != EngineHealth::Running {
            return Err(RejectReason::Draining);
        }
        check_request(request, &self.inner.shared.limits)
    }

    fn queue_full(&self) -> RejectReason {
        let shared = &self.inner.shared;
        RejectReason::QueueFull { limit: shared.options.queue_max, retry_after: shared.load.backlog().room }
    }

    fn try_submit(&self, request: EngineRequest) -> Result<EventStream, RejectReason> {
        let shared = &self.inner.shared;
        self.check(&request)?;
        let (prompt, choices) = (request.prompt.len() as u64, u64::from(request.n));
        let place = shared.load.enter(shared.options.queue_max, shared.limits.seqs_max, prompt, choices);
        let place = place.ok_or_else(|| self.queue_full())?;
        let cancel = Arc::new(Cancel::new(request.n));
        let serial = shared.serial.fetch_add(1, Ordering::Relaxed);
        let (events, stream) = channel(&request, Arc::clone(shared), Arc::clone(&cancel), serial);
        shared.lock_open().entry(request.id.clone()).or_default().push((serial, Arc::clone(&cancel)));
        let submission = Box::new(Submission { request, events, cancel, submitted: Instant::now(), place });
        if self.inner.submissions.send(Message::Submit(submission)).is_err() {
            shared.load.leave(place, prompt, choices);
            shared.load.release(choices);
            return Err(RejectReason::Draining);
        }
        shared.wake();
        Ok(stream)
    }

    /// Has the engine thread do something between two steps; it is dropped undone if the thread has ended.
    pub(super) fn errand(&self, errand: impl FnOnce(&mut Core) + Send + 'static) {
        if self.inner.submissions.send(Message::Errand(Box::new(errand))).is_ok() {
            self.inner.shared.wake();
        }
    }

    /// Whether prefixes are shared at all.
    pub(super) fn shares_prefixes(&self) -> bool {
        self.inner.shared.options.prefix_cache
    }

    /// Cancels every open request of this id; `false` if there is none. Terminal events still come.
    pub fn abort(&self, id: &str) -> bool {
        let found = match self.inner.shared.lock_open().get(id) {
            None => return false,
            Some(flags) => flags.iter().map(|(_, flag)| flag.cancel()).count() > 0,
        };
        self.inner.shared.announce_cancel();
        found
    }

    /// Counters and gauges as of the last step. Cheap; never makes the engine wait.
    pub fn stats(&self) -> EngineStats {
        let load = &self.inner.shared.load;
        // Before the rest: whoever stops waiting is published as running first.
        let waiting = load.waiting.load(Ordering::Acquire) as u32;
        let mut stats = self.inner.shared.stats.read();
        stats.waiting += waiting;
        stats.rejected += load.rejected.load(Ordering::Relaxed);
        stats
    }

    /// Limits that requests are checked against.
    pub fn limits(&self) -> &EngineLimits {
        &self.inner.shared.limits
    }

    /// Where the engine is in its life.
    pub fn health(&self) -> EngineHealth {
        let health = self.inner.shared.lock_health().clone();
        match (health, self.inner.shared.wind_down()) {
            (EngineHealth::Running, WindDown::Drain | WindDown::Stop) => EngineHealth::Draining,
            (health, _) => health,
        }
    }

    /// Work outstanding and how long it will take at the recent rate.
    pub fn backlog(&self) -> Backlog {
        self.inner.shared.load.backlog()
    }

    /// Refuses new requests, finishes the accepted ones, then ends the thread.
    pub fn drain(&self) {
        self.inner.shared.drain.store(true, Ordering::Release);
        self.inner.shared.wake();
    }

    /// Cancels everything and ends the thread.
    pub fn stop(&self) {
        self.inner.shared.stop.store(true, Ordering::Release);
        self.inner.shared.wake();
    }

    /// Waits until the thread has ended (after [`EngineHandle::drain`] or [`EngineHandle::stop`], or a failure).
    pub fn join(&self) {
        let mut thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            let _ = thread.join();
        }
    }

    /// Runs no further step until [`EngineHandle::resume`]; submissions, cancellations and deadlines go on. For tests.
    #[doc(hidden)]
    pub fn pause(&self) {
        self.inner.shared.paused.store(true, Ordering::Release);
        self.inner.shared.wake();
    }

    /// How long cancelled requests kept their slots and pages, from the moment that their client was known to be gone.
    pub fn cancel_to_free(&self) -> &Histogram {
        &self.inner.shared.cancel_to_free
    }

    /// Launches of each sealed artifact, on devices that have some.
    pub fn launches(&self) -> Option<&LaunchCounters> {
        self.inner.launches.as_deref()
    }

    /// Undoes [`EngineHandle::pause`].
    #[doc(hidden)]
    pub fn resume(&self) {
        self.inner.shared.paused.store(false, Ordering::Release);
        self.inner.shared.wake();
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("health", &self.health()).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
