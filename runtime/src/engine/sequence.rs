//! A choice of a request while it lives in the engine; or, before the prompt is computed, the one
//! sequence that becomes all choices. Positions of a sequence, left to right:
//!
//! ```text
//!   0 … committed … computed … tokens.len() (+ pending)
//!   └ collected ┘ └ in flight ┘ └ to compute ┘
//! ```
//!
//! `pending` counts ids that were drawn by a step not yet collected.

use super::api::{EngineRequest, LogitsMask, MaskFactory, MaskVerdict};
use super::group::Group;
use super::pager::{PageKey, page_key, root_key};
use oxide_bundle::step::{HISTORY_IN_PROMPT, SamplingRow, row_flags};
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Chained keys of a sequence's full pages, computed once each.
#[derive(Clone, Debug)]
pub(super) struct PageKeys {
    root: PageKey,
    keys: Vec<PageKey>,
}

impl PageKeys {
    pub(super) fn new(salt: &[u8]) -> Self {
        Self { root: root_key(salt), keys: Vec::new() }
    }

    /// Key of page `index` and of its parent; `tokens` hold that page at least.
    pub(super) fn of(&mut self, index: usize, tokens: &[u32], page_tokens: usize) -> (PageKey, PageKey) {
        while self.keys.len() <= index {
            let page = self.keys.len() * page_tokens;
            let parent = self.keys.last().unwrap_or(&self.root);
            self.keys.push(page_key(parent, &tokens[page..page + page_tokens]));
        }
        let parent = index.checked_sub(1).map_or(self.root, |parent| self.keys[parent]);
        (self.keys[index], parent)
    }
}

/// Where a drawn id that the host does not know yet will be.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) step: u64,
    pub(super) row: u32,
}

/// One choice.
pub(super) struct Sequence {
    pub(super) group: u32,
    pub(super) choice: u32,
    /// Changes whenever pages are given anew: what is in flight for an older serial is discarded.
    pub(super) serial: u64,
    /// Admission order of its group.
    pub(super) order: u64,
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_tokens: u32,
    pub(super) computed: u32,
    pub(super) committed: u32,
    pub(super) pending: u32,
    pub(super) source: Source,
    pub(super) pages: Vec<u32>,
    pub(super) keys: PageKeys,
    /// Leading pages that were offered to the prefix index.
    pub(super) published: u32,
    /// Pages that it may still take of what was reserved for it.
    pub(super) reserve: u32,
    /// Its worst case is reserved.
    pub(super) proven: bool,
    /// Choices that split off once the prompt is computed.
    pub(super) forks: u32,
    /// Masks of this choice and of the forks.
    pub(super) masks: Vec<Box<dyn LogitsMask>>,
    pub(super) history: Option<History>,
    /// Prompt tokens whose successor was scored.
    pub(super) scored: u32,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
    pub(super) held_at: Instant,
    pub(super) page_seconds: f64,
    pub(super) preemptions: u32,
}

impl Sequence {
    /// Completion tokens known.
    pub(super) fn drawn(&self) -> u32 {
        self.tokens.len() as u32 - self.prompt_tokens
    }

    /// Tokens to compute until the sequence can be sampled.
    pub(super) fn remaining(&self) -> u32 {
        self.tokens.len() as u32 + self.pending - self.computed
    }

    /// Sequences that it stands for.
    pub(super) fn width(&self) -> u32 {
        1 + self.forks
    }

    /// Whether the next step's values depend on the id drawn last.
    pub(super) fn needs_host(&self) -> bool {
        !self.masks.is_empty() || self.history.is_some()
    }

    /// Whether it continues a generation rather than prefilling.
    pub(super) fn is_decode(&self) -> bool {
        self.computed >= self.prompt_tokens && self.remaining() == 1
    }

    /// Books the pages held since the last call.
    pub(super) fn hold(&mut self, now: Instant) {
        let time = now.saturating_duration_since(self.held_at);
        self.page_seconds += self.pages.len() as f64 * time.as_secs_f64();
        self.held_at = now;
    }

    /// First token to last.
    pub(super) fn decode_time(&self) -> Duration {
        match (self.first_token, self.last_token) {
            (Some(first), Some(last)) => last.saturating_duration_since(first),
            (None, _) | (_, None) => Duration::ZERO,
        }
    }

