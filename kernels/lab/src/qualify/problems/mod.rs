//! Random cases of every contract, and what the f64 reference wants of them.

mod attention;
mod projection;
mod row_ops;
mod sampling;

use super::case::{Case, Expect, Spec, Tensor};
use super::values::{self, Style};
use crate::random::Random;
use oxide_bundle::contract::{Op, Role};
use oxide_bundle::plan::Bindings;
use oxide_runtime::device::StepInputs;
use oxide_runtime::device::place::Image;
use std::sync::Arc;

/// What a case is drawn from.
pub(crate) struct Draw<'a> {
    pub(crate) random: &'a mut Random,
    pub(crate) spec: Spec,
    pub(crate) style: Style,
    pub(crate) sizes: Bindings,
    pub(crate) bound: Bindings,
    pub(crate) weights: &'a mut Weights,
}

/// Logical weights by shape: making gigabytes anew for every case takes longer than checking them.
#[derive(Default)]
pub(crate) struct Weights {
    made: Vec<(usize, usize, Arc<Image>)>,
}

impl Weights {
    /// The `[n, k]` matrix of a shape.
    fn get(&mut self, n: usize, k: usize) -> Arc<Image> {
        if let Some((_, _, image)) = self.made.iter().find(|(rows, columns, _)| (*rows, *columns) == (n, k)) {
            return Arc::clone(image);
        }
        if self.made.len() >= 2 {
            self.made.remove(0);
        }
        let image = Arc::new(values::weights((n as u64) << 32 | k as u64, n, k));
        self.made.push((n, k, Arc::clone(&image)));
        image
    }
}

/// Draws a case.
pub(crate) fn make(draw: &mut Draw<'_>) -> Case {
    match draw.spec.contract.op {
        Op::Embed { vocab, dim } => row_ops::embed(draw, vocab as usize, dim as usize),
        Op::RmsNorm { dim, .. } => row_ops::norm(draw, dim as usize, false),
        Op::AddRmsNorm { dim, .. } => row_ops::norm(draw, dim as usize, true),
        Op::QkNorm { heads, .. } => row_ops::qk_norm(draw, heads),
        Op::TakeRows { dim } => row_ops::take_rows(draw, dim as usize),
        Op::Linear(linear) => projection::linear(draw, linear),
        Op::RopeAppend { heads } => attention::rope_append(draw, heads),
        Op::QkvRopeAppend { linear, heads } => attention::qkv_rope_append(draw, linear, heads),
        Op::Attend { heads, phase } => attention::attend(draw, heads, phase),
        Op::Sample { vocab, vocab_known } => sampling::sample(draw, vocab as usize, vocab_known as usize),
    }
}

/// What the reference wants.
pub(crate) fn expect(case: &Case) -> Vec<Expect> {
    match case.op() {
        Op::Embed { .. } => row_ops::expect_embed(case),
        Op::RmsNorm { eps, .. } => row_ops::expect_norm(case, eps.get(), false),
        Op::AddRmsNorm { eps, .. } => row_ops::expect_norm(case, eps.get(), true),
        Op::QkNorm { heads, eps } => row_ops::expect_qk_norm(case, heads, eps.get()),
        Op::TakeRows { .. } => row_ops::expect_take_rows(case),
        Op::Linear(linear) => projection::expect_linear(case, linear),
        Op::RopeAppend { heads } => attention::expect_rope_append(case, heads),
        Op::QkvRopeAppend { linear, heads } => attention::expect_qkv_rope_append(case, linear, heads),
        Op::Attend { heads, .. } => attention::expect_attend(case, heads),
        Op::Sample { vocab_known, .. } => sampling::expect_sample(case, vocab_known as usize),
    }
}

impl Draw<'_> {
    /// Rows of the activations.
    fn rows(&self) -> usize {
        let Bindings { tokens, rows, .. } = self.sizes;
        let rows = if self.spec.axis == oxide_bundle::plan::Sym::Rows { rows } else { tokens };
        rows as usize
    }

    fn activation(&mut self, role: Role, rows: usize, width: usize) -> Tensor {
        let image = values::activations(self.random, self.style, rows, width, self.spec.contract.act);
        Tensor { role, width, image: Arc::new(image) }
    }

    fn vector(&mut self, role: Role, len: usize) -> Tensor {
        Tensor { role, width: len, image: Arc::new(values::vector(self.random, len)) }
    }

    fn matrix(&mut self, n: usize, k: usize) -> Tensor {
        Tensor { role: Role::Weight, width: k, image: self.weights.get(n, k) }
    }

    fn case(&self, tensors: Vec<Tensor>) -> Case {
        Case {
            spec: self.spec,
            style: self.style,
            sizes: self.sizes,
            bound: self.bound,
            table_stride: 1,
            tensors,
            inputs: StepInputs::default(),
            previous_ids: Vec::new(),
        }
    }
}

/// The first and last of `count`, and up to `most` between them, spread evenly with a random start.
fn sampled(count: usize, most: usize) -> Vec<usize> {
    if count <= most {
        return (0..count).collect();
    }
    // An odd step meets every position within tiles of a power of two.
    let step = (count / most) | 1;
    let mut chosen: Vec<usize> = (0..count).step_by(step).chain([count - 1]).collect();
    chosen.dedup();
    chosen
}
