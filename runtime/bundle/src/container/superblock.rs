//! The first 4 KiB of a bundle: enough for a preflight check from one read or one HTTP range.
//!
//! ```text
//!    0  magic 8                 88  context_max u32      176  content root 32
//!    8  major u16, minor u16    92  seqs_max u32         208  weights root 32
//!   12  header length u32       96  class count u32      240  plan root 32
//!   16  sealed length u64      100  page tokens u32      272  kernels root 32
//!   24  incompatible bits u64  104  KV bytes/token u64   304  zero
//!   32  read-only bits u64     112  weight bytes u64    4064  SHA-256 of bytes 0..4064
//!   40  compatible bits u64    120  workspace bytes u64
//!   48  plan version u32       128  table offset u64
//!   52  ABI min u32, max u32   136  table count u32
//!   60  zero u32               140  zero u32
//!   64  target u32, SM u32     144  table hash 32
//!   72  SM suffix 4
//!   76  driver min u32
//!   80  device bytes u64
//! ```
//!
//! The content root is the SHA-256 of a domain prefix and these 4064 bytes with the root's own field
//! zero. It covers the table by its hash, sections by their roots in the table, and gaps because the
//! reader demands zeros.

use super::layout::*;
use crate::digest::{Digest, Seal};
use crate::error::BundleError;
use crate::manifest::Target;

const HASH_OFFSET: usize = SUPERBLOCK_BYTES - 32;
const CONTENT_OFFSET: usize = 176;
const RESERVED_OFFSET: usize = 304;
const CONTENT_DOMAIN: &[u8] = b"oxb content root v1\0";

/// Decoded superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Minor version.
    pub minor: u16,
    /// Bytes sealed, from the start of the file.
    pub sealed_bytes: u64,
    /// Features that a reader must know.
    pub features_incompatible: u64,
    /// Features that a writer must know and a reader may ignore.
    pub features_read_only: u64,
    /// Features that anyone may ignore.
    pub features_compatible: u64,
    /// Version of the plan encoding.
    pub plan_version: u32,
    /// Lowest runtime ABI.
    pub abi_min: u32,
    /// Highest runtime ABI.
    pub abi_max: u32,
    /// Target.
    pub target: TargetBlock,
    /// Limits.
    pub limits: LimitsBlock,
    /// Offset of the section table.
    pub table_offset: u64,
    /// Entries of the section table.
    pub table_count: u32,
    /// SHA-256 of the section table.
    pub table_hash: Digest,
    /// Content root: the seal.
    pub content_root: Digest,
    /// Root of `WDAT`.
    pub weights_root: Digest,
    /// Root of `PLAN`.
    pub plan_root: Digest,
    /// Root of `KERN`.
    pub kernels_root: Digest,
}

/// What the bundle runs on.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TargetBlock {
    /// Target.
    pub target: Target,
    /// Oldest driver API version (13000 is 13.0); 0 on cpu.
    pub driver_min: u32,
    /// Device memory for weights, arena, slots and the smallest KV pool (one sequence of full context).
    pub device_bytes: u64,
}

/// Limits that matter before anything is loaded.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LimitsBlock {
    /// Longest sequence.
    pub context_max: u32,
    /// Sequences running together.
    pub seqs_max: u32,
    /// Entries of the plan.
    pub class_count: u32,
    /// Tokens in a KV page.
    pub page_tokens: u32,
    /// KV bytes of one token.
    pub kv_bytes_per_token: u64,
    /// Weight section.
    pub weight_bytes: u64,
    /// Arena, input and output slots.
    pub workspace_bytes: u64,
}

impl Superblock {
    /// The seal.
    pub fn seal(&self) -> Seal {
        Seal(self.content_root)
    }
}
