//! An accepted request while it lives in the engine: what its choices have in common.

use super::api::{EngineRequest, TokenLogprobs};
use super::cancel::Cancel;
use super::events::EventSender;
use super::handle::Submission;
use super::sequence::PageKeys;
use super::stats::Place;
use oxide_bundle::step::{NONE, SamplingRow};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The newest round of admission.
#[derive(Copy, Clone, Debug)]
pub(super) struct Round {
    /// Rounds so far.
    pub(super) number: u64,
    /// Whether slots or pages ran out.
    pub(super) crowded: bool,
}

/// An accepted request.
pub(super) struct Group {
    pub(super) request: EngineRequest,
    pub(super) events: EventSender,
    pub(super) cancel: Arc<Cancel>,
    pub(super) submitted: Instant,
    /// How it waits.
    pub(super) place: Place,
    /// Rounds of admission before it came.
    pub(super) round: u64,
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
    pub(super) fn new(Submission { request, events, cancel, submitted, place }: Submission, round: u64) -> Self {
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
            place,
            round,
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
        self.cancel.is_cancelled()
    }

    pub(super) fn prompt_tokens(&self) -> u32 {
        self.request.prompt.len() as u32
    }

    /// Bias entries of a row that draws completion token `index`. A mask takes stop ids out by itself.
    pub(super) fn bias_at(&self, index: u32, masked: bool) -> &[(u32, f32)] {
        if index < self.request.min_tokens && !masked { &self.bias_no_stop } else { &self.bias }
    }

    /// Whether the request has waited too long: past its deadline, or past its longest wait though a round
    /// of admission looked at it. A longest wait of zero is for slots and pages alone, not for the turn to prefill.
    pub(super) fn is_late(&self, now: Instant, round: Round) -> bool {
        let waited = now.saturating_duration_since(self.submitted);
        let found_no_place = |wait: Duration| waited >= wait && round.number > self.round && (!wait.is_zero() || round.crowded);
        self.request.deadline.is_some_and(|deadline| now >= deadline) || self.request.queue_time_max.is_some_and(found_no_place)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_ids_beat_every_bias() {
        let merged = merge_bias(&[(5, 100.0), (2, 1.0), (2, 0.5)], &[5, 9, 9]);
        assert_eq!(merged, [(2, 1.5), (5, f32::NEG_INFINITY), (9, f32::NEG_INFINITY)]);
    }
}
