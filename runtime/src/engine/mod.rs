//! The engine: one thread that owns scheduler, KV pager and device. Tokens in, events out.
//!
//! [`Engine::start`] moves a linked device into the thread and returns an [`EngineHandle`];
//! [`EngineHandle::submit`] takes an [`EngineRequest`] and returns its [`EventStream`]. No text, no
//! HTTP, no plan steps here.

mod admit;
pub mod api;
mod assemble;
mod cancel;
mod commit;
mod core;
mod events;
mod group;
mod handle;
mod histogram;
mod options;
mod pager;
mod prefix;
mod queue;
mod request;
mod scheduler;
#[cfg(feature = "scripted-device")]
pub mod scripted;
mod sequence;
mod shared;
mod slab;
mod stats;
mod submit;

pub use api::{
    ChoiceTrace, EngineEvent, EngineRequest, EngineStats, FinishReason, LogitsMask, MaskFactory, MaskVerdict, RejectReason, SamplingParams,
    TokenLogprobs,
};
pub use events::EventStream;
pub use handle::{Engine, EngineHandle};
pub use histogram::{BUCKETS_S, Histogram};
pub use options::{Backlog, EngineHealth, EngineLimits, EngineOptions};
pub use prefix::{Miss, PrefixProbe};
