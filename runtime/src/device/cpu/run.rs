//! Runs launches: gives each kernel its slices of arena, weights, cache and step inputs.

use super::arena::{Aligned, Arena};
use super::kernels::amx::parts_len;
use super::kernels::attend::{AttendBounds, AttendCall, AttendScratch, attend};
use super::kernels::linear::{LinearCall, Residual, linear};
use super::kernels::rope::{RopeCall, rope_append};
use super::kernels::rows::{EmbedCall, NormCall, QkNormCall, TableLayout, embed, norm, qk_norm};
use super::kernels::sample::{SampleCall, SampleScratch, sample};
use super::kernels::table::Kernels;
use super::kv::KvPool;
use super::link::{Launch, Program, Region, ResidualAt, WeightRange};
use super::pool::Pool;
use crate::device::{DeviceError, StepInputs, StepOutputs};
use oxide_bundle::contract::{Activation, Heads, Linear};
use oxide_bundle::plan::{Bindings, Plan};
use oxide_bundle::step::{NONE, TOP_LOGPROBS_MAX};

/// What launches work with.
pub(crate) struct State {
    kernels: &'static Kernels,
    pub(crate) pool: Pool,
    arena: Arena,
    pub(crate) kv: KvPool,
    attend: AttendScratch,
    /// Parts of activations, for a matrix unit.
    parts: Aligned<u16>,
    sample: SampleScratch,
    pub(crate) outputs: StepOutputs,
    /// Ids that the step before sampled.
    previous_ids: Vec<u32>,
    table_stride: usize,
}

/// One step as launches see it.
pub(crate) struct StepView<'a> {
    pub(crate) weights: &'a [u8],
    pub(crate) inputs: &'a StepInputs,
    pub(crate) bindings: Bindings,
}

impl StepView<'_> {
    fn bf16(&self, range: &WeightRange) -> &[u16] {
        bytemuck::cast_slice(&self.weights[range.clone()])
    }

    fn f32(&self, range: &WeightRange) -> &[f32] {
        bytemuck::cast_slice(&self.weights[range.clone()])
    }

    fn rows(&self, region: &Region) -> usize {
        region.rows(self.bindings)
    }
}

impl State {
    /// Allocates everything that steps need.
    ///
    /// # Errors
    /// If memory or threads are refused.
    pub(crate) fn new(
        plan: &Plan,
        program: &Program,
        kernels: &'static Kernels,
        threads: usize,
        kv_pages: u32,
    ) -> Result<Self, DeviceError> {
        let short = |what: &str, bytes: u64, hint: &str| DeviceError::OutOfMemory {
            message: format!("cannot allocate {bytes} bytes of memory for {what}; {hint}"),
        };
        let bounds = plan.bounds();
        let arena_bytes = plan.arena_bytes();
        let arena = Arena::new(arena_bytes).ok_or_else(|| short("activations", arena_bytes, "compile for fewer tokens a step"))?;
        let kv_bytes = plan.kv().bytes_per_token().saturating_mul(u64::from(plan.kv().page_tokens)).saturating_mul(u64::from(kv_pages));
        let kv = KvPool::new(plan.kv(), kv_pages).ok_or_else(|| short("the KV cache", kv_bytes, "ask for fewer KV pages"))?;
        let parts_len = if kernels.matrix.is_some() { parts_len(bounds.tokens_max as usize, program.linear_k) } else { 0 };
        let parts = Aligned::new(parts_len)
            .ok_or_else(|| short("parts of activations", 2 * parts_len as u64, "compile for fewer tokens a step"))?;
        let pool =
            Pool::start(threads).map_err(|error| DeviceError::Failed { message: format!("cannot start {threads} threads: {error}") })?;
        let rows = bounds.rows_max as usize;
        let top = rows * TOP_LOGPROBS_MAX as usize;
        let outputs = StepOutputs {
            sampled_ids: Vec::with_capacity(rows),
            sampled_logprobs: Vec::with_capacity(rows),
            top_ids: Vec::with_capacity(top),
            top_logprobs: Vec::with_capacity(top),
        };
        Ok(Self {
            kernels,
            pool,
            arena,
            kv,
            attend: AttendScratch::new(attend_bounds(plan, program, threads)),
            parts,
            sample: SampleScratch::new(program.sample_vocab, threads),
            outputs,
            previous_ids: Vec::with_capacity(rows),
            table_stride: bounds.pages_per_seq_max as usize,
        })
    }

