//! The engine: one thread that owns scheduler, KV pager and device. Tokens in, events out.
//!
//! [`Engine::start`] moves a linked device into the thread and returns an [`EngineHandle`];
//! [`EngineHandle::submit`] takes an [`EngineRequest`] and returns its [`EventStream`]. No text, no
//! HTTP, no plan steps here.

pub mod api;
mod core;
mod events;
mod handle;
mod options;
mod request;
mod stats;

pub use api::{
    ChoiceTrace, EngineEvent, EngineRequest, EngineStats, FinishReason, LogitsMask, MaskFactory, MaskVerdict, RejectReason, SamplingParams,
    TokenLogprobs,
};
pub use events::EventStream;
pub use handle::{Engine, EngineHandle};
pub use options::{Backlog, EngineHealth, EngineLimits, EngineOptions};
