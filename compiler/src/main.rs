//! The `oxide-compile` command.

use clap::Parser as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    oxide_compile::cli::run(oxide_compile::cli::Args::parse())
}
