//! What each contract asks of its operands.

use crate::contract::{Contract, Linear, Op, Role};
use crate::dtype::DType;

/// The leading dimension of an activation.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// Tokens of the step.
    Tokens,
    /// Logit rows of the step.
    Rows,
    /// Either, the same for every operand of the step.
    Any,
}

/// What an operand must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// A buffer of `axis · width` elements of one of the types.
    Activation {
        /// Leading dimension.
        axis: Axis,
        /// Trailing dimension.
        width: u64,
        /// Types allowed.
        dtypes: Vec<DType>,
    },
    /// A weight of this shape.
    Weight {
        /// Shape.
        shape: Vec<u32>,
        /// Type.
        dtype: DType,
    },
    /// A rope table of at least the maximum context.
    RopeTable {
        /// Half the width of a head.
        half: u32,
    },
    /// The key plane of a layer.
    KPlane,
    /// The value plane of a layer.
    VPlane,
}

/// How a step uses a buffer.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Reads it: a step before wrote it.
    Read,
    /// Writes it, and reads nothing of what was there.
    Write,
}

/// Required operands of a contract. Its dimensions are already checked.
pub(super) fn needs(contract: &Contract) -> Vec<(Role, Need)> {
    let Contract { op, act, weight, kv: _, out } = *contract;
    let activation = |axis, width: u32, dtype| Need::Activation { axis, width: width.into(), dtypes: vec![dtype] };
    let matrix = |shape: &[u32]| Need::Weight { shape: shape.to_vec(), dtype: weight };
    match op {
        Op::Embed { vocab, dim } => vec![(Role::Weight, matrix(&[vocab, dim])), (Role::Out, activation(Axis::Tokens, dim, out))],
        Op::RmsNorm { dim, .. } => vec![
            (Role::X, activation(Axis::Any, dim, act)),
            (Role::NormWeight, matrix(&[dim])),
            (Role::Out, activation(Axis::Any, dim, out)),
        ],
        Op::AddRmsNorm { dim, .. } => vec![
            (Role::X, activation(Axis::Any, dim, act)),
            (Role::Residual, Need::Activation { axis: Axis::Any, width: dim.into(), dtypes: vec![act, out, DType::F32] }),
            (Role::NormWeight, matrix(&[dim])),
            (Role::Out, activation(Axis::Any, dim, out)),
        ],
        Op::QkNorm { heads, .. } => {
            vec![(Role::X, activation(Axis::Tokens, heads.qkv_width(), act)), (Role::NormWeight, matrix(&[2, heads.dim]))]
        }
        Op::Linear(linear) => linear_needs(&linear, contract, Axis::Any, Some(linear.out_width())),
        Op::RopeAppend { heads } => {
            let mut needs = vec![(Role::X, activation(Axis::Tokens, heads.qkv_width(), act))];
            needs.extend(append_needs(heads.dim / 2));
            needs.push((Role::Out, activation(Axis::Tokens, heads.q * heads.dim, out)));
            needs
        }
        Op::QkvRopeAppend { linear, heads } => {
            let mut needs = linear_needs(&linear, contract, Axis::Tokens, None);
            needs.extend(append_needs(heads.dim / 2));
            needs.push((Role::Out, activation(Axis::Tokens, heads.q * heads.dim, out)));
            needs
        }
        Op::Attend { heads, .. } => vec![
            (Role::X, activation(Axis::Tokens, heads.q * heads.dim, act)),
            (Role::KPlane, Need::KPlane),
            (Role::VPlane, Need::VPlane),
            (Role::Out, activation(Axis::Tokens, heads.q * heads.dim, out)),
        ],
        Op::TakeRows { dim } => vec![(Role::X, activation(Axis::Tokens, dim, act)), (Role::Out, activation(Axis::Rows, dim, out))],
        Op::Sample { vocab, .. } => vec![(Role::X, activation(Axis::Rows, vocab, DType::F32))],
    }
}

/// Roles that any step may have beside the required ones, bound to the slot, scalar or scratch that they name.
pub(super) fn is_optional(op: &Op, role: Role) -> bool {
    match role {
        Role::Input(_) | Role::Output(_) | Role::Scalar(_) | Role::Workspace(_) | Role::Counters(_) => true,
        Role::Out => matches!(op, Op::QkNorm { .. }),
        Role::X | Role::Weight | Role::NormWeight | Role::Bias | Role::Residual | Role::RopeTable | Role::KPlane | Role::VPlane => false,
    }
}

/// Roles that may name the buffer that the output is written to.
pub(super) fn may_alias_out(op: &Op, role: Role) -> bool {
    match op {
        Op::Linear(_) => role == Role::Residual,
        Op::QkNorm { .. } => role == Role::X,
        Op::Embed { .. }
        | Op::RmsNorm { .. }
        | Op::AddRmsNorm { .. }
        | Op::RopeAppend { .. }
        | Op::QkvRopeAppend { .. }
        | Op::Attend { .. }
        | Op::TakeRows { .. }
        | Op::Sample { .. } => false,
    }
}

/// How a role uses its buffer first.
pub(super) fn access(role: Role) -> Access {
    match role {
        Role::Out | Role::Workspace(_) | Role::Output(_) => Access::Write,
        Role::X
        | Role::Residual
        | Role::Counters(_)
        | Role::Weight
        | Role::NormWeight
        | Role::Bias
        | Role::RopeTable
        | Role::KPlane
        | Role::VPlane
        | Role::Input(_)
        | Role::Scalar(_) => Access::Read,
    }
}

fn linear_needs(linear: &Linear, contract: &Contract, axis: Axis, out_width: Option<u32>) -> Vec<(Role, Need)> {
    let Linear { n, k, norm, bias, act: _, residual } = *linear;
    let Contract { act, weight, out, .. } = *contract;
    let matrix = |shape: &[u32]| Need::Weight { shape: shape.to_vec(), dtype: weight };
    let mut needs = vec![(Role::X, Need::Activation { axis, width: k.into(), dtypes: vec![act] }), (Role::Weight, matrix(&[n, k]))];
    if norm.is_some() {
        needs.push((Role::NormWeight, matrix(&[k])));
    }
    if bias {
        needs.push((Role::Bias, matrix(&[n])));
    }
    if let Some(width) = out_width {
        if residual {
            needs.push((Role::Residual, Need::Activation { axis, width: width.into(), dtypes: vec![act, out, DType::F32] }));
        }
        needs.push((Role::Out, Need::Activation { axis, width: width.into(), dtypes: vec![out] }));
    }
    needs
}

fn append_needs(half: u32) -> [(Role, Need); 3] {
    [(Role::RopeTable, Need::RopeTable { half }), (Role::KPlane, Need::KPlane), (Role::VPlane, Need::VPlane)]
}
