//! Sampling, by the exact arithmetic of [`SamplingRow`]'s documentation.
//!
//! Here: bias, mask, log-probabilities and penalties of a row; [`super::draw`] filters and draws.

use super::draw::{DrawScratch, draw};
use super::simd::{LANES, Simd};
use super::table::Kernels;
use crate::device::cpu::pool::{Pool, Scatter};
use oxide_bundle::step::{HISTORY_IN_PROMPT, NONE, SamplingRow, TOP_LOGPROBS_MAX, row_flags};
use std::sync::Mutex;

const TOP: usize = TOP_LOGPROBS_MAX as usize;
/// Memory that rows reuse, one for each thread.
pub(crate) struct SampleScratch {
    threads: Vec<Mutex<RowScratch>>,
}

struct RowScratch {
    draw: DrawScratch,
    /// Logits of the ids seen, before penalties.
    unpenalised: Vec<f32>,
}

impl SampleScratch {
    /// Memory for rows of `vocab` logits.
    pub(crate) fn new(vocab: usize, threads: usize) -> Self {
        let row = || RowScratch { draw: DrawScratch::new(vocab), unpenalised: Vec::with_capacity(vocab) };
        let scratch = || Mutex::new(row());
        Self { threads: (0..threads).map(|_| scratch()).collect() }
    }
}

/// One call. `logits` is `[rows, vocab]` and is overwritten.
pub(crate) struct SampleCall<'a> {
    pub(crate) vocab: usize,
    pub(crate) vocab_known: usize,
    pub(crate) logits: &'a mut [f32],
    pub(crate) sampling: &'a [SamplingRow],
    pub(crate) bias_starts: &'a [u32],
    pub(crate) bias_ids: &'a [u32],
    pub(crate) bias_values: &'a [f32],
    pub(crate) history_starts: &'a [u32],
    pub(crate) history_ids: &'a [u32],
    pub(crate) history_counts: &'a [u32],
    pub(crate) mask: &'a [u32],
    pub(crate) sampled_ids: &'a mut [u32],
    pub(crate) sampled_logprobs: &'a mut [f32],
    pub(crate) top_ids: &'a mut [u32],
    pub(crate) top_logprobs: &'a mut [f32],
    pub(crate) scratch: &'a SampleScratch,
}

/// Largest value of a row, and whether it holds a NaN.
#[derive(Copy, Clone, Debug)]
pub(crate) struct RowStats {
    pub(crate) max: f32,
    pub(crate) has_nan: bool,
}

/// Samples every row.
///
/// # Panics
/// If a slice is shorter than the shape says.
pub(crate) fn sample(kernels: &Kernels, pool: &mut Pool, call: SampleCall<'_>) {
    let SampleCall { vocab, vocab_known, logits, sampling, scratch, .. } = call;
    let rows = sampling.len();
    assert!(vocab_known <= vocab, "more known ids than logits");
    let lists = Lists {
        bias_starts: call.bias_starts,
        bias_ids: call.bias_ids,
        bias_values: call.bias_values,
        history_starts: call.history_starts,
        history_ids: call.history_ids,
        history_counts: call.history_counts,
        mask: call.mask,
        mask_stride: vocab.div_ceil(32),
    };
    let logits = Scatter::new(&mut logits[..rows * vocab]);
    let ids = Scatter::new(&mut call.sampled_ids[..rows]);
    let logprobs = Scatter::new(&mut call.sampled_logprobs[..rows]);
    let top_ids = Scatter::new(&mut call.top_ids[..rows * TOP]);
    let top_logprobs = Scatter::new(&mut call.top_logprobs[..rows * TOP]);
    pool.run_all(rows, &|row| {
        let mut scratch = lock_any(&scratch.threads);
        // SAFETY: each row is visited once.
        unsafe {
            let logits = &mut logits.slice_mut(row * vocab, vocab)[..vocab_known];
            let top = Alternatives { ids: top_ids.slice_mut(row * TOP, TOP), logprobs: top_logprobs.slice_mut(row * TOP, TOP) };
            let (id, logprob) = sample_row(kernels, &sampling[row], &lists, row, logits, top, &mut scratch);
            ids.slice_mut(row, 1)[0] = id;
            logprobs.slice_mut(row, 1)[0] = logprob;
        }
    });
}

