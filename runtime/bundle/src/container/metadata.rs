//! Everything before the weights, parsed and verified from the first bytes of a file.

use super::layout::*;
use super::superblock::{LimitsBlock, Superblock, TargetBlock, check_magic};
use super::table::{self, Section};
use super::tree;
use crate::cubin;
use crate::digest::Digest;
use crate::error::BundleError;
use crate::manifest::{Golden, Manifest, Provenance, Target, TemplateSection};
use crate::msgpack::{self, MsgpackError};
use crate::plan::{Plan, RawPlan, WeightDecl};
use crate::section::{ArtifactEntry, KernelIndex, TensorEntry, TensorIndex};
use rayon::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::Range;
use std::sync::Arc;

/// Architecture of the code objects that this build runs.
const SM90: u32 = 90;

/// Verified metadata. Ranges are positions in the file and lie inside the bytes that were parsed.
pub(crate) struct Metadata {
    pub(crate) superblock: Superblock,
    pub(crate) sections: Vec<Section>,
    pub(crate) manifest: Manifest,
    pub(crate) plan: Arc<Plan>,
    pub(crate) golden: Golden,
    pub(crate) template: TemplateSection,
    pub(crate) provenance: Provenance,
    pub(crate) licences: String,
    pub(crate) tokenizer: Range<usize>,
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) artifacts: Vec<ArtifactEntry>,
    pub(crate) artifact_ranges: Vec<Range<usize>>,
    pub(crate) weights: Range<usize>,
    pub(crate) weight_leaves: Vec<Digest>,
}

/// Superblock and section table of a file of `file_bytes`, from its first bytes.
pub(crate) fn parse_index(prefix: &[u8], file_bytes: u64) -> Result<(Superblock, Vec<Section>), BundleError> {
    check_magic(prefix)?;
    let truncated = |sealed_bytes| BundleError::Truncated { found_bytes: file_bytes, sealed_bytes };
    let header = prefix.first_chunk().ok_or(truncated(SUPERBLOCK_BYTES as u64))?;
    let superblock = Superblock::parse(header)?;
    if file_bytes < superblock.sealed_bytes {
        return Err(truncated(superblock.sealed_bytes));
    }
    let bytes = slice(prefix, superblock.table_offset, table::end(&superblock)).ok_or(truncated(table::end(&superblock)))?;
    let sections = table::parse(bytes, &superblock)?;
    Ok((superblock, sections))
}

impl Metadata {
    /// Parses a file of `file_bytes` from its first bytes, which reach at least to the weights.
    pub(crate) fn parse(prefix: &[u8], file_bytes: u64) -> Result<Self, BundleError> {
        let (superblock, sections) = parse_index(prefix, file_bytes)?;
        let reader = Reader { prefix, superblock: &superblock, sections: &sections };
        reader.check_gaps()?;
        // Decoding is safe on any bytes, so the longest one need not wait for the hashes; their errors come first.
        let (leaves, raw) = rayon::join(|| reader.check_hashes(), || reader.decode::<RawPlan>(SectionKind::PLAN));
        let leaves = leaves?;
        let manifest: Manifest = reader.decode(SectionKind::MANI)?;
        let raw = raw?;
        let (artifacts, artifact_ranges) = reader.artifacts()?;
        let plan = Plan::verify(raw, &manifest)?;
        plan.check_artifacts(&artifacts.iter().map(|artifact| &artifact.manifest).collect::<Vec<_>>())?;
        reader.check_superblock(&manifest, &plan, &artifacts)?;
        let tensors: TensorIndex = reader.decode(SectionKind::WIDX)?;
        check_tensors(&tensors.tensors, plan.weights())?;
        let weights = table::find(&sections, SectionKind::WDAT)?;
        let weight_leaves = leaves.get(leaf_range(weights)).unwrap_or_default().to_vec();
        Ok(Self {
            manifest,
            plan: Arc::new(plan),
            golden: reader.decode(SectionKind::GOLD)?,
            template: reader.decode(SectionKind::TMPL)?,
            provenance: reader.decode(SectionKind::PROV)?,
            licences: reader.text(SectionKind::LICE)?,
            tokenizer: byte_range(table::find(&sections, SectionKind::TOKN)?),
            tensors: tensors.tensors,
            artifacts,
            artifact_ranges,
            weights: byte_range(weights),
            weight_leaves,
            superblock,
            sections,
        })
    }
}

/// Decodes canonical msgpack of a section.
pub(crate) fn decode<T: Serialize + DeserializeOwned + Send>(section: SectionKind, bytes: &[u8]) -> Result<T, BundleError> {
    msgpack::decode(bytes).map_err(|error| match error {
        MsgpackError::NotCanonical { offset, reason } => {
            BundleError::NotCanonical { section, offset: offset as u64, reason: reason.to_owned() }
        }
        MsgpackError::Undecodable(reason) | MsgpackError::Unencodable(reason) => BundleError::Undecodable { section, reason },
    })
}

