//! Puts a step together and hands it to the device.

use super::api::{FinishReason, MaskVerdict};
use super::commit::{End, MASK_FAILED};
use super::core::{ChunkRef, Core, InFlight, RowRef, RowUse};
use super::group::Group;
use super::request::kv_positions;
use super::scheduler::{Chunk, SeqView};
use super::sequence::{Sequence, Source, guarded};
use crate::device::DeviceError;

impl Core {
    /// Submits the next step; `false` if nothing can run now.
    pub(super) fn submit_step(&mut self) -> Result<bool, DeviceError> {
        self.admit();
        self.view_running();
        let mut batch = std::mem::take(&mut self.batch);
        self.scheduler.next_batch(&self.views, self.first_decode, &mut batch);
        self.first_decode = if batch.decodes_left { self.first_decode.wrapping_add(1) } else { 0 };
        self.secure_pages(&mut batch.chunks);
        let submitted = self.submit_chunks(&mut batch.chunks);
        self.batch = batch;
        submitted
    }

    /// Lists the sequences that could run in the next step.
    fn view_running(&mut self) {
        self.views.clear();
        for slot in &self.running {
            let seq = &self.seqs[*slot];
            let group = &self.groups[seq.group];
            if is_ready(seq, group, self.step) {
                self.views.push(view(*slot, seq, group));
            }
        }
    }

    /// Gets the pages that the chunks write to. If the pool is exhausted (over-commit only), chunks wait
    /// for steps in flight, or else the youngest sequences are preempted.
    fn secure_pages(&mut self, chunks: &mut Vec<Chunk>) {
        let mut index = 0;
        while let Some(chunk) = chunks.get(index).copied() {
            let pages = (self.seqs[chunk.slot].computed + chunk.tokens).div_ceil(self.page_tokens);
            if self.grow(chunk.slot, pages) {
                index += 1;
            } else if !self.in_flight.is_empty() {
                chunks.remove(index);
            } else {
                let victim = self.preempt_youngest().expect("the sequence that found no page can be preempted itself");
                if let Some(place) = chunks.iter().position(|chunk| chunk.slot == victim) {
                    chunks.remove(place);
                    index -= usize::from(place < index);
                }
            }
        }
    }

    fn submit_chunks(&mut self, chunks: &mut Vec<Chunk>) -> Result<bool, DeviceError> {
        self.fill_masks(chunks);
        if chunks.is_empty() {
            return Ok(false);
        }
        let mut flight = self.spare.pop().unwrap_or_default();
        self.assemble(chunks, &mut flight);
        let inputs = &self.assembler.inputs;
        let (tokens, seqs, rows) = (inputs.tokens(), inputs.seqs(), inputs.rows());
        let decode = tokens == seqs && inputs.logit_rows.iter().copied().eq(0..tokens);
        let entry = self.device.plan().entry_for(decode, tokens, seqs.max(rows));
        let entry = entry.ok_or_else(|| DeviceError::Failed {
            message: format!("no batch class of the plan takes {tokens} tokens, {seqs} sequences, {rows} rows"),
        })?;
        if self.in_flight.is_empty() {
            self.meter_mark = self.now;
        }
        self.device.submit(entry, &self.assembler.inputs)?;
        self.step += 1;
        self.stats.steps += 1;
        self.advance(chunks, &mut flight)?;
        self.in_flight.push_back(flight);
        Ok(true)
    }

    fn assemble(&mut self, chunks: &[Chunk], flight: &mut InFlight) {
        flight.chunks.clear();
        flight.rows.clear();
        flight.scores = false;
        for chunk in chunks {
            let seq = &self.seqs[chunk.slot];
            let group = &self.groups[seq.group];
            flight.scores |= group.request.prompt_logprobs.is_some();
            self.assembler.push(*chunk, seq, group, &mut flight.rows);
            flight.chunks.push(ChunkRef { slot: chunk.slot, serial: seq.serial, end: seq.computed + chunk.tokens });
        }
        self.assembler.end();
        flight.tokens = u64::from(self.assembler.inputs.tokens());
    }

    /// Starts the inputs and writes the masks of all rows, if any has one. A choice whose mask ends it
    /// leaves the batch.
    fn fill_masks(&mut self, chunks: &mut Vec<Chunk>) {
        self.assembler.begin();
        let masked = |core: &Self, chunk: &Chunk| chunk.last && !core.seqs[chunk.slot].masks.is_empty();
        if !chunks.iter().any(|chunk| masked(self, chunk)) {
            return;
        }
        let words = self.assembler.mask_words();
        let mut mask = std::mem::take(&mut self.assembler.inputs.mask);
        let mut kept = Vec::with_capacity(chunks.len());
        for chunk in chunks.drain(..) {
            let start = mask.len();
            let seq = &mut self.seqs[chunk.slot];
            let group = &self.groups[seq.group];
            match fill_rows(chunk, seq, group, words, &mut mask) {
                MaskVerdict::Continue => {
                    kept.push(chunk);
                    continue;
                }
                MaskVerdict::Complete => self.end_seq(chunk.slot, End::Finished(FinishReason::Stop)),
                MaskVerdict::Failed => self.end_seq(chunk.slot, End::Failed(MASK_FAILED)),
            }
            mask.truncate(start);
        }
        self.assembler.inputs.mask = mask;
        *chunks = kept;
    }

