//! Contracts with a paged cache: rotary embedding and append, and attention.
//!
//! Pages of the pool are shuffled, what no sequence owns is NaN (the rest of a last page included), and
//! unused table entries point at such a page: a kernel that reads a token too many is found out. The
//! last page of the pool is the padding page: padding rows append to it.

use super::projection::{Columns, operands};
use super::row_ops::f32_tensor;
use super::{Draw, sampled};
use crate::qualify::case::{Case, Expect, Query, Tensor};
use crate::qualify::lower::poison;
use crate::qualify::problems::projection::Dots;
use crate::qualify::values::{self, Style, as_type, below, pick, plain, shuffle};
use oxide_bundle::contract::{Heads, Linear, Phase, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::Bindings;
use oxide_bundle::step::NONE;
use oxide_runtime::device::place::Image;
use oxide_runtime::device::reference::{self, AttendInputs};
use oxide_runtime::device::tolerance::{BF16_STORE, CPU_ATTEND, CPU_ROPE, SM90_ATTEND, SM90_F32, TINY};
use rayon::prelude::*;
use std::sync::Arc;

/// Positions of the rotary table.
const CONTEXT: usize = 600;
/// Query rows that the reference attends with, at most about.
const QUERIES_MAX: usize = 24;
/// Lengths that meet every edge of pages, blocks and tiles.
const LENGTHS: [usize; 14] = [1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 255, 512];

const ROPE: &str = "share of the pair's magnitude + share of |want|";
const ATTEND: &str = "share of sum p*|v| + share of |want|";

fn rope_table(dim: usize) -> Tensor {
    let half = dim / 2;
    let angle = |i: usize| (i / half) as f64 * 1e4_f64.powf(-((i % half) as f64) / half as f64);
    let values = (0..CONTEXT * half).flat_map(|i| [angle(i).cos() as f32, angle(i).sin() as f32]).collect();
    f32_tensor(Role::RopeTable, dim, values)
}

/// Planes of finite values, slots of the step and positions.
fn append(draw: &mut Draw<'_>, heads: Heads, case: &mut Case) {
    let page = heads.page_tokens as usize;
    let tokens = draw.sizes.tokens as usize;
    let pages = (draw.bound.tokens as usize).div_ceil(page) * 2 + 2;
    (case.sizes.kv_pages, case.bound.kv_pages) = (pages as u32, pages as u32);
    let width = (heads.kv * heads.dim) as usize;
    for role in [Role::KPlane, Role::VPlane] {
        let image = values::activations(draw.random, Style::Plain, pages * page, width, draw.spec.contract.kv);
        case.tensors.push(Tensor { role, width, image: Arc::new(image) });
    }
    case.tensors.push(rope_table(heads.dim as usize));
    let mut slots: Vec<u32> = (0..((pages - 1) * page) as u32).collect();
    shuffle(draw.random, &mut slots);
    slots.truncate(tokens);
    if draw.spec.is_sm90 && tokens > 1 {
        // A token without a slot is not appended.
        slots.iter_mut().skip(1).for_each(|slot| {
            if draw.random.percent(5) {
                *slot = NONE
            }
        });
    }
    case.inputs.kv_slots = slots;
    let edges = [0, CONTEXT - 1, 1];
    case.inputs.positions =
        (0..tokens).map(|token| if token < edges.len() { edges[token] } else { below(draw.random, CONTEXT) } as u32).collect();
}

pub(super) fn rope_append(draw: &mut Draw<'_>, heads: Heads) -> Case {
    let rows = draw.rows();
    let mut case = draw.case(Vec::new());
    case.tensors.push(draw.activation(Role::X, rows, heads.qkv_width() as usize));
    append(draw, heads, &mut case);
    case
}

pub(super) fn qkv_rope_append(draw: &mut Draw<'_>, linear: Linear, heads: Heads) -> Case {
    let tensors = operands(draw, linear);
    let mut case = draw.case(tensors);
    append(draw, heads, &mut case);
    case
}

pub(super) fn expect_rope_append(case: &Case, heads: Heads) -> Vec<Expect> {
    let x = case.tensor(Role::X);
    let rows = sampled(case.rows(), (1 << 20) / x.width);
    let row = |row: usize| Dots { want: x.row(row).into_iter().map(f64::from).collect(), error: vec![0.0; x.width] };
    expect_appended(case, heads, &rows, row)
}

pub(super) fn expect_qkv_rope_append(case: &Case, linear: Linear, heads: Heads) -> Vec<Expect> {
    let columns = Columns::of(case, &(0..linear.n as usize).collect::<Vec<_>>());
    expect_appended(case, heads, &sampled(case.rows(), 8), |row| columns.dots(case, &linear, row))
}

/// Q, K and V of rows whose `[q | k | v]` is known to within an error.
fn expect_appended(case: &Case, heads: Heads, rows: &[usize], qkv: impl Fn(usize) -> Dots) -> Vec<Expect> {
    let (dim, q, kv) = (heads.dim as usize, heads.q as usize, heads.kv as usize);
    let table = case.tensor(Role::RopeTable);
    let share = if case.spec.is_sm90 { SM90_F32 } else { CPU_ROPE };
    let stored = |dtype: DType| if dtype == DType::Bf16 { BF16_STORE } else { 0.0 };
    let (out_share, kv_share) = (stored(case.out_dtype()), stored(case.spec.contract.kv));
    let [mut out, mut k, mut v] = [Role::Out, Role::KPlane, Role::VPlane].map(|role| Expect::new(role, ROPE));
    for &row in rows {
        let Dots { want, error } = qkv(row);
        let angles = table.row(case.inputs.positions[row] as usize);
        let slot = case.inputs.kv_slots[row];
        for (head, values) in want.chunks_exact(dim).enumerate() {
            let error = &error[head * dim..][..dim];
            let narrow: Vec<f32> = values.iter().map(|value| *value as f32).collect();
            let pair = |i: usize| (i + dim / 2) % dim;
            let near = |i: usize| share * values[i].hypot(values[pair(i)]) + error[i] + error[pair(i)] + TINY;
            if head < q {
                let start = (row * q + head) * dim;
                out.row(start, reference::rope(&narrow, &angles), |i, want| near(i) + out_share * want.abs());
            } else if slot != NONE {
                let plane = (head - q) % kv;
                let start = (slot as usize * kv + plane) * dim;
                if head < q + kv {
                    k.row(start, reference::rope(&narrow, &angles), |i, want| near(i) + kv_share * want.abs());
                } else {
                    v.row(start, values.iter().copied(), |i, want| error[i] + kv_share * (want.abs() + f64::from(f32::MIN_POSITIVE)));
                }
            }
        }
    }
    vec![out, k, v]
}

/// Sequences of a step: new tokens, and tokens in the cache once they are appended.
fn sequences(draw: &mut Draw<'_>, phase: Phase, page: usize) -> Vec<(usize, usize)> {
    let Bindings { tokens, seqs, kv_pages, .. } = draw.sizes;
    let (tokens, seqs) = (tokens as usize, seqs as usize);
    let chunks = match phase {
        Phase::Decode => vec![1; seqs],
        Phase::Mixed => chunks(draw, tokens, seqs),
    };
    let used: usize = chunks.iter().map(|chunk| chunk.div_ceil(page)).sum();
    let depth = (kv_pages as usize - 2 - used) / seqs.max(1) * page;
    let first = below(draw.random, LENGTHS.len());
    let mut sequences = Vec::new();
    for (seq, chunk) in chunks.into_iter().enumerate() {
        let more = match draw.random.below(4) {
            0 if phase == Phase::Mixed => 0,
            1 => below(draw.random, depth + 1),
            _ => LENGTHS[(first + seq) % LENGTHS.len()].saturating_sub(chunk).min(depth),
        };
        let is_empty = draw.spec.is_sm90 && phase == Phase::Decode && seqs > 4 && seq % 5 == 4;
        sequences.push((chunk, if is_empty { 0 } else { chunk + more }));
    }
    sequences
}

/// Chunks that add up to `tokens`: decode rows, long chunks, and now and then an empty sequence.
fn chunks(draw: &mut Draw<'_>, tokens: usize, seqs: usize) -> Vec<usize> {
    let seqs = seqs.min(tokens).max(1);
    let mut chunks = vec![1; seqs];
    let mut rest = tokens - seqs;
    for (index, chunk) in chunks.iter_mut().enumerate() {
        let is_long = draw.random.percent(50);
        let more = if index + 1 == seqs {
            rest
        } else if is_long {
            below(draw.random, rest + 1)
        } else {
            0
        };
        *chunk += more;
        rest -= more;
    }
    if seqs < draw.sizes.seqs as usize {
        chunks.insert(below(draw.random, seqs + 1), 0);
    }
    shuffle(draw.random, &mut chunks);
    chunks
}

pub(super) fn attend(draw: &mut Draw<'_>, heads: Heads, phase: Phase) -> Case {
    let page = heads.page_tokens as usize;
    let (tokens, seqs) = (draw.sizes.tokens as usize, draw.sizes.seqs as usize);
    // Room for chunks, for several hundred tokens of context a sequence, for a NaN page and the padding page.
    let context: usize = match (draw.spec.is_sm90, seqs) {
        (true, 0..=8) => 8300,
        (true, _) => 700,
        (false, 0..=8) => 700,
        (false, _) => 160,
    };
    let pages = tokens.div_ceil(page) + seqs * (1 + context.div_ceil(page)) + 3;
    draw.sizes.kv_pages = pages as u32;
    draw.bound.kv_pages = pages as u32;
    let sequences = sequences(draw, phase, page);
    draw.sizes.seqs = sequences.len() as u32;
    draw.bound.seqs = draw.bound.seqs.max(draw.sizes.seqs);
    let mut case = draw.case(Vec::new());
    case.tensors.push(queries(draw, heads, tokens));
    fill_cache(draw, heads, &sequences, &mut case);
    case
}

/// Queries whose scores stay moderate: softmax turns errors of large scores into errors of weights.
fn queries(draw: &mut Draw<'_>, heads: Heads, tokens: usize) -> Tensor {
    let width = (heads.q * heads.dim) as usize;
    let style = match draw.style {
        Style::Large | Style::Outliers => Style::Plain,
        style @ (Style::Plain | Style::Zeros | Style::Denormals | Style::Ties) => style,
    };
    let image = values::activations(draw.random, style, tokens, width, DType::F32);
    let Image::F32(mut values) = image else { unreachable!("asked for f32") };
    values.iter_mut().for_each(|value| *value *= 0.5);
    Tensor { role: Role::X, width, image: Arc::new(as_type(values, draw.spec.contract.act)) }
}

fn fill_cache(draw: &mut Draw<'_>, heads: Heads, sequences: &[(usize, usize)], case: &mut Case) {
    let page = heads.page_tokens as usize;
    let width = (heads.kv * heads.dim) as usize;
    let pages = case.sizes.kv_pages as usize;
    let stride = sequences.iter().map(|(_, length)| length.div_ceil(page)).max().unwrap_or(0) + 1 + below(draw.random, 4);
    case.table_stride = stride as u32;
    let mut free: Vec<u32> = (0..pages as u32 - 1).collect();
    shuffle(draw.random, &mut free);
    let unowned = free.pop().unwrap_or(0);
    let dtype = draw.spec.contract.kv;
    let mut planes = [poison(dtype, pages * page * width), poison(dtype, pages * page * width)];
    case.inputs.query_starts = vec![0];
    let scale = if matches!(draw.style, Style::Large | Style::Outliers) { 10 } else { 0 };
    for (chunk, length) in sequences {
        let mut table: Vec<u32> = (0..length.div_ceil(page)).map(|_| free.pop().unwrap_or(unowned)).collect();
        for position in 0..*length {
            let slot = table[position / page] as usize * page + position % page;
            let is_tied = draw.style == Style::Ties;
            for (plane, exponent) in planes.iter_mut().zip([-1, scale]) {
                let row: Vec<f32> =
                    (0..width).map(|_| if is_tied { pick(draw.random, &[-1.0, 0.5]) } else { plain(draw.random, exponent) }).collect();
                put(plane, slot * width, row, dtype);
            }
        }
        table.resize(stride, unowned);
        case.inputs.block_tables.extend(table);
        case.inputs.kv_lens.push(*length as u32);
        let start = case.inputs.query_starts.last().copied().unwrap_or(0);
        case.inputs.query_starts.push(start + *chunk as u32);
    }
    for (role, plane) in [Role::KPlane, Role::VPlane].into_iter().zip(planes) {
        case.tensors.push(Tensor { role, width, image: Arc::new(plane) });
    }
}

fn put(plane: &mut Image, at: usize, row: Vec<f32>, dtype: DType) {
    let bytes = as_type(row, dtype);
    let start = at * plane.element_bytes();
    plane.bytes_mut()[start..start + bytes.bytes().len()].copy_from_slice(bytes.bytes());
}

pub(super) fn expect_attend(case: &Case, heads: Heads) -> Vec<Expect> {
    let queries = case.queries();
    let chosen = sampled(queries.len(), QUERIES_MAX);
    let planes = [Role::KPlane, Role::VPlane].map(|role| case.tensor(role).all());
    let abs: Vec<f32> = planes[1].iter().map(|v| v.abs()).collect();
    let results: Vec<_> = chosen
        .par_iter()
        .map(|i| {
            let run = |v: &[f32]| attend_one(case, heads, queries[*i], &planes[0], v);
            (queries[*i].row, run(&planes[1]), run(&abs))
        })
        .collect();
    let share = if case.spec.is_sm90 { SM90_ATTEND } else { CPU_ATTEND };
    let stored = if case.out_dtype() == DType::Bf16 { BF16_STORE } else { 0.0 };
    let mut out = Expect::new(Role::Out, ATTEND);
    for (row, want, sizes) in results {
        out.row(row * case.out_width(), want, |i, want| share * sizes[i] + stored * want.abs() + TINY);
    }
    vec![out]
}

fn attend_one(case: &Case, heads: Heads, query: Query, k_plane: &[f32], v_plane: &[f32]) -> Vec<f64> {
    let stride = case.table_stride as usize;
    reference::attend(AttendInputs {
        heads,
        q: &case.tensor(Role::X).row(query.row),
        k_plane,
        v_plane,
        query_starts: &[0, 1],
        kv_lens: &[query.visible],
        block_tables: &case.inputs.block_tables[query.seq * stride..][..stride],
        table_stride: stride,
    })
}
