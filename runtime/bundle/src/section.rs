//! Types of the sections that only the container needs: tensor index and kernel index.
//! Manifest, golden vectors, template and provenance are in [`crate::manifest`].

use crate::artifact::ArtifactManifest;
use crate::digest::Digest;
use crate::dtype::DType;
use crate::plan::{RowOrder, WeightDecl, WeightLayout};
use serde::{Deserialize, Serialize};

/// A tensor of the weight section (`WIDX`): what the plan says, and the digest of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name after fusion.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Logical shape.
    pub shape: Vec<u32>,
    /// Layout of the elements.
    pub layout: WeightLayout,
    /// Order of the rows.
    pub rows: RowOrder,
    /// Offset in the weight section.
    pub offset_bytes: u64,
    /// Size in the weight section.
    pub size_bytes: u64,
    /// Root of the hash tree over the tensor's bytes, 4 MiB a leaf.
    pub root: Digest,
}

/// Tensor index (`WIDX`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorIndex {
    /// Tensors, by [`WeightId`](crate::ids::WeightId).
    pub tensors: Vec<TensorEntry>,
}

/// A code object of the kernel section (`KERN`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArtifactEntry {
    /// SHA-256 of the code object; the name it is found by.
    pub sha256: Digest,
    /// Offset in the kernel section; a multiple of 256.
    pub offset_bytes: u64,
    /// Size.
    pub size_bytes: u64,
    /// Manifest of the code object.
    pub manifest: ArtifactManifest,
}

/// Index at the start of the kernel section (`KERN`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelIndex {
    /// Code objects, by [`ArtifactId`](crate::ids::ArtifactId). Empty on the cpu target.
    pub artifacts: Vec<ArtifactEntry>,
}

/// A code object to be sealed in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// The code object.
    pub code: Vec<u8>,
    /// Its manifest.
    pub manifest: ArtifactManifest,
}

impl TensorEntry {
    /// The index row of a weight.
    pub fn of(weight: &WeightDecl, root: Digest) -> Self {
        let WeightDecl { name, sources: _, dtype, shape, layout, rows, offset_bytes, size_bytes } = weight.clone();
        Self { name, dtype, shape, layout, rows, offset_bytes, size_bytes, root }
    }
}
