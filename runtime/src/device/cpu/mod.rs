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
mod place;
mod pool;
mod run;
#[cfg(test)]
mod tests;

pub use isa::Isa;
pub use link::supports;
pub use place::CpuPlace;

use super::{Device, DeviceError, DeviceInfo, StepInputs, StepOutputs};
use kernels::table::Kernels;
use link::{DEVICE, Program};
use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::{Bindings, Plan};
use run::{State, StepView};
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
