//! What the operator contracts mean, written for reading: naive loops in f64 over row-major slices.
//!
//! Conformance tests of every device compare with these functions. They share nothing with any
//! kernel: no layouts, no blocks, no vectors. Only [`sample`] must be met to the bit, because its
//! arithmetic is fixed by [`SamplingRow`].

use oxide_bundle::contract::Heads;
use oxide_bundle::step::{HISTORY_IN_PROMPT, NONE, SamplingRow, TOP_LOGPROBS_MAX, row_flags};
use std::cmp::Ordering;

/// `x / sqrt(mean(x²) + eps) · weight` for each row of `weight.len()`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let dim = weight.len();
    x.chunks_exact(dim)
        .flat_map(|row| {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / dim as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            row.iter().zip(weight).map(move |(x, w)| f64::from(*x) * scale * f64::from(*w))
        })
        .collect()
}

/// `x · Wᵀ + bias`; `x` is `[rows, k]`, `weight` `[n, k]`, the result `[rows, n]`.
pub fn linear(x: &[f32], weight: &[f32], k: usize, bias: Option<&[f32]>) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(k) {
        for (row, weight) in weight.chunks_exact(k).enumerate() {
            let dot: f64 = x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            out.push(dot + bias.map_or(0.0, |bias| f64::from(bias[row])));
        }
    }
    out
}

/// `silu(gate) · up` of rows `[gate | up]` of width `n`.
pub fn swiglu(gate_up: &[f64], n: usize) -> Vec<f64> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    gate_up.chunks_exact(n).flat_map(|row| (0..n / 2).map(|i| silu(row[i]) * row[n / 2 + i])).collect()
}

/// Rotates the pairs `(i, i + dim/2)` of one head by `angles` `[dim/2][cos, sin]`.
pub fn rope(head: &[f32], angles: &[f32]) -> Vec<f64> {
    let half = head.len() / 2;
    let x = |i: usize| f64::from(head[i]);
    let turn = |i: usize| {
        let (pair, sign) = if i < half { (i, -1.0) } else { (i - half, 1.0) };
        let other = if i < half { i + half } else { i - half };
        x(i) * f64::from(angles[2 * pair]) + sign * x(other) * f64::from(angles[2 * pair + 1])
    };
    (0..head.len()).map(turn).collect()
}

/// A paged cache and the sequences of a step, for [`attend`].
#[derive(Copy, Clone, Debug)]
pub struct AttendInputs<'a> {
    /// Head geometry.
    pub heads: Heads,
    /// Queries `[T, q · dim]`.
    pub q: &'a [f32],
    /// Key plane `[pages, page_tokens, kv, dim]`.
    pub k_plane: &'a [f32],
    /// Value plane, same shape.
    pub v_plane: &'a [f32],
    /// `[S + 1]`.
    pub query_starts: &'a [u32],
    /// `[S]`.
    pub kv_lens: &'a [u32],
    /// `[S, table_stride]`.
    pub block_tables: &'a [u32],
    /// Entries of one block-table row.
    pub table_stride: usize,
}

/// Causal attention of each query over its sequence, scale `1/sqrt(dim)`; `[T, q · dim]`.
pub fn attend(inputs: AttendInputs<'_>) -> Vec<f64> {
    let AttendInputs { heads, q, query_starts, kv_lens, .. } = inputs;
    let (q_heads, group, dim) = (heads.q as usize, (heads.q / heads.kv) as usize, heads.dim as usize);
    let mut out = vec![0.0; q.len()];
    for (seq, (kv_len, starts)) in kv_lens.iter().zip(query_starts.windows(2)).enumerate() {
        for row in starts[0]..starts[1] {
            let visible = (kv_len + row + 1 - starts[1]) as usize;
            for head in 0..q_heads {
                let at = (row as usize * q_heads + head) * dim;
                let result = attend_one(inputs, seq, visible, head / group, &q[at..at + dim]);
                out[at..at + dim].copy_from_slice(&result);
            }
        }
    }
    out
}

fn attend_one(inputs: AttendInputs<'_>, seq: usize, visible: usize, kv_head: usize, query: &[f32]) -> Vec<f64> {
    let dim = query.len();
    let page_tokens = inputs.heads.page_tokens as usize;
    let at = |position: usize| {
        let page = inputs.block_tables[seq * inputs.table_stride + position / page_tokens] as usize;
        ((page * page_tokens + position % page_tokens) * inputs.heads.kv as usize + kv_head) * dim
    };
    let score = |position: usize| {
        let key = &inputs.k_plane[at(position)..][..dim];
        query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / (dim as f64).sqrt()
    };
    let scores: Vec<f64> = (0..visible).map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    let mut out = vec![0.0; dim];
    for (position, score) in scores.iter().enumerate() {
        let weight = (score - max).exp() / sum;
        let value = &inputs.v_plane[at(position)..][..dim];
        out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * f64::from(*v));
    }
    out
}

/// One row of the sampler's lists.
#[derive(Copy, Clone, Debug, Default)]
pub struct SampleLists<'a> {
    /// Biased ids and what is added.
    pub bias: &'a [(u32, f32)],
    /// Ids seen and their counts.
    pub history: &'a [(u32, u32)],
    /// Allowed ids as bits.
    pub mask: &'a [u32],
}

/// What [`sample`] finds.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The id, or [`NONE`].
    pub id: u32,
    /// Its log-probability, −∞ for [`NONE`].
    pub logprob: f64,
    /// Alternatives; as many as the row asks for and ids there are.
    pub top: Vec<(u32, f64)>,
}

