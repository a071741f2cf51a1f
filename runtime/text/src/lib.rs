//! Text at the edge: tokenizer, stream decoder, chat templates.
//!
//! Shared by the compiler (templates dry-run at seal time, parity vectors) and the server.
//! Knows no HTTP, no device, no bundle and no clock: a time that a template asks for is a parameter.
//!
//! **Invariant:** message text never becomes a control token; see [`template`].

#![forbid(unsafe_code)]

pub mod control;
pub mod error;
pub mod stream;
pub mod template;
pub mod tokenizer;
mod vocabulary;

pub use control::ControlTokens;
pub use error::{TemplateError, TokenizerError};
pub use stream::{DecodeOptions, Decoded, StopHit, StreamDecoder, Tail};
pub use template::{ChatInput, ChatTemplate, Piece, Rendered, TemplateTokens, UtcTime};
pub use tokenizer::Tokenizer;