/// Where a section lies in memory. The table check bounds it by the file's length.
pub(crate) fn byte_range(section: &Section) -> Range<usize> {
    let at = |offset| usize::try_from(offset).unwrap_or(usize::MAX);
    at(section.offset)..at(section.end())
}

fn leaf_range(section: &Section) -> Range<usize> {
    let first = section.leaf_first as usize;
    first..first.saturating_add(section.leaf_count as usize)
}

fn slice(bytes: &[u8], start: u64, end: u64) -> Option<&[u8]> {
    bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
}

/// The bytes before the weights, with a checked table.
struct Reader<'a> {
    prefix: &'a [u8],
    superblock: &'a Superblock,
    sections: &'a [Section],
}

impl<'a> Reader<'a> {
    fn bytes(&self, kind: SectionKind) -> Result<&'a [u8], BundleError> {
        self.section_bytes(table::find(self.sections, kind)?)
    }

    fn section_bytes(&self, section: &Section) -> Result<&'a [u8], BundleError> {
        let truncated = BundleError::Truncated { found_bytes: self.prefix.len() as u64, sealed_bytes: section.end() };
        slice(self.prefix, section.offset, section.end()).ok_or(truncated)
    }

    fn decode<T: Serialize + DeserializeOwned + Send>(&self, kind: SectionKind) -> Result<T, BundleError> {
        decode(kind, self.bytes(kind)?)
    }

    fn text(&self, kind: SectionKind) -> Result<String, BundleError> {
        let text = std::str::from_utf8(self.bytes(kind)?);
        text.map(str::to_owned).map_err(|error| BundleError::NotUtf8 { section: kind, offset: error.valid_up_to() as u64 })
    }

    fn check_gaps(&self) -> Result<(), BundleError> {
        let mut end = table::end(self.superblock);
        for section in self.sections {
            let truncated = BundleError::Truncated { found_bytes: self.prefix.len() as u64, sealed_bytes: section.offset };
            let gap = slice(self.prefix, end, section.offset).ok_or(truncated)?;
            if let Some(at) = gap.iter().position(|byte| *byte != 0) {
                return Err(BundleError::Gap { section: section.kind, offset: end + at as u64 });
            }
            end = section.end();
        }
        Ok(())
    }

    /// Verifies every section but the weights, and the weights' leaves against their root. Returns all leaves.
    fn check_hashes(&self) -> Result<Vec<Digest>, BundleError> {
        let hash = table::find(self.sections, SectionKind::HASH)?;
        let hash_bytes = self.section_bytes(hash)?;
        check_root(hash, &tree::leaves(hash_bytes, CHUNK_BYTES))?;
        let leaves: Vec<Digest> = hash_bytes.as_chunks().0.iter().copied().map(Digest).collect();
        self.sections.par_iter().filter(|section| section.kind != SectionKind::HASH).try_for_each(|section| {
            let recorded = leaves.get(leaf_range(section)).unwrap_or_default();
            if section.kind != SectionKind::WDAT {
                check_leaves(section, recorded, self.section_bytes(section)?)?;
            }
            check_root(section, recorded)
        })?;
        let roots = [
            (SectionKind::WDAT, self.superblock.weights_root),
            (SectionKind::PLAN, self.superblock.plan_root),
            (SectionKind::KERN, self.superblock.kernels_root),
        ];
        for (kind, root) in roots {
            agree(SectionKind::HEAD, "root of a section in the superblock", &table::find(self.sections, kind)?.root, &root)?;
        }
        Ok(leaves)
    }

    fn artifacts(&self) -> Result<(Vec<ArtifactEntry>, Vec<Range<usize>>), BundleError> {
        let base = byte_range(table::find(self.sections, SectionKind::KERN)?).start;
        let index = parse_kernels(self.bytes(SectionKind::KERN)?)?;
        let at = |offset: u64| base.saturating_add(usize::try_from(offset).unwrap_or(usize::MAX));
        let range = |artifact: &ArtifactEntry| at(artifact.offset_bytes)..at(artifact.offset_bytes.saturating_add(artifact.size_bytes));
        let ranges = index.artifacts.iter().map(range).collect();
        Ok((index.artifacts, ranges))
    }

    fn check_superblock(&self, manifest: &Manifest, plan: &Plan, artifacts: &[ArtifactEntry]) -> Result<(), BundleError> {
        if manifest.target == Target::Cpu {
            agree(SectionKind::KERN, "number of code objects of target cpu", &0, &artifacts.len())?;
        }
        let driver_min = artifacts.iter().map(|artifact| artifact.manifest.driver_min).max().unwrap_or(0);
        let target = TargetBlock::of(manifest, plan.raw(), driver_min);
        agree(SectionKind::MANI, "target block", &self.superblock.target, &target)?;
        agree(SectionKind::PLAN, "limits block", &self.superblock.limits, &LimitsBlock::of(manifest, plan.raw()))?;
        let weight_bytes = table::find(self.sections, SectionKind::WDAT)?.length;
        agree(SectionKind::WDAT, "length of the weights", &manifest.ledger.weight_bytes, &weight_bytes)
    }
}

