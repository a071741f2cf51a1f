//! `swiglu(slice gate, slice up)` of one merged projection → that projection with a SwiGLU epilogue.

use super::{PassResult, Settings, Unit};
use crate::graph::{Graph, NodeId, Op};
use oxide_bundle::contract::Activation;

pub(super) fn run(unit: &mut Unit, _: &Settings) -> PassResult {
    for node in unit.graph.order() {
        if !unit.graph.contains(node) {
            continue;
        }
        if let Some(found) = find(&unit.graph, node) {
            fuse(&mut unit.graph, node, found)?;
        }
    }
    Ok(())
}

#[derive(Copy, Clone)]
struct Match {
    gate: NodeId,
    up: NodeId,
    linear: NodeId,
}

fn find(graph: &Graph, swiglu: NodeId) -> Option<Match> {
    if graph.node(swiglu).op != Op::SwiGlu {
        return None;
    }
    let operands = graph.operands(swiglu);
    let (gate, up) = (operands.first()?.node, operands.get(1)?.node);
    let (Op::Slice { offset: 0, width }, Op::Slice { offset, width: up_width }) = (graph.node(gate).op, graph.node(up).op) else {
        return None;
    };
    let (merged, merged_up) = (*graph.operands(gate).first()?, *graph.operands(up).first()?);
    let plain = graph.node(merged.node).op == Op::Linear { act: Activation::None, residual: false };
    let halves = offset == width && up_width == width && merged == merged_up && graph.users(merged).len() == 2;
    let alone = operands.iter().all(|&operand| graph.only_user(operand) == Some(swiglu));
    (plain && halves && alone).then_some(Match { gate, up, linear: merged.node })
}

fn fuse(graph: &mut Graph, swiglu: NodeId, found: Match) -> Result<(), String> {
    let x = graph.operands(found.linear);
    let weights = graph.node(found.linear).weights.clone();
    let fused = graph.add(Op::Linear { act: Activation::SwiGlu, residual: false }, &x, &weights)?;
    graph.replace_uses(Graph::result(swiglu), Graph::result(fused));
    for node in [swiglu, found.gate, found.up, found.linear] {
        graph.remove(node);
    }
    Ok(())
}
