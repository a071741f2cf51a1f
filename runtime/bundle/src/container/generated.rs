//! Weights that are computed instead of stored: ghost bundles.
//!
//! A ghost is a whole, ordinary bundle whose weights follow from its plan by the rule below, so that the file may end
//! where they begin. Seal, section roots, leaf hashes and tensor digests are those of the whole bundle; a reader that
//! fills the weights in has a bundle like any other, and checks it like any other. The incompatible feature bit
//! [`FEATURE_GENERATED`] says so, and a reader that does not know it refuses.
//!
//! # The rule
//!
//! Word `i` (8 bytes, little-endian) of weight `w` (its index in the plan) is `mix(((w + 1) << 40) + i)` with the
//! finaliser of SplitMix64 over a multiple of its constant, and then, element by element, keeps sign and seven upper
//! mantissa bits and takes a fixed exponent: elements of a matrix with rows of `k` lie in `±[s, 2s)`, `s` the power
//! of two below `1 / √(4k)`; those of a vector in `±[0.5, 1)` with the sign cleared. `f32` elements alike, `u32`
//! elements are zero. Bytes between weights are zero. So sums stay of order one and every logit is finite.

use super::layout::{FEATURE_GENERATED, SUPERBLOCK_BYTES, SectionKind};
use super::metadata::{Metadata, parse_index};
use super::superblock::{Superblock, check_magic};
use super::table;
use super::writer::{BundleWriter, Contents, SealReport};
use crate::dtype::DType;
use crate::error::BundleError;
use crate::ids::WeightId;
use crate::plan::WeightDecl;
use rayon::prelude::*;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// Bytes filled at once; a multiple of the alignment of weights.
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes of a word.
const WORD_BYTES: usize = 8;

/// A file that leaves its weights out: what the whole bundle is.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// Bytes stored: everything before the weights.
    pub stored_bytes: u64,
    /// Bytes of the whole bundle.
    pub sealed_bytes: u64,
}

/// Whether a file of these bytes leaves out weights that are generated. `None` for every other file, also for those
/// that are no bundle at all: parsing tells.
pub fn ghost(file: &[u8]) -> Option<Ghost> {
    check_magic(file).ok()?;
    let superblock = Superblock::parse(file.first_chunk::<SUPERBLOCK_BYTES>()?).ok()?;
    let generated = superblock.features_incompatible & FEATURE_GENERATED != 0;
    let sealed_bytes = superblock.sealed_bytes;
    if !generated || file.len() as u64 >= sealed_bytes {
        return None;
    }
    let (_, sections) = parse_index(file, sealed_bytes).ok()?;
    let stored_bytes = table::find(&sections, SectionKind::WDAT).ok()?.offset;
    (stored_bytes == file.len() as u64).then_some(Ghost { stored_bytes, sealed_bytes })
}

/// Writes the whole bundle of a ghost to `whole`, which is zeroed and `sealed_bytes` long. What comes out is not yet
/// verified against the leaf hashes; parse it like any bundle.
///
/// # Errors
/// If the metadata are refused.
pub fn fill_in(file: &[u8], whole: &mut [u8]) -> Result<(), BundleError> {
    let metadata = Metadata::parse(file, whole.len() as u64)?;
    let weights = whole.get_mut(metadata.weights.clone()).unwrap_or_default();
    generate(metadata.plan.weights(), weights);
    whole.get_mut(..file.len()).into_iter().for_each(|start| start.copy_from_slice(file));
    Ok(())
}

/// Fills a zeroed weight section.
fn generate(weights: &[WeightDecl], section: &mut [u8]) {
    section.par_chunks_mut(BLOCK_BYTES).enumerate().for_each(|(index, block)| fill_block(weights, (index * BLOCK_BYTES) as u64, block));
}

/// Fills the zeroed bytes from `start` on, a multiple of 256, of a weight section. Weights stand by rising offset, each
/// at a multiple of 256.
fn fill_block(weights: &[WeightDecl], start: u64, block: &mut [u8]) {
    let end = start.saturating_add(block.len() as u64);
    let weight_end = |weight: &WeightDecl| weight.offset_bytes.saturating_add(weight.size_bytes);
    let first = weights.partition_point(|weight| weight_end(weight) <= start);
    for (index, weight) in weights.iter().enumerate().skip(first).take_while(|(_, weight)| weight.offset_bytes < end) {
        let (from, to) = (weight.offset_bytes.max(start), weight_end(weight).min(end));
        let part = block.get_mut((from - start) as usize..(to - start) as usize);
        part.into_iter().for_each(|part| Rule::of(index as u64, weight).fill(from - weight.offset_bytes, part));
    }
}

