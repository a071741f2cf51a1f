//! Which kernels exist for a target. Data only: contracts, domains and layouts, no code.
//!
//! The cpu device implements a closed set of operators in every shape; sm90 has what
//! `artifacts/sm90/` held when the compiler was built, or what another folder holds, nothing else. Selection ([`crate::passes`]) asks here and never guesses.

use oxide_bundle::artifact::{ARTIFACT_FORMAT, ArtifactManifest};
use oxide_bundle::contract::{Activation, Contract, Dim, Linear, Op, Role};
use oxide_bundle::dtype::DType;
use oxide_bundle::plan::{BatchClass, RowOrder, Sym, WeightLayout};
use std::path::{Path, PathBuf};

/// Largest artifact manifest read.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Kernels of a target.
#[derive(Clone, Debug)]
pub enum Catalogue {
    /// The cpu device's closed table.
    Cpu,
    /// Code objects, by artifact id.
    Artifacts(Vec<Kernel>),
}

/// A code object that may be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// What it is.
    pub manifest: ArtifactManifest,
    /// The code object.
    pub code: Code,
}

/// Where a code object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Code {
    /// In the compiler.
    Embedded(&'static [u8]),
    /// In a file.
    File(PathBuf),
}

impl Code {
    /// The bytes.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Self::Embedded(bytes) => Ok(bytes.to_vec()),
            Self::File(path) => std::fs::read(path),
        }
    }
}

/// Manifests and code objects that the compiler was built with.
static EMBEDDED: &[(&[u8], &[u8])] = &include!(concat!(env!("OUT_DIR"), "/artifacts.rs"));

/// What a step asks of a kernel.
#[derive(Copy, Clone, Debug)]
pub struct Wanted<'a> {
    /// What is computed.
    pub contract: &'a Contract,
    /// For which steps.
    pub class: BatchClass,
    /// Symbol of the output's leading dimension.
    pub axis: Sym,
    /// Layout and row order of the weight matrix, if it has one.
    pub weight: Option<(WeightLayout, RowOrder)>,
}

/// A kernel found.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The cpu device's function for the contract.
    Host,
    /// A code object, by its position in the catalogue.
    Artifact(usize),
}

/// Why a folder of artifacts cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// The folder or a manifest cannot be read.
    #[error("kernel artifacts: {path}: {source}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A manifest is not one.
    #[error("kernel artifacts: {path}: {source}")]
    Parse {
        /// Which.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A manifest of another format.
    #[error("kernel artifacts: {path} has format {found}, this compiler reads {ARTIFACT_FORMAT}; rebuild the artifacts or the compiler")]
    Format {
        /// Which.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
}

impl Catalogue {
    /// The artifacts that the compiler was built with.
    ///
    /// # Errors
    /// If a manifest is of another format.
    pub fn embedded() -> Result<Self, CatalogueError> {
        let kernel = |(json, code): &(&'static [u8], &'static [u8])| {
            Ok(Kernel { manifest: parse_manifest(Path::new("(embedded)"), json)?, code: Code::Embedded(code) })
        };
        EMBEDDED.iter().map(kernel).collect::<Result<_, _>>().map(Self::Artifacts)
    }

    /// Reads every manifest of a folder, in order of name. A folder that does not exist is empty.
    ///
    /// # Errors
    /// If the folder or a manifest cannot be read or understood.
    pub fn read(folder: &Path) -> Result<Self, CatalogueError> {
        let read_error = |source| CatalogueError::Read { path: folder.to_owned(), source };
        let entries = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::Artifacts(Vec::new())),
            entries => entries.map_err(read_error)?,
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry.map_err(read_error)?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                paths.push(path);
            }
        }
        paths.sort();
        let kernels = paths.iter().map(|path| read_manifest(path)).collect::<Result<_, _>>()?;
        Ok(Self::Artifacts(kernels))
    }

    /// The kernels with code objects.
    pub fn kernels(&self) -> &[Kernel] {
        match self {
            Self::Cpu => &[],
            Self::Artifacts(kernels) => kernels,
        }
    }

    /// The best kernel for a step: the one with the tightest domain, first by name.
    pub fn find(&self, wanted: Wanted<'_>) -> Option<Found> {
        match self {
            Self::Cpu => cpu_has(wanted.contract).then_some(Found::Host),
            Self::Artifacts(kernels) => {
                let fitting = kernels.iter().enumerate().filter(|(_, kernel)| serves(&kernel.manifest, wanted));
                let best = fitting.min_by_key(|(_, kernel)| (tightness(&kernel.manifest), kernel.manifest.name.as_str()));
                best.map(|(index, _)| Found::Artifact(index))
            }
        }
    }
}

