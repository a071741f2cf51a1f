//! Text form of graphs; [`parse`](super::parse()) reads it back. Values are numbered in execution order,
//! so equal graphs print equally however they were made.

use super::{Graph, NodeId, Op, Value, Weight};
use oxide_bundle::contract::Activation;
use oxide_bundle::plan::{RowOrder, WeightLayout};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Prints a graph: its used weights, then its nodes in execution order.
pub fn print(graph: &Graph) -> String {
    let names = names(graph);
    let mut text = format!("graph \"{}\" {{\n", graph.name());
    for weight in graph.weights_used() {
        text.push_str(&weight_line(graph.weight(weight)));
    }
    for node in graph.order() {
        text.push_str(&node_line(graph, node, &names));
    }
    text.push_str("}\n");
    text
}

/// Numbers of values, in execution order.
pub(super) fn names(graph: &Graph) -> BTreeMap<Value, u32> {
    let values = graph.order().into_iter().flat_map(|node| {
        let results = graph.node(node).results.len() as u32;
        (0..results).map(move |result| Value { node, result })
    });
    values.zip(0..).collect()
}

/// A layout's name.
pub(crate) const fn layout_name(layout: WeightLayout) -> &'static str {
    match layout {
        WeightLayout::RowMajor => "row_major",
        WeightLayout::Panel16 => "panel16",
        WeightLayout::PanelK64 => "panel_k64",
    }
}

/// A row order's name.
pub(crate) fn row_order_name(rows: RowOrder) -> String {
    match rows {
        RowOrder::Concat => "concat".to_owned(),
        RowOrder::Interleave(group) => format!("interleave({group})"),
        RowOrder::RotaryPairs => "rotary_pairs".to_owned(),
    }
}

/// `[a, b]`.
pub(crate) fn shape_text(shape: &[u32]) -> String {
    format!("[{}]", shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

fn weight_line(weight: &Weight) -> String {
    let Weight { name, sources, dtype, shape, layout, rows } = weight;
    let mut line = format!("  weight @{name}: {dtype}{} {} {}", shape_text(shape), layout_name(*layout), row_order_name(*rows));
    for (i, source) in sources.iter().enumerate() {
        let _ = write!(line, "{} \"{source}\"", if i == 0 { " =" } else { "," });
    }
    line.push('\n');
    line
}

fn node_line(graph: &Graph, id: NodeId, names: &BTreeMap<Value, u32>) -> String {
    let node = graph.node(id);
    let result = |(i, ty)| format!("%{}: {ty}", names[&Value { node: id, result: i as u32 }]);
    let results = node.results.iter().enumerate().map(result).collect::<Vec<_>>().join(", ");
    let mut line = format!("  {results} = {}", node.op.name());
    for operand in graph.operands(id) {
        let _ = write!(line, " %{}", names.get(&operand).map_or_else(|| "?".to_owned(), ToString::to_string));
    }
    for &weight in &node.weights {
        let _ = write!(line, " @{}", graph.weight(weight).name);
    }
    let attributes = attributes(&node.op);
    if !attributes.is_empty() {
        let _ = write!(line, " {{{attributes}}}");
    }
    line.push('\n');
    line
}

fn attributes(op: &Op) -> String {
    match *op {
        Op::Embed { dtype } => format!("dtype = {dtype}"),
        Op::RmsNorm { eps } => format!("eps = {eps}"),
        Op::Linear { act: Activation::None, residual: _ } => String::new(),
        Op::Linear { act: Activation::SwiGlu, residual: _ } => "act = swiglu".to_owned(),
        Op::Slice { offset, width } => format!("offset = {offset}, width = {width}"),
        Op::Rope { head_dim } => format!("d = {head_dim}"),
        Op::KvAppend { layer } => format!("layer = {layer}"),
        Op::RopeAppend { layer, q, kv, head_dim } => format!("layer = {layer}, q = {q}, kv = {kv}, d = {head_dim}"),
        Op::Attend { q, kv, head_dim } => format!("q = {q}, kv = {kv}, d = {head_dim}"),
        Op::Sample { vocab_known } => format!("known = {vocab_known}"),
        Op::SwiGlu | Op::Add | Op::TakeRows | Op::Logits => String::new(),
    }
}
