//! Element types of tensors, buffers and KV planes.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type. All are little-endian.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE 754 binary16; only as a checkpoint's source type.
    F16,
    /// Unsigned 32-bit integer.
    U32,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::U32 => "u32",
        })
    }
}

/// A binary32 value stored as its bits: canonical encodings carry no floats.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct F32Bits(pub u32);

impl F32Bits {
    /// The bits of `value`.
    pub fn new(value: f32) -> Self {
        Self(value.to_bits())
    }

    /// The value.
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl fmt::Display for F32Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:e}", self.get())
    }
}
