//! The graph: *what* a step computes, over typed values with symbolic `tokens` and `rows`.
//!
//! A narrow, closed set of operators ([`Op`]) in SSA form: a node has operands, weights and results.
//! Which kernel computes a node, and where its values live, is not said here. petgraph stays private
//! in this module; nothing outside sees an index of it. The text form ([`print()`], [`parse()`]) is
//! described in `docs/ir.md`.

mod build;
mod op;
mod parse;
mod print;
mod typing;
mod verify;

pub use build::{Precision, build};
pub use op::{Axis, Op, Type, Weight};
pub use parse::{ParseError, parse};
pub use print::print;
pub(crate) use print::{layout_name, row_order_name, shape_text};
pub use verify::{GraphError, verify};

use petgraph::Direction;
use petgraph::stable_graph::{NodeIndex, StableDiGraph};
use petgraph::visit::EdgeRef as _;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A node of a graph. Ids order by creation and are never used again.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    serial: u32,
    index: NodeIndex,
}

/// A result of a node.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value {
    /// The node that makes it.
    pub node: NodeId,
    /// Which of its results.
    pub result: u32,
}

/// A weight of a graph.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightRef(u32);

impl WeightRef {
    /// Position in [`Graph::weights`].
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One application of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// Weights read, in the order that the operator names them.
    pub weights: Vec<WeightRef>,
    /// Types of the results.
    pub results: Vec<Type>,
}

#[derive(Clone, Debug)]
struct Slot {
    serial: u32,
    node: Node,
}

#[derive(Copy, Clone, Debug)]
struct Use {
    result: u32,
    operand: u32,
}

