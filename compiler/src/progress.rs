//! Progress of a compile, told to whoever drives it. The command line draws bars; tests ignore it.

/// Phases of a compile, in order.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading and checking the checkpoint.
    Check,
    /// Graph to plan.
    Lower,
    /// Converting and writing weights; counted in bytes.
    Weights,
    /// Re-reading and verifying the file.
    Seal,
    /// Running the golden prompts; counted in tokens.
    Golden,
}

impl Phase {
    /// What a person reads.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Check => "checking",
            Self::Lower => "lowering",
            Self::Weights => "writing weights",
            Self::Seal => "sealing",
            Self::Golden => "proving golden vectors",
        }
    }
}

/// Receives progress.
pub trait Progress {
    /// A phase starts, with its length if it has one.
    fn start(&mut self, phase: Phase, total: u64);
    /// So much of it is done.
    fn advance(&mut self, done: u64);
    /// It is over.
    fn finish(&mut self);
}

/// Tells nobody.
#[derive(Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&mut self, _: Phase, _: u64) {}
    fn advance(&mut self, _: u64) {}
    fn finish(&mut self) {}
}
