//! Reading a bundle: every byte but the weights is checked by [`Bundle::parse`].

use super::layout::*;
use super::metadata::{Metadata, byte_range, damaged, parse_index};
use super::superblock::Superblock;
use super::table::{self, Section};
use super::tree;
use crate::digest::{Digest, Seal};
use crate::error::BundleError;
use crate::ids::ArtifactId;
use crate::manifest::{Golden, Manifest, Provenance, TemplateSection};
use crate::plan::Plan;
use crate::section::{ArtifactEntry, TensorEntry};
use rayon::prelude::*;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
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

/// A bundle whose metadata are verified. Clones share everything.
#[derive(Clone)]
pub struct Bundle {
    bytes: Bytes,
    metadata: Arc<Metadata>,
    trailer: Option<Range<usize>>,
}

/// Checks the first 4 KiB of a bundle alone: magic, versions, features, fields and hash.
///
/// # Errors
/// As [`Bundle::parse`], for what those bytes show.
pub fn check_header(header: &[u8; SUPERBLOCK_BYTES]) -> Result<Superblock, BundleError> {
    Superblock::parse(header)
}

/// Verifies a whole bundle from a file: metadata, then every weight chunk, in bounded memory.
///
/// # Errors
/// As [`Bundle::parse`] and [`Bundle::verify`].
pub fn verify_stream(file: &mut (impl Read + Seek)) -> Result<Seal, BundleError> {
    let (prefix, file_bytes) = read_metadata(file)?;
    let metadata = Metadata::parse(&prefix, file_bytes)?;
    let weights = table::find(&metadata.sections, SectionKind::WDAT)?;
    let leaves = stream_leaves(file, weights.length)?;
    check_weight_leaves(weights, &leaves, &metadata.weight_leaves)?;
    let mut rest = Vec::new();
    file.take(TRAILER_MAX + 1).read_to_end(&mut rest)?;
    parse_trailer(&rest, file_bytes, metadata.superblock.sealed_bytes)?;
    Ok(metadata.superblock.seal())
}

/// What a bundle was made from and into: enough to make it again and to compare.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The superblock.
    pub superblock: Superblock,
    /// Rows of the section table.
    pub sections: Vec<Section>,
    /// Provenance.
    pub provenance: Provenance,
}

/// Reads the recipe of a file; everything but the weights is verified, and the weights are not read.
///
/// # Errors
/// As [`Bundle::parse`].
pub fn read_recipe(file: &mut (impl Read + Seek)) -> Result<Recipe, BundleError> {
    let (prefix, file_bytes) = read_metadata(file)?;
    let Metadata { superblock, sections, provenance, .. } = Metadata::parse(&prefix, file_bytes)?;
    Ok(Recipe { superblock, sections, provenance })
}

/// Everything before the weights, and the file's length; the file is left at the first weight.
fn read_metadata(file: &mut (impl Read + Seek)) -> Result<(Vec<u8>, u64), BundleError> {
    let file_bytes = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(0))?;
    let mut prefix = Vec::new();
    read_up_to(file, &mut prefix, SECTION_ALIGN.min(file_bytes))?;
    let (_, sections) = parse_index(&prefix, file_bytes)?;
    let weights = table::find(&sections, SectionKind::WDAT)?;
    read_up_to(file, &mut prefix, weights.offset)?;
    Ok((prefix, file_bytes))
}

impl Bundle {
    /// Parses and verifies everything but the weights.
    ///
    /// # Errors
    /// The first thing wrong.
    pub fn parse(bytes: Bytes) -> Result<Self, BundleError> {
        let all = (*bytes).as_ref();
        let metadata = Metadata::parse(all, all.len() as u64)?;
        let sealed = metadata.weights.end;
        let payload = parse_trailer(all.get(sealed..).unwrap_or_default(), all.len() as u64, sealed as u64)?;
        let trailer = payload.map(|payload| sealed + payload.start..sealed + payload.end);
        Ok(Self { metadata: Arc::new(metadata), trailer, bytes })
    }

    /// Verifies more than [`Bundle::parse`] did. `Copy` leaves the weight chunks to their user.
    ///
    /// # Errors
    /// The first damaged chunk.
    pub fn verify(&self, mode: Mode) -> Result<(), BundleError> {
        match mode {
            Mode::Metadata | Mode::Copy => Ok(()),
            Mode::Full => self.verify_weights().and_then(|()| self.verify_tensors()),
        }
    }

    /// Verifies every weight chunk in parallel.
    ///
    /// # Errors
    /// A damaged chunk.
    pub fn verify_weights(&self) -> Result<(), BundleError> {
        (0..self.weight_chunk_count()).into_par_iter().try_for_each(|chunk| self.verify_weight_chunk(chunk).map(|_| ()))
    }

    /// Verifies the digest of every tensor, in parallel.
    ///
    /// # Errors
    /// The first tensor whose digest does not match.
    pub fn verify_tensors(&self) -> Result<(), BundleError> {
        self.tensors().par_iter().try_for_each(|tensor| match self.tensor_root(tensor) {
            found if found == tensor.root => Ok(()),
            found => Err(BundleError::Disagreement {
                section: SectionKind::WIDX,
                what: format!("digest of tensor {:?}", tensor.name),
                left: found.to_string(),
                right: tensor.root.to_string(),
            }),
        })
    }

    /// Chunks of the weight section, 4 MiB each, the last shorter.
    pub fn weight_chunk_count(&self) -> usize {
        self.metadata.weight_leaves.len()
    }

