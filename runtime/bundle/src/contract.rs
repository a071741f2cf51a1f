//! Operator contracts: what a kernel computes, never how or where.
//!
//! A step names its kernel by [`Contract`]: an [`Op`] with its static dimensions plus the element
//! types of its operands. Each target attaches code: the cpu device from a closed table of Rust
//! functions, the sm90 device from pinned cubins whose manifests name the contract they fulfil.
//!
//! Shapes below use `T` = tokens of the step, `S` = sequences, `R` = logit rows. Activations are
//! row-major `[T, width]`. **Invariant:** every contract's row `t` depends only on its own row of
//! inputs, the weights and the KV pages of its own sequence: batch invariance is part of the
//! contract.

use crate::dtype::{DType, F32Bits};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a kernel computes, with every static dimension.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// `out[t] = table[id(t)]`, where `id(t)` is `token_ids[t]`, or, if `token_sources[t] != NONE`,
    /// the id sampled by the previous step in row `token_sources[t]`.
    /// Operands: `Weight` = table `[vocab, dim]`; `Out` `[T, dim]`.
    Embed {
        /// Rows of the table.
        vocab: u32,
        /// Width of a row.
        dim: u32,
    },
    /// `out = x / sqrt(mean(x²) + eps) · weight`. Operands: `X`, `NormWeight` `[dim]`, `Out` `[T, dim]`.
    RmsNorm {
        /// Width of a row.
        dim: u32,
        /// Added to the mean square.
        eps: F32Bits,
    },
    /// `residual += x; out = rms_norm(residual)`. Operands: `X`, `Residual` (read and written), `NormWeight`, `Out`.
    AddRmsNorm {
        /// Width of a row.
        dim: u32,
        /// Added to the mean square.
        eps: F32Bits,
    },
    /// RMS norm of each head of Q and K separately (Qwen3). Operands: `X` (`qkv`, updated in place as `Out`), `NormWeight` (Q then K, `[2, head_dim]`).
    QkNorm {
        /// Head geometry.
        heads: Heads,
        /// Added to the mean square.
        eps: F32Bits,
    },
    /// `out = act(norm(x) · Wᵀ + bias) + residual`, each part optional. Operands: `X` `[T, k]`, `Weight`
    /// `[n, k]`, `NormWeight` if `norm`, `Bias` `[n]` if `bias`, `Residual` if `residual`, `Out`
    /// `[T, n]`, or `[T, n/2]` with [`Activation::SwiGlu`] (rows of `W`: gate and up, interleaved as
    /// the weight's [`RowOrder`](crate::plan::RowOrder) says). `Out` and `Residual` may be one buffer.
    Linear(Linear),
    /// Rotates Q and K of `x = [q | k | v]` by the position of their token and appends K and V to the
    /// paged cache at `kv_slots[t]`. Rotation pairs `(i, i + head_dim/2)` ("rotate half").
    /// Operands: `X` `[T, (q + 2·kv)·head_dim]`, `RopeTable` `[context, head_dim/2, 2]` (cos, sin; f32),
    /// `KPlane`, `VPlane`, `Out` `[T, q·head_dim]`.
    RopeAppend {
        /// Head geometry.
        heads: Heads,
    },
    /// [`Op::Linear`] with norm and bias, then [`Op::RopeAppend`], in one kernel.
    /// Operands: those of both; `Out` `[T, q·head_dim]`.
    QkvRopeAppend {
        /// The projection; `n = (q + 2·kv)·head_dim`.
        linear: Linear,
        /// Head geometry.
        heads: Heads,
    },
    /// Causal attention of each query over the pages of its sequence, scale `1/sqrt(head_dim)`,
    /// online softmax in f32. Operands: `X` = Q `[T, q·head_dim]`, `KPlane`, `VPlane`, `Out` like Q,
    /// optionally `Workspace`/`Counters` for split-KV.
    Attend {
        /// Head geometry.
        heads: Heads,
        /// Whether every sequence has exactly one query row.
        phase: Phase,
    },
    /// `out[r] = x[logit_rows[r]]`. Operands: `X` `[T, dim]`, `Out` `[R, dim]`.
    TakeRows {
        /// Width of a row.
        dim: u32,
    },
    /// Applies bias, penalties, mask, temperature, top-k, top-p, min-p to `logits` and draws one id a
    /// row; see [`SamplingRow`](crate::step::SamplingRow). Ids `≥ vocab_known` are never drawn.
    /// Operands: `X` = logits f32 `[R, vocab]` (may be overwritten); outputs go to the output slots.
    Sample {
        /// Width of a logits row.
        vocab: u32,
        /// Ids that the tokenizer knows; the rest is padding.
        vocab_known: u32,
    },
}

/// Static part of a projection.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Linear {
    /// Output features (rows of the weight).
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// RMS norm of the input first, with this epsilon.
    pub norm: Option<F32Bits>,
    /// Adds a bias.
    pub bias: bool,
    /// Applied after the bias.
    pub act: Activation,
    /// Adds the residual stream to the output.
    pub residual: bool,
}

