//! A request and its choices while they live in the engine.
//!
//! A [`Group`] is an accepted request; a [`Sequence`] is one of its choices, or, before the prompt is
//! computed, the one sequence that becomes all of them. Positions of a sequence, left to right:
//!
//! ```text
//!   0 … committed … computed … tokens.len() (+ pending)
//!   └ collected ┘ └ in flight ┘ └ to compute ┘
//! ```
//!
//! `pending` counts ids that were drawn by a step not yet collected.

use super::api::{EngineRequest, LogitsMask, MaskFactory, MaskVerdict, TokenLogprobs};
use super::events::EventSender;
use super::pager::{PageKey, page_key, root_key};
use oxide_bundle::step::{HISTORY_IN_PROMPT, NONE, SamplingRow, row_flags};
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A slot table whose indices stay put.
#[derive(Debug)]
pub(super) struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.entries[slot as usize] = Some(value);
                slot
            }
            None => {
                self.entries.push(Some(value));
                self.entries.len() as u32 - 1
            }
        }
    }

    pub(super) fn remove(&mut self, slot: u32) -> Option<T> {
        let value = self.entries.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(value)
    }

    pub(super) fn get(&self, slot: u32) -> Option<&T> {
        self.entries.get(slot as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.entries.get_mut(slot as usize)?.as_mut()
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().enumerate().filter(|(_, entry)| entry.is_some()).map(|(slot, _)| slot as u32)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, slot: u32) -> &T {
        self.get(slot).expect("the slot is taken")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, slot: u32) -> &mut T {
        self.get_mut(slot).expect("the slot is taken")
    }
}

/// An accepted request.
pub(super) struct Group {
    pub(super) request: EngineRequest,
    pub(super) events: EventSender,
    pub(super) cancel: Arc<AtomicBool>,
    pub(super) submitted: Instant,
    pub(super) admitted: Option<Instant>,
    /// Order of admission; older is smaller.
    pub(super) order: u64,
    pub(super) cached_tokens: u32,
    /// Choices without a terminal event.
    pub(super) open: Vec<bool>,
    /// Completion tokens of each choice that the fair-share account was charged for ahead.
    pub(super) advance: u32,
    /// Parameters common to all rows.
    pub(super) row: SamplingRow,
    /// Bias entries, ids rising.
    pub(super) bias: Vec<(u32, f32)>,
    /// The same with stop ids at −∞, for positions before `min_tokens`.
    pub(super) bias_no_stop: Vec<(u32, f32)>,
    /// Prompt log-probabilities of the step being committed.
    pub(super) scored: Vec<TokenLogprobs>,
    /// Keys of full pages as far as they were needed.
    pub(super) keys: PageKeys,
}

impl Group {
    pub(super) fn new(request: EngineRequest, events: EventSender, cancel: Arc<AtomicBool>, submitted: Instant) -> Self {
        let sampling = &request.sampling;
        let bias = merge_bias(&sampling.logit_bias, &[]);
        let bias_no_stop = merge_bias(&sampling.logit_bias, &request.stop_ids);
        let row = SamplingRow {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            top_k: sampling.top_k,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logprobs: sampling.logprobs.unwrap_or(NONE),
            ..SamplingRow::GREEDY
        };
        let open = vec![true; request.n as usize];
        let keys = PageKeys::new(&request.cache_salt);
        Self {
            request,
            events,
            cancel,
            submitted,
            admitted: None,
            order: 0,
            cached_tokens: 0,
            open,
            advance: 0,
            row,
            bias,
            bias_no_stop,
            scored: Vec::new(),
            keys,
        }
    }

    pub(super) fn open_count(&self) -> usize {
        self.open.iter().filter(|open| **open).count()
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Acquire)
    }

    pub(super) fn prompt_tokens(&self) -> u32 {
        self.request.prompt.len() as u32
    }

    /// Bias entries of a row that draws completion token `index`. A mask takes stop ids out by itself.
    pub(super) fn bias_at(&self, index: u32, masked: bool) -> &[(u32, f32)] {
        if index < self.request.min_tokens && !masked { &self.bias_no_stop } else { &self.bias }
    }

    /// When the request is to be looked at again while it waits.
    pub(super) fn waiting_until(&self) -> Option<Instant> {
        let queue_end = self.request.queue_time_max.and_then(|wait| self.submitted.checked_add(wait));
        [self.request.deadline, queue_end].into_iter().flatten().min()
    }
}

/// One entry an id, rising; stop ids at −∞ whatever else was asked for them.
fn merge_bias(bias: &[(u32, f32)], banned: &[u32]) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = bias.to_vec();
    all.extend(banned.iter().map(|id| (*id, f32::NEG_INFINITY)));
    all.sort_by_key(|(id, _)| *id);
    all.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 = if kept.1.min(next.1) == f32::NEG_INFINITY { f32::NEG_INFINITY } else { kept.1 + next.1 };
        }
        same
    });
    all
}

/// Chained keys of a sequence's full pages, computed once each.
#[derive(Clone, Debug)]
pub(super) struct PageKeys {
    root: PageKey,
    keys: Vec<PageKey>,
}

impl PageKeys {
    fn new(salt: &[u8]) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_ids_beat_every_bias() {
        let merged = merge_bias(&[(5, 100.0), (2, 1.0), (2, 0.5)], &[5, 9, 9]);
        assert_eq!(merged, [(2, 1.5), (5, f32::NEG_INFINITY), (9, f32::NEG_INFINITY)]);
    }

    #[test]
    fn slots_are_reused() {
        let mut slab = Slab::new();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.remove(a), slab.remove(a)), (Some('a'), None));
        assert_eq!((slab.insert('c'), slab[b]), (a, 'b'));
        assert_eq!(slab.slots().collect::<Vec<_>>(), [a, b]);
    }
}
