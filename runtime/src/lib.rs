//! Maps a sealed bundle, checks it, and executes only what was planned.

pub mod device;
pub mod engine;
pub mod mapping;
pub mod open;
