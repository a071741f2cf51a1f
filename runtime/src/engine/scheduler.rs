//! Which tokens of which sequences make the next step. Pure: no clock, no device, no I/O, no state.
//!
//! Decodes come first, one token each; then prefill chunks, oldest sequence first, within the chunk
//! budget. A step that samples needs rows, bias and history entries; what does not fit waits a step.

use oxide_bundle::plan::BatchClass;
use oxide_bundle::step::StepBounds;

/// What the scheduler must know of a sequence that is ready to run.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SeqView {
    /// Names the sequence in the batch.
    pub(super) slot: u32,
    /// Tokens to compute until the sequence can be sampled; at least 1.
    pub(super) tokens: u32,
    /// The one token continues a generation.
    pub(super) decode: bool,
    /// First token, counted from the next one, whose row scores the token after it.
    pub(super) score_from: u32,
    /// End of those tokens.
    pub(super) score_to: u32,
    /// Rows drawn once all tokens are computed: one a choice.
    pub(super) sample_rows: u32,
    /// Bias entries of those rows together.
    pub(super) bias: u32,
    /// History entries of those rows together.
    pub(super) history: u32,
}

/// The tokens that one sequence contributes to a step.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Whose.
    pub(super) slot: u32,
    /// How many.
    pub(super) tokens: u32,
    /// Whether they are the last ones, so that the step samples.
    pub(super) last: bool,
}

/// A step, to be filled in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    /// Decodes, then prefill chunks.
    pub(super) chunks: Vec<Chunk>,
    /// Whether a ready decode was left out.
    pub(super) decodes_left: bool,
}

/// Bounds of one step.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Scheduler {
    tokens_max: u32,
    seqs_max: u32,
    bias_max: u32,
    history_max: u32,
    chunk_tokens: u32,
}

/// What is left of the bounds while a step is put together.
#[derive(Copy, Clone, Debug)]
struct Room {
    tokens: u32,
    seqs: u32,
    rows: u32,
    bias: u32,
    history: u32,
}

impl Scheduler {
    /// Bounds from the sealed classes: those of the mixed class with most sequences, then most tokens.
    /// `None` if the plan has no mixed class, so that nothing could be prefilled.
    pub(super) fn new(classes: impl Iterator<Item = BatchClass>, bounds: &StepBounds, chunk_tokens: Option<u32>) -> Option<Self> {
        let mixed = classes.filter_map(|class| match class {
            BatchClass::Decode { .. } => None,
            BatchClass::Mixed { tokens, seqs } => Some((seqs, tokens)),
        });
        let (seqs_max, tokens_max) = mixed.max()?;
        Some(Self {
            tokens_max,
            seqs_max,
            bias_max: bounds.bias_max,
            history_max: bounds.history_max,
            chunk_tokens: chunk_tokens.unwrap_or(tokens_max).clamp(1, tokens_max),
        })
    }

    /// Sequences of a step at most.
    pub(super) fn seqs_max(&self) -> u32 {
        self.seqs_max
    }

    /// Prefill tokens that a step takes beside `decodes` decodes: the rest of the chunk budget, but always one.
    pub(super) fn prefill_room(&self, decodes: u32) -> u32 {
        let room = self.chunk_tokens.saturating_sub(decodes).max(1);
        room.min(self.tokens_max.saturating_sub(decodes))
    }

    /// Puts the next step together from `views`, oldest first. Decodes are taken from the
    /// `first_decode`-th on, round about, so that none starves when they do not all fit.
    pub(super) fn next_batch(&self, views: &[SeqView], first_decode: usize, batch: &mut Batch) {
        batch.chunks.clear();
        batch.decodes_left = false;
        let mut room =
            Room { tokens: self.tokens_max, seqs: self.seqs_max, rows: self.seqs_max, bias: self.bias_max, history: self.history_max };
        let split = first_decode % views.len().max(1);
        for view in views[split..].iter().chain(&views[..split]).filter(|view| view.decode) {
            batch.decodes_left |= !room.take(view, batch);
        }
        room.tokens = self.prefill_room(batch.chunks.len() as u32);
        for view in views.iter().filter(|view| !view.decode) {
            room.take(view, batch);
        }
    }
}

impl Room {
    /// Adds as much of `view` as fits; whether that is anything.
    fn take(&mut self, view: &SeqView, batch: &mut Batch) -> bool {
        let tokens = self.tokens_of(view);
        if tokens == 0 || self.seqs == 0 {
            return false;
        }
        let last = tokens == view.tokens;
        self.tokens -= tokens;
        self.seqs -= 1;
        self.rows -= rows_of(view, tokens);
        if last {
            self.bias -= view.bias;
            self.history -= view.history;
        }
        batch.chunks.push(Chunk { slot: view.slot, tokens, last });
        true
    }

    /// The longest chunk of `view` that fits.
    fn tokens_of(&self, view: &SeqView) -> u32 {
        let all = view.tokens.min(self.tokens);
        let samples = view.bias <= self.bias && view.history <= self.history && rows_of(view, all) <= self.rows;
        if all == view.tokens && samples {
            return all;
        }
        let some = all.min(view.tokens - 1);
        if rows_of(view, some) <= self.rows { some } else { some.min(view.score_from + self.rows) }
    }
}

