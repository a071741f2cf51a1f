//! The cpu device as a [`Place`]: one kernel of the table on operands of the caller's choice.
//!
//! Each kernel gets exactly the rows of the step, as a linked launch gives them, and whatever lies
//! around them in the buffers is for the caller to inspect.

use super::failed;
use super::isa::{self, Isa};
use super::kernels::amx::parts_len;
use super::kernels::attend::{AttendBounds, AttendCall, AttendScratch, attend};
use super::kernels::linear::{LinearCall, Residual, linear};
use super::kernels::rope::{RopeCall, rope_append};
use super::kernels::rows::{EmbedCall, NormCall, QkNormCall, TableLayout, embed, norm, qk_norm};
use super::kernels::sample::{SampleCall, SampleScratch, sample};
use super::kernels::table::Kernels;
use super::kv::{PlaneMut, PlaneRef};
use super::link::{DEVICE, supports};
use super::pool::Pool;
use crate::device::place::{Image, KernelStep, PaddingRows, Place, Way};
use crate::device::{DeviceError, DeviceInfo};
use oxide_bundle::contract::{Activation, Heads, Linear, Op, Role};
use oxide_bundle::plan::WeightLayout;
use oxide_bundle::step::{InputSlot, OutputSlot, SamplingRow, TOP_LOGPROBS_MAX};
use std::ops::Range;

/// Kernels of one instruction set.
pub struct CpuPlace {
    kernels: &'static Kernels,
    isa: Isa,
    threads: usize,
    pool: Pool,
    /// For [`Way::OtherThreads`].
    other: Pool,
}

impl CpuPlace {
    /// The kernels of `isa` with `threads` threads, and with one more.
    ///
    /// # Errors
    /// If the processor lacks the instruction set, or threads are refused.
    pub fn new(isa: Isa, threads: usize) -> Result<Self, DeviceError> {
        let kernels = Kernels::of(isa).ok_or_else(|| failed(format!("this processor has no {isa}")))?;
        let start = |threads| Pool::start(threads).map_err(|error| failed(format!("cannot start {threads} threads: {error}")));
        let threads = threads.max(1);
        Ok(Self { kernels, isa, threads, pool: start(threads)?, other: start(threads + 1)? })
    }
}

impl Place for CpuPlace {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { kind: DEVICE, name: format!("{} ({}, {} threads)", isa::processor_name(), self.isa, self.threads) }
    }

    fn ways(&self) -> Vec<Way> {
        vec![Way::OtherThreads]
    }

    fn padding_rows(&self) -> PaddingRows {
        PaddingRows::Untouched
    }

    fn run(&mut self, step: &KernelStep<'_>, way: Way) -> Result<Vec<Option<Image>>, DeviceError> {
        let threads = self.pool.threads();
        let (pool, threads) = match way {
            Way::Eager => (&mut self.pool, threads),
            Way::OtherThreads => (&mut self.other, threads + 1),
            Way::Pdl | Way::Graph => return Err(failed(format!("the cpu device has no way to run `{}`", way.name()))),
        };
        if !supports(&step.contract) {
            return Err(DeviceError::MissingKernel { contract: step.contract.to_string(), device: DEVICE });
        }
        let mut memory = Memory::new(step);
        let mut run = Run { kernels: self.kernels, pool, threads, step, memory: &mut memory };
        run.step()?;
        Ok(memory.written)
    }
}

/// The buffers of a step: constants where they are, the rest as copies.
struct Memory<'a> {
    step: &'a KernelStep<'a>,
    written: Vec<Option<Image>>,
}

type Placed<T> = Result<T, DeviceError>;

impl<'a> Memory<'a> {
    fn new(step: &'a KernelStep<'a>) -> Self {
        let copy = |buffer: &crate::device::place::Buffer| buffer.is_written.then(|| (*buffer.image).clone());
        Self { step, written: step.buffers.iter().map(copy).collect() }
    }

