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
use crate::manifest::{Manifest, Target};
use crate::plan::{PLAN_VERSION, RawPlan};
use std::cmp::Ordering;
use std::ops::RangeInclusive;

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

impl TargetBlock {
    /// What a plan and its manifest ask for.
    pub fn of(manifest: &Manifest, plan: &RawPlan, driver_min: u32) -> Self {
        let ledger = &manifest.ledger;
        let sequence_tokens = u64::from(plan.bounds.pages_per_seq_max).saturating_mul(u64::from(plan.kv.page_tokens));
        let kv_bytes = plan.kv.bytes_per_token().saturating_mul(sequence_tokens);
        let device_bytes = [ledger.weight_bytes, ledger.arena_bytes, ledger.input_bytes, ledger.output_bytes, kv_bytes];
        Self { target: manifest.target, driver_min, device_bytes: device_bytes.into_iter().fold(0, u64::saturating_add) }
    }
}

impl LimitsBlock {
    /// Limits of a plan and its manifest.
    pub fn of(manifest: &Manifest, plan: &RawPlan) -> Self {
        let ledger = &manifest.ledger;
        Self {
            context_max: manifest.limits.context_max,
            seqs_max: manifest.limits.seqs_max,
            class_count: u32::try_from(plan.entries.len()).unwrap_or(u32::MAX),
            page_tokens: plan.kv.page_tokens,
            kv_bytes_per_token: ledger.kv_bytes_per_token,
            weight_bytes: ledger.weight_bytes,
            workspace_bytes: [ledger.input_bytes, ledger.output_bytes].into_iter().fold(ledger.arena_bytes, u64::saturating_add),
        }
    }
}

impl Superblock {
    /// The seal.
    pub fn seal(&self) -> Seal {
        Seal(self.content_root)
    }

    /// Encodes the superblock and computes content root and header hash (the fields of `self` are not used for those two).
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut block = Block([0; SUPERBLOCK_BYTES]);
        block.put(0, MAGIC);
        block.put(8, MAJOR.to_le_bytes());
        block.put(10, self.minor.to_le_bytes());
        block.put(12, (SUPERBLOCK_BYTES as u32).to_le_bytes());
        for (offset, value) in [
            (16, self.sealed_bytes),
            (24, self.features_incompatible),
            (32, self.features_read_only),
            (40, self.features_compatible),
            (80, self.target.device_bytes),
            (104, self.limits.kv_bytes_per_token),
            (112, self.limits.weight_bytes),
            (120, self.limits.workspace_bytes),
            (128, self.table_offset),
        ] {
            block.put(offset, value.to_le_bytes());
        }
        let (target, sm, suffix) = target_code(self.target.target);
        block.put(72, suffix);
        for (offset, value) in [
            (48, self.plan_version),
            (52, self.abi_min),
            (56, self.abi_max),
            (64, target),
            (68, sm),
            (76, self.target.driver_min),
            (88, self.limits.context_max),
            (92, self.limits.seqs_max),
            (96, self.limits.class_count),
            (100, self.limits.page_tokens),
            (136, self.table_count),
        ] {
            block.put(offset, value.to_le_bytes());
        }
        for (offset, digest) in [(144, self.table_hash), (208, self.weights_root), (240, self.plan_root), (272, self.kernels_root)] {
            block.put(offset, digest.0);
        }
        block.put(CONTENT_OFFSET, block.content_root().0);
        block.put(HASH_OFFSET, block.header_hash().0);
        block.0
    }

    /// Decodes and checks a superblock alone.
    ///
    /// # Errors
    /// The first thing wrong, in this order: magic, major version (a later one may hash its header otherwise), hash, features, versions, fields, content root.
    pub fn parse(header: &[u8; SUPERBLOCK_BYTES]) -> Result<Self, BundleError> {
        check_magic(header)?;
        let block = Block(*header);
        block.check_major()?;
        block.check_hash()?;
        block.check_versions()?;
        block.check_reserved()?;
        let superblock = block.decode()?;
        superblock.check_fields()?;
        match (block.content_root(), superblock.content_root) {
            (found, recorded) if found != recorded => Err(BundleError::ContentRoot { found, recorded }),
            _ => Ok(superblock),
        }
    }

    fn check_fields(&self) -> Result<(), BundleError> {
        let sections_min = SectionKind::ALL.len() as u64;
        in_range("sealed length", self.sealed_bytes, WEIGHTS_ALIGN..=SEALED_MAX)?;
        in_range("table offset", self.table_offset, SUPERBLOCK_BYTES as u64..=SUPERBLOCK_BYTES as u64)?;
        in_range("table count", self.table_count.into(), sections_min..=SECTIONS_MAX.into())?;
        in_range("maximum context", self.limits.context_max.into(), 1..=u64::from(u32::MAX >> 1))?;
        in_range("maximum sequences", self.limits.seqs_max.into(), 1..=u64::from(u32::MAX >> 1))?;
        in_range("class count", self.limits.class_count.into(), 1..=u64::from(ENTRIES_MAX))?;
        in_range("KV page tokens", self.limits.page_tokens.into(), 1..=u64::from(PAGE_TOKENS_MAX))
    }
}

