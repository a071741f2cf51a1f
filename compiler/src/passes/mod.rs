//! The pipeline: graph → selection → schedule → plan, as one array of passes.
//!
//! A pass is one function over a [`Unit`]. After each, the representation that it left is verified, so
//! that a broken pass is named and nothing malformed travels on.

mod bind_artifact;
mod canonicalise;
mod choose_layouts;
mod emit;
mod fuse_residual;
mod fuse_rope_append;
mod fuse_swiglu;
mod merge_projections;
mod plan_memory;
mod schedule;
mod select_kernels;

pub use emit::artifacts_used;
pub use plan_memory::Arena;
pub use select_kernels::{Choice, Missing, Selection, Source};

use crate::catalogue::Catalogue;
use crate::graph::{self, Graph, GraphError};
use crate::schedule::{Schedule, ScheduleError};
use oxide_bundle::dtype::DType;
use oxide_bundle::manifest::Target;
use oxide_bundle::plan::{BatchClass, KvGeometry, RawPlan};
use oxide_bundle::step::StepBounds;

/// What the target and the user fix before the first pass.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The target.
    pub target: Target,
    /// Element type of activations.
    pub act: DType,
    /// Element type of weights.
    pub weight: DType,
    /// Geometry of the KV cache.
    pub kv: KvGeometry,
    /// Bounds of input and output slots.
    pub bounds: StepBounds,
    /// Batch classes, in order of entries.
    pub classes: Vec<BatchClass>,
    /// Kernels to choose from.
    pub catalogue: Catalogue,
}

/// What is being lowered; each representation appears as its pass makes it.
#[derive(Debug)]
pub struct Unit {
    /// What.
    pub graph: Graph,
    /// Kernels chosen for each class.
    pub selections: Vec<Selection>,
    /// Which and when.
    pub schedule: Option<Schedule>,
    /// Addresses.
    pub arena: Option<Arena>,
    /// Where.
    pub plan: Option<RawPlan>,
}

/// Why lowering stopped.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    /// A pass could not do its work: a bug of the compiler, or a graph that no family builds.
    #[error("pass {pass}: {problem}")]
    Pass {
        /// Which.
        pass: &'static str,
        /// Why.
        problem: String,
    },
    /// A pass left a malformed graph.
    #[error("after pass {pass}: {source}")]
    Graph {
        /// Which.
        pass: &'static str,
        /// What is wrong.
        source: GraphError,
    },
    /// A pass left a malformed schedule.
    #[error("after pass {pass}: {source}")]
    Schedule {
        /// Which.
        pass: &'static str,
        /// What is wrong.
        source: ScheduleError,
    },
    /// Kernels that the target does not have; all of them.
    #[error("{}", select_kernels::missing_text(*target, missing))]
    MissingKernels {
        /// The target.
        target: Target,
        /// Each contract with the classes that lack it.
        missing: Vec<Missing>,
    },
}

type PassResult = Result<(), PassProblem>;

/// What a pass reports; the pipeline adds its name.
#[derive(Debug)]
enum PassProblem {
    Words(String),
    Missing(Vec<Missing>),
}

impl From<String> for PassProblem {
    fn from(problem: String) -> Self {
        Self::Words(problem)
    }
}

struct Pass {
    name: &'static str,
    run: fn(&mut Unit, &Settings) -> PassResult,
}

macro_rules! passes {
    ($($module:ident),* $(,)?) => { &[$(Pass { name: stringify!($module), run: $module::run }),*] };
}

/// The pipeline, top to bottom.
const PASSES: &[Pass] = passes![
    canonicalise,
    merge_projections,
    fuse_residual,
    fuse_rope_append,
    fuse_swiglu,
    choose_layouts,
    select_kernels,
    schedule,
    plan_memory,
    emit,
];

/// Names of the passes, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    PASSES.iter().map(|pass| pass.name)
}

/// Runs the whole pipeline.
///
/// # Errors
/// If kernels are missing, or a pass finds or leaves something malformed.
pub fn lower(graph: Graph, settings: &Settings) -> Result<Unit, LowerError> {
    let mut unit = Unit::new(graph);
    PASSES.iter().try_for_each(|pass| run_pass(pass, &mut unit, settings))?;
    Ok(unit)
}

/// Runs the passes before `name`, and `name` itself: for tests and dumps.
///
/// # Errors
/// As [`lower`].
pub fn lower_through(name: &str, graph: Graph, settings: &Settings) -> Result<Unit, LowerError> {
    let mut unit = Unit::new(graph);
    let last = PASSES.iter().position(|pass| pass.name == name).map_or(PASSES.len(), |index| index + 1);
    PASSES.iter().take(last).try_for_each(|pass| run_pass(pass, &mut unit, settings))?;
    Ok(unit)
}

impl Unit {
    fn new(graph: Graph) -> Self {
        Self { graph, selections: Vec::new(), schedule: None, arena: None, plan: None }
    }
}

fn run_pass(pass: &Pass, unit: &mut Unit, settings: &Settings) -> Result<(), LowerError> {
    (pass.run)(unit, settings).map_err(|problem| match problem {
        PassProblem::Words(problem) => LowerError::Pass { pass: pass.name, problem },
        PassProblem::Missing(missing) => LowerError::MissingKernels { target: settings.target, missing },
    })?;
    match &unit.schedule {
        None => graph::verify(&unit.graph).map_err(|source| LowerError::Graph { pass: pass.name, source }),
        Some(schedule) => crate::schedule::verify(schedule).map_err(|source| LowerError::Schedule { pass: pass.name, source }),
    }
}
