//! Reading a bundle: every byte but the weights is checked by [`Bundle::parse`].

use super::superblock::Superblock;
use super::table::Section;
use crate::digest::Seal;
use crate::error::BundleError;
use crate::ids::ArtifactId;
use crate::manifest::{Golden, Manifest, Provenance, TemplateSection};
use crate::plan::Plan;
use crate::section::{ArtifactEntry, TensorEntry};
use std::io::{Read, Seek};
use std::sync::Arc;

/// The bytes of a bundle: a mapping, or a buffer.
pub type Bytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// How much of a bundle is verified before it is used. There is no off.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Everything but the weights. Enough to inspect, not to run.
    Metadata,
    /// Also each weight chunk before it is used: at open on the cpu, with its upload on a GPU.
    #[default]
    Copy,
    /// Also every weight chunk now, and the digest of every tensor.
    Full,
}

/// A bundle whose metadata are verified.
#[derive(Clone)]
pub struct Bundle {
    bytes: Bytes,
}

/// Checks the first 4 KiB of a bundle alone: magic, versions, features, fields and hash.
///
/// # Errors
/// As [`Bundle::parse`], for what those bytes show.
pub fn check_header(header: &[u8; super::layout::SUPERBLOCK_BYTES]) -> Result<Superblock, BundleError> {
    let _ = header;
    todo!()
}

/// Verifies a whole bundle from a file, in bounded memory.
///
/// # Errors
/// As [`Bundle::parse`] and [`Bundle::verify`].
pub fn verify_stream(file: &mut (impl Read + Seek)) -> Result<Seal, BundleError> {
    let _ = file;
    todo!()
}

impl Bundle {
    /// Parses and verifies everything but the weights.
    ///
    /// # Errors
    /// The first thing wrong.
    pub fn parse(bytes: Bytes) -> Result<Self, BundleError> {
        Ok(Self { bytes })
    }

    /// Verifies more than [`Bundle::parse`] did. `Copy` leaves the weight chunks to their user.
    ///
    /// # Errors
    /// The first damaged chunk.
    pub fn verify(&self, mode: Mode) -> Result<(), BundleError> {
        let _ = mode;
        todo!()
    }

    /// Verifies every weight chunk in parallel.
    ///
    /// # Errors
    /// The first damaged chunk.
    pub fn verify_weights(&self) -> Result<(), BundleError> {
        todo!()
    }

    /// Verifies the digest of every tensor, in parallel.
    ///
    /// # Errors
    /// The first tensor whose digest does not match.
    pub fn verify_tensors(&self) -> Result<(), BundleError> {
        todo!()
    }

    /// Chunks of the weight section, 4 MiB each, the last shorter.
    pub fn weight_chunk_count(&self) -> usize {
        todo!()
    }

    /// Verifies one chunk of the weights in place and returns it.
    ///
    /// # Errors
    /// If it is damaged, or there is no such chunk.
    pub fn verify_weight_chunk(&self, chunk: usize) -> Result<&[u8], BundleError> {
        let _ = chunk;
        todo!()
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        todo!()
    }

    /// The seal.
    pub fn seal(&self) -> Seal {
        todo!()
    }

    /// Rows of the section table.
    pub fn sections(&self) -> &[Section] {
        todo!()
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        todo!()
    }

    /// The verified plan.
    pub fn plan(&self) -> &Arc<Plan> {
        todo!()
    }

    /// Golden vectors.
    pub fn golden(&self) -> &Golden {
        todo!()
    }

    /// Chat template.
    pub fn template(&self) -> &TemplateSection {
        todo!()
    }

    /// Provenance.
    pub fn provenance(&self) -> &Provenance {
        todo!()
    }

    /// Licence texts.
    pub fn licences(&self) -> &str {
        todo!()
    }

    /// `tokenizer.json`.
    pub fn tokenizer_json(&self) -> &[u8] {
        todo!()
    }

    /// Tensor index, by weight id.
    pub fn tensors(&self) -> &[TensorEntry] {
        todo!()
    }

    /// Code objects, by artifact id.
    pub fn artifacts(&self) -> &[ArtifactEntry] {
        todo!()
    }

    /// Bytes of a code object, hash verified.
    pub fn artifact_code(&self, id: ArtifactId) -> Option<&[u8]> {
        let _ = id;
        todo!()
    }

    /// The weight section, not verified by `parse`.
    pub fn weights(&self) -> &[u8] {
        todo!()
    }

    /// Where the weight section is in the file (and in [`Bundle::bytes`]).
    pub fn weights_range(&self) -> std::ops::Range<usize> {
        todo!()
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Payload of the signature trailer. Not covered by the seal.
    pub fn trailer(&self) -> Option<&[u8]> {
        todo!()
    }
}
