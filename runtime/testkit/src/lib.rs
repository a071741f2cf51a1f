//! Fixtures and spawners for tests; never shipped.
//!
//! Owns the shipped model's bundle, compiled once a build, and a server process that ends with its test.
//! Knows our programs only as processes, so that it depends on none of our packages.

#![forbid(unsafe_code)]

mod bundle;
mod fuzz;
mod process;

pub use bundle::{binary, repo, tiny_bundle};
pub use fuzz::fuzz;
pub use process::ServerProcess;
