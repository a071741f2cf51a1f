//! Every way in which a file can fail to be a bundle that this build reads.
//!
//! Each error has a stable [`kind`](BundleError::kind) for scripts and an own process exit code.
//! The codes are listed in `docs/bundle-format.md`; none is ever reused.

use crate::container::SectionKind;
use crate::cubin::CubinError;
use crate::digest::{Digest, Seal};
use crate::verify::PlanErrors;

/// A file that is not read as a bundle, or a bundle that is refused.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file has no bytes.
    #[error("the file is empty: a bundle has at least 4096 bytes; compile or copy it again")]
    Empty,
    /// The magic is absent.
    #[error("not an oxide bundle: it starts with {found}, a bundle with 89 4F 58 42 0D 0A 1A 0A; pass a .oxb file made by oxide-compile")]
    NotABundle {
        /// The first bytes, in hex.
        found: String,
    },
    /// The magic shows what a text-mode or 7-bit transfer does.
    #[error("the bundle was damaged by a text-mode transfer ({how}): copy it again in binary mode")]
    TextModeDamage {
        /// What happened to the magic.
        how: &'static str,
    },
    /// The magic is still zero.
    #[error("the bundle was never sealed: its first 8 bytes are zero, as an interrupted build leaves them; compile it again")]
    Unsealed,
    /// A later major version.
    #[error(
        "the bundle has format version {found}, this build reads version {supported}: use a newer oxide-run, or recompile the bundle with this release's oxide-compile"
    )]
    NewerMajor {
        /// Major version of the file.
        found: u16,
        /// Major version of this build.
        supported: u16,
    },
    /// An earlier major version.
    #[error(
        "the bundle has format version {found}, this build reads version {supported}: recompile the bundle with this release's oxide-compile"
    )]
    OlderMajor {
        /// Major version of the file.
        found: u16,
        /// Major version of this build.
        supported: u16,
    },
    /// The file is shorter than it says.
    #[error("the bundle is truncated: {found_bytes} bytes of {sealed_bytes}; copy it again")]
    Truncated {
        /// Bytes present.
        found_bytes: u64,
        /// Bytes sealed.
        sealed_bytes: u64,
    },
    /// Bytes after the sealed range that are no signature trailer.
    #[error("the file has {extra_bytes} bytes after the {sealed_bytes} sealed ones that are no signature trailer: copy it again")]
    TrailingBytes {
        /// Bytes after the sealed range.
        extra_bytes: u64,
        /// Bytes sealed.
        sealed_bytes: u64,
    },
    /// The superblock's hash does not match.
    #[error("section HEAD (superblock) is damaged: its SHA-256 is {found}, recorded {recorded}; copy the bundle again")]
    HeaderHash {
        /// Hash of the bytes.
        found: Digest,
        /// Hash recorded in them.
        recorded: Digest,
    },
    /// The content root does not match the superblock.
    #[error("section HEAD (superblock): the content root is {found}, recorded {recorded}; copy the bundle again")]
    ContentRoot {
        /// Root computed.
        found: Digest,
        /// Root recorded.
        recorded: Digest,
    },
    /// A superblock field that no valid bundle has.
    #[error("superblock field `{field}` is {found}, allowed is {allowed}: the bundle was made by a faulty writer; recompile it")]
    HeaderField {
        /// The field.
        field: &'static str,
        /// Value found.
        found: u64,
        /// Values allowed.
        allowed: String,
    },
    /// Feature bits that this build does not know and may not ignore.
    #[error("the bundle needs feature bits {unknown:#x} that this build does not know (it knows {known:#x}): use a newer oxide-run")]
    UnknownFeature {
        /// Bits not known.
        unknown: u64,
        /// Bits known.
        known: u64,
    },
    /// The plan encoding has another version.
    #[error(
        "the bundle's plan has version {found}, this build reads version {supported}: recompile the bundle with this release's oxide-compile"
    )]
    PlanVersion {
        /// Version of the file.
        found: u32,
        /// Version of this build.
        supported: u32,
    },
    /// The runtime is outside the range that the bundle was compiled for.
    #[error(
        "the bundle needs runtime ABI {min} to {max}, this oxide-run has ABI {have}: rebuild it with `oxide-compile PROFILE --target {target}` of this release"
    )]
    RuntimeAbi {
        /// Lowest ABI.
        min: u32,
        /// Highest ABI.
        max: u32,
        /// ABI of this build.
        have: u32,
        /// Target to rebuild for.
        target: &'static str,
    },
    /// The section table's hash does not match.
    #[error("the section table is damaged: its SHA-256 is {found}, recorded {recorded}; copy the bundle again")]
    TableHash {
        /// Hash of the bytes.
        found: Digest,
        /// Hash recorded in the superblock.
        recorded: Digest,
    },
    /// A section table field that no valid bundle has.
    #[error(
        "section table entry {index} ({section}): `{field}` is {found}, allowed is {allowed}; the bundle was made by a faulty writer; recompile it"
    )]
    TableField {
        /// Index of the entry.
        index: u32,
        /// Kind of the section.
        section: SectionKind,
        /// The field.
        field: &'static str,
        /// Value found.
        found: u64,
        /// Values allowed.
        allowed: String,
    },
    /// A section that reaches past the sealed range or into the superblock.
    #[error(
        "section {section} spans bytes {offset}..{end}, allowed is {low}..{high}: the bundle was made by a faulty writer; recompile it"
    )]
    SectionOutOfBounds {
        /// The section.
        section: SectionKind,
        /// First byte.
        offset: u64,
        /// First byte after it.
        end: u64,
        /// Lowest offset allowed.
        low: u64,
        /// Highest end allowed.
        high: u64,
    },
    /// Two sections share bytes, or stand in falling order.
    #[error(
        "section {section} starts at byte {offset}, before section {before} ends at {before_end}: the bundle was made by a faulty writer; recompile it"
    )]
    SectionOverlap {
        /// The section.
        section: SectionKind,
        /// Its first byte.
        offset: u64,
        /// The section before it.
        before: SectionKind,
        /// Where that one ends.
        before_end: u64,
    },
    /// A section off its alignment.
    #[error(
        "section {section} starts at byte {offset}, which is not a multiple of {align}: the bundle was made by a faulty writer; recompile it"
    )]
    SectionMisaligned {
        /// The section.
        section: SectionKind,
        /// Its first byte.
        offset: u64,
        /// Alignment of its class.
        align: u64,
    },
    /// A section that occurs twice.
    #[error("section {section} occurs twice, allowed is once: the bundle was made by a faulty writer; recompile it")]
    SectionDuplicate {
        /// The section.
        section: SectionKind,
    },
    /// A mandatory section that is absent.
    #[error("section {section} is missing: every bundle has it; recompile the bundle")]
    SectionMissing {
        /// The section.
        section: SectionKind,
    },
    /// A required section that this build does not know.
    #[error("section {section} is required and unknown to this build: use a newer oxide-run")]
    SectionUnknown {
        /// The section.
        section: SectionKind,
    },
    /// The weights are not the last section.
    #[error("section {section} follows the weights (WDAT), which must be last: the bundle was made by a faulty writer; recompile it")]
    WeightsNotLast {
        /// The section after them.
        section: SectionKind,
    },
    /// A section larger than its cap, or empty.
    #[error("section {section} has {found_bytes} bytes, allowed is 1 to {max_bytes}: the bundle was made by a faulty writer; recompile it")]
    SectionSize {
        /// The section.
        section: SectionKind,
        /// Its length.
        found_bytes: u64,
        /// Its cap.
        max_bytes: u64,
    },
    /// A byte between sections that is not zero, or too many of them.
    #[error("the gap before section {section} is not zero or too long (at byte {offset}): copy the bundle again")]
    Gap {
        /// Section after the gap.
        section: SectionKind,
        /// Where.
        offset: u64,
    },
    /// A chunk whose hash does not match.
    #[error("section {section} is damaged in chunk {chunk} (bytes {start}..{end} of the file): copy the bundle again")]
    HashMismatch {
        /// The section.
        section: SectionKind,
        /// Index of the chunk in the section.
        chunk: u64,
        /// First byte in the file.
        start: u64,
        /// First byte after it in the file.
        end: u64,
    },
    /// A section's leaf hashes do not give its root.
    #[error(
        "the leaf hashes of section {section} do not give its root (found {found}, recorded {recorded}): section HASH is damaged; copy the bundle again"
    )]
    RootMismatch {
        /// The section whose leaves they are.
        section: SectionKind,
        /// Root computed.
        found: Digest,
        /// Root recorded.
        recorded: Digest,
    },
    /// Msgpack that is not in canonical form.
    #[error("section {section} is not canonical msgpack at byte {offset}: {reason}; the bundle was made by a faulty writer; recompile it")]
    NotCanonical {
        /// The section.
        section: SectionKind,
        /// Where in the section.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// Canonical msgpack that does not decode to the section's type.
    #[error("section {section} does not decode: {reason}; the bundle was made by another release or a faulty writer; recompile it")]
    Undecodable {
        /// The section.
        section: SectionKind,
        /// What is wrong.
        reason: String,
    },
    /// Text that is not UTF-8.
    #[error("section {section} is not UTF-8 at byte {offset}: the bundle was made by a faulty writer; recompile it")]
    NotUtf8 {
        /// The section.
        section: SectionKind,
        /// Where in the section.
        offset: u64,
    },
    /// Two sections, or the superblock and a section, that disagree.
    #[error(
        "{what}: the superblock or plan says {left}, section {section} says {right}; the bundle was made by a faulty writer; recompile it"
    )]
    Disagreement {
        /// The section.
        section: SectionKind,
        /// What they disagree about.
        what: String,
        /// One side.
        left: String,
        /// The other.
        right: String,
    },
    /// A code object of the kernel section that is out of place or whose hash does not match.
    #[error("kernel artifact a{index} ({sha256}): {reason}; recompile the bundle")]
    Artifact {
        /// Index of the artifact.
        index: u32,
        /// Its recorded hash.
        sha256: Digest,
        /// What is wrong.
        reason: String,
    },
    /// A code object that is no cubin, or not the one that its manifest describes.
    #[error("kernel artifact a{index} ({sha256}): {source}; rebuild the kernels and recompile the bundle")]
    Cubin {
        /// Index of the artifact.
        index: u32,
        /// Its hash.
        sha256: Digest,
        /// What is wrong.
        source: CubinError,
    },
    /// A code object for another architecture.
    #[error(
        "kernel artifact a{index} ({sha256}) is for sm_{found}, allowed is sm_{allowed}a: rebuild the kernels and recompile the bundle"
    )]
    CubinArch {
        /// Index of the artifact.
        index: u32,
        /// Its hash.
        sha256: Digest,
        /// Architecture found.
        found: u32,
        /// Architecture of the target.
        allowed: u32,
    },
    /// The plan does not verify.
    #[error(transparent)]
    Plan(#[from] PlanErrors),
    /// The seal is not the one that the caller expects.
    #[error("the bundle's seal is {found}, expected {expected}: this is another bundle; check --expect")]
    UnexpectedSeal {
        /// Seal of the file.
        found: Seal,
        /// Seal expected.
        expected: Seal,
    },
    /// The metadata do not fit before the weights when sealing.
    #[error("the sections before the weights need {needed_bytes} bytes, reserved are {reserved_bytes}: seal fewer golden vectors")]
    MetadataRoom {
        /// Bytes needed.
        needed_bytes: u64,
        /// Bytes reserved.
        reserved_bytes: u64,
    },
    /// A weight written out of order, short or long when sealing.
    #[error("weight {name}: {reason}")]
    WeightStream {
        /// The tensor.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Reading or writing failed.
    #[error("cannot read or write the bundle: {0}")]
    Io(#[from] std::io::Error),
}

impl BundleError {
    /// Stable name of the kind, for scripts and `--json`.
    pub fn kind(&self) -> &'static str {
        self.identity().0
    }

    /// Exit code of a process that fails with this error.
    pub fn exit_code(&self) -> u8 {
        self.identity().1
    }

    fn identity(&self) -> (&'static str, u8) {
        match self {
            Self::Empty => ("empty", 20),
            Self::NotABundle { .. } => ("not_a_bundle", 21),
            Self::TextModeDamage { .. } => ("text_mode_damage", 22),
            Self::Unsealed => ("unsealed", 23),
            Self::NewerMajor { .. } => ("newer_major", 24),
            Self::OlderMajor { .. } => ("older_major", 25),
            Self::Truncated { .. } => ("truncated", 26),
            Self::TrailingBytes { .. } => ("trailing_bytes", 27),
            Self::HeaderHash { .. } => ("header_hash", 28),
            Self::ContentRoot { .. } => ("content_root", 29),
            Self::HeaderField { .. } => ("header_field", 30),
            Self::UnknownFeature { .. } => ("unknown_feature", 31),
            Self::PlanVersion { .. } => ("plan_version", 32),
            Self::RuntimeAbi { .. } => ("runtime_abi", 33),
            Self::TableHash { .. } => ("table_hash", 34),
            Self::TableField { .. } => ("table_field", 35),
            Self::SectionOutOfBounds { .. } => ("section_out_of_bounds", 36),
            Self::SectionOverlap { .. } => ("section_overlap", 37),
            Self::SectionMisaligned { .. } => ("section_misaligned", 38),
            Self::SectionDuplicate { .. } => ("section_duplicate", 39),
            Self::SectionMissing { .. } => ("section_missing", 40),
            Self::SectionUnknown { .. } => ("section_unknown", 41),
            Self::WeightsNotLast { .. } => ("weights_not_last", 42),
            Self::SectionSize { .. } => ("section_size", 43),
            Self::Gap { .. } => ("gap", 44),
            Self::HashMismatch { .. } => ("hash_mismatch", 45),
            Self::RootMismatch { .. } => ("root_mismatch", 46),
            Self::NotCanonical { .. } => ("not_canonical", 47),
            Self::Undecodable { .. } => ("undecodable", 48),
            Self::NotUtf8 { .. } => ("not_utf8", 49),
            Self::Disagreement { .. } => ("disagreement", 50),
            Self::Artifact { .. } => ("artifact", 51),
            Self::UnexpectedSeal { .. } => ("unexpected_seal", 52),
            Self::MetadataRoom { .. } => ("metadata_room", 53),
            Self::WeightStream { .. } => ("weight_stream", 54),
            Self::Io(_) => ("io", 55),
            Self::Cubin { .. } => ("cubin", 56),
            Self::CubinArch { .. } => ("cubin_arch", 57),
            Self::Plan(errors) => errors.first().kind.identity(),
        }
    }
}
