//! Turns a case into the buffers of a target: layouts, padding rows, poison and guards.
//!
//! Every operand lies between guards of poison; rows of activations beyond the step are NaN; outputs
//! start as poison. A kernel that reads too far computes NaN, one that writes too far is seen.

use super::case::Case;
use oxide_bundle::artifact::ArtifactManifest;
use oxide_bundle::contract::{Activation, Contract, Op, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{Bindings, RowOrder, WeightLayout};
use oxide_bundle::step::{InputSlot, NONE, OutputSlot, SamplingRow, TOP_LOGPROBS_MAX};
use oxide_runtime::device::place::{Buffer, Image, KernelStep};
use std::sync::Arc;

/// Elements of a guard; a multiple of 256 bytes in every type.
pub(crate) const GUARD: usize = 1024;
/// A quiet NaN that no arithmetic produces.
pub(crate) const POISON_BF16: u16 = 0x7FD5;
/// The same as f32.
pub(crate) const POISON_F32: u32 = 0x7FD5_5AA5;
/// Of integers: no id, no slot, no count.
pub(crate) const POISON_U32: u32 = 0xABAB_ABAB;

/// How buffers are laid out and shared.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// For a class larger than the step.
    Padded,
    /// For a class of the step's size.
    Exact,
    /// For the larger class, residual and output in one buffer.
    InPlace,
}

/// A step's operands.
pub(crate) struct Lowered {
    contract: Contract,
    sizes: Bindings,
    pub(crate) bound: Bindings,
    rows: u32,
    rows_max: u32,
    table_stride: u32,
    weight_layout: WeightLayout,
    pub(crate) operands: Vec<(Role, usize)>,
    pub(crate) buffers: Vec<Buffer>,
}

impl Lowered {
    /// As a place takes it.
    pub(crate) fn step(&self) -> KernelStep<'_> {
        KernelStep {
            contract: self.contract,
            sizes: self.sizes,
            bound: self.bound,
            rows: self.rows,
            rows_max: self.rows_max,
            table_stride: self.table_stride,
            weight_layout: self.weight_layout,
            operands: &self.operands,
            buffers: &self.buffers,
        }
    }
}

/// Weights in a target's layout, made once for all cases that share them.
#[derive(Default)]
pub(crate) struct WeightCache {
    made: Vec<(Arc<Image>, Option<RowOrder>, Arc<Image>)>,
}

impl WeightCache {
    /// The buffer image of a logical weight: the same `Arc` for the same weight.
    pub(crate) fn get(&mut self, logical: &Arc<Image>, key: Option<RowOrder>, make: impl FnOnce() -> Image) -> Arc<Image> {
        if let Some((_, _, image)) = self.made.iter().find(|(from, order, _)| Arc::ptr_eq(from, logical) && *order == key) {
            return Arc::clone(image);
        }
        if self.made.len() >= 4 {
            self.made.remove(0);
        }
        let image = Arc::new(make());
        self.made.push((Arc::clone(logical), key, Arc::clone(&image)));
        image
    }
}

/// Lowers a case to the cpu device, or to the kernel of a manifest.
pub(crate) fn lower(case: &Case, manifest: Option<&ArtifactManifest>, arrangement: Arrangement, cache: &mut WeightCache) -> Lowered {
    let bound = if arrangement == Arrangement::Exact { exact(case.sizes) } else { case.bound };
    let weight_layout = manifest.map_or(WeightLayout::Panel16, |manifest| manifest.weight_layout);
    let bounded = Case { bound, ..case.clone() };
    let lowered = Lowered {
        contract: case.spec.contract,
        sizes: case.sizes,
        bound,
        rows: case.rows() as u32,
        rows_max: bounded.rows_max() as u32,
        table_stride: case.table_stride,
        weight_layout,
        operands: Vec::new(),
        buffers: Vec::new(),
    };
    let mut lowerer = Lowerer { case: &bounded, manifest, cache, lowered };
    lowerer.activations(arrangement);
    lowerer.weights();
    lowerer.cache_planes();
    lowerer.inputs();
    lowerer.outputs();
    lowerer.scratch();
    lowerer.lowered
}

/// A class must hold something, even for a step of no rows.
fn exact(sizes: Bindings) -> Bindings {
    Bindings { tokens: sizes.tokens.max(1), seqs: sizes.seqs.max(1), rows: sizes.rows.max(1), kv_pages: sizes.kv_pages }
}

struct Lowerer<'a> {
    case: &'a Case,
    manifest: Option<&'a ArtifactManifest>,
    cache: &'a mut WeightCache,
    lowered: Lowered,
}

