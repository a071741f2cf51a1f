//! `oxide-compile`: lowers a model profile and its checkpoint, offline, into one sealed bundle.
//!
//! Three representations and no more: [`graph`] (what), [`schedule`] (which kernel and when) and the
//! bundle's plan (where). [`passes`] is the pipeline between them. Around it: [`profile`] (what the user
//! asks for), [`checkpoint`] (what the user has), [`weights`] (its tensors in their final layout),
//! [`seal`] (one file), [`golden`] (its proof), [`reproduce`] (making it again) and [`hub`] (the only network code).
//!
//! **Invariant:** only [`golden`] knows the runtime; nothing sealed depends on a path, a clock, a user
//! name or a thread count.

#![forbid(unsafe_code)]

pub mod catalogue;
pub mod checkpoint;
pub mod cli;
pub mod compile;
pub mod golden;
pub mod graph;
pub mod hub;
pub mod passes;
mod paths;
pub mod profile;
pub mod progress;
pub mod reproduce;
pub mod schedule;
pub mod seal;
pub mod weights;

pub use compile::{CompileError, Report, Request, compile};
