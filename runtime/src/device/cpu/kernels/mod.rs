//! The closed table of kernels, generic over vectors of sixteen lanes.
//!
//! Each kernel is a safe function over slices that splits its work on the [`pool`](super::pool); the
//! parts are generic functions that [`table`] compiles for each instruction set. `unsafe` stays in here:
//! vector loads and stores, and outputs that tasks write at disjoint places.

pub(crate) mod amx;
pub(crate) mod attend;
pub(crate) mod attend_rows;
pub(crate) mod draw;
pub(crate) mod linear;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod sample;
pub(crate) mod simd;
pub(crate) mod table;