    /// Moves the sequences on to where they are once the step has run, and splits off further choices.
    fn advance(&mut self, chunks: &[Chunk], flight: &mut InFlight) -> Result<(), DeviceError> {
        let mut row = 0;
        let mut copies = Vec::new();
        for chunk in chunks {
            let rows = flight.rows[row..].iter().take_while(|row| row.slot == chunk.slot).count();
            let seq = &mut self.seqs[chunk.slot];
            let group = &self.groups[seq.group];
            let decode = seq.is_decode();
            if !decode {
                self.stats.prefill_tokens += u64::from(chunk.tokens);
            }
            seq.computed += chunk.tokens;
            if chunk.last && group.request.max_tokens > 0 {
                seq.pending += 1;
                let first = (row + rows) as u32 - seq.width();
                seq.source = Source { step: self.step, row: first };
                self.fork(chunk.slot, first, flight, &mut copies);
            }
            row += rows;
        }
        if copies.is_empty() { Ok(()) } else { self.device.copy_pages(&copies) }
    }

    /// Splits the further choices off a sequence whose prompt is computed. Full pages are shared; the
    /// partial last one is copied.
    fn fork(&mut self, slot: u32, first_row: u32, flight: &mut InFlight, copies: &mut Vec<(u32, u32)>) {
        let forks = std::mem::take(&mut self.seqs[slot].forks);
        for choice in 1..=forks {
            let row = first_row + choice;
            let child = self.split(slot, choice, row, copies);
            let serial = child.serial;
            let child = self.seqs.insert(child);
            flight.rows[row as usize] = RowRef { slot: child, serial, purpose: RowUse::Sample };
            let place = self.running.partition_point(|other| self.seqs[*other].order <= self.seqs[child].order);
            self.running.insert(place, child);
        }
    }

    fn split(&mut self, slot: u32, choice: u32, row: u32, copies: &mut Vec<(u32, u32)>) -> Sequence {
        let serial = self.next_serial();
        let parent = &mut self.seqs[slot];
        let request = &self.groups[parent.group].request;
        let shared = (parent.prompt_tokens / self.page_tokens) as usize;
        let reserve = kv_positions(request).div_ceil(u64::from(self.page_tokens)) as u32 - shared as u32;
        parent.reserve -= reserve;
        let mut child = parent.fork(choice, serial, row, self.now);
        child.reserve = reserve;
        child.published = child.published.min(shared as u32);
        if request.max_tokens > 1 {
            for page in &parent.pages[..shared] {
                self.pager.retain(*page);
                child.pages.push(*page);
            }
            if let Some(partial) = parent.pages.get(shared) {
                let copy = self.pager.alloc().expect("a copy is part of the reservation");
                child.reserve -= 1;
                self.reserved -= 1;
                child.pages.push(copy);
                copies.push((*partial, copy));
            }
        }
        child
    }
}

/// Whether a sequence can take part in the step after step `step`.
fn is_ready(seq: &Sequence, group: &Group, step: u64) -> bool {
    let ahead = seq.pending == 0 || (!seq.needs_host() && seq.source.step == step && seq.drawn() + seq.pending < group.request.max_tokens);
    ahead && seq.remaining() > 0
}

fn view(slot: u32, seq: &Sequence, group: &Group) -> SeqView {
    let scored = seq.score_range(group, seq.prompt_tokens);
    let rows = if group.request.max_tokens > 0 { seq.width() } else { 0 };
    let index = (seq.computed + seq.remaining()).saturating_sub(seq.prompt_tokens);
    let bias = group.bias_at(index, !seq.masks.is_empty()).len() as u32;
    let history = seq.history.as_ref().map_or(0, |history| history.ids.len() as u32);
    SeqView {
        slot,
        tokens: seq.remaining(),
        decode: seq.is_decode(),
        score_from: scored.start - seq.computed,
        score_to: scored.end - seq.computed,
        sample_rows: rows,
        bias: bias * rows,
        history: history * rows,
    }
}

/// Appends the mask rows of a chunk: zeros for rows without a mask.
fn fill_rows(chunk: Chunk, seq: &mut Sequence, group: &Group, words: usize, mask: &mut Vec<u32>) -> MaskVerdict {
    let end = seq.computed + chunk.tokens;
    let samples = if chunk.last && group.request.max_tokens > 0 { seq.width() as usize } else { 0 };
    let plain = seq.score_range(group, end).len() + if seq.masks.is_empty() { samples } else { 0 };
    mask.resize(mask.len() + plain * words, 0);
    for source in seq.masks.iter_mut().take(samples) {
        let start = mask.len();
        mask.resize(start + words, 0);
        let verdict = guarded(|| source.fill(&mut mask[start..]));
        if verdict != MaskVerdict::Continue {
            return verdict;
        }
        if end - seq.prompt_tokens < group.request.min_tokens {
            forbid_stops(&mut mask[start..], &group.request.stop_ids);
        }
    }
    MaskVerdict::Continue
}

/// Takes stop ids out of a mask row, unless nothing else is allowed: a complete constraint beats `min_tokens`.
fn forbid_stops(words: &mut [u32], stop_ids: &[u32]) {
    let bit = |id: u32| ((id / 32) as usize, 1u32 << (id % 32));
    let allowed: Vec<u32> =
        stop_ids.iter().copied().filter(|id| words.get(bit(*id).0).is_some_and(|word| word & bit(*id).1 != 0)).collect();
    for id in &allowed {
        words[bit(*id).0] &= !bit(*id).1;
    }
    if words.iter().all(|word| *word == 0) {
        for id in &allowed {
            words[bit(*id).0] |= bit(*id).1;
        }
    }
}