/// Some scratch memory that no other thread holds: there is one for each.
fn lock_any(threads: &[Mutex<RowScratch>]) -> std::sync::MutexGuard<'_, RowScratch> {
    for scratch in threads {
        match scratch.try_lock() {
            Ok(scratch) => return scratch,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => {}
        }
    }
    threads[0].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The lists of all rows.
struct Lists<'a> {
    bias_starts: &'a [u32],
    bias_ids: &'a [u32],
    bias_values: &'a [f32],
    history_starts: &'a [u32],
    history_ids: &'a [u32],
    history_counts: &'a [u32],
    mask: &'a [u32],
    mask_stride: usize,
}

/// Alternatives of one row.
struct Alternatives<'a> {
    ids: &'a mut [u32],
    logprobs: &'a mut [f32],
}

/// Returns the id drawn or scored and its log-probability (0 where none was asked for).
fn sample_row(
    kernels: &Kernels,
    params: &SamplingRow,
    lists: &Lists<'_>,
    row: usize,
    logits: &mut [f32],
    top: Alternatives<'_>,
    scratch: &mut RowScratch,
) -> (u32, f32) {
    top.ids.fill(NONE);
    top.logprobs.fill(f32::NEG_INFINITY);
    add_bias(params, lists, row, logits);
    apply_mask(params, lists, row, logits);
    // SAFETY: the table was chosen for this processor.
    let stats = unsafe { (kernels.scan_row)(logits) };
    if stats.has_nan || stats.max == f32::NEG_INFINITY {
        return (NONE, f32::NEG_INFINITY);
    }
    let normalizer = (params.target != NONE || params.logprobs != NONE).then(|| {
        // SAFETY: as above.
        let sum = unsafe { (kernels.exp_sum)(logits, stats.max) };
        Normalizer { max: stats.max, log_sum: sum.ln() }
    });
    let logprob = |logit: f32| normalizer.as_ref().map_or(0.0, |normalizer| normalizer.logprob(logit));
    if params.logprobs != NONE {
        alternatives(logits, params.logprobs, logprob, top);
    }
    if params.target != NONE {
        return (params.target, logprob(logit_of(logits, params.target)));
    }
    let seen = lists.history(params, row);
    penalise(params, &seen, logits, &mut scratch.unpenalised);
    let id = draw(kernels, params, logits, &mut scratch.draw);
    let logit = match seen.ids.iter().position(|seen| *seen == id) {
        Some(at) => scratch.unpenalised[at],
        None => logit_of(logits, id),
    };
    (id, logprob(logit))
}

fn logit_of(logits: &[f32], id: u32) -> f32 {
    logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY)
}

/// Ids of one row with their counts.
struct Seen<'a> {
    ids: &'a [u32],
    counts: &'a [u32],
}

impl Lists<'_> {
    fn history(&self, params: &SamplingRow, row: usize) -> Seen<'_> {
        if params.flags & row_flags::HISTORY == 0 {
            return Seen { ids: &[], counts: &[] };
        }
        let range = self.history_starts[row] as usize..self.history_starts[row + 1] as usize;
        Seen { ids: &self.history_ids[range.clone()], counts: &self.history_counts[range] }
    }
}

fn add_bias(params: &SamplingRow, lists: &Lists<'_>, row: usize, logits: &mut [f32]) {
    if params.flags & row_flags::BIAS == 0 {
        return;
    }
    let range = lists.bias_starts[row] as usize..lists.bias_starts[row + 1] as usize;
    for (id, bias) in lists.bias_ids[range.clone()].iter().zip(&lists.bias_values[range]) {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit += bias;
        }
    }
}

