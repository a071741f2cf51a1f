//! The contract between `oxide-compile` and `oxide-run`.
//!
//! Owns ids, element types, operator contracts, the plan, the manifest and the `.oxb` container.
//! Knows no paths, no graph IR, no CUDA, no async runtime, no HTTP and no tokenizer.

#![forbid(unsafe_code)]

pub mod artifact;
pub mod container;
pub mod contract;
pub mod cubin;
pub mod digest;
pub mod dtype;
pub mod dump;
pub mod error;
pub mod fuzz;
pub mod ids;
pub mod ledger;
pub mod manifest;
pub mod msgpack;
pub mod plan;
pub mod section;
pub mod signature;
pub mod step;
#[cfg(feature = "unverified-plan")]
mod unverified;
pub mod verify;

pub use container::{Bundle, BundleWriter, Contents, Mode, SealReport, Superblock};
pub use digest::{Digest, Seal};
pub use error::BundleError;
