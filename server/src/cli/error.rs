//! How commands fail: a message, and an exit code that scripts can tell apart.

use crate::model::LoadError;
use oxide_runtime::engine::RejectReason;
use std::io;

/// Exit codes of `oxide-run`; 2 is a wrong command line, 18 to 99 are a bundle's
/// (see `docs/bundle-format.md`), 130 is Ctrl-C.
pub mod exit {
    /// Something unexpected: a bug, or the system failed.
    pub const INTERNAL: u8 = 1;
    /// `diff`: the bundles differ.
    pub const DIFFERENT: u8 = 1;
    /// The command line is wrong.
    pub const USAGE: u8 = 2;
    /// The request is refused: an id out of range, a prompt too long, no chat template.
    pub const REQUEST: u8 = 3;
    /// The device refuses the bundle, or is not there.
    pub const DEVICE: u8 = 4;
    /// The device or engine failed while running.
    pub const ENGINE: u8 = 5;
    /// A golden vector is not reproduced.
    pub const GOLDEN: u8 = 6;
    /// The server cannot start or ended badly.
    pub const SERVE: u8 = 7;
    /// A file other than the bundle cannot be read.
    pub const INPUT: u8 = 8;
    /// The bundle does not fit the memory asked about.
    pub const NO_FIT: u8 = 9;
    /// The bundle's tokenizer or template does not load.
    pub const TEXT: u8 = 10;
    /// A replay draws other tokens than were journaled.
    pub const REPLAY: u8 = 11;
    /// The bundle has no signature by a trusted key.
    pub const UNTRUSTED: u8 = 12;
    /// The bundle violates the operator's policy.
    pub const POLICY: u8 = 13;
    /// Ended by Ctrl-C.
    pub const INTERRUPTED: u8 = 130;
}

/// A command that failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The bundle cannot be made ready.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The request is refused.
    #[error("{0}")]
    Request(String),
    /// The engine refuses the request.
    #[error("the request is refused: {0}")]
    Rejected(#[from] RejectReason),
    /// The engine failed.
    #[error("generation failed: {0}")]
    Engine(String),
    /// A golden vector differs.
    #[error("{0}")]
    Golden(String),
    /// A replay differs.
    #[error("{0}")]
    Replay(String),
    /// The server failed.
    #[error("{0}")]
    Serve(String),
    /// An input file is unusable.
    #[error("{path}: {reason}")]
    Input {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The command line contradicts itself.
    #[error("{0}")]
    Usage(String),
    /// Memory asked about is too small.
    #[error("{0}")]
    NoFit(String),
    /// Nobody who is trusted signed the bundle.
    #[error("{0}")]
    Untrusted(String),
    /// The bundle violates the operator's policy.
    #[error("{0}")]
    Policy(String),
    /// `diff` said how the bundles differ; nothing more to say.
    #[error("the bundles differ")]
    Differs,
    /// The reader of our output is gone; nothing to say.
    #[error("output closed")]
    OutputClosed,
    /// Output failed.
    #[error("cannot write output: {0}")]
    Output(io::Error),
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

impl CliError {
    /// Exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Load(error) => load_code(error),
            Self::Request(_) | Self::Rejected(_) => exit::REQUEST,
            Self::Engine(_) => exit::ENGINE,
            Self::Golden(_) => exit::GOLDEN,
            Self::Replay(_) => exit::REPLAY,
            Self::Serve(_) => exit::SERVE,
            Self::Input { .. } => exit::INPUT,
            Self::Usage(_) => exit::USAGE,
            Self::NoFit(_) => exit::NO_FIT,
            Self::Untrusted(_) => exit::UNTRUSTED,
            Self::Policy(_) => exit::POLICY,
            Self::Differs => exit::DIFFERENT,
            Self::OutputClosed => 0,
            Self::Output(_) => exit::INTERNAL,
            Self::Interrupted => exit::INTERRUPTED,
        }
    }

    /// Whether there is something to tell the user.
    pub fn is_silent(&self) -> bool {
        matches!(self, Self::Differs | Self::OutputClosed | Self::Interrupted)
    }
}

impl From<io::Error> for CliError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Output(error),
        }
    }
}

fn load_code(error: &LoadError) -> u8 {
    match error {
        LoadError::Open(error) => error.exit_code(),
        LoadError::Tokenizer(_) | LoadError::Template(_) => exit::TEXT,
        LoadError::Device(_) | LoadError::Admit(_) | LoadError::Isa { .. } | LoadError::KvMemory { .. } => exit::DEVICE,
    }
}
