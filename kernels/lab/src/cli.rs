//! Arguments, and which module answers them.

use crate::{bench, demo, load, synth};
use clap::{Parser, Subcommand};

/// Evidence for Oxide: demonstrations, synthetic checkpoints, benchmarks, load.
#[derive(Parser)]
#[command(name = "oxide-lab", version, about, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile the shipped model, serve it, ask it a question, print the answer and its speed
    Demo(demo::DemoArgs),
    /// Write a Hugging Face folder of a profile's shape from a seed
    Synth(synth::SynthArgs),
    /// Measure the engine on a bundle: decode steps, time to first token, a mix of requests
    Bench(bench::BenchArgs),
    /// Load a running OpenAI-compatible server with streaming completions
    Load(load::LoadArgs),
}

/// Runs a command.
///
/// # Errors
/// Whatever the command fails with.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Demo(args) => demo::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Load(args) => load::run(&args),
    }
}
