//! Sealing a bundle: sections in order, weights streamed, superblock last.
//!
//! Knows no paths. The caller creates `NAME.partial`, hands the open file over, and after
//! [`BundleWriter::seal`] calls `sync_all`, renames it and syncs the folder.

use super::layout::*;
use super::reader::verify_stream;
use super::superblock::{LimitsBlock, Superblock, TargetBlock};
use super::table::{self, Section};
use super::tree;
use crate::digest::{Digest, Seal};
use crate::error::BundleError;
use crate::ids::WeightId;
use crate::ledger;
use crate::manifest::{Golden, Manifest, Provenance, TemplateSection};
use crate::msgpack;
use crate::plan::{Plan, RawPlan, WeightDecl};
use crate::section::{Artifact, ArtifactEntry, KernelIndex, TensorEntry, TensorIndex};
use serde::Serialize;
use std::io::{Read, Seek, SeekFrom, Write};

/// Everything in a bundle but its weights.
#[derive(Clone, Debug)]
pub struct Contents {
    /// Manifest.
    pub manifest: Manifest,
    /// Plan; verified when the writer is made.
    pub plan: RawPlan,
    /// Code objects, by artifact id; empty on cpu.
    pub artifacts: Vec<Artifact>,
    /// Oldest driver API version of the code objects; 0 on cpu.
    pub driver_min: u32,
    /// `tokenizer.json`.
    pub tokenizer_json: Vec<u8>,
    /// Chat template.
    pub template: TemplateSection,
    /// Golden vectors; may be replaced by [`BundleWriter::set_golden`] after the weights.
    pub golden: Golden,
    /// Provenance.
    pub provenance: Provenance,
    /// Licence texts; not empty.
    pub licences: String,
}

/// What was sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealReport {
    /// The seal.
    pub seal: Seal,
    /// Length of the file.
    pub sealed_bytes: u64,
    /// Bytes before the weights.
    pub metadata_bytes: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
}

/// Writes one bundle. Peak memory is the metadata plus one part of the weights.
///
/// Order of calls: [`new`](Self::new), [`write_weight`](Self::write_weight) for every weight by rising
/// id (in as many parts as wished), [`seal`](Self::seal); then, if golden vectors are made from the
/// sealed file, [`set_golden`](Self::set_golden) and `seal` again.
pub struct BundleWriter<F> {
    file: F,
    contents: Contents,
    weights: WeightStream,
    base: u64,
    features_incompatible: u64,
}

impl<F: Read + Write + Seek> BundleWriter<F> {
    /// Verifies the plan and lays the file out. `file` is empty.
    ///
    /// # Errors
    /// If the plan does not verify, a section is too large, or writing fails.
    pub fn new(mut file: F, contents: Contents) -> Result<Self, BundleError> {
        let plan = Plan::verify(contents.plan.clone(), &contents.manifest)?;
        plan.check_artifacts(&contents.artifacts.iter().map(|artifact| &artifact.manifest).collect::<Vec<_>>())?;
        let weights = WeightStream::new(plan.weights().len());
        let encoded = encode_sections(&contents, &weights.roots)?;
        let base = place(&encoded, ledger::weight_bytes(&contents.plan), GOLDEN_RESERVE_BYTES)?.base;
        file.seek(SeekFrom::Start(base))?;
        Ok(Self { file, contents, weights, base, features_incompatible: 0 })
    }

    /// Says that the weights follow from the plan.
    pub(crate) fn generated(self) -> Self {
        Self { features_incompatible: FEATURE_GENERATED, ..self }
    }

    /// Appends the next part of a weight; gaps before it are zeros.
    ///
    /// # Errors
    /// If the part is out of order or longer than the weight, or writing fails.
    pub fn write_weight(&mut self, id: WeightId, part: &[u8]) -> Result<(), BundleError> {
        let weight = self.contents.plan.weights.get(id.index());
        let weight = weight.ok_or_else(|| stream_error(id.to_string(), "is not in the plan".to_owned()))?;
        let gap = self.weights.begin(id, weight)?;
        let zeros = vec![0; usize::try_from(gap).unwrap_or(usize::MAX)];
        self.weights.chunks.push(&zeros);
        self.file.write_all(&zeros)?;
        rayon::join(|| self.weights.chunks.push(part), || self.weights.tensor.push(part));
        self.file.write_all(part)?;
        self.weights.end(weight, part.len() as u64)
    }

