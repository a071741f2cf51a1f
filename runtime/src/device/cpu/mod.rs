//! The cpu device: runs a verified plan on the host processor.
//!
//! Weights are used in place from the mapping, activations are f32, accumulation is f32. Every
//! contract is one entry of a closed table of Rust kernels, written once over sixteen-lane vectors
//! and compiled for each instruction set; the best one is chosen when the device is linked.
//!
//! **Invariant:** a row's result depends on nothing but its own inputs: each output has one fixed
//! order of accumulation, whatever the batch, the tile or the number of threads.

mod isa;

pub use isa::Isa;

use super::{Device, DeviceError, DeviceInfo, StepInputs, StepOutputs};
use oxide_bundle::contract::Contract;
use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::Plan;
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

/// Whether the cpu device has code for `contract`.
pub fn supports(contract: &Contract) -> bool {
    let _ = contract;
    true
}

/// A linked plan on the host processor.
pub struct CpuDevice {
    plan: Arc<Plan>,
    kv_pages: u32,
}

impl CpuDevice {
    /// Resolves every step of `plan` into a bound launch and allocates arena, KV pool and threads.
    ///
    /// # Errors
    /// If a contract has no code, a step's operands do not fit its kernel, the instruction set asked
    /// for is absent, or memory is short.
    pub fn link(plan: Arc<Plan>, weights: WeightBytes, options: CpuOptions) -> Result<Self, DeviceError> {
        let _ = weights;
        Ok(Self { plan, kv_pages: options.kv_pages })
    }
}

impl Device for CpuDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { kind: "cpu", name: String::new() }
    }

    fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    fn kv_pages(&self) -> u32 {
        self.kv_pages
    }

    fn depth(&self) -> usize {
        1
    }

    fn submit(&mut self, _entry: EntryId, _inputs: &StepInputs) -> Result<(), DeviceError> {
        Err(DeviceError::Failed { message: "not linked".into() })
    }

    fn collect(&mut self, _outputs: &mut StepOutputs) -> Result<(), DeviceError> {
        Err(DeviceError::Failed { message: "not linked".into() })
    }

    fn copy_pages(&mut self, _pairs: &[(u32, u32)]) -> Result<(), DeviceError> {
        Err(DeviceError::Failed { message: "not linked".into() })
    }
}
