//! Structured output and tools: grammars on the shipped tokenizer, and the real server on the real bundle.

#[expect(dead_code, reason = "shared with the tests over the scripted device, which use all of it")]
#[path = "../http/client.rs"]
mod client;

mod auto_calls;
mod budgets;
mod closing;
mod conformance;
mod limits;
mod sampler;
mod schemas;
mod served;
mod tool_calls;