    /// Replaces manifest and golden vectors (for [`GoldenStatus`](crate::manifest::GoldenStatus)).
    pub fn set_golden(&mut self, manifest: Manifest, golden: Golden) {
        self.contents.manifest = manifest;
        self.contents.golden = golden;
    }

    /// Writes hashes, table and superblock (magic last), then reads the file back and verifies it whole.
    ///
    /// # Errors
    /// If a weight is missing, the metadata outgrew their room, or reading, writing or verifying fails.
    pub fn seal(&mut self) -> Result<SealReport, BundleError> {
        if let Some(weight) = self.contents.plan.weights.get(self.weights.next) {
            let reason = format!("{} of {} bytes were written", self.weights.written, weight.size_bytes);
            return Err(stream_error(weight.name.clone(), reason));
        }
        let weight_bytes = self.weights.position;
        let encoded = encode_sections(&self.contents, &self.weights.roots)?;
        let layout = place(&encoded, weight_bytes, 0)?;
        if layout.base > self.base {
            return Err(BundleError::MetadataRoom { needed_bytes: layout.base, reserved_bytes: self.base });
        }
        let image = self.image(&encoded, layout.sections)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&[0; MAGIC.len()])?;
        self.file.write_all(image.get(MAGIC.len()..).unwrap_or_default())?;
        self.file.flush()?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&MAGIC)?;
        self.file.flush()?;
        let seal = verify_stream(&mut self.file)?;
        Ok(SealReport { seal, sealed_bytes: self.base + weight_bytes, metadata_bytes: self.base, weight_bytes })
    }

    /// The file.
    pub fn file(&mut self) -> &mut F {
        &mut self.file
    }

    /// Gives the file back.
    pub fn into_file(self) -> F {
        self.file
    }

    /// Everything before the weights.
    fn image(&self, encoded: &Encoded, mut sections: Vec<Section>) -> Result<Vec<u8>, BundleError> {
        let mut hash = Vec::new();
        for section in &mut sections {
            let leaves = match section.kind {
                SectionKind::HASH => continue,
                SectionKind::WDAT => self.weights.leaves.clone(),
                kind => tree::leaves(encoded.bytes(kind), CHUNK_BYTES),
            };
            section.root = tree::section_root(section.kind, section.length, &leaves);
            hash.extend(leaves.iter().flat_map(|leaf| leaf.0));
        }
        let mut image = vec![0; usize::try_from(self.base).unwrap_or(usize::MAX)];
        for section in &mut sections {
            let bytes = match section.kind {
                SectionKind::WDAT => {
                    section.offset = self.base;
                    continue;
                }
                SectionKind::HASH => {
                    section.root = tree::section_root(section.kind, section.length, &tree::leaves(&hash, CHUNK_BYTES));
                    &hash
                }
                kind => encoded.bytes(kind),
            };
            put(&mut image, section.offset, bytes);
        }
        let table = table::encode(&sections);
        put(&mut image, SUPERBLOCK_BYTES as u64, &table);
        put(&mut image, 0, &self.superblock(&sections, &table)?.encode());
        Ok(image)
    }

    fn superblock(&self, sections: &[Section], table: &[u8]) -> Result<Superblock, BundleError> {
        let Contents { manifest, plan, driver_min, .. } = &self.contents;
        let root = |kind| table::find(sections, kind).map(|section| section.root);
        Ok(Superblock {
            minor: MINOR,
            sealed_bytes: self.base + self.weights.position,
            features_incompatible: self.features_incompatible,
            features_read_only: 0,
            features_compatible: 0,
            plan_version: plan.version,
            abi_min: RUNTIME_ABI,
            abi_max: RUNTIME_ABI,
            target: TargetBlock::of(manifest, plan, *driver_min),
            limits: LimitsBlock::of(manifest, plan),
            table_offset: SUPERBLOCK_BYTES as u64,
            table_count: sections.len() as u32,
            table_hash: Digest::of(&[table]),
            content_root: Digest::default(),
            weights_root: root(SectionKind::WDAT)?,
            plan_root: root(SectionKind::PLAN)?,
            kernels_root: root(SectionKind::KERN)?,
        })
    }
}

