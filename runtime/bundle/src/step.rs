//! Per-step values: what the engine writes before a step and reads after it.
//!
//! Slots live at fixed device addresses, are sized by the plan's [`StepBounds`] and are never baked
//! into launches, so that a step can be replayed as a CUDA Graph.

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

/// "No value" in `u32` slots.
pub const NONE: u32 = u32::MAX;
/// Alternatives returned for each sampled token.
pub const TOP_LOGPROBS_MAX: u32 = 20;
/// Set in a history entry's count when the token occurs in the prompt (repetition penalty only).
pub const HISTORY_IN_PROMPT: u32 = 1 << 31;

/// Largest step that any entry of a plan accepts.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepBounds {
    /// Tokens of a step.
    pub tokens_max: u32,
    /// Sequences of a step.
    pub seqs_max: u32,
    /// Logit rows of a step.
    pub rows_max: u32,
    /// Pages of one sequence (`ceil(max_context / page_tokens)`): the block-table stride.
    pub pages_per_seq_max: u32,
    /// Logit-bias entries of a step, all rows together.
    pub bias_max: u32,
    /// Penalty-history entries of a step, all rows together.
    pub history_max: u32,
    /// Width of a logits row; a mask row has `ceil(vocab / 32)` words.
    pub vocab: u32,
}

/// Values that the engine writes before a step. `u32` unless said otherwise.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputSlot {
    /// `[T]` token ids.
    TokenIds,
    /// `[T]` row of the previous step whose sampled id is this token, or [`NONE`].
    TokenSources,
    /// `[T]` position of the token in its sequence.
    Positions,
    /// `[T]` where K and V go: `page · page_tokens + offset`.
    KvSlots,
    /// `[S, pages_per_seq_max]` pages of each sequence; unused entries hold a valid page.
    BlockTables,
    /// `[S + 1]` first token row of each sequence.
    QueryStarts,
    /// `[S]` tokens in the cache once this step's are appended.
    KvLens,
    /// `[R]` token row that each logits row is taken from.
    LogitRows,
    /// `[R]` [`SamplingRow`].
    Sampling,
    /// `[R + 1]` first bias entry of each row.
    BiasStarts,
    /// `[bias_max]` biased ids.
    BiasIds,
    /// `[bias_max]` f32 added to the logit.
    BiasValues,
    /// `[R + 1]` first history entry of each row.
    HistoryStarts,
    /// `[history_max]` ids seen, each once.
    HistoryIds,
    /// `[history_max]` occurrences in the output, plus [`HISTORY_IN_PROMPT`].
    HistoryCounts,
    /// `[R, ceil(vocab/32)]` allowed-token bits of rows whose [`SamplingRow::flags`] say so.
    Mask,
}

/// Values that a step leaves for the engine.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputSlot {
    /// `[R]` sampled ids, or [`NONE`] if the row's logits hold a NaN or no id is allowed.
    SampledIds,
    /// `[R]` f32 log-probability of the sampled (or target) id before temperature and filters, after bias and mask.
    SampledLogprobs,
    /// `[R, TOP_LOGPROBS_MAX]` ids by falling log-probability, ties by rising id.
    TopIds,
    /// `[R, TOP_LOGPROBS_MAX]` f32.
    TopLogprobs,
}

impl InputSlot {
    /// Every slot, in the order of the input block.
    pub const ALL: [Self; 16] = [
        Self::TokenIds,
        Self::TokenSources,
        Self::Positions,
        Self::KvSlots,
        Self::BlockTables,
        Self::QueryStarts,
        Self::KvLens,
        Self::LogitRows,
        Self::Sampling,
        Self::BiasStarts,
        Self::BiasIds,
        Self::BiasValues,
        Self::HistoryStarts,
        Self::HistoryIds,
        Self::HistoryCounts,
        Self::Mask,
    ];

    /// Size of the slot in bytes.
    pub fn bytes(self, bounds: &StepBounds) -> u64 {
        let (tokens, seqs, rows) = (u64::from(bounds.tokens_max), u64::from(bounds.seqs_max), u64::from(bounds.rows_max));
        match self {
            Self::TokenIds | Self::TokenSources | Self::Positions | Self::KvSlots => 4 * tokens,
            Self::BlockTables => 4 * seqs * u64::from(bounds.pages_per_seq_max),
            Self::QueryStarts => 4 * (seqs + 1),
            Self::KvLens => 4 * seqs,
            Self::LogitRows => 4 * rows,
            Self::Sampling => size_of::<SamplingRow>() as u64 * rows,
            Self::BiasStarts | Self::HistoryStarts => 4 * (rows + 1),
            Self::BiasIds | Self::BiasValues => 4 * u64::from(bounds.bias_max),
            Self::HistoryIds | Self::HistoryCounts => 4 * u64::from(bounds.history_max),
            Self::Mask => 4 * rows * u64::from(bounds.vocab.div_ceil(32)),
        }
    }
}

