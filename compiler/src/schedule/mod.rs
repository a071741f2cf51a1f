//! The schedule: *which* kernels run and *when*, per batch class, over buffers without addresses.
//!
//! Made from a selected graph by the `schedule` pass, turned into a plan by `plan_memory` and `emit`.
//! Operands are the plan's own [`Operand`]s: [`BufferId`](oxide_bundle::ids::BufferId) indexes
//! [`Schedule::buffers`], [`WeightId`](oxide_bundle::ids::WeightId) indexes [`Schedule::weights`].

mod print;
mod verify;

pub(crate) use print::class as class_text;
pub use print::print;
pub use verify::{ScheduleError, verify};

use crate::graph::Weight;
use oxide_bundle::contract::{Contract, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{BatchClass, BufferKind, Extent, Operand};

/// Every entry's calls, with the tables that they refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Name of the graph.
    pub name: String,
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Weights, in the order of the weight section.
    pub weights: Vec<Weight>,
    /// Entries, decode classes first.
    pub entries: Vec<Entry>,
}

/// A buffer without an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Name in dumps.
    pub label: String,
    /// Element type.
    pub dtype: DType,
    /// Elements, as a function of the entry's bounds.
    pub elements: Extent,
    /// Whether it may share memory with buffers that are dead.
    pub kind: BufferKind,
}

/// Calls of one batch class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The class.
    pub class: BatchClass,
    /// Its calls, in order.
    pub calls: Vec<Call>,
}

/// One kernel call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What is computed.
    pub contract: Contract,
    /// The code object in the catalogue, on targets that have them.
    pub artifact: Option<usize>,
    /// Grid.
    pub grid: [Extent; 3],
    /// Operands, each role once.
    pub operands: Vec<Operand>,
}

/// How a role uses its buffer: `(read, written)`.
pub(crate) const fn access(role: Role) -> (bool, bool) {
    match role {
        Role::X | Role::Weight | Role::NormWeight | Role::Bias | Role::RopeTable | Role::Input(_) | Role::Scalar(_) => (true, false),
        Role::Out | Role::Output(_) | Role::Workspace(_) => (false, true),
        Role::Residual | Role::KPlane | Role::VPlane | Role::Counters(_) => (true, true),
    }
}