/// Parses a kernel section: `u64` length of the index, index, then code objects at multiples of 256, gaps zero.
pub(crate) fn parse_kernels(bytes: &[u8]) -> Result<KernelIndex, BundleError> {
    let section = SectionKind::KERN;
    let undecodable = |reason: &str| BundleError::Undecodable { section, reason: reason.to_owned() };
    let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length)).ok_or(undecodable("no index length"))?;
    let index_end = length.checked_add(8).ok_or(undecodable("index length overflows"))?;
    let index: KernelIndex = decode(section, slice(bytes, 8, index_end).ok_or(undecodable("index past the end"))?)?;
    let mut end = index_end;
    for (number, artifact) in (0..).zip(&index.artifacts) {
        end = check_artifact(bytes, number, artifact, end)?;
    }
    match end == bytes.len() as u64 {
        true => Ok(index),
        false => Err(undecodable("bytes after the last code object")),
    }
}

fn check_artifact(bytes: &[u8], index: u32, artifact: &ArtifactEntry, before_end: u64) -> Result<u64, BundleError> {
    let bad = |reason: String| BundleError::Artifact { index, sha256: artifact.sha256, reason };
    let expected = align_up(before_end, TENSOR_ALIGN);
    if expected != Some(artifact.offset_bytes) {
        return Err(bad(format!("offset is {}, allowed is {}", artifact.offset_bytes, expected.unwrap_or(u64::MAX))));
    }
    let end = artifact.offset_bytes.checked_add(artifact.size_bytes).ok_or_else(|| bad("size overflows".to_owned()))?;
    let code = slice(bytes, artifact.offset_bytes, end).ok_or_else(|| bad(format!("ends at {end} of {} bytes", bytes.len())))?;
    if slice(bytes, before_end, artifact.offset_bytes).unwrap_or_default().iter().any(|byte| *byte != 0) {
        return Err(bad("the gap before it is not zero".to_owned()));
    }
    let found = Digest::of(&[code]);
    if found != artifact.sha256 {
        return Err(bad(format!("its SHA-256 is {found}")));
    }
    check_cubin(index, artifact, code).map(|()| end)
}

fn check_cubin(index: u32, artifact: &ArtifactEntry, code: &[u8]) -> Result<(), BundleError> {
    let sha256 = artifact.sha256;
    let refused = |source| BundleError::Cubin { index, sha256, source };
    let sm = cubin::inspect(code).map_err(refused)?.sm;
    if sm != SM90 {
        return Err(BundleError::CubinArch { index, sha256, found: sm, allowed: SM90 });
    }
    cubin::check(&artifact.manifest, code).map_err(refused)
}

fn check_leaves(section: &Section, recorded: &[Digest], bytes: &[u8]) -> Result<(), BundleError> {
    let found = tree::leaves(bytes, section.kind.chunk_bytes());
    match found.iter().zip(recorded).position(|(found, recorded)| found != recorded) {
        Some(chunk) => Err(damaged(section, chunk as u64)),
        None => Ok(()),
    }
}

/// The error of a damaged chunk.
pub(crate) fn damaged(section: &Section, chunk: u64) -> BundleError {
    let chunk_bytes = section.kind.chunk_bytes();
    let start = section.offset.saturating_add(chunk.saturating_mul(chunk_bytes));
    BundleError::HashMismatch { section: section.kind, chunk, start, end: start.saturating_add(chunk_bytes).min(section.end()) }
}

fn check_root(section: &Section, leaves: &[Digest]) -> Result<(), BundleError> {
    match tree::section_root(section.kind, section.length, leaves) {
        found if found == section.root => Ok(()),
        found => Err(BundleError::RootMismatch { section: section.kind, found, recorded: section.root }),
    }
}

fn agree<T: PartialEq + std::fmt::Debug>(section: SectionKind, what: &str, left: &T, right: &T) -> Result<(), BundleError> {
    match left == right {
        true => Ok(()),
        false => Err(BundleError::Disagreement { section, what: what.to_owned(), left: format!("{left:?}"), right: format!("{right:?}") }),
    }
}

fn check_tensors(tensors: &[TensorEntry], weights: &[WeightDecl]) -> Result<(), BundleError> {
    agree(SectionKind::WIDX, "number of tensors", &weights.len(), &tensors.len())?;
    for (tensor, weight) in tensors.iter().zip(weights) {
        let expected = TensorEntry::of(weight, tensor.root);
        agree(SectionKind::WIDX, &format!("tensor {:?}", weight.name), &expected, tensor)?;
    }
    Ok(())
}
