//! A case: one contract with logical operands, free of any target's layouts.
//!
//! Matrices are row-major in their natural row order; activations have the rows of the step and no
//! others. [`super::lower`] turns a case into the buffers of a target.

use super::values::{self, Style};
use oxide_bundle::contract::{Contract, Heads, Op, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{Bindings, Sym};
use oxide_bundle::step::{NONE, SamplingRow, TOP_LOGPROBS_MAX, row_flags};
use oxide_runtime::device::StepInputs;
use oxide_runtime::device::place::Image;
use oxide_runtime::device::reference::SampleLists;
use std::ops::Range;
use std::sync::Arc;

/// What a case computes, and by whose rules.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Spec {
    /// The contract.
    pub(crate) contract: Contract,
    /// The leading dimension of its activations.
    pub(crate) axis: Sym,
    /// Whether results are held to the sm90 tolerances; else to the cpu's.
    pub(crate) is_sm90: bool,
}

/// A logical operand.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) role: Role,
    pub(crate) width: usize,
    pub(crate) image: Arc<Image>,
}

impl Tensor {
    /// Row `index` as f32.
    pub(crate) fn row(&self, index: usize) -> Vec<f32> {
        values::widen(&self.image, index * self.width, self.width)
    }

    /// All of it as f32.
    pub(crate) fn all(&self) -> Vec<f32> {
        values::widen(&self.image, 0, self.image.len())
    }
}

/// One step of one kernel.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) spec: Spec,
    pub(crate) style: Style,
    pub(crate) sizes: Bindings,
    /// Of the class that buffers are made for.
    pub(crate) bound: Bindings,
    pub(crate) table_stride: u32,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) inputs: StepInputs,
    /// Ids that the step before sampled (embedding).
    pub(crate) previous_ids: Vec<u32>,
}

/// A query row of an attention step.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Query {
    pub(crate) row: usize,
    pub(crate) seq: usize,
    /// Tokens that it attends to.
    pub(crate) visible: u32,
}

/// What a kernel must leave in an operand: `want[i]` at element `at[i]`, within `tolerance[i]`.
#[derive(Clone, Debug)]
pub(crate) struct Expect {
    pub(crate) role: Role,
    pub(crate) at: Vec<usize>,
    pub(crate) want: Vec<f64>,
    pub(crate) tolerance: Vec<f64>,
    /// The tolerance in words.
    pub(crate) rule: &'static str,
}

impl Expect {
    /// Nothing yet.
    pub(crate) fn new(role: Role, rule: &'static str) -> Self {
        Self { role, at: Vec::new(), want: Vec::new(), tolerance: Vec::new(), rule }
    }

    /// Adds values from element `start` on.
    pub(crate) fn row(&mut self, start: usize, want: impl IntoIterator<Item = f64>, mut tolerance: impl FnMut(usize, f64) -> f64) {
        for (i, want) in want.into_iter().enumerate() {
            self.at.push(start + i);
            self.want.push(want);
            self.tolerance.push(tolerance(i, want));
        }
    }
}

/// The lists of one sampling row.
#[derive(Clone, Debug)]
pub(crate) struct RowLists {
    pub(crate) bias: Vec<(u32, f32)>,
    pub(crate) history: Vec<(u32, u32)>,
    pub(crate) mask: Vec<u32>,
}

/// Elements of a written operand: those that the kernel must write, and those that it may.
#[derive(Clone, Debug, Default)]
pub(crate) struct Footprint {
    pub(crate) declared: Vec<Range<usize>>,
    pub(crate) free: Vec<Range<usize>>,
}

impl Case {
    /// The operator.
    pub(crate) fn op(&self) -> Op {
        self.spec.contract.op
    }

    /// Rows of the activations.
    pub(crate) fn rows(&self) -> usize {
        self.count(self.sizes)
    }

    /// Rows that activation buffers have.
    pub(crate) fn rows_max(&self) -> usize {
        self.count(self.bound)
    }

    fn count(&self, bindings: Bindings) -> usize {
        let count = match self.spec.axis {
            Sym::Tokens => bindings.tokens,
            Sym::Seqs => bindings.seqs,
            Sym::Rows => bindings.rows,
            Sym::KvPages => bindings.kv_pages,
        };
        count as usize
    }

    /// An operand.
    ///
    /// # Panics
    /// If the case has none: makers give every operand of their contract.
    pub(crate) fn tensor(&self, role: Role) -> &Tensor {
        self.find(role).unwrap_or_else(|| panic!("a case of {} has no {role:?}", self.spec.contract))
    }

