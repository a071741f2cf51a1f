//! Read-only memory of a bundle file: a mapping, or a copy read with `pread`.
//!
//! Owns the only `unsafe` of opening a bundle. Knows lengths and pages, nothing of the format.
//!
//! **Invariant:** the length is taken from `fstat` of the open file, never from the format. A file that
//! is truncated *while mapped* makes later reads fault (SIGBUS ends the process); [`Mapping::populate`]
//! turns that into an error for the moment of its call, and sealing renames a finished file into
//! place instead of rewriting one, so an old mapping stays whole. On network file systems, where a page
//! that cannot be fetched is a SIGBUS too, use [`Access::Copy`].

use memmap2::{Advice, Mmap, MmapMut, UncheckedAdvice};
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How a file becomes memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
pub enum Access {
    /// Map it; pages are shared with the page cache and with other processes.
    #[default]
    Map,
    /// Read it into anonymous memory (`--no-mmap`).
    Copy,
}

/// The bytes of a file. Page aligned (4 KiB at least).
#[derive(Debug)]
pub struct Mapping {
    map: Option<Mmap>,
    access: Access,
}

impl Mapping {
    /// Opens a file.
    ///
    /// # Errors
    /// If it cannot be opened, is no regular file, or cannot be mapped or read.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        // Asked before opening too: opening a pipe waits for its writer.
        regular(&std::fs::metadata(path)?)?;
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        regular(&metadata)?;
        let length = usize::try_from(metadata.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        match (length, access) {
            (0, _) => Ok(Self { map: None, access }),
            (_, Access::Map) => Self::map(&file, length),
            (_, Access::Copy) => Self::filled(length, |buffer| file.read_exact_at(buffer, 0)),
        }
    }

    /// Page-aligned memory with a copy of `bytes`: for tests and for plans lowered in memory.
    ///
    /// # Errors
    /// If memory is short.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        if bytes.is_empty() {
            return Ok(Self { map: None, access: Access::Copy });
        }
        Self::filled(bytes.len(), |buffer| {
            buffer.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Page-aligned memory of zeros that `fill` writes: for weights that are computed.
    ///
    /// # Errors
    /// If memory is short, or `fill` fails.
    pub fn generated(length: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<Self> {
        Self::filled(length, fill)
    }

    /// Reads a range into memory, so that using it later does not fault. Out-of-range parts are ignored.
    ///
    /// # Errors
    /// If the file behind the range is gone (truncated since it was opened) or cannot be read.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        let start = range.start.min(map.len());
        let length = range.end.min(map.len()).saturating_sub(start);
        if length == 0 {
            return Ok(());
        }
        match map.advise_range(Advice::PopulateRead, start, length) {
            // Kernels before 5.14 do not know the advice; the pages are then read on first use.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }

    /// Lets go of a range's resident pages; using them again reads them from the file again. For programs
    /// that pass through a large file and must stay small. Memory that is a copy stays as it is.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn release(&self, range: Range<usize>) -> io::Result<()> {
        let (Some(map), Access::Map) = (&self.map, self.access) else { return Ok(()) };
        let start = range.start.min(map.len());
        let length = range.end.min(map.len()).saturating_sub(start);
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the map is read-only and shared with its file, so a page that is dropped comes back with
        // the same bytes; copies, whose pages would come back as zeros, were excluded above.
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, length) }
    }

    fn map(file: &File, length: usize) -> io::Result<Self> {
        // SAFETY: the mapping is read-only. Its one hazard is that another process
        // changes the file while it is mapped: bytes may then change under checks already done, or
        // fault. Bundles are renamed into place whole and never written again; the module doc says
        // what happens to one that is.
        let map = unsafe { memmap2::MmapOptions::new().len(length).map(file) }?;
        Ok(Self { map: Some(map), access: Access::Map })
    }

    fn filled(length: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<Self> {
        let mut map = MmapMut::map_anon(length)?;
        fill(&mut map)?;
        Ok(Self { map: Some(map.make_read_only()?), access: Access::Copy })
    }
}

fn regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")) }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}
