//! Embedding, norms, row selection: contracts whose rows are independent.

use super::{Draw, sampled};
use crate::qualify::case::{Case, Expect, Tensor};
use crate::qualify::values::{below, round_bf16};
use oxide_bundle::contract::{Heads, Role};
use oxide_bundle::step::NONE;
use oxide_runtime::device::place::Image;
use oxide_runtime::device::reference;
use oxide_runtime::device::tolerance::{BF16_STORE, CPU_NORM, SM90_F32, TINY};
use std::sync::Arc;

/// Rows of the previous step.
const PREVIOUS_ROWS: usize = 256;
/// Elements of an operand that the reference computes at most.
const ELEMENTS_MAX: usize = 1 << 20;

const COPY: &str = "exact";
const NORM: &str = "share of |want|";

pub(super) fn embed(draw: &mut Draw<'_>, vocab: usize, dim: usize) -> Case {
    let rows = draw.rows();
    let table = draw.matrix(vocab, dim);
    let mut case = draw.case(vec![table]);
    let edges = [0, vocab - 1, vocab / 2];
    for row in 0..rows {
        let id = if row < edges.len() { edges[row] } else { below(draw.random, vocab) };
        case.inputs.token_ids.push(id as u32);
        case.inputs.token_sources.push(if draw.random.percent(50) { below(draw.random, PREVIOUS_ROWS) as u32 } else { NONE });
    }
    case.previous_ids = (0..PREVIOUS_ROWS).map(|_| below(draw.random, vocab) as u32).collect();
    case
}

pub(super) fn expect_embed(case: &Case) -> Vec<Expect> {
    let table = case.tensor(Role::Weight);
    let mut expect = Expect::new(Role::Out, COPY);
    for (row, (id, source)) in case.inputs.token_ids.iter().zip(&case.inputs.token_sources).enumerate() {
        let id = if *source == NONE { *id } else { case.previous_ids[*source as usize] };
        expect.row(row * table.width, table.row(id as usize).into_iter().map(f64::from), |_, _| 0.0);
    }
    vec![expect]
}

pub(super) fn norm(draw: &mut Draw<'_>, dim: usize, is_added: bool) -> Case {
    let rows = draw.rows();
    let mut tensors = vec![draw.activation(Role::X, rows, dim), draw.vector(Role::NormWeight, dim)];
    if is_added {
        tensors.push(draw.activation(Role::Residual, rows, dim));
    }
    draw.case(tensors)
}

/// What a stored norm may be off by.
fn norm_tolerance(case: &Case) -> impl FnMut(usize, f64) -> f64 + Copy {
    let share = if case.spec.is_sm90 { BF16_STORE + SM90_F32 } else { CPU_NORM };
    move |_, want: f64| share * want.abs() + TINY
}

pub(super) fn expect_norm(case: &Case, eps: f32, is_added: bool) -> Vec<Expect> {
    let (x, weight) = (case.tensor(Role::X), case.tensor(Role::NormWeight).all());
    let (mut out, mut residual) = (Expect::new(Role::Out, NORM), Expect::new(Role::Residual, COPY));
    for row in sampled(case.rows(), (ELEMENTS_MAX / x.width).max(1)) {
        let mut values = x.row(row);
        if is_added {
            values.iter_mut().zip(case.tensor(Role::Residual).row(row)).for_each(|(x, residual)| *x += residual);
            if case.spec.is_sm90 {
                values.iter_mut().for_each(|x| *x = round_bf16(*x));
            }
            residual.row(row * x.width, values.iter().copied().map(f64::from), |_, _| TINY);
        }
        out.row(row * x.width, reference::rms_norm(&values, &weight, eps), norm_tolerance(case));
    }
    if is_added { vec![out, residual] } else { vec![out] }
}

pub(super) fn qk_norm(draw: &mut Draw<'_>, heads: Heads) -> Case {
    let rows = draw.rows();
    let tensors = vec![draw.activation(Role::X, rows, heads.qkv_width() as usize), draw.vector(Role::NormWeight, 2 * heads.dim as usize)];
    draw.case(tensors)
}

pub(super) fn expect_qk_norm(case: &Case, heads: Heads, eps: f32) -> Vec<Expect> {
    let (x, weight) = (case.tensor(Role::X), case.tensor(Role::NormWeight).all());
    let (dim, q, normed) = (heads.dim as usize, heads.q as usize, (heads.q + heads.kv) as usize);
    let mut out = Expect::new(Role::Out, NORM);
    for row in sampled(case.rows(), (ELEMENTS_MAX / x.width).max(1)) {
        for (head, values) in x.row(row).chunks_exact(dim).enumerate() {
            let start = row * x.width + head * dim;
            if head >= normed {
                out.row(start, values.iter().copied().map(f64::from), |_, _| 0.0);
                continue;
            }
            let weight = if head < q { &weight[..dim] } else { &weight[dim..] };
            out.row(start, reference::rms_norm(values, weight, eps), norm_tolerance(case));
        }
    }
    vec![out]
}

pub(super) fn take_rows(draw: &mut Draw<'_>, dim: usize) -> Case {
    let (tokens, rows) = (draw.sizes.tokens as usize, draw.sizes.rows as usize);
    let mut case = draw.case(vec![]);
    case.tensors.push(draw.activation(Role::X, tokens, dim));
    let edges = [tokens - 1, 0];
    case.inputs.logit_rows = (0..rows).map(|row| if row < edges.len() { edges[row] } else { below(draw.random, tokens) } as u32).collect();
    case
}

pub(super) fn expect_take_rows(case: &Case) -> Vec<Expect> {
    let x = case.tensor(Role::X);
    let mut out = Expect::new(Role::Out, COPY);
    for (row, from) in case.inputs.logit_rows.iter().enumerate() {
        out.row(row * x.width, x.row(*from as usize).into_iter().map(f64::from), |_, _| 0.0);
    }
    vec![out]
}

/// A tensor of f32 values.
pub(super) fn f32_tensor(role: Role, width: usize, values: Vec<f32>) -> Tensor {
    Tensor { role, width, image: Arc::new(Image::F32(values)) }
}