    /// Keeps what the last step sampled and makes room for `rows` new ids.
    pub(crate) fn begin(&mut self, rows: usize) {
        let Self { outputs: StepOutputs { sampled_ids, sampled_logprobs, top_ids, top_logprobs }, previous_ids, .. } = self;
        previous_ids.clone_from(sampled_ids);
        sampled_ids.clear();
        sampled_ids.resize(rows, NONE);
        sampled_logprobs.clear();
        sampled_logprobs.resize(rows, 0.0);
        top_ids.clear();
        top_ids.resize(rows * TOP_LOGPROBS_MAX as usize, NONE);
        top_logprobs.clear();
        top_logprobs.resize(rows * TOP_LOGPROBS_MAX as usize, f32::NEG_INFINITY);
    }

    /// Runs one launch.
    pub(crate) fn run(&mut self, launch: &Launch, step: &StepView<'_>) {
        match launch {
            Launch::Embed { table, layout, out } => self.embed(step, step.bf16(table), *layout, out),
            Launch::RmsNorm { dim, eps, x, weight, out } => {
                let [x_slice, out] = self.arena.disjoint([x.range(step.bindings), out.range(step.bindings)]);
                let (rows, weight) = (step.rows(x), step.bf16(weight));
                let call = NormCall { rows, dim: *dim, eps: *eps, x: x_slice, residual: None, weight, out };
                norm(self.kernels, &mut self.pool, call);
            }
            Launch::AddRmsNorm { dim, eps, x, residual, weight, out } => {
                let ranges = [x, residual, out].map(|region| region.range(step.bindings));
                let [x_slice, residual, out] = self.arena.disjoint(ranges);
                let (rows, weight) = (step.rows(x), step.bf16(weight));
                let call = NormCall { rows, dim: *dim, eps: *eps, x: x_slice, residual: Some(residual), weight, out };
                norm(self.kernels, &mut self.pool, call);
            }
            Launch::QkNorm { heads, eps, weight, qkv } => self.qk_norm(step, *heads, *eps, step.bf16(weight), qkv),
            Launch::Linear { linear, x, weight, bias, residual, out } => {
                let bias = bias.as_ref().map(|bias| step.bf16(bias));
                self.linear(step, linear, x, step.bf16(weight), bias, residual, out);
            }
            Launch::RopeAppend { heads, x, table, planes, out } => self.rope_append(step, *heads, x, step.f32(table), *planes, out),
            Launch::Attend { heads, x, planes, out } => self.attend(step, *heads, x, *planes, out),
            Launch::TakeRows { dim, x, out } => {
                let [x, out] = self.arena.disjoint([x.range(step.bindings), out.range(step.bindings)]);
                for (row, out) in step.inputs.logit_rows.iter().zip(out.chunks_exact_mut(*dim)) {
                    out.copy_from_slice(&x[*row as usize * dim..][..*dim]);
                }
            }
            Launch::Sample { vocab, vocab_known, logits } => self.sample(step, *vocab, *vocab_known, logits),
            Launch::Copy { from, to, bytes } => {
                let elements = bytes.eval(step.bindings).unwrap_or(0) as usize / 4;
                self.arena.copy(*from..*from + elements, *to);
            }
        }
    }

    fn embed(&mut self, step: &StepView<'_>, table: &[u16], layout: TableLayout, region: &Region) {
        let call = EmbedCall {
            table,
            layout,
            ids: &step.inputs.token_ids,
            sources: &step.inputs.token_sources,
            sampled: &self.previous_ids,
            out: self.arena.one(region.range(step.bindings)),
        };
        embed(&mut self.pool, call);
    }

    fn qk_norm(&mut self, step: &StepView<'_>, heads: Heads, eps: f32, weight: &[u16], qkv: &Region) {
        let call = QkNormCall {
            rows: step.rows(qkv),
            q_heads: heads.q as usize,
            kv_heads: heads.kv as usize,
            head_dim: heads.dim as usize,
            eps,
            weight,
            qkv: self.arena.one(qkv.range(step.bindings)),
        };
        qk_norm(self.kernels, &mut self.pool, call);
    }