impl Lowerer<'_> {
    fn add(&mut self, role: Role, image: Arc<Image>, is_written: bool) {
        let len = image.len() - 2 * GUARD;
        self.lowered.operands.push((role, self.lowered.buffers.len()));
        self.lowered.buffers.push(Buffer { image, start: GUARD, len, is_written });
    }

    /// An activation with padding rows of poison.
    fn rows(&mut self, role: Role, rows_max: usize, is_written: bool) {
        let tensor = self.case.tensor(role);
        let image = guarded(&tensor.image, rows_max * tensor.width);
        self.add(role, Arc::new(image), is_written);
    }

    fn activations(&mut self, arrangement: Arrangement) {
        let (rows_max, out) = (self.case.rows_max(), self.case.out_dtype());
        match self.case.op() {
            Op::QkNorm { .. } => {
                self.rows(Role::X, rows_max, true);
                return self.lowered.operands.push((Role::Out, self.lowered.buffers.len() - 1));
            }
            Op::Sample { .. } => return self.rows(Role::X, rows_max, true),
            Op::Embed { .. } => {}
            Op::TakeRows { .. } => self.rows(Role::X, self.case.bound.tokens as usize, false),
            Op::RmsNorm { .. }
            | Op::AddRmsNorm { .. }
            | Op::Linear(_)
            | Op::RopeAppend { .. }
            | Op::QkvRopeAppend { .. }
            | Op::Attend { .. } => {
                self.rows(Role::X, rows_max, false);
            }
        }
        if arrangement == Arrangement::InPlace {
            self.rows(Role::Residual, rows_max, true);
            return self.lowered.operands.push((Role::Out, self.lowered.buffers.len() - 1));
        }
        if self.case.find(Role::Residual).is_some() {
            self.rows(Role::Residual, rows_max, matches!(self.case.op(), Op::AddRmsNorm { .. }));
        }
        let image = poison(out, rows_max * self.case.out_width() + 2 * GUARD);
        self.add(Role::Out, Arc::new(image), true);
    }

    fn weights(&mut self) {
        let case = self.case;
        if let Some(weight) = case.find(Role::Weight) {
            let order = self.row_order();
            let is_panel = self.manifest.is_none();
            let image = self.cache.get(&weight.image, Some(order), || laid_out(&weight.image, weight.width, order, is_panel));
            self.add(Role::Weight, image, false);
        }
        if let Some(bias) = case.find(Role::Bias) {
            let order = self.row_order();
            let image = Arc::new(laid_out(&bias.image, 1, order, false));
            self.add(Role::Bias, image, false);
        }
        for role in [Role::NormWeight, Role::RopeTable] {
            if let Some(tensor) = case.find(role) {
                let image = self.cache.get(&tensor.image, None, || guarded(&tensor.image, tensor.image.len()));
                self.add(role, image, false);
            }
        }
    }

    /// Row order of the weight that the kernel reads; only SwiGLU has one that is not natural.
    fn row_order(&self) -> RowOrder {
        let swiglu = matches!(self.case.op(), Op::Linear(linear) if linear.act == Activation::SwiGlu);
        match self.manifest {
            Some(manifest) => manifest.row_order,
            None if swiglu => RowOrder::Interleave(16),
            None => RowOrder::Concat,
        }
    }

    fn cache_planes(&mut self) {
        let is_written = !matches!(self.case.op(), Op::Attend { .. });
        for role in [Role::KPlane, Role::VPlane] {
            if let Some(plane) = self.case.find(role) {
                let image = Arc::new(guarded(&plane.image, plane.image.len()));
                self.add(role, image, is_written);
            }
        }
    }

    fn words(&mut self, slot: InputSlot, values: &[u32], count: usize, fill: u32) {
        let mut words = vec![POISON_U32; GUARD];
        words.extend(values.iter().copied().chain(std::iter::repeat(fill)).take(count.max(values.len())));
        words.extend(std::iter::repeat_n(POISON_U32, GUARD));
        self.add(Role::Input(slot), Arc::new(Image::U32(words)), false);
    }

    /// Per-step slots, padded to the class as the engine's devices pad them.
    fn inputs(&mut self) {
        let case = self.case;
        let inputs = &case.inputs;
        let Bindings { tokens, seqs, rows, kv_pages } = case.bound;
        let (tokens, seqs, rows) = (tokens as usize, seqs as usize, rows as usize);
        match case.op() {
            Op::Embed { .. } => {
                self.words(InputSlot::TokenIds, &inputs.token_ids, tokens, 0);
                self.words(InputSlot::TokenSources, &inputs.token_sources, tokens, NONE);
                let ids = Arc::new(guarded(&Image::U32(case.previous_ids.clone()), case.previous_ids.len()));
                self.add(Role::Output(OutputSlot::SampledIds), ids, false);
            }
            Op::RopeAppend { heads } | Op::QkvRopeAppend { heads, .. } => {
                self.words(InputSlot::Positions, &inputs.positions, tokens, 0);
                self.words(InputSlot::KvSlots, &inputs.kv_slots, tokens, (kv_pages - 1) * heads.page_tokens);
            }
            Op::Attend { .. } => {
                let last = inputs.query_starts.last().copied().unwrap_or(0);
                self.words(InputSlot::QueryStarts, &inputs.query_starts, seqs + 1, last);
                self.words(InputSlot::KvLens, &inputs.kv_lens, seqs, 0);
                self.words(InputSlot::BlockTables, &inputs.block_tables, seqs * case.table_stride as usize, kv_pages - 1);
            }
            Op::TakeRows { .. } => self.words(InputSlot::LogitRows, &inputs.logit_rows, rows, 0),
            Op::Sample { vocab, .. } => self.sampling_inputs(rows, vocab.div_ceil(32) as usize),
            Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::QkNorm { .. } | Op::Linear(_) => {}
        }
    }

    fn sampling_inputs(&mut self, rows: usize, mask_words: usize) {
        let inputs = &self.case.inputs;
        let mut params = inputs.sampling.clone();
        params.resize(rows.max(params.len()), SamplingRow::GREEDY);
        let last = |starts: &[u32]| starts.last().copied().unwrap_or(0);
        self.words(InputSlot::Sampling, bytemuck::cast_slice(&params), 16 * rows, 0);
        self.words(InputSlot::BiasStarts, &inputs.bias_starts, rows + 1, last(&inputs.bias_starts));
        self.words(InputSlot::BiasIds, &inputs.bias_ids, 1, 0);
        let values = Image::F32(inputs.bias_values.iter().copied().chain([0.0]).collect());
        let values = Arc::new(guarded(&values, values.len()));
        self.add(Role::Input(InputSlot::BiasValues), values, false);
        self.words(InputSlot::HistoryStarts, &inputs.history_starts, rows + 1, last(&inputs.history_starts));
        self.words(InputSlot::HistoryIds, &inputs.history_ids, 1, 0);
        self.words(InputSlot::HistoryCounts, &inputs.history_counts, 1, 0);
        self.words(InputSlot::Mask, &inputs.mask, rows * mask_words, 0);
    }

    fn outputs(&mut self) {
        if !matches!(self.case.op(), Op::Sample { .. }) {
            return;
        }
        let rows = self.case.rows_max();
        let top = rows * TOP_LOGPROBS_MAX as usize;
        for (slot, dtype, count) in [
            (OutputSlot::SampledIds, DType::U32, rows),
            (OutputSlot::SampledLogprobs, DType::F32, rows),
            (OutputSlot::TopIds, DType::U32, top),
            (OutputSlot::TopLogprobs, DType::F32, top),
        ] {
            self.add(Role::Output(slot), Arc::new(poison(dtype, count + 2 * GUARD)), true);
        }
    }

    /// What a code object wants beside its operands.
    fn scratch(&mut self) {
        let Some(manifest) = self.manifest else { return };
        for item in &manifest.workspace {
            let count = item.elements.eval(self.lowered.bound).unwrap_or(0) as usize;
            let dtype = if item.dtype == "float32" { DType::F32 } else { DType::U32 };
            let mut image = poison(dtype, count + 2 * GUARD);
            if item.zeroed {
                let bytes = image.element_bytes();
                image.bytes_mut()[GUARD * bytes..(GUARD + count) * bytes].fill(0);
            }
            self.add(item.role, Arc::new(image), true);
        }
    }
}

