//! Sampling: rows of every kind of parameters over logits of every kind. Ids must be met exactly.

use super::{Draw, sampled};
use crate::qualify::case::{Case, Expect};
use crate::qualify::problems::row_ops::f32_tensor;
use crate::qualify::values::{below, pick, plain, shuffle};
use crate::random::Random;
use oxide_bundle::contract::Role;
use oxide_bundle::step::{HISTORY_IN_PROMPT, NONE, OutputSlot, SamplingRow, TOP_LOGPROBS_MAX, row_flags};
use oxide_runtime::device::reference::{self, Sampled};
use oxide_runtime::device::tolerance::LOGPROB;
use rayon::prelude::*;

/// Logits that the reference sorts, at most.
const LOGITS_MAX: usize = 4 << 20;
/// Biased ids of a row, and ids seen.
const LIST_MAX: usize = 300;

pub(super) fn sample(draw: &mut Draw<'_>, vocab: usize, known: usize) -> Case {
    let rows = draw.rows();
    let mut case = draw.case(Vec::new());
    let mut logits = Vec::with_capacity(rows * vocab);
    let inputs = &mut case.inputs;
    (inputs.bias_starts, inputs.history_starts) = (vec![0], vec![0]);
    for row in 0..rows {
        let flags = pick(draw.random, &[0, 0, 1, 2, 4, 7]);
        inputs.sampling.push(parameters(draw.random, row, known, flags));
        let start = logits.len();
        logits.extend(row_logits(draw.random, row, vocab));
        // Padding ids must not matter.
        logits[start + known..].fill(f32::NAN);
        let mut ids: Vec<u32> = (0..known as u32).collect();
        if flags & (row_flags::BIAS | row_flags::HISTORY) != 0 {
            shuffle(draw.random, &mut ids);
        }
        let (biased, seen) = ids.split_at(known / 2);
        if flags & row_flags::BIAS != 0 {
            for id in biased.iter().take(below(draw.random, LIST_MAX)) {
                inputs.bias_ids.push(*id);
                inputs.bias_values.push(pick(draw.random, &[-100.0, -1.5, 2.25, 5.0]));
            }
        }
        if flags & row_flags::HISTORY != 0 {
            for id in seen.iter().take(below(draw.random, LIST_MAX)) {
                inputs.history_ids.push(*id);
                inputs.history_counts.push(pick(draw.random, &[HISTORY_IN_PROMPT, 1, 3, HISTORY_IN_PROMPT + 2]));
            }
        }
        inputs.bias_starts.push(inputs.bias_ids.len() as u32);
        inputs.history_starts.push(inputs.history_ids.len() as u32);
        let sparse = draw.random.percent(30);
        let word = |random: &mut Random| random.next() as u32 & if sparse { random.next() as u32 & random.next() as u32 } else { NONE };
        inputs.mask.extend((0..vocab.div_ceil(32)).map(|_| word(draw.random)));
    }
    case.tensors.push(f32_tensor(Role::X, vocab, logits));
    case
}

fn parameters(random: &mut Random, row: usize, known: usize, flags: u32) -> SamplingRow {
    if row.is_multiple_of(3) {
        return SamplingRow { flags, logprobs: pick(random, &[NONE, 0, TOP_LOGPROBS_MAX]), ..SamplingRow::GREEDY };
    }
    SamplingRow {
        temperature: pick(random, &[0.0, 0.1, 0.7, 1.0, 1.3, 3.0, 100.0]),
        top_p: pick(random, &[1.0, 1.0, 0.95, 0.5, 0.01, 0.0]),
        min_p: pick(random, &[0.0, 0.0, 0.05, 0.5, 1.0]),
        top_k: pick(random, &[0, 0, 1, 2, 50, 1000, known as u32]),
        repetition_penalty: pick(random, &[1.0, 1.3]),
        presence_penalty: pick(random, &[0.0, 0.7]),
        frequency_penalty: pick(random, &[0.0, 0.25]),
        logprobs: pick(random, &[NONE, NONE, 0, 1, 5, TOP_LOGPROBS_MAX]),
        seed: random.next(),
        counter: random.next() >> 20,
        target: if random.percent(12) { below(random, known) as u32 } else { NONE },
        flags,
        reserved: [0; 2],
    }
}

/// Wide, rounded to ties, flat, with infinities, with a NaN, tiny.
fn row_logits(random: &mut Random, row: usize, vocab: usize) -> Vec<f32> {
    let kind = row % 7;
    let spread = pick(random, &[0.25_f32, 1.0, 3.0]);
    let flat = plain(random, 0);
    let mut logits: Vec<f32> = (0..vocab)
        .map(|_| match kind {
            1 => (plain(random, 0) * 2.0).round() * spread,
            2 => flat,
            3 if random.percent(50) => f32::NEG_INFINITY,
            4 => plain(random, -128),
            _ => plain(random, 0) * spread,
        })
        .collect();
    if kind == 5 && random.percent(50) {
        let at = below(random, vocab);
        logits[at] = f32::NAN;
    }
    if kind == 6 {
        let at = below(random, vocab);
        logits[at] = 0.0;
        logits[below(random, vocab)] = -0.0;
    }
    logits
}

pub(super) fn expect_sample(case: &Case, known: usize) -> Vec<Expect> {
    let logits = case.tensor(Role::X);
    let rows = sampled(case.rows(), (LOGITS_MAX / logits.width.max(1)).max(1));
    let results: Vec<Sampled> = rows
        .par_iter()
        .map(|row| {
            let (params, lists) = (case.inputs.sampling[*row], case.lists(*row));
            reference::sample(&params, lists.borrowed(&params), &logits.row(*row), known)
        })
        .collect();
    let expect = |slot, rule| Expect::new(Role::Output(slot), rule);
    let mut ids = expect(OutputSlot::SampledIds, "exact");
    let mut logprobs = expect(OutputSlot::SampledLogprobs, "share of one and |want|");
    let mut top_ids = expect(OutputSlot::TopIds, "exact");
    let mut top_logprobs = expect(OutputSlot::TopLogprobs, "share of one and |want|");
    let close = |_: usize, want: f64| if want.is_finite() { LOGPROB * (1.0 + want.abs()) } else { 0.0 };
    for (row, result) in rows.into_iter().zip(results) {
        ids.row(row, [f64::from(result.id)], |_, _| 0.0);
        let wanted = case.inputs.sampling[row].logprobs;
        if wanted == NONE {
            continue;
        }
        if result.id != NONE {
            logprobs.row(row, [result.logprob], close);
        }
        let count = wanted.min(TOP_LOGPROBS_MAX) as usize;
        let pad = count.saturating_sub(result.top.len());
        let start = row * TOP_LOGPROBS_MAX as usize;
        let listed = result.top.iter().take(count);
        top_ids.row(start, listed.clone().map(|(id, _)| f64::from(*id)).chain(std::iter::repeat_n(f64::from(NONE), pad)), |_, _| 0.0);
        top_logprobs.row(start, listed.map(|(_, logprob)| *logprob).chain(std::iter::repeat_n(f64::NEG_INFINITY, pad)), close);
    }
    vec![ids, logprobs, top_ids, top_logprobs]
}