/// The cpu device's closed table: unfused operators, f32 activations, BF16 weights.
fn cpu_has(contract: &Contract) -> bool {
    let Contract { op, act, weight, kv, out } = *contract;
    let types = act == DType::F32 && weight == DType::Bf16 && kv == DType::F32 && out == DType::F32;
    let op = match op {
        Op::Embed { .. } | Op::RmsNorm { .. } | Op::RopeAppend { .. } | Op::Attend { .. } | Op::TakeRows { .. } | Op::Sample { .. } => true,
        Op::Linear(Linear { norm, act, residual, .. }) => norm.is_none() && !(residual && act == Activation::SwiGlu),
        Op::AddRmsNorm { .. } | Op::QkNorm { .. } | Op::QkvRopeAppend { .. } => false,
    };
    types && op
}

fn serves(manifest: &ArtifactManifest, wanted: Wanted<'_>) -> bool {
    let (tokens, seqs) = (wanted.class.tokens_max(), wanted.class.seqs_max());
    let domain = manifest.domain;
    let fits = domain.tokens.serves(tokens) && domain.seqs.serves(seqs) && domain.rows.serves(seqs);
    let layout = wanted.weight.is_none_or(|weight| weight == (manifest.weight_layout, manifest.row_order));
    manifest.contract == *wanted.contract && fits && layout && axis(manifest).is_none_or(|axis| axis == wanted.axis)
}

/// The symbol that a kernel's work is counted in, if it names only one of tokens and rows.
fn axis(manifest: &ArtifactManifest) -> Option<Sym> {
    let grid = manifest.grid.iter().filter_map(|extent| extent.sym);
    let scalars = manifest.params.iter().filter_map(|param| match param.role {
        Role::Scalar(Dim::Tokens) => Some(Sym::Tokens),
        Role::Scalar(Dim::Rows) => Some(Sym::Rows),
        _ => None,
    });
    let mut named: Vec<Sym> = grid.chain(scalars).filter(|sym| matches!(sym, Sym::Tokens | Sym::Rows)).collect();
    named.sort_unstable();
    named.dedup();
    match named.as_slice() {
        &[axis] => Some(axis),
        _ => None,
    }
}

fn tightness(manifest: &ArtifactManifest) -> (u32, u32, u32) {
    (manifest.domain.tokens.max, manifest.domain.seqs.max, manifest.domain.rows.max)
}

fn read_manifest(path: &Path) -> Result<Kernel, CatalogueError> {
    let read_error = |source| CatalogueError::Read { path: path.to_owned(), source };
    let size = std::fs::metadata(path).map_err(read_error)?.len();
    if size > MANIFEST_BYTES_MAX {
        return Err(read_error(std::io::Error::other(format!("is {size} bytes, a manifest has at most {MANIFEST_BYTES_MAX}"))));
    }
    let text = std::fs::read(path).map_err(read_error)?;
    Ok(Kernel { code: Code::File(path.with_extension("cubin")), manifest: parse_manifest(path, &text)? })
}

fn parse_manifest(path: &Path, text: &[u8]) -> Result<ArtifactManifest, CatalogueError> {
    let manifest: ArtifactManifest =
        serde_json::from_slice(text).map_err(|source| CatalogueError::Parse { path: path.to_owned(), source })?;
    if manifest.format != ARTIFACT_FORMAT {
        return Err(CatalogueError::Format { path: path.to_owned(), found: manifest.format });
    }
    Ok(manifest)
}
