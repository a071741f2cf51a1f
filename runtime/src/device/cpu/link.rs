//! Link: resolves the steps of a plan into launches whose operands are ranges of memory.
//!
//! Everything that can be wrong with a step is found here, so that running one only adds the sizes of
//! the batch. **Invariant:** the arena ranges of one launch, at the entry's bounds, are inside the arena
//! and disjoint, but for the pairs that a contract lets be one buffer.

use super::kernels::attend::ROW_HEADS_MAX;
use super::kernels::rope::HEAD_DIM_MAX;
use super::kernels::rows::TableLayout;
use crate::device::DeviceError;
use oxide_bundle::contract::{Activation, Contract, Heads, Linear, Op, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::ids::{BufferId, EntryId, KernelId, StepId, WeightId};
use oxide_bundle::plan::{BatchClass, Bindings, Extent, Operand, Plan, RowOrder, Step, Sym, Value, WeightDecl, WeightLayout};
use std::ops::Range;

/// Name of the device in errors.
pub(crate) const DEVICE: &str = "cpu";

/// Rows of a `[rows, width]` f32 buffer of the arena; offsets count elements.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    start: usize,
    width: usize,
    axis: Sym,
    buffer: BufferId,
}

impl Region {
    /// Rows under `bindings`.
    pub(crate) fn rows(&self, bindings: Bindings) -> usize {
        let rows = match self.axis {
            Sym::Tokens => bindings.tokens,
            Sym::Seqs => bindings.seqs,
            Sym::Rows => bindings.rows,
            Sym::KvPages => bindings.kv_pages,
        };
        rows as usize
    }

    /// Elements under `bindings`.
    pub(crate) fn range(&self, bindings: Bindings) -> Range<usize> {
        self.start..self.start + self.rows(bindings) * self.width
    }
}

/// Bytes of the weight section.
pub(crate) type WeightRange = Range<usize>;

/// Where the residual of a projection is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ResidualAt {
    /// Nowhere.
    None,
    /// In the output.
    InPlace,
    /// In another buffer.
    Separate(Region),
}

/// A step, ready to run.
#[derive(Clone, Debug)]
pub(crate) enum Launch {
    Embed { table: WeightRange, layout: TableLayout, out: Region },
    RmsNorm { dim: usize, eps: f32, x: Region, weight: WeightRange, out: Region },
    AddRmsNorm { dim: usize, eps: f32, x: Region, residual: Region, weight: WeightRange, out: Region },
    QkNorm { heads: Heads, eps: f32, weight: WeightRange, qkv: Region },
    Linear { linear: Linear, x: Region, weight: WeightRange, bias: Option<WeightRange>, residual: ResidualAt, out: Region },
    RopeAppend { heads: Heads, x: Region, table: WeightRange, planes: [u32; 2], out: Region },
    Attend { heads: Heads, x: Region, planes: [u32; 2], out: Region },
    TakeRows { dim: usize, x: Region, out: Region },
    Sample { vocab: usize, vocab_known: usize, logits: Region },
    Copy { from: usize, to: usize, bytes: Extent },
}

/// What a plan asks of the device, beside its launches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    /// Launches by entry.
    pub(crate) entries: Vec<Vec<Launch>>,
    /// Positions that every rotary table has; `usize::MAX` without one.
    pub(crate) positions: usize,
    /// Rows of the embedding.
    pub(crate) vocab: usize,
    /// Shapes that attention occurs with.
    pub(crate) attend: Vec<Heads>,
    /// Longest logits row that is sampled.
    pub(crate) sample_vocab: usize,
    /// Widest input of a projection.
    pub(crate) linear_k: usize,
}

/// Whether the cpu device has code for `contract`.
///
/// The table is closed: f32 activations and outputs, bf16 weights, an f32 or bf16 cache, projections
/// without a norm in front.
pub fn supports(contract: &Contract) -> bool {
    let Contract { op, act, weight, kv, out } = *contract;
    let types = act == DType::F32 && weight == DType::Bf16 && matches!(kv, DType::F32 | DType::Bf16) && out == DType::F32;
    types
        && match op {
            Op::Embed { dim, .. } => dim % 2 == 0,
            Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::TakeRows { .. } => true,
            Op::Sample { vocab, vocab_known } => vocab_known <= vocab,
            Op::QkNorm { heads, .. } | Op::RopeAppend { heads } => heads_fit(heads),
            Op::Attend { heads, .. } => heads_fit(heads) && heads.dim % 16 == 0 && (heads.q / heads.kv) as usize <= ROW_HEADS_MAX,
            Op::Linear(linear) => linear_fits(linear),
            Op::QkvRopeAppend { .. } => false,
        }
}

