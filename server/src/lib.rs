//! Runs a sealed bundle: command line, OpenAI-compatible HTTP server, tokenizer and chat template at the edge.

pub mod cli;
pub mod faults;
pub mod grammar;
pub mod http;
pub mod journal;
pub mod model;
pub mod openai;
pub mod signing;
pub mod tools;
