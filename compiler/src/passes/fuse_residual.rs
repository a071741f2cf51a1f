//! `add(residual, linear(x))` → `linear(x, residual)`: the sum is the projection's epilogue.

use super::{PassResult, Settings, Unit};
use crate::graph::{Graph, NodeId, Op, Value};
use oxide_bundle::contract::Activation;

pub(super) fn run(unit: &mut Unit, _: &Settings) -> PassResult {
    for node in unit.graph.order() {
        if !unit.graph.contains(node) {
            continue;
        }
        if unit.graph.node(node).op == Op::Add
            && let Some((linear, residual)) = projection(&unit.graph, node)
        {
            fuse(&mut unit.graph, node, linear, residual)?;
        }
    }
    Ok(())
}

/// The operand that is a plain projection read only here, and the other operand.
fn projection(graph: &Graph, add: NodeId) -> Option<(NodeId, Value)> {
    let operands = graph.operands(add);
    let (a, b) = (*operands.first()?, *operands.get(1)?);
    [(b, a), (a, b)].into_iter().find_map(|(candidate, residual)| {
        let plain = graph.node(candidate.node).op == Op::Linear { act: Activation::None, residual: false };
        (plain && graph.only_user(candidate) == Some(add) && candidate != residual).then_some((candidate.node, residual))
    })
}

fn fuse(graph: &mut Graph, add: NodeId, linear: NodeId, residual: Value) -> Result<(), String> {
    let x = graph.operands(linear)[0];
    let weights = graph.node(linear).weights.clone();
    let fused = graph.add(Op::Linear { act: Activation::None, residual: true }, &[x, residual], &weights)?;
    graph.replace_uses(Graph::result(add), Graph::result(fused));
    graph.remove(add);
    graph.remove(linear);
    Ok(())
}
