//! Starting engines, making requests, and reading streams to their end.

use oxide_runtime::engine::scripted::{Script, ScriptedDevice, StepLog};
use oxide_runtime::engine::{
    Engine, EngineEvent, EngineHandle, EngineOptions, EngineRequest, EngineStats, EventStream, FinishReason, RejectReason, TokenLogprobs,
};
use std::time::{Duration, Instant};

pub(crate) const VOCAB: u32 = 61;

pub(crate) fn start(script: Script, options: EngineOptions) -> (EngineHandle, StepLog) {
    let device = ScriptedDevice::new(script);
    let (limits, log) = (device.limits(), device.log());
    (Engine::start(Box::new(device), limits, options), log)
}

pub(crate) fn engine() -> EngineHandle {
    start(Script::default(), EngineOptions::default()).0
}

pub(crate) fn request(prompt: &[u32], max_tokens: u32) -> EngineRequest {
    EngineRequest::greedy("test", prompt.to_vec(), max_tokens)
}

/// `len` ids that depend on `seed`.
pub(crate) fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|index| (seed * 31 + index * index * 7 + index) % VOCAB).collect()
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    Finished(FinishReason),
    Failed(String),
    Rejected(RejectReason),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) tokens: Vec<Vec<u32>>,
    pub(crate) logprobs: Vec<Vec<TokenLogprobs>>,
    pub(crate) prompt: Vec<TokenLogprobs>,
    pub(crate) ends: Vec<Option<End>>,
}

impl Outcome {
    pub(crate) fn new(choices: usize) -> Self {
        Self { tokens: vec![Vec::new(); choices], logprobs: vec![Vec::new(); choices], ends: vec![None; choices], ..Self::default() }
    }

    /// Adds an event; panics if it breaks the protocol.
    pub(crate) fn add(&mut self, event: EngineEvent) {
        match event {
            EngineEvent::Admitted { cached_tokens } => {
                assert_eq!(self.cached_tokens.replace(cached_tokens), None, "admitted twice");
            }
            EngineEvent::PromptLogprobs { tokens } => self.prompt.extend(tokens),
            EngineEvent::Token { choice, id, logprobs } => {
                assert_eq!(self.ends[choice as usize], None, "a token after the end");
                self.tokens[choice as usize].push(id);
                self.logprobs[choice as usize].extend(logprobs);
            }
            EngineEvent::Finished { choice, reason, completion_tokens, .. } => {
                assert_eq!(completion_tokens as usize, self.tokens[choice as usize].len(), "tokens were lost or sent twice");
                self.end(choice, End::Finished(reason));
            }
            EngineEvent::Failed { choice, message } => self.end(choice, End::Failed(message)),
            EngineEvent::Rejected(reason) => {
                for choice in 0..self.ends.len() as u32 {
                    self.end(choice, End::Rejected(reason.clone()));
                }
            }
        }
    }

    fn end(&mut self, choice: u32, end: End) {
        assert_eq!(self.ends[choice as usize].replace(end), None, "a second terminal event");
    }

    pub(crate) fn only(&self) -> &[u32] {
        assert_eq!(self.ends, [Some(End::Finished(FinishReason::Length))]);
        &self.tokens[0]
    }
}

/// Reads a stream to its end.
pub(crate) fn read(mut stream: EventStream, choices: usize) -> Outcome {
    let mut outcome = Outcome::new(choices);
    while let Some(event) = stream.blocking_recv() {
        outcome.add(event);
    }
    assert!(outcome.ends.iter().all(Option::is_some), "a choice has no terminal event: {outcome:?}");
    outcome
}

pub(crate) fn run(engine: &EngineHandle, request: EngineRequest) -> Outcome {
    let choices = request.n as usize;
    read(engine.submit(request).expect("the request is accepted"), choices)
}

/// Submits all while the engine is paused, so that they run together.
pub(crate) fn run_together(engine: &EngineHandle, requests: Vec<EngineRequest>) -> Vec<Outcome> {
    engine.pause();
    let streams: Vec<_> = requests.into_iter().map(|request| (request.n as usize, engine.submit(request).expect("accepted"))).collect();
    engine.resume();
    streams.into_iter().map(|(choices, stream)| read(stream, choices)).collect()
}

/// Waits until the statistics satisfy `holds`.
pub(crate) fn wait_for(engine: &EngineHandle, what: &str, holds: impl Fn(&EngineStats) -> bool) -> EngineStats {
    let start = Instant::now();
    loop {
        let stats = engine.stats();
        if holds(&stats) {
            return stats;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{what} never came: {stats:?}");
        std::thread::yield_now();
    }
}

pub(crate) fn assert_idle(engine: &EngineHandle) {
    let stats = engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_in_use), (0, 0, 0), "{stats:?}");
    assert_eq!(stats.pages_free + stats.pages_cached, stats.pages_total, "{stats:?}");
}