    fn index(&self, role: Role) -> Placed<usize> {
        self.step.operand(role).ok_or_else(|| failed(format!("{} has no {role:?}", self.step.contract)))
    }

    /// Where the first `count` elements of a buffer lie.
    fn range(&self, index: usize, count: usize) -> Placed<Range<usize>> {
        let buffer = &self.step.buffers[index];
        if count > buffer.len {
            return Err(failed(format!("a buffer has {} elements, {} takes {count}", buffer.len, self.step.contract)));
        }
        Ok(buffer.start..buffer.start + count)
    }

    fn image(&self, index: usize) -> &Image {
        self.written[index].as_ref().unwrap_or(&self.step.buffers[index].image)
    }

    fn f32(&self, role: Role, count: usize) -> Placed<&[f32]> {
        let index = self.index(role)?;
        let range = self.range(index, count)?;
        match self.image(index) {
            Image::F32(values) => Ok(&values[range]),
            Image::Bf16(_) | Image::U32(_) => Err(failed(format!("{role:?} is not f32"))),
        }
    }

    fn bf16(&self, role: Role) -> Placed<&[u16]> {
        let index = self.index(role)?;
        let range = self.range(index, self.step.buffers[index].len)?;
        match self.image(index) {
            Image::Bf16(values) => Ok(&values[range]),
            Image::F32(_) | Image::U32(_) => Err(failed(format!("{role:?} is not bf16"))),
        }
    }

    fn input(&self, slot: InputSlot, count: usize) -> Placed<&[u32]> {
        self.words(Role::Input(slot), count)
    }

    fn words(&self, role: Role, count: usize) -> Placed<&[u32]> {
        let index = self.index(role)?;
        let range = self.range(index, count)?;
        match self.image(index) {
            Image::U32(values) => Ok(&values[range]),
            Image::F32(_) | Image::Bf16(_) => Err(failed(format!("{role:?} is not u32"))),
        }
    }

    /// Takes a written buffer out, so that others may be borrowed beside it.
    fn take(&mut self, role: Role) -> Placed<(usize, Image)> {
        let index = self.index(role)?;
        let image =
            self.written[index].take().ok_or_else(|| failed(format!("{role:?} is not written, or one buffer with another operand")))?;
        Ok((index, image))
    }
}

fn f32_mut(image: &mut Image, range: Range<usize>) -> Placed<&mut [f32]> {
    match image {
        Image::F32(values) => Ok(&mut values[range]),
        Image::Bf16(_) | Image::U32(_) => Err(failed("an output is not f32".to_owned())),
    }
}

fn u32_mut(image: &mut Image, range: Range<usize>) -> Placed<&mut [u32]> {
    match image {
        Image::U32(values) => Ok(&mut values[range]),
        Image::Bf16(_) | Image::F32(_) => Err(failed("an output is not u32".to_owned())),
    }
}

fn plane_mut(image: &mut Image, range: Range<usize>) -> Placed<PlaneMut<'_>> {
    match image {
        Image::F32(values) => Ok(PlaneMut::F32(&mut values[range])),
        Image::Bf16(values) => Ok(PlaneMut::Bf16(&mut values[range])),
        Image::U32(_) => Err(failed("a KV plane is neither f32 nor bf16".to_owned())),
    }
}

fn plane(image: &Image, range: Range<usize>) -> Placed<PlaneRef<'_>> {
    match image {
        Image::F32(values) => Ok(PlaneRef::F32(&values[range])),
        Image::Bf16(values) => Ok(PlaneRef::Bf16(&values[range])),
        Image::U32(_) => Err(failed("a KV plane is neither f32 nor bf16".to_owned())),
    }
}

struct Run<'a, 'b> {
    kernels: &'static Kernels,
    pool: &'a mut Pool,
    threads: usize,
    step: &'a KernelStep<'a>,
    memory: &'a mut Memory<'b>,
}