/// Rows of the first `tokens` tokens of `view`.
fn rows_of(view: &SeqView, tokens: u32) -> u32 {
    let scored = tokens.min(view.score_to).saturating_sub(view.score_from);
    scored + if tokens == view.tokens { view.sample_rows } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDS: StepBounds =
        StepBounds { tokens_max: 64, seqs_max: 8, rows_max: 8, pages_per_seq_max: 8, bias_max: 10, history_max: 20, vocab: 64 };

    fn scheduler(chunk_tokens: Option<u32>) -> Scheduler {
        let classes =
            [BatchClass::Decode { seqs: 8 }, BatchClass::Mixed { tokens: 16, seqs: 8 }, BatchClass::Mixed { tokens: 64, seqs: 8 }];
        Scheduler::new(classes.into_iter(), &BOUNDS, chunk_tokens).unwrap()
    }

    fn decode(slot: u32) -> SeqView {
        SeqView { slot, tokens: 1, decode: true, sample_rows: 1, ..SeqView::default() }
    }

    fn prefill(slot: u32, tokens: u32) -> SeqView {
        SeqView { slot, tokens, sample_rows: 1, ..SeqView::default() }
    }

    fn check(chunk_tokens: Option<u32>, views: &[SeqView], expect: &[(u32, u32, bool)]) {
        let mut batch = Batch::default();
        scheduler(chunk_tokens).next_batch(views, 0, &mut batch);
        let found: Vec<_> = batch.chunks.iter().map(|chunk| (chunk.slot, chunk.tokens, chunk.last)).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn decodes_come_first_and_prefill_fills_the_rest() {
        check(None, &[prefill(0, 100), decode(1), decode(2)], &[(1, 1, true), (2, 1, true), (0, 62, false)]);
    }

    #[test]
    fn the_chunk_budget_counts_decodes_but_always_leaves_one_token() {
        check(Some(10), &[decode(0), prefill(1, 100)], &[(0, 1, true), (1, 9, false)]);
        check(Some(1), &[decode(0), decode(1), prefill(2, 100)], &[(0, 1, true), (1, 1, true), (2, 1, false)]);
    }

    #[test]
    fn the_oldest_prefill_ends_first() {
        check(Some(10), &[prefill(0, 6), prefill(1, 6)], &[(0, 6, true), (1, 4, false)]);
    }

    #[test]
    fn scored_rows_bound_a_chunk() {
        let view = SeqView { score_to: 29, ..prefill(0, 30) };
        check(None, &[view], &[(0, 8, false)]);
        let resumed = SeqView { score_from: 10, score_to: 29, ..prefill(0, 30) };
        check(None, &[resumed], &[(0, 18, false)]);
        let nearly_done = SeqView { score_to: 7, ..prefill(0, 8) };
        check(None, &[nearly_done], &[(0, 8, true)]);
    }

    #[test]
    fn rows_of_several_choices_wait_for_room() {
        let forked = SeqView { sample_rows: 8, ..prefill(1, 5) };
        check(None, &[decode(0), forked], &[(0, 1, true), (1, 4, false)]);
        check(None, &[forked], &[(1, 5, true)]);
    }

    #[test]
    fn decodes_that_do_not_fit_take_turns() {
        let views = [0, 1, 2].map(|slot| SeqView { history: 15, ..decode(slot) });
        let mut batch = Batch::default();
        for first in 0..3 {
            scheduler(None).next_batch(&views, first, &mut batch);
            assert_eq!(batch.chunks, [Chunk { slot: first as u32, tokens: 1, last: true }]);
            assert!(batch.decodes_left);
        }
    }

    #[test]
    fn a_plan_without_mixed_classes_is_refused() {
        assert_eq!(Scheduler::new([BatchClass::Decode { seqs: 8 }].into_iter(), &BOUNDS, None), None);
    }

    prop_compose! {
        fn any_view()(tokens in 1u32..80, decode: bool, rows in 1u32..4, bias in 0u32..5, history in 0u32..12, scored: bool) -> SeqView {
            let tokens = if decode { 1 } else { tokens };
            let score_to = if scored && !decode { tokens - 1 } else { 0 };
            SeqView { slot: 0, tokens, decode, score_from: 0, score_to, sample_rows: rows, bias, history }
        }
    }

    proptest! {
        #[test]
        fn a_batch_never_exceeds_a_bound_and_always_progresses(
            mut views in prop::collection::vec(any_view(), 1..12),
            chunk in prop::option::of(1u32..100),
            first in 0usize..12,
        ) {
            for (slot, view) in views.iter_mut().enumerate() {
                view.slot = slot as u32;
            }
            let mut batch = Batch::default();
            scheduler(chunk).next_batch(&views, first, &mut batch);
            let mut sums = [0; 4];
            for chunk in &batch.chunks {
                let view = views[chunk.slot as usize];
                prop_assert!(chunk.tokens > 0 && chunk.tokens <= view.tokens);
                prop_assert_eq!(chunk.last, chunk.tokens == view.tokens);
                let sampling = u32::from(chunk.last);
                let adds = [chunk.tokens, rows_of(&view, chunk.tokens), sampling * view.bias, sampling * view.history];
                sums = std::array::from_fn(|index| sums[index] + adds[index]);
            }
            prop_assert!(batch.chunks.len() <= 8 && sums[0] <= 64 && sums[1] <= 8 && sums[2] <= 10 && sums[3] <= 20);
            prop_assert!(!batch.chunks.is_empty());
        }
    }
}
