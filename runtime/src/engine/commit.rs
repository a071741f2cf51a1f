//! What a collected step means: tokens to their sequences, pages to the index, ends to the clients.

use super::api::{ChoiceTrace, EngineEvent, FinishReason, LogitsMask, MaskVerdict, RejectReason, TokenLogprobs};
use super::core::{ChunkRef, Core, RowRef, RowUse};
use super::group::Group;
use super::sequence::{Sequence, guarded};
use crate::device::{DeviceError, StepOutputs};
use oxide_bundle::step::{NONE, TOP_LOGPROBS_MAX};
use std::time::Instant;

impl Core {
    /// Waits for the oldest step in flight and commits it.
    pub(super) fn collect_step(&mut self) -> Result<(), DeviceError> {
        let flight = self.in_flight.pop_front().expect("a step is in flight");
        let mut outputs = std::mem::take(&mut self.outputs);
        self.device.collect(&mut outputs)?;
        self.now = Instant::now();
        for chunk in &flight.chunks {
            self.commit_chunk(*chunk);
        }
        for (row, reference) in flight.rows.iter().enumerate() {
            self.commit_row(*reference, row, &outputs);
        }
        if flight.scores {
            for chunk in &flight.chunks {
                self.commit_scores(*chunk);
            }
        }
        let rate = self.meter.add(flight.tokens, self.now.saturating_duration_since(self.meter_mark));
        self.meter_mark = self.now;
        self.shared.load.set_rate(rate);
        self.outputs = outputs;
        self.spare.push(flight);
        Ok(())
    }

    /// Whether what was submitted for `serial` is still wanted.
    fn is_current(&self, slot: u32, serial: u64) -> bool {
        self.seqs.get(slot).is_some_and(|seq| seq.serial == serial)
    }

    fn commit_chunk(&mut self, chunk: ChunkRef) {
        if self.is_current(chunk.slot, chunk.serial) {
            let seq = &mut self.seqs[chunk.slot];
            seq.committed = seq.committed.max(chunk.end);
            self.publish_pages(chunk.slot);
        }
    }

    fn commit_row(&mut self, reference: RowRef, row: usize, outputs: &StepOutputs) {
        if self.is_current(reference.slot, reference.serial) {
            match reference.purpose {
                RowUse::Score => self.commit_score(reference.slot, row, outputs),
                RowUse::Sample => self.commit_token(reference.slot, row, outputs),
            }
        }
    }

    fn commit_score(&mut self, slot: u32, row: usize, outputs: &StepOutputs) {
        let seq = &mut self.seqs[slot];
        let group = &mut self.groups[seq.group];
        if outputs.sampled_ids[row] == NONE || outputs.sampled_logprobs[row].is_nan() {
            let message = format!("the logits after prompt token {} hold a NaN", seq.scored);
            return self.end_seq(slot, End::Failed(&message));
        }
        seq.scored += 1;
        group.scored.push(token_logprobs(outputs, row, group.request.prompt_logprobs.unwrap_or(0)));
    }

    /// Sends the prompt log-probabilities of a chunk; ends a request that wanted nothing else.
    fn commit_scores(&mut self, chunk: ChunkRef) {
        if !self.is_current(chunk.slot, chunk.serial) {
            return;
        }
        let seq = &self.seqs[chunk.slot];
        let (group, done) = (seq.group, seq.committed >= seq.prompt_tokens);
        self.send_scores(group);
        if done && self.groups[group].request.max_tokens == 0 {
            self.end_seq(chunk.slot, End::Finished(FinishReason::Length));
        }
    }

    fn send_scores(&mut self, group: u32) {
        let group = &mut self.groups[group];
        if !group.scored.is_empty() {
            let event = EngineEvent::PromptLogprobs { tokens: std::mem::take(&mut group.scored) };
            if !group.events.send(event, group.open_count()) {
                self.shared.give_up(&group.cancel);
            }
        }
    }

    fn commit_token(&mut self, slot: u32, row: usize, outputs: &StepOutputs) {
        let (id, group_slot) = (outputs.sampled_ids[row], self.seqs[slot].group);
        self.send_scores(group_slot);
        let seq = &mut self.seqs[slot];
        let group = &self.groups[group_slot];
        seq.pending -= 1;
        if id == NONE {
            let message = format!("no token can be drawn at position {}: the logits hold a NaN, or no id is allowed", seq.tokens.len());
            return self.end_seq(slot, End::Failed(&message));
        }
        seq.push_token(id, self.now);
        self.stats.decode_tokens += 1;
        if seq.drawn() > group.advance {
            self.queue.charge(group.request.fair_key, 1);
        }
        let logprobs = group.request.sampling.logprobs.map(|wanted| token_logprobs(outputs, row, wanted));
        let event = EngineEvent::Token { choice: seq.choice, id, logprobs };
        let sent = group.events.send(event, group.open_count());
        if !sent {
            self.shared.give_up(&group.cancel);
        }
        let end = end_after(seq, group, id).or_else(|| group.cancel.choice_ended(seq.choice).then_some(End::Finished(FinishReason::Stop)));
        if let Some(end) = end {
            self.end_seq(slot, end);
        }
    }

