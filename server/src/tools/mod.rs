//! Tools: what a request offers, and the calls in what a model wrote.
//!
//! Owns the fields `tools`, `tool_choice` and `parallel_tool_calls`, the schema that a forced call must
//! follow, and the parser of calls; knows nothing of HTTP. How calls are written is the bundle's dialect;
//! a forced call is plain JSON, whatever the dialect, because a grammar writes it.

mod parser;
mod request;
mod scanner;

pub use parser::{CallDelta, CallForm, CallParser};
pub use request::{ToolMode, ToolPlan, take_tools};