impl Run<'_, '_> {
    fn step(&mut self) -> Placed<()> {
        match self.step.contract.op {
            Op::Embed { dim, .. } => self.embed(dim as usize),
            Op::RmsNorm { dim, eps } => self.norm(dim as usize, eps.get()),
            Op::AddRmsNorm { dim, eps } => self.add_norm(dim as usize, eps.get()),
            Op::QkNorm { heads, eps } => self.qk_norm(heads, eps.get()),
            Op::Linear(linear) => self.linear(&linear),
            Op::RopeAppend { heads } => self.rope_append(heads),
            Op::Attend { heads, .. } => self.attend(heads),
            Op::TakeRows { dim } => self.take_rows(dim as usize),
            Op::Sample { vocab, vocab_known } => self.sample(vocab as usize, vocab_known as usize),
            Op::QkvRopeAppend { .. } => Err(failed("the cpu device runs no fused projection".to_owned())),
        }
    }

    /// Calls `body` with the first `count` elements of the output.
    fn with_out(&mut self, count: usize, body: impl FnOnce(&mut Self, &mut [f32]) -> Placed<()>) -> Placed<()> {
        let (index, mut image) = self.memory.take(Role::Out)?;
        let range = self.memory.range(index, count)?;
        let result = f32_mut(&mut image, range).and_then(|out| body(self, out));
        self.memory.written[index] = Some(image);
        result
    }

    fn rows(&self) -> usize {
        self.step.rows as usize
    }

    fn embed(&mut self, dim: usize) -> Placed<()> {
        let rows = self.rows();
        let layout = match self.step.weight_layout {
            WeightLayout::RowMajor => TableLayout::RowMajor,
            WeightLayout::Panel16 => TableLayout::Panel16,
            WeightLayout::PanelK64 => return Err(failed("the cpu device cannot read a table of layout panel_k64".to_owned())),
        };
        self.with_out(rows * dim, |run, out| {
            let memory = &*run.memory;
            let sampled = memory.index(Role::Output(OutputSlot::SampledIds))?;
            let call = EmbedCall {
                table: memory.bf16(Role::Weight)?,
                layout,
                ids: memory.input(InputSlot::TokenIds, rows)?,
                sources: memory.input(InputSlot::TokenSources, rows)?,
                sampled: memory.words(Role::Output(OutputSlot::SampledIds), run.step.buffers[sampled].len)?,
                out,
            };
            embed(run.pool, call);
            Ok(())
        })
    }

    fn norm(&mut self, dim: usize, eps: f32) -> Placed<()> {
        let rows = self.rows();
        self.with_out(rows * dim, |run, out| {
            let (x, weight) = (run.memory.f32(Role::X, rows * dim)?, run.memory.bf16(Role::NormWeight)?);
            norm(run.kernels, run.pool, NormCall { rows, dim, eps, x, residual: None, weight, out });
            Ok(())
        })
    }

    fn add_norm(&mut self, dim: usize, eps: f32) -> Placed<()> {
        let rows = self.rows();
        let (index, mut image) = self.memory.take(Role::Residual)?;
        let range = self.memory.range(index, rows * dim)?;
        let result = self.with_out(rows * dim, |run, out| {
            let (x, weight) = (run.memory.f32(Role::X, rows * dim)?, run.memory.bf16(Role::NormWeight)?);
            let residual = Some(f32_mut(&mut image, range)?);
            norm(run.kernels, run.pool, NormCall { rows, dim, eps, x, residual, weight, out });
            Ok(())
        });
        self.memory.written[index] = Some(image);
        result
    }

    fn qk_norm(&mut self, heads: Heads, eps: f32) -> Placed<()> {
        let rows = self.rows();
        self.with_out(rows * heads.qkv_width() as usize, |run, qkv| {
            let weight = run.memory.bf16(Role::NormWeight)?;
            let (q_heads, kv_heads, head_dim) = (heads.q as usize, heads.kv as usize, heads.dim as usize);
            qk_norm(run.kernels, run.pool, QkNormCall { rows, q_heads, kv_heads, head_dim, eps, weight, qkv });
            Ok(())
        })
    }

