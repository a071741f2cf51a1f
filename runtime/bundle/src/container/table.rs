//! The section table: 128 bytes an entry, sorted by offset.

use super::layout::*;
use crate::digest::Digest;

/// A row of the section table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Kind.
    pub kind: SectionKind,
    /// Whether a reader that does not know the kind must refuse the bundle.
    pub required: bool,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// First of its leaves in the `HASH` section.
    pub leaf_first: u32,
    /// Number of its leaves there; 0 for `HASH` itself.
    pub leaf_count: u32,
    /// Root of its hash tree, bound to kind, length and chunk size.
    pub root: Digest,
}
