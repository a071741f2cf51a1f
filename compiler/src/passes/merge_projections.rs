//! Merges projections of one input: q, k, v into one `linear`, gate and up into one. Their results
//! become slices of the merged one, for later passes to fuse away.

use super::{PassResult, Settings, Unit};
use crate::graph::{Graph, NodeId, Op, Value, Weight, WeightRef};
use oxide_bundle::contract::Activation;

const PLAIN: Op = Op::Linear { act: Activation::None, residual: false };

pub(super) fn run(unit: &mut Unit, _: &Settings) -> PassResult {
    for node in unit.graph.order() {
        if !unit.graph.contains(node) {
            continue;
        }
        let results = unit.graph.node(node).results.len() as u32;
        for result in 0..results {
            let group = mergeable(&unit.graph, Value { node, result });
            if group.len() > 1 {
                merge(&mut unit.graph, Value { node, result }, &group)?;
            }
        }
    }
    Ok(())
}

/// Plain projections of `x`, all with a bias or all without.
fn mergeable(graph: &Graph, x: Value) -> Vec<NodeId> {
    let plain: Vec<NodeId> = graph.users(x).into_iter().filter(|&user| graph.node(user).op == PLAIN).collect();
    let biased = |node: &NodeId| graph.node(*node).weights.len();
    let uniform = plain.windows(2).all(|pair| biased(&pair[0]) == biased(&pair[1]));
    if uniform { plain } else { Vec::new() }
}

fn merge(graph: &mut Graph, x: Value, group: &[NodeId]) -> Result<(), String> {
    let weights_each = graph.node(group[0]).weights.len();
    let mut weights = Vec::new();
    for position in 0..weights_each {
        let parts: Vec<WeightRef> = group.iter().map(|&node| graph.node(node).weights[position]).collect();
        weights.push(concat(graph, &parts));
    }
    let merged = Graph::result(graph.add(PLAIN, &[x], &weights)?);
    let mut offset = 0;
    for &node in group {
        let width = graph.weight(graph.node(node).weights[0]).shape[0];
        let slice = graph.add(Op::Slice { offset, width }, &[merged], &[])?;
        graph.replace_uses(Graph::result(node), Graph::result(slice));
        graph.remove(node);
        offset += width;
    }
    Ok(())
}

/// Declares the concatenation of weights along their rows.
fn concat(graph: &mut Graph, parts: &[WeightRef]) -> WeightRef {
    let first = graph.weight(parts[0]).clone();
    let rows = parts.iter().map(|&part| graph.weight(part).shape[0]).sum();
    let names: Vec<&str> = parts.iter().map(|&part| graph.weight(part).name.as_str()).collect();
    let name = merged_name(&names);
    let sources = parts.iter().flat_map(|&part| graph.weight(part).sources.clone()).collect();
    let shape = std::iter::once(rows).chain(first.shape.iter().skip(1).copied()).collect();
    graph.add_weight(Weight { name, sources, shape, ..first })
}

/// `layers.0.q`, `layers.0.k`, `layers.0.v` → `layers.0.qkv`; `gate`, `up` → `gate_up`; a suffix `.bias` stays last.
fn merged_name(names: &[&str]) -> String {
    let is_bias = names.iter().all(|name| name.ends_with(".bias"));
    let stems: Vec<&str> = names.iter().map(|name| if is_bias { name.trim_end_matches(".bias") } else { name }).collect();
    let parts: Vec<&str> = stems.iter().map(|stem| stem.rsplit('.').next().unwrap_or(stem)).collect();
    let prefix = stems.first().and_then(|stem| stem.rsplit_once('.')).map_or(String::new(), |(prefix, _)| format!("{prefix}."));
    let separator = if parts.iter().all(|part| part.len() == 1) { "" } else { "_" };
    format!("{prefix}{}{}", parts.join(separator), if is_bias { ".bias" } else { "" })
}
