//! Where the per-step slots of an entry live, and how a batch is written into pinned staging.
//!
//! Each entry has a layout of its own, sized by its class, over one shared region: small values that
//! change every step lie together, so that a decode step needs one transfer. Padding rows up to a
//! class's bound are written here: they append to the padding page, have no context and sample greedily.

use super::super::StepInputs;
use oxide_bundle::plan::BatchClass;
use oxide_bundle::step::{InputSlot, NONE, OutputSlot, SamplingRow, StepBounds, TOP_LOGPROBS_MAX};

/// Alignment of a slot: the widest load of a kernel.
const SLOT_ALIGN: u64 = 256;

/// Slots that change every step, in the order they lie in.
const HOT: [InputSlot; 10] = [
    InputSlot::TokenIds,
    InputSlot::TokenSources,
    InputSlot::Positions,
    InputSlot::KvSlots,
    InputSlot::QueryStarts,
    InputSlot::KvLens,
    InputSlot::LogitRows,
    InputSlot::Sampling,
    InputSlot::BiasStarts,
    InputSlot::HistoryStarts,
];

/// Slots that most steps leave alone.
const COLD: [InputSlot; 5] = [InputSlot::BiasIds, InputSlot::BiasValues, InputSlot::HistoryIds, InputSlot::HistoryCounts, InputSlot::Mask];

/// Offsets of the input slots of one entry.
#[derive(Clone, Debug)]
pub(super) struct InputLayout {
    offsets: [u64; InputSlot::ALL.len()],
    /// Bytes of the hot slots, from the start.
    pub(super) hot_bytes: u64,
    /// Bytes of all slots.
    pub(super) bytes: u64,
    bounds: StepBounds,
}

impl InputLayout {
    /// The layout for batches of `class`.
    pub(super) fn new(plan: &StepBounds, class: BatchClass) -> Self {
        let bounds = StepBounds { tokens_max: class.tokens_max(), seqs_max: class.seqs_max(), rows_max: class.seqs_max(), ..*plan };
        let mut layout = Self { offsets: [0; InputSlot::ALL.len()], hot_bytes: 0, bytes: 0, bounds };
        for slot in HOT {
            layout.place(slot);
        }
        layout.hot_bytes = layout.bytes;
        // The table comes at the same place for every entry, so that unchanged rows need not be sent again.
        layout.bytes = HOT.iter().map(|slot| slot.bytes(plan).next_multiple_of(SLOT_ALIGN)).sum();
        layout.place(InputSlot::BlockTables);
        layout.bytes = layout.offset(InputSlot::BlockTables) + InputSlot::BlockTables.bytes(plan).next_multiple_of(SLOT_ALIGN);
        for slot in COLD {
            layout.place(slot);
        }
        layout
    }

    fn place(&mut self, slot: InputSlot) {
        self.offsets[slot as usize] = self.bytes;
        self.bytes += slot.bytes(&self.bounds).next_multiple_of(SLOT_ALIGN);
    }

    /// Offset of a slot.
    pub(super) fn offset(&self, slot: InputSlot) -> u64 {
        self.offsets[slot as usize]
    }

    /// Bounds of the entry.
    #[cfg(test)]
    fn bounds(&self) -> &StepBounds {
        &self.bounds
    }
}

/// Offsets of the output slots; the same for every entry, since a step reads what the one before sampled.
#[derive(Clone, Debug)]
pub(super) struct OutputLayout {
    offsets: [u64; OutputSlot::ALL.len()],
    /// Bytes of ids and their log-probabilities.
    pub(super) hot_bytes: u64,
    /// Bytes of all slots.
    pub(super) bytes: u64,
}

impl OutputLayout {
    /// The layout for the plan's bounds.
    pub(super) fn new(plan: &StepBounds) -> Self {
        let mut layout = Self { offsets: [0; OutputSlot::ALL.len()], hot_bytes: 0, bytes: 0 };
        for slot in OutputSlot::ALL {
            layout.offsets[slot as usize] = layout.bytes;
            layout.bytes += slot.bytes(plan).next_multiple_of(SLOT_ALIGN);
            if slot == OutputSlot::SampledLogprobs {
                layout.hot_bytes = layout.bytes;
            }
        }
        layout
    }

    /// Offset of a slot.
    pub(super) fn offset(&self, slot: OutputSlot) -> u64 {
        self.offsets[slot as usize]
    }
}

/// How many rows a step runs with: the batch itself, or the class's bound in a graph.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Padded {
    pub(super) tokens: usize,
    pub(super) seqs: usize,
    pub(super) rows: usize,
}

