//! Checks of the tables: counts, agreement with the manifest, buffers, weights, kernels.

use super::{Place, PlanErrorKind, Report};
use crate::container::layout::{ENTRIES_MAX, PAGE_TOKENS_MAX, TENSOR_ALIGN};
use crate::contract::{Activation, Contract, Heads, Linear, Op};
use crate::ids::{BufferId, KernelId, WeightId};
use crate::ledger;
use crate::manifest::{Manifest, Target};
use crate::plan::{BufferKind, KernelDecl, PLAN_VERSION, RawPlan, Step, WeightDecl, WeightLayout};
use std::collections::BTreeSet;

const BUFFERS_MAX: u64 = 8192;
const WEIGHTS_MAX: u64 = 65_536;
const KERNELS_MAX: u64 = 4096;
const STEPS_MAX: u64 = 65_536;
const OPERANDS_MAX: u64 = 64;
const SHAPE_DIMS_MAX: u64 = 4;
const TOKENS_MAX: u64 = 1 << 20;
const SEQS_MAX: u64 = 1 << 16;
const PAGES_PER_SEQ_MAX: u64 = 1 << 22;
const LISTS_MAX: u64 = 1 << 26;
const VOCAB_MAX: u64 = 1 << 24;
const WIDTH_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 4096;
const HEADS_MAX: u64 = 4096;
const HEAD_DIM_MAX: u64 = 4096;
const ARENA_BYTES_MAX: u64 = 1 << 42;

/// Bounds every count and dimension, so that later arithmetic cannot overflow.
pub(super) fn check_counts(raw: &RawPlan, report: &mut Report) {
    report.require(
        raw.version == PLAN_VERSION,
        || Place::Plan,
        PlanErrorKind::Version,
        || format!("version is {}, allowed is {PLAN_VERSION}", raw.version),
    );
    let (bounds, kv) = (&raw.bounds, &raw.kv);
    let longest_entry = raw.entries.iter().map(|entry| entry.steps.len()).max().unwrap_or(0);
    let operands = |step: &Step| match step {
        Step::Launch { operands, .. } => operands.len(),
        Step::Copy { .. } => 0,
    };
    let most_operands = raw.entries.iter().flat_map(|entry| &entry.steps).map(operands).max().unwrap_or(0);
    let most_dims = raw.weights.iter().map(|weight| weight.shape.len()).max().unwrap_or(1);
    for (what, found, min, max) in [
        ("tokens of a step", bounds.tokens_max.into(), 1, TOKENS_MAX),
        ("sequences of a step", bounds.seqs_max.into(), 1, SEQS_MAX),
        ("logit rows of a step", bounds.rows_max.into(), 1, TOKENS_MAX),
        ("pages of a sequence", bounds.pages_per_seq_max.into(), 1, PAGES_PER_SEQ_MAX),
        ("bias entries", bounds.bias_max.into(), 0, LISTS_MAX),
        ("history entries", bounds.history_max.into(), 0, LISTS_MAX),
        ("vocabulary", bounds.vocab.into(), 1, VOCAB_MAX),
        ("layers", kv.layers.into(), 1, LAYERS_MAX),
        ("tokens of a KV page", kv.page_tokens.into(), 1, PAGE_TOKENS_MAX.into()),
        ("key/value heads", kv.kv_heads.into(), 1, HEADS_MAX),
        ("head width", kv.head_dim.into(), 1, HEAD_DIM_MAX),
        ("arena bytes", raw.arena_bytes, 0, ARENA_BYTES_MAX),
        ("buffers", raw.buffers.len() as u64, 0, BUFFERS_MAX),
        ("weights", raw.weights.len() as u64, 1, WEIGHTS_MAX),
        ("dimensions of a weight", most_dims as u64, 1, SHAPE_DIMS_MAX),
        ("kernels", raw.kernels.len() as u64, 0, KERNELS_MAX),
        ("entries", raw.entries.len() as u64, 1, ENTRIES_MAX.into()),
        ("steps of an entry", longest_entry as u64, 0, STEPS_MAX),
        ("operands of a step", most_operands as u64, 0, OPERANDS_MAX),
    ] {
        report.require(
            (min..=max).contains(&found),
            || Place::Plan,
            PlanErrorKind::Count,
            || format!("{what}: {found}, allowed is {min} to {max}"),
        );
    }
}

