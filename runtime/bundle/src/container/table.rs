//! The section table: 128 bytes an entry, sorted by offset.
//!
//! ```text
//!    0  kind 4            24  chunk bytes u32       40  root 32
//!    4  flags u32         28  zero u32              72  zero
//!    8  offset u64        32  first leaf u32
//!   16  length u64        36  leaf count u32
//! ```
//!
//! Flag bit 0: a reader that does not know the kind refuses the bundle.

use super::layout::*;
use super::superblock::Superblock;
use crate::digest::Digest;
use crate::error::BundleError;

const FLAG_REQUIRED: u32 = 1;

/// A row of the section table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Kind.
    pub kind: SectionKind,
    /// Whether a reader that does not know the kind must refuse the bundle.
    pub required: bool,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// First of its leaves in the `HASH` section.
    pub leaf_first: u32,
    /// Number of its leaves there; 0 for `HASH` itself.
    pub leaf_count: u32,
    /// Root of its hash tree, bound to kind, length and chunk size.
    pub root: Digest,
}

impl Section {
    /// First byte after the section. Cannot overflow once the table is checked.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    fn encode(&self) -> [u8; TABLE_ENTRY_BYTES] {
        let mut entry = [0; TABLE_ENTRY_BYTES];
        let mut put = |offset: usize, bytes: &[u8]| entry[offset..offset + bytes.len()].copy_from_slice(bytes);
        put(0, &self.kind.0);
        put(4, &(if self.required { FLAG_REQUIRED } else { 0 }).to_le_bytes());
        put(8, &self.offset.to_le_bytes());
        put(16, &self.length.to_le_bytes());
        put(24, &(self.kind.chunk_bytes() as u32).to_le_bytes());
        put(32, &self.leaf_first.to_le_bytes());
        put(36, &self.leaf_count.to_le_bytes());
        put(40, &self.root.0);
        entry
    }

    fn decode(index: u32, entry: &[u8; TABLE_ENTRY_BYTES]) -> Result<Self, BundleError> {
        let u32_at = |offset: usize| u32::from_le_bytes([entry[offset], entry[offset + 1], entry[offset + 2], entry[offset + 3]]);
        let u64_at = |offset: usize| u64::from(u32_at(offset)) | u64::from(u32_at(offset + 4)) << 32;
        let kind = SectionKind([entry[0], entry[1], entry[2], entry[3]]);
        let check = |field: &'static str, found: u64, allowed: u64| match found == allowed {
            true => Ok(()),
            false => Err(BundleError::TableField { index, section: kind, field, found, allowed: allowed.to_string() }),
        };
        check("flags", (u32_at(4) & !FLAG_REQUIRED).into(), 0)?;
        check("chunk bytes", u32_at(24).into(), kind.chunk_bytes())?;
        check("reserved", u32_at(28).into(), 0)?;
        check("reserved", entry[72..].iter().copied().map(u64::from).sum(), 0)?;
        let mut root = Digest::default();
        root.0.copy_from_slice(&entry[40..72]);
        Ok(Self {
            kind,
            required: u32_at(4) & FLAG_REQUIRED != 0,
            offset: u64_at(8),
            length: u64_at(16),
            leaf_first: u32_at(32),
            leaf_count: u32_at(36),
            root,
        })
    }
}

/// Encodes the table.
pub fn encode(sections: &[Section]) -> Vec<u8> {
    sections.iter().flat_map(Section::encode).collect()
}

/// Where the table ends.
pub fn end(superblock: &Superblock) -> u64 {
    superblock.table_offset.saturating_add(u64::from(superblock.table_count).saturating_mul(TABLE_ENTRY_BYTES as u64))
}

/// Decodes the table and checks it against the superblock: hash, fields, order, alignment, bounds,
/// overlap, leaves, and that every mandatory section is there.
///
/// # Errors
/// The first thing wrong.
pub fn parse(bytes: &[u8], superblock: &Superblock) -> Result<Vec<Section>, BundleError> {
    let found = Digest::of(&[bytes]);
    if found != superblock.table_hash {
        return Err(BundleError::TableHash { found, recorded: superblock.table_hash });
    }
    let (entries, _) = bytes.as_chunks::<TABLE_ENTRY_BYTES>();
    let sections: Vec<Section> = (0..).zip(entries).map(|(index, entry)| Section::decode(index, entry)).collect::<Result<_, _>>()?;
    let mut placed = Placed { end: end(superblock), leaves: 0, before: None };
    for (index, section) in (0..).zip(&sections) {
        check_kind(&sections, index, section)?;
        placed.check(index, section, superblock.sealed_bytes)?;
    }
    check_whole(&sections, &placed, superblock)?;
    Ok(sections)
}

