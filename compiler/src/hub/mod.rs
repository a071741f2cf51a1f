//! Checkpoints on the Hugging Face hub and in its cache on disk. The only network code of the compiler,
//! and only [`pull`] uses the network.
//!
//! The cache has the layout that Python's `huggingface_hub` writes, so both find each other's files:
//!
//! ```text
//! <cache>/models--ORG--NAME/blobs/<etag>                   contents, by hash
//!                           snapshots/<commit>/<file>      links into blobs
//!                           refs/<branch>                  commit of a branch
//! ```

mod client;
mod pull;

pub use client::{Client, ClientOptions};
pub use pull::{PullProgress, PullReport, pull};

use crate::profile::Profile;
use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Not in the cache.
    #[error(
        "no checkpoint of profile `{profile}` in {cache} ({repository} at {revision}): \
         run `oxide-compile pull {profile}`, or pass --model DIR"
    )]
    NotCached {
        /// The profile.
        profile: String,
        /// The cache.
        cache: PathBuf,
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
    },
    /// The model is inside the compiler.
    #[error("profile `{0}` needs no download: its checkpoint is part of oxide-compile")]
    Embedded(String),
    /// The hub does not know the repository.
    #[error("{endpoint} has no repository {repository} (or it is private and needs --token)")]
    NoRepository {
        /// The hub.
        endpoint: String,
        /// The repository.
        repository: String,
    },
    /// The hub does not know the revision.
    #[error("{repository} has no revision {revision}: correct `source.revision` of the profile, or pass --revision")]
    NoRevision {
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
    },
    /// Access refused.
    #[error("{endpoint} refuses access to {repository} (status {status}): pass --token or HF_TOKEN of an account that may read it")]
    Unauthorised {
        /// The hub.
        endpoint: String,
        /// The repository.
        repository: String,
        /// HTTP status.
        status: u16,
    },
    /// The repository lacks a file that every checkpoint has.
    #[error("{repository} at {revision} has no {file}")]
    NoFile {
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
        /// The file.
        file: String,
    },
    /// Another HTTP status.
    #[error("{url}: status {status}")]
    Status {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
    },
    /// The connection failed.
    #[error("{url}: {problem}; run the command again to resume")]
    Network {
        /// What was asked for.
        url: String,
        /// What happened.
        problem: String,
    },
    /// An answer that is not understood.
    #[error("{url}: {problem}")]
    Protocol {
        /// What was asked for.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The contents are not what the hub promised.
    #[error("{file}: downloaded contents hash to {found}, the hub says {expected}; they were discarded, run the command again")]
    Checksum {
        /// The file.
        file: String,
        /// Hash of the contents.
        found: String,
        /// Hash promised.
        expected: String,
    },
    /// No room.
    #[error("{path}: no space left on the disk after {written} of {needed} bytes; free some or set --cache-dir, then run again to resume")]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Bytes on disk.
        written: u64,
        /// Bytes of the file.
        needed: u64,
    },
    /// The cache cannot be read or written.
    #[error("{path}: {source}")]
    Cache {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl HubError {
    /// Exit code of the command line.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::NotCached { .. } => 10,
            Self::Embedded(_) => 2,
            Self::NoRepository { .. } | Self::NoRevision { .. } | Self::NoFile { .. } => 40,
            Self::Unauthorised { .. } => 41,
            Self::Status { .. } | Self::Network { .. } | Self::Protocol { .. } => 42,
            Self::Checksum { .. } => 43,
            Self::DiskFull { .. } => 44,
            Self::Cache { .. } => 45,
        }
    }
}

/// A hub cache on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The cache in a folder (`HF_HUB_CACHE`).
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Folder of a repository.
    pub fn repository(&self, repository: &str) -> PathBuf {
        self.root.join(format!("models--{}", repository.replace('/', "--")))
    }

    /// Folder of the profile's revision.
    ///
    /// # Errors
    /// If it is not there; the error names the `pull` command.
    pub fn snapshot(&self, profile: &Profile) -> Result<PathBuf, HubError> {
        let folder = self.repository(&profile.source.repository);
        let revision = &profile.source.revision;
        let commit = std::fs::read_to_string(folder.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.clone(), |text| text.trim().to_owned());
        let snapshot = folder.join("snapshots").join(commit);
        if snapshot.join("config.json").exists() {
            return Ok(snapshot);
        }
        Err(HubError::NotCached {
            profile: profile.name.clone(),
            cache: self.root.clone(),
            repository: profile.source.repository.clone(),
            revision: revision.clone(),
        })
    }
}
