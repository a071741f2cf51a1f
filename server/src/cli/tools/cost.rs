//! What a step moves and computes at the bound of its class. Arithmetic on the plan; nothing is measured.

use oxide_bundle::contract::{Linear, Op, Role};
use oxide_bundle::plan::{BatchClass, Bindings, EntryDecl, KvGeometry, Operand, Plan, Step, Sym, Value};

/// Bytes and floating-point operations.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// Weights read.
    pub(super) weight_bytes: u64,
    /// KV cache read and written.
    pub(super) kv_bytes: u64,
    /// Buffers of the arena read and written.
    pub(super) arena_bytes: u64,
    /// Additions and multiplications.
    pub(super) flops: u64,
}

impl Cost {
    /// Everything moved.
    pub(super) fn bytes(self) -> u64 {
        self.weight_bytes + self.kv_bytes + self.arena_bytes
    }
}

impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            weight_bytes: self.weight_bytes.saturating_add(other.weight_bytes),
            kv_bytes: self.kv_bytes.saturating_add(other.kv_bytes),
            arena_bytes: self.arena_bytes.saturating_add(other.arena_bytes),
            flops: self.flops.saturating_add(other.flops),
        }
    }
}

/// Values of the symbols at the bound of a class; the KV pool does not matter here.
pub(super) fn bindings(class: BatchClass) -> Bindings {
    Bindings { tokens: class.tokens_max(), seqs: class.seqs_max(), rows: class.seqs_max(), kv_pages: 0 }
}

/// Cost of a step of a class, every sequence being `context` tokens long.
pub(super) fn step(plan: &Plan, class: BatchClass, context: u32, step: &Step) -> Cost {
    match step {
        Step::Copy { bytes, .. } => Cost { arena_bytes: 2 * u64::from(bytes.eval(bindings(class)).unwrap_or(0)), ..Cost::default() },
        Step::Launch { kernel, operands, .. } => {
            let Some(kernel) = plan.kernels().get(kernel.index()) else { return Cost::default() };
            let op = &kernel.contract.op;
            Cost {
                weight_bytes: operands.iter().map(|operand| weight_bytes(plan, class, op, operand)).sum(),
                kv_bytes: kv_bytes(plan.kv(), class, context, op),
                arena_bytes: operands.iter().map(|operand| arena_bytes(plan, class, operand)).sum(),
                flops: flops(class, context, op, rows(plan, class, operands)),
            }
        }
    }
}

/// Cost of a whole entry.
pub(super) fn entry(plan: &Plan, entry: &EntryDecl, context: u32) -> Cost {
    entry.steps.iter().map(|found| step(plan, entry.class, context, found)).fold(Cost::default(), |sum, cost| sum + cost)
}

/// A gather reads one row a token; everything else reads the tensor whole.
fn weight_bytes(plan: &Plan, class: BatchClass, op: &Op, operand: &Operand) -> u64 {
    let Value::Weight(id) = operand.value else { return 0 };
    let Some(weight) = plan.weights().get(id.index()) else { return 0 };
    let tokens = u64::from(class.tokens_max());
    let row_bytes = weight.shape.iter().skip(1).map(|dim| u64::from(*dim)).product::<u64>() * weight.dtype.bytes();
    match (op, operand.role) {
        (Op::Embed { .. }, Role::Weight) | (_, Role::RopeTable) => (row_bytes * tokens).min(weight.size_bytes),
        _ => weight.size_bytes,
    }
}

fn kv_bytes(kv: &KvGeometry, class: BatchClass, context: u32, op: &Op) -> u64 {
    let (tokens, seqs) = (u64::from(class.tokens_max()), u64::from(class.seqs_max()));
    let layer_token_bytes = 2 * u64::from(kv.kv_heads) * u64::from(kv.head_dim) * kv.dtype.bytes();
    match op {
        Op::RopeAppend { .. } | Op::QkvRopeAppend { .. } => layer_token_bytes * tokens,
        Op::Attend { .. } => layer_token_bytes * u64::from(context) * seqs,
        Op::Embed { .. } | Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::QkNorm { .. } => 0,
        Op::Linear(_) | Op::TakeRows { .. } | Op::Sample { .. } => 0,
    }
}

fn arena_bytes(plan: &Plan, class: BatchClass, operand: &Operand) -> u64 {
    let Value::Buffer(id) = operand.value else { return 0 };
    let buffer = plan.buffers().get(id.index());
    buffer.map_or(0, |buffer| u64::from(buffer.elements.eval(bindings(class)).unwrap_or(0)) * buffer.dtype.bytes())
}

/// Rows that a launch computes: logit rows if its output is sized by them, else tokens.
fn rows(plan: &Plan, class: BatchClass, operands: &[Operand]) -> u64 {
    let sized_by = |operand: &Operand| match operand.value {
        Value::Buffer(id) if operand.role == Role::Out => plan.buffers().get(id.index()).and_then(|buffer| buffer.elements.sym),
        _ => None,
    };
    let by_rows = operands.iter().any(|operand| sized_by(operand) == Some(Sym::Rows));
    if by_rows { class.seqs_max().into() } else { class.tokens_max().into() }
}

fn flops(class: BatchClass, context: u32, op: &Op, rows: u64) -> u64 {
    let (tokens, seqs) = (u64::from(class.tokens_max()), u64::from(class.seqs_max()));
    let linear = |linear: &Linear| 2 * u64::from(linear.n) * u64::from(linear.k) * rows;
    match op {
        Op::Linear(found) | Op::QkvRopeAppend { linear: found, .. } => linear(found),
        Op::Attend { heads, .. } => 4 * u64::from(heads.q) * u64::from(heads.dim) * u64::from(context) * tokens,
        Op::RmsNorm { dim, .. } => 4 * u64::from(*dim) * rows,
        Op::AddRmsNorm { dim, .. } => 5 * u64::from(*dim) * rows,
        Op::QkNorm { heads, .. } => 4 * u64::from((heads.q + heads.kv) * heads.dim) * tokens,
        Op::RopeAppend { heads } => 3 * u64::from((heads.q + heads.kv) * heads.dim) * tokens,
        Op::Sample { vocab, .. } => 4 * u64::from(*vocab) * seqs,
        Op::Embed { .. } | Op::TakeRows { .. } => 0,
    }
}