/// State of the weight section while it is written.
struct WeightStream {
    /// Index of the weight being written.
    next: usize,
    /// Bytes of it written.
    written: u64,
    /// Bytes of the section written.
    position: u64,
    chunks: tree::LeafStream,
    /// Leaves of the section, once its last weight is whole.
    leaves: Vec<Digest>,
    tensor: tree::LeafStream,
    roots: Vec<Digest>,
}

impl WeightStream {
    fn new(count: usize) -> Self {
        Self {
            next: 0,
            written: 0,
            position: 0,
            chunks: tree::LeafStream::new(WEIGHT_CHUNK_BYTES),
            leaves: Vec::new(),
            tensor: tree::LeafStream::new(WEIGHT_CHUNK_BYTES),
            roots: vec![Digest::default(); count],
        }
    }

    /// Checks the order; returns the length of the gap before the part.
    fn begin(&mut self, id: WeightId, weight: &WeightDecl) -> Result<u64, BundleError> {
        if id.index() != self.next {
            return Err(stream_error(weight.name.clone(), format!("was written as {id}, next is w{}", self.next)));
        }
        let gap = if self.written == 0 { weight.offset_bytes.saturating_sub(self.position) } else { 0 };
        self.position += gap;
        Ok(gap)
    }

    fn end(&mut self, weight: &WeightDecl, part_bytes: u64) -> Result<(), BundleError> {
        self.written += part_bytes;
        self.position += part_bytes;
        if self.written > weight.size_bytes {
            let reason = format!("{} bytes were written, the plan says {}", self.written, weight.size_bytes);
            return Err(stream_error(weight.name.clone(), reason));
        }
        if self.written == weight.size_bytes {
            let root = tree::root(&self.tensor.take());
            self.roots.get_mut(self.next).into_iter().for_each(|slot| *slot = root);
            (self.next, self.written) = (self.next + 1, 0);
            if self.next == self.roots.len() {
                self.leaves = self.chunks.take();
            }
        }
        Ok(())
    }
}

/// Sections that are in memory when sealing, in file order.
struct Encoded(Vec<(SectionKind, Vec<u8>)>);

impl Encoded {
    fn bytes(&self, wanted: SectionKind) -> &[u8] {
        self.0.iter().find(|(kind, _)| *kind == wanted).map_or(&[], |(_, bytes)| bytes)
    }
}

struct Layout {
    /// Rows of the table, roots not yet computed.
    sections: Vec<Section>,
    /// Offset of the weights.
    base: u64,
}

fn encode_sections(contents: &Contents, roots: &[Digest]) -> Result<Encoded, BundleError> {
    let Contents { manifest, plan, artifacts, driver_min: _, tokenizer_json, template, golden, provenance, licences } = contents;
    let tensors = plan.weights.iter().zip(roots).map(|(weight, root)| TensorEntry::of(weight, *root)).collect();
    Ok(Encoded(vec![
        (SectionKind::MANI, encode(SectionKind::MANI, manifest)?),
        (SectionKind::PLAN, encode(SectionKind::PLAN, plan)?),
        (SectionKind::KERN, encode_kernels(artifacts)?),
        (SectionKind::TOKN, tokenizer_json.clone()),
        (SectionKind::TMPL, encode(SectionKind::TMPL, template)?),
        (SectionKind::WIDX, encode(SectionKind::WIDX, &TensorIndex { tensors })?),
        (SectionKind::GOLD, encode(SectionKind::GOLD, golden)?),
        (SectionKind::PROV, encode(SectionKind::PROV, provenance)?),
        (SectionKind::LICE, licences.clone().into_bytes()),
    ]))
}

