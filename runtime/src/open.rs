//! Opens a bundle: file → memory → parsed and verified [`Bundle`].
//!
//! Owns the order of checks before anything runs. Knows paths; the bundle crate does not.

use crate::mapping::{Access, Mapping};
use oxide_bundle::container::layout::WEIGHT_CHUNK_BYTES;
use oxide_bundle::container::{self, Bytes};
use oxide_bundle::manifest::Target;
use oxide_bundle::{Bundle, BundleError, Mode, Seal};
use rayon::prelude::*;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How to open a bundle.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Mapping or copy.
    pub access: Access,
    /// Verification.
    pub mode: Mode,
    /// The seal that the file must have (`--expect`).
    pub expect: Option<Seal>,
}

/// An opened bundle, verified as far as its options say.
#[derive(Clone)]
pub struct OpenedBundle {
    /// The bundle.
    pub bundle: Bundle,
    /// Its weights.
    pub weights: Weights,
    /// The mode that it was verified in.
    pub mode: Mode,
    /// Where it came from.
    pub path: PathBuf,
}

/// The weight section, for ever: keeps the memory that it lies in. Tensors are 256-byte aligned in it.
#[derive(Clone)]
pub struct Weights {
    bytes: Bytes,
    range: Range<usize>,
}

/// A bundle that cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be opened, mapped or read.
    #[error("cannot open bundle {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is refused.
    #[error("bundle {path}: {source}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Why.
        source: BundleError,
    },
}

impl OpenError {
    /// Stable name of the kind, for scripts and `--json`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::File { source, .. } if source.kind() == io::ErrorKind::NotFound => "file_not_found",
            Self::File { .. } => "file",
            Self::Refused { source, .. } => source.kind(),
        }
    }

    /// Exit code of a process that fails with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::File { source, .. } if source.kind() == io::ErrorKind::NotFound => 18,
            Self::File { .. } => 19,
            Self::Refused { source, .. } => source.exit_code(),
        }
    }
}

impl Weights {
    /// The weights of a bundle.
    pub fn of(bundle: &Bundle) -> Self {
        Self { bytes: Arc::clone(bundle.bytes()), range: bundle.weights_range() }
    }

    /// Page-aligned weights that were never in a file.
    ///
    /// # Errors
    /// If memory is short.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        Ok(Self { bytes: Arc::new(Mapping::from_bytes(bytes)?), range: 0..bytes.len() })
    }

    /// The weight section; offsets of the plan's weights count from its start.
    pub fn bytes(&self) -> &[u8] {
        (*self.bytes).as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

impl AsRef<[u8]> for Weights {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// Opens and verifies a bundle.
///
/// `Metadata` leaves the weights unchecked (for `inspect`). `Copy` checks every weight chunk before it
/// is used: for the cpu target here and now, in parallel, because weights are used in place; for a GPU
/// the device checks each chunk with its upload ([`Bundle::verify_weight_chunk`]). `Full` checks
/// chunks and tensor digests now.
///
/// # Errors
/// If the file cannot be read, is refused, or has not the expected seal.
pub fn open_bundle(path: &Path, options: OpenOptions) -> Result<OpenedBundle, OpenError> {
    let file = |source| OpenError::File { path: path.to_owned(), source };
    let refused = |source| OpenError::Refused { path: path.to_owned(), source };
    let mapping = Arc::new(whole(Mapping::open(path, options.access).map_err(file)?, path)?);
    let metadata_bytes = METADATA_READ_AHEAD.min((*mapping).as_ref().len());
    mapping.populate(0..metadata_bytes).map_err(file)?;
    let bundle = Bundle::parse(Arc::clone(&mapping) as Bytes).map_err(refused)?;
    if let Some(expected) = options.expect
        && expected != bundle.seal()
    {
        return Err(refused(BundleError::UnexpectedSeal { found: bundle.seal(), expected }));
    }
    match (options.mode, bundle.manifest().target) {
        (Mode::Metadata, _) | (Mode::Copy, Target::Sm90) => {}
        (Mode::Copy, Target::Cpu) => verify_weights(&mapping, &bundle, path)?,
        (Mode::Full, _) => {
            verify_weights(&mapping, &bundle, path)?;
            bundle.verify_tensors().map_err(refused)?;
        }
    }
    let weights = Weights::of(&bundle);
    Ok(OpenedBundle { bundle, weights, mode: options.mode, path: path.to_owned() })
}

/// The whole bundle: the file, or what a ghost's file stands for.
fn whole(file: Mapping, path: &Path) -> Result<Mapping, OpenError> {
    let Some(ghost) = container::ghost(file.as_ref()) else { return Ok(file) };
    let failed = |source| OpenError::File { path: path.to_owned(), source };
    let length = usize::try_from(ghost.sealed_bytes).map_err(|error| failed(io::Error::other(error)))?;
    // The file names a size that it does not have; nothing of that size is touched before it is known to fit.
    if let Some(available) = memory_available().filter(|available| *available < ghost.sealed_bytes) {
        let reason = format!("its generated weights need {length} bytes of memory, {available} are available");
        return Err(failed(io::Error::new(io::ErrorKind::OutOfMemory, reason)));
    }
    let mut refused = None;
    let filled = Mapping::generated(length, |memory| {
        refused = container::fill_in(file.as_ref(), memory).err();
        Ok(())
    });
    match refused {
        Some(source) => Err(OpenError::Refused { path: path.to_owned(), source }),
        None => filled.map_err(failed),
    }
}

/// Memory that can be had without swapping, as the kernel estimates it.
fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// Read in one go before parsing: superblock, table and the small sections of most bundles.
const METADATA_READ_AHEAD: usize = 2 << 20;

fn verify_weights(mapping: &Mapping, bundle: &Bundle, path: &Path) -> Result<(), OpenError> {
    let base = bundle.weights_range().start;
    let chunk_bytes = WEIGHT_CHUNK_BYTES as usize;
    (0..bundle.weight_chunk_count()).into_par_iter().try_for_each(|chunk| {
        let start = base + chunk * chunk_bytes;
        let populated = mapping.populate(start..start + chunk_bytes);
        populated.map_err(|source| OpenError::File { path: path.to_owned(), source })?;
        let verified = bundle.verify_weight_chunk(chunk);
        verified.map(|_| ()).map_err(|source| OpenError::Refused { path: path.to_owned(), source })
    })
}
