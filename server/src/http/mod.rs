//! The HTTP server: listening, routes, authentication, limits, server-sent events, metrics and life cycle.
//!
//! Knows the wire types of [`crate::openai`] and the engine's handle; knows no device, plan or KV page.
//!
//! ```text
//! pub async fn serve<L>(options: ServeOptions, loader: L) -> Result<(), ServeError>
//! where
//!     L: FnOnce() -> anyhow::Result<crate::model::LoadedModel> + Send + 'static;
//! ```
//!
//! `serve` binds first, runs `loader` on a thread of its own (`/health` answers 503 until it
//! returns), and ends after SIGTERM or SIGINT once live streams finished.

mod options;

pub use options::ServeOptions;