/// Checks the tables and the manifest's claims about them.
pub(super) fn check(raw: &RawPlan, manifest: &Manifest, report: &mut Report) {
    check_manifest(raw, manifest, report);
    check_tokens(manifest, report);
    check_buffers(raw, report);
    check_weights(raw, manifest, report);
    check_kernels(raw, manifest, report);
}

fn check_manifest(raw: &RawPlan, manifest: &Manifest, report: &mut Report) {
    let (model, limits, found) = (&manifest.model, &manifest.limits, &manifest.ledger);
    let ledger = ledger::ledger(raw, found.kv_pages_default);
    let pages =
        limits.context_max.checked_div(raw.kv.page_tokens).unwrap_or(0) + u32::from(!limits.context_max.is_multiple_of(raw.kv.page_tokens));
    for (what, plan, manifest) in [
        ("layers", raw.kv.layers.into(), model.layers.into()),
        ("key/value heads", raw.kv.kv_heads.into(), model.kv_heads.into()),
        ("head width", raw.kv.head_dim.into(), model.head_dim.into()),
        ("vocabulary", raw.bounds.vocab.into(), model.vocab.into()),
        ("bytes of a KV element", raw.kv.dtype.bytes(), model.kv_dtype.bytes()),
        ("tokens of a KV page", raw.kv.page_tokens.into(), limits.page_tokens.into()),
        ("pages of a sequence", raw.bounds.pages_per_seq_max.into(), pages.into()),
        ("weight bytes", ledger.weight_bytes, found.weight_bytes),
        ("arena bytes", ledger.arena_bytes, found.arena_bytes),
        ("input bytes", ledger.input_bytes, found.input_bytes),
        ("output bytes", ledger.output_bytes, found.output_bytes),
        ("KV bytes of a token", ledger.kv_bytes_per_token, found.kv_bytes_per_token),
        ("bytes of the default KV pool", ledger.kv_bytes_default, found.kv_bytes_default),
    ] {
        report.require(
            plan == manifest,
            || Place::Plan,
            PlanErrorKind::Manifest,
            || format!("{what}: the plan gives {plan}, the manifest says {manifest}"),
        );
    }
    let largest_seqs = raw.entries.iter().map(|entry| entry.class.seqs_max()).max().unwrap_or(0);
    let largest_tokens = raw.entries.iter().map(|entry| entry.class.tokens_max()).max().unwrap_or(0);
    for (what, found, max) in [
        ("sequences running together", limits.seqs_max, largest_seqs),
        ("tokens of the largest step", limits.step_tokens_max, largest_tokens),
        ("ids of the tokenizer", model.vocab_known, model.vocab),
    ] {
        report.require(
            (1..=max).contains(&found),
            || Place::Plan,
            PlanErrorKind::Manifest,
            || format!("{what}: the manifest says {found}, allowed is 1 to {max}"),
        );
    }
}

fn check_tokens(manifest: &Manifest, report: &mut Report) {
    let tokens = &manifest.tokens;
    let ids = tokens.bos.iter().chain(&tokens.pad).chain(&tokens.eos).chain(tokens.control.values());
    for id in ids.filter(|id| **id >= manifest.model.vocab) {
        let message = format!("special token {id} is outside the vocabulary of {}", manifest.model.vocab);
        report.add(Place::Plan, PlanErrorKind::Manifest, message);
    }
}