fn encode<T: Serialize>(section: SectionKind, value: &T) -> Result<Vec<u8>, BundleError> {
    msgpack::encode(value).map_err(|error| BundleError::Undecodable { section, reason: error.to_string() })
}

/// Index length, index, code objects. Offsets depend on the index's length and that on the offsets'
/// digits, so the index is encoded until its length stands still.
fn encode_kernels(artifacts: &[Artifact]) -> Result<Vec<u8>, BundleError> {
    let mut index = encode(SectionKind::KERN, &kernel_index(artifacts, 0))?;
    loop {
        let next = encode(SectionKind::KERN, &kernel_index(artifacts, 8 + index.len() as u64))?;
        if next == index {
            break;
        }
        index = next;
    }
    let mut bytes = (index.len() as u64).to_le_bytes().to_vec();
    bytes.extend(index);
    for artifact in artifacts {
        bytes.resize(bytes.len().next_multiple_of(TENSOR_ALIGN as usize), 0);
        bytes.extend_from_slice(&artifact.code);
    }
    Ok(bytes)
}

fn kernel_index(artifacts: &[Artifact], index_end: u64) -> KernelIndex {
    let mut end = index_end;
    let entries = artifacts.iter().map(|Artifact { code, manifest }| {
        let offset_bytes = end.next_multiple_of(TENSOR_ALIGN);
        let size_bytes = code.len() as u64;
        end = offset_bytes + size_bytes;
        ArtifactEntry { sha256: Digest::of(&[code]), offset_bytes, size_bytes, manifest: manifest.clone() }
    });
    KernelIndex { artifacts: entries.collect() }
}

/// Lays the sections out; `golden_min` is kept for golden vectors if they are shorter.
fn place(encoded: &Encoded, weight_bytes: u64, golden_min: u64) -> Result<Layout, BundleError> {
    let mut lengths = vec![(SectionKind::HASH, 0)];
    lengths.extend(encoded.0.iter().map(|(kind, bytes)| (*kind, bytes.len() as u64)));
    lengths.push((SectionKind::WDAT, weight_bytes));
    let leaves = |(kind, length): &(SectionKind, u64)| length.div_ceil(kind.chunk_bytes());
    let leaf_total: u64 = lengths.iter().map(leaves).sum();
    let hash_reserve = golden_min.div_ceil(CHUNK_BYTES);
    let (mut end, mut first) = ((SUPERBLOCK_BYTES + TABLE_ENTRY_BYTES * lengths.len()) as u64, 0);
    let mut sections = Vec::with_capacity(lengths.len());
    for (kind, length) in lengths {
        let is_hash = kind == SectionKind::HASH;
        let length = if is_hash { 32 * leaf_total } else { length };
        let max_bytes = kind.bytes_max();
        if length == 0 || length > max_bytes {
            return Err(BundleError::SectionSize { section: kind, found_bytes: length, max_bytes });
        }
        let offset = end.next_multiple_of(kind.align());
        let leaf_count = if is_hash { 0 } else { length.div_ceil(kind.chunk_bytes()) as u32 };
        sections.push(Section { kind, required: true, offset, length, leaf_first: first, leaf_count, root: Digest::default() });
        first += leaf_count;
        end = offset
            + match kind {
                SectionKind::HASH => length + 32 * hash_reserve,
                SectionKind::GOLD => length.max(golden_min),
                _ => length,
            };
    }
    let base = sections.last().map_or(0, |section| section.offset);
    Ok(Layout { sections, base })
}

fn put(image: &mut [u8], offset: u64, bytes: &[u8]) {
    let start = offset as usize;
    image[start..start + bytes.len()].copy_from_slice(bytes);
}

fn stream_error(name: String, reason: String) -> BundleError {
    BundleError::WeightStream { name, reason }
}