fn heads_fit(heads: Heads) -> bool {
    let Heads { q, kv, dim, page_tokens } = heads;
    kv > 0 && q % kv == 0 && dim % 2 == 0 && dim > 0 && dim as usize <= HEAD_DIM_MAX && page_tokens > 0
}

fn linear_fits(linear: Linear) -> bool {
    let Linear { n, k, norm, bias: _, act, residual: _ } = linear;
    let rows = match act {
        Activation::None => true,
        Activation::SwiGlu => n % 32 == 0,
    };
    n > 0 && k > 0 && k % 2 == 0 && norm.is_none() && rows
}

/// Links every step of `plan` against a weight section of `weight_bytes` bytes.
///
/// # Errors
/// For the first contract without code, and the first step whose operands do not fit.
pub(crate) fn link(plan: &Plan, weight_bytes: usize) -> Result<Program, DeviceError> {
    for kernel in plan.kernels() {
        if !supports(&kernel.contract) {
            return Err(DeviceError::MissingKernel { contract: kernel.contract.to_string(), device: DEVICE });
        }
    }
    let mut program = Program { positions: usize::MAX, ..Program::default() };
    for (entry, decl) in (0..).map(EntryId).zip(plan.entries()) {
        let mut launches = Vec::with_capacity(decl.steps.len());
        for (step, wire) in (0..).map(StepId).zip(&decl.steps) {
            let linker = Linker { plan, weight_bytes, class: decl.class };
            let launch = linker.step(wire).map_err(|reason| bad_launch(plan, entry, step, wire, reason))?;
            program.note(plan, wire, &launch);
            launches.push(launch);
        }
        program.entries.push(launches);
    }
    Ok(program)
}

fn bad_launch(plan: &Plan, entry: EntryId, step: StepId, wire: &Step, reason: String) -> DeviceError {
    let kernel = match wire {
        Step::Launch { kernel, .. } => plan.kernels().get(kernel.index()).map_or_else(|| kernel.to_string(), |k| k.contract.to_string()),
        Step::Copy { .. } => "copy".to_owned(),
    };
    DeviceError::BadLaunch { entry: entry.to_string(), step: step.to_string(), kernel, reason }
}

impl Program {
    fn note(&mut self, plan: &Plan, wire: &Step, launch: &Launch) {
        match launch {
            Launch::RopeAppend { heads, table, .. } => self.positions = self.positions.min(table.len() / (heads.dim as usize * 4)),
            Launch::Attend { heads, .. } => {
                if !self.attend.contains(heads) {
                    self.attend.push(*heads);
                }
            }
            Launch::Linear { linear, .. } => self.linear_k = self.linear_k.max(linear.k as usize),
            Launch::Sample { vocab, .. } => self.sample_vocab = self.sample_vocab.max(*vocab),
            Launch::Embed { .. } => {
                if let Step::Launch { kernel, .. } = wire
                    && let Some(Op::Embed { vocab, .. }) = plan.kernels().get(kernel.index()).map(|kernel| kernel.contract.op)
                {
                    self.vocab = vocab as usize;
                }
            }
            Launch::RmsNorm { .. } | Launch::AddRmsNorm { .. } | Launch::QkNorm { .. } | Launch::TakeRows { .. } | Launch::Copy { .. } => {}
        }
    }
}

struct Linker<'a> {
    plan: &'a Plan,
    weight_bytes: usize,
    class: BatchClass,
}

type Linked<T> = Result<T, String>;

