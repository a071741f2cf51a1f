//! SHA-256 Merkle trees as in RFC 6962 §2.1 (leaf prefix 00, node prefix 01), and section roots that
//! bind a tree to the section's kind, length and chunk size.

use super::layout::SectionKind;
use crate::digest::Digest;
use rayon::prelude::*;

const SECTION_DOMAIN: &[u8] = b"oxb section root v1\0";

/// Hash of a leaf.
pub fn leaf(chunk: &[u8]) -> Digest {
    Digest::of(&[&[0], chunk])
}

/// Hashes of the leaves of `data`, computed in parallel.
pub fn leaves(data: &[u8], chunk_bytes: u64) -> Vec<Digest> {
    let chunk_bytes = usize::try_from(chunk_bytes).unwrap_or(usize::MAX).max(1);
    data.par_chunks(chunk_bytes).map(leaf).collect()
}

/// Root of a tree.
///
/// Pairs neighbours level by level and lifts an odd last node unchanged, which gives the same tree as
/// the RFC's split at the largest power of two.
pub fn root(leaves: &[Digest]) -> Digest {
    let mut level = leaves.to_vec();
    while level.len() > 1 {
        level = level.chunks(2).map(node).collect();
    }
    level.pop().unwrap_or_else(|| Digest::of(&[]))
}

/// Root of a section.
pub fn section_root(kind: SectionKind, length: u64, leaves: &[Digest]) -> Digest {
    let (length, chunk) = (length.to_le_bytes(), kind.chunk_bytes().to_le_bytes());
    Digest::of(&[SECTION_DOMAIN, &kind.0, &length, &chunk, &root(leaves).0])
}

/// Leaves of a stream that arrives in parts of any size.
#[derive(Debug)]
pub struct LeafStream {
    chunk_bytes: usize,
    pending: Vec<u8>,
    leaves: Vec<Digest>,
}

impl LeafStream {
    /// A stream with leaves of `chunk_bytes`.
    pub fn new(chunk_bytes: u64) -> Self {
        let chunk_bytes = usize::try_from(chunk_bytes).unwrap_or(usize::MAX).max(1);
        Self { chunk_bytes, pending: Vec::new(), leaves: Vec::new() }
    }

    /// Appends `part`; whole chunks are hashed in parallel, in place.
    pub fn push(&mut self, part: &[u8]) {
        let missing = match self.pending.len() {
            0 => 0,
            length => (self.chunk_bytes - length).min(part.len()),
        };
        let (head, rest) = part.split_at(missing);
        self.pending.extend_from_slice(head);
        if self.pending.len() == self.chunk_bytes {
            self.leaves.push(leaf(&self.pending));
            self.pending.clear();
        }
        let chunks = rest.par_chunks_exact(self.chunk_bytes);
        let tail = chunks.remainder();
        self.leaves.par_extend(chunks.map(leaf));
        self.pending.extend_from_slice(tail);
    }

    /// The leaves so far; a partial last chunk is its own leaf. The stream is empty afterwards.
    pub fn take(&mut self) -> Vec<Digest> {
        if !self.pending.is_empty() {
            self.leaves.push(leaf(&self.pending));
            self.pending.clear();
        }
        std::mem::take(&mut self.leaves)
    }
}

fn node(pair: &[Digest]) -> Digest {
    match pair {
        [left, right] => Digest::of(&[&[1], &left.0, &right.0]),
        [one] => *one,
        _ => Digest::of(&[]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recursive definition of RFC 6962 §2.1.
    fn reference(leaves: &[Digest]) -> Digest {
        match leaves {
            [] => Digest::of(&[]),
            [one] => *one,
            _ => {
                let split = leaves.len().next_power_of_two() / 2;
                Digest::of(&[&[1], &reference(&leaves[..split]).0, &reference(&leaves[split..]).0])
            }
        }
    }

    #[test]
    fn levels_give_the_tree_of_the_rfc() {
        let leaves: Vec<Digest> = (0..70_u8).map(|value| leaf(&[value])).collect();
        for count in 0..leaves.len() {
            assert_eq!(root(&leaves[..count]), reference(&leaves[..count]), "{count} leaves");
        }
    }

    #[test]
    fn parts_of_any_size_give_the_same_leaves() {
        let data: Vec<u8> = (0..1000_u32).map(|value| value as u8).collect();
        for part in [1, 7, 64, 100, 999, 1000] {
            let mut stream = LeafStream::new(64);
            data.chunks(part).for_each(|part| stream.push(part));
            assert_eq!(stream.take(), leaves(&data, 64), "parts of {part}");
        }
    }

    #[test]
    fn empty_tree_has_the_published_hash() {
        assert_eq!(root(&[]).to_string(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(leaf(&[]).to_string(), "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d");
    }
}
