//! Operators, types and weights of the graph.

use super::typing::Typing;
use oxide_bundle::contract::Activation;
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::plan::{RowOrder, Sym, WeightLayout};
use std::fmt;

/// Symbolic leading dimension.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Tokens of the step.
    Tokens,
    /// Logit rows of the step.
    Rows,
}

impl Axis {
    /// The plan's symbol.
    pub const fn sym(self) -> Sym {
        match self {
            Self::Tokens => Sym::Tokens,
            Self::Rows => Sym::Rows,
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tokens => "tokens",
            Self::Rows => "rows",
        })
    }
}

/// Type of a value.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// `dtype[axis, width]`.
    Tensor {
        /// Leading dimension.
        axis: Axis,
        /// Trailing dimension.
        width: u32,
        /// Element type.
        dtype: DType,
    },
    /// State of a layer's KV cache once this step's keys and values are in it.
    Cache {
        /// The layer.
        layer: u32,
    },
    /// Sampled ids, one a logits row; they leave through the step's output slots.
    Ids,
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor { axis, width, dtype } => write!(f, "{dtype}[{axis}, {width}]"),
            Self::Cache { layer } => write!(f, "cache({layer})"),
            Self::Ids => f.write_str("ids"),
        }
    }
}

/// A weight: where it comes from and how it will be laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Name after fusion.
    pub name: String,
    /// Checkpoint tensors that it is made from, in order; empty for a computed table.
    pub sources: Vec<String>,
    /// Element type.
    pub dtype: DType,
    /// Logical shape.
    pub shape: Vec<u32>,
    /// Layout.
    pub layout: WeightLayout,
    /// Order of the rows.
    pub rows: RowOrder,
}

/// An operator. Operands and weights in the order given; `[x]` is optional.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Op {
    /// `() @table[vocab, dim] → dtype[tokens, dim]`: rows of the table by token id.
    Embed {
        /// Element type of the result.
        dtype: DType,
    },
    /// `(x) @weight[dim] → x`.
    RmsNorm {
        /// Added to the mean square.
        eps: F32Bits,
    },
    /// `(x [, residual]) @weight[n, k] [@bias[n]] → [.., n]`, or `n/2` wide with SwiGLU.
    Linear {
        /// Applied after the bias.
        act: Activation,
        /// Whether a residual is added, as the second operand.
        residual: bool,
    },
    /// `(x) → [.., width]`: columns `offset .. offset + width`. Exists only between merging and fusing.
    Slice {
        /// First column.
        offset: u32,
        /// Columns.
        width: u32,
    },
    /// `(x) @table → x`: rotates every head of `x` by the position of its token.
    Rope {
        /// Width of a head.
        head_dim: u32,
    },
    /// `(k, v) → cache`: appends to the layer's pages.
    KvAppend {
        /// The layer.
        layer: u32,
    },
    /// `(qkv) @table → (q, cache)`: [`Op::Rope`] of q and k and [`Op::KvAppend`].
    RopeAppend {
        /// The layer.
        layer: u32,
        /// Query heads.
        q: u32,
        /// Key/value heads.
        kv: u32,
        /// Width of a head.
        head_dim: u32,
    },
    /// `(q, cache) → q`: causal attention over the pages of each sequence.
    Attend {
        /// Query heads.
        q: u32,
        /// Key/value heads.
        kv: u32,
        /// Width of a head.
        head_dim: u32,
    },
    /// `(gate, up) → gate`: `silu(gate) · up`.
    SwiGlu,
    /// `(a, b) → a`.
    Add,
    /// `(x[tokens, dim]) → [rows, dim]`: the rows whose logits are wanted.
    TakeRows,
    /// `(x) @weight[vocab, dim] → f32[.., vocab]`.
    Logits,
    /// `(logits) → ids`.
    Sample {
        /// Ids that the tokenizer knows.
        vocab_known: u32,
    },
}

impl Op {
    /// Its name in the text form.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::RmsNorm { .. } => "rms_norm",
            Self::Linear { .. } => "linear",
            Self::Slice { .. } => "slice",
            Self::Rope { .. } => "rope",
            Self::KvAppend { .. } => "kv_append",
            Self::RopeAppend { .. } => "rope_append",
            Self::Attend { .. } => "attend",
            Self::SwiGlu => "swiglu",
            Self::Add => "add",
            Self::TakeRows => "take_rows",
            Self::Logits => "logits",
            Self::Sample { .. } => "sample",
        }
    }

    /// Result types for operand types and weights: the typing rule of each operator.
    ///
    /// # Errors
    /// The mismatch, in words.
    pub fn infer(&self, operands: &[Type], weights: &[&Weight]) -> Result<Vec<Type>, String> {
        let types = Typing::new(self, operands, weights);
        match *self {
            Self::Embed { dtype } => types.embed(dtype),
            Self::RmsNorm { .. } => types.norm(),
            Self::Linear { act, residual } => types.linear(act, residual),
            Self::Slice { offset, width } => types.slice(offset, width),
            Self::Rope { head_dim } => types.rope(head_dim),
            Self::KvAppend { layer } => types.kv_append(layer),
            Self::RopeAppend { layer, q, kv, head_dim } => types.rope_append(layer, q, kv, head_dim),
            Self::Attend { q, kv, head_dim } => types.attend(q, kv, head_dim),
            Self::SwiGlu | Self::Add => types.pair(),
            Self::TakeRows => types.take_rows(),
            Self::Logits => types.logits(),
            Self::Sample { vocab_known } => types.sample(vocab_known),
        }
    }
}
