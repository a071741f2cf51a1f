//! Removes nodes that nobody reads and slices that keep everything, until nothing changes.

use super::{PassResult, Settings, Unit};
use crate::graph::{Graph, NodeId, Op, Type, Value};

pub(super) fn run(unit: &mut Unit, _: &Settings) -> PassResult {
    while remove_one(&mut unit.graph) {}
    Ok(())
}

fn remove_one(graph: &mut Graph) -> bool {
    let order = graph.order();
    for &node in order.iter().rev() {
        if is_identity(graph, node) {
            let source = graph.operands(node)[0];
            graph.replace_uses(Graph::result(node), source);
        }
        if is_dead(graph, node) {
            graph.remove(node);
            return true;
        }
    }
    false
}

fn is_identity(graph: &Graph, node: NodeId) -> bool {
    matches!(graph.node(node).op, Op::Slice { .. }) && graph.operands(node).iter().all(|&x| graph.ty(x) == graph.ty(Graph::result(node)))
}

fn is_dead(graph: &Graph, node: NodeId) -> bool {
    let results = &graph.node(node).results;
    let unread = |result| graph.users(Value { node, result }).is_empty();
    !results.contains(&Type::Ids) && (0..results.len() as u32).all(unread)
}
