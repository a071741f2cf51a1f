//! Projections. The reference's result comes with the magnitudes that its rounding errors are shares of.

use super::{Draw, sampled};
use crate::qualify::case::{Case, Expect, Tensor};
use crate::qualify::values::{self, round_bf16};
use oxide_bundle::contract::{Activation, Linear, Role};
use oxide_bundle::dtype::DType;
use oxide_runtime::device::reference;
use oxide_runtime::device::tolerance::{BF16_STORE, CPU_DOT, CPU_FINISH, SM90_DOT, SM90_F32, SM90_NORM_FLIP, TINY};
use rayon::prelude::*;

/// Rows that the reference computes, at most about.
const ROWS_MAX: usize = 12;
/// Columns that it computes, at most about: several of every tile.
const COLUMNS_MAX: usize = 2048;
/// Largest derivative of silu, and a little.
const SILU_SLOPE_MAX: f64 = 1.1;

const RULE: &str = "share of sum|x*w| + share of |want|";

pub(super) fn operands(draw: &mut Draw<'_>, linear: Linear) -> Vec<Tensor> {
    let (rows, n, k) = (draw.rows(), linear.n as usize, linear.k as usize);
    let mut tensors = vec![draw.activation(Role::X, rows, k), draw.matrix(n, k)];
    if linear.norm.is_some() {
        tensors.push(draw.vector(Role::NormWeight, k));
    }
    if linear.bias {
        tensors.push(draw.vector(Role::Bias, n));
    }
    tensors
}

pub(super) fn linear(draw: &mut Draw<'_>, linear: Linear) -> Case {
    let mut tensors = operands(draw, linear);
    if linear.residual {
        let rows = draw.rows();
        tensors.push(draw.activation(Role::Residual, rows, linear.out_width() as usize));
    }
    draw.case(tensors)
}

/// Dot products of one row with some weight rows, bias included, and how far each may be off.
pub(super) struct Dots {
    pub(super) want: Vec<f64>,
    pub(super) error: Vec<f64>,
}

/// Weight rows `columns` as f32, and their biases.
pub(super) struct Columns {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    k: usize,
}

impl Columns {
    pub(super) fn of(case: &Case, columns: &[usize]) -> Self {
        let weight = case.tensor(Role::Weight);
        let bias = case.find(Role::Bias).map(|bias| bias.all());
        Self {
            weight: columns.iter().flat_map(|column| weight.row(*column)).collect(),
            bias: bias.map(|bias| columns.iter().map(|column| bias[*column]).collect()),
            k: weight.width,
        }
    }

    /// Projects row `row` of the case's input.
    pub(super) fn dots(&self, case: &Case, linear: &Linear, row: usize) -> Dots {
        let mut x = case.tensor(Role::X).row(row);
        if let Some(eps) = linear.norm {
            let normed = reference::rms_norm(&x, &case.tensor(Role::NormWeight).all(), eps.get());
            x = normed.into_iter().map(|x| round_bf16(x as f32)).collect();
        }
        let abs = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
        let want = reference::linear(&x, &self.weight, self.k, self.bias.as_deref());
        let bias = self.bias.as_deref().map(abs);
        let sizes = reference::linear(&abs(&x), &abs(&self.weight), self.k, bias.as_deref());
        let share = if case.spec.is_sm90 { SM90_DOT } else { CPU_DOT };
        let largest = |weight: &[f32]| x.iter().zip(weight).map(|(x, w)| f64::from(x * w).abs()).fold(0.0, f64::max);
        // Denormal inputs may be taken as zeros.
        let total = |values: &[f32]| values.iter().map(|value| f64::from(value.abs())).sum::<f64>();
        let x_total = total(&x);
        let floors = self.weight.chunks_exact(self.k).map(|weight| f64::from(f32::MIN_POSITIVE) * (x_total + total(weight)) + TINY);
        let flip = if linear.norm.is_some() { SM90_NORM_FLIP } else { 0.0 };
        let flips = self.weight.chunks_exact(self.k).map(|weight| if flip > 0.0 { flip * largest(weight) } else { 0.0 });
        let error = sizes.iter().zip(flips).zip(floors).map(|((size, flip), floor)| share * size + flip + floor).collect();
        Dots { want, error }
    }
}

/// The share of a result that its own rounding takes.
pub(super) fn store_share(case: &Case) -> f64 {
    match (case.spec.is_sm90, case.out_dtype()) {
        (true, DType::Bf16) => BF16_STORE + SM90_F32,
        (true, _) => SM90_F32,
        (false, _) => CPU_FINISH,
    }
}

pub(super) fn expect_linear(case: &Case, linear: Linear) -> Vec<Expect> {
    let width = linear.out_width() as usize;
    let chosen = sampled(width, COLUMNS_MAX);
    let swiglu = linear.act == Activation::SwiGlu;
    let mut source = chosen.clone();
    if swiglu {
        source.extend(chosen.iter().map(|column| column + width));
    }
    let columns = Columns::of(case, &source);
    let rows = sampled(case.rows(), ROWS_MAX);
    let results: Vec<(Vec<f64>, Vec<f64>)> = rows.par_iter().map(|row| one_row(case, &linear, &columns, &chosen, *row)).collect();
    let mut out = Expect::new(Role::Out, RULE);
    for (row, (want, tolerance)) in rows.into_iter().zip(results) {
        out.at.extend(chosen.iter().map(|column| row * width + column));
        out.want.extend(want);
        out.tolerance.extend(tolerance);
    }
    vec![out]
}

fn one_row(case: &Case, linear: &Linear, columns: &Columns, chosen: &[usize], row: usize) -> (Vec<f64>, Vec<f64>) {
    let Dots { mut want, mut error } = columns.dots(case, linear, row);
    if linear.act == Activation::SwiGlu {
        let half = want.len() / 2;
        let silu = |x: f64| x / (1.0 + (-x).exp());
        error = (0..half)
            .map(|i| {
                SILU_SLOPE_MAX * want[half + i].abs() * error[i]
                    + silu(want[i]).abs() * error[half + i]
                    + TINY * (1.0 + want[half + i].abs())
            })
            .collect();
        want = reference::swiglu(&want, 2 * half);
    }
    if linear.residual {
        let residual = case.tensor(Role::Residual);
        for ((want, error), column) in want.iter_mut().zip(&mut error).zip(chosen) {
            let value = values::element(&residual.image, row * residual.width + column);
            *want += value;
            *error += store_share(case).min(SM90_F32) * value.abs();
        }
    }
    let share = store_share(case);
    let tolerance = want.iter().zip(error).map(|(want, error)| error + share * want.abs()).collect();
    (want, tolerance)
}