/// Writes the hot slots of a batch, padded, into `staging`, which starts where the entry's region starts.
/// `padding_slot` is a KV slot of the page that nobody reads.
pub(super) fn write_hot(layout: &InputLayout, inputs: &StepInputs, padded: Padded, padding_slot: u32, staging: &mut [u8]) {
    let tokens = inputs.token_ids.len() as u32;
    let mut put = |slot: InputSlot, values: &[u32], count: usize, fill: u32| {
        write_words(staging, layout.offset(slot), values, count, fill);
    };
    put(InputSlot::TokenIds, &inputs.token_ids, padded.tokens, 0);
    put(InputSlot::TokenSources, &inputs.token_sources, padded.tokens, NONE);
    put(InputSlot::Positions, &inputs.positions, padded.tokens, 0);
    put(InputSlot::KvSlots, &inputs.kv_slots, padded.tokens, padding_slot);
    put(InputSlot::QueryStarts, &inputs.query_starts, padded.seqs + 1, tokens);
    put(InputSlot::KvLens, &inputs.kv_lens, padded.seqs, 0);
    put(InputSlot::LogitRows, &inputs.logit_rows, padded.rows, 0);
    let last = |starts: &[u32]| starts.last().copied().unwrap_or(0);
    put(InputSlot::BiasStarts, &inputs.bias_starts, padded.rows + 1, last(&inputs.bias_starts));
    put(InputSlot::HistoryStarts, &inputs.history_starts, padded.rows + 1, last(&inputs.history_starts));
    let at = layout.offset(InputSlot::Sampling) as usize;
    let rows = inputs.sampling.iter().chain(std::iter::repeat(&SamplingRow::GREEDY)).take(padded.rows);
    for (row, target) in rows.zip(staging[at..].chunks_exact_mut(size_of::<SamplingRow>())) {
        target.copy_from_slice(bytemuck::bytes_of(row));
    }
}

/// Writes `values`, then `fill` up to `count` words.
pub(super) fn write_words(staging: &mut [u8], at: u64, values: &[u32], count: usize, fill: u32) {
    let target = &mut staging[at as usize..at as usize + 4 * count];
    let given = values.len().min(count);
    target[..4 * given].copy_from_slice(bytemuck::cast_slice(&values[..given]));
    for word in target[4 * given..].chunks_exact_mut(4) {
        word.copy_from_slice(&fill.to_le_bytes());
    }
}

/// The cold slots that a batch fills, with their bytes.
pub(super) fn cold_slots(inputs: &StepInputs) -> impl Iterator<Item = (InputSlot, &[u8])> {
    let lists: [(InputSlot, &[u8]); 5] = [
        (InputSlot::BiasIds, bytemuck::cast_slice(&inputs.bias_ids)),
        (InputSlot::BiasValues, bytemuck::cast_slice(&inputs.bias_values)),
        (InputSlot::HistoryIds, bytemuck::cast_slice(&inputs.history_ids)),
        (InputSlot::HistoryCounts, bytemuck::cast_slice(&inputs.history_counts)),
        (InputSlot::Mask, bytemuck::cast_slice(&inputs.mask)),
    ];
    lists.into_iter().filter(|(_, bytes)| !bytes.is_empty())
}

/// Whether any row wants alternatives.
pub(super) fn wants_top(inputs: &StepInputs) -> bool {
    inputs.sampling.iter().any(|row| row.logprobs != NONE && row.logprobs > 0 && row.logprobs <= TOP_LOGPROBS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: StepBounds =
        StepBounds { tokens_max: 64, seqs_max: 8, rows_max: 8, pages_per_seq_max: 4, bias_max: 16, history_max: 32, vocab: 100 };

    #[test]
    fn slots_of_an_entry_do_not_overlap() {
        for class in [BatchClass::Decode { seqs: 1 }, BatchClass::Decode { seqs: 8 }, BatchClass::Mixed { tokens: 64, seqs: 8 }] {
            let layout = InputLayout::new(&BOUNDS, class);
            let mut spans: Vec<_> = InputSlot::ALL.iter().map(|&slot| (layout.offset(slot), slot.bytes(layout.bounds()))).collect();
            spans.sort_unstable();
            for pair in spans.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{class:?}: {pair:?}");
            }
            let (at, bytes) = spans[spans.len() - 1];
            assert!(at + bytes <= layout.bytes);
        }
    }

    #[test]
    fn the_block_table_has_one_place_in_all_entries() {
        let small = InputLayout::new(&BOUNDS, BatchClass::Decode { seqs: 1 });
        let large = InputLayout::new(&BOUNDS, BatchClass::Mixed { tokens: 64, seqs: 8 });
        assert_eq!(small.offset(InputSlot::BlockTables), large.offset(InputSlot::BlockTables));
    }

    #[test]
    fn padding_rows_append_to_the_padding_page_and_have_no_context() {
        let layout = InputLayout::new(&BOUNDS, BatchClass::Decode { seqs: 4 });
        let inputs = StepInputs {
            token_ids: vec![7],
            token_sources: vec![NONE],
            positions: vec![3],
            kv_slots: vec![35],
            query_starts: vec![0, 1],
            kv_lens: vec![4],
            logit_rows: vec![0],
            sampling: vec![SamplingRow::GREEDY],
            bias_starts: vec![0, 0],
            history_starts: vec![0, 0],
            ..StepInputs::default()
        };
        let mut staging = vec![0xFF; layout.bytes as usize];
        write_hot(&layout, &inputs, Padded { tokens: 4, seqs: 4, rows: 4 }, 999, &mut staging);
        let words = |slot: InputSlot, count: usize| -> Vec<u32> {
            let at = layout.offset(slot) as usize;
            staging[at..at + 4 * count].chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
        };
        assert_eq!(words(InputSlot::KvSlots, 4), [35, 999, 999, 999]);
        assert_eq!(words(InputSlot::KvLens, 4), [4, 0, 0, 0]);
        assert_eq!(words(InputSlot::QueryStarts, 5), [0, 1, 1, 1, 1]);
    }
}
