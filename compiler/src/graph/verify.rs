//! Verifier of graphs: every error at once, each with the line of the text form that it is about.

use super::{Graph, NodeId, Type, Value};
use std::collections::{BTreeMap, BTreeSet};

/// A graph that does not hold together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("graph `{graph}` is malformed:\n{}", problems.join("\n"))]
pub struct GraphError {
    /// Its name.
    pub graph: String,
    /// `%value = op: what is wrong`, one for each.
    pub problems: Vec<String>,
}

/// Checks types against the operators' typing rules, acyclicity, one writer and at least one reader a
/// cache, unique weight names, and that the graph ends in one `sample`.
///
/// # Errors
/// All problems.
pub fn verify(graph: &Graph) -> Result<(), GraphError> {
    let order = graph.order();
    let mut problems = Vec::new();
    if order.len() != graph.node_count() {
        problems.push(format!("{} nodes are on a cycle", graph.node_count() - order.len()));
    }
    let names = super::print::names(graph);
    for &node in &order {
        problems.extend(node_problems(graph, node).into_iter().map(|p| format!("{}: {p}", label(graph, node, &names))));
    }
    problems.extend(cache_problems(graph, &order));
    problems.extend(weight_problems(graph));
    problems.extend(end_problems(graph, &order, &names));
    if problems.is_empty() { Ok(()) } else { Err(GraphError { graph: graph.name().to_owned(), problems }) }
}

fn label(graph: &Graph, node: NodeId, names: &BTreeMap<Value, u32>) -> String {
    let name = graph.node(node).op.name();
    match names.get(&Graph::result(node)) {
        Some(number) => format!("%{number} = {name}"),
        None => name.to_owned(),
    }
}

fn node_problems(graph: &Graph, id: NodeId) -> Vec<String> {
    let node = graph.node(id);
    let operands = graph.operands(id);
    let dangling = operands.iter().filter(|v| graph.node(v.node).results.len() <= v.result as usize).count();
    if dangling > 0 {
        return vec![format!("{dangling} operands name results that their node does not have")];
    }
    match graph.infer(&node.op, &operands, &node.weights) {
        Err(problem) => vec![problem],
        Ok(types) if types != node.results => vec![format!("declared {}, the operator gives {}", list(&node.results), list(&types))],
        Ok(_) => Vec::new(),
    }
}

fn list(types: &[Type]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn cache_problems(graph: &Graph, order: &[NodeId]) -> Vec<String> {
    let mut writers: BTreeMap<u32, u32> = BTreeMap::new();
    let mut problems = Vec::new();
    for &node in order {
        for (result, ty) in graph.node(node).results.iter().enumerate() {
            if let Type::Cache { layer } = *ty {
                *writers.entry(layer).or_default() += 1;
                if graph.users(Value { node, result: result as u32 }).is_empty() {
                    problems.push(format!("cache({layer}) is appended to and never attended"));
                }
            }
        }
    }
    problems.extend(writers.iter().filter(|(_, n)| **n > 1).map(|(layer, n)| format!("cache({layer}) has {n} writers, allowed 1")));
    problems.extend((0..).zip(writers.keys()).filter(|(i, l)| i != *l).take(1).map(|(i, _)| format!("no writer of cache({i})")));
    problems
}

fn weight_problems(graph: &Graph) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let repeated = graph.weights().iter().filter(|w| !seen.insert(w.name.as_str()));
    repeated.map(|w| format!("weight @{} is declared twice", w.name)).collect()
}

fn end_problems(graph: &Graph, order: &[NodeId], names: &BTreeMap<Value, u32>) -> Vec<String> {
    let mut problems = Vec::new();
    let samples = order.iter().filter(|&&n| graph.node(n).results.contains(&Type::Ids)).count();
    if samples != 1 {
        problems.push(format!("{samples} sample nodes, a step has 1"));
    }
    for &node in order {
        let results = &graph.node(node).results;
        let dead = (0..results.len()).all(|r| graph.users(Value { node, result: r as u32 }).is_empty());
        if dead && !results.contains(&Type::Ids) {
            problems.push(format!("{}: nobody reads it", label(graph, node, names)));
        }
    }
    problems
}
