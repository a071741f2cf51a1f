//! Covers the graph of each class with kernels of the catalogue, most fused first. Collects everything
//! that has no kernel; there is no fallback.

use super::bind_artifact::{bind, kernel};
use super::{PassProblem, PassResult, Settings, Unit};
use crate::catalogue::{Found, Wanted};
use crate::graph::{Axis, Graph, NodeId, Op, Type, Value as GraphValue, WeightRef};
use crate::schedule::class_text;
use oxide_bundle::contract::{self, Activation, Contract, Heads, Linear, Phase, Role};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::manifest::Target;
use oxide_bundle::plan::{BatchClass, Extent, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Kernels chosen for one class, in execution order.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The class.
    pub class: BatchClass,
    /// The kernels.
    pub choices: Vec<Choice>,
}

/// A kernel chosen for one or more nodes.
#[derive(Clone, Debug)]
pub struct Choice {
    /// What it computes.
    pub contract: Contract,
    /// Its code object in the catalogue.
    pub artifact: Option<usize>,
    /// Its grid.
    pub grid: [Extent; 3],
    /// Its operands by role.
    pub operands: Vec<(Role, Source)>,
}

/// What an operand is before buffers exist.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A value of the graph.
    Value(GraphValue),
    /// A weight of the graph.
    Weight(WeightRef),
    /// Something that needs no buffer: a plane, a slot, a scalar.
    Fixed(Value),
    /// Scratch of this call alone.
    Workspace {
        /// Element type.
        dtype: DType,
        /// Elements.
        elements: Extent,
        /// Zeroed once, kept between steps.
        zeroed: bool,
    },
}

/// A contract without a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// What.
    pub contract: Contract,
    /// In which classes.
    pub classes: Vec<BatchClass>,
}

pub(super) fn run(unit: &mut Unit, settings: &Settings) -> PassResult {
    let mut missing: BTreeMap<Contract, BTreeSet<usize>> = BTreeMap::new();
    let mut order: Vec<Contract> = Vec::new();
    for (index, &class) in settings.classes.iter().enumerate() {
        let mut cover = Cover { graph: &unit.graph, settings, class, done: BTreeSet::new(), choices: Vec::new(), missing: Vec::new() };
        cover.run()?;
        for contract in cover.missing {
            if !order.contains(&contract) {
                order.push(contract);
            }
            missing.entry(contract).or_default().insert(index);
        }
        unit.selections.push(Selection { class, choices: cover.choices });
    }
    if order.is_empty() {
        return Ok(());
    }
    let classes = |contract| missing[contract].iter().map(|&index| settings.classes[index]).collect();
    Err(PassProblem::Missing(order.iter().map(|contract| Missing { contract: *contract, classes: classes(contract) }).collect()))
}

/// One line for each contract without a kernel: op, dtype, shape, classes.
pub(super) fn missing_text(target: Target, missing: &[Missing]) -> String {
    let line = |m: &Missing| {
        let classes = m.classes.iter().map(|&class| class_text(class)).collect::<Vec<_>>().join(" ");
        format!("  {} -> {}: {classes}", m.contract, m.contract.out)
    };
    let lines = missing.iter().map(line).collect::<Vec<_>>().join("\n");
    format!("target {target} has no kernel for {} contracts (contract: batch classes):\n{lines}", missing.len())
}

/// Nodes that one kernel may compute together, and the operands in graph terms.
struct Candidate {
    op: contract::Op,
    out: DType,
    nodes: Vec<NodeId>,
    axis: Axis,
    weight: Option<WeightRef>,
    operands: Vec<(Role, Source)>,
}

struct Cover<'a> {
    graph: &'a Graph,
    settings: &'a Settings,
    class: BatchClass,
    done: BTreeSet<NodeId>,
    choices: Vec<Choice>,
    missing: Vec<Contract>,
}

