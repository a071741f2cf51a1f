//! What other threads read of the engine without making it wait: a seqlock of counters, and the rate
//! and backlog figures from which waiting times are estimated.

use super::api::EngineStats;
use super::options::Backlog;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

const FIELDS: usize = 18;
/// Weight of the newest sample in the moving averages.
const RATE_WEIGHT: f64 = 0.1;
/// Estimates stay in this range: below, clients would hammer; above, nobody waits.
const ESTIMATE_MIN: Duration = Duration::from_millis(1);
const ESTIMATE_MAX: Duration = Duration::from_secs(600);
/// Estimate before anything was measured.
const ESTIMATE_UNKNOWN: Duration = Duration::from_secs(1);

/// A snapshot of [`EngineStats`], written by one thread and read by any, without locks.
#[derive(Debug, Default)]
pub(super) struct SharedStats {
    /// Odd while a write is under way.
    version: AtomicU64,
    fields: [AtomicU64; FIELDS],
}

impl SharedStats {
    /// Publishes `stats`. One writer only.
    pub(super) fn publish(&self, stats: &EngineStats) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (field, value) in self.fields.iter().zip(to_words(stats)) {
            field.store(value, Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The newest whole snapshot.
    pub(super) fn read(&self) -> EngineStats {
        loop {
            let before = self.version.load(Ordering::Acquire);
            let words = std::array::from_fn(|index| self.fields[index].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before {
                return from_words(words);
            }
            std::hint::spin_loop();
        }
    }
}

fn to_words(stats: &EngineStats) -> [u64; FIELDS] {
    let EngineStats {
        running,
        waiting,
        pages_total,
        pages_free,
        pages_cached,
        pages_in_use,
        steps,
        prefill_tokens,
        decode_tokens,
        prefix_queries,
        prefix_hits,
        admitted,
        finished,
        cancelled,
        rejected,
        failed,
        preemptions,
        evictions,
    } = *stats;
    let gauges = [running, waiting, pages_total, pages_free, pages_cached, pages_in_use].map(u64::from);
    let [running, waiting, pages_total, pages_free, pages_cached, pages_in_use] = gauges;
    [
        running,
        waiting,
        pages_total,
        pages_free,
        pages_cached,
        pages_in_use,
        steps,
        prefill_tokens,
        decode_tokens,
        prefix_queries,
        prefix_hits,
        admitted,
        finished,
        cancelled,
        rejected,
        failed,
        preemptions,
        evictions,
    ]
}

fn from_words(words: [u64; FIELDS]) -> EngineStats {
    let [
        running,
        waiting,
        pages_total,
        pages_free,
        pages_cached,
        pages_in_use,
        steps,
        prefill_tokens,
        decode_tokens,
        prefix_queries,
        prefix_hits,
        admitted,
        finished,
        cancelled,
        rejected,
        failed,
        preemptions,
        evictions,
    ] = words;
    EngineStats {
        running: running as u32,
        waiting: waiting as u32,
        pages_total: pages_total as u32,
        pages_free: pages_free as u32,
        pages_cached: pages_cached as u32,
        pages_in_use: pages_in_use as u32,
        steps,
        prefill_tokens,
        decode_tokens,
        prefix_queries,
        prefix_hits,
        admitted,
        finished,
        cancelled,
        rejected,
        failed,
        preemptions,
        evictions,
    }
}

/// How a request waits.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// For its turn: when it came, a slot was free for each of its choices.
    Slots,
    /// For slots, in the line whose length is bounded.
    Line,
}

/// Work outstanding and the recent rate. Gauges are kept by whoever changes them; averages by the engine.
#[derive(Debug, Default)]
pub(super) struct Load {
    /// Requests waiting, those on their way to the engine thread included.
    pub(super) waiting: AtomicUsize,
    /// Those of them that found no free slot. The queue's bound is on this.
    lined: AtomicUsize,
    /// Sequences running, preempted or waited for.
    claimed: AtomicU64,
    /// Their prompt tokens.
    pub(super) waiting_prompt: AtomicU64,
    /// Their choices.
    pub(super) waiting_choices: AtomicU64,
    /// Tokens that running sequences still need at most (prompt) or on average (completion).
    pub(super) running_tokens: AtomicU64,
    /// Requests running.
    pub(super) running: AtomicU64,
    /// Requests refused.
    pub(super) rejected: AtomicU64,
    /// Tokens a second, as f64 bits.
    rate: AtomicU64,
    /// Mean completion length of finished choices, as f64 bits.
    completion: AtomicU64,
}

impl Load {
    /// Claims a slot for each choice where all `slots` are not claimed yet, or else a place in the line of
    /// those that wait for one, if fewer than `limit` are in it.
    pub(super) fn enter(&self, limit: usize, slots: u32, prompt: u64, choices: u64) -> Option<Place> {
        let fits = |claimed: u64| (claimed + choices <= u64::from(slots)).then_some(claimed + choices);
        let room = |lined: usize| (lined < limit).then_some(lined + 1);
        let place = if self.claimed.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok() {
            Place::Slots
        } else {
            self.lined.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).ok()?;
            self.claimed.fetch_add(choices, Ordering::AcqRel);
            Place::Line
        };
        self.waiting.fetch_add(1, Ordering::AcqRel);
        self.waiting_prompt.fetch_add(prompt, Ordering::Relaxed);
        self.waiting_choices.fetch_add(choices, Ordering::Relaxed);
        Some(place)
    }

    /// Whether [`Load::enter`] would find room now.
    pub(super) fn has_room(&self, limit: usize, slots: u32, choices: u64) -> bool {
        self.claimed.load(Ordering::Acquire) + choices <= u64::from(slots) || self.lined.load(Ordering::Acquire) < limit
    }

    /// Ends the wait; what is claimed stays so until [`Load::release`].
    pub(super) fn leave(&self, place: Place, prompt: u64, choices: u64) {
        if place == Place::Line {
            self.lined.fetch_sub(1, Ordering::AcqRel);
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        self.waiting_prompt.fetch_sub(prompt, Ordering::Relaxed);
        self.waiting_choices.fetch_sub(choices, Ordering::Relaxed);
    }

    /// Gives back what ended choices had claimed.
    pub(super) fn release(&self, choices: u64) {
        self.claimed.fetch_sub(choices, Ordering::AcqRel);
    }

    /// Sets the recent rate in tokens a second.
    pub(super) fn set_rate(&self, rate: f64) {
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
    }

    /// Adds a finished choice's length to the average.
    pub(super) fn sample_completion(&self, tokens: u32) {
        let (old, sample) = (self.completion_mean(), f64::from(tokens));
        let new = if old == 0.0 { sample } else { old + RATE_WEIGHT * (sample - old) };
        self.completion.store(new.to_bits(), Ordering::Relaxed);
    }

    /// Mean completion length of finished choices, 0 before the first.
    pub(super) fn completion_mean(&self) -> f64 {
        f64::from_bits(self.completion.load(Ordering::Relaxed))
    }

    /// The estimate as of now.
    pub(super) fn backlog(&self) -> Backlog {
        let tokens_per_second = f64::from_bits(self.rate.load(Ordering::Relaxed));
        let waiting = self.waiting.load(Ordering::Relaxed);
        let completions = self.waiting_choices.load(Ordering::Relaxed) as f64 * self.completion_mean();
        let tokens = self.running_tokens.load(Ordering::Relaxed) + self.waiting_prompt.load(Ordering::Relaxed) + completions as u64;
        // Before the first completion nobody knows how long they are.
        let rate = if self.completion_mean() > 0.0 { tokens_per_second } else { 0.0 };
        let requests = (waiting as u64 + self.running.load(Ordering::Relaxed)).max(1);
        Backlog {
            waiting,
            tokens,
            tokens_per_second,
            drain: estimate(tokens as f64, rate),
            room: estimate(tokens as f64 / requests as f64, rate),
        }
    }
}

fn estimate(tokens: f64, rate: f64) -> Duration {
    if rate <= 0.0 {
        return ESTIMATE_UNKNOWN;
    }
    let seconds = (tokens / rate).min(ESTIMATE_MAX.as_secs_f64());
    Duration::from_secs_f64(seconds).clamp(ESTIMATE_MIN, ESTIMATE_MAX)
}

/// Tokens and time of recent steps, both averaged, so that long steps count by their length.
#[derive(Debug, Default)]
pub(super) struct RateMeter {
    tokens: f64,
    seconds: f64,
}

impl RateMeter {
    /// Adds a step; the rate with it.
    pub(super) fn add(&mut self, tokens: u64, time: Duration) -> f64 {
        self.tokens += RATE_WEIGHT * (tokens as f64 - self.tokens);
        self.seconds += RATE_WEIGHT * (time.as_secs_f64() - self.seconds);
        if self.seconds > 0.0 { self.tokens / self.seconds } else { 0.0 }
    }
}
