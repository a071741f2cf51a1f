//! The HTTP server as its clients see it: a live server, a plain socket, and a device whose tokens are known.
//!
//! `docs/serving.md` says which check of the API each test is.

mod answers;
mod client;
mod harness;
mod lifecycle;
mod logprobs;
mod models;
mod openapi;
mod queueing;
mod render;
mod streams;
mod transport;
mod validation;
