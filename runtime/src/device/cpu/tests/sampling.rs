//! Sampling, to the bit.

use super::*;
use crate::device::cpu::kernels::draw::philox4x32_words;
use crate::device::cpu::kernels::sample::{SampleCall, SampleScratch, sample};
use crate::device::reference::{self, SampleLists};
use crate::device::tolerance::LOGPROB;
use oxide_bundle::step::{HISTORY_IN_PROMPT, NONE, SamplingRow, TOP_LOGPROBS_MAX, row_flags};

const TOP: usize = TOP_LOGPROBS_MAX as usize;

#[derive(Default)]
struct Row {
    params: Option<SamplingRow>,
    logits: Vec<f32>,
    bias: Vec<(u32, f32)>,
    history: Vec<(u32, u32)>,
    mask: Vec<u32>,
}

struct Found {
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    top_ids: Vec<u32>,
    top_logprobs: Vec<f32>,
}

fn run(kernels: &Kernels, threads: usize, rows: &[Row], vocab: usize, vocab_known: usize) -> Found {
    let mut logits: Vec<f32> = rows.iter().flat_map(|row| row.logits.clone()).collect();
    let sampling: Vec<SamplingRow> = rows.iter().map(|row| row.params.unwrap()).collect();
    let starts = |lengths: Vec<usize>| {
        let mut starts = vec![0];
        lengths.iter().for_each(|length| starts.push(starts.last().unwrap() + *length as u32));
        starts
    };
    let words = vocab.div_ceil(32);
    let mask: Vec<u32> = rows.iter().flat_map(|row| if row.mask.is_empty() { vec![0; words] } else { row.mask.clone() }).collect();
    let n = rows.len();
    let mut found = Found { ids: vec![0; n], logprobs: vec![0.0; n], top_ids: vec![0; n * TOP], top_logprobs: vec![0.0; n * TOP] };
    let call = SampleCall {
        vocab,
        vocab_known,
        logits: &mut logits,
        sampling: &sampling,
        bias_starts: &starts(rows.iter().map(|row| row.bias.len()).collect()),
        bias_ids: &rows.iter().flat_map(|row| row.bias.iter().map(|(id, _)| *id)).collect::<Vec<_>>(),
        bias_values: &rows.iter().flat_map(|row| row.bias.iter().map(|(_, bias)| *bias)).collect::<Vec<_>>(),
        history_starts: &starts(rows.iter().map(|row| row.history.len()).collect()),
        history_ids: &rows.iter().flat_map(|row| row.history.iter().map(|(id, _)| *id)).collect::<Vec<_>>(),
        history_counts: &rows.iter().flat_map(|row| row.history.iter().map(|(_, count)| *count)).collect::<Vec<_>>(),
        mask: &mask,
        sampled_ids: &mut found.ids,
        sampled_logprobs: &mut found.logprobs,
        top_ids: &mut found.top_ids,
        top_logprobs: &mut found.top_logprobs,
        scratch: &SampleScratch::new(vocab, threads),
    };
    sample(kernels, &mut pool(threads), call);
    found
}

fn check(rows: &[Row], vocab: usize, vocab_known: usize) {
    for (isa, kernels) in all_kernels() {
        let found = run(kernels, 2, rows, vocab, vocab_known);
        for (i, row) in rows.iter().enumerate() {
            let params = row.params.unwrap();
            let lists = SampleLists { bias: &row.bias, history: &row.history, mask: &row.mask };
            let wanted = reference::sample(&params, lists, &row.logits, vocab_known);
            let what = format!("{isa} row {i} {params:?}");
            assert_eq!(found.ids[i], wanted.id, "{what}");
            if params.target != NONE || params.logprobs != NONE {
                let close = (f64::from(found.logprobs[i]) - wanted.logprob).abs() < LOGPROB;
                assert!(close || f64::from(found.logprobs[i]) == wanted.logprob, "{what}: {} {}", found.logprobs[i], wanted.logprob);
            }
            let ids: Vec<u32> = wanted.top.iter().map(|(id, _)| *id).chain(std::iter::repeat(NONE)).take(TOP).collect();
            assert_eq!(found.top_ids[i * TOP..][..TOP], ids, "{what}");
            for (found, (_, wanted)) in found.top_logprobs[i * TOP..].iter().zip(&wanted.top) {
                assert!((f64::from(*found) - wanted).abs() < LOGPROB, "{what}: {found} {wanted}");
            }
        }
    }
}