/// Says which magic the start of a file shows. `start` may be shorter than a superblock.
///
/// # Errors
/// If it is not a bundle's.
pub fn check_magic(start: &[u8]) -> Result<(), BundleError> {
    let magic = start.get(..MAGIC.len()).unwrap_or(start);
    if magic.is_empty() {
        return Err(BundleError::Empty);
    }
    if MAGIC.starts_with(magic) {
        return Ok(());
    }
    if magic == [0; 8] {
        return Err(BundleError::Unsealed);
    }
    let damage: [(&[u8], &'static str); 6] = [
        (&[0x89, 0x4F, 0x58, 0x42, 0x0A, 0x1A], "CR LF became LF"),
        (&[0x89, 0x4F, 0x58, 0x42, 0x0D, 0x0D, 0x0A, 0x1A], "LF became CR LF"),
        (&[0x89, 0x4F, 0x58, 0x42, 0x0D, 0x0A, 0x1A, 0x0D], "LF became CR LF"),
        (&[0x09, 0x4F, 0x58, 0x42], "the eighth bit was cleared"),
        (&[0xEF, 0xBF, 0xBD, 0x4F, 0x58, 0x42], "bytes were replaced as invalid UTF-8"),
        (&[0xC2, 0x89, 0x4F, 0x58, 0x42], "bytes were converted from Latin-1 to UTF-8"),
    ];
    match damage.into_iter().find(|(shown, _)| magic.starts_with(shown)) {
        Some((_, how)) => Err(BundleError::TextModeDamage { how }),
        None => Err(BundleError::NotABundle { found: magic.iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>().join(" ") }),
    }
}

/// Puts content root and header hash of an encoded superblock right. For tools that forge test files.
pub fn rehash(header: &mut [u8; SUPERBLOCK_BYTES]) {
    let mut block = Block(*header);
    block.put(CONTENT_OFFSET, block.content_root().0);
    block.put(HASH_OFFSET, block.header_hash().0);
    *header = block.0;
}

/// The raw block. Offsets are constants inside it.
struct Block([u8; SUPERBLOCK_BYTES]);

impl Block {
    fn put<const N: usize>(&mut self, offset: usize, bytes: [u8; N]) {
        self.0[offset..offset + N].copy_from_slice(&bytes);
    }

    fn get<const N: usize>(&self, offset: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[offset..offset + N]);
        bytes
    }

    fn u32(&self, offset: usize) -> u32 {
        u32::from_le_bytes(self.get(offset))
    }

    fn u64(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.get(offset))
    }

    fn digest(&self, offset: usize) -> Digest {
        Digest(self.get(offset))
    }

    fn header_hash(&self) -> Digest {
        Digest::of(&[&self.0[..HASH_OFFSET]])
    }

    fn content_root(&self) -> Digest {
        let (before, after) = (&self.0[..CONTENT_OFFSET], &self.0[CONTENT_OFFSET + 32..HASH_OFFSET]);
        Digest::of(&[CONTENT_DOMAIN, before, &[0; 32], after])
    }

    fn check_hash(&self) -> Result<(), BundleError> {
        match (self.header_hash(), self.digest(HASH_OFFSET)) {
            (found, recorded) if found != recorded => Err(BundleError::HeaderHash { found, recorded }),
            _ => Ok(()),
        }
    }

    fn check_major(&self) -> Result<(), BundleError> {
        let major = u16::from_le_bytes(self.get(8));
        match major.cmp(&MAJOR) {
            Ordering::Greater => Err(BundleError::NewerMajor { found: major, supported: MAJOR }),
            Ordering::Less => Err(BundleError::OlderMajor { found: major, supported: MAJOR }),
            Ordering::Equal => Ok(()),
        }
    }

    fn check_versions(&self) -> Result<(), BundleError> {
        in_range("header length", self.u32(12).into(), SUPERBLOCK_BYTES as u64..=SUPERBLOCK_BYTES as u64)?;
        let unknown = self.u64(24) & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(BundleError::UnknownFeature { unknown, known: FEATURES_KNOWN });
        }
        let version = self.u32(48);
        if version != PLAN_VERSION {
            return Err(BundleError::PlanVersion { found: version, supported: PLAN_VERSION });
        }
        let (min, max) = (self.u32(52), self.u32(56));
        if !(min..=max).contains(&RUNTIME_ABI) {
            let target = if self.u32(64) == target_code(Target::Sm90).0 { "sm90" } else { "cpu" };
            return Err(BundleError::RuntimeAbi { min, max, have: RUNTIME_ABI, target });
        }
        Ok(())
    }

    fn check_reserved(&self) -> Result<(), BundleError> {
        let reserved = [60..64, 140..144, RESERVED_OFFSET..HASH_OFFSET];
        let dirty = reserved.into_iter().flatten().find(|at| self.0[*at] != 0);
        match dirty {
            Some(at) => Err(field("reserved", self.0[at].into(), format!("0 (at byte {at})"))),
            None => Ok(()),
        }
    }

    fn decode(&self) -> Result<Superblock, BundleError> {
        Ok(Superblock {
            minor: u16::from_le_bytes(self.get(10)),
            sealed_bytes: self.u64(16),
            features_incompatible: self.u64(24),
            features_read_only: self.u64(32),
            features_compatible: self.u64(40),
            plan_version: self.u32(48),
            abi_min: self.u32(52),
            abi_max: self.u32(56),
            target: TargetBlock { target: self.target()?, driver_min: self.u32(76), device_bytes: self.u64(80) },
            limits: LimitsBlock {
                context_max: self.u32(88),
                seqs_max: self.u32(92),
                class_count: self.u32(96),
                page_tokens: self.u32(100),
                kv_bytes_per_token: self.u64(104),
                weight_bytes: self.u64(112),
                workspace_bytes: self.u64(120),
            },
            table_offset: self.u64(128),
            table_count: self.u32(136),
            table_hash: self.digest(144),
            content_root: self.digest(CONTENT_OFFSET),
            weights_root: self.digest(208),
            plan_root: self.digest(240),
            kernels_root: self.digest(272),
        })
    }

    fn target(&self) -> Result<Target, BundleError> {
        let found = (self.u32(64), self.u32(68), self.get::<4>(72));
        let known = [Target::Cpu, Target::Sm90].into_iter().find(|target| target_code(*target) == found);
        known.ok_or_else(|| field("target", found.0.into(), "1 (cpu) with SM 0, or 2 (sm90) with SM 90a".to_owned()))
    }
}

/// Target, SM and SM suffix, as they are stored.
const fn target_code(target: Target) -> (u32, u32, [u8; 4]) {
    match target {
        Target::Cpu => (1, 0, [0; 4]),
        Target::Sm90 => (2, 90, *b"a\0\0\0"),
    }
}

fn field(field: &'static str, found: u64, allowed: String) -> BundleError {
    BundleError::HeaderField { field, found, allowed }
}

fn in_range(name: &'static str, found: u64, allowed: RangeInclusive<u64>) -> Result<(), BundleError> {
    match allowed.contains(&found) {
        true => Ok(()),
        false if allowed.start() == allowed.end() => Err(field(name, found, allowed.start().to_string())),
        false => Err(field(name, found, format!("{} to {}", allowed.start(), allowed.end()))),
    }
}
