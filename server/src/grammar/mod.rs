//! Constraints on what a model may write: JSON of a schema, regular expressions, choices, Lark grammars.
//!
//! Owns reading the request's fields, the bounds on what is compiled, and the masks that the engine
//! asks for; knows nothing of HTTP or of tool calls.
//!
//! ```text
//! fields ─▶ Constraint ─▶ bounds, growth ─▶ Grammars::compile ─▶ Compiled ─▶ one GrammarMask a choice
//!          (request)      (schema, refused    (own thread, time      (parser,     (begin: to a worker
//!                          by name)            and fuel limits)       witness)     fill: wait for it)
//! ```
//!
//! **Invariants:** a constraint that cannot be enforced as written is refused, never loosened; a request
//! cannot reach the lenient modes of the grammar library; no grammar is compiled and no mask is computed
//! on the engine thread or on a worker of the HTTP server; an output that was accepted as fitting its
//! budget closes within it (module `closing`).

mod bounds;
mod closing;
mod compile;
mod effective;
mod growth;
mod hints;
mod lark;
mod lexemes;
mod marked;
mod mask;
mod regex_growth;
mod request;
mod shape;
mod track;
mod tree;
mod vocabulary;

pub(crate) use bounds::is_annotation;
pub use compile::{Compiled, GrammarError, Grammars};
pub use mask::GrammarMask;
pub use request::{Constraint, ConstraintKind, Marked, take_constraint};
