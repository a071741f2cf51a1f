//! Canonical msgpack: one encoding per value.
//!
//! Shortest forms, maps with string keys in rising byte order and none twice, no floats, no ext, depth
//! at most [`DEPTH_MAX`]. The reader checks the form without recursion, decodes, encodes again and
//! compares. Caps on the whole length belong to the container.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::Range;

/// Deepest nesting of arrays and maps.
pub const DEPTH_MAX: usize = 16;

/// Bytes that are not the canonical encoding of a value of the wanted type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MsgpackError {
    /// Not canonical msgpack.
    #[error("{reason} at byte {offset}")]
    NotCanonical {
        /// Where.
        offset: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// Canonical, but not of the type.
    #[error("{0}")]
    Undecodable(String),
    /// A value that has no canonical encoding.
    #[error("{0}")]
    Unencodable(String),
}

/// The canonical encoding of `value`.
///
/// # Errors
/// If the value holds floats, maps with other than string keys, or nests too deeply.
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, MsgpackError> {
    let bytes = rmp_serde::to_vec_named(value).map_err(|error| MsgpackError::Unencodable(error.to_string()))?;
    let out = Vec::with_capacity(bytes.len());
    let mut sorter = Sorter { bytes: &bytes, out, entries: Vec::new(), scratch: Vec::new() };
    sorter.value(0, DEPTH_MAX)?;
    Ok(sorter.out)
}

/// Decodes a canonical encoding.
///
/// # Errors
/// If the bytes are not canonical, not of the type, or do not encode back to themselves.
pub fn decode<T: Serialize + DeserializeOwned + Send>(bytes: &[u8]) -> Result<T, MsgpackError> {
    // Decoding is safe on any bytes; it runs beside the check of the form, whose error comes first.
    let (form, value) = rayon::join(|| check_canonical(bytes), || rmp_serde::from_slice::<T>(bytes));
    form?;
    let value = value.map_err(|error| MsgpackError::Undecodable(error.to_string()))?;
    let again = encode(&value)?;
    match again == bytes {
        true => Ok(value),
        false => {
            let offset = again.iter().zip(bytes).take_while(|(a, b)| a == b).count();
            Err(MsgpackError::NotCanonical { offset, reason: "value does not encode back to its bytes (an optional field is missing?)" })
        }
    }
}

/// Checks that `bytes` are one canonical value.
///
/// # Errors
/// The first violation.
pub fn check_canonical(bytes: &[u8]) -> Result<(), MsgpackError> {
    let mut open: Vec<Frame> = Vec::with_capacity(DEPTH_MAX);
    let mut at = 0;
    loop {
        let item = Item::read(bytes, at)?;
        if let Some(frame) = open.last_mut() {
            frame.accept(bytes, at, &item)?;
        }
        at = item.end();
        if let Some(frame) = Frame::of(bytes, at, &item)? {
            if open.len() == DEPTH_MAX {
                return Err(wrong(at, "deeper than 16 levels"));
            }
            open.push(frame);
        }
        while open.last().is_some_and(|frame| frame.left == 0) {
            open.pop();
        }
        if open.is_empty() {
            break;
        }
    }
    if at == bytes.len() { Ok(()) } else { Err(wrong(at, "trailing bytes")) }
}

/// An array or map whose items are being read.
struct Frame {
    left: usize,
    is_map: bool,
    last_key: Option<Range<usize>>,
}

impl Frame {
    fn of(bytes: &[u8], at: usize, item: &Item) -> Result<Option<Self>, MsgpackError> {
        let (left, is_map) = match item {
            Item::Array { count, .. } => (Some(*count), false),
            Item::Map { count, .. } => (count.checked_mul(2), true),
            Item::Scalar { .. } | Item::Text(_) => return Ok(None),
        };
        // Every item takes at least one byte: a larger count is a lie, found before it costs anything.
        match left.filter(|left| *left <= bytes.len().saturating_sub(at)) {
            Some(left) => Ok(Some(Self { left, is_map, last_key: None })),
            None => Err(wrong(at, "more items than bytes")),
        }
    }