    fn linear(
        &mut self,
        step: &StepView<'_>,
        shape: &Linear,
        x: &Region,
        weight: &[u16],
        bias: Option<&[u16]>,
        residual: &ResidualAt,
        out: &Region,
    ) {
        let rows = step.rows(x);
        let (x, out) = (x.range(step.bindings), out.range(step.bindings));
        let (x, residual, out): (&[f32], _, _) = match residual {
            ResidualAt::None | ResidualAt::InPlace => {
                let [x, out] = self.arena.disjoint([x, out]);
                let residual = if *residual == ResidualAt::None { Residual::None } else { Residual::InPlace };
                (x, residual, out)
            }
            ResidualAt::Separate(residual) => {
                let [x, residual, out] = self.arena.disjoint([x, residual.range(step.bindings), out]);
                (x, Residual::Separate(residual), out)
            }
        };
        let parts = self.parts.as_mut_slice();
        let (n, k, swiglu) = (shape.n as usize, shape.k as usize, shape.act == Activation::SwiGlu);
        linear(self.kernels, &mut self.pool, LinearCall { rows, n, k, swiglu, x, weight, bias, residual, out, parts });
    }

    fn rope_append(&mut self, step: &StepView<'_>, heads: Heads, x: &Region, table: &[f32], planes: [u32; 2], out: &Region) {
        let [x, out] = self.arena.disjoint([x.range(step.bindings), out.range(step.bindings)]);
        let (k_plane, v_plane) = self.kv.layer_mut(planes[0], planes[1]);
        let call = RopeCall {
            q_heads: heads.q as usize,
            kv_heads: heads.kv as usize,
            head_dim: heads.dim as usize,
            positions: &step.inputs.positions,
            slots: &step.inputs.kv_slots,
            x,
            table,
            k_plane,
            v_plane,
            out,
        };
        rope_append(self.kernels, &mut self.pool, call);
    }

    fn attend(&mut self, step: &StepView<'_>, heads: Heads, x: &Region, planes: [u32; 2], out: &Region) {
        let [x, out] = self.arena.disjoint([x.range(step.bindings), out.range(step.bindings)]);
        let (k_plane, v_plane) = self.kv.layer(planes[0], planes[1]);
        let call = AttendCall {
            q_heads: heads.q as usize,
            kv_heads: heads.kv as usize,
            head_dim: heads.dim as usize,
            page_tokens: heads.page_tokens as usize,
            x,
            k_plane,
            v_plane,
            query_starts: &step.inputs.query_starts,
            kv_lens: &step.inputs.kv_lens,
            block_tables: &step.inputs.block_tables,
            table_stride: self.table_stride,
            out,
            scratch: &mut self.attend,
        };
        attend(self.kernels, &mut self.pool, call);
    }

    fn sample(&mut self, step: &StepView<'_>, vocab: usize, vocab_known: usize, logits: &Region) {
        let inputs = step.inputs;
        let call = SampleCall {
            vocab,
            vocab_known,
            logits: self.arena.one(logits.range(step.bindings)),
            sampling: &inputs.sampling,
            bias_starts: &inputs.bias_starts,
            bias_ids: &inputs.bias_ids,
            bias_values: &inputs.bias_values,
            history_starts: &inputs.history_starts,
            history_ids: &inputs.history_ids,
            history_counts: &inputs.history_counts,
            mask: &inputs.mask,
            sampled_ids: &mut self.outputs.sampled_ids,
            sampled_logprobs: &mut self.outputs.sampled_logprobs,
            top_ids: &mut self.outputs.top_ids,
            top_logprobs: &mut self.outputs.top_logprobs,
            scratch: &self.sample,
        };
        sample(self.kernels, &mut self.pool, call);
    }
}

fn attend_bounds(plan: &Plan, program: &Program, threads: usize) -> AttendBounds {
    let bounds = plan.bounds();
    let widest = |get: fn(&Heads) -> u32| program.attend.iter().map(get).max().unwrap_or(0) as usize;
    AttendBounds {
        tokens: bounds.tokens_max as usize,
        seqs: bounds.seqs_max as usize,
        context: bounds.pages_per_seq_max as usize * plan.kv().page_tokens as usize,
        q_heads: widest(|heads| heads.q),
        kv_heads: widest(|heads| heads.kv),
        head_dim: widest(|heads| heads.dim),
        threads,
    }
}
