//! The engine thread's state and loop.
//!
//! ```text
//!   receive → sweep (cancelled, late) → submit while the device takes more → sweep (late) → collect the oldest → commit
//! ```
//!
//! With a device of depth 2, step `k + 1` is submitted before step `k` is collected: its sequences
//! take their input ids from the rows of step `k`. Pages are given back at once, also while a step that
//! writes them is in flight: the device runs steps in order, so a later owner writes later. What a step
//! draws for a sequence that ended meanwhile is discarded. Pages are only published once collected.

use super::api::{EngineEvent, EngineStats, FinishReason, RejectReason};
use super::assemble::Assembler;
use super::commit::End;
use super::events::EventSender;
use super::group::{Group, Round};
use super::handle::{Message, Submission};
use super::options::EngineHealth;
use super::pager::Pager;
use super::queue::FairQueue;
use super::scheduler::{Batch, Scheduler, SeqView};
use super::sequence::Sequence;
use super::shared::{Shared, WindDown};
use super::slab::Slab;
use super::stats::{Place, RateMeter};
use crate::device::{Device, DeviceError, StepOutputs};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// Steps between two looks at the remaining work, when one follows the other.
const LOAD_STEPS: u64 = 8;

/// What a row of a step in flight is for.
#[derive(Copy, Clone, Debug)]
pub(super) enum RowUse {
    /// The next token of a sequence.
    Sample,
    /// The log-probability of a prompt token.
    Score,
}

/// A row of a step in flight.
#[derive(Copy, Clone, Debug)]
pub(super) struct RowRef {
    pub(super) slot: u32,
    pub(super) serial: u64,
    pub(super) purpose: RowUse,
}

/// Tokens of a sequence in a step in flight.
#[derive(Copy, Clone, Debug)]
pub(super) struct ChunkRef {
    pub(super) slot: u32,
    pub(super) serial: u64,
    /// Tokens of the sequence that have KV once the step is done.
    pub(super) end: u32,
}

/// A step submitted and not collected.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    pub(super) chunks: Vec<ChunkRef>,
    pub(super) rows: Vec<RowRef>,
    pub(super) tokens: u64,
    /// Whether some sequence wants its prompt scored.
    pub(super) scores: bool,
}

/// Everything that the engine thread owns.
pub(super) struct Core {
    pub(super) device: Box<dyn Device>,
    pub(super) shared: Arc<Shared>,
    inbox: mpsc::Receiver<Message>,
    pub(super) scheduler: Scheduler,
    pub(super) pager: Pager,
    pub(super) queue: FairQueue<Group>,
    pub(super) groups: Slab<Group>,
    pub(super) seqs: Slab<Sequence>,
    /// Slots with pages, oldest first.
    pub(super) running: Vec<u32>,
    /// Slots without pages that were preempted, oldest first.
    pub(super) preempted: Vec<u32>,
    /// Sequences that the running slots stand for.
    pub(super) active_seqs: u32,
    /// Pages that proven sequences may still take.
    pub(super) reserved: u32,
    pub(super) seqs_max: u32,
    pub(super) page_tokens: u32,
    pub(super) overcommit: bool,
    pub(super) prefix_cache: bool,
    pub(super) stats: EngineStats,
    pub(super) now: Instant,
    pub(super) serial: u64,
    pub(super) step: u64,
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) spare: Vec<InFlight>,
    pub(super) views: Vec<SeqView>,
    pub(super) batch: Batch,
    pub(super) first_decode: usize,
    pub(super) assembler: Assembler,
    pub(super) outputs: StepOutputs,
    /// Who was admitted since statistics were published: place, prompt tokens and choices.
    pub(super) entered: Vec<(Place, u64, u64)>,
    /// Terminal events of this round; sent after the statistics that include them are published.
    pub(super) terminals: Vec<(EventSender, EngineEvent)>,
    pub(super) meter: RateMeter,
    pub(super) meter_mark: Instant,
    cancels_seen: u64,
    /// Rounds of admission so far.
    pub(super) rounds: u64,
    /// Whether the last round ended for want of slots or pages.
    pub(super) crowded: bool,
    /// Earliest time at which something may be late.
    look_again: Option<Instant>,
}