/// Random123's known answers for philox4x32, ten rounds (`kat_vectors`).
#[test]
fn philox_gives_the_known_answers() {
    let ones = u32::MAX;
    assert_eq!(philox4x32_words([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox4x32_words([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    assert_eq!(philox4x32_words(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
}

fn logits(random: &mut Random, len: usize, spread: f32) -> Vec<f32> {
    // Some values repeat, so that ties occur.
    (0..len).map(|_| if random.below(4) == 0 { (random.unit() * 8.0).round() / 8.0 * spread } else { random.unit() * spread }).collect()
}

#[test]
fn matches_the_reference() {
    let mut random = Random(1);
    for (vocab, vocab_known) in [(1, 1), (5, 4), (64, 50), (1000, 990), (4096, 4094)] {
        let rows: Vec<Row> = (0..60)
            .map(|i| {
                let pick = |random: &mut Random, values: &[f32]| values[random.below(values.len())];
                let params = SamplingRow {
                    temperature: pick(&mut random, &[0.0, 0.3, 0.7, 1.0, 2.0, 100.0]),
                    top_p: pick(&mut random, &[0.0, 0.1, 0.9, 0.95, 1.0, 1.0]),
                    min_p: pick(&mut random, &[0.0, 0.0, 0.05, 1.0]),
                    top_k: [0, 0, 1, 2, 20, 5000][random.below(6)],
                    repetition_penalty: pick(&mut random, &[1.0, 1.3]),
                    presence_penalty: pick(&mut random, &[0.0, 0.7]),
                    frequency_penalty: pick(&mut random, &[0.0, 0.1]),
                    logprobs: [NONE, 0, 1, 5, 20][random.below(5)],
                    seed: random.next(),
                    counter: random.next(),
                    target: if i % 7 == 0 { random.below(vocab_known) as u32 } else { NONE },
                    flags: random.below(8) as u32,
                    reserved: [0; 2],
                };
                let mut ids: Vec<u32> = (0..vocab as u32).collect();
                random.shuffle(&mut ids);
                let (biased, seen) = ids.split_at(vocab / 8);
                Row {
                    params: Some(params),
                    logits: logits(&mut random, vocab, [0.01, 5.0, 40.0][i % 3]),
                    bias: if params.flags & row_flags::BIAS == 0 {
                        Vec::new()
                    } else {
                        biased.iter().map(|id| (*id, random.unit() * 5.0)).collect()
                    },
                    history: if params.flags & row_flags::HISTORY == 0 {
                        Vec::new()
                    } else {
                        let count = |random: &mut Random| [HISTORY_IN_PROMPT, 1, 3, HISTORY_IN_PROMPT + 2][random.below(4)];
                        seen.iter().take(vocab / 8).map(|id| (*id, count(&mut random))).collect()
                    },
                    mask: (0..vocab.div_ceil(32)).map(|_| random.next() as u32).collect(),
                }
            })
            .collect();
        check(&rows, vocab, vocab_known);
    }
}

#[test]
fn matches_the_reference_on_a_large_vocabulary() {
    let mut random = Random(2);
    let (vocab, vocab_known) = (151_936, 151_665);
    let base = SamplingRow { temperature: 1.0, logprobs: 20, ..SamplingRow::GREEDY };
    let cases = [
        base,
        SamplingRow { temperature: 0.0, ..base },
        SamplingRow { top_k: 20, top_p: 0.8, ..base },
        SamplingRow { top_p: 0.0001, ..base },
        SamplingRow { min_p: 0.99, temperature: 0.1, ..base },
    ];
    // The reference's prefix sums are quadratic, so its top-p stays small here.
    let rows: Vec<Row> = cases
        .into_iter()
        .map(|params| {
            let mut logits = logits(&mut random, vocab, 12.0);
            logits[..40].iter_mut().for_each(|logit| *logit += 14.0);
            Row { params: Some(SamplingRow { seed: random.next(), ..params }), logits, ..Row::default() }
        })
        .collect();
    check(&rows, vocab, vocab_known);
}

#[test]
fn broken_rows_draw_nothing_and_spare_their_neighbours() {
    let good = || Row { params: Some(SamplingRow::GREEDY), logits: vec![1.0, 3.0, 2.0, 9.0], ..Row::default() };
    let nan = Row { logits: vec![1.0, f32::NAN, 2.0, 9.0], ..good() };
    let masked_nan = Row {
        params: Some(SamplingRow { flags: row_flags::MASK, ..SamplingRow::GREEDY }),
        mask: vec![0b101],
        logits: nan.logits.clone(),
        ..Row::default()
    };
    let all_masked = Row { params: masked_nan.params, mask: vec![0b1000], ..good() };
    let padding_nan = Row { logits: vec![1.0, 3.0, 2.0, f32::NAN], ..good() };
    let infinite = Row { logits: vec![1.0, f32::INFINITY, f32::NEG_INFINITY, 0.0], ..good() };
    let rows = [good(), nan, masked_nan, all_masked, padding_nan, infinite, good()];
    for (isa, kernels) in all_kernels() {
        let found = run(kernels, 2, &rows, 4, 3);
        assert_eq!(found.ids, [1, NONE, 2, NONE, 1, 1, 1], "{isa}");
    }
}

/// Logits are padded to a round width; ids that the tokenizer does not know are never drawn nor reported.
#[test]
fn padding_ids_are_not_drawn_whatever_speaks_for_them() {
    let known = 90;
    let logits: Vec<f32> = (0..96).map(|id| if id < known { id as f32 / 100.0 } else { 50.0 }).collect();
    let row = |temperature, flags, bias: &[(u32, f32)], mask: &[u32]| Row {
        params: Some(SamplingRow { temperature, flags, logprobs: 20, seed: 3, ..SamplingRow::GREEDY }),
        logits: logits.clone(),
        bias: bias.to_vec(),
        history: Vec::new(),
        mask: mask.to_vec(),
    };
    let (biased, allowing) = ([(3, 100.0), (95, 100.0)], [1 << 7, 0, u32::MAX << 26]);
    let rows = [
        row(0.0, 0, &[], &[]),
        row(2.0, 0, &[], &[]),
        row(0.0, row_flags::BIAS, &biased, &[]),
        row(0.0, row_flags::MASK, &[], &allowing),
        row(0.0, row_flags::MASK, &[], &[0, 0, u32::MAX << 26]),
    ];
    for (isa, kernels) in all_kernels() {
        let found = run(kernels, 2, &rows, 96, known);
        assert!(found.ids[1] < known as u32, "{isa}");
        assert_eq!([found.ids[0], found.ids[2], found.ids[3], found.ids[4]], [89, 3, 7, NONE], "{isa}");
        assert!(found.top_ids.iter().all(|id| *id < known as u32 || *id == NONE), "{isa}");
    }
}

#[test]
fn draws_follow_the_distribution() {
    let weights = [0.5_f32, 0.25, 0.125, 0.125];
    let draws = 20_000;
    let rows: Vec<Row> = (0..draws)
        .map(|counter| Row {
            params: Some(SamplingRow { temperature: 1.0, seed: 7, counter, ..SamplingRow::GREEDY }),
            logits: weights.iter().map(|weight| weight.ln()).collect(),
            ..Row::default()
        })
        .collect();
    let (_, kernels) = all_kernels().pop().unwrap();
    let found = run(kernels, 2, &rows, 4, 4);
    for (id, weight) in weights.iter().enumerate() {
        let share = found.ids.iter().filter(|drawn| **drawn == id as u32).count() as f32 / draws as f32;
        // Five standard deviations.
        assert!((share - weight).abs() < 5.0 * (weight * (1.0 - weight) / draws as f32).sqrt(), "id {id}: {share}");
    }
}
