//! How far a kernel's result may lie from the f64 reference, by contract and target, and why.
//!
//! Tests of the cpu kernels and the conformance tool use the same numbers. Each is a share of a
//! magnitude that is named beside it, never an absolute number for any input.

/// cpu norms, of the result: a sum of squares of positive terms, a root, a division and two products.
pub const CPU_NORM: f64 = 1.0 / (1 << 20) as f64;
/// cpu rotary embedding, of the pair's magnitude: two products and a sum.
pub const CPU_ROPE: f64 = 1.0 / (1 << 22) as f64;
/// cpu attention, of the attended magnitude of V: scores of at most a few units carry an error of some
/// 2⁻²², which the softmax turns into as much of the weights, and the sum of weighted values adds as much again.
pub const CPU_ATTEND: f64 = 1.0 / (1 << 19) as f64;
/// cpu projections, of `Σ |x · w|`: a chain of `k` rounded additions errs by about `sqrt(k) · 2⁻²⁴` of it; `k` is at most some thousands.
pub const CPU_DOT: f64 = 1.0 / (1 << 18) as f64;
/// cpu projections, of the result, on top: bias, activation (a polynomial `exp`) and residual round a few times more.
pub const CPU_FINISH: f64 = 1.0 / (1 << 20) as f64;
/// Any value stored as bf16, of the value: eight significant bits.
pub const BF16_STORE: f64 = 1.0 / (1 << 8) as f64;
/// Log-probabilities, of one and of the value: a sum of some 10⁵ exponentials, each good to a few units
/// in the last place, and the rounding of the result.
pub const LOGPROB: f64 = 4e-6;

/// sm90 projections, of `Σ |x · w|`: tensor cores align the addends of a group before they add, and
/// split sums are combined in another order than the reference's.
pub const SM90_DOT: f64 = 1.0 / (1 << 16) as f64;
/// sm90 projections behind a norm whose results are rounded to bf16, of the largest `|x · w|`: one
/// rounding may fall to the other side.
pub const SM90_NORM_FLIP: f64 = 1.0 / (1 << 7) as f64;
/// sm90 attention, of the attended magnitude of V: probabilities are rounded to bf16, and the result once more.
pub const SM90_ATTEND: f64 = 1.0 / (1 << 7) as f64;
/// sm90 norms, rotary embedding and everything else computed in f32 and not summed over long rows, of the magnitudes involved.
pub const SM90_F32: f64 = 1.0 / (1 << 20) as f64;

/// Absolute: results this small may be flushed to zero or lose bits as denormal numbers.
pub const TINY: f64 = 1e-34;