    fn accept(&mut self, bytes: &[u8], at: usize, item: &Item) -> Result<(), MsgpackError> {
        if self.is_map && self.left.is_multiple_of(2) {
            let Item::Text(key) = item else { return Err(wrong(at, "map key is not a string")) };
            let rises = self.last_key.clone().is_none_or(|last| bytes.get(last) < bytes.get(key.clone()));
            if !rises {
                return Err(wrong(at, "map keys are not rising, or one occurs twice"));
            }
            self.last_key = Some(key.clone());
        }
        self.left = self.left.saturating_sub(1);
        Ok(())
    }
}

/// One msgpack item, header decoded: scalars whole, containers without their items.
enum Item {
    Scalar { end: usize },
    Text(Range<usize>),
    Array { count: usize, end: usize },
    Map { count: usize, end: usize },
}

impl Item {
    fn end(&self) -> usize {
        match self {
            Self::Scalar { end } | Self::Array { end, .. } | Self::Map { end, .. } => *end,
            Self::Text(range) => range.end,
        }
    }

    fn read(bytes: &[u8], at: usize) -> Result<Self, MsgpackError> {
        let item = Self::read_any_text(bytes, at)?;
        if let Self::Text(range) = &item
            && bytes.get(range.clone()).is_none_or(|text| std::str::from_utf8(text).is_err())
        {
            return Err(wrong(range.start, "string is not UTF-8"));
        }
        Ok(item)
    }

    /// Without looking into strings: for bytes that were just encoded.
    fn read_any_text(bytes: &[u8], at: usize) -> Result<Self, MsgpackError> {
        let tag = *bytes.get(at).ok_or(wrong(at, "unexpected end"))?;
        let body = at + 1;
        let low = |mask: u8| usize::from(tag & mask);
        match tag {
            0x00..=0x7f | 0xe0..=0xff | 0xc0 | 0xc2 | 0xc3 => Ok(Self::Scalar { end: body }),
            0x80..=0x8f => Ok(Self::Map { count: low(0x0f), end: body }),
            0x90..=0x9f => Ok(Self::Array { count: low(0x0f), end: body }),
            0xa0..=0xbf => Self::text(bytes, body, low(0x1f)),
            0xc4..=0xc6 => Self::binary(bytes, at, tag - 0xc4),
            0xcc..=0xcf => Self::unsigned(bytes, at, tag - 0xcc),
            0xd0..=0xd3 => Self::signed(bytes, at, tag - 0xd0),
            0xd9..=0xdb => {
                let (count, end) = length(bytes, at, tag - 0xd9, 32)?;
                Self::text(bytes, end, count)
            }
            0xdc | 0xdd => length(bytes, at, tag - 0xdc + 1, 16).map(|(count, end)| Self::Array { count, end }),
            0xde | 0xdf => length(bytes, at, tag - 0xde + 1, 16).map(|(count, end)| Self::Map { count, end }),
            0xca | 0xcb => Err(wrong(at, "float")),
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => Err(wrong(at, "ext or reserved tag")),
        }
    }

    fn text(bytes: &[u8], start: usize, count: usize) -> Result<Self, MsgpackError> {
        let end = start.saturating_add(count);
        match end <= bytes.len() {
            true => Ok(Self::Text(start..end)),
            false => Err(wrong(start, "string past the end")),
        }
    }

    fn binary(bytes: &[u8], at: usize, width: u8) -> Result<Self, MsgpackError> {
        let (count, start) = length(bytes, at, width, 0)?;
        let end = start.saturating_add(count);
        match end <= bytes.len() {
            true => Ok(Self::Scalar { end }),
            false => Err(wrong(start, "binary past the end")),
        }
    }

    fn unsigned(bytes: &[u8], at: usize, width: u8) -> Result<Self, MsgpackError> {
        let (value, end) = big_endian(bytes, at + 1, 1 << width)?;
        let least = if width == 0 { 0x80 } else { 1_u64 << (4 << width) };
        if value < least { Err(wrong(at, "integer not in shortest form")) } else { Ok(Self::Scalar { end }) }
    }

