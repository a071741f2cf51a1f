//! `oxide-run`: parse, run, map the error to an exit code.

use clap::Parser;
use oxide_run::cli::{Args, run};
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let started = Instant::now();
    match run(&Args::parse(), started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !error.is_silent() {
                let _ = writeln!(std::io::stderr().lock(), "error: {error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}