/// A graph. Cheap enough to clone for one model: a few hundred nodes.
#[derive(Clone, Debug)]
pub struct Graph {
    name: String,
    net: StableDiGraph<Slot, Use>,
    created: u32,
    weights: Vec<Weight>,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), net: StableDiGraph::new(), created: 0, weights: Vec::new() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Declares a weight.
    pub fn add_weight(&mut self, weight: Weight) -> WeightRef {
        self.weights.push(weight);
        WeightRef(self.weights.len() as u32 - 1)
    }

    /// Every weight declared, used or not.
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// A weight.
    pub fn weight(&self, weight: WeightRef) -> &Weight {
        &self.weights[weight.index()]
    }

    /// A weight, to be changed.
    pub fn weight_mut(&mut self, weight: WeightRef) -> &mut Weight {
        &mut self.weights[weight.index()]
    }

    /// Weights that a node reads, in order of first use.
    pub fn weights_used(&self) -> Vec<WeightRef> {
        let mut seen = BTreeSet::new();
        let all = self.order().into_iter().flat_map(|node| self.node(node).weights.iter().copied());
        all.filter(|&weight| seen.insert(weight)).collect()
    }

    /// Adds a node; its result types follow from the operator.
    ///
    /// # Errors
    /// If the operator cannot take these operands and weights; the message names the mismatch.
    pub fn add(&mut self, op: Op, operands: &[Value], weights: &[WeightRef]) -> Result<NodeId, String> {
        let results = self.infer(&op, operands, weights)?;
        Ok(self.add_typed(Node { op, weights: weights.to_vec(), results }, operands))
    }

    /// Adds a node with types as given; [`verify`] will tell if they are wrong.
    pub fn add_typed(&mut self, node: Node, operands: &[Value]) -> NodeId {
        let serial = self.created;
        self.created += 1;
        let index = self.net.add_node(Slot { serial, node });
        for (operand, value) in operands.iter().enumerate() {
            self.net.add_edge(value.node.index, index, Use { result: value.result, operand: operand as u32 });
        }
        NodeId { serial, index }
    }

    /// Result types of an operator applied to operands and weights.
    ///
    /// # Errors
    /// If it cannot be applied; the message names the mismatch.
    pub fn infer(&self, op: &Op, operands: &[Value], weights: &[WeightRef]) -> Result<Vec<Type>, String> {
        let types: Vec<Type> = operands.iter().map(|&value| self.ty(value)).collect();
        let weights: Vec<&Weight> = weights.iter().map(|&weight| self.weight(weight)).collect();
        op.infer(&types, &weights)
    }

    /// A node.
    ///
    /// # Panics
    /// If it was removed.
    pub fn node(&self, id: NodeId) -> &Node {
        assert!(self.contains(id), "a removed node is looked up");
        &self.net[id.index].node
    }

    /// Whether a node is still there.
    pub fn contains(&self, id: NodeId) -> bool {
        self.net.node_weight(id.index).is_some_and(|slot| slot.serial == id.serial)
    }

    /// Type of a value.
    pub fn ty(&self, value: Value) -> Type {
        self.node(value.node).results[value.result as usize]
    }

    /// Operands of a node, in order.
    pub fn operands(&self, id: NodeId) -> Vec<Value> {
        let mut found: Vec<(u32, Value)> = self
            .net
            .edges_directed(id.index, Direction::Incoming)
            .map(|edge| (edge.weight().operand, Value { node: self.id(edge.source()), result: edge.weight().result }))
            .collect();
        found.sort_unstable_by_key(|&(operand, _)| operand);
        found.into_iter().map(|(_, value)| value).collect()
    }

    /// Nodes that read a value, each once, in order of creation.
    pub fn users(&self, value: Value) -> Vec<NodeId> {
        let edges = self.net.edges_directed(value.node.index, Direction::Outgoing);
        let mut users: Vec<NodeId> = edges.filter(|e| e.weight().result == value.result).map(|e| self.id(e.target())).collect();
        users.sort_unstable();
        users.dedup();
        users
    }

    /// The one node that reads a value, if there is exactly one.
    pub fn only_user(&self, value: Value) -> Option<NodeId> {
        match self.users(value).as_slice() {
            &[user] => Some(user),
            _ => None,
        }
    }

    /// Makes every reader of `old` read `new`.
    pub fn replace_uses(&mut self, old: Value, new: Value) {
        let edges = self.net.edges_directed(old.node.index, Direction::Outgoing);
        let moved: Vec<_> = edges.filter(|e| e.weight().result == old.result).map(|e| (e.id(), e.target(), e.weight().operand)).collect();
        for (edge, target, operand) in moved {
            self.net.remove_edge(edge);
            self.net.add_edge(new.node.index, target, Use { result: new.result, operand });
        }
    }

    /// Removes a node whose results nobody reads.
    ///
    /// # Panics
    /// If a result is still read.
    pub fn remove(&mut self, id: NodeId) {
        let read = self.net.edges_directed(id.index, Direction::Outgoing).next().is_some();
        assert!(!read, "a node was removed while its results are read");
        self.net.remove_node(id.index);
    }

    /// Nodes so that operands come before their readers; independent nodes by creation. Nodes on a
    /// cycle are left out ([`verify`] reports them).
    pub fn order(&self) -> Vec<NodeId> {
        let incoming = |index| self.net.edges_directed(index, Direction::Incoming).count();
        let mut waiting: BTreeMap<NodeId, usize> = self.net.node_indices().map(|index| (self.id(index), incoming(index))).collect();
        let mut ready: BinaryHeap<Reverse<NodeId>> = waiting.iter().filter(|(_, n)| **n == 0).map(|(id, _)| Reverse(*id)).collect();
        let mut order = Vec::with_capacity(waiting.len());
        while let Some(Reverse(id)) = ready.pop() {
            order.push(id);
            for edge in self.net.edges_directed(id.index, Direction::Outgoing) {
                let target = self.id(edge.target());
                let left = waiting.get_mut(&target).expect("every node has a count");
                *left -= 1;
                if *left == 0 {
                    ready.push(Reverse(target));
                }
            }
        }
        order
    }

    /// Number of nodes.
    pub fn node_count(&self) -> usize {
        self.net.node_count()
    }

    fn id(&self, index: NodeIndex) -> NodeId {
        NodeId { serial: self.net[index].serial, index }
    }

    /// The only result of a node.
    pub fn result(node: NodeId) -> Value {
        Value { node, result: 0 }
    }
}