impl Linker<'_> {
    fn step(&self, wire: &Step) -> Linked<Launch> {
        match wire {
            Step::Launch { kernel, grid: _, operands } => self.launch(*kernel, &Operands { linker: self, operands }),
            Step::Copy { from, to, bytes } => self.copy(*from, *to, *bytes),
        }
    }

    fn launch(&self, kernel: KernelId, operands: &Operands<'_>) -> Linked<Launch> {
        let contract = self.plan.kernels().get(kernel.index()).ok_or_else(|| format!("the plan has no kernel {kernel}"))?.contract;
        match contract.op {
            Op::Embed { vocab, dim } => operands.embed(vocab, dim),
            Op::RmsNorm { dim, eps } => operands.rms_norm(dim, eps.get()),
            Op::AddRmsNorm { dim, eps } => operands.add_rms_norm(dim, eps.get()),
            Op::QkNorm { heads, eps } => operands.qk_norm(heads, eps.get()),
            Op::Linear(linear) => operands.linear(linear),
            Op::RopeAppend { heads } => operands.rope_append(heads),
            Op::Attend { heads, .. } => operands.attend(heads),
            Op::TakeRows { dim } => operands.take_rows(dim),
            Op::Sample { vocab, vocab_known } => operands.sample(vocab, vocab_known),
            Op::QkvRopeAppend { .. } => Err("has no code on the cpu device".to_owned()),
        }
    }

    fn bindings_max(&self) -> Bindings {
        Bindings { tokens: self.class.tokens_max(), seqs: self.class.seqs_max(), rows: self.class.seqs_max(), kv_pages: 0 }
    }

    fn copy(&self, from: BufferId, to: BufferId, bytes: Extent) -> Linked<Launch> {
        let count = bytes.eval(self.bindings_max()).ok_or("divides by 0")? as usize;
        if !count.is_multiple_of(4) {
            return Err(format!("copies {count} bytes, not a multiple of 4"));
        }
        let start = |id: BufferId| {
            let decl = self.plan.buffers().get(id.index()).ok_or_else(|| format!("the plan has no buffer {id}"))?;
            let end = decl.offset_bytes.checked_add(decl.size_bytes).filter(|end| *end <= self.plan.arena_bytes());
            end.ok_or_else(|| format!("buffer {id} ends beyond the arena"))?;
            if count as u64 > decl.size_bytes {
                return Err(format!("copies {count} bytes, buffer {id} has {}", decl.size_bytes));
            }
            Ok((decl.offset_bytes / 4) as usize)
        };
        Ok(Launch::Copy { from: start(from)?, to: start(to)?, bytes })
    }

    /// The region of a buffer with rows of `width` elements.
    fn region(&self, role: Role, id: BufferId, width: u32) -> Linked<Region> {
        let decl = self.plan.buffers().get(id.index()).ok_or_else(|| format!("the plan has no buffer {id}"))?;
        if decl.dtype != DType::F32 {
            return Err(format!("{role:?} is {id} of {}, the cpu device computes in f32", decl.dtype));
        }
        let Extent { sym: Some(axis @ (Sym::Tokens | Sym::Seqs | Sym::Rows)), mul, div: 1 } = decl.elements else {
            return Err(format!("{role:?} is {id}, which has no rows by tokens, sequences or logit rows"));
        };
        if mul != width {
            return Err(format!("{role:?} is {id} with rows of {mul}, the contract's have {width}"));
        }
        let region = Region { start: (decl.offset_bytes / 4) as usize, width: width as usize, axis, buffer: id };
        let needed = region.rows(self.bindings_max()) as u64 * u64::from(width) * 4;
        let end = decl.offset_bytes.checked_add(needed);
        if !decl.offset_bytes.is_multiple_of(4) || end.is_none_or(|end| end > self.plan.arena_bytes()) || needed > decl.size_bytes {
            return Err(format!("{role:?} is {id} with {} bytes at {}, {needed} are used", decl.size_bytes, decl.offset_bytes));
        }
        Ok(region)
    }

    /// Refuses regions that share bytes at the entry's bounds.
    fn disjoint(&self, regions: &[(Role, Region)]) -> Linked<()> {
        let bounds = self.bindings_max();
        for (i, (role, region)) in regions.iter().enumerate() {
            for (other_role, other) in &regions[..i] {
                let (a, b) = (region.range(bounds), other.range(bounds));
                if a.start < b.end && b.start < a.end {
                    return Err(format!("{role:?} ({}) overlaps {other_role:?} ({})", region.buffer, other.buffer));
                }
            }
        }
        Ok(())
    }
}

/// The operands of one step.
struct Operands<'a> {
    linker: &'a Linker<'a>,
    operands: &'a [Operand],
}

