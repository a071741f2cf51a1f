//! A generation under way: engine events of all its prompts turned into choices.
//!
//! Polled by whoever holds the response: a stream body, or a handler that waits for the end. Dropping
//! it cancels everything in the engine at once.

use super::state::{LiveGuard, NameGuard, State};
use crate::journal::{Finish, Recording};
use crate::openai::choice::{Choice, ChoiceRules, Ended, StopReason, prompt_entries};
use crate::openai::error::ApiError;
use crate::openai::wire::Usage;
use oxide_runtime::engine::{ChoiceTrace, EngineEvent, EngineHealth, EventStream, RejectReason, TokenLogprobs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Events taken from one prompt before the others have their turn.
const EVENTS_PER_TURN: usize = 256;

/// One prompt and its choices.
pub(crate) struct Run {
    /// `None` once nothing more is wanted of the engine.
    stream: Option<EventStream>,
    pub(crate) choices: Vec<Slot>,
    prompt: Arc<[u32]>,
    cached: u32,
    echo: Option<Echo>,
    /// The journal's entry, written when the run is dropped.
    pub(crate) recording: Option<Recording>,
}

/// A choice and what is known of its making.
pub(crate) struct Slot {
    pub(crate) choice: Choice,
    pub(crate) trace: Option<ChoiceTrace>,
    last_token: Option<Instant>,
}

/// A prompt that the text starts with, until its log-probabilities are complete.
pub(crate) struct Echo {
    pub(crate) text: String,
    /// `None` if log-probabilities were not asked for.
    pub(crate) logprobs: Option<Vec<TokenLogprobs>>,
    /// Leading ids of the prompt that the text leaves out.
    pub(crate) skipped: usize,
}

/// A generation.
pub(crate) struct Generation {
    pub(crate) runs: Vec<Run>,
    pub(crate) rules: Arc<ChoiceRules>,
    pub(crate) traced: bool,
    state: Arc<State>,
    accepted: Instant,
    first_token: Option<Instant>,
    request_id: String,
    outcome: Outcome,
    _live: LiveGuard,
    _names: NameGuard,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Running,
    Done,
    Failed,
}

/// What a generation starts with.
pub(crate) struct Start {
    pub(crate) state: Arc<State>,
    pub(crate) rules: Arc<ChoiceRules>,
    pub(crate) traced: bool,
    pub(crate) accepted: Instant,
    pub(crate) request_id: String,
    pub(crate) live: LiveGuard,
    pub(crate) names: NameGuard,
}

impl Run {
    /// A run of `n` choices; without a stream they end at once, with nothing but the echo.
    pub(crate) fn new(rules: &Arc<ChoiceRules>, n: u32, prompt: Arc<[u32]>, stream: Option<EventStream>, echo: Option<Echo>) -> Self {
        let slot = || Slot { choice: Choice::new(rules), trace: None, last_token: None };
        let mut run = Self { stream, choices: (0..n).map(|_| slot()).collect(), prompt, cached: 0, echo, recording: None };
        if run.echo.as_ref().is_some_and(|echo| echo.logprobs.is_none()) {
            run.settle_echo(rules);
        }
        if run.stream.is_none() {
            run.choices.iter_mut().for_each(|slot| slot.choice.finish(oxide_runtime::engine::FinishReason::Length));
        }
        run
    }

    /// Puts the echoed prompt before the text of every choice.
    fn settle_echo(&mut self, rules: &ChoiceRules) {
        let Some(Echo { text, logprobs, skipped }) = self.echo.take() else { return };
        let shown = self.prompt.get(skipped..).unwrap_or_default();
        let entries = match logprobs {
            // A prompt token that the text leaves out takes its log-probability with it.
            Some(mut logprobs) => {
                logprobs.drain(..skipped.min(logprobs.len()));
                prompt_entries(&rules.tokenizer, shown, logprobs)
            }
            None => Vec::new(),
        };
        self.choices.iter_mut().for_each(|slot| slot.choice.echo(&text, &entries));
    }

    fn ended(&self) -> bool {
        self.choices.iter().all(|slot| slot.choice.ended.is_some())
    }
}

impl Generation {
    pub(crate) fn new(start: Start, runs: Vec<Run>) -> Self {
        let Start { state, rules, traced, accepted, request_id, live, names } = start;
        Self { runs, rules, traced, state, accepted, first_token: None, request_id, outcome: Outcome::Running, _live: live, _names: names }
    }

    /// Takes what the engine has. Ready when something changed or all is done.
    ///
    /// # Errors
    /// If the engine refused or failed; the generation is over then.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
        let mut changed = false;
        let now = Instant::now();
        for index in 0..self.runs.len() {
            match self.poll_run(index, now, context) {
                Ok(progress) => changed |= progress,
                Err(error) => {
                    self.outcome = Outcome::Failed;
                    self.runs.iter_mut().for_each(|run| run.stream = None);
                    return Poll::Ready(Err(error));
                }
            }
        }
        if self.runs.iter().all(|run| run.stream.is_none()) {
            self.outcome = Outcome::Done;
            return Poll::Ready(Ok(()));
        }
        if changed { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Whether every choice ended.
    pub(crate) fn is_done(&self) -> bool {
        self.outcome != Outcome::Running
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// If the engine refused or failed, or the deadline passed before the first token.
    pub(crate) async fn finish(&mut self) -> Result<(), ApiError> {
        while !self.is_done() {
            std::future::poll_fn(|context| self.poll(context)).await?;
        }
        self.check_deadline()
    }

    /// # Errors
    /// 504 if the deadline passed before anything was drawn.
    pub(crate) fn check_deadline(&self) -> Result<(), ApiError> {
        let mut choices = self.choices();
        let late = choices.all(|slot| {
            slot.choice.tokens == 0
                && slot.choice.ended.as_ref().is_some_and(|end| end.reason == crate::openai::choice::StopReason::Deadline)
        });
        if late { Err(ApiError::deadline()) } else { Ok(()) }
    }

    /// All choices, in the order of their indices.
    pub(crate) fn choices(&self) -> impl Iterator<Item = &Slot> {
        self.runs.iter().flat_map(|run| &run.choices)
    }

    /// All choices, to take text from.
    pub(crate) fn slots_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.runs.iter_mut().flat_map(|run| &mut run.choices)
    }

    /// Marks the generation as answered, whatever the answer was: what follows is no disconnect.
    pub(crate) fn conclude(&mut self) {
        if self.outcome == Outcome::Running {
            self.outcome = Outcome::Failed;
        }
    }

    pub(crate) fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Number of choices.
    pub(crate) fn len(&self) -> usize {
        self.runs.iter().map(|run| run.choices.len()).sum()
    }

    /// Tokens used so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt: self.runs.iter().map(|run| run.prompt.len() as u64).sum(),
            completion: self.choices().map(|slot| u64::from(slot.choice.tokens)).sum(),
            cached: self.runs.iter().map(|run| u64::from(run.cached)).sum(),
        }
    }

    fn poll_run(&mut self, index: usize, now: Instant, context: &mut Context<'_>) -> Result<bool, ApiError> {
        let mut changed = false;
        for _ in 0..EVENTS_PER_TURN {
            let Some(stream) = self.runs.get_mut(index).and_then(|run| run.stream.as_mut()) else { return Ok(changed) };
            match stream.poll_recv(context) {
                Poll::Pending => return Ok(changed),
                Poll::Ready(Some(event)) => self.take_event(index, event, now)?,
                Poll::Ready(None) => self.close_run(index),
            }
            changed = true;
        }
        context.waker().wake_by_ref();
        Ok(changed)
    }

    fn take_event(&mut self, index: usize, event: EngineEvent, now: Instant) -> Result<(), ApiError> {
        let metrics = &self.state.metrics;
        let Some(run) = self.runs.get_mut(index) else { return Ok(()) };
        match event {
            EngineEvent::Admitted { cached_tokens } => {
                run.cached = cached_tokens;
                metrics.queue.observe(now.duration_since(self.accepted), 1);
                metrics.prompt_tokens.fetch_add(run.prompt.len() as u64, Ordering::Relaxed);
                metrics.cached_tokens.fetch_add(u64::from(cached_tokens), Ordering::Relaxed);
            }
            EngineEvent::PromptLogprobs { tokens } => {
                if let Some(logprobs) = run.echo.as_mut().and_then(|echo| echo.logprobs.as_mut()) {
                    logprobs.extend(tokens);
                }
            }
            EngineEvent::Token { choice, id, logprobs } => {
                run.settle_echo(&self.rules);
                if let Some(slot) = run.choices.get_mut(choice as usize) {
                    observe_token(&self.state, slot, now);
                    if let Some(recording) = run.recording.as_mut().filter(|_| slot.choice.ended.is_none()) {
                        recording.token(choice, id);
                    }
                    let open = slot.choice.ended.is_none();
                    slot.choice.token(id, logprobs);
                    record_end(run.recording.as_mut(), choice, slot);
                    // The engine knows stop ids; an end that only the text shows is told.
                    if let (true, Some(Ended { reason: StopReason::Text(_), .. }), Some(stream)) = (open, &slot.choice.ended, &run.stream) {
                        stream.end_choice(choice);
                    }
                }
                if self.first_token.is_none() {
                    self.first_token = Some(now);
                    metrics.ttft.observe(now.duration_since(self.accepted), 1);
                }
                self.stop_early(index);
            }
            EngineEvent::Finished { choice, reason, trace, .. } => {
                run.settle_echo(&self.rules);
                if let Some(slot) = run.choices.get_mut(choice as usize) {
                    slot.choice.finish(reason);
                    slot.trace = Some(trace);
                    record_end(run.recording.as_mut(), choice, slot);
                }
            }
            EngineEvent::Failed { message, .. } => return Err(self.failure(&message)),
            EngineEvent::Rejected(reason) => {
                run.recording.iter_mut().for_each(Recording::discard);
                return Err(reject_error(reason));
            }
        }
        Ok(())
    }

    /// Gives the engine's work up once the text says that all choices ended.
    fn stop_early(&mut self, index: usize) {
        let Some(run) = self.runs.get_mut(index).filter(|run| run.ended()) else { return };
        // The traces come with the terminal events, which still arrive.
        if !self.traced {
            run.stream = None;
        }
    }

    fn close_run(&mut self, index: usize) {
        if let Some(run) = self.runs.get_mut(index) {
            run.stream = None;
        }
    }

    fn failure(&self, message: &str) -> ApiError {
        self.state.metrics.errors.fetch_add(1, Ordering::Relaxed);
        let stopped = self.state.loaded().is_some_and(|served| matches!(served.model.engine.health(), EngineHealth::Failed(_)));
        let code = if stopped { "engine_failed" } else { "internal_error" };
        ApiError { code: Some(code), ..ApiError::internal(format!("the generation failed: {message}")) }
    }

    fn log(&self) {
        let usage = self.usage();
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let finish: Vec<&str> = self.choices().map(|slot| slot.choice.ended.as_ref().map_or("none", |ended| ended.finish)).collect();
        let traces: Vec<&ChoiceTrace> = self.choices().filter_map(|slot| slot.trace.as_ref()).collect();
        let longest = |time: fn(&ChoiceTrace) -> Duration| traces.iter().map(|trace| millis(time(trace))).reduce(f64::max);
        tracing::info!(
            request_id = %self.request_id,
            outcome = ?self.outcome,
            finish_reasons = %finish.join(","),
            prompt_tokens = usage.prompt,
            cached_tokens = usage.cached,
            completion_tokens = usage.completion,
            first_token_ms = self.first_token.map(|first| millis(first.duration_since(self.accepted))),
            queue_ms = longest(|trace| trace.queue),
            prefill_ms = longest(|trace| trace.prefill),
            decode_ms = longest(|trace| trace.decode),
            kv_page_seconds = (!traces.is_empty()).then(|| traces.iter().map(|trace| trace.kv_page_seconds).sum::<f64>()),
            preemptions = (!traces.is_empty()).then(|| traces.iter().map(|trace| trace.preemptions).sum::<u32>()),
            total_ms = millis(self.accepted.elapsed()),
            "generation ended"
        );
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // A panic is counted by whoever contains it.
        if self.outcome == Outcome::Running && !std::thread::panicking() {
            self.state.metrics.disconnects.fetch_add(1, Ordering::Relaxed);
        }
        self.state.metrics.duration.observe(self.accepted.elapsed(), 1);
        self.log();
    }
}