/// Memory of poison.
pub(crate) fn poison(dtype: DType, len: usize) -> Image {
    match dtype {
        DType::Bf16 | DType::F16 => Image::Bf16(vec![POISON_BF16; len]),
        DType::F32 => Image::F32(vec![f32::from_bits(POISON_F32); len]),
        DType::U32 => Image::U32(vec![POISON_U32; len]),
    }
}

/// `image`, then poison up to `len` elements, between guards.
pub(crate) fn guarded(image: &Image, len: usize) -> Image {
    let dtype = match image {
        Image::Bf16(_) => DType::Bf16,
        Image::F32(_) => DType::F32,
        Image::U32(_) => DType::U32,
    };
    let mut whole = poison(dtype, len.max(image.len()) + 2 * GUARD);
    let at = GUARD * image.element_bytes();
    whole.bytes_mut()[at..at + image.bytes().len()].copy_from_slice(image.bytes());
    whole
}

/// The natural row that lies at `row` of a matrix of `n` rows in some order.
pub(crate) fn source_row(row: usize, n: usize, order: RowOrder) -> usize {
    match order {
        RowOrder::Interleave(group) => {
            let (group, half) = (group as usize, n / 2);
            row / (2 * group) * group + row % group + if row / group % 2 == 1 { half } else { 0 }
        }
        RowOrder::Concat | RowOrder::RotaryPairs => row,
    }
}

/// A `[n, k]` matrix in a target's row order and layout, between guards.
pub(crate) fn laid_out(image: &Image, k: usize, order: RowOrder, is_panel: bool) -> Image {
    let Image::Bf16(bits) = image else { return guarded(image, image.len()) };
    let n = bits.len() / k.max(1);
    let len = if is_panel { n.next_multiple_of(16) * k } else { n * k };
    let mut out = vec![0_u16; len];
    for row in 0..n {
        let from = &bits[source_row(row, n, order) * k..][..k];
        if is_panel {
            let panel = &mut out[row / 16 * 16 * k..];
            from.iter().enumerate().for_each(|(column, bits)| panel[column / 2 * 32 + row % 16 * 2 + column % 2] = *bits);
        } else {
            out[row * k..(row + 1) * k].copy_from_slice(from);
        }
    }
    guarded(&Image::Bf16(out), len)
}
