//! The plan: where everything lives and what runs, per batch class. The only serialised representation.
//!
//! [`RawPlan`] is decoded and not believed. [`Plan`] is verified; `Plan::verify` is the only door.

use crate::contract::{Contract, Role};
use crate::dtype::DType;
use crate::ids::{ArtifactId, BufferId, EntryId, KernelId, WeightId};
use crate::step::{InputSlot, OutputSlot, StepBounds};
use serde::{Deserialize, Serialize};

/// Version of the plan encoding that this build writes and reads.
pub const PLAN_VERSION: u32 = 1;

/// A symbol bounded by an entry (or, for pages, by the KV pool made at start).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sym {
    /// Tokens of the step.
    Tokens,
    /// Sequences of the step.
    Seqs,
    /// Logit rows of the step.
    Rows,
    /// Pages of the KV pool.
    KvPages,
}

/// Values of the symbols for one step.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Bindings {
    /// Tokens of the step.
    pub tokens: u32,
    /// Sequences of the step.
    pub seqs: u32,
    /// Logit rows of the step.
    pub rows: u32,
    /// Pages of the KV pool.
    pub kv_pages: u32,
}

/// `ceil(sym · mul / div)`, or `ceil(mul / div)` without a symbol. Flat on purpose.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// The symbol, if any.
    pub sym: Option<Sym>,
    /// Multiplier.
    pub mul: u32,
    /// Divisor, not 0 (checked by the verifier).
    pub div: u32,
}

impl Extent {
    /// A constant.
    pub const fn lit(n: u32) -> Self {
        Self { sym: None, mul: n, div: 1 }
    }

    /// `sym · mul`.
    pub const fn sym(sym: Sym, mul: u32) -> Self {
        Self { sym: Some(sym), mul, div: 1 }
    }

    /// The value under `bindings`; saturates at `u32::MAX`, `None` if `div` is 0.
    pub fn eval(self, bindings: Bindings) -> Option<u32> {
        let sym = match self.sym {
            None => 1,
            Some(Sym::Tokens) => bindings.tokens,
            Some(Sym::Seqs) => bindings.seqs,
            Some(Sym::Rows) => bindings.rows,
            Some(Sym::KvPages) => bindings.kv_pages,
        };
        if self.div == 0 {
            return None;
        }
        let value = (u64::from(sym) * u64::from(self.mul)).div_ceil(u64::from(self.div));
        Some(u32::try_from(value).unwrap_or(u32::MAX))
    }
}

/// How a batch may look in one entry.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BatchClass {
    /// One token a sequence, up to `seqs`.
    Decode {
        /// Bound of the class.
        seqs: u32,
    },
    /// Prefill chunks and decode rows together.
    Mixed {
        /// Bound on tokens, all sequences together.
        tokens: u32,
        /// Bound on sequences.
        seqs: u32,
    },
}

impl BatchClass {
    /// Largest number of tokens.
    pub const fn tokens_max(self) -> u32 {
        match self {
            Self::Decode { seqs } => seqs,
            Self::Mixed { tokens, .. } => tokens,
        }
    }

    /// Largest number of sequences (and of logit rows).
    pub const fn seqs_max(self) -> u32 {
        match self {
            Self::Decode { seqs } | Self::Mixed { seqs, .. } => seqs,
        }
    }
}

/// How the elements of a weight are laid out in the file, and so on the device.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// `[n][k]`, or a vector.
    RowMajor,
    /// cpu: `[ceil(n/16)][k/2][16][2]`: sixteen rows side by side, pairs of k together, as one
    /// `vdpbf16ps` operand; missing rows are zero. `k` is even.
    Panel16,
    /// sm90: `[k/64][n][64]`: a tile of any height is one contiguous TMA box. `k % 64 == 0`.
    PanelK64,
}

