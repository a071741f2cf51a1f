//! Checks a batch before it runs: kernels index with these values.

use crate::device::{DeviceError, StepInputs};
use oxide_bundle::plan::{BatchClass, KvGeometry};
use oxide_bundle::step::{NONE, SamplingRow, StepBounds, row_flags};

/// What a batch is checked against.
pub(crate) struct InputBounds<'a> {
    pub(crate) entry: &'a str,
    pub(crate) class: BatchClass,
    pub(crate) bounds: &'a StepBounds,
    pub(crate) kv: &'a KvGeometry,
    pub(crate) kv_pages: u32,
    /// Rows of the embedding.
    pub(crate) vocab: usize,
    /// Positions that have angles.
    pub(crate) positions: usize,
    /// Rows of the previous step.
    pub(crate) previous_rows: usize,
    /// Words of a mask row.
    pub(crate) mask_words: usize,
}

/// Checks `inputs`.
///
/// # Errors
/// If the batch is larger than its class, or a list has a wrong length or a value out of range.
pub(crate) fn check(inputs: &StepInputs, limits: &InputBounds<'_>) -> Result<(), DeviceError> {
    let (tokens, seqs, rows) = (inputs.tokens(), inputs.seqs(), inputs.rows());
    let fits_class = match limits.class {
        BatchClass::Decode { seqs: max } => tokens == seqs && seqs <= max,
        BatchClass::Mixed { tokens: tokens_max, seqs: seqs_max } => tokens <= tokens_max && seqs <= seqs_max,
    };
    if !fits_class || rows > limits.class.seqs_max() {
        return Err(DeviceError::OverEntry { entry: limits.entry.to_owned(), tokens, seqs, rows });
    }
    check_lists(inputs, limits).map_err(|message| DeviceError::Failed { message: format!("step inputs: {message}") })
}

fn check_lists(inputs: &StepInputs, limits: &InputBounds<'_>) -> Result<(), String> {
    check_tokens(inputs, limits)?;
    check_sequences(inputs, limits)?;
    let rows = inputs.logit_rows.len();
    length("sampling", inputs.sampling.len(), rows)?;
    below("logit_rows", &inputs.logit_rows, inputs.token_ids.len())?;
    let flags = inputs.sampling.iter().fold(0, |flags, row| flags | row.flags);
    if flags & row_flags::BIAS != 0 {
        length("bias_values", inputs.bias_values.len(), inputs.bias_ids.len())?;
        starts("bias_starts", &inputs.bias_starts, rows, inputs.bias_ids.len())?;
    }
    if flags & row_flags::HISTORY != 0 {
        length("history_counts", inputs.history_counts.len(), inputs.history_ids.len())?;
        starts("history_starts", &inputs.history_starts, rows, inputs.history_ids.len())?;
    }
    if flags & row_flags::MASK != 0 {
        length("mask", inputs.mask.len(), rows * limits.mask_words)?;
    }
    inputs.sampling.iter().try_for_each(check_row)
}

fn check_row(row: &SamplingRow) -> Result<(), String> {
    let filters = [("temperature", row.temperature), ("top_p", row.top_p), ("min_p", row.min_p)];
    match filters.into_iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
        Some((name, value)) => Err(format!("{name} is {value}, not a number of 0 or more")),
        None => Ok(()),
    }
}

fn check_tokens(inputs: &StepInputs, limits: &InputBounds<'_>) -> Result<(), String> {
    let tokens = inputs.token_ids.len();
    length("token_sources", inputs.token_sources.len(), tokens)?;
    length("positions", inputs.positions.len(), tokens)?;
    length("kv_slots", inputs.kv_slots.len(), tokens)?;
    for (id, source) in inputs.token_ids.iter().zip(&inputs.token_sources) {
        if *source == NONE && *id as usize >= limits.vocab {
            return Err(format!("token id {id}, the vocabulary has {}", limits.vocab));
        }
        if *source != NONE && *source as usize >= limits.previous_rows {
            return Err(format!("token source {source}, the previous step had {} rows", limits.previous_rows));
        }
    }
    below("positions", &inputs.positions, limits.positions)?;
    below("kv_slots", &inputs.kv_slots, limits.kv_pages as usize * limits.kv.page_tokens as usize)
}

fn check_sequences(inputs: &StepInputs, limits: &InputBounds<'_>) -> Result<(), String> {
    let (tokens, seqs) = (inputs.token_ids.len(), inputs.kv_lens.len());
    let stride = limits.bounds.pages_per_seq_max as usize;
    length("block_tables", inputs.block_tables.len(), seqs * stride)?;
    starts("query_starts", &inputs.query_starts, seqs, tokens)?;
    if inputs.query_starts.last().copied() != Some(tokens as u32) || inputs.query_starts.first() != Some(&0) {
        return Err(format!("query_starts do not run from 0 to {tokens}"));
    }
    let page_tokens = limits.kv.page_tokens as usize;
    for (seq, (kv_len, starts)) in inputs.kv_lens.iter().zip(inputs.query_starts.windows(2)).enumerate() {
        let (kv_len, queries) = (*kv_len as usize, (starts[1] - starts[0]) as usize);
        if matches!(limits.class, BatchClass::Decode { .. }) && queries != 1 {
            return Err(format!("sequence {seq} of a decode step has {queries} rows"));
        }
        if kv_len < queries || kv_len > stride * page_tokens {
            return Err(format!("sequence {seq} has {kv_len} cached tokens for {queries} queries, at most {}", stride * page_tokens));
        }
        below("block_tables", &inputs.block_tables[seq * stride..][..kv_len.div_ceil(page_tokens)], limits.kv_pages as usize)?;
    }
    Ok(())
}

fn length(name: &str, found: usize, needed: usize) -> Result<(), String> {
    if found == needed { Ok(()) } else { Err(format!("{name} has {found} values, {needed} are needed")) }
}

fn below(name: &str, values: &[u32], end: usize) -> Result<(), String> {
    match values.iter().find(|value| **value as usize >= end) {
        Some(value) => Err(format!("{name} holds {value}, values are below {end}")),
        None => Ok(()),
    }
}

/// Checks a list of `count + 1` rising starts that end within `end`.
fn starts(name: &str, values: &[u32], count: usize, end: usize) -> Result<(), String> {
    length(name, values.len(), count + 1)?;
    if values.windows(2).any(|pair| pair[0] > pair[1]) {
        return Err(format!("{name} falls"));
    }
    below(name, values, end + 1)
}
