//! Writes a batch as the device reads it. Buffers are kept between steps; so are block-table rows whose
//! sequence did not change, so that a steady decode step writes a few words a sequence.

use super::core::{RowRef, RowUse};
use super::group::Group;
use super::scheduler::Chunk;
use super::sequence::Sequence;
use crate::device::StepInputs;
use oxide_bundle::plan::Plan;
use oxide_bundle::step::{NONE, SamplingRow};

/// Which pages a block-table row holds.
#[derive(Copy, Clone, Debug)]
struct TableRow {
    serial: u64,
    pages: usize,
}

/// The inputs of a step while they are put together.
#[derive(Debug)]
pub(super) struct Assembler {
    pub(super) inputs: StepInputs,
    table_rows: Vec<TableRow>,
    stride: usize,
    page_tokens: usize,
    mask_words: usize,
}

impl Assembler {
    pub(super) fn new(plan: &Plan) -> Self {
        let bounds = plan.bounds();
        Self {
            inputs: StepInputs::default(),
            table_rows: Vec::new(),
            stride: bounds.pages_per_seq_max as usize,
            page_tokens: plan.kv().page_tokens as usize,
            mask_words: bounds.vocab.div_ceil(32) as usize,
        }
    }

    /// Starts a step.
    pub(super) fn begin(&mut self) {
        let tables = std::mem::take(&mut self.inputs.block_tables);
        self.inputs.clear();
        self.inputs.block_tables = tables;
        self.inputs.query_starts.push(0);
        self.inputs.bias_starts.push(0);
        self.inputs.history_starts.push(0);
    }

    /// Words of one mask row.
    pub(super) fn mask_words(&self) -> usize {
        self.mask_words
    }

    /// Adds a sequence's chunk with its rows; says what each row is for in `rows`.
    pub(super) fn push(&mut self, chunk: Chunk, seq: &Sequence, group: &Group, rows: &mut Vec<RowRef>) {
        let end = seq.computed + chunk.tokens;
        self.push_table(seq);
        self.push_tokens(seq, end);
        let row_ref = |purpose| RowRef { slot: chunk.slot, serial: seq.serial, purpose };
        if let Some(wanted) = group.request.prompt_logprobs {
            for position in seq.score_range(group, end) {
                self.push_score(seq, position, end, wanted);
                rows.push(row_ref(RowUse::Score));
            }
        }
        if chunk.last && group.request.max_tokens > 0 {
            for choice in seq.choice..seq.choice + seq.width() {
                self.push_sample(seq, group, choice, end);
                rows.push(row_ref(RowUse::Sample));
            }
        }
    }

    /// Ends a step: drops table rows that it does not use.
    pub(super) fn end(&mut self) {
        let seqs = self.inputs.kv_lens.len();
        self.table_rows.truncate(seqs);
        self.inputs.block_tables.truncate(seqs * self.stride);
    }

    fn push_tokens(&mut self, seq: &Sequence, end: u32) {
        let inputs = &mut self.inputs;
        for position in seq.computed as usize..end as usize {
            let known = seq.tokens.get(position).copied();
            inputs.token_ids.push(known.unwrap_or(0));
            inputs.token_sources.push(if known.is_some() { NONE } else { seq.source.row });
            inputs.positions.push(position as u32);
            let slot = seq.pages[position / self.page_tokens] as usize * self.page_tokens + position % self.page_tokens;
            inputs.kv_slots.push(slot as u32);
        }
        inputs.query_starts.push(inputs.token_ids.len() as u32);
        inputs.kv_lens.push(end);
    }

    /// Unused entries keep what an earlier step left there, or 0: always a page of the pool.
    fn push_table(&mut self, seq: &Sequence) {
        let index = self.inputs.kv_lens.len();
        let start = index * self.stride;
        if self.table_rows.len() == index {
            self.table_rows.push(TableRow { serial: 0, pages: 0 });
            self.inputs.block_tables.resize(start + self.stride, 0);
        }
        let row = &mut self.table_rows[index];
        if row.serial != seq.serial {
            *row = TableRow { serial: seq.serial, pages: 0 };
        }
        self.inputs.block_tables[start + row.pages..start + seq.pages.len()].copy_from_slice(&seq.pages[row.pages..]);
        row.pages = seq.pages.len();
    }

    fn push_score(&mut self, seq: &Sequence, position: u32, end: u32, wanted: u32) {
        let target = seq.tokens[position as usize + 1];
        let row = SamplingRow { logprobs: wanted, target, counter: u64::from(position) + 1, ..SamplingRow::GREEDY };
        self.push_row(row, end - position, &[]);
        self.inputs.history_starts.push(self.inputs.history_ids.len() as u32);
    }

    fn push_sample(&mut self, seq: &Sequence, group: &Group, choice: u32, end: u32) {
        let bias = group.bias_at(end - seq.prompt_tokens, !seq.masks.is_empty());
        self.push_row(seq.sampling_row(group, choice, end), 1, bias);
        if let Some(history) = &seq.history {
            self.inputs.history_ids.extend_from_slice(&history.ids);
            self.inputs.history_counts.extend_from_slice(&history.counts);
        }
        self.inputs.history_starts.push(self.inputs.history_ids.len() as u32);
    }

    /// Adds a row that reads the `back`-th token row from the end.
    fn push_row(&mut self, row: SamplingRow, back: u32, bias: &[(u32, f32)]) {
        let inputs = &mut self.inputs;
        inputs.logit_rows.push(inputs.token_ids.len() as u32 - back);
        inputs.sampling.push(row);
        inputs.bias_ids.extend(bias.iter().map(|(id, _)| *id));
        inputs.bias_values.extend(bias.iter().map(|(_, value)| *value));
        inputs.bias_starts.push(inputs.bias_ids.len() as u32);
    }
}
