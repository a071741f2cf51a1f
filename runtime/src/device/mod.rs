//! The waist between engine and hardware.
//!
//! A [`Device`] has linked a verified plan and runs whole entries of it. Two implementations: `cpu`
//! (weights used in place from the mapping) and `cuda` (sealed cubins, graphs). The engine thread
//! owns its device; a device is never shared.

pub mod cpu;
pub mod cuda;
pub mod place;
pub mod reference;
pub mod tolerance;

use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::Plan;
use oxide_bundle::step::SamplingRow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Values of one step, written by the engine; see [`oxide_bundle::step::InputSlot`] for meaning and shapes.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// `[T]`.
    pub token_ids: Vec<u32>,
    /// `[T]`.
    pub token_sources: Vec<u32>,
    /// `[T]`.
    pub positions: Vec<u32>,
    /// `[T]`.
    pub kv_slots: Vec<u32>,
    /// `[S, pages_per_seq_max]`.
    pub block_tables: Vec<u32>,
    /// `[S + 1]`.
    pub query_starts: Vec<u32>,
    /// `[S]`.
    pub kv_lens: Vec<u32>,
    /// `[R]`.
    pub logit_rows: Vec<u32>,
    /// `[R]`.
    pub sampling: Vec<SamplingRow>,
    /// `[R + 1]`.
    pub bias_starts: Vec<u32>,
    /// Biased ids.
    pub bias_ids: Vec<u32>,
    /// Their biases.
    pub bias_values: Vec<f32>,
    /// `[R + 1]`.
    pub history_starts: Vec<u32>,
    /// Ids seen.
    pub history_ids: Vec<u32>,
    /// Their counts.
    pub history_counts: Vec<u32>,
    /// `[R, ceil(vocab/32)]` if any row is masked, else empty.
    pub mask: Vec<u32>,
}

impl StepInputs {
    /// Tokens of the step.
    pub fn tokens(&self) -> u32 {
        self.token_ids.len() as u32
    }

    /// Sequences of the step.
    pub fn seqs(&self) -> u32 {
        self.kv_lens.len() as u32
    }

    /// Logit rows of the step.
    pub fn rows(&self) -> u32 {
        self.logit_rows.len() as u32
    }

    /// Empties every list, keeping its allocation.
    pub fn clear(&mut self) {
        let Self {
            token_ids,
            token_sources,
            positions,
            kv_slots,
            block_tables,
            query_starts,
            kv_lens,
            logit_rows,
            sampling,
            bias_starts,
            bias_ids,
            bias_values,
            history_starts,
            history_ids,
            history_counts,
            mask,
        } = self;
        for list in [
            token_ids,
            token_sources,
            positions,
            kv_slots,
            block_tables,
            query_starts,
            kv_lens,
            logit_rows,
            bias_starts,
            bias_ids,
            history_starts,
            history_ids,
            history_counts,
            mask,
        ] {
            list.clear();
        }
        sampling.clear();
        bias_values.clear();
    }
}

/// Values that a step left; see [`oxide_bundle::step::OutputSlot`].
#[derive(Clone, Debug, Default)]
pub struct StepOutputs {
    /// `[R]`.
    pub sampled_ids: Vec<u32>,
    /// `[R]`.
    pub sampled_logprobs: Vec<f32>,
    /// `[R, TOP_LOGPROBS_MAX]`; only rows that asked for alternatives are meaningful. May be empty if no row did.
    pub top_ids: Vec<u32>,
    /// As `top_ids`.
    pub top_logprobs: Vec<f32>,
}

/// Failure of a device. The engine fails the affected requests and stops: it never retries a step.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The plan names a contract that the device has no code for.
    #[error("no code for kernel contract `{contract}` on the {device} device")]
    MissingKernel {
        /// The contract.
        contract: String,
        /// The device.
        device: &'static str,
    },
    /// A step's operands do not fit its kernel.
    #[error("{entry} {step} ({kernel}): {reason}")]
    BadLaunch {
        /// Entry.
        entry: String,
        /// Step.
        step: String,
        /// Contract.
        kernel: String,
        /// What is wrong.
        reason: String,
    },
    /// A batch does not fit the entry it was submitted to.
    #[error("batch of {tokens} tokens, {seqs} sequences, {rows} rows does not fit entry {entry}")]
    OverEntry {
        /// Entry.
        entry: String,
        /// Tokens submitted.
        tokens: u32,
        /// Sequences submitted.
        seqs: u32,
        /// Rows submitted.
        rows: u32,
    },
    /// Memory for the ledger is not there.
    #[error("{message}")]
    OutOfMemory {
        /// The ledger, the largest consumers and their flags.
        message: String,
    },
    /// The driver or the hardware failed.
    #[error("device failed: {message}")]
    Failed {
        /// Kernel, step and driver's words.
        message: String,
    },
}

/// Identity of a device, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `cpu` or `cuda`.
    pub kind: &'static str,
    /// Name of the hardware and the code path chosen, for example `AMD EPYC (avx512_bf16, 2 threads)`.
    pub name: String,
}

/// How often each sealed artifact was launched. Readable from any thread.
#[derive(Debug)]
pub struct LaunchCounters {
    rows: Vec<(String, String, AtomicU64)>,
}

impl LaunchCounters {
    /// Counters at zero for artifacts given as (name, SHA-256).
    pub fn new(artifacts: Vec<(String, String)>) -> Self {
        Self { rows: artifacts.into_iter().map(|(name, sha256)| (name, sha256, AtomicU64::new(0))).collect() }
    }

    /// Counts one launch of an artifact; an index that does not exist is ignored.
    pub fn add(&self, artifact: usize) {
        if let Some((_, _, count)) = self.rows.get(artifact) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Name, SHA-256 and launches of every artifact.
    pub fn snapshot(&self) -> impl Iterator<Item = (&str, &str, u64)> {
        self.rows.iter().map(|(name, sha256, count)| (name.as_str(), sha256.as_str(), count.load(Ordering::Relaxed)))
    }
}

/// A device with a linked plan.
///
/// `submit` and `collect` are paired, first in first out, with at most [`Device::depth`] steps
/// submitted and not collected. A step may read the ids sampled by the step submitted just before it
/// (`token_sources`).
pub trait Device: Send {
    /// Identity.
    fn info(&self) -> DeviceInfo;

    /// The linked plan.
    fn plan(&self) -> &Arc<Plan>;

    /// Pages of the KV pool.
    fn kv_pages(&self) -> u32;

    /// Steps that may be in flight: 1 runs synchronously, 2 lets the host run one step ahead.
    fn depth(&self) -> usize;

    /// Launches by artifact, on devices that run sealed code objects.
    fn launch_counters(&self) -> Option<Arc<LaunchCounters>> {
        None
    }

    /// Starts a step. May run it to its end.
    ///
    /// # Errors
    /// If the inputs do not fit the entry, or the device fails.
    fn submit(&mut self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError>;

    /// Waits for the oldest submitted step and copies its outputs.
    ///
    /// # Errors
    /// If the device failed.
    fn collect(&mut self, outputs: &mut StepOutputs) -> Result<(), DeviceError>;

    /// Copies whole KV pages `(from, to)` in every plane, after the steps submitted so far and before later ones.
    ///
    /// # Errors
    /// If a page is out of range, or the device fails.
    fn copy_pages(&mut self, pairs: &[(u32, u32)]) -> Result<(), DeviceError>;
}