    /// Appends a drawn id.
    pub(super) fn push_token(&mut self, id: u32, now: Instant) {
        self.tokens.push(id);
        if let Some(history) = &mut self.history {
            history.push(id);
        }
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    /// Positions below `end` whose rows score the prompt token after them.
    pub(super) fn score_range(&self, group: &Group, end: u32) -> Range<u32> {
        let start = self.computed.max(self.scored);
        match group.request.prompt_logprobs {
            Some(_) => start..end.min(self.prompt_tokens - 1).max(start),
            None => start..start,
        }
    }

    /// The further choice `choice`, whose first token is drawn by `row` of the step just submitted. It has no pages yet.
    pub(super) fn fork(&mut self, choice: u32, serial: u64, row: u32, now: Instant) -> Self {
        Self {
            group: self.group,
            choice,
            serial,
            order: self.order,
            tokens: self.tokens.clone(),
            prompt_tokens: self.prompt_tokens,
            computed: self.computed,
            committed: self.committed,
            pending: self.pending,
            source: Source { row, ..self.source },
            pages: Vec::new(),
            keys: self.keys.clone(),
            published: self.published,
            reserve: 0,
            proven: self.proven,
            forks: 0,
            masks: if self.masks.len() > 1 { vec![self.masks.remove(1)] } else { Vec::new() },
            history: self.history.clone(),
            scored: self.scored,
            first_token: None,
            last_token: None,
            held_at: now,
            page_seconds: 0.0,
            preemptions: 0,
        }
    }

    /// Parameters of the row that draws `choice`'s token at `position`.
    pub(super) fn sampling_row(&self, group: &Group, choice: u32, position: u32) -> SamplingRow {
        let seed = group.request.sampling.seed.wrapping_add(u64::from(choice));
        let bias = !group.bias_at(position - self.prompt_tokens, !self.masks.is_empty()).is_empty();
        let flags = [(!self.masks.is_empty(), row_flags::MASK), (bias, row_flags::BIAS), (self.history.is_some(), row_flags::HISTORY)];
        let flags = flags.into_iter().filter(|(set, _)| *set).fold(0, |flags, (_, flag)| flags | flag);
        SamplingRow { seed, counter: u64::from(position), flags, ..group.row }
    }
}

/// Ids that penalties look at, each once, with their counts.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    index: HashMap<u32, u32>,
    pub(super) ids: Vec<u32>,
    pub(super) counts: Vec<u32>,
}

impl History {
    /// History before the first token, if the request has penalties. Only repetition looks at the prompt.
    pub(super) fn of(request: &EngineRequest) -> Option<Self> {
        if !request.sampling.has_penalties() {
            return None;
        }
        let mut history = Self::default();
        if request.sampling.repetition_penalty != 1.0 {
            for id in &request.prompt {
                *history.count(*id) |= HISTORY_IN_PROMPT;
            }
        }
        Some(history)
    }

    /// Adds a drawn id.
    pub(super) fn push(&mut self, id: u32) {
        *self.count(id) += 1;
    }

    fn count(&mut self, id: u32) -> &mut u32 {
        let next = self.ids.len() as u32;
        let index = *self.index.entry(id).or_insert(next);
        if index == next {
            self.ids.push(id);
            self.counts.push(0);
        }
        &mut self.counts[index as usize]
    }
}

/// Makes the masks of all choices and starts them. A panic inside leaves a mask that fails.
pub(super) fn make_masks(request: &EngineRequest) -> Vec<Box<dyn LogitsMask>> {
    let make = |factory: &MaskFactory| {
        let mask = catch_unwind(AssertUnwindSafe(|| {
            let mut mask = factory();
            mask.begin(request.max_tokens);
            mask
        }));
        mask.unwrap_or_else(|_| Box::new(BrokenMask))
    };
    request.mask.iter().flat_map(|factory| (0..request.n).map(move |_| make(factory))).collect()
}

/// Stands in for a mask that could not be made.
struct BrokenMask;

impl LogitsMask for BrokenMask {
    fn begin(&mut self, _budget: u32) {}

    fn fill(&mut self, _words: &mut [u32]) -> MaskVerdict {
        MaskVerdict::Failed
    }

    fn accept(&mut self, _id: u32) -> MaskVerdict {
        MaskVerdict::Failed
    }
}

/// Calls into a mask; a panic inside is that choice's failure, nobody else's.
pub(super) fn guarded(call: impl FnOnce() -> MaskVerdict) -> MaskVerdict {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(MaskVerdict::Failed)
}
