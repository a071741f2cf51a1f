//! How the engine is set up, and what it says of itself: options, limits, health, backlog.

use crate::device::Device;
use std::time::Duration;

/// Choices of the operator. Every default is meant for a server on a machine of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Requests that may wait beyond those for whose choices sequence slots are free; the next one is
    /// refused with `QueueFull`. 0 refuses whatever finds no free slot. Default 256.
    pub queue_max: usize,
    /// Events that a stream buffers at most. A stream has room for everything its request can send,
    /// up to this many events; a client that lets more pile up is cancelled. Default 65,536.
    pub events_max: usize,
    /// Tokens of one step, decodes included, while some sequence prefills. `None` (default) takes the
    /// largest sealed class.
    pub chunk_tokens: Option<u32>,
    /// Shares KV pages between equal prefixes of equal `cache_salt`. Default on.
    pub prefix_cache: bool,
    /// Admits by the prompt alone instead of the worst case, and preempts the youngest sequence by
    /// recompute when pages run out. Default off: an admitted request is never preempted.
    pub overcommit: bool,
    /// Preemptions of one sequence after which its worst case is reserved before it resumes, so that
    /// it is never preempted again. Default 3.
    pub preemptions_max: u32,
    /// Tokens that a fair-share key may be served before the next waiting key has its turn. Default 512.
    pub fair_quantum_tokens: u32,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            queue_max: 256,
            events_max: 1 << 16,
            chunk_tokens: None,
            prefix_cache: true,
            overcommit: false,
            preemptions_max: 3,
            fair_quantum_tokens: 512,
        }
    }
}

/// What the linked plan and the KV pool allow. Requests are checked against it at submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Prompt and completion tokens of one sequence, together.
    pub context_max: u32,
    /// Ids that the tokenizer knows; all ids of a request are below.
    pub vocab_known: u32,
    /// Width of a logits row; a mask row has `ceil(vocab / 32)` words.
    pub vocab: u32,
    /// Sequences running together.
    pub seqs_max: u32,
    /// Tokens in a KV page.
    pub page_tokens: u32,
    /// Pages of the KV pool.
    pub kv_pages: u32,
    /// Logit-bias entries of one step.
    pub bias_max: u32,
    /// Penalty-history entries of one step.
    pub history_max: u32,
}

impl EngineLimits {
    /// Limits of a linked device. `context_max`, `seqs_max` and `vocab_known` come from the manifest; the
    /// first two are cut to what the plan's slots and classes hold.
    pub fn of(device: &dyn Device, context_max: u32, seqs_max: u32, vocab_known: u32) -> Self {
        let (bounds, kv) = (device.plan().bounds(), device.plan().kv());
        Self {
            context_max: context_max.min(bounds.pages_per_seq_max.saturating_mul(kv.page_tokens)),
            vocab_known: vocab_known.min(bounds.vocab),
            vocab: bounds.vocab,
            seqs_max: seqs_max.min(bounds.seqs_max),
            page_tokens: kv.page_tokens,
            kv_pages: device.kv_pages(),
            bias_max: bounds.bias_max,
            history_max: bounds.history_max,
        }
    }
}

/// Where the engine thread is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineHealth {
    /// Takes requests.
    Running,
    /// Finishes what it accepted and refuses the rest.
    Draining,
    /// Ended in order; nothing is open.
    Stopped,
    /// Ended by a device error or a bug; every open request was failed with this message.
    Failed(String),
}

/// Work accepted and not done, and how long it will take at the recent rate.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Backlog {
    /// Requests waiting for admission.
    pub waiting: usize,
    /// Tokens expected of waiting and running requests: prompts, and completions of the recent average length.
    pub tokens: u64,
    /// Recent rate, prefilled and drawn together; 0 before the first step.
    pub tokens_per_second: f64,
    /// Expected time until all of it is done; a request that comes now waits about this long.
    pub drain: Duration,
    /// Expected time until the waiting queue has room for one more.
    pub room: Duration,
}
