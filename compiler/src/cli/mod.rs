//! The command line of `oxide-compile`: arguments, environment, output, exit codes. Holds no logic of a compile.
//!
//! Exit codes: 0 done · 1 output unwritable · 2 wrong command line · 3 unknown profile · 4 bad profile · 5 limit out of range ·
//! 10 checkpoint not found · 11 shard missing · 12 file missing · 13 checkpoint does not fit the profile ·
//! 14 checkpoint unreadable · 20 kernels missing · 21 lowering failed · 22 artifacts unreadable ·
//! 30 sealing failed · 31 golden vectors failed · 40 not on the hub · 41 access refused · 42 network ·
//! 43 checksum · 44 disk full · 45 cache unreadable · 50 not reproduced · 51 bundle unreadable.

mod args;
mod progress;
mod report;

pub use args::Args;

use crate::compile::{self, CompileError};
use crate::hub;
use crate::passes::LowerError;
use crate::paths;
use crate::profile::{BUILTIN, Profile, builtin};
use crate::reproduce::{ReproduceError, reproduce};
use args::{Command, CompileArgs, KernelsArgs, PullArgs, ReproduceArgs};
use std::fmt::Display;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

/// Runs a command and prints its result.
pub fn run(args: Args) -> ExitCode {
    let done = match args.command() {
        Command::Profiles { json } => profiles(json),
        Command::Kernels(kernels) => list_kernels(&kernels),
        Command::Pull(pull) => pull_profile(&pull),
        Command::Reproduce(args) => reproduce_bundle(&args),
        Command::Compile(compile) => compile_profile(&compile),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

/// Writes to standard output. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) -> Result<(), CompileError> {
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CompileError::Output(error)),
        _ => Ok(()),
    }
}

/// Writes a message to standard error, if anyone listens.
fn complain(message: &dyn Display) {
    let _ = writeln!(std::io::stderr(), "oxide-compile: {message}");
}

fn profiles(json: bool) -> Result<(), CompileError> {
    let profiles = BUILTIN.iter().map(|found| Profile::parse(found.name, found.toml)).collect::<Result<Vec<_>, _>>()?;
    print(&report::profiles(&profiles, json))
}

fn list_kernels(args: &KernelsArgs) -> Result<(), CompileError> {
    let catalogue = args.artifacts.as_deref().map_or_else(crate::catalogue::Catalogue::embedded, crate::catalogue::Catalogue::read)?;
    print(&report::kernels(&catalogue, args.json))
}

fn pull_profile(args: &PullArgs) -> Result<(), CompileError> {
    let mut profile = Profile::load(&args.profile)?;
    if builtin(&profile.name).is_some_and(|found| !found.checkpoint.is_empty()) {
        return Err(hub::HubError::Embedded(profile.name).into());
    }
    if let Some(revision) = &args.revision {
        profile.source.revision.clone_from(revision);
    }
    let client = hub::Client::new(hub::ClientOptions { endpoint: args.endpoint.trim_end_matches('/').to_owned(), token: args.token() });
    let mut bars = progress::Bars::new(args.json);
    let pulled = hub::pull(&profile, &args.cache.cache(), &client, &mut bars)?;
    bars.clear();
    print(&report::pulled(&pulled, &args.profile, args.json))
}

fn reproduce_bundle(args: &ReproduceArgs) -> Result<(), CompileError> {
    let mut bars = progress::Bars::new(args.json);
    let compared = reproduce(&args.bundle, &args.sources(), &mut bars)?;
    bars.clear();
    print(&report::reproduced(&compared, args.json))?;
    match compared.first_difference {
        Some(section) => Err(ReproduceError::Differs { section }.into()),
        None => Ok(()),
    }
}

fn compile_profile(args: &CompileArgs) -> Result<(), CompileError> {
    let request = args.request()?;
    if let Some(stage) = args.dump {
        return print(&compile::dump(&request, stage)?);
    }
    paths::refuse_overwriting(&request.output, args.profile_file())?;
    let mut bars = progress::Bars::new(args.json);
    let made = compile::compile(&request, &mut bars);
    if let (Err(CompileError::Lower(LowerError::MissingKernels { .. })), Some(folder)) = (&made, &request.artifacts)
        && !folder.exists()
    {
        complain(&format_args!("there is no folder {}; leave --artifacts out to use the kernels built in", folder.display()));
    }
    let made = made?;
    bars.clear();
    print(&report::compiled(&made, args.json))
}
