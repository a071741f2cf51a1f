//! The HTTP server: listening, routes, authentication, limits, server-sent events, metrics and life cycle.
//!
//! Knows the wire types of [`crate::openai`] and the engine's handle; knows no device, plan or KV page.
//! [`serve`] is the whole of it; [`Server`] is the same in two steps, for tests.
//!
//! **Invariant:** nothing here blocks a task: the engine is reached by a submission that never waits,
//! and long texts are tokenized on threads of their own.

mod auth;
mod body;
mod explain;
mod explain_constraint;
mod generate;
mod generation;
mod info;
mod layer;
mod metrics;
mod options;
mod page;
mod prefixes;
mod respond;
mod router;
mod served;
mod server;
mod state;
mod stream;
mod tokenize;

pub use options::ServeOptions;
pub use served::ServedModel;
pub use server::{ServeError, Server, serve};