fn check_buffers(raw: &RawPlan, report: &mut Report) {
    for (index, buffer) in (0..).zip(&raw.buffers) {
        let mut require = |holds: bool, message: &dyn Fn() -> String| {
            report.require(holds, || Place::Row(BufferId(index).to_string()), PlanErrorKind::BadBuffer, message);
        };
        let end = buffer.offset_bytes.checked_add(buffer.size_bytes);
        require(end.is_some_and(|end| end <= raw.arena_bytes), &|| {
            format!("{} spans {} + {} bytes, the arena has {}", buffer.label, buffer.offset_bytes, buffer.size_bytes, raw.arena_bytes)
        });
        require(buffer.offset_bytes.is_multiple_of(TENSOR_ALIGN), &|| {
            format!("{} starts at {}, which is not a multiple of {TENSOR_ALIGN}", buffer.label, buffer.offset_bytes)
        });
        require(buffer.elements.div != 0, &|| format!("{} has elements divided by 0", buffer.label));
        if buffer.kind == BufferKind::State {
            check_state(raw, index, report);
        }
    }
}

/// A state buffer shares no byte with any other.
fn check_state(raw: &RawPlan, index: u32, report: &mut Report) {
    let Some(state) = raw.buffers.get(index as usize) else { return };
    for (other_index, other) in (0..).zip(&raw.buffers) {
        // Two state buffers are compared once.
        if other_index == index || other.kind == BufferKind::State && other_index < index {
            continue;
        }
        report.require(
            !state.shares_bytes(other),
            || Place::Row(BufferId(index).to_string()),
            PlanErrorKind::LiveOverlap,
            || format!("state buffer {} shares bytes with {} {}", state.label, BufferId(other_index), other.label),
        );
    }
}

fn check_weights(raw: &RawPlan, manifest: &Manifest, report: &mut Report) {
    let mut end = 0_u64;
    let mut names = BTreeSet::new();
    for (index, weight) in (0..).zip(&raw.weights) {
        let mut require = |holds: bool, message: &dyn Fn() -> String| {
            report.require(holds, || Place::Row(WeightId(index).to_string()), PlanErrorKind::BadWeight, message);
        };
        let WeightDecl { name, offset_bytes: offset, size_bytes: size, .. } = weight;
        require(names.insert(name.as_str()), &|| format!("{name} occurs twice"));
        require(offset.is_multiple_of(TENSOR_ALIGN), &|| format!("{name} starts at {offset}, which is not a multiple of {TENSOR_ALIGN}"));
        require(*offset >= end, &|| format!("{name} starts at {offset}, before the weight before it ends at {end}"));
        let expected = weight.expected_bytes();
        require(expected == Some(*size), &|| match expected {
            Some(expected) => format!("{name} has {size} bytes, its shape {:?} needs {expected}", weight.shape),
            None => format!("{name} has an impossible shape {:?}", weight.shape),
        });
        require(layout_fits(weight, manifest.target), &|| {
            format!("{name} of shape {:?} has layout {:?}, which target {} does not read", weight.shape, weight.layout, manifest.target)
        });
        end = end.max(offset.saturating_add(*size));
    }
    let weight_bytes = manifest.ledger.weight_bytes;
    report.require(
        end <= weight_bytes,
        || Place::Plan,
        PlanErrorKind::BadWeight,
        || format!("the weights end at byte {end}, the weight section has {weight_bytes}"),
    );
}

fn layout_fits(weight: &WeightDecl, target: Target) -> bool {
    let k = weight.shape.get(1).copied().unwrap_or(0);
    match (weight.layout, target) {
        (WeightLayout::RowMajor, _) => true,
        (WeightLayout::Panel16, Target::Cpu) => weight.shape.len() == 2 && k.is_multiple_of(2),
        (WeightLayout::PanelK64, Target::Sm90) => weight.shape.len() == 2 && k.is_multiple_of(64),
        (WeightLayout::Panel16, Target::Sm90) | (WeightLayout::PanelK64, Target::Cpu) => false,
    }
}

