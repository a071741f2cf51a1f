//! `attend(rope(slice q), kv_append(rope(slice k), slice v))` of one merged `[q | k | v]` →
//! `attend(rope_append(qkv))`: rotation and cache append read the projection once.

use super::{PassResult, Settings, Unit};
use crate::graph::{Graph, NodeId, Op, Value, WeightRef};

pub(super) fn run(unit: &mut Unit, _: &Settings) -> PassResult {
    for node in unit.graph.order() {
        if !unit.graph.contains(node) {
            continue;
        }
        if let Some(found) = find(&unit.graph, node) {
            fuse(&mut unit.graph, node, &found)?;
        }
    }
    Ok(())
}

struct Match {
    qkv: Value,
    table: WeightRef,
    op: Op,
    /// Readers before what they read.
    replaced: Vec<NodeId>,
}

fn find(graph: &Graph, attend: NodeId) -> Option<Match> {
    let Op::Attend { q, kv, head_dim } = graph.node(attend).op else { return None };
    let operands = graph.operands(attend);
    let (rope_q, append) = (operands.first()?.node, operands.get(1)?.node);
    let Op::KvAppend { layer } = graph.node(append).op else { return None };
    let appended = graph.operands(append);
    let (rope_k, slice_v) = (appended.first()?.node, appended.get(1)?.node);
    let (slice_q, table) = rope_of_slice(graph, rope_q)?;
    let (slice_k, table_k) = rope_of_slice(graph, rope_k)?;
    let (q_width, kv_width) = (q.saturating_mul(head_dim), kv.saturating_mul(head_dim));
    let qkv = slice_at(graph, slice_q, 0, q_width)?;
    let same =
        slice_at(graph, slice_k, q_width, kv_width)? == qkv && slice_at(graph, slice_v, q_width.saturating_add(kv_width), kv_width)? == qkv;
    let replaced = vec![append, rope_q, rope_k, slice_q, slice_k, slice_v];
    let op = Op::RopeAppend { layer, q, kv, head_dim };
    (same && table == table_k).then_some(Match { qkv, table, op, replaced })
}

fn rope_of_slice(graph: &Graph, rope: NodeId) -> Option<(NodeId, WeightRef)> {
    match graph.node(rope).op {
        Op::Rope { .. } => Some((graph.operands(rope).first()?.node, *graph.node(rope).weights.first()?)),
        _ => None,
    }
}

/// The operand of a slice of exactly these columns.
fn slice_at(graph: &Graph, slice: NodeId, offset: u32, width: u32) -> Option<Value> {
    if graph.node(slice).op == (Op::Slice { offset, width }) { graph.operands(slice).first().copied() } else { None }
}

fn fuse(graph: &mut Graph, attend: NodeId, found: &Match) -> Result<(), String> {
    let fused = graph.add(found.op, &[found.qkv], &[found.table])?;
    let operands = graph.operands(attend);
    for (old, result) in operands.into_iter().zip(0..) {
        graph.replace_uses(old, Value { node: fused, result });
    }
    for &node in &found.replaced {
        if graph.users(Graph::result(node)).is_empty() {
            graph.remove(node);
        }
    }
    Ok(())
}
