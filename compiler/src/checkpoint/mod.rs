//! Checkpoints: a Hugging Face folder (or the embedded one), read, checked against a profile, never believed.
//!
//! Owns file access ([`Files`]), the config check ([`config`]), the tensor inventory ([`tensors`]) and what
//! the text edge needs ([`text`]). Tensors are read by position: nothing is mapped, so converting a large
//! checkpoint does not make it resident.

pub mod config;
mod files;
pub mod tensors;
pub mod text;

pub use files::{Blob, Files};
pub use tensors::{Inventory, SourceType, Tensor};
pub use text::TextFiles;

use crate::graph::Graph;
use crate::profile::Profile;
use std::path::PathBuf;

/// Why a checkpoint is not usable.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file that every checkpoint has is absent.
    #[error("checkpoint {place}: {file} is missing")]
    MissingFile {
        /// The checkpoint.
        place: String,
        /// The file.
        file: String,
    },
    /// Shards that the index names are absent.
    #[error("checkpoint {place}: {} of {total} shards are missing: {}; download it again (`oxide-compile pull` resumes)", missing.len(), missing.join(", "))]
    MissingShard {
        /// The checkpoint.
        place: String,
        /// Names of the absent files.
        missing: Vec<String>,
        /// Shards that the index names.
        total: usize,
    },
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{file}: {problem}")]
    Malformed {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// It is not the model that the profile describes; every difference.
    #[error("checkpoint {place} does not fit profile `{profile}` ({} problems):\n  {}", problems.len(), problems.join("\n  "))]
    Mismatch {
        /// The checkpoint.
        place: String,
        /// The profile.
        profile: String,
        /// Each difference.
        problems: Vec<String>,
    },
}

/// A checkpoint that fits its profile.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its files.
    pub files: Files,
    /// Its tensors.
    pub inventory: Inventory,
    /// Tokenizer, template, generation defaults.
    pub text: TextFiles,
}

impl Checkpoint {
    /// Reads a checkpoint and checks config, tensors and tokenizer against the profile and its graph.
    ///
    /// # Errors
    /// If a file is missing or malformed, or anything differs; differences are reported together.
    pub fn open(files: Files, profile: &Profile, graph: &Graph) -> Result<Self, CheckpointError> {
        let config = config::read(&files)?;
        let mut problems = config::problems(&config, profile);
        let inventory = Inventory::read(&files)?;
        problems.extend(inventory.problems(graph, profile.dims.tied));
        let text = TextFiles::read(&files, &config)?;
        problems.extend(text.problems(profile));
        if problems.is_empty() {
            return Ok(Self { files, inventory, text });
        }
        Err(CheckpointError::Mismatch { place: files.place(), profile: profile.name.clone(), problems })
    }
}