fn check_kernels(raw: &RawPlan, manifest: &Manifest, report: &mut Report) {
    for (index, kernel) in (0..).zip(&raw.kernels) {
        let place = || Place::Row(KernelId(index).to_string());
        if let Some(reason) = dimension_fault(&kernel.contract, raw) {
            report.add(place(), PlanErrorKind::BadKernel, format!("{}: {reason}", kernel.contract.op.name()));
        }
        report.require(code_fits(kernel, manifest.target), place, PlanErrorKind::BadKernel, || match &kernel.code {
            Some(code) => format!("{} names code object {}, target {} has none", kernel.contract.op.name(), code.artifact, manifest.target),
            None => format!("{} names no code object, target {} needs one", kernel.contract.op.name(), manifest.target),
        });
    }
}

fn code_fits(kernel: &KernelDecl, target: Target) -> bool {
    match target {
        Target::Cpu => kernel.code.is_none(),
        Target::Sm90 => kernel.code.as_ref().is_some_and(|code| !code.symbol.is_empty()),
    }
}

/// What is wrong with a contract's dimensions. Steps of such a kernel are not checked further.
pub(super) fn dimension_fault(contract: &Contract, raw: &RawPlan) -> Option<String> {
    if contract.kv != raw.kv.dtype {
        return Some(format!("KV type is {}, the cache has {}", contract.kv, raw.kv.dtype));
    }
    match &contract.op {
        Op::Embed { vocab, dim } => width_fault("vocabulary", *vocab).or_else(|| width_fault("width", *dim)),
        Op::RmsNorm { dim, .. } | Op::AddRmsNorm { dim, .. } | Op::TakeRows { dim } => width_fault("width", *dim),
        Op::QkNorm { heads, .. } | Op::RopeAppend { heads } | Op::Attend { heads, .. } => heads_fault(heads, raw),
        Op::Linear(linear) => linear_fault(linear),
        Op::QkvRopeAppend { linear, heads } => linear_fault(linear).or_else(|| heads_fault(heads, raw)).or_else(|| {
            let plain = linear.act == Activation::None && !linear.residual && linear.n == heads.qkv_width();
            (!plain).then(|| format!("projection ({linear}) is not the [q | k | v] of {heads}"))
        }),
        Op::Sample { vocab, vocab_known } => {
            let fits = *vocab == raw.bounds.vocab && (1..=*vocab).contains(vocab_known);
            (!fits).then(|| format!("vocabulary {vocab} ({vocab_known} known), the plan has {}", raw.bounds.vocab))
        }
    }
}

fn width_fault(what: &str, found: u32) -> Option<String> {
    let fits = (1..=WIDTH_MAX).contains(&u64::from(found));
    (!fits).then(|| format!("{what} is {found}, allowed is 1 to {WIDTH_MAX}"))
}

fn linear_fault(linear: &Linear) -> Option<String> {
    let odd = linear.act == Activation::SwiGlu && !linear.n.is_multiple_of(2);
    width_fault("n", linear.n).or_else(|| width_fault("k", linear.k)).or_else(|| odd.then(|| format!("SwiGLU of odd n = {}", linear.n)))
}

fn heads_fault(heads: &Heads, raw: &RawPlan) -> Option<String> {
    let kv = &raw.kv;
    let same = heads.kv == kv.kv_heads && heads.dim == kv.head_dim && heads.page_tokens == kv.page_tokens;
    let shape = (1..=HEADS_MAX).contains(&u64::from(heads.q)) && heads.q.is_multiple_of(heads.kv.max(1)) && heads.dim.is_multiple_of(2);
    let cache = format!("kv={} d={} page={}", kv.kv_heads, kv.head_dim, kv.page_tokens);
    (!(same && shape)).then(|| format!("heads ({heads}) do not fit the cache ({cache})"))
}
