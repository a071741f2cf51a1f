//! Tools for bundles as files: what they are, how they differ, what comes along with them.
//!
//! Owns what `check`, `diff`, `kernels` and their kin print and write. No tool runs the model, opens a device or
//! uses the network; each reads verified metadata only.

mod args;
mod check;
mod cost;
mod diff;
mod explain;
mod ghost;
mod kernels;
mod names;
mod oci;
mod sbom;
mod sign;
mod text_diff;

pub(super) use args::ToolCommand;
pub(super) use sbom::licence;
pub(super) use sign::{public_keys, read_bounded, require_signer, signer};

use super::error::CliError;
use crate::model::{LoadError, LoadOptions};
use oxide_bundle::{Bundle, Mode};
use oxide_runtime::open::{OpenOptions, open_bundle};
use std::path::Path;

/// Runs a tool to its end.
pub(super) fn run(command: &ToolCommand, load: &LoadOptions) -> Result<(), CliError> {
    match command {
        ToolCommand::Check(args) => check::run(*args, load),
        ToolCommand::Diff(args) => diff::run(args, load),
        ToolCommand::Kernels(args) => kernels::run(*args, load),
        ToolCommand::Keygen(args) => sign::keygen(*args, load),
        ToolCommand::Sign(args) => sign::run(args, load),
        ToolCommand::Explain(args) => explain::run(args, load),
        ToolCommand::Ghost(args) => ghost::run(args, load),
        ToolCommand::OciLayout(args) => oci::run(args, load),
        ToolCommand::Sbom => sbom::sbom(load),
        ToolCommand::Licences(args) => sbom::licences(*args, load),
    }
}

/// The bundle of the command line, its metadata verified.
fn open(load: &LoadOptions) -> Result<Bundle, CliError> {
    let options = OpenOptions { access: load.access, mode: Mode::Metadata, expect: load.expect };
    Ok(open_bundle(&load.path, options).map_err(LoadError::from)?.bundle)
}

/// The bundle of the command line, every byte verified.
fn open_whole(load: &LoadOptions) -> Result<Bundle, CliError> {
    let options = OpenOptions { access: load.access, mode: Mode::Full, expect: load.expect };
    Ok(open_bundle(&load.path, options).map_err(LoadError::from)?.bundle)
}

/// Another bundle; no seal is expected of it.
fn open_other(path: &Path, load: &LoadOptions) -> Result<Bundle, CliError> {
    let options = OpenOptions { access: load.access, mode: Mode::Metadata, expect: None };
    Ok(open_bundle(path, options).map_err(LoadError::from)?.bundle)
}

/// Writes a file whole or not at all: `PATH.partial`, then a rename.
fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|error| CliError::Input { path: path.display().to_string(), reason: format!("cannot be written: {error}") })
}
