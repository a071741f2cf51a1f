//! The one reservation of device memory: what the ledger says, in one allocation, or a refusal that names the consumers.

use super::AdmitError;
use super::driver::{Context, CudaError, DeviceMemory, DevicePtr, Stream};
use super::link::Addresses;
use super::slots::OutputLayout;
use oxide_bundle::Bundle;

/// Device memory left to the driver and its context.
const MEMORY_RESERVE_BYTES: u64 = 512 << 20;
/// Alignment of the parts of the reservation.
const PART_ALIGN: u64 = 2 << 20;
/// Consumers that a refusal names.
const CONSUMERS_NAMED: usize = 3;

/// Everything on the device, in one allocation.
pub(super) struct Reservation {
    memory: DeviceMemory,
    pub(super) addresses: Addresses,
    pub(super) outputs: OutputLayout,
}

/// What the parts need, in bytes.
#[derive(Copy, Clone, Debug)]
struct Needs {
    weights: u64,
    arena: u64,
    inputs: u64,
    outputs: u64,
    page: u64,
}

impl Needs {
    fn of(bundle: &Bundle, input_bytes: u64, output_bytes: u64) -> Self {
        let plan = bundle.plan();
        Self {
            weights: (bundle.weights_range().len() as u64).next_multiple_of(PART_ALIGN),
            arena: plan.arena_bytes().next_multiple_of(PART_ALIGN),
            inputs: input_bytes.next_multiple_of(PART_ALIGN),
            outputs: output_bytes.next_multiple_of(PART_ALIGN),
            page: 2 * u64::from(plan.kv().layers) * plan.kv().plane_page_bytes(),
        }
    }

    /// Everything but the KV cache.
    fn fixed(&self) -> u64 {
        self.weights + self.arena + self.inputs + self.outputs
    }

    /// The refusal of `pages` KV pages of `page_tokens` tokens: the ledger, then the largest consumers and what makes them smaller.
    fn refusal(&self, pages: u64, page_tokens: u32, (free, total): (u64, u64)) -> String {
        let kv = pages.saturating_mul(self.page);
        let mut consumers = [
            ("weights", self.weights, "a smaller model"),
            ("activations", self.arena, "a smaller --max-seqs of oxide-compile"),
            ("step inputs", self.inputs, "a smaller --max-seqs or --max-context of oxide-compile"),
            ("step outputs", self.outputs, "a smaller --max-seqs of oxide-compile"),
            ("KV cache", kv, "a smaller --kv-memory"),
        ];
        let ledger = consumers.map(|(name, bytes, _)| format!("{name} {bytes} B")).join(", ");
        consumers.sort_by_key(|(_, bytes, _)| std::cmp::Reverse(*bytes));
        let largest: Vec<_> =
            consumers.iter().take(CONSUMERS_NAMED).map(|(name, bytes, flag)| format!("{name} {bytes} B ({flag})")).collect();
        format!(
            "not enough device memory: {free} B of {total} B are free and {} B are needed: {ledger} ({pages} pages of {page_tokens} tokens, \
             one of them for padding), {MEMORY_RESERVE_BYTES} B left to the driver; the largest consumers: {}",
            self.fixed().saturating_add(kv).saturating_add(MEMORY_RESERVE_BYTES),
            largest.join(", ")
        )
    }
}

/// Reserves memory for the ledger; `kv_pages` as asked for, or as many of the bundle's default as fit.
///
/// # Errors
/// If it does not fit, or the driver fails.
pub(super) fn reserve(bundle: &Bundle, context: &Context, input_bytes: u64, kv_pages: Option<u32>) -> Result<Reservation, AdmitError> {
    let plan = bundle.plan();
    let outputs = OutputLayout::new(plan.bounds());
    let needs = Needs::of(bundle, input_bytes, outputs.bytes);
    let memory = context.memory()?;
    let room = memory.0.saturating_sub(MEMORY_RESERVE_BYTES + needs.fixed()) / needs.page.max(1);
    let default = bundle.manifest().ledger.kv_pages_default;
    let wanted = kv_pages.unwrap_or_else(|| default.min(u32::try_from(room.saturating_sub(1)).unwrap_or(u32::MAX)));
    // One page more than the pool has: padding rows append to it, and nobody reads it.
    let pages = u64::from(wanted.max(1)) + 1;
    let refusal = || needs.refusal(pages, plan.kv().page_tokens, memory);
    if wanted == 0 || pages > room {
        return Err(AdmitError::Memory(refusal()));
    }
    let memory = DeviceMemory::alloc(needs.fixed() + pages * needs.page).map_err(|error| match error {
        CudaError::Call { code: CudaError::OUT_OF_MEMORY, .. } => AdmitError::Memory(format!("{}; {error}", refusal())),
        other => other.into(),
    })?;
    let weights = memory.ptr();
    let arena = weights.offset(needs.weights);
    let inputs = arena.offset(needs.arena);
    let outputs_at = inputs.offset(needs.inputs);
    let kv = outputs_at.offset(needs.outputs);
    let addresses = Addresses { weights, arena, kv, inputs, outputs: outputs_at, kv_pages: pages as u32 };
    Ok(Reservation { memory, addresses, outputs })
}

impl Reservation {
    /// Zeroes everything but the weights: state buffers start at zero, and no kernel ever reads a NaN that nobody wrote.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn zero(&self, stream: &Stream, bundle: &Bundle) -> Result<(), CudaError> {
        let weight_bytes = bundle.weights_range().len() as u64 & !3;
        let rest = self.memory.bytes() - weight_bytes;
        stream.fill(DevicePtr(self.addresses.weights.0 + weight_bytes), 0, rest / 4)
    }
}