    fn linear(&mut self, shape: &Linear) -> Placed<()> {
        let (rows, n, k, width) = (self.rows(), shape.n as usize, shape.k as usize, shape.out_width() as usize);
        let swiglu = shape.act == Activation::SwiGlu;
        let mut parts = vec![0; if self.kernels.matrix.is_some() { parts_len(rows, k) } else { 0 }];
        self.with_out(rows * width, |run, out| {
            let memory = &*run.memory;
            let is_one_buffer = shape.residual && memory.index(Role::Residual)? == memory.index(Role::Out)?;
            let residual = match shape.residual {
                false => Residual::None,
                true if is_one_buffer => Residual::InPlace,
                true => Residual::Separate(memory.f32(Role::Residual, rows * width)?),
            };
            let call = LinearCall {
                rows,
                n,
                k,
                swiglu,
                x: memory.f32(Role::X, rows * k)?,
                weight: memory.bf16(Role::Weight)?,
                bias: if shape.bias { Some(memory.bf16(Role::Bias)?) } else { None },
                residual,
                out,
                parts: &mut parts,
            };
            linear(run.kernels, run.pool, call);
            Ok(())
        })
    }

    fn rope_append(&mut self, heads: Heads) -> Placed<()> {
        let rows = self.rows();
        let [(k, mut k_image), (v, mut v_image)] = [self.memory.take(Role::KPlane)?, self.memory.take(Role::VPlane)?];
        let ranges = [k, v].map(|plane| self.memory.range(plane, self.step.buffers[plane].len));
        let [k_range, v_range] = ranges;
        let (k_range, v_range) = (k_range?, v_range?);
        let result = self.with_out(rows * (heads.q * heads.dim) as usize, |run, out| {
            let memory = &*run.memory;
            let table = memory.index(Role::RopeTable)?;
            let call = RopeCall {
                q_heads: heads.q as usize,
                kv_heads: heads.kv as usize,
                head_dim: heads.dim as usize,
                positions: memory.input(InputSlot::Positions, rows)?,
                slots: memory.input(InputSlot::KvSlots, rows)?,
                x: memory.f32(Role::X, rows * heads.qkv_width() as usize)?,
                table: memory.f32(Role::RopeTable, run.step.buffers[table].len)?,
                k_plane: plane_mut(&mut k_image, k_range)?,
                v_plane: plane_mut(&mut v_image, v_range)?,
                out,
            };
            rope_append(run.kernels, run.pool, call);
            Ok(())
        });
        self.memory.written[k] = Some(k_image);
        self.memory.written[v] = Some(v_image);
        result
    }

    fn attend(&mut self, heads: Heads) -> Placed<()> {
        let (rows, seqs, stride) = (self.rows(), self.step.sizes.seqs as usize, self.step.table_stride as usize);
        let [q_heads, kv_heads, head_dim, page_tokens] = [heads.q, heads.kv, heads.dim, heads.page_tokens].map(|n| n as usize);
        let bounds = AttendBounds { tokens: rows, seqs, context: stride * page_tokens, q_heads, kv_heads, head_dim, threads: self.threads };
        let mut scratch = AttendScratch::new(bounds);
        self.with_out(rows * q_heads * head_dim, |run, out| {
            let memory = &*run.memory;
            let planes = [Role::KPlane, Role::VPlane].map(|role| {
                let index = memory.index(role)?;
                plane(memory.image(index), memory.range(index, run.step.buffers[index].len)?)
            });
            let [k_plane, v_plane] = planes;
            let call = AttendCall {
                q_heads,
                kv_heads,
                head_dim,
                page_tokens,
                x: memory.f32(Role::X, rows * q_heads * head_dim)?,
                k_plane: k_plane?,
                v_plane: v_plane?,
                query_starts: memory.input(InputSlot::QueryStarts, seqs + 1)?,
                kv_lens: memory.input(InputSlot::KvLens, seqs)?,
                block_tables: memory.input(InputSlot::BlockTables, seqs * stride)?,
                table_stride: stride,
                out,
                scratch: &mut scratch,
            };
            attend(run.kernels, run.pool, call);
            Ok(())
        })
    }

