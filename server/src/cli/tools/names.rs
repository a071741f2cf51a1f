//! Plan parts as reports name them: by what they are instead of by their number, so that they compare across plans.

use oxide_bundle::Bundle;
use oxide_bundle::dump::{ExtentText, input_name, output_name};
use oxide_bundle::ids::{BufferId, KernelId, WeightId};
use oxide_bundle::plan::{BatchClass, Plan, Step, Value};

/// `decode 8`, `mixed 256x8`.
pub(super) fn class(class: BatchClass) -> String {
    match class {
        BatchClass::Decode { seqs } => format!("decode {seqs}"),
        BatchClass::Mixed { tokens, seqs } => format!("mixed {tokens}x{seqs}"),
    }
}

/// The kernel's contract, types and code: equal for kernels that do the same with the same code.
pub(super) fn kernel(bundle: &Bundle, id: KernelId) -> String {
    let Some(kernel) = bundle.plan().kernels().get(id.index()) else { return id.to_string() };
    let contract = &kernel.contract;
    let mut name = format!("{contract} weight={} kv={} out={}", contract.weight, contract.kv, contract.out);
    if let Some(artifact) = kernel.code.as_ref().and_then(|code| bundle.artifacts().get(code.artifact.index())) {
        name += &format!(" code={}", artifact.sha256.short());
    }
    name
}

/// Label of a buffer.
pub(super) fn buffer(plan: &Plan, id: BufferId) -> String {
    plan.buffers().get(id.index()).map_or_else(|| id.to_string(), |buffer| buffer.label.clone())
}

/// Name of a weight.
pub(super) fn weight(plan: &Plan, id: WeightId) -> String {
    plan.weights().get(id.index()).map_or_else(|| id.to_string(), |weight| weight.name.clone())
}

/// What an operand refers to.
pub(super) fn value(plan: &Plan, value: Value) -> String {
    match value {
        Value::Buffer(id) => buffer(plan, id),
        Value::Weight(id) => weight(plan, id),
        Value::KPlane(layer) => format!("kv.k{layer}"),
        Value::VPlane(layer) => format!("kv.v{layer}"),
        Value::Input(slot) => format!("in.{}", input_name(slot)),
        Value::Output(slot) => format!("out.{}", output_name(slot)),
        Value::Scalar(extent) => ExtentText(extent).to_string(),
    }
}

/// A step with every reference by name.
pub(super) fn step(bundle: &Bundle, step: &Step) -> String {
    let plan = bundle.plan();
    match step {
        Step::Launch { kernel: id, grid, operands } => {
            let operands: Vec<String> =
                operands.iter().map(|operand| format!("{:?}={}", operand.role, value(plan, operand.value))).collect();
            let grid = grid.map(|extent| ExtentText(extent).to_string()).join(",");
            format!("{} ({}) grid {grid}", kernel(bundle, *id), operands.join(", "))
        }
        Step::Copy { from, to, bytes } => format!("copy {} -> {} {}", buffer(plan, *from), buffer(plan, *to), ExtentText(*bytes)),
    }
}

/// A step in a few words: operator, static dimensions and weight.
pub(super) fn brief(bundle: &Bundle, step: &Step) -> String {
    let plan = bundle.plan();
    match step {
        Step::Copy { from, to, .. } => format!("copy {} to {}", buffer(plan, *from), buffer(plan, *to)),
        Step::Launch { kernel: id, operands, .. } => {
            let contract = plan.kernels().get(id.index()).map(|kernel| kernel.contract.to_string()).unwrap_or_default();
            let weights =
                operands.iter().filter_map(|operand| if let Value::Weight(id) = operand.value { Some(weight(plan, id)) } else { None });
            format!("{id} {contract} {}", weights.collect::<Vec<_>>().join(", "))
        }
    }
}