impl OutputSlot {
    /// Every slot, in the order of the output block.
    pub const ALL: [Self; 4] = [Self::SampledIds, Self::SampledLogprobs, Self::TopIds, Self::TopLogprobs];

    /// Size of the slot in bytes.
    pub fn bytes(self, bounds: &StepBounds) -> u64 {
        let rows = u64::from(bounds.rows_max);
        match self {
            Self::SampledIds | Self::SampledLogprobs => 4 * rows,
            Self::TopIds | Self::TopLogprobs => 4 * rows * u64::from(TOP_LOGPROBS_MAX),
        }
    }
}

/// Sampling parameters of one logits row, as kernels read them. 64 bytes.
///
/// Order of operations: logits + bias → mask and padding to −∞ → log-probabilities are taken here →
/// repetition, presence, frequency penalties → `/ temperature` → top-k → top-p → min-p → draw.
/// `temperature == 0` (or `top_k == 1`, or `top_p == 0`) means greedy: the largest penalised logit, lowest id on ties.
/// The draw uses Philox4x32-10 with key `seed` and counter `(counter, 0)`: its first word `u` gives
/// `(u + 0.5) / 2³²`, compared with the cumulative probabilities of the kept ids in order of falling
/// probability, ties by rising id.
///
/// # Exact arithmetic
///
/// Probabilities are integers, so that sums have no order and every device draws the same id from
/// equal logits. Floating-point operations are binary32, rounded to nearest, one by one.
///
/// 1. `x = logit + bias`; masked and padding ids are dropped. A NaN `x` of any other id, or no id
///    above −∞, makes the row's id [`NONE`]. A row with a `target` gets it as its id, and ends here.
/// 2. Seen ids: `y = x > 0 ? x / repetition : x · repetition`; if the output holds the id `count > 0`
///    times, then `y = (y − presence) − (frequency · count)`. Other ids: `y = x`.
/// 3. Order: falling `y` (−0 equals 0), ties by rising id. Greedy rows take the first.
/// 4. `d = (y_max − y) · s` with `s = 0x49B8AA3B as f32 (log2 e · 2²⁰) / temperature`, and `d = 0` where
///    `y == y_max`. If `d ≥ 40 · 2²⁰` the weight is 0, else with `q = trunc(d)`, `f = (q mod 2²⁰) · 2⁻²⁰`
///    the weight is `w = (trunc(P(f) · 2²⁴) << 16) >> (q >> 20)`: about `2⁴⁰ · 2^(−d / 2²⁰)`.
///    `P(f)` is the Horner scheme, each step one fused multiply-add, of the coefficients with the
///    bits `1.0, 0xBF3171DE, 0x3E75F1C8, 0xBD627F7B, 0x3C16D3E8, 0xBA77B359` (rising powers).
/// 5. top-k keeps the first `k`. top-p, if below 1, keeps the shortest prefix whose weight is at least
///    `max(1, ⌊W · trunc(top_p · 2³²) / 2³²⌋)`, `W` being the weight kept so far. min-p, if above 0, keeps
///    weights of at least `trunc(min_p · 2⁴⁰)`, and always the first.
/// 6. The drawn id is the first whose cumulative weight exceeds `⌊W · (2u + 1) / 2³³⌋`, `W` being the weight kept.
///
/// Alternatives go by falling `x`, ties by rising id; of a row's [`TOP_LOGPROBS_MAX`] entries the first
/// `logprobs` are written, with ([`NONE`], −∞) where ids run out. Log-probabilities are `x − ln Σ exp x` to within rounding.
/// Biased ids occur once in a row's list, as history ids do.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Pod, Zeroable)]
pub struct SamplingRow {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass; 1 keeps all.
    pub top_p: f32,
    /// Smallest probability relative to the largest; 0 keeps all.
    pub min_p: f32,
    /// Ids kept; 0 keeps all.
    pub top_k: u32,
    /// Divides positive and multiplies negative logits of ids seen; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from ids in the output.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Alternatives wanted (0..=20), or [`NONE`] for no log-probabilities at all.
    pub logprobs: u32,
    /// Philox key.
    pub seed: u64,
    /// Philox counter: the position of the sampled token in its sequence.
    pub counter: u64,
    /// Id to score instead of sampling (prompt log-probabilities), or [`NONE`].
    pub target: u32,
    /// Bits of [`row_flags`].
    pub flags: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

/// Bits of [`SamplingRow::flags`].
pub mod row_flags {
    /// The row has a mask in [`InputSlot::Mask`](super::InputSlot::Mask).
    pub const MASK: u32 = 1;
    /// The row has bias entries.
    pub const BIAS: u32 = 2;
    /// The row has penalty history.
    pub const HISTORY: u32 = 4;
}

const _: () = assert!(size_of::<SamplingRow>() == 64);

impl SamplingRow {
    /// Greedy, no filters, no log-probabilities.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        min_p: 0.0,
        top_k: 0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logprobs: NONE,
        seed: 0,
        counter: 0,
        target: NONE,
        flags: 0,
        reserved: [0; 2],
    };
}
