//! Exact memory arithmetic of a plan.

use crate::container::layout::{TENSOR_ALIGN, align_up};
use crate::manifest::Ledger;
use crate::plan::RawPlan;
use crate::step::{InputSlot, OutputSlot, StepBounds};

/// Offset of each input slot in the input block (256-byte aligned, in order of [`InputSlot::ALL`]), and the block's size.
pub fn input_block(bounds: &StepBounds) -> ([u64; InputSlot::ALL.len()], u64) {
    block(InputSlot::ALL.map(|slot| slot.bytes(bounds)))
}

/// Offset of each output slot in the output block (256-byte aligned, in order of [`OutputSlot::ALL`]), and the block's size.
pub fn output_block(bounds: &StepBounds) -> ([u64; OutputSlot::ALL.len()], u64) {
    block(OutputSlot::ALL.map(|slot| slot.bytes(bounds)))
}

/// The ledger of a plan with a pool of `kv_pages_default` pages.
pub fn ledger(plan: &RawPlan, kv_pages_default: u32) -> Ledger {
    let kv_bytes_per_token = plan.kv.bytes_per_token();
    Ledger {
        weight_bytes: weight_bytes(plan),
        arena_bytes: plan.arena_bytes,
        input_bytes: input_block(&plan.bounds).1,
        output_bytes: output_block(&plan.bounds).1,
        kv_bytes_per_token,
        kv_pages_default,
        kv_bytes_default: kv_bytes_per_token.saturating_mul(u64::from(plan.kv.page_tokens)).saturating_mul(u64::from(kv_pages_default)),
    }
}

/// Length of the weight section: the end of the last weight.
pub fn weight_bytes(plan: &RawPlan) -> u64 {
    plan.weights.last().map_or(0, |weight| weight.offset_bytes.saturating_add(weight.size_bytes))
}

fn block<const N: usize>(sizes: [u64; N]) -> ([u64; N], u64) {
    let mut end = 0_u64;
    let offsets = sizes.map(|size| {
        let offset = end;
        end = align_up(end.saturating_add(size), TENSOR_ALIGN).unwrap_or(u64::MAX);
        offset
    });
    (offsets, end)
}
