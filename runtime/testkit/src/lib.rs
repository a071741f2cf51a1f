//! Fixtures and spawners for tests; never shipped.
//!
//! Owns the shipped model's bundles, compiled once a build, a server process that ends with its test, and a
//! CUDA driver that needs no GPU.
//! Knows our programs only as processes, so that it depends on none of our packages.

#![forbid(unsafe_code)]

mod bundle;
mod cuda;
mod fuzz;
mod json;
mod process;

pub use bundle::{binary, repo, tiny_bundle, tiny_sm90_bundle};
pub use cuda::{DriverCall, FakeCuda};
pub use fuzz::{fuzz, fuzz_json};
pub use process::ServerProcess;
