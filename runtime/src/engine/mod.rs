//! The engine: one thread that owns scheduler, KV pager and device. Tokens in, events out.

pub mod api;

pub use api::{
    ChoiceTrace, EngineEvent, EngineRequest, EngineStats, FinishReason, LogitsMask, MaskFactory, MaskVerdict, RejectReason, SamplingParams,
    TokenLogprobs,
};
