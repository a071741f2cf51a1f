//! Canonical msgpack: one encoding per value.
//!
//! Shortest forms, maps with string keys in rising byte order and none twice, no floats, no ext, depth
//! at most [`DEPTH_MAX`]. The reader checks the form, decodes, encodes again and compares.

/// Deepest nesting of arrays and maps.
pub const DEPTH_MAX: usize = 16;