/// Tells the journal how a choice ended, once it did.
fn record_end(recording: Option<&mut Recording>, choice: u32, slot: &Slot) {
    let (Some(recording), Some(Ended { finish, reason })) = (recording, &slot.choice.ended) else { return };
    let finish = match (*finish, reason) {
        (_, StopReason::Deadline) => Finish::Deadline,
        (_, StopReason::Aborted) => Finish::Aborted,
        ("length", _) => Finish::Length,
        ("stop", StopReason::Model | StopReason::Id(_)) => Finish::Stop,
        _ => Finish::Text,
    };
    recording.finish(choice, finish);
}

fn observe_token(state: &State, slot: &mut Slot, now: Instant) {
    if slot.choice.ended.is_some() {
        return;
    }
    state.metrics.completion_tokens.fetch_add(1, Ordering::Relaxed);
    if let Some(last) = slot.last_token.replace(now) {
        state.metrics.itl.observe(now.duration_since(last), 1);
    }
}

/// What a refusal of the engine means to a client.
pub(crate) fn reject_error(reason: RejectReason) -> ApiError {
    let message = reason.to_string();
    match reason {
        RejectReason::QueueFull { retry_after, .. } | RejectReason::QueueTime { retry_after, .. } => {
            ApiError::overloaded(format!("the server is overloaded: {message}"), retry_after)
        }
        RejectReason::Deadline => ApiError::deadline(),
        RejectReason::NeverFits { .. } => ApiError::context_length("max_tokens", format!("this request {message}")),
        RejectReason::Invalid(reason) => ApiError { param: None, ..ApiError::invalid("", reason) },
        RejectReason::Draining => ApiError::unavailable("server_draining", message),
    }
}
