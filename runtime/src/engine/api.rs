//! What the rest of the world may ask of the engine, and what it answers.
//!
//! Text exists only in the server; here there are token ids. **Invariant:** each choice of an
//! accepted request gets exactly one terminal event ([`EngineEvent::Finished`] or
//! [`EngineEvent::Failed`]); a request that is refused gets exactly one [`EngineEvent::Rejected`].

use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sampling parameters of a request. Ranges are the server's business; the engine clamps nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass; 0 is greedy, 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Ids and what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the random stream; choice `i` uses `seed + i` (wrapping).
    pub seed: u64,
    /// Alternatives to report for each token (0..=20), `None` for no log-probabilities.
    pub logprobs: Option<u32>,
}

impl SamplingParams {
    /// Whether a row's logits depend on the ids seen so far.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

/// A constraint on the next token, advanced by the ids drawn. One a choice.
///
/// Implemented by the server over a grammar; the engine knows bits only. Masks are computed off the
/// engine thread: [`LogitsMask::begin`] starts the work for the next position and returns at once,
/// [`LogitsMask::fill`] waits for it.
pub trait LogitsMask: Send {
    /// Starts computing the mask of the next position; `budget` is how many tokens may still be drawn.
    fn begin(&mut self, budget: u32);

    /// Writes the allowed ids as bits (`words[id / 32] >> (id % 32) & 1`). Returns what the mask says of the sequence.
    fn fill(&mut self, words: &mut [u32]) -> MaskVerdict;

    /// Advances by a drawn id.
    fn accept(&mut self, id: u32) -> MaskVerdict;
}

/// What a [`LogitsMask`] says of its sequence.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum MaskVerdict {
    /// More tokens are wanted.
    Continue,
    /// The constraint is complete: the choice finishes with [`FinishReason::Stop`], whatever `min_tokens` says.
    Complete,
    /// The constraint failed inside; the choice fails with a message.
    Failed,
}

/// Makes one mask for each choice.
pub type MaskFactory = Arc<dyn Fn() -> Box<dyn LogitsMask> + Send + Sync>;

/// A request, all text already turned into ids.
#[derive(Clone)]
pub struct EngineRequest {
    /// Id in logs and traces.
    pub id: String,
    /// Prompt ids; not empty, each below the vocabulary known.
    pub prompt: Vec<u32>,
    /// Choices wanted; each is a sequence that shares the prompt's pages.
    pub n: u32,
    /// Completion tokens at most; `prompt.len() + max_tokens ≤ context_max`. 0 only with `prompt_logprobs`.
    pub max_tokens: u32,
    /// Completion tokens before which `stop_ids` are not sampled.
    pub min_tokens: u32,
    /// Ids that end a choice.
    pub stop_ids: Vec<u32>,
    /// Sampling.
    pub sampling: SamplingParams,
    /// Reports the log-probability of each prompt token with this many alternatives (`echo` with `logprobs`).
    pub prompt_logprobs: Option<u32>,
    /// Constraint on the output.
    pub mask: Option<MaskFactory>,
    /// Separates prefix-cache entries of different owners; requests share pages only with equal salts.
    pub cache_salt: Vec<u8>,
    /// Fair-share group: waiting requests of different keys take turns by tokens served.
    pub fair_key: u64,
    /// When the request is given up with [`FinishReason::Deadline`].
    pub deadline: Option<Instant>,
    /// Longest wait before admission; then [`RejectReason::QueueTime`]. Zero refuses what finds no slots or pages at once.
    pub queue_time_max: Option<Duration>,
}

impl EngineRequest {
    /// One greedy choice of up to `max_tokens` tokens, that nothing else ends, constrains or hurries.
    pub fn greedy(id: impl Into<String>, prompt: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            id: id.into(),
            prompt,
            n: 1,
            max_tokens,
            min_tokens: 0,
            stop_ids: Vec::new(),
            sampling: SamplingParams::default(),
            prompt_logprobs: None,
            mask: None,
            cache_salt: Vec::new(),
            fair_key: 0,
            deadline: None,
            queue_time_max: None,
        }
    }
}