impl Core {
    pub(super) fn new(device: Box<dyn Device>, shared: Arc<Shared>, inbox: mpsc::Receiver<Message>, scheduler: Scheduler) -> Self {
        let (limits, options) = (&shared.limits, &shared.options);
        let (pages, page_tokens) = (device.kv_pages().min(limits.kv_pages), device.plan().kv().page_tokens);
        let now = Instant::now();
        Self {
            scheduler,
            pager: Pager::new(pages, page_tokens),
            queue: FairQueue::new(options.fair_quantum_tokens),
            groups: Slab::new(),
            seqs: Slab::new(),
            running: Vec::new(),
            preempted: Vec::new(),
            active_seqs: 0,
            reserved: 0,
            seqs_max: limits.seqs_max.min(scheduler.seqs_max()),
            page_tokens,
            overcommit: options.overcommit,
            prefix_cache: options.prefix_cache,
            stats: EngineStats { pages_total: pages, ..EngineStats::default() },
            now,
            serial: 0,
            step: 0,
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            views: Vec::new(),
            batch: Batch::default(),
            first_decode: 0,
            assembler: Assembler::new(device.plan()),
            outputs: StepOutputs::default(),
            entered: Vec::new(),
            terminals: Vec::new(),
            meter: RateMeter::default(),
            meter_mark: now,
            cancels_seen: 0,
            rounds: 0,
            crowded: false,
            look_again: None,
            device,
            shared,
            inbox,
        }
    }

    /// Runs until drained, stopped, or the device fails.
    pub(super) fn run(&mut self) -> Result<(), DeviceError> {
        let depth = self.device.depth().max(1);
        loop {
            self.now = Instant::now();
            self.receive();
            self.sweep();
            if !self.terminals.is_empty() {
                // Those that were swept away do not wait for the next step to hear of it.
                self.speak();
            }
            if self.winds_down() {
                return self.discard_in_flight();
            }
            let paused = self.shared.paused.load(Ordering::Acquire);
            while !paused && self.in_flight.len() < depth && self.submit_step()? {}
            self.refuse_late();
            if !self.entered.is_empty() {
                self.publish();
            }
            if self.in_flight.is_empty() {
                if !self.speak() {
                    self.rest(paused);
                }
            } else {
                self.collect_step()?;
                self.speak();
            }
        }
    }

    /// Gives every open request its terminal events, at the end of the thread.
    pub(super) fn close(&mut self, health: &EngineHealth) {
        self.receive();
        let failure = match health {
            EngineHealth::Failed(message) => Some(message.as_str()),
            EngineHealth::Running | EngineHealth::Draining | EngineHealth::Stopped => None,
        };
        for slot in self.groups.slots().collect::<Vec<_>>() {
            match failure {
                Some(message) => self.end_group(slot, End::Failed(message)),
                None => self.end_group(slot, End::Finished(FinishReason::Cancelled)),
            }
        }
        while let Some(group) = self.queue.pop() {
            self.leave_queue(&group);
            match failure {
                Some(message) => self.end_waiting(&group, End::Failed(message)),
                None => self.reject(&group, RejectReason::Draining),
            }
        }
        self.speak();
    }

