//! The manifest of one code object (`artifacts/sm90/<sha256>.json`): everything the compiler needs to
//! choose a kernel and everything the device needs to launch it.
//!
//! Written by `kernels/build.py`; sealed beside its cubin in the kernel section. Unknown fields are
//! refused. The field-by-field description is `docs/kernel-abi.md`.

use crate::contract::{Contract, Role};
use crate::plan::{Extent, RowOrder, WeightLayout};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Manifest format that this build reads.
pub const ARTIFACT_FORMAT: u32 = 1;

/// A code object and its one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArtifactManifest {
    /// [`ARTIFACT_FORMAT`].
    pub format: u32,
    /// Name of family, shape and variant.
    pub name: String,
    /// SHA-256 of the cubin, lower-case hex.
    pub sha256: String,
    /// Size of the cubin.
    pub size_bytes: u64,
    /// SHA-256 of the TileLang source file(s).
    pub source_sha256: String,
    /// SHA-256 of the CUDA source that TileLang generated.
    pub generated_source_sha256: String,
    /// `sm_90a`.
    pub target: String,
    /// Oldest driver API version, as `cuDriverGetVersion` counts (13000 is 13.0).
    pub driver_min: u32,
    /// What it computes.
    pub contract: Contract,
    /// How it computes.
    pub numerics: Numerics,
    /// Step sizes that it serves.
    pub domain: Domain,
    /// Layout of the weight matrix it reads.
    pub weight_layout: WeightLayout,
    /// Row order of the weight matrix it reads.
    pub row_order: RowOrder,
    /// Symbol of the kernel in the cubin.
    pub symbol: String,
    /// Grid.
    pub grid: [Extent; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster; `[1, 1, 1]` without.
    pub cluster: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread spilled to local memory.
    pub spill_bytes: u32,
    /// May be launched with programmatic stream serialisation.
    pub pdl: bool,
    /// Needs a cooperative launch.
    pub cooperative: bool,
    /// Parameters, in the cubin's order.
    pub params: Vec<Param>,
    /// Scratch that the plan must provide.
    pub workspace: Vec<Workspace>,
    /// Identities of the toolchain.
    pub toolchain: BTreeMap<String, String>,
    /// Evidence.
    pub records: Records,
}

/// Numerics of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numerics {
    /// Type of accumulators.
    pub accumulate: String,
    /// Where values are rounded.
    pub rounding: Vec<String>,
    /// Two runs give the same bytes.
    pub deterministic: bool,
}

/// Step sizes that a kernel serves.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Domain {
    /// Tokens of the step.
    pub tokens: Range,
    /// Sequences of the step.
    pub seqs: Range,
    /// Logit rows of the step.
    pub rows: Range,
}

/// `min..=max`, multiples of `multiple`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Range {
    /// Smallest.
    pub min: u32,
    /// Largest.
    pub max: u32,
    /// Step.
    pub multiple: u32,
}

impl Range {
    /// Whether every value `1..=bound` that is at least `min` is served, and `bound` itself is.
    pub const fn serves(self, bound: u32) -> bool {
        self.min <= bound && bound <= self.max && self.multiple != 0 && bound.is_multiple_of(self.multiple)
    }
}

/// A kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// Name in the source.
    pub name: String,
    /// Pointer, tensor map or scalar.
    pub kind: ParamKind,
    /// Element type as the source names it (`bfloat16`, `float32`, `int32`).
    pub dtype: String,
    /// What it is bound to.
    pub role: Role,
    /// How the kernel uses it.
    pub access: Access,
    /// Alignment that the kernel assumes of a pointer.
    pub align: u32,
    /// Offset in the parameter block.
    pub offset: u32,
    /// Size in the parameter block.
    pub size: u32,
    /// Value of a scalar.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Extent>,
    /// Geometry of a tensor map.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_map: Option<TensorMap>,
}

/// Kind of a parameter.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParamKind {
    /// A device address.
    Pointer,
    /// A 128-byte tensor map by value.
    TensorMap,
    /// A 32-bit integer by value.
    Scalar,
}

/// How a kernel uses a parameter.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Read only.
    Read,
    /// Written only.
    Write,
    /// Both.
    ReadWrite,
}

/// Arguments of `cuTensorMapEncodeTiled`; enumerations as the driver numbers them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMap {
    /// `CUtensorMapDataType`.
    pub dtype: u32,
    /// Global dimensions, innermost first.
    pub dims: Vec<Extent>,
    /// Strides of dimensions 1.. in bytes.
    pub strides_bytes: Vec<Extent>,
    /// Box.
    #[serde(rename = "box")]
    pub box_dims: Vec<u32>,
    /// Element strides.
    pub element_strides: Vec<u32>,
    /// `CUtensorMapInterleave`.
    pub interleave: u32,
    /// `CUtensorMapSwizzle`.
    pub swizzle: u32,
    /// `CUtensorMapL2promotion`.
    pub l2_promotion: u32,
    /// `CUtensorMapFloatOOBfill`.
    pub oob_fill: u32,
}

/// Scratch that a kernel wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workspace {
    /// `Workspace(i)` or `Counters(i)`.
    pub role: Role,
    /// Element type as the source names it.
    pub dtype: String,
    /// Elements.
    pub elements: Extent,
    /// Zeroed once at start; the kernel leaves it zeroed.
    pub zeroed: bool,
}

/// Ids of records under `docs/results/`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Records {
    /// Device correctness.
    pub correctness: Vec<String>,
    /// compute-sanitizer.
    pub sanitizer: Vec<String>,
    /// Graph equality.
    pub graph: Vec<String>,
    /// Benchmarks.
    pub bench: Vec<String>,
}