    fn signed(bytes: &[u8], at: usize, width: u8) -> Result<Self, MsgpackError> {
        let size = 1_usize << width;
        let (value, end) = big_endian(bytes, at + 1, size)?;
        let shift = 64 - 8 * size as u32;
        let value = (value << shift).cast_signed() >> shift;
        let most = if width == 0 { -33 } else { -(1_i64 << ((4 << width) - 1)) - 1 };
        if value > most { Err(wrong(at, "integer not in shortest form")) } else { Ok(Self::Scalar { end }) }
    }
}

fn wrong(offset: usize, reason: &'static str) -> MsgpackError {
    MsgpackError::NotCanonical { offset, reason }
}

fn big_endian(bytes: &[u8], at: usize, size: usize) -> Result<(u64, usize), MsgpackError> {
    let end = at + size;
    let digits = bytes.get(at..end).ok_or(wrong(at, "unexpected end"))?;
    Ok((digits.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)), end))
}

/// A length of `1 << width` bytes after the tag; `least` is the smallest that an 8-bit (or, for
/// containers, 16-bit) length may have.
fn length(bytes: &[u8], at: usize, width: u8, least: u64) -> Result<(usize, usize), MsgpackError> {
    let (value, end) = big_endian(bytes, at + 1, 1 << width)?;
    let least = match (width, least) {
        (0, least) | (1, least @ 16) => least,
        (1, _) => 1 << 8,
        _ => 1 << 16,
    };
    match usize::try_from(value) {
        Ok(count) if value >= least => Ok((count, end)),
        _ => Err(wrong(at, "length not in shortest form")),
    }
}

/// Copies values with the keys of every map sorted. Reads only what [`encode`] has just written.
struct Sorter<'a> {
    bytes: &'a [u8],
    out: Vec<u8>,
    /// Key in `bytes` and entry in `out`, of every map that is being copied, innermost last.
    entries: Vec<(Range<usize>, Range<usize>)>,
    scratch: Vec<u8>,
}

impl Sorter<'_> {
    /// Copies the value at `at`; returns where it ends. Recursion is bounded by `depth`.
    fn value(&mut self, at: usize, depth: usize) -> Result<usize, MsgpackError> {
        let item = Item::read_any_text(self.bytes, at).map_err(unencodable)?;
        let mut next = item.end();
        self.copy(at..next);
        let inner = || depth.checked_sub(1).ok_or_else(|| MsgpackError::Unencodable("deeper than 16 levels".to_owned()));
        match item {
            Item::Scalar { .. } | Item::Text(_) => {}
            Item::Array { count, .. } => {
                let depth = inner()?;
                for _ in 0..count {
                    next = self.value(next, depth)?;
                }
            }
            Item::Map { count, .. } => next = self.map(next, count, inner()?)?,
        }
        Ok(next)
    }

    fn map(&mut self, at: usize, count: usize, depth: usize) -> Result<usize, MsgpackError> {
        let (first, body) = (self.entries.len(), self.out.len());
        let mut next = at;
        for _ in 0..count {
            let Item::Text(key) = Item::read_any_text(self.bytes, next).map_err(unencodable)? else {
                return Err(MsgpackError::Unencodable("map key is not a string".to_owned()));
            };
            let start = self.out.len();
            self.copy(next..key.end);
            next = self.value(key.end, depth)?;
            self.entries.push((key, start..self.out.len()));
        }
        self.sort(first, body);
        self.entries.truncate(first);
        Ok(next)
    }

    /// Puts the entries from `first` on, which fill `out` from `body` on, in order.
    fn sort(&mut self, first: usize, body: usize) {
        let Self { bytes, out, entries, scratch } = self;
        let key = |entry: &(Range<usize>, Range<usize>)| bytes.get(entry.0.clone());
        let entries = entries.get_mut(first..).unwrap_or_default();
        if entries.is_sorted_by_key(key) {
            return;
        }
        entries.sort_by_key(key);
        scratch.clear();
        for (_, range) in entries.iter() {
            scratch.extend_from_slice(out.get(range.clone()).unwrap_or_default());
        }
        out.truncate(body);
        out.extend_from_slice(scratch);
    }

    fn copy(&mut self, range: Range<usize>) {
        self.out.extend_from_slice(self.bytes.get(range).unwrap_or_default());
    }
}

fn unencodable(error: MsgpackError) -> MsgpackError {
    MsgpackError::Unencodable(error.to_string())
}