/// Sets ids that the mask does not allow to −∞.
fn apply_mask(params: &SamplingRow, lists: &Lists<'_>, row: usize, logits: &mut [f32]) {
    if params.flags & row_flags::MASK == 0 {
        return;
    }
    let words = &lists.mask[row * lists.mask_stride..][..lists.mask_stride];
    for (word, logits) in words.iter().zip(logits.chunks_mut(32)) {
        if *word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// Applies penalties to the ids seen and keeps what they were, in the order of the list.
fn penalise(params: &SamplingRow, seen: &Seen<'_>, logits: &mut [f32], unpenalised: &mut Vec<f32>) {
    unpenalised.clear();
    for (id, count) in seen.ids.iter().zip(seen.counts) {
        let Some(logit) = logits.get_mut(*id as usize) else {
            unpenalised.push(f32::NEG_INFINITY);
            continue;
        };
        unpenalised.push(*logit);
        let repetition = params.repetition_penalty;
        *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        let count = count & !HISTORY_IN_PROMPT;
        if count > 0 {
            *logit = (*logit - params.presence_penalty) - params.frequency_penalty * count as f32;
        }
    }
}

/// Turns logits into log-probabilities.
struct Normalizer {
    max: f32,
    log_sum: f64,
}

impl Normalizer {
    fn logprob(&self, logit: f32) -> f32 {
        if logit == self.max && logit.is_infinite() {
            return 0.0;
        }
        (f64::from(logit) - f64::from(self.max) - self.log_sum) as f32
    }
}

/// Writes the `wanted` largest logits' ids and log-probabilities.
fn alternatives(logits: &[f32], wanted: u32, logprob: impl Fn(f32) -> f32, top: Alternatives<'_>) {
    let wanted = (wanted as usize).min(TOP);
    let mut best = [(f32::NEG_INFINITY, NONE); TOP];
    let best = &mut best[..wanted];
    let Some(last) = wanted.checked_sub(1) else { return };
    for (id, logit) in logits.iter().enumerate() {
        // Ids come in rising order, so an equal logit goes behind the ones that are there.
        if *logit > best[last].0 {
            let at = best.partition_point(|(other, _)| other >= logit);
            best[at..].rotate_right(1);
            best[at] = (*logit, id as u32);
        }
    }
    for ((id, to), (logit, best)) in top.ids.iter_mut().zip(top.logprobs).zip(best) {
        if *best != NONE {
            (*id, *to) = (*best, logprob(*logit));
        }
    }
}

/// Largest value, and whether there is a NaN.
///
/// # Safety
/// `V`'s instruction set must be available.
#[inline(always)]
pub(crate) unsafe fn scan_row<V: Simd>(row: &[f32]) -> RowStats {
    let whole = row.len() / LANES * LANES;
    // SAFETY: vectors stay under `whole`.
    unsafe {
        let mut largest = V::splat(f32::NEG_INFINITY);
        // x - x is 0 for a number; infinities are told from NaN below.
        let mut doubt = V::splat(0.0);
        for at in (0..whole).step_by(LANES) {
            let x = V::load(row.as_ptr().add(at));
            // `max` gives its second operand where the first is a NaN.
            largest = x.max(largest);
            doubt = x.sub(x).add(doubt);
        }
        let mut max = largest.largest();
        for x in &row[whole..] {
            max = if *x > max { *x } else { max };
        }
        let doubt = doubt.sum().is_nan() || row[whole..].iter().any(|x| x.is_nan());
        RowStats { max, has_nan: doubt && row.iter().any(|x| x.is_nan()) }
    }
}

/// `Σ exp(x - max)`, in one fixed order.
///
/// # Safety
/// `V`'s instruction set must be available.
#[inline(always)]
pub(crate) unsafe fn exp_sum<V: Simd>(row: &[f32], max: f32) -> f64 {
    /// Values added in f32 before the sum goes on in f64.
    const RUN: usize = 32 * LANES;
    if max == f32::INFINITY {
        return 1.0;
    }
    let mut sum = 0.0;
    for run in row.chunks(RUN) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        // SAFETY: vectors stay inside the run; the rest is padded with values that weigh nothing.
        unsafe {
            let max = V::splat(max);
            let mut sums = V::splat(0.0);
            let vectors = run.chunks_exact(LANES);
            let rest = vectors.remainder();
            for x in vectors {
                sums = V::load(x.as_ptr()).sub(max).exp().add(sums);
            }
            lanes[..rest.len()].copy_from_slice(rest);
            sums = V::load(lanes.as_ptr()).sub(max).exp().add(sums);
            sum += f64::from(sums.sum());
        }
    }
    sum
}
