//! Constants of the format: magic, versions, alignment classes, caps. A file cannot choose any of them.

use std::fmt;

/// First bytes of a bundle. CR LF and a lone LF show text-mode damage, the first byte a 7-bit channel.
pub const MAGIC: [u8; 8] = [0x89, 0x4F, 0x58, 0x42, 0x0D, 0x0A, 0x1A, 0x0A];
/// Major version that this build reads and writes.
pub const MAJOR: u16 = 1;
/// Minor version that this build writes; any minor is read.
pub const MINOR: u16 = 0;
/// Identity of the plan executor's interface, apart from the release version. A bundle names the range it runs on.
pub const RUNTIME_ABI: u32 = 1;
/// Size of the superblock.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// Size of a section table entry.
pub const TABLE_ENTRY_BYTES: usize = 128;
/// Most entries of a section table.
pub const SECTIONS_MAX: u32 = 64;
/// Alignment of sections.
pub const SECTION_ALIGN: u64 = 64 << 10;
/// Alignment of the weight section.
pub const WEIGHTS_ALIGN: u64 = 2 << 20;
/// Alignment of the first tensor of a layer's slab.
pub const SLAB_ALIGN: u64 = 64 << 10;
/// Alignment of tensors, buffers and code objects.
pub const TENSOR_ALIGN: u64 = 256;
/// Bytes of a hash leaf in the weight section.
pub const WEIGHT_CHUNK_BYTES: u64 = 4 << 20;
/// Bytes of a hash leaf elsewhere.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Longest gap between two sections.
pub const GAP_MAX: u64 = 4 << 20;
/// Room kept before the weights for golden vectors, so that they can be sealed after the weights.
pub const GOLDEN_RESERVE_BYTES: u64 = 256 << 10;
/// First bytes of a signature trailer; a `u64` payload length and the payload follow, to the end of the file.
pub const TRAILER_MAGIC: [u8; 8] = *b"OXBTRAIL";
/// Longest signature trailer.
pub const TRAILER_MAX: u64 = 64 << 10;
/// Largest bundle.
pub const SEALED_MAX: u64 = 1 << 42;

/// Incompatible feature: weights follow from the plan, and the file may end where they begin.
pub const FEATURE_GENERATED: u64 = 1;
/// Incompatible feature bits that this build knows.
pub const FEATURES_KNOWN: u64 = FEATURE_GENERATED;
/// Most entries (batch classes) of a plan.
pub const ENTRIES_MAX: u32 = 256;
/// Most tokens of a KV page.
pub const PAGE_TOKENS_MAX: u32 = 4096;

/// Four capital letters that name a section.
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SectionKind(pub [u8; 4]);

impl SectionKind {
    /// The superblock, in messages. No section of this kind exists.
    pub const HEAD: Self = Self(*b"HEAD");
    /// Leaf hashes.
    pub const HASH: Self = Self(*b"HASH");
    /// Manifest.
    pub const MANI: Self = Self(*b"MANI");
    /// Plan.
    pub const PLAN: Self = Self(*b"PLAN");
    /// Kernel index and code objects.
    pub const KERN: Self = Self(*b"KERN");
    /// `tokenizer.json`.
    pub const TOKN: Self = Self(*b"TOKN");
    /// Chat template.
    pub const TMPL: Self = Self(*b"TMPL");
    /// Tensor index.
    pub const WIDX: Self = Self(*b"WIDX");
    /// Golden vectors.
    pub const GOLD: Self = Self(*b"GOLD");
    /// Provenance.
    pub const PROV: Self = Self(*b"PROV");
    /// Licences.
    pub const LICE: Self = Self(*b"LICE");
    /// Weights.
    pub const WDAT: Self = Self(*b"WDAT");

    /// Every section of version 1, in file order. All are mandatory.
    pub const ALL: [Self; 11] = [
        Self::HASH,
        Self::MANI,
        Self::PLAN,
        Self::KERN,
        Self::TOKN,
        Self::TMPL,
        Self::WIDX,
        Self::GOLD,
        Self::PROV,
        Self::LICE,
        Self::WDAT,
    ];

    /// Alignment class.
    pub const fn align(self) -> u64 {
        match &self.0 {
            b"WDAT" => WEIGHTS_ALIGN,
            _ => SECTION_ALIGN,
        }
    }

    /// Bytes of a hash leaf.
    pub const fn chunk_bytes(self) -> u64 {
        match &self.0 {
            b"WDAT" => WEIGHT_CHUNK_BYTES,
            _ => CHUNK_BYTES,
        }
    }

    /// Longest section of this kind.
    pub const fn bytes_max(self) -> u64 {
        match &self.0 {
            b"WDAT" => 1 << 41,
            b"KERN" => 512 << 20,
            b"HASH" | b"WIDX" => 32 << 20,
            b"MANI" | b"GOLD" => 1 << 20,
            b"TMPL" | b"PROV" | b"LICE" => 4 << 20,
            // Plan, tokenizer, and sections of later minor versions.
            _ => 64 << 20,
        }
    }

    /// Whether this build knows the kind.
    pub fn is_known(self) -> bool {
        Self::ALL.contains(&self)
    }
}

impl fmt::Display for SectionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{}", byte.escape_ascii()))
    }
}

impl fmt::Debug for SectionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// `value` rounded up to a multiple of `align` (a power of two), or `None` on overflow.
pub const fn align_up(value: u64, align: u64) -> Option<u64> {
    match value.checked_add(align - 1) {
        Some(sum) => Some(sum & !(align - 1)),
        None => None,
    }
}
