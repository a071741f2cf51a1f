//! `oxide-lab`: evidence. One self-contained binary for machines with no Rust and no network.

mod bench;
mod cli;
mod client;
mod compare;
mod demo;
mod load;
mod opened;
mod qualify;
mod random;
mod soak;
mod synth;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run(cli::Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