/// Order of a fused weight's rows.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowOrder {
    /// Sources one after the other.
    Concat,
    /// Two sources of equal height in alternating groups of this many rows (gate and up).
    Interleave(u32),
    /// `[q | k | v]` whose q and k heads are permuted so that rotary partners `(i, i + d/2)` are
    /// neighbours: rows `0, d/2, 1, d/2 + 1, …` of each head; v keeps its order.
    RotaryPairs,
}

/// A tensor of the weight section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightDecl {
    /// Name after fusion: `layers.3.qkv`.
    pub name: String,
    /// Tensors of the checkpoint that it was made from, in order. Empty for computed tables.
    pub sources: Vec<String>,
    /// Element type.
    pub dtype: DType,
    /// Logical shape: `[n]` or `[n, k]` (rope table: `[context, head_dim/2, 2]`).
    pub shape: Vec<u32>,
    /// Layout of the elements.
    pub layout: WeightLayout,
    /// Order of the rows.
    pub rows: RowOrder,
    /// Offset in the weight section; a multiple of 256.
    pub offset_bytes: u64,
    /// Size in the weight section, padding rows included.
    pub size_bytes: u64,
}

impl WeightDecl {
    /// Bytes that shape, type and layout ask for; `None` if the shape is empty, has a zero or overflows.
    pub fn expected_bytes(&self) -> Option<u64> {
        let rows = u64::from(*self.shape.first()?);
        let rows = match self.layout {
            WeightLayout::Panel16 => rows.next_multiple_of(16),
            WeightLayout::RowMajor | WeightLayout::PanelK64 => rows,
        };
        let rest = self.shape.iter().skip(1).map(|dim| u64::from(*dim));
        let bytes = rest.chain([self.dtype.bytes()]).try_fold(rows, u64::checked_mul)?;
        (bytes != 0).then_some(bytes)
    }
}

/// Whether a buffer shares the arena.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferKind {
    /// Lives from its first writer to its last reader inside one entry; may overlap others that are dead.
    Scratch,
    /// Zeroed once at start, kept between steps, overlaps nothing.
    State,
}

/// A buffer of the arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BufferDecl {
    /// Name in dumps.
    pub label: String,
    /// Element type.
    pub dtype: DType,
    /// Elements, as a function of the entry's bounds.
    pub elements: Extent,
    /// Sharing.
    pub kind: BufferKind,
    /// Offset in the arena; a multiple of 256.
    pub offset_bytes: u64,
    /// Size for the largest entry that uses the buffer.
    pub size_bytes: u64,
}

impl BufferDecl {
    /// Whether two buffers have a byte in common.
    pub fn shares_bytes(&self, other: &Self) -> bool {
        let end = |buffer: &Self| buffer.offset_bytes.saturating_add(buffer.size_bytes);
        self.size_bytes != 0 && other.size_bytes != 0 && self.offset_bytes < end(other) && other.offset_bytes < end(self)
    }
}

/// A kernel: a contract and, for targets with code objects, which code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelDecl {
    /// What it computes.
    pub contract: Contract,
    /// Code object and symbol; `None` on the cpu target.
    pub code: Option<KernelCode>,
}

/// A function of a sealed code object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelCode {
    /// The code object in the kernel section.
    pub artifact: ArtifactId,
    /// The function's symbol.
    pub symbol: String,
}

/// What an operand refers to.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Value {
    /// A buffer of the arena.
    Buffer(BufferId),
    /// A weight.
    Weight(WeightId),
    /// The key plane of a layer.
    KPlane(u32),
    /// The value plane of a layer.
    VPlane(u32),
    /// A per-step input slot.
    Input(InputSlot),
    /// A per-step output slot.
    Output(OutputSlot),
    /// A scalar.
    Scalar(Extent),
}

/// An operand of a launch: what it is for, and what it is.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operand {
    /// Its role in the contract.
    pub role: Role,
    /// What it refers to.
    pub value: Value,
}