    /// Takes what was submitted into the queue, and runs errands.
    fn receive(&mut self) {
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Message::Submit(submission) => self.enqueue(*submission),
                Message::Errand(errand) => errand(self),
            }
        }
    }

    fn enqueue(&mut self, submission: Submission) {
        let (key, group) = (submission.request.fair_key, Group::new(submission, self.rounds));
        if let Some(until) = group.waiting_until() {
            self.look_again_at(until);
        }
        self.queue.push(key, group);
    }

    /// Ends what was cancelled or is late, wherever it is. Cheap when nothing was.
    fn sweep(&mut self) {
        let cancels = self.shared.cancels.load(Ordering::Acquire);
        let late = self.look_again.is_some_and(|time| self.now >= time);
        if cancels == self.cancels_seen && !late {
            return;
        }
        self.cancels_seen = cancels;
        self.look_again = None;
        self.sweep_queue();
        self.end_unwanted_choices();
        for slot in self.groups.slots().collect::<Vec<_>>() {
            let Some(group) = self.groups.get(slot) else { continue };
            if let Some(cancelled) = group.cancel.cancelled_at() {
                // Choices that ended before the rest was given up did end.
                self.end_unwanted_choices();
                self.end_group(slot, End::Finished(FinishReason::Cancelled));
                self.shared.cancel_to_free.observe(cancelled.elapsed(), 1);
            } else if let Some(deadline) = group.request.deadline {
                match self.now >= deadline {
                    true => self.end_group(slot, End::Finished(FinishReason::Deadline)),
                    false => self.look_again_at(deadline),
                }
            }
        }
    }

    /// Ends the choices whose reader found their end. What still stands for several choices goes on until it has split.
    fn end_unwanted_choices(&mut self) {
        let all = self.running.iter().chain(&self.preempted).copied();
        let unwanted = all.filter(|slot| {
            let seq = &self.seqs[*slot];
            seq.forks == 0 && self.groups[seq.group].cancel.choice_ended(seq.choice)
        });
        for slot in unwanted.collect::<Vec<_>>() {
            self.end_seq(slot, End::Finished(FinishReason::Stop));
        }
    }

    /// Answers those that found no place in time before the step is waited for.
    fn refuse_late(&mut self) {
        if self.look_again.is_some_and(|time| self.now >= time) {
            self.sweep();
            if !self.terminals.is_empty() {
                self.speak();
            }
        }
    }

    fn sweep_queue(&mut self) {
        let (now, mut gone, mut next) = (self.now, Vec::new(), None::<Instant>);
        let paused = self.shared.paused.load(Ordering::Acquire);
        let round = Round { number: if paused { u64::MAX } else { self.rounds }, crowded: paused || self.crowded };
        let late = |group: &Group| group.is_late(now, round);
        self.queue.remove_if(|group| group.is_cancelled() || late(group), |group| gone.push(group));
        for until in self.queue.iter().filter_map(Group::waiting_until) {
            next = Some(next.map_or(until, |next| next.min(until)));
        }
        if let Some(next) = next {
            self.look_again_at(next);
        }
        for group in gone {
            self.leave_queue(&group);
            if group.is_cancelled() {
                self.end_waiting(&group, End::Finished(FinishReason::Cancelled));
            } else {
                self.reject_late(&group);
            }
        }
    }

    fn leave_queue(&mut self, group: &Group) {
        self.shared.load.leave(group.place, u64::from(group.prompt_tokens()), u64::from(group.request.n));
    }

    fn reject_late(&mut self, group: &Group) {
        let reason = if group.request.deadline.is_some_and(|deadline| self.now >= deadline) {
            RejectReason::Deadline
        } else {
            let waited = self.now.saturating_duration_since(group.submitted);
            let limit = group.request.queue_time_max.unwrap_or_default();
            RejectReason::QueueTime { limit, waited, retry_after: self.shared.load.backlog().room }
        };
        self.reject(group, reason);
    }

    /// Makes the loop look for late requests at `time`.
    pub(super) fn look_again_at(&mut self, time: Instant) {
        self.look_again = Some(self.look_again.map_or(time, |known| known.min(time)));
    }

    fn winds_down(&self) -> bool {
        match self.shared.wind_down() {
            WindDown::No => false,
            WindDown::Drain => self.queue.is_empty() && self.groups.is_empty(),
            WindDown::Stop => true,
        }
    }

    /// Publishes statistics. Who was admitted stops waiting only then, so that nobody is ever counted nowhere.
    fn publish(&mut self) {
        let counts = self.pager.counts();
        self.stats.running = self.active_seqs;
        self.stats.waiting = self.preempted.len() as u32;
        (self.stats.pages_free, self.stats.pages_cached, self.stats.pages_in_use) = (counts.free, counts.cached, counts.in_use);
        self.stats.evictions = self.pager.evictions();
        self.shared.stats.publish(&self.stats);
        for (place, prompt, choices) in self.entered.drain(..) {
            self.shared.load.leave(place, prompt, choices);
        }
    }

    /// Publishes statistics, then sends the terminal events that they include; whether there were any.
    fn speak(&mut self) -> bool {
        self.publish();
        if self.in_flight.is_empty() || self.stats.steps.is_multiple_of(LOAD_STEPS) {
            self.publish_load();
        }
        let any = !self.terminals.is_empty();
        for (events, event) in self.terminals.drain(..) {
            events.finish(event);
        }
        any
    }

    /// What has run long is expected to run as long again, whatever the average; its limit bounds it.
    fn publish_load(&self) {
        let mean = self.shared.load.completion_mean() as u32;
        let left = |seq: &Sequence| {
            let limit = self.groups[seq.group].request.max_tokens;
            let completion = mean.max(seq.drawn()).min(limit.saturating_sub(seq.drawn()));
            u64::from(seq.prompt_tokens.saturating_sub(seq.computed)) + u64::from(completion) * u64::from(seq.width())
        };
        self.shared.load.running.store(self.groups.len() as u64, Ordering::Relaxed);
        self.shared.load.running_tokens.store(self.seqs.iter().map(left).sum(), Ordering::Relaxed);
    }

    /// Sleeps until woken or until something is late.
    fn rest(&mut self, paused: bool) {
        let idle = self.queue.is_empty() && self.groups.is_empty();
        let cancelled = self.shared.cancels.load(Ordering::Acquire) != self.cancels_seen;
        assert!(idle || paused || cancelled, "nothing can run though {} requests wait", self.queue.len());
        if cancelled {
            return;
        }
        match self.look_again {
            None => std::thread::park(),
            Some(time) => std::thread::park_timeout(time.saturating_duration_since(Instant::now())),
        }
    }

    fn discard_in_flight(&mut self) -> Result<(), DeviceError> {
        while self.in_flight.pop_front().is_some() {
            self.device.collect(&mut self.outputs)?;
        }
        Ok(())
    }
}