/// The section of a kind; every mandatory kind is there once the table is checked.
pub(crate) fn find(sections: &[Section], kind: SectionKind) -> Result<&Section, BundleError> {
    sections.iter().find(|section| section.kind == kind).ok_or(BundleError::SectionMissing { section: kind })
}

fn check_kind(sections: &[Section], index: u32, section: &Section) -> Result<(), BundleError> {
    let kind = section.kind;
    let earlier = sections.get(..index as usize).unwrap_or_default();
    if earlier.iter().any(|other| other.kind == kind) {
        return Err(BundleError::SectionDuplicate { section: kind });
    }
    if earlier.iter().any(|other| other.kind == SectionKind::WDAT) {
        return Err(BundleError::WeightsNotLast { section: kind });
    }
    if section.required && !kind.is_known() {
        return Err(BundleError::SectionUnknown { section: kind });
    }
    match section.required || !kind.is_known() {
        true => Ok(()),
        false => Err(BundleError::TableField { index, section: kind, field: "flags", found: 0, allowed: "1".to_owned() }),
    }
}

fn check_whole(sections: &[Section], placed: &Placed, superblock: &Superblock) -> Result<(), BundleError> {
    for kind in SectionKind::ALL {
        find(sections, kind)?;
    }
    let hash_bytes = find(sections, SectionKind::HASH)?.length;
    let index = sections.iter().position(|section| section.kind == SectionKind::HASH).unwrap_or_default() as u32;
    if hash_bytes != placed.leaves * 32 {
        let allowed = (placed.leaves * 32).to_string();
        return Err(BundleError::TableField { index, section: SectionKind::HASH, field: "length", found: hash_bytes, allowed });
    }
    match superblock.sealed_bytes == placed.end {
        true => Ok(()),
        false => Err(BundleError::HeaderField { field: "sealed length", found: superblock.sealed_bytes, allowed: placed.end.to_string() }),
    }
}

/// Running state of the placement check.
struct Placed {
    end: u64,
    leaves: u64,
    before: Option<SectionKind>,
}

impl Placed {
    fn check(&mut self, index: u32, section: &Section, sealed_bytes: u64) -> Result<(), BundleError> {
        let (kind, offset) = (section.kind, section.offset);
        if section.length == 0 || section.length > kind.bytes_max() {
            return Err(BundleError::SectionSize { section: kind, found_bytes: section.length, max_bytes: kind.bytes_max() });
        }
        if !offset.is_multiple_of(kind.align()) {
            return Err(BundleError::SectionMisaligned { section: kind, offset, align: kind.align() });
        }
        let low = if self.before.is_none() { self.end } else { 0 };
        match offset.checked_add(section.length) {
            Some(end) if offset >= low && end <= sealed_bytes => {}
            end => {
                let end = end.unwrap_or(u64::MAX);
                return Err(BundleError::SectionOutOfBounds { section: kind, offset, end, low, high: sealed_bytes });
            }
        }
        if let Some(before) = self.before.filter(|_| offset < self.end) {
            return Err(BundleError::SectionOverlap { section: kind, offset, before, before_end: self.end });
        }
        if offset - self.end > GAP_MAX {
            return Err(BundleError::Gap { section: kind, offset: self.end });
        }
        self.check_leaves(index, section)?;
        (self.end, self.before) = (section.end(), Some(kind));
        Ok(())
    }

    fn check_leaves(&mut self, index: u32, section: &Section) -> Result<(), BundleError> {
        let kind = section.kind;
        let (first, count) = match kind {
            SectionKind::HASH => (0, 0),
            _ => (self.leaves, section.length.div_ceil(kind.chunk_bytes())),
        };
        for (field, found, allowed) in [("first leaf", section.leaf_first, first), ("leaf count", section.leaf_count, count)] {
            if u64::from(found) != allowed {
                return Err(BundleError::TableField { index, section: kind, field, found: found.into(), allowed: allowed.to_string() });
            }
        }
        self.leaves += count;
        Ok(())
    }
}