/// Log-probability of one token and its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f32,
    /// Alternatives, falling.
    pub top: Vec<(u32, f32)>,
}

/// Why a choice ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop id was drawn (it is the last token reported), the mask is complete, or the reader ended the
    /// choice ([`EventStream::end_choice`](super::EventStream::end_choice)).
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
    /// The handle was dropped or the engine handle aborted it.
    Cancelled,
    /// The deadline passed; tokens so far are valid.
    Deadline,
}

fn not_admitted(limit: Duration) -> String {
    match limit.as_millis() {
        0 => "no slot, or no memory for the KV cache, was free at once".to_owned(),
        millis => format!("not admitted within {millis} ms"),
    }
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RejectReason {
    /// No slot is free, and the line of requests that wait for one is full.
    #[error("the queue is full ({limit} requests wait for a free slot)")]
    QueueFull {
        /// Its bound.
        limit: usize,
        /// Estimated time until room, from the backlog and the recent token rate.
        retry_after: Duration,
    },
    /// Not admitted within `queue_time_max`.
    #[error("{}", not_admitted(*limit))]
    QueueTime {
        /// Longest wait that the request allowed.
        limit: Duration,
        /// Time waited.
        waited: Duration,
        /// Estimated time until room.
        retry_after: Duration,
    },
    /// The deadline passed before admission.
    #[error("the deadline passed before the request was admitted")]
    Deadline,
    /// The worst case can never fit the KV pool.
    #[error("needs {need} KV pages, the pool has {pool} (raise --kv-memory, or ask for fewer tokens)")]
    NeverFits {
        /// Pages of the worst case.
        need: u32,
        /// Pages of the pool.
        pool: u32,
    },
    /// A field is outside the engine's limits (a server bug, or a library user's).
    #[error("invalid request: {0}")]
    Invalid(String),
    /// The engine drains or stopped.
    #[error("the engine is shutting down")]
    Draining,
}

/// Time and memory that a choice took; see `docs/serving.md`, trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceTrace {
    /// Submission to admission.
    pub queue: Duration,
    /// Admission to first token.
    pub prefill: Duration,
    /// First token to last.
    pub decode: Duration,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Pages held, integrated over time.
    pub kv_page_seconds: f64,
    /// Times preempted and recomputed.
    pub preemptions: u32,
}

/// An event of a request's stream.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// Admitted: its worst case is reserved.
    Admitted {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: u32,
    },
    /// Log-probabilities of prompt tokens `1..`, in chunks as they are computed.
    PromptLogprobs {
        /// One for each further prompt token.
        tokens: Vec<TokenLogprobs>,
    },
    /// A token was drawn.
    Token {
        /// Which choice.
        choice: u32,
        /// Its id.
        id: u32,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A choice ended. Terminal for it.
    Finished {
        /// Which choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
        /// Tokens drawn (a final stop id included).
        completion_tokens: u32,
        /// What it took.
        trace: ChoiceTrace,
    },
    /// A choice failed. Terminal for it.
    Failed {
        /// Which choice.
        choice: u32,
        /// What happened.
        message: String,
    },
    /// The request was refused. Terminal, and the only event.
    Rejected(RejectReason),
}

/// Counters and gauges of the engine, updated once a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences running.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// KV pages: total.
    pub pages_total: u32,
    /// KV pages never written or evicted.
    pub pages_free: u32,
    /// KV pages kept for prefix hits, referenced by nobody.
    pub pages_cached: u32,
    /// KV pages referenced by running sequences.
    pub pages_in_use: u32,
    /// Steps run.
    pub steps: u64,
    /// Tokens prefilled (cache hits not counted).
    pub prefill_tokens: u64,
    /// Tokens drawn.
    pub decode_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Requests admitted.
    pub admitted: u64,
    /// Choices finished.
    pub finished: u64,
    /// Choices cancelled.
    pub cancelled: u64,
    /// Requests rejected.
    pub rejected: u64,
    /// Choices failed.
    pub failed: u64,
    /// Sequences preempted (over-commit only).
    pub preemptions: u64,
    /// Pages evicted from the prefix cache.
    pub evictions: u64,
}
