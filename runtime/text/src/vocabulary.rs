//! The bytes of every id, in one buffer.
//!
//! Two spellings exist: byte-level BPE writes each byte as one printable character (the table below
//! is GPT-2's), sentencepiece writes text plainly, spaces as `▁` and single bytes as `<0xAB>`.

/// How a vocabulary spells bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// One character a byte.
    ByteLevel,
    /// Plain text with `▁` and `<0xAB>`.
    ByteFallback,
}

/// Bytes by id.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    /// `starts[id]..starts[id + 1]`.
    starts: Vec<u32>,
}

impl Vocabulary {
    /// Collects the bytes of ids `0..`.
    pub(crate) fn new<'a>(entries: impl Iterator<Item = Option<&'a [u8]>>) -> Self {
        let mut bytes = Vec::new();
        let mut starts = vec![0];
        for entry in entries {
            bytes.extend_from_slice(entry.unwrap_or_default());
            starts.push(bytes.len() as u32);
        }
        Self { bytes, starts }
    }

    /// Ids known: one more than the largest.
    pub(crate) fn len(&self) -> u32 {
        (self.starts.len() - 1) as u32
    }

    /// Bytes of an id; empty for an unknown one.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }
}

/// Translates a vocabulary entry to bytes.
pub(crate) fn entry_bytes(spelling: Spelling, entry: &str) -> Vec<u8> {
    match spelling {
        Spelling::ByteLevel => byte_level_bytes(entry),
        Spelling::ByteFallback => fallback_bytes(entry),
    }
}

fn byte_level_bytes(entry: &str) -> Vec<u8> {
    let table = byte_by_char();
    let bytes: Option<Vec<u8>> = entry.chars().map(|c| table.get(c as usize).copied().flatten()).collect();
    bytes.unwrap_or_else(|| entry.as_bytes().to_vec())
}

fn fallback_bytes(entry: &str) -> Vec<u8> {
    let hex = entry.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => entry.replace('▁', " ").into_bytes(),
    }
}

/// Inverse of GPT-2's byte alphabet: printable Latin-1 bytes are themselves, the other 68 follow from U+0100.
const fn byte_by_char() -> [Option<u8>; 324] {
    let mut table = [None; 324];
    let mut shifted = 256;
    let mut byte = 0;
    while byte < 256 {
        if matches!(byte as u8, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            table[byte] = Some(byte as u8);
        } else {
            table[shifted] = Some(byte as u8);
            shifted += 1;
        }
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_entries_become_their_bytes() {
        assert_eq!(entry_bytes(Spelling::ByteLevel, "Ġhello"), b" hello");
        assert_eq!(entry_bytes(Spelling::ByteLevel, "Ċ"), b"\n");
        assert_eq!(entry_bytes(Spelling::ByteLevel, "ðŁĺ"), [0xF0, 0x9F, 0x98]);
        assert_eq!(entry_bytes(Spelling::ByteLevel, "日"), "日".as_bytes());
    }

    #[test]
    fn fallback_entries_become_their_bytes() {
        assert_eq!(entry_bytes(Spelling::ByteFallback, "▁the"), b" the");
        assert_eq!(entry_bytes(Spelling::ByteFallback, "<0xE6>"), [0xE6]);
    }

    #[test]
    fn the_alphabet_has_every_byte_once() {
        let mut bytes: Vec<u8> = byte_by_char().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert!(bytes.into_iter().eq(0..=255));
    }
}