impl Linear {
    /// A plain projection.
    pub const fn plain(n: u32, k: u32) -> Self {
        Self { n, k, norm: None, bias: false, act: Activation::None, residual: false }
    }

    /// Width of an output row.
    pub const fn out_width(&self) -> u32 {
        match self.act {
            Activation::None => self.n,
            Activation::SwiGlu => self.n / 2,
        }
    }
}

/// Activation of a projection's output.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// The identity.
    None,
    /// `silu(gate) · up`; halves the width.
    SwiGlu,
}

/// Head geometry of grouped-query attention.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    /// Query heads.
    pub q: u32,
    /// Key/value heads; divides `q`.
    pub kv: u32,
    /// Width of a head.
    pub dim: u32,
    /// Tokens in a KV page.
    pub page_tokens: u32,
}

impl Heads {
    /// Width of a `[q | k | v]` row.
    pub const fn qkv_width(&self) -> u32 {
        (self.q + 2 * self.kv) * self.dim
    }
}

/// What the rows of an attention step may be.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// One query row a sequence.
    Decode,
    /// Ragged rows: prefill chunks and decode rows together.
    Mixed,
}

/// An operator with the element types of its operands.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    /// What is computed.
    pub op: Op,
    /// Element type of activations read.
    pub act: DType,
    /// Element type of weight matrices (norm weights and biases have it too).
    pub weight: DType,
    /// Element type of KV planes.
    pub kv: DType,
    /// Element type of the output.
    pub out: DType,
}

/// The role an operand plays in a contract. A kernel binds its parameters by role.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Input activations.
    X,
    /// Weight matrix.
    Weight,
    /// Norm weight.
    NormWeight,
    /// Bias vector.
    Bias,
    /// Residual stream.
    Residual,
    /// Output.
    Out,
    /// Cosine/sine table.
    RopeTable,
    /// Key plane of a layer: `[pages, page_tokens, kv, head_dim]`.
    KPlane,
    /// Value plane of a layer, same shape.
    VPlane,
    /// Scratch that a kernel wants beside its operands, numbered by its manifest.
    Workspace(u32),
    /// Zero-initialised state that a kernel leaves zeroed (tickets), numbered by its manifest.
    Counters(u32),
    /// A per-step input slot.
    Input(crate::step::InputSlot),
    /// A per-step output slot.
    Output(crate::step::OutputSlot),
    /// A scalar bound to a symbol or a constant.
    Scalar(Dim),
}

/// Scalars that kernels take by value.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dim {
    /// Tokens of the step.
    Tokens,
    /// Sequences of the step.
    Seqs,
    /// Logit rows of the step.
    Rows,
    /// Pages of the KV pool.
    KvPages,
    /// Entries of one block-table row.
    TableStride,
    /// A constant named by the kernel's manifest: number of splits, slots, CTAs.
    Constant,
}

impl Op {
    /// The operator's name in text dumps and error messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::RmsNorm { .. } => "rms_norm",
            Self::AddRmsNorm { .. } => "add_rms_norm",
            Self::QkNorm { .. } => "qk_norm",
            Self::Linear(_) => "linear",
            Self::RopeAppend { .. } => "rope_append",
            Self::QkvRopeAppend { .. } => "qkv_rope_append",
            Self::Attend { phase: Phase::Decode, .. } => "attend_decode",
            Self::Attend { phase: Phase::Mixed, .. } => "attend_mixed",
            Self::TakeRows { .. } => "take_rows",
            Self::Sample { .. } => "sample",
        }
    }
}

impl fmt::Display for Heads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "q={} kv={} d={} page={}", self.q, self.kv, self.dim, self.page_tokens)
    }
}

impl fmt::Display for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n={} k={}", self.n, self.k)?;
        if let Some(eps) = self.norm {
            write!(f, " +norm({eps})")?;
        }
        if self.bias {
            f.write_str(" +bias")?;
        }
        if self.act == Activation::SwiGlu {
            f.write_str(" +swiglu")?;
        }
        if self.residual {
            f.write_str(" +residual")?;
        }
        Ok(())
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embed { vocab, dim } => write!(f, "vocab={vocab} dim={dim}"),
            Self::RmsNorm { dim, eps } | Self::AddRmsNorm { dim, eps } => write!(f, "dim={dim} eps={eps}"),
            Self::QkNorm { heads, eps } => write!(f, "{heads} eps={eps}"),
            Self::Linear(linear) => write!(f, "{linear}"),
            Self::QkvRopeAppend { linear, heads } => write!(f, "{linear} {heads}"),
            Self::RopeAppend { heads } | Self::Attend { heads, .. } => write!(f, "{heads}"),
            Self::TakeRows { dim } => write!(f, "dim={dim}"),
            Self::Sample { vocab, vocab_known } => write!(f, "vocab={vocab} known={vocab_known}"),
        }
    }
}

impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}[{}]", self.op.name(), self.act, self.op)
    }
}
