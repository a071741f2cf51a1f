//! The contract between `oxide-compile` and `oxide-run`.
//!
//! Owns ids, element types, operator contracts, the plan, the manifest and the `.oxb` container.
//! Knows no paths, no graph IR, no CUDA, no async runtime, no HTTP and no tokenizer.

#![forbid(unsafe_code)]

pub mod artifact;
pub mod contract;
pub mod dtype;
pub mod ids;
pub mod manifest;
pub mod plan;
pub mod step;
