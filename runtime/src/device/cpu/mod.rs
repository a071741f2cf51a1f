//! The cpu device: runs a verified plan on the host processor.
//!
//! Weights are used in place from the mapping, activations are f32, accumulation is f32. Every
//! contract is one entry of a closed table of Rust kernels, written once over sixteen-lane vectors
//! and compiled for each instruction set; the best one is chosen when the device is linked.
//!
//! **Invariant:** a row's result depends on nothing but its own inputs: each output has one fixed
//! order of accumulation, whatever the batch, the tile or the number of threads.
//!
//! **Invariant:** running a step allocates nothing.

mod arena;
mod inputs;
mod isa;
mod kernels;
mod kv;
mod link;
mod pool;
#[cfg(test)]
mod tests;

pub use isa::Isa;
pub use link::supports;

use super::{Device, DeviceError, DeviceInfo, StepInputs, StepOutputs};
use arena::Arena;
use kernels::attend::{AttendBounds, AttendCall, AttendScratch, attend};
use kernels::linear::{LinearCall, Residual, linear};
use kernels::rope::{RopeCall, rope_append};
use kernels::rows::{NormCall, QkNormCall, TableLayout, embed_row, for_row_runs, norm, qk_norm};
use kernels::sample::{SampleCall, SampleScratch, sample};
use kernels::table::Kernels;
use kv::KvPool;
use link::{DEVICE, Launch, Program, Region, ResidualAt, WeightRange};
use oxide_bundle::contract::{Activation, Heads, Linear};
use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::{Bindings, Plan};
use oxide_bundle::step::{NONE, TOP_LOGPROBS_MAX};
use pool::{Pool, Scatter};
use std::sync::Arc;

