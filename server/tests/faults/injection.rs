//! What the tests inject, what they see of it, and what must be true after every fault.

use crate::harness::{Live, Setup};
use oxide_run::faults::{Fault, Faults, Inject, Place};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for something that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Faults to come. Everything is off at first.
#[derive(Default)]
pub(crate) struct Injection(Mutex<Plan>);

#[derive(Default)]
struct Plan {
    /// Where the next request panics.
    panic: Option<Place>,
    /// Where there is no memory.
    starved: Option<Place>,
    /// After how many polls the next connection is dropped; each place then takes two polls.
    polls: Option<u64>,
    /// Where that connection is dropped, at its next poll.
    leave: Option<Place>,
    /// Whether `leave` was passed. Threads beside the connection may have passed other places since.
    leaving: bool,
    /// Whether each place takes two polls.
    yields: bool,
    /// Places that were passed since the plan was made.
    passed: Vec<Place>,
    /// Where a connection was when it was dropped.
    cut: Option<Option<Place>>,
}

impl Inject for Injection {
    fn at(&self, place: Place) -> Fault {
        let mut plan = self.0.lock().expect("no test panics with it");
        plan.passed.push(place);
        plan.leaving |= plan.leave == Some(place);
        if plan.panic.take_if(|at| *at == place).is_some() {
            return Fault::Panic;
        }
        match plan.starved {
            Some(starved) if starved == place => Fault::NoMemory,
            _ if plan.yields => Fault::Yield,
            _ => Fault::None,
        }
    }

    fn polls(&self) -> Option<u64> {
        self.0.lock().expect("no test panics with it").polls.take()
    }

    fn leaves(&self) -> bool {
        self.0.lock().expect("no test panics with it").leaving
    }

    fn cut(&self) {
        let mut plan = self.0.lock().expect("no test panics with it");
        plan.cut = Some(if plan.leaving { plan.leave } else { plan.passed.last().copied() });
    }
}

impl Injection {
    fn plan(&self, plan: Plan) {
        *self.0.lock().expect("no test panics with it") = plan;
    }

    /// Has the next request that passes `place` panic there.
    pub(crate) fn panic_at(&self, place: Place) {
        self.plan(Plan { panic: Some(place), ..Plan::default() });
    }

    /// Gives no memory at `place`.
    pub(crate) fn starve(&self, place: Place) {
        self.plan(Plan { starved: Some(place), ..Plan::default() });
    }

    /// Has the next connection dropped after `polls` polls.
    pub(crate) fn cut_after(&self, polls: u64) {
        self.plan(Plan { polls: Some(polls), yields: true, ..Plan::default() });
    }

    /// Has the next connection dropped at `place`.
    pub(crate) fn cut_at(&self, place: Place) {
        self.plan(Plan { polls: Some(u64::MAX), leave: Some(place), yields: true, ..Plan::default() });
    }

    /// Takes back what did not happen. Where a connection was dropped, if one was: `None` within is before any place.
    pub(crate) fn end(&self) -> Option<Option<Place>> {
        let cut = self.0.lock().expect("no test panics with it").cut;
        self.plan(Plan::default());
        cut
    }

    /// Whether the connection was dropped.
    pub(crate) fn was_cut(&self) -> bool {
        self.0.lock().expect("no test panics with it").cut.is_some()
    }

    /// Whether a planned panic is still to come.
    pub(crate) fn is_armed(&self) -> bool {
        self.0.lock().expect("no test panics with it").panic.is_some()
    }
}

/// A setup with faults. One request a key may be in flight, so that a lost place is a refusal of the next one.
pub(crate) fn injected(setup: Setup) -> (Setup, Arc<Injection>) {
    let injection = Arc::new(Injection::default());
    let faults = Faults::new(Arc::clone(&injection) as Arc<dyn Inject>);
    (setup.options(|options| options.faults = faults), injection)
}

/// The metrics of one moment.
pub(crate) struct Metrics(String);

impl Metrics {
    pub(crate) fn of(live: &Live) -> Self {
        Self(live.get("/metrics").text())
    }

    pub(crate) fn get(&self, name: &str) -> f64 {
        let line = self.0.lines().find(|line| line.split(' ').next() == Some(name)).unwrap_or_else(|| panic!("no metric {name}"));
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    }
}

/// Id that the requests of these tests have.
pub(crate) const ID: &str = "fault";

/// Waits until nothing of any request is left, in the engine or in the server, and its id names nothing.
///
/// A connection that its client closed may not be accepted yet: what it leaves is found by the next call.
pub(crate) fn settle(live: &Live) {
    let start = Instant::now();
    loop {
        let metrics = Metrics::of(live);
        let gauges = ["oxide_requests_running", "oxide_requests_waiting", "oxide_kv_pages_in_use", "oxide_requests_in_flight"];
        // The connection that asks is open.
        let gone = gauges.iter().all(|name| metrics.get(name) == 0.0) && metrics.get("oxide_connections") == 1.0;
        let whole = metrics.get("oxide_kv_pages_free") + metrics.get("oxide_kv_pages_cached") == metrics.get("oxide_kv_pages_capacity");
        if gone && whole && live.request("DELETE", &format!("/v1/requests/{ID}"), &[], b"").status == 404 {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "something stays behind: {}", metrics.0);
        std::thread::sleep(Duration::from_micros(200));
    }
}