impl Operands<'_> {
    fn find(&self, role: Role) -> Option<Value> {
        self.operands.iter().find(|operand| operand.role == role).map(|operand| operand.value)
    }

    fn region(&self, role: Role, width: u32) -> Linked<Region> {
        match self.find(role) {
            Some(Value::Buffer(id)) => self.linker.region(role, id, width),
            Some(other) => Err(format!("{role:?} is {other:?}, not a buffer")),
            None => Err(format!("{role:?} is missing")),
        }
    }

    fn decl(&self, role: Role) -> Linked<&WeightDecl> {
        let id: WeightId = match self.find(role) {
            Some(Value::Weight(id)) => id,
            Some(other) => return Err(format!("{role:?} is {other:?}, not a weight")),
            None => return Err(format!("{role:?} is missing")),
        };
        self.linker.plan.weights().get(id.index()).ok_or_else(|| format!("the plan has no weight {id}"))
    }

    fn weight(&self, role: Role, dtype: DType, elements: u64) -> Linked<WeightRange> {
        let decl = self.decl(role)?;
        let needed = elements * dtype.bytes();
        if decl.dtype != dtype || decl.size_bytes < needed {
            let (found, size) = (decl.dtype, decl.size_bytes);
            return Err(format!("{role:?} is `{}`, {size} bytes of {found}, the contract's has {needed} of {dtype}", decl.name));
        }
        let end = decl.offset_bytes.checked_add(needed).and_then(|end| usize::try_from(end).ok());
        match end {
            Some(end) if end <= self.linker.weight_bytes && decl.offset_bytes.is_multiple_of(4) => Ok(decl.offset_bytes as usize..end),
            _ => Err(format!("{role:?} is `{}`, which ends beyond the weight section of {} bytes", decl.name, self.linker.weight_bytes)),
        }
    }

    fn vector(&self, role: Role, elements: u32) -> Linked<WeightRange> {
        self.weight(role, DType::Bf16, u64::from(elements))
    }

    fn planes(&self) -> Linked<[u32; 2]> {
        let layers = self.linker.plan.kv().layers;
        let plane = |role| match self.find(role) {
            Some(Value::KPlane(layer)) if role == Role::KPlane && layer < layers => Ok(layer),
            Some(Value::VPlane(layer)) if role == Role::VPlane && layer < layers => Ok(layer),
            Some(other) => Err(format!("{role:?} is {other:?}, the cache has {layers} layers")),
            None => Err(format!("{role:?} is missing")),
        };
        Ok([plane(Role::KPlane)?, plane(Role::VPlane)?])
    }

    fn heads(&self, heads: Heads) -> Linked<()> {
        let kv = self.linker.plan.kv();
        if (heads.kv, heads.dim, heads.page_tokens) == (kv.kv_heads, kv.head_dim, kv.page_tokens) {
            return Ok(());
        }
        Err(format!("{heads} does not fit the cache: kv={} d={} page={}", kv.kv_heads, kv.head_dim, kv.page_tokens))
    }

    fn same_rows(&self, regions: &[(Role, Region)]) -> Linked<()> {
        match regions.split_first() {
            Some(((first_role, first), rest)) => match rest.iter().find(|(_, region)| region.axis != first.axis) {
                Some((role, region)) => Err(format!("{role:?} has rows by {:?}, {first_role:?} by {:?}", region.axis, first.axis)),
                None => self.linker.disjoint(regions),
            },
            None => Ok(()),
        }
    }

    fn embed(&self, vocab: u32, dim: u32) -> Linked<Launch> {
        let (rows, layout) = match self.decl(Role::Weight)?.layout {
            WeightLayout::RowMajor => (vocab, TableLayout::RowMajor),
            WeightLayout::Panel16 => (vocab.next_multiple_of(16), TableLayout::Panel16),
            WeightLayout::PanelK64 => return Err("the cpu device cannot read a table of layout panel_k64".to_owned()),
        };
        let table = self.weight(Role::Weight, DType::Bf16, u64::from(rows) * u64::from(dim))?;
        Ok(Launch::Embed { table, layout, out: self.region(Role::Out, dim)? })
    }

    fn rms_norm(&self, dim: u32, eps: f32) -> Linked<Launch> {
        let (x, out) = (self.region(Role::X, dim)?, self.region(Role::Out, dim)?);
        self.same_rows(&[(Role::X, x), (Role::Out, out)])?;
        Ok(Launch::RmsNorm { dim: dim as usize, eps, x, weight: self.vector(Role::NormWeight, dim)?, out })
    }

    fn add_rms_norm(&self, dim: u32, eps: f32) -> Linked<Launch> {
        let [x, residual, out] = [self.region(Role::X, dim)?, self.region(Role::Residual, dim)?, self.region(Role::Out, dim)?];
        self.same_rows(&[(Role::X, x), (Role::Residual, residual), (Role::Out, out)])?;
        Ok(Launch::AddRmsNorm { dim: dim as usize, eps, x, residual, weight: self.vector(Role::NormWeight, dim)?, out })
    }

    fn qk_norm(&self, heads: Heads, eps: f32) -> Linked<Launch> {
        let qkv = self.region(Role::X, heads.qkv_width())?;
        if let Some(out) = self.find(Role::Out)
            && out != Value::Buffer(qkv.buffer)
        {
            return Err("Out is not X, which is updated in place".to_owned());
        }
        Ok(Launch::QkNorm { heads, eps, weight: self.vector(Role::NormWeight, 2 * heads.dim)?, qkv })
    }

    fn linear(&self, linear: Linear) -> Linked<Launch> {
        let decl = self.decl(Role::Weight)?;
        let order_fits = match linear.act {
            Activation::None => decl.rows == RowOrder::Concat,
            Activation::SwiGlu => decl.rows == RowOrder::Interleave(16),
        };
        if decl.layout != WeightLayout::Panel16 || !order_fits {
            return Err(format!(
                "weight `{}` has layout {:?} and rows {:?}, which the cpu device does not read",
                decl.name, decl.layout, decl.rows
            ));
        }
        let weight = self.weight(Role::Weight, DType::Bf16, u64::from(linear.n).next_multiple_of(16) * u64::from(linear.k))?;
        let bias = if linear.bias { Some(self.vector(Role::Bias, linear.n)?) } else { None };
        let (x, out) = (self.region(Role::X, linear.k)?, self.region(Role::Out, linear.out_width())?);
        let mut regions = vec![(Role::X, x), (Role::Out, out)];
        let residual = match linear.residual {
            false => ResidualAt::None,
            true if self.find(Role::Residual) == Some(Value::Buffer(out.buffer)) => ResidualAt::InPlace,
            true => {
                let residual = self.region(Role::Residual, linear.out_width())?;
                regions.push((Role::Residual, residual));
                ResidualAt::Separate(residual)
            }
        };
        self.same_rows(&regions)?;
        Ok(Launch::Linear { linear, x, weight, bias, residual, out })
    }

    fn rope_append(&self, heads: Heads) -> Linked<Launch> {
        self.heads(heads)?;
        let (x, out) = (self.region(Role::X, heads.qkv_width())?, self.region(Role::Out, heads.q * heads.dim)?);
        self.same_rows(&[(Role::X, x), (Role::Out, out)])?;
        let context = self.decl(Role::RopeTable)?.shape.first().copied().unwrap_or_default();
        let table = self.weight(Role::RopeTable, DType::F32, u64::from(context) * u64::from(heads.dim))?;
        Ok(Launch::RopeAppend { heads, x, table, planes: self.planes()?, out })
    }

    fn attend(&self, heads: Heads) -> Linked<Launch> {
        self.heads(heads)?;
        let width = heads.q * heads.dim;
        let (x, out) = (self.region(Role::X, width)?, self.region(Role::Out, width)?);
        self.same_rows(&[(Role::X, x), (Role::Out, out)])?;
        Ok(Launch::Attend { heads, x, planes: self.planes()?, out })
    }

    fn take_rows(&self, dim: u32) -> Linked<Launch> {
        let (x, out) = (self.region(Role::X, dim)?, self.region(Role::Out, dim)?);
        self.linker.disjoint(&[(Role::X, x), (Role::Out, out)])?;
        if out.axis != Sym::Rows {
            return Err(format!("Out has rows by {:?}, not by logit rows", out.axis));
        }
        Ok(Launch::TakeRows { dim: dim as usize, x, out })
    }

    fn sample(&self, vocab: u32, vocab_known: u32) -> Linked<Launch> {
        let logits = self.region(Role::X, vocab)?;
        if logits.axis != Sym::Rows {
            return Err(format!("X has rows by {:?}, not by logit rows", logits.axis));
        }
        Ok(Launch::Sample { vocab: vocab as usize, vocab_known: vocab_known as usize, logits })
    }
}
