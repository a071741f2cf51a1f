//! Arguments, and which module answers them.

use crate::{bench, compare, demo, load, qualify, soak, synth};
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
    /// Check every kernel of a device against the f64 reference, over its whole domain
    Qualify(qualify::QualifyArgs),
    /// Compare a bundle's greedy ids with a reference made by transformers
    Compare(compare::CompareArgs),
    /// Load a running OpenAI-compatible server with streaming completions
    Load(load::LoadArgs),
    /// Load a server with good, bad and rude clients and check what must hold whatever they do
    Soak(soak::SoakArgs),
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
        Command::Qualify(args) => qualify::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Soak(args) => soak::run(&args),
    }
}