    /// Verifies one chunk of the weights in place and returns it.
    ///
    /// # Errors
    /// If it is damaged, or there is no such chunk.
    pub fn verify_weight_chunk(&self, chunk: usize) -> Result<&[u8], BundleError> {
        let bytes = self.weights().chunks(WEIGHT_CHUNK_BYTES as usize).nth(chunk);
        let leaf = self.metadata.weight_leaves.get(chunk);
        match (bytes, leaf) {
            (Some(bytes), Some(leaf)) if tree::leaf(bytes) == *leaf => Ok(bytes),
            _ => Err(damaged(table::find(self.sections(), SectionKind::WDAT)?, chunk as u64)),
        }
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.metadata.superblock
    }

    /// The seal.
    pub fn seal(&self) -> Seal {
        self.metadata.superblock.seal()
    }

    /// Rows of the section table.
    pub fn sections(&self) -> &[Section] {
        &self.metadata.sections
    }

    /// The bytes of a section of any kind; unverified if it is the weights.
    pub fn section_bytes(&self, section: &Section) -> &[u8] {
        self.slice(byte_range(section))
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.metadata.manifest
    }

    /// The verified plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.metadata.plan
    }

    /// Golden vectors.
    pub fn golden(&self) -> &Golden {
        &self.metadata.golden
    }

    /// Chat template.
    pub fn template(&self) -> &TemplateSection {
        &self.metadata.template
    }

    /// Provenance.
    pub fn provenance(&self) -> &Provenance {
        &self.metadata.provenance
    }

    /// Licence texts.
    pub fn licences(&self) -> &str {
        &self.metadata.licences
    }

    /// `tokenizer.json`.
    pub fn tokenizer_json(&self) -> &[u8] {
        self.slice(self.metadata.tokenizer.clone())
    }

    /// Tensor index, by weight id.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.metadata.tensors
    }

    /// Code objects, by artifact id.
    pub fn artifacts(&self) -> &[ArtifactEntry] {
        &self.metadata.artifacts
    }

    /// Bytes of a code object, hash verified by `parse`.
    pub fn artifact_code(&self, id: ArtifactId) -> Option<&[u8]> {
        self.metadata.artifact_ranges.get(id.index()).map(|range| self.slice(range.clone()))
    }

    /// The weight section, not verified by `parse`.
    pub fn weights(&self) -> &[u8] {
        self.slice(self.metadata.weights.clone())
    }

    /// Where the weight section is in the file (and in [`Bundle::bytes`]).
    pub fn weights_range(&self) -> Range<usize> {
        self.metadata.weights.clone()
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Payload of the signature trailer. Not covered by the seal.
    pub fn trailer(&self) -> Option<&[u8]> {
        self.trailer.clone().map(|range| self.slice(range))
    }

    fn slice(&self, range: Range<usize>) -> &[u8] {
        (*self.bytes).as_ref().get(range).unwrap_or_default()
    }

    fn tensor_root(&self, tensor: &TensorEntry) -> Digest {
        let start = usize::try_from(tensor.offset_bytes).unwrap_or(usize::MAX);
        let end = start.saturating_add(usize::try_from(tensor.size_bytes).unwrap_or(usize::MAX));
        tree::root(&tree::leaves(self.weights().get(start..end).unwrap_or_default(), WEIGHT_CHUNK_BYTES))
    }
}

/// Grows `buffer` to the first `end` bytes of the file; the caller has bounded `end` by the file's length.
fn read_up_to(file: &mut impl Read, buffer: &mut Vec<u8>, end: u64) -> Result<(), BundleError> {
    let missing = end.saturating_sub(buffer.len() as u64);
    file.take(missing).read_to_end(buffer)?;
    Ok(())
}

fn stream_leaves(file: &mut impl Read, length: u64) -> Result<Vec<Digest>, BundleError> {
    let mut stream = tree::LeafStream::new(WEIGHT_CHUNK_BYTES);
    let mut batch = Vec::new();
    let mut left = length;
    while left > 0 {
        batch.clear();
        let read = file.take(left.min(STREAM_BATCH_BYTES)).read_to_end(&mut batch)?;
        if read == 0 {
            break;
        }
        stream.push(&batch);
        left -= read as u64;
    }
    Ok(stream.take())
}

/// Read at once when verifying from a file: a few chunks, for several threads.
const STREAM_BATCH_BYTES: u64 = 8 * WEIGHT_CHUNK_BYTES;

fn check_weight_leaves(weights: &Section, found: &[Digest], recorded: &[Digest]) -> Result<(), BundleError> {
    let wrong = recorded.iter().enumerate().find(|(chunk, leaf)| found.get(*chunk) != Some(leaf));
    match wrong {
        Some((chunk, _)) => Err(damaged(weights, chunk as u64)),
        None => Ok(()),
    }
}

/// Range of the trailer's payload in the bytes after the sealed range: magic, `u64` length, payload.
fn parse_trailer(rest: &[u8], file_bytes: u64, sealed_bytes: u64) -> Result<Option<Range<usize>>, BundleError> {
    if file_bytes == sealed_bytes {
        return Ok(None);
    }
    let foreign = BundleError::TrailingBytes { extra_bytes: file_bytes - sealed_bytes, sealed_bytes };
    let payload = rest.strip_prefix(&TRAILER_MAGIC).and_then(|rest| rest.split_first_chunk::<8>());
    match payload {
        Some((head, payload)) if u64::from_le_bytes(*head) == payload.len() as u64 && rest.len() as u64 <= TRAILER_MAX => {
            Ok(Some(TRAILER_MAGIC.len() + head.len()..rest.len()))
        }
        _ => Err(foreign),
    }
}