impl Cover<'_> {
    fn run(&mut self) -> Result<(), String> {
        for node in self.graph.order() {
            if self.done.contains(&node) {
                continue;
            }
            let candidates = self.candidates(node)?;
            let chosen = candidates.iter().find_map(|candidate| self.find(candidate).map(|found| (candidate, found)));
            match chosen {
                Some((candidate, found)) => {
                    let choice = self.choice(candidate, found)?;
                    self.done.extend(&candidate.nodes);
                    self.choices.push(choice);
                }
                None => self.missing.extend(candidates.last().map(|plain| self.contract(plain))),
            }
        }
        Ok(())
    }

    fn contract(&self, candidate: &Candidate) -> Contract {
        let Settings { act, weight, ref kv, .. } = *self.settings;
        Contract { op: candidate.op, act, weight, kv: kv.dtype, out: candidate.out }
    }

    fn find(&self, candidate: &Candidate) -> Option<Found> {
        let weight = candidate.weight.map(|weight| self.graph.weight(weight)).map(|weight| (weight.layout, weight.rows));
        let contract = self.contract(candidate);
        self.settings.catalogue.find(Wanted { contract: &contract, class: self.class, axis: candidate.axis.sym(), weight })
    }

    /// Every way to compute `node` (and nodes after it) in one kernel, most fused first, plain last.
    fn candidates(&self, node: NodeId) -> Result<Vec<Candidate>, String> {
        let plain = self.plain(node)?;
        let mut fused = Vec::new();
        if let Op::RmsNorm { eps } = self.graph.node(node).op
            && let Some(linear) = self.only_reader(node)
        {
            fused.extend(self.qkv(linear, Some((node, eps))));
            fused.extend(self.linear(linear, Some((node, eps))));
        }
        fused.extend(self.qkv(node, None));
        fused.push(plain);
        Ok(fused)
    }

    fn only_reader(&self, node: NodeId) -> Option<NodeId> {
        self.graph.only_user(Graph::result(node))
    }

    fn heads(&self, q: u32, kv: u32, dim: u32) -> Heads {
        Heads { q, kv, dim, page_tokens: self.settings.kv.page_tokens }
    }

    /// A projection followed by rotation and append.
    fn qkv(&self, linear: NodeId, norm: Option<(NodeId, F32Bits)>) -> Option<Candidate> {
        let mut candidate = self.linear(linear, norm)?;
        let append = self.only_reader(linear)?;
        let Op::RopeAppend { layer, q, kv, head_dim } = self.graph.node(append).op else { return None };
        let contract::Op::Linear(projection) = candidate.op else { return None };
        candidate.op = contract::Op::QkvRopeAppend { linear: projection, heads: self.heads(q, kv, head_dim) };
        candidate.nodes.push(append);
        candidate.operands.retain(|(role, _)| *role != Role::Out);
        candidate.operands.extend(self.append_operands(append, layer));
        Some(candidate)
    }

    fn append_operands(&self, append: NodeId, layer: u32) -> Vec<(Role, Source)> {
        vec![
            (Role::RopeTable, Source::Weight(self.graph.node(append).weights[0])),
            (Role::KPlane, Source::Fixed(Value::KPlane(layer))),
            (Role::VPlane, Source::Fixed(Value::VPlane(layer))),
            (Role::Out, Source::Value(Graph::result(append))),
        ]
    }

    fn linear(&self, node: NodeId, norm: Option<(NodeId, F32Bits)>) -> Option<Candidate> {
        let linear = self.graph.node(node);
        let (act, residual) = match linear.op {
            Op::Linear { act, residual } => (act, residual),
            Op::Logits => (Activation::None, false),
            _ => return None,
        };
        let weight = linear.weights[0];
        let (n, k) = (self.graph.weight(weight).shape[0], self.graph.weight(weight).shape[1]);
        let bias = linear.weights.get(1).copied();
        let op = Linear { n, k, norm: norm.map(|(_, eps)| eps), bias: bias.is_some(), act, residual };
        let inputs = self.graph.operands(node);
        let x = norm.map_or(inputs[0], |(norm, _)| self.graph.operands(norm)[0]);
        let mut operands = vec![(Role::X, Source::Value(x)), (Role::Weight, Source::Weight(weight))];
        let norm_weight = norm.map(|(norm, _)| self.graph.node(norm).weights[0]);
        operands.extend(norm_weight.map(|weight| (Role::NormWeight, Source::Weight(weight))));
        operands.extend(bias.map(|bias| (Role::Bias, Source::Weight(bias))));
        operands.extend(inputs.get(1).map(|&residual| (Role::Residual, Source::Value(residual))));
        operands.push((Role::Out, Source::Value(Graph::result(node))));
        let (axis, out) = self.out(node);
        let nodes = norm.map(|(norm, _)| norm).into_iter().chain([node]).collect();
        Some(Candidate { op: contract::Op::Linear(op), out, nodes, axis, weight: Some(weight), operands })
    }

    fn out(&self, node: NodeId) -> (Axis, DType) {
        match self.graph.ty(Graph::result(node)) {
            Type::Tensor { axis, dtype, .. } => (axis, dtype),
            Type::Cache { .. } | Type::Ids => (Axis::Rows, self.settings.act),
        }
    }

    fn plain(&self, node: NodeId) -> Result<Candidate, String> {
        if let Some(linear) = self.linear(node, None) {
            return Ok(linear);
        }
        let found = self.graph.node(node);
        let inputs = self.graph.operands(node);
        let weight = |index: usize| Source::Weight(found.weights[index]);
        let x = || (Role::X, Source::Value(inputs[0]));
        let out = (Role::Out, Source::Value(Graph::result(node)));
        let dim = self.width(Graph::result(node));
        let (op, operands) = match found.op {
            Op::Embed { .. } => {
                let vocab = self.graph.weight(found.weights[0]).shape[0];
                (contract::Op::Embed { vocab, dim }, vec![(Role::Weight, weight(0)), out])
            }
            Op::RmsNorm { eps } => (contract::Op::RmsNorm { dim, eps }, vec![x(), (Role::NormWeight, weight(0)), out]),
            Op::RopeAppend { layer, q, kv, head_dim } => {
                let operands = [x()].into_iter().chain(self.append_operands(node, layer)).collect();
                (contract::Op::RopeAppend { heads: self.heads(q, kv, head_dim) }, operands)
            }
            Op::Attend { q, kv, head_dim } => {
                let layer = self.layer(inputs[1])?;
                let planes = [(Role::KPlane, Value::KPlane(layer)), (Role::VPlane, Value::VPlane(layer))];
                let planes = planes.map(|(role, plane)| (role, Source::Fixed(plane)));
                let op = contract::Op::Attend { heads: self.heads(q, kv, head_dim), phase: phase(self.class) };
                (op, [x()].into_iter().chain(planes).chain([out]).collect())
            }
            Op::TakeRows => (contract::Op::TakeRows { dim }, vec![x(), out]),
            Op::Sample { vocab_known } => (contract::Op::Sample { vocab: self.width(inputs[0]), vocab_known }, vec![x()]),
            Op::Linear { .. } | Op::Logits | Op::Slice { .. } | Op::Rope { .. } | Op::KvAppend { .. } | Op::SwiGlu | Op::Add => {
                return Err(format!("operator `{}` was not fused into a kernel's contract", found.op.name()));
            }
        };
        let (axis, out_dtype) = self.out(node);
        let matrix = matches!(found.op, Op::Embed { .. }).then(|| found.weights[0]);
        Ok(Candidate { op, out: out_dtype, nodes: vec![node], axis, weight: matrix, operands })
    }

    fn width(&self, value: GraphValue) -> u32 {
        match self.graph.ty(value) {
            Type::Tensor { width, .. } => width,
            Type::Cache { .. } | Type::Ids => 0,
        }
    }

    fn layer(&self, cache: GraphValue) -> Result<u32, String> {
        match self.graph.ty(cache) {
            Type::Cache { layer } => Ok(layer),
            other => Err(format!("attend reads {other}, not a cache")),
        }
    }

    fn choice(&self, candidate: &Candidate, found: Found) -> Result<Choice, String> {
        let contract = self.contract(candidate);
        match found {
            Found::Host => Ok(Choice { contract, artifact: None, grid: [Extent::lit(1); 3], operands: candidate.operands.clone() }),
            Found::Artifact(index) => {
                let manifest = &kernel(&self.settings.catalogue, index)?.manifest;
                let operands = bind(&candidate.operands, manifest, &self.settings.bounds)?;
                Ok(Choice { contract, artifact: Some(index), grid: manifest.grid, operands })
            }
        }
    }
}

const fn phase(class: BatchClass) -> Phase {
    match class {
        BatchClass::Decode { .. } => Phase::Decode,
        BatchClass::Mixed { .. } => Phase::Mixed,
    }
}