/// One step of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Runs a kernel.
    Launch {
        /// The kernel.
        kernel: KernelId,
        /// Grid; `[1, 1, 1]` on the cpu target, where kernels split their own work.
        grid: [Extent; 3],
        /// Operands, each role once.
        operands: Vec<Operand>,
    },
    /// Copies `bytes` from the start of one buffer to the start of another.
    Copy {
        /// Source.
        from: BufferId,
        /// Destination.
        to: BufferId,
        /// Bytes, as a function of the entry's bounds.
        bytes: Extent,
    },
}

/// The steps of one batch class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EntryDecl {
    /// Its class.
    pub class: BatchClass,
    /// Its steps, in order.
    pub steps: Vec<Step>,
}

/// Geometry of the paged KV cache. A plane is `[pages, page_tokens, kv_heads, head_dim]`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvGeometry {
    /// Layers; each has one K and one V plane.
    pub layers: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Element type.
    pub dtype: DType,
}

impl KvGeometry {
    /// Bytes of one token in all planes.
    pub const fn bytes_per_token(&self) -> u64 {
        2 * self.layers as u64 * self.kv_heads as u64 * self.head_dim as u64 * self.dtype.bytes()
    }

    /// Bytes of one page of one plane.
    pub const fn plane_page_bytes(&self) -> u64 {
        self.page_tokens as u64 * self.kv_heads as u64 * self.head_dim as u64 * self.dtype.bytes()
    }
}

/// Wire form: an allegation. Public fields, no invariants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawPlan {
    /// Encoding version; [`PLAN_VERSION`].
    pub version: u32,
    /// Bounds of the input and output slots.
    pub bounds: StepBounds,
    /// Geometry of the KV cache.
    pub kv: KvGeometry,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Buffers, by [`BufferId`].
    pub buffers: Vec<BufferDecl>,
    /// Weights, by [`WeightId`], ascending by offset.
    pub weights: Vec<WeightDecl>,
    /// Kernels, by [`KernelId`].
    pub kernels: Vec<KernelDecl>,
    /// Entries, by [`EntryId`]: decode classes by rising bound, then mixed classes by rising bound.
    pub entries: Vec<EntryDecl>,
}

/// Verified form: every reference resolves, every bound holds, no live buffers overlap.
/// Made by `Plan::verify` (module `verify`) and nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(crate) raw: RawPlan,
}

impl Plan {
    /// Bounds of the input and output slots.
    pub fn bounds(&self) -> &StepBounds {
        &self.raw.bounds
    }

    /// Geometry of the KV cache.
    pub fn kv(&self) -> &KvGeometry {
        &self.raw.kv
    }

    /// Size of the arena in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.raw.arena_bytes
    }

    /// Buffers, by [`BufferId`].
    pub fn buffers(&self) -> &[BufferDecl] {
        &self.raw.buffers
    }

    /// Weights, by [`WeightId`].
    pub fn weights(&self) -> &[WeightDecl] {
        &self.raw.weights
    }

    /// Kernels, by [`KernelId`].
    pub fn kernels(&self) -> &[KernelDecl] {
        &self.raw.kernels
    }

    /// Entries, by [`EntryId`].
    pub fn entries(&self) -> &[EntryDecl] {
        &self.raw.entries
    }

    /// The smallest entry that takes a batch, or `None` if none does. `decode` says that every
    /// sequence has exactly one token.
    pub fn entry_for(&self, decode: bool, tokens: u32, seqs: u32) -> Option<EntryId> {
        let fits = |class: BatchClass| match class {
            BatchClass::Decode { seqs: max } => decode && seqs <= max,
            BatchClass::Mixed { tokens: tokens_max, seqs: seqs_max } => tokens <= tokens_max && seqs <= seqs_max,
        };
        let mut best: Option<(u32, u32, usize)> = None;
        for (index, entry) in self.raw.entries.iter().enumerate() {
            let key = (entry.class.tokens_max(), entry.class.seqs_max(), index);
            if fits(entry.class) && best.is_none_or(|found| key < found) {
                best = Some(key);
            }
        }
        best.map(|(_, _, index)| EntryId(index as u32))
    }

    /// The wire form.
    pub fn raw(&self) -> &RawPlan {
        &self.raw
    }
}