/// Samples one row of logits, step by step as [`SamplingRow`] says, sorting everything.
pub fn sample(params: &SamplingRow, lists: SampleLists<'_>, logits: &[f32], vocab_known: usize) -> Sampled {
    let nothing = Sampled { id: NONE, logprob: f64::NEG_INFINITY, top: Vec::new() };
    let allowed = |id: usize| params.flags & row_flags::MASK == 0 || lists.mask[id / 32] >> (id % 32) & 1 == 1;
    let mut ids: Vec<(u32, f32)> = Vec::new();
    for (id, logit) in logits.iter().enumerate().take(vocab_known).filter(|(id, _)| allowed(*id)) {
        let bias = lists.bias.iter().find(|(biased, _)| params.flags & row_flags::BIAS != 0 && *biased as usize == id);
        ids.push((id as u32, bias.map_or(*logit, |(_, bias)| logit + bias)));
    }
    if ids.iter().any(|(_, x)| x.is_nan()) || ids.iter().all(|(_, x)| *x == f32::NEG_INFINITY) {
        return nothing;
    }
    ids.sort_by(by_falling_logit);
    let max = f64::from(ids[0].1);
    let log_sum = ids.iter().map(|(_, x)| (f64::from(*x) - max).exp()).sum::<f64>().ln();
    let logprob = |x: f32| f64::from(x) - max - log_sum;
    let wanted = if params.logprobs == NONE { 0 } else { params.logprobs.min(TOP_LOGPROBS_MAX) as usize };
    let top = ids.iter().filter(|(_, x)| *x > f32::NEG_INFINITY).take(wanted).map(|(id, x)| (*id, logprob(*x))).collect();
    let logprob_of = |id: u32| ids.iter().find(|(other, _)| *other == id).map_or(f64::NEG_INFINITY, |(_, x)| logprob(*x));
    let id = if params.target == NONE { draw(params, lists, ids.clone()) } else { params.target };
    Sampled { id, logprob: logprob_of(id), top }
}

fn by_falling_logit(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

fn draw(params: &SamplingRow, lists: SampleLists<'_>, mut ids: Vec<(u32, f32)>) -> u32 {
    for (id, y) in &mut ids {
        let seen = lists.history.iter().find(|(seen, _)| params.flags & row_flags::HISTORY != 0 && seen == id);
        let Some((_, count)) = seen else { continue };
        *y = if *y > 0.0 { *y / params.repetition_penalty } else { *y * params.repetition_penalty };
        let count = count & !HISTORY_IN_PROMPT;
        if count > 0 {
            *y = (*y - params.presence_penalty) - params.frequency_penalty * count as f32;
        }
    }
    ids.sort_by(by_falling_logit);
    if params.temperature == 0.0 || params.top_k == 1 || params.top_p == 0.0 {
        return ids[0].0;
    }
    let scale = f32::from_bits(0x49B8_AA3B) / params.temperature;
    let max = ids[0].1;
    let mut kept: Vec<(u32, u64)> = ids.iter().map(|(id, y)| (*id, weight(if *y == max { 0.0 } else { (max - *y) * scale }))).collect();
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    let total = |kept: &[(u32, u64)]| kept.iter().map(|(_, w)| u128::from(*w)).sum::<u128>();
    if params.top_p < 1.0 {
        let share = (f64::from(params.top_p) * 2_f64.powi(32)) as u128;
        let target = (total(&kept) * share / (1 << 32)).max(1);
        let length = shortest(&kept, |sum| sum >= target);
        kept.truncate(length.unwrap_or(kept.len()));
    }
    if params.min_p > 0.0 {
        let least = (f64::from(params.min_p) * 2_f64.powi(40)) as u64;
        let length = kept.iter().take_while(|(_, w)| *w >= least).count();
        kept.truncate(length.max(1));
    }
    let word = u128::from(philox(params.counter, params.seed));
    let threshold = total(&kept) * (2 * word + 1) / (1 << 33);
    let length = shortest(&kept, |sum| sum > threshold);
    kept[length.expect("the threshold is under the total") - 1].0
}

/// Length of the shortest prefix whose weight is enough.
fn shortest(kept: &[(u32, u64)], is_enough: impl Fn(u128) -> bool) -> Option<usize> {
    let mut sum = 0;
    kept.iter()
        .position(|(_, weight)| {
            sum += u128::from(*weight);
            is_enough(sum)
        })
        .map(|last| last + 1)
}

fn weight(d: f32) -> u64 {
    if d >= 41_943_040.0 {
        return 0;
    }
    let q = d as u32;
    let f = (q % (1 << 20)) as f32 / 1_048_576.0;
    let coefficients = [0xBA77_B359_u32, 0x3C16_D3E8, 0xBD62_7F7B, 0x3E75_F1C8, 0xBF31_71DE, 0x3F80_0000];
    let p = coefficients.map(f32::from_bits).into_iter().reduce(|p, c| p.mul_add(f, c)).expect("there are coefficients");
    (((p * 16_777_216.0) as u64) << 16) >> (q >> 20)
}

/// First word of Philox4x32-10 for counter `(counter, 0)` and key `key`.
fn philox(counter: u64, key: u64) -> u32 {
    let (mut c0, mut c1, mut c2, mut c3) = (counter as u32, (counter >> 32) as u32, 0_u32, 0_u32);
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    for _ in 0..10 {
        let (a, b) = (u64::from(c0) * 0xD251_1F53, u64::from(c2) * 0xCD9E_8D57);
        (c0, c1, c2, c3) = ((b >> 32) as u32 ^ c1 ^ k0, b as u32, (a >> 32) as u32 ^ c3 ^ k1, a as u32);
        (k0, k1) = (k0.wrapping_add(0x9E37_79B9), k1.wrapping_add(0xBB67_AE85));
    }
    c0
}