    fn take_rows(&mut self, dim: usize) -> Placed<()> {
        let (rows, tokens) = (self.rows(), self.step.sizes.tokens as usize);
        self.with_out(rows * dim, |run, out| {
            let x = run.memory.f32(Role::X, tokens * dim)?;
            for (row, out) in run.memory.input(InputSlot::LogitRows, rows)?.iter().zip(out.chunks_exact_mut(dim)) {
                out.copy_from_slice(&x[*row as usize * dim..][..dim]);
            }
            Ok(())
        })
    }

    fn sample(&mut self, vocab: usize, vocab_known: usize) -> Placed<()> {
        let rows = self.rows();
        let top = rows * TOP_LOGPROBS_MAX as usize;
        let counts = [
            (OutputSlot::SampledIds, rows),
            (OutputSlot::SampledLogprobs, rows),
            (OutputSlot::TopIds, top),
            (OutputSlot::TopLogprobs, top),
        ];
        let roles = [(Role::X, rows * vocab)].into_iter().chain(counts.map(|(slot, count)| (Role::Output(slot), count)));
        let mut taken = Vec::with_capacity(5);
        for (role, count) in roles {
            let (index, image) = self.memory.take(role)?;
            taken.push((index, image, self.memory.range(index, count)?));
        }
        let result = self.sample_taken(vocab, vocab_known, &mut taken);
        for (index, image, _) in taken {
            self.memory.written[index] = Some(image);
        }
        result
    }

    fn sample_taken(&mut self, vocab: usize, vocab_known: usize, taken: &mut [(usize, Image, Range<usize>)]) -> Placed<()> {
        let [x, ids, logprobs, top_ids, top_logprobs] = taken else { return Err(failed("sampling has five outputs".to_owned())) };
        let (rows, memory) = (self.rows(), &*self.memory);
        let sampling: Vec<SamplingRow> = bytemuck::pod_collect_to_vec(memory.input(InputSlot::Sampling, rows * 16)?);
        let list = |slot: InputSlot| memory.index(Role::Input(slot)).and_then(|index| memory.input(slot, self.step.buffers[index].len));
        let bias_values = memory.index(Role::Input(InputSlot::BiasValues))?;
        let scratch = SampleScratch::new(vocab, self.threads);
        let call = SampleCall {
            vocab,
            vocab_known,
            logits: f32_mut(&mut x.1, x.2.clone())?,
            sampling: &sampling,
            bias_starts: memory.input(InputSlot::BiasStarts, rows + 1)?,
            bias_ids: list(InputSlot::BiasIds)?,
            bias_values: memory.f32(Role::Input(InputSlot::BiasValues), self.step.buffers[bias_values].len)?,
            history_starts: memory.input(InputSlot::HistoryStarts, rows + 1)?,
            history_ids: list(InputSlot::HistoryIds)?,
            history_counts: list(InputSlot::HistoryCounts)?,
            mask: memory.input(InputSlot::Mask, rows * vocab.div_ceil(32))?,
            sampled_ids: u32_mut(&mut ids.1, ids.2.clone())?,
            sampled_logprobs: f32_mut(&mut logprobs.1, logprobs.2.clone())?,
            top_ids: u32_mut(&mut top_ids.1, top_ids.2.clone())?,
            top_logprobs: f32_mut(&mut top_logprobs.1, top_logprobs.2.clone())?,
            scratch: &scratch,
        };
        sample(self.kernels, self.pool, call);
        Ok(())
    }
}