    /// Ends a sequence, and the choices that it still stands for: pages back, one terminal event each.
    pub(super) fn end_seq(&mut self, slot: u32, end: End<'_>) {
        self.release_pages(slot);
        let (running, preempted) = (self.running.len(), self.preempted.len());
        self.running.retain(|other| *other != slot);
        self.preempted.retain(|other| *other != slot);
        debug_assert_eq!(self.running.len() + self.preempted.len() + 1, running + preempted);
        let seq = self.seqs.remove(slot).expect("an ending sequence exists");
        if self.running.len() < running {
            self.active_seqs -= seq.width();
        }
        let group = &mut self.groups[seq.group];
        let unused = i64::from(group.advance.saturating_sub(seq.drawn())) * i64::from(seq.width());
        self.queue.charge(group.request.fair_key, -unused);
        for choice in seq.choice..seq.choice + seq.width() {
            group.open[choice as usize] = false;
            self.terminals.push((group.events.clone(), end.event(choice, seq.drawn(), trace(&seq, group))));
        }
        let (key, closed) = (group.request.fair_key, group.open_count() == 0);
        self.shared.load.release(u64::from(seq.width()));
        self.count_end(end, seq.width(), seq.drawn());
        if closed {
            self.groups.remove(seq.group);
            self.queue.done(key);
        }
    }

    fn count_end(&mut self, end: End<'_>, choices: u32, drawn: u32) {
        let counter = match end {
            End::Failed(_) => &mut self.stats.failed,
            End::Finished(FinishReason::Cancelled) => &mut self.stats.cancelled,
            End::Finished(FinishReason::Stop | FinishReason::Length | FinishReason::Deadline) => &mut self.stats.finished,
        };
        *counter += u64::from(choices);
        if let End::Finished(FinishReason::Stop | FinishReason::Length) = end {
            self.shared.load.sample_completion(drawn);
        }
    }

    /// Ends every open choice of a request.
    pub(super) fn end_group(&mut self, group: u32, end: End<'_>) {
        let all = self.running.iter().chain(&self.preempted).copied();
        let members: Vec<u32> = all.filter(|slot| self.seqs[*slot].group == group).collect();
        for slot in members {
            self.end_seq(slot, end);
        }
    }

    /// Ends every choice of a request that was never admitted.
    pub(super) fn end_waiting(&mut self, group: &Group, end: End<'_>) {
        let queue = self.now.saturating_duration_since(group.submitted);
        for choice in 0..group.request.n {
            let event = end.event(choice, 0, ChoiceTrace { queue, ..ChoiceTrace::default() });
            self.terminals.push((group.events.clone(), event));
        }
        self.shared.load.release(u64::from(group.request.n));
        self.count_end(end, group.request.n, 0);
    }

    /// Refuses a request that was never admitted.
    pub(super) fn reject(&mut self, group: &Group, reason: RejectReason) {
        self.stats.rejected += 1;
        self.shared.load.release(u64::from(group.request.n));
        self.terminals.push((group.events.clone(), EngineEvent::Rejected(reason)));
    }
}

/// How a choice ends.
#[derive(Copy, Clone, Debug)]
pub(super) enum End<'a> {
    Finished(FinishReason),
    Failed(&'a str),
}

impl End<'_> {
    fn event(self, choice: u32, completion_tokens: u32, trace: ChoiceTrace) -> EngineEvent {
        match self {
            End::Finished(reason) => EngineEvent::Finished { choice, reason, completion_tokens, trace },
            End::Failed(message) => EngineEvent::Failed { choice, message: message.to_owned() },
        }
    }
}

/// How the token just drawn ends its choice, if it does.
fn end_after(seq: &mut Sequence, group: &Group, id: u32) -> Option<End<'static>> {
    if group.request.stop_ids.contains(&id) {
        return Some(End::Finished(FinishReason::Stop));
    }
    let budget = group.request.max_tokens - seq.drawn();
    let verdict = match seq.masks.first_mut() {
        Some(mask) => guarded(|| advance_mask(&mut **mask, id, budget)),
        None => MaskVerdict::Continue,
    };
    match (verdict, budget) {
        (MaskVerdict::Complete, _) => Some(End::Finished(FinishReason::Stop)),
        (MaskVerdict::Failed, _) => Some(End::Failed(MASK_FAILED)),
        (MaskVerdict::Continue, 0) => Some(End::Finished(FinishReason::Length)),
        (MaskVerdict::Continue, _) => None,
    }
}

/// Accepts a drawn id and starts on the next position at once, so that its mask is made while other work runs.
fn advance_mask(mask: &mut dyn LogitsMask, id: u32, budget: u32) -> MaskVerdict {
    let verdict = mask.accept(id);
    if verdict == MaskVerdict::Continue && budget > 0 {
        mask.begin(budget);
    }
    verdict
}

/// Message of a choice whose mask failed.
pub(super) const MASK_FAILED: &str = "the output constraint failed inside";

fn token_logprobs(outputs: &StepOutputs, row: usize, wanted: u32) -> TokenLogprobs {
    let logprob = outputs.sampled_logprobs[row];
    if wanted == 0 {
        // A device need not fetch alternatives that no row of the step wants.
        return TokenLogprobs { logprob, top: Vec::new() };
    }
    let start = row * TOP_LOGPROBS_MAX as usize;
    let range = start..start + wanted as usize;
    let pairs = outputs.top_ids[range.clone()].iter().zip(&outputs.top_logprobs[range]);
    let top = pairs.filter(|(id, _)| **id != NONE).map(|(id, logprob)| (*id, *logprob)).collect();
    TokenLogprobs { logprob, top }
}

fn trace(seq: &Sequence, group: &Group) -> ChoiceTrace {
    let admitted = group.admitted.unwrap_or(group.submitted);
    ChoiceTrace {
        queue: admitted.saturating_duration_since(group.submitted),
        prefill: seq.first_token.map_or(seq.held_at, |first| first).saturating_duration_since(admitted),
        decode: seq.decode_time(),
        cached_tokens: group.cached_tokens,
        kv_page_seconds: seq.page_seconds,
        preemptions: seq.preemptions,
    }
}
