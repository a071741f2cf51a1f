//! Gives every matrix its final layout and row order. One layout serves every class of a target.

use super::{PassResult, Settings, Unit};
use crate::graph::{Graph, NodeId, Op};
use oxide_bundle::contract::Activation;
use oxide_bundle::manifest::Target;
use oxide_bundle::plan::{RowOrder, WeightLayout};

pub(super) fn run(unit: &mut Unit, settings: &Settings) -> PassResult {
    for node in unit.graph.order() {
        choose(&mut unit.graph, node, settings.target);
    }
    Ok(())
}

fn choose(graph: &mut Graph, node: NodeId, target: Target) {
    let act = match graph.node(node).op {
        Op::Linear { act, residual: _ } => act,
        Op::Logits | Op::Embed { .. } => Activation::None,
        _ => return,
    };
    let rows = row_order(target, act);
    let weights = graph.node(node).weights.clone();
    for (position, weight) in weights.into_iter().enumerate() {
        let weight = graph.weight_mut(weight);
        weight.rows = rows;
        if position == 0 {
            weight.layout = layout(target);
        }
    }
}

const fn layout(target: Target) -> WeightLayout {
    match target {
        Target::Cpu => WeightLayout::Panel16,
        Target::Sm90 => WeightLayout::RowMajor,
    }
}

/// Gate and up rows alternate in groups that one panel (cpu) or one MMA fragment (sm90) holds.
const fn row_order(target: Target, act: Activation) -> RowOrder {
    match (act, target) {
        (Activation::None, _) => RowOrder::Concat,
        (Activation::SwiGlu, Target::Cpu) => RowOrder::Interleave(16),
        (Activation::SwiGlu, Target::Sm90) => RowOrder::Interleave(8),
    }
}
