//! Turns selections into a schedule: values get buffers, weights their order in the file.
//!
//! A value has one buffer in every class. A residual that is read for the last time is updated in
//! place; the plan's verifier recomputes liveness and would refuse a wrong decision.

use super::{Choice, PassResult, Selection, Settings, Source, Unit};
use crate::graph::{Graph, Op, Type, Value, Weight, WeightRef};
use crate::schedule::{Buffer, Call, Entry, Schedule, access};
use oxide_bundle::contract::Role;
use oxide_bundle::ids::{BufferId, WeightId};
use oxide_bundle::plan::{BufferKind, Extent, Operand, Value as PlanValue};
use std::collections::BTreeMap;

pub(super) fn run(unit: &mut Unit, settings: &Settings) -> PassResult {
    let weights = weight_order(&unit.graph);
    let mut maker = Maker {
        graph: &unit.graph,
        weight_ids: weights.iter().zip(0..).map(|(&weight, id)| (weight, WeightId(id))).collect(),
        buffers: Vec::new(),
        of_value: BTreeMap::new(),
        scratch: BTreeMap::new(),
    };
    let entries = unit.selections.iter().map(|selection| maker.entry(selection)).collect::<Result<_, String>>()?;
    let buffers = maker.buffers;
    let weights: Vec<Weight> = weights.iter().map(|&weight| unit.graph.weight(weight).clone()).collect();
    debug_assert_eq!(unit.selections.len(), settings.classes.len(), "one selection a class");
    unit.schedule = Some(Schedule { name: unit.graph.name().to_owned(), buffers, weights, entries });
    Ok(())
}

/// Weights slab by slab, in order of first use inside one.
fn weight_order(graph: &Graph) -> Vec<WeightRef> {
    let mut order = graph.weights_used();
    order.sort_by_key(|&weight| super::emit::slab(&graph.weight(weight).name));
    order
}

struct Maker<'a> {
    graph: &'a Graph,
    weight_ids: BTreeMap<WeightRef, WeightId>,
    buffers: Vec<Buffer>,
    of_value: BTreeMap<Value, BufferId>,
    scratch: BTreeMap<(usize, Role), BufferId>,
}

impl Maker<'_> {
    fn entry(&mut self, selection: &Selection) -> Result<Entry, String> {
        let last_reads = last_reads(selection);
        let mut calls = Vec::new();
        for (index, choice) in selection.choices.iter().enumerate() {
            calls.push(self.call(index, choice, &last_reads)?);
        }
        Ok(Entry { class: selection.class, calls })
    }

    fn call(&mut self, index: usize, choice: &Choice, last_reads: &BTreeMap<Value, usize>) -> Result<Call, String> {
        self.share_residual(index, choice, last_reads);
        let mut operands = Vec::new();
        for &(role, source) in &choice.operands {
            let value = match source {
                Source::Value(value) => PlanValue::Buffer(self.buffer(value)?),
                Source::Weight(weight) => PlanValue::Weight(self.weight_ids[&weight]),
                Source::Fixed(value) => value,
                Source::Workspace { dtype, elements, zeroed } => PlanValue::Buffer(self.workspace(choice, role, dtype, elements, zeroed)),
            };
            operands.push(Operand { role, value });
        }
        Ok(Call { contract: choice.contract, artifact: choice.artifact, grid: choice.grid, operands })
    }

    /// Lets the output take over its residual's buffer when nobody reads the residual later.
    fn share_residual(&mut self, index: usize, choice: &Choice, last_reads: &BTreeMap<Value, usize>) {
        let by_role = |wanted: Role| choice.operands.iter().find(|(role, _)| *role == wanted);
        if let Some(&(_, Source::Value(residual))) = by_role(Role::Residual)
            && let Some(&(_, Source::Value(out))) = by_role(Role::Out)
            && last_reads.get(&residual) == Some(&index)
            && let Some(&buffer) = self.of_value.get(&residual)
        {
            self.of_value.entry(out).or_insert(buffer);
        }
    }

    fn buffer(&mut self, value: Value) -> Result<BufferId, String> {
        if let Some(&found) = self.of_value.get(&value) {
            return Ok(found);
        }
        let Type::Tensor { axis, width, dtype } = self.graph.ty(value) else {
            return Err(format!("a {} needs no buffer", self.graph.ty(value)));
        };
        let label = label(self.graph, value);
        let id = self.add(Buffer { label, dtype, elements: Extent::sym(axis.sym(), width), kind: BufferKind::Scratch });
        self.of_value.insert(value, id);
        Ok(id)
    }

    /// Scratch of one kernel; calls of one kernel share it, since they run one after the other.
    fn workspace(&mut self, choice: &Choice, role: Role, dtype: oxide_bundle::dtype::DType, elements: Extent, zeroed: bool) -> BufferId {
        let key = (choice.artifact.unwrap_or_default(), role);
        if let Some(&found) = self.scratch.get(&key) {
            return found;
        }
        let kind = if zeroed { BufferKind::State } else { BufferKind::Scratch };
        let label = format!("{}.{role:?}", choice.contract.op.name());
        let id = self.add(Buffer { label, dtype, elements, kind });
        self.scratch.insert(key, id);
        id
    }

    fn add(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }
}

/// For each value, the last call that reads it.
fn last_reads(selection: &Selection) -> BTreeMap<Value, usize> {
    let mut last = BTreeMap::new();
    for (index, choice) in selection.choices.iter().enumerate() {
        for &(role, source) in &choice.operands {
            if let Source::Value(value) = source
                && access(role).0
            {
                last.insert(value, index);
            }
        }
    }
    last
}

/// Where a value comes from: its projection or norm (`layers.0.qkv`), or its operator (`layers.0.attend`).
fn label(graph: &Graph, value: Value) -> String {
    let node = graph.node(value.node);
    let cache = graph.operands(value.node).into_iter().find_map(|operand| match graph.ty(operand) {
        Type::Cache { layer } => Some(layer),
        Type::Tensor { .. } | Type::Ids => None,
    });
    let named = node.weights.first().map(|&weight| graph.weight(weight).name.clone());
    match (node.op, cache) {
        (Op::RopeAppend { layer, .. }, _) => format!("layers.{layer}.q"),
        (op, Some(layer)) => format!("layers.{layer}.{}", op.name()),
        (Op::Linear { .. } | Op::RmsNorm { .. } | Op::Embed { .. }, None) => named.unwrap_or_else(|| node.op.name().to_owned()),
        (op, None) => op.name().to_owned(),
    }
}