/// Seals a ghost: the bytes to store. Takes as long as hashing the whole bundle, and no more memory than its metadata.
///
/// # Errors
/// As [`BundleWriter`]'s.
pub fn seal_ghost(contents: Contents) -> Result<(Vec<u8>, SealReport), BundleError> {
    let weights = contents.plan.weights.clone();
    let file = GhostFile { weights: weights.clone(), ..GhostFile::default() };
    let mut writer = BundleWriter::new(file, contents)?.generated();
    let mut part = vec![0; BLOCK_BYTES];
    for (index, weight) in weights.iter().enumerate() {
        let rule = Rule::of(index as u64, weight);
        let mut written = 0;
        while written < weight.size_bytes {
            let count = (weight.size_bytes - written).min(BLOCK_BYTES as u64) as usize;
            let part = part.get_mut(..count).unwrap_or_default();
            rule.fill(written, part);
            writer.write_weight(WeightId(index as u32), part)?;
            written += count as u64;
        }
    }
    let report = writer.seal()?;
    Ok((writer.into_file().stored, report))
}

/// The whole bundle as a file: what precedes the weights is stored, weights are dropped when written and made when read.
#[derive(Default)]
struct GhostFile {
    weights: Vec<WeightDecl>,
    stored: Vec<u8>,
    position: u64,
    /// Where the weights begin: where the writer writes first.
    base: Option<u64>,
    end: u64,
    /// The block of weights read last, and its index.
    block: Option<(u64, Vec<u8>)>,
}

impl Write for GhostFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let base = *self.base.get_or_insert(self.position);
        let end = self.position.saturating_add(bytes.len() as u64);
        if self.position < base {
            let start = usize::try_from(self.position).map_err(io::Error::other)?;
            let stop = usize::try_from(end).map_err(io::Error::other)?;
            self.stored.resize(self.stored.len().max(stop), 0);
            self.stored.get_mut(start..stop).unwrap_or_default().copy_from_slice(bytes);
        }
        (self.position, self.end) = (end, self.end.max(end));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for GhostFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let base = self.base.unwrap_or(u64::MAX);
        let mut source = match self.position.checked_sub(base) {
            None => self.stored.get(usize::try_from(self.position).map_err(io::Error::other)?..).unwrap_or_default(),
            Some(at) => self.weight_bytes(at, self.end - base),
        };
        let count = source.read(out)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl GhostFile {
    /// Some bytes of the weight section of `length` from `at` on.
    fn weight_bytes(&mut self, at: u64, length: u64) -> &[u8] {
        let size = BLOCK_BYTES as u64;
        let index = at / size;
        if self.block.as_ref().is_none_or(|(found, _)| *found != index) {
            let mut block = vec![0; length.saturating_sub(index * size).min(size) as usize];
            fill_block(&self.weights, index * size, &mut block);
            self.block = Some((index, block));
        }
        self.block.as_ref().and_then(|(_, block)| block.get((at % size) as usize..)).unwrap_or_default()
    }
}

impl Seek for GhostFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.end.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.position)
    }
}

/// How the words of one weight are made.
#[derive(Copy, Clone, Debug)]
struct Rule {
    base: u64,
    keep: u64,
    set: u64,
}

impl Rule {
    /// The rule of a weight by its index in the plan.
    fn of(index: u64, weight: &WeightDecl) -> Self {
        let columns = weight.shape.get(1).copied().filter(|_| weight.shape.len() == 2);
        let exponent = |below: u32| 127 - u64::from(below);
        let (below, sign) = match columns {
            Some(k) => ((u64::from(k) * 4).ilog2().div_ceil(2) + 1, true),
            None => (1, false),
        };
        let (keep, set) = match weight.dtype {
            DType::Bf16 => {
                (if sign { 0x807f_807f_807f_807f } else { 0x007f_007f_007f_007f }, 0x0001_0001_0001_0001 * (exponent(below) << 7))
            }
            DType::F32 => {
                (if sign { 0x807f_0000_807f_0000 } else { 0x007f_0000_007f_0000 }, 0x0000_0001_0000_0001 * (exponent(below) << 23))
            }
            DType::F16 | DType::U32 => (0, 0),
        };
        Self { base: (index + 1) << 40, keep, set }
    }

    /// Fills a part that starts at `start` (a multiple of 8) of the weight.
    fn fill(&self, start: u64, part: &mut [u8]) {
        let first = start / WORD_BYTES as u64;
        for (index, word) in (first..).zip(part.chunks_mut(WORD_BYTES)) {
            let value = (mix(self.base.wrapping_add(index)) & self.keep) | self.set;
            word.iter_mut().zip(value.to_le_bytes()).for_each(|(to, from)| *to = from);
        }
    }
}

/// SplitMix64's output function (Steele, Lea, Flood 2014) of the state after `n` steps from zero.
fn mix(n: u64) -> u64 {
    let z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
