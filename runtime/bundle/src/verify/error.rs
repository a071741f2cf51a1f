//! What can be wrong with a plan, where, and how it is reported.

use crate::ids::{EntryId, StepId};
use std::fmt;

/// Every error of a plan, in order of place. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanErrors {
    first: PlanError,
    rest: Vec<PlanError>,
}

impl PlanErrors {
    pub(crate) fn from_list(mut errors: Vec<PlanError>) -> Option<Self> {
        if errors.is_empty() {
            return None;
        }
        let rest = errors.split_off(1);
        errors.pop().map(|first| Self { first, rest })
    }

    /// The first error; its kind gives the exit code.
    pub fn first(&self) -> &PlanError {
        &self.first
    }

    /// All errors.
    pub fn iter(&self) -> impl Iterator<Item = &PlanError> {
        std::iter::once(&self.first).chain(&self.rest)
    }
}

impl std::error::Error for PlanErrors {}

impl fmt::Display for PlanErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.rest.len() + 1;
        write!(f, "the plan does not verify ({count} {}):", if count == 1 { "error" } else { "errors" })?;
        self.iter().try_for_each(|error| write!(f, "\n  {error}"))?;
        f.write_str("\nrecompile the bundle")
    }
}

/// One error of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// Where.
    pub place: Place,
    /// Stable kind.
    pub kind: PlanErrorKind,
    /// What was found and what is allowed.
    pub message: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Where in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The plan as a whole, or against the manifest.
    Plan,
    /// A row of the buffer, weight or kernel table, as it is written in dumps.
    Row(String),
    /// An entry.
    Entry(EntryId),
    /// A step of an entry.
    Step(EntryId, StepId),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan => f.write_str("plan"),
            Self::Row(row) => f.write_str(row),
            Self::Entry(entry) => write!(f, "{entry}"),
            Self::Step(entry, step) => write!(f, "{entry} {step}"),
        }
    }
}

/// Kind of a plan error.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PlanErrorKind {
    /// The encoding has another version.
    Version,
    /// A table has more rows than allowed.
    Count,
    /// The plan disagrees with the manifest.
    Manifest,
    /// A buffer that the table does not have.
    MissingBuffer,
    /// A weight that the table does not have.
    MissingWeight,
    /// A kernel that the table does not have.
    MissingKernel,
    /// A KV plane that the cache does not have.
    MissingPlane,
    /// A code object that the kernel section does not have.
    MissingArtifact,
    /// A buffer outside the arena, misaligned, or smaller than its elements.
    BadBuffer,
    /// A weight outside its section, misaligned, out of order, or smaller than its shape.
    BadWeight,
    /// A kernel with impossible dimensions, or with code where its target has none.
    BadKernel,
    /// An entry out of order or beyond the plan's bounds.
    BadEntry,
    /// A role that the contract lacks, does not know, or has twice.
    BadRole,
    /// An operand whose type or size the contract does not accept.
    BadOperand,
    /// A scratch buffer read before any step wrote it.
    ReadBeforeWrite,
    /// Two buffers that are alive together and share bytes.
    LiveOverlap,
    /// A grid beyond the device's limits.
    BadGrid,
    /// A copy longer than a buffer or onto itself.
    BadCopy,
}

impl PlanErrorKind {
    /// Stable name of the kind.
    pub fn name(self) -> &'static str {
        self.identity().0
    }

    /// Exit code of a process that fails with this error first.
    pub fn exit_code(self) -> u8 {
        self.identity().1
    }

    /// Stable name and exit code.
    pub(crate) fn identity(self) -> (&'static str, u8) {
        match self {
            Self::Version => ("plan_encoding_version", 60),
            Self::Count => ("plan_count", 61),
            Self::Manifest => ("plan_manifest", 62),
            Self::MissingBuffer => ("plan_missing_buffer", 63),
            Self::MissingWeight => ("plan_missing_weight", 64),
            Self::MissingKernel => ("plan_missing_kernel", 65),
            Self::MissingPlane => ("plan_missing_plane", 66),
            Self::MissingArtifact => ("plan_missing_artifact", 67),
            Self::BadBuffer => ("plan_buffer", 68),
            Self::BadWeight => ("plan_weight", 69),
            Self::BadKernel => ("plan_kernel", 70),
            Self::BadEntry => ("plan_entry", 71),
            Self::BadRole => ("plan_role", 72),
            Self::BadOperand => ("plan_operand", 73),
            Self::ReadBeforeWrite => ("plan_read_before_write", 74),
            Self::LiveOverlap => ("plan_live_overlap", 75),
            Self::BadGrid => ("plan_grid", 76),
            Self::BadCopy => ("plan_copy", 77),
        }
    }
}
