//! Operators, types and weights of the graph, and the one typing rule of each operator.

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
        let types = Typing { op: self, operands, weights };
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

/// A row-block type, destructured.
#[derive(Copy, Clone)]
struct Rows {
    axis: Axis,
    width: u32,
    dtype: DType,
}

impl Rows {
    fn ty(self) -> Type {
        Type::Tensor { axis: self.axis, width: self.width, dtype: self.dtype }
    }
}

struct Typing<'a> {
    op: &'a Op,
    operands: &'a [Type],
    weights: &'a [&'a Weight],
}

type Inferred = Result<Vec<Type>, String>;

impl Typing<'_> {
    fn count(&self, operands: usize, weights: usize) -> Result<(), String> {
        let name = self.op.name();
        if self.operands.len() != operands {
            return Err(format!("{name} takes {operands} operands, found {}", self.operands.len()));
        }
        if self.weights.len() != weights {
            return Err(format!("{name} takes {weights} weights, found {}", self.weights.len()));
        }
        Ok(())
    }

    fn rows(&self, operand: usize) -> Result<Rows, String> {
        match self.operands.get(operand) {
            Some(&Type::Tensor { axis, width, dtype }) => Ok(Rows { axis, width, dtype }),
            Some(other) => Err(format!("operand {operand} of {} must be a tensor, is {other}", self.op.name())),
            None => Err(format!("operand {operand} of {} is missing", self.op.name())),
        }
    }

    fn shape(&self, weight: usize, expected: &[u32]) -> Result<(), String> {
        match self.weights.get(weight) {
            Some(w) if w.shape == expected => Ok(()),
            Some(w) => Err(format!("weight @{} of {} has shape {:?}, expected {expected:?}", w.name, self.op.name(), w.shape)),
            None => Err(format!("weight {weight} of {} is missing", self.op.name())),
        }
    }

    fn matrix(&self, weight: usize) -> Result<(u32, u32), String> {
        match self.weights.get(weight).map(|w| w.shape.as_slice()) {
            Some(&[n, k]) => Ok((n, k)),
            _ => Err(format!("weight {weight} of {} must be a matrix", self.op.name())),
        }
    }

    fn same(&self, what: &str, found: u32, expected: u32) -> Result<(), String> {
        if found == expected { Ok(()) } else { Err(format!("{} of {} is {found}, expected {expected}", what, self.op.name())) }
    }

    fn embed(&self, dtype: DType) -> Inferred {
        self.count(0, 1)?;
        let (_, width) = self.matrix(0)?;
        Ok(vec![Rows { axis: Axis::Tokens, width, dtype }.ty()])
    }

    fn norm(&self) -> Inferred {
        self.count(1, 1)?;
        let x = self.rows(0)?;
        self.shape(0, &[x.width])?;
        Ok(vec![x.ty()])
    }

    fn linear(&self, act: Activation, residual: bool) -> Inferred {
        self.count(1 + usize::from(residual), if self.weights.len() == 2 { 2 } else { 1 })?;
        let (n, k) = self.matrix(0)?;
        let x = self.rows(0)?;
        self.same("width of x", x.width, k)?;
        if self.weights.len() == 2 {
            self.shape(1, &[n])?;
        }
        let width = match act {
            Activation::None => n,
            Activation::SwiGlu => n / 2,
        };
        let out = Rows { width, ..x }.ty();
        match self.operands.get(1) {
            Some(&found) if found != out => Err(format!("residual of linear is {found}, expected {out}")),
            _ => Ok(vec![out]),
        }
    }

    fn slice(&self, offset: u32, width: u32) -> Inferred {
        self.count(1, 0)?;
        let x = self.rows(0)?;
        match offset.checked_add(width) {
            Some(end) if end <= x.width && width > 0 => Ok(vec![Rows { width, ..x }.ty()]),
            _ => Err(format!("slice of {width} columns from {offset} leaves a width of {}", x.width)),
        }
    }

    fn table(&self, weight: usize, head_dim: u32) -> Result<(), String> {
        match self.weights.get(weight).map(|w| w.shape.as_slice()) {
            Some(&[_, half, 2]) if half.checked_mul(2) == Some(head_dim) => Ok(()),
            _ => Err(format!("weight {weight} of {} must be a [context, {head_dim}/2, 2] table", self.op.name())),
        }
    }

    fn rope(&self, head_dim: u32) -> Inferred {
        self.count(1, 1)?;
        self.table(0, head_dim)?;
        let x = self.rows(0)?;
        if head_dim == 0 || x.width % head_dim != 0 {
            return Err(format!("width {} of rope's operand is not a multiple of the head width {head_dim}", x.width));
        }
        Ok(vec![x.ty()])
    }

    fn kv_append(&self, layer: u32) -> Inferred {
        self.count(2, 0)?;
        let (k, v) = (self.rows(0)?, self.rows(1)?);
        self.same("width of v", v.width, k.width)?;
        Ok(vec![Type::Cache { layer }])
    }

    fn rope_append(&self, layer: u32, q: u32, kv: u32, head_dim: u32) -> Inferred {
        self.count(1, 1)?;
        self.table(0, head_dim)?;
        let x = self.rows(0)?;
        let heads = kv.saturating_mul(2).saturating_add(q);
        self.same("width of qkv", x.width, heads.saturating_mul(head_dim))?;
        Ok(vec![Rows { width: q.saturating_mul(head_dim), ..x }.ty(), Type::Cache { layer }])
    }

    fn attend(&self, q: u32, kv: u32, head_dim: u32) -> Inferred {
        self.count(2, 0)?;
        let x = self.rows(0)?;
        self.same("width of q", x.width, q.saturating_mul(head_dim))?;
        if kv == 0 || q % kv != 0 {
            return Err(format!("attend has {q} query heads, not a multiple of {kv} key/value heads"));
        }
        match self.operands.get(1) {
            Some(Type::Cache { .. }) => Ok(vec![x.ty()]),
            other => Err(format!("operand 1 of attend must be a cache, is {other:?}")),
        }
    }

    fn pair(&self) -> Inferred {
        self.count(2, 0)?;
        let (a, b) = (self.rows(0)?.ty(), self.rows(1)?.ty());
        if a == b { Ok(vec![a]) } else { Err(format!("operands of {} differ: {a} and {b}", self.op.name())) }
    }

    fn take_rows(&self) -> Inferred {
        self.count(1, 0)?;
        let x = self.rows(0)?;
        match x.axis {
            Axis::Tokens => Ok(vec![Rows { axis: Axis::Rows, ..x }.ty()]),
            Axis::Rows => Err("take_rows takes a [tokens, …] operand".to_owned()),
        }
    }

    fn logits(&self) -> Inferred {
        self.count(1, 1)?;
        let (vocab, k) = self.matrix(0)?;
        let x = self.rows(0)?;
        self.same("width of x", x.width, k)?;
        Ok(vec![Rows { width: vocab, dtype: DType::F32, ..x }.ty()])
    }

    fn sample(&self, vocab_known: u32) -> Inferred {
        self.count(1, 0)?;
        let x = self.rows(0)?;
        if x.dtype != DType::F32 || vocab_known > x.width {
            return Err(format!("sample takes f32 logits of at least {vocab_known} ids, found {}", x.ty()));
        }
        Ok(vec![Type::Ids])
    }
}