    /// An operand that the contract may leave out.
    pub(crate) fn find(&self, role: Role) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.role == role)
    }

    /// Head geometry, of contracts with a cache.
    pub(crate) fn heads(&self) -> Option<Heads> {
        match self.op() {
            Op::QkNorm { heads, .. } | Op::RopeAppend { heads } | Op::QkvRopeAppend { heads, .. } | Op::Attend { heads, .. } => Some(heads),
            Op::Embed { .. } | Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::Linear(_) | Op::TakeRows { .. } | Op::Sample { .. } => None,
        }
    }

    /// Width of an output row.
    pub(crate) fn out_width(&self) -> usize {
        let width = match self.op() {
            Op::Embed { dim, .. } | Op::RmsNorm { dim, .. } | Op::AddRmsNorm { dim, .. } | Op::TakeRows { dim } => dim,
            Op::QkNorm { heads, .. } => heads.qkv_width(),
            Op::Linear(linear) => linear.out_width(),
            Op::RopeAppend { heads } | Op::QkvRopeAppend { heads, .. } | Op::Attend { heads, .. } => heads.q * heads.dim,
            Op::Sample { .. } => TOP_LOGPROBS_MAX,
        };
        width as usize
    }

    /// The lists of a sampling row.
    pub(crate) fn lists(&self, row: usize) -> RowLists {
        let inputs = &self.inputs;
        let span = |starts: &[u32]| starts[row] as usize..starts[row + 1] as usize;
        let bias = span(&inputs.bias_starts).map(|i| (inputs.bias_ids[i], inputs.bias_values[i])).collect();
        let history = span(&inputs.history_starts).map(|i| (inputs.history_ids[i], inputs.history_counts[i])).collect();
        let words = inputs.mask.len() / self.rows().max(1);
        RowLists { bias, history, mask: inputs.mask[row * words..(row + 1) * words].to_vec() }
    }

    /// Query rows of sequences that have any context.
    pub(crate) fn queries(&self) -> Vec<Query> {
        let mut queries = Vec::new();
        for (seq, (length, starts)) in self.inputs.kv_lens.iter().zip(self.inputs.query_starts.windows(2)).enumerate() {
            for row in (starts[0]..starts[1]).filter(|_| *length > 0) {
                queries.push(Query { row: row as usize, seq, visible: length + row + 1 - starts[1] });
            }
        }
        queries
    }

    /// What the kernel must and may write of an operand.
    pub(crate) fn footprint(&self, role: Role) -> Footprint {
        let (rows, rows_max, width) = (self.rows(), self.rows_max(), self.out_width());
        match role {
            Role::KPlane | Role::VPlane => self.plane_footprint(),
            Role::X => Footprint { declared: Vec::new(), free: only(0..usize::MAX) },
            Role::Output(slot) => self.sampled_footprint(slot),
            // Rows of sequences without context are nobody's.
            Role::Out if matches!(self.op(), Op::Attend { .. }) => Footprint {
                declared: self.queries().into_iter().map(|query| query.row * width..(query.row + 1) * width).collect(),
                free: only(0..rows_max * width),
            },
            _ => Footprint { declared: only(0..rows * width), free: only(rows * width..rows_max * width) },
        }
    }

    fn plane_footprint(&self) -> Footprint {
        let Some(heads) = self.heads() else { return Footprint::default() };
        let width = (heads.kv * heads.dim) as usize;
        let slots = self.inputs.kv_slots.iter().filter(|slot| **slot != NONE).map(|slot| *slot as usize);
        let padding_page = (self.sizes.kv_pages as usize - 1) * heads.page_tokens as usize * width;
        let free = padding_page..padding_page + heads.page_tokens as usize * width;
        Footprint { declared: slots.map(|slot| slot * width..(slot + 1) * width).collect(), free: only(free) }
    }

    fn sampled_footprint(&self, slot: oxide_bundle::step::OutputSlot) -> Footprint {
        use oxide_bundle::step::OutputSlot::{SampledIds, SampledLogprobs, TopIds, TopLogprobs};
        let top = TOP_LOGPROBS_MAX as usize;
        let mut footprint = Footprint::default();
        let stride = match slot {
            SampledIds | SampledLogprobs => 1,
            TopIds | TopLogprobs => top,
        };
        for (row, params) in self.inputs.sampling.iter().enumerate() {
            let count = match slot {
                SampledIds => 1,
                SampledLogprobs => usize::from(params.logprobs != NONE),
                TopIds | TopLogprobs if params.logprobs == NONE => 0,
                TopIds | TopLogprobs => (params.logprobs as usize).min(top),
            };
            footprint.declared.push(row * stride..row * stride + count);
            footprint.free.push(row * stride + count..(row + 1) * stride);
        }
        footprint.free.push(self.rows() * stride..self.rows_max() * stride);
        footprint
    }

    /// One line for reports.
    pub(crate) fn label(&self) -> String {
        let Bindings { tokens, seqs, rows, .. } = self.sizes;
        let bound = self.rows_max();
        format!("{}[{}] tokens={tokens} seqs={seqs} rows={rows} bound={bound} {}", self.op().name(), self.op(), self.style.name())
    }

    /// Element type of outputs.
    pub(crate) fn out_dtype(&self) -> DType {
        self.spec.contract.out
    }
}

impl RowLists {
    /// As the reference takes them.
    pub(crate) fn borrowed(&self, params: &SamplingRow) -> SampleLists<'_> {
        let has = |flag: u32| params.flags & flag != 0;
        SampleLists {
            bias: if has(row_flags::BIAS) { &self.bias } else { &[] },
            history: if has(row_flags::HISTORY) { &self.history } else { &[] },
            mask: &self.mask,
        }
    }
}

/// One range.
fn only(range: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(range).collect()
}
