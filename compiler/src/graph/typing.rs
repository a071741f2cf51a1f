//! The typing rule of each operator: result types from operand types and weights, or the mismatch in words.

use super::op::{Axis, Op, Type, Weight};
use oxide_bundle::contract::Activation;
use oxide_bundle::dtype::DType;

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

/// Operands and weights of one application, to be checked against its operator's rule.
pub(super) struct Typing<'a> {
    op: &'a Op,
    operands: &'a [Type],
    weights: &'a [&'a Weight],
}

/// Result types, or the mismatch in words.
type Inferred = Result<Vec<Type>, String>;

impl<'a> Typing<'a> {
    pub(super) fn new(op: &'a Op, operands: &'a [Type], weights: &'a [&'a Weight]) -> Self {
        Self { op, operands, weights }
    }

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

    pub(super) fn embed(&self, dtype: DType) -> Inferred {
        self.count(0, 1)?;
        let (_, width) = self.matrix(0)?;
        Ok(vec![Rows { axis: Axis::Tokens, width, dtype }.ty()])
    }

    pub(super) fn norm(&self) -> Inferred {
        self.count(1, 1)?;
        let x = self.rows(0)?;
        self.shape(0, &[x.width])?;
        Ok(vec![x.ty()])
    }

    pub(super) fn linear(&self, act: Activation, residual: bool) -> Inferred {
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

    pub(super) fn slice(&self, offset: u32, width: u32) -> Inferred {
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

    pub(super) fn rope(&self, head_dim: u32) -> Inferred {
        self.count(1, 1)?;
        self.table(0, head_dim)?;
        let x = self.rows(0)?;
        if head_dim == 0 || !x.width.is_multiple_of(head_dim) {
            return Err(format!("width {} of rope's operand is not a multiple of the head width {head_dim}", x.width));
        }
        Ok(vec![x.ty()])
    }

    pub(super) fn kv_append(&self, layer: u32) -> Inferred {
        self.count(2, 0)?;
        let (k, v) = (self.rows(0)?, self.rows(1)?);
        self.same("width of v", v.width, k.width)?;
        Ok(vec![Type::Cache { layer }])
    }

    pub(super) fn rope_append(&self, layer: u32, q: u32, kv: u32, head_dim: u32) -> Inferred {
        self.count(1, 1)?;
        self.table(0, head_dim)?;
        let x = self.rows(0)?;
        let heads = kv.saturating_mul(2).saturating_add(q);
        self.same("width of qkv", x.width, heads.saturating_mul(head_dim))?;
        Ok(vec![Rows { width: q.saturating_mul(head_dim), ..x }.ty(), Type::Cache { layer }])
    }

    pub(super) fn attend(&self, q: u32, kv: u32, head_dim: u32) -> Inferred {
        self.count(2, 0)?;
        let x = self.rows(0)?;
        self.same("width of q", x.width, q.saturating_mul(head_dim))?;
        if kv == 0 || !q.is_multiple_of(kv) {
            return Err(format!("attend has {q} query heads, not a multiple of {kv} key/value heads"));
        }
        match self.operands.get(1) {
            Some(Type::Cache { .. }) => Ok(vec![x.ty()]),
            other => Err(format!("operand 1 of attend must be a cache, is {other:?}")),
        }
    }

    pub(super) fn pair(&self) -> Inferred {
        self.count(2, 0)?;
        let (a, b) = (self.rows(0)?.ty(), self.rows(1)?.ty());
        if a == b { Ok(vec![a]) } else { Err(format!("operands of {} differ: {a} and {b}", self.op.name())) }
    }

    pub(super) fn take_rows(&self) -> Inferred {
        self.count(1, 0)?;
        let x = self.rows(0)?;
        match x.axis {
            Axis::Tokens => Ok(vec![Rows { axis: Axis::Rows, ..x }.ty()]),
            Axis::Rows => Err("take_rows takes a [tokens, …] operand".to_owned()),
        }
    }

    pub(super) fn logits(&self) -> Inferred {
        self.count(1, 1)?;
        let (vocab, k) = self.matrix(0)?;
        let x = self.rows(0)?;
        self.same("width of x", x.width, k)?;
        Ok(vec![Rows { width: vocab, dtype: DType::F32, ..x }.ty()])
    }

    pub(super) fn sample(&self, vocab_known: u32) -> Inferred {
        self.count(1, 0)?;
        let x = self.rows(0)?;
        if x.dtype != DType::F32 || vocab_known > x.width {
            return Err(format!("sample takes f32 logits of at least {vocab_known} ids, found {}", x.ty()));
        }
        Ok(vec![Type::Ids])
    }
}
