//! The command line of `oxide-run`.
//!
//! Owns arguments, what commands print and exit codes. A command reads like a page: load, work,
//! report. Loading is [`crate::model`]'s, serving is [`crate::http`]'s.
//!
//! ```text
//! oxide-run BUNDLE serve | chat | generate | bench | inspect | verify | fit | replay
//! ```

mod args;
mod bench;
mod chat;
mod complete;
mod error;
mod fit;
mod generate;
mod golden;
mod inspect;
mod output;
mod paths;
mod policy;
mod replay;
mod sampling;
mod serve;
mod size;
mod tools;
mod verify;

pub use args::Args;
pub use error::{CliError, exit};
pub use golden::{GoldenReport, run_golden};

use args::Command;
use std::time::Instant;

/// Runs a command to its end. `started` is when the process began.
///
/// # Errors
/// Whatever went wrong, with its exit code.
pub fn run(args: &Args, started: Instant) -> Result<(), CliError> {
    let load = args.load_options()?;
    match &args.command {
        Command::Serve(serve_args) => serve::run(serve_args, load),
        Command::Chat(chat_args) => chat::run(chat_args, &load),
        Command::Generate(generate_args) => generate::run(generate_args, &load),
        Command::Bench(bench_args) => bench::run(bench_args, &load, started),
        Command::Inspect(inspect_args) => inspect::run(inspect_args, &load),
        Command::Verify(verify_args) => verify::run(verify_args, &load),
        Command::Fit(fit_args) => fit::run(fit_args, &load),
        Command::Replay(replay_args) => replay::run(replay_args, &load),
        Command::Tool(tool) => tools::run(tool, &load),
    }
}
