//! Arguments of the bundle tools. The tools that exist are listed here and nowhere else.

use clap::{Args as ClapArgs, Subcommand};
use std::path::PathBuf;

/// A tool that looks at a bundle, or makes a file from one, without running the model.
#[derive(Clone, Debug, Subcommand)]
pub(in crate::cli) enum ToolCommand {
    /// Check the first 4 KiB alone (`-` reads a pipe): identity, limits, sizes, the machine needed
    Check(JsonArgs),
    /// Tell how another bundle differs; exits with 0 if it is equal and 1 if not
    Diff(DiffArgs),
    /// List the kernels, their code objects, and the steps that use them
    Kernels(JsonArgs),
    /// Write a new key pair: the private key to the path in the bundle's place, the public one to PATH.pub
    Keygen(KeygenArgs),
    /// Sign the bundle's roots with an Ed25519 key, into BUNDLE.sig or behind the sealed bytes
    Sign(SignArgs),
    /// Draw the plan as one self-contained HTML file: lanes, arena, kernels, bytes and FLOPs
    Explain(ExplainArgs),
    /// Write a bundle with the same plan and kernels and computed weights: small, of full speed, and speaking nonsense
    Ghost(GhostArgs),
    /// Write an OCI image layout that registry tools push, the bundle as one layer
    OciLayout(OciArgs),
    /// Print a CycloneDX bill of materials (JSON)
    Sbom,
    /// Print the licences of what the bundle holds
    Licences(JsonArgs),
}

/// Options of tools that only print.
#[derive(Copy, Clone, Debug, ClapArgs)]
pub(in crate::cli) struct JsonArgs {
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

/// Options of `keygen`.
pub(in crate::cli) type KeygenArgs = JsonArgs;

/// Options of `sign`.
#[derive(Clone, Debug, ClapArgs)]
pub(in crate::cli) struct SignArgs {
    /// Private key (PEM, Ed25519)
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) key: PathBuf,
    /// Put the signature into the bundle's trailer instead of a file of its own
    #[arg(long, conflicts_with = "output")]
    pub(in crate::cli) embed: bool,
    /// File of signatures [default: BUNDLE.sig]
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

/// Options of tools that write one file.
#[derive(Clone, Debug, ClapArgs)]
pub(in crate::cli) struct OutputArgs {
    /// File to write
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) output: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

/// Options of `oci-layout`.
#[derive(Clone, Debug, ClapArgs)]
pub(in crate::cli) struct OciArgs {
    /// New or empty folder
    #[arg(value_name = "DIR")]
    pub(in crate::cli) folder: PathBuf,
    /// Tag in the index [default: the first 12 digits of the seal]
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) tag: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

/// Options of `ghost`.
pub(in crate::cli) type GhostArgs = OutputArgs;

/// Options of `explain`.
pub(in crate::cli) type ExplainArgs = OutputArgs;

/// Options of `diff`.
#[derive(Clone, Debug, ClapArgs)]
pub(in crate::cli) struct DiffArgs {
    /// Bundle to compare with
    #[arg(value_name = "OTHER")]
    pub(in crate::cli) other: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}