/// The bytes of a bundle's weight section; offsets of [`oxide_bundle::plan::WeightDecl`] count from its start.
pub type WeightBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How a [`CpuDevice`] is set up.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads that compute, the caller included; the available parallelism if `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best available if `None`.
    pub isa: Option<Isa>,
    /// Pages of the KV pool.
    pub kv_pages: u32,
}

/// A linked plan on the host processor.
pub struct CpuDevice {
    plan: Arc<Plan>,
    weights: WeightBytes,
    program: Program,
    isa: Isa,
    entry_names: Vec<String>,
    state: State,
    /// Whether a step waits for [`Device::collect`].
    is_submitted: bool,
}

/// What launches work with.
struct State {
    kernels: &'static Kernels,
    pool: Pool,
    arena: Arena,
    kv: KvPool,
    attend: AttendScratch,
    sample: SampleScratch,
    outputs: StepOutputs,
    /// Ids that the step before sampled.
    previous_ids: Vec<u32>,
    table_stride: usize,
}

impl CpuDevice {
    /// Resolves every step of `plan` into a bound launch and allocates arena, KV pool and threads.
    ///
    /// # Errors
    /// If a contract has no code, a step's operands do not fit its kernel, the instruction set asked
    /// for is absent, or memory is short.
    pub fn link(plan: Arc<Plan>, weights: WeightBytes, options: CpuOptions) -> Result<Self, DeviceError> {
        let CpuOptions { threads, isa, kv_pages } = options;
        let isa = isa.unwrap_or_else(Isa::best);
        let kernels = Kernels::of(isa).ok_or_else(|| failed(format!("this processor has no {isa}")))?;
        let bytes = (*weights).as_ref();
        if !bytes.as_ptr().addr().is_multiple_of(align_of::<f32>()) {
            return Err(failed("the weight section is not aligned to 4 bytes".to_owned()));
        }
        let program = link::link(&plan, bytes.len())?;
        let threads = threads.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1).max(1);
        let state = State::new(&plan, &program, kernels, threads, kv_pages)?;
        let entry_names = (0..plan.entries().len()).map(|index| EntryId(index as u32).to_string()).collect();
        Ok(Self { plan, weights, program, isa, entry_names, state, is_submitted: false })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.state.pool.threads()
    }

    fn check(&self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        let decl = self.plan.entries().get(entry.index()).ok_or_else(|| failed(format!("the plan has no entry {entry}")))?;
        let limits = inputs::InputBounds {
            entry: &self.entry_names[entry.index()],
            class: decl.class,
            bounds: self.plan.bounds(),
            kv: self.plan.kv(),
            kv_pages: self.state.kv.pages(),
            vocab: self.program.vocab,
            positions: self.program.positions,
            previous_rows: self.state.outputs.sampled_ids.len(),
            mask_words: self.program.sample_vocab.div_ceil(32),
        };
        inputs::check(inputs, &limits)
    }
}

fn failed(message: String) -> DeviceError {
    DeviceError::Failed { message }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        let threads = self.threads();
        let plural = if threads == 1 { "" } else { "s" };
        DeviceInfo { kind: DEVICE, name: format!("{} ({}, {threads} thread{plural})", isa::processor_name(), self.isa) }
    }

    fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    fn kv_pages(&self) -> u32 {
        self.state.kv.pages()
    }

    fn depth(&self) -> usize {
        1
    }

    fn submit(&mut self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        if self.is_submitted {
            return Err(failed("a step was submitted before the last one was collected".to_owned()));
        }
        self.check(entry, inputs)?;
        let bindings = Bindings { tokens: inputs.tokens(), seqs: inputs.seqs(), rows: inputs.rows(), kv_pages: self.state.kv.pages() };
        self.state.begin(inputs.logit_rows.len());
        let step = StepView { weights: (*self.weights).as_ref(), inputs, bindings };
        for launch in &self.program.entries[entry.index()] {
            self.state.run(launch, &step);
        }
        self.is_submitted = true;
        Ok(())
    }

    fn collect(&mut self, outputs: &mut StepOutputs) -> Result<(), DeviceError> {
        if !std::mem::take(&mut self.is_submitted) {
            return Err(failed("no step was submitted".to_owned()));
        }
        let StepOutputs { sampled_ids, sampled_logprobs, top_ids, top_logprobs } = &self.state.outputs;
        outputs.sampled_ids.clone_from(sampled_ids);
        outputs.sampled_logprobs.clone_from(sampled_logprobs);
        outputs.top_ids.clone_from(top_ids);
        outputs.top_logprobs.clone_from(top_logprobs);
        Ok(())
    }

    fn copy_pages(&mut self, pairs: &[(u32, u32)]) -> Result<(), DeviceError> {
        let pages = self.state.kv.pages();
        if let Some((from, to)) = pairs.iter().find(|(from, to)| *from >= pages || *to >= pages) {
            return Err(failed(format!("cannot copy page {from} to {to}, the pool has {pages}")));
        }
        pairs.iter().for_each(|(from, to)| self.state.kv.copy_page(*from, *to));
        Ok(())
    }
}

/// One step as launches see it.
struct StepView<'a> {
    weights: &'a [u8],
    inputs: &'a StepInputs,
    bindings: Bindings,
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
    fn new(plan: &Plan, program: &Program, kernels: &'static Kernels, threads: usize, kv_pages: u32) -> Result<Self, DeviceError> {
        let short = |what: &str, bytes: u64, hint: &str| DeviceError::OutOfMemory {
            message: format!("cannot allocate {bytes} bytes of memory for {what}; {hint}"),
        };
        let bounds = plan.bounds();
        let arena_bytes = plan.arena_bytes();
        let arena = Arena::new(arena_bytes).ok_or_else(|| short("activations", arena_bytes, "compile for fewer tokens a step"))?;
        let kv_bytes = plan.kv().bytes_per_token().saturating_mul(u64::from(plan.kv().page_tokens)).saturating_mul(u64::from(kv_pages));
        let kv = KvPool::new(plan.kv(), kv_pages).ok_or_else(|| short("the KV cache", kv_bytes, "ask for fewer KV pages"))?;
        let pool = Pool::start(threads).map_err(|error| failed(format!("cannot start {threads} threads: {error}")))?;
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
            sample: SampleScratch::new(program.sample_vocab, threads),
            outputs,
            previous_ids: Vec::with_capacity(rows),
            table_stride: bounds.pages_per_seq_max as usize,
        })
    }

    /// Keeps what the last step sampled and makes room for `rows` new ids.
    fn begin(&mut self, rows: usize) {
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

    fn run(&mut self, launch: &Launch, step: &StepView<'_>) {
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
        let rows = step.rows(region);
        let out = self.arena.one(region.range(step.bindings));
        let Some(dim) = out.len().checked_div(rows) else { return };
        let out = Scatter::new(out);
        let (inputs, previous) = (step.inputs, &self.previous_ids);
        for_row_runs(&mut self.pool, rows, dim, &|first, last| {
            for row in first..last {
                let id = match inputs.token_sources[row] {
                    NONE => inputs.token_ids[row],
                    source => previous[source as usize],
                };
                // SAFETY: each row is visited once.
                embed_row(table, layout, id as usize, unsafe { out.slice_mut(row * dim, dim) });
            }
        });
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
        let (n, k, swiglu) = (shape.n as usize, shape.k as usize, shape.act == Activation::SwiGlu);
        linear(self.kernels, &mut self.pool, LinearCall { rows, n, k, swiglu, x, weight, bias, residual, out });
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
