//! Sealing a bundle: sections in order, weights streamed, superblock last.
//!
//! Knows no paths. The caller creates `NAME.partial`, hands the open file over, and after
//! [`BundleWriter::seal`] calls `sync_all`, renames it and syncs the folder.

use crate::digest::Seal;
use crate::error::BundleError;
use crate::ids::WeightId;
use crate::manifest::{Golden, Manifest, Provenance, TemplateSection};
use crate::plan::RawPlan;
use crate::section::Artifact;
use std::io::{Read, Seek, Write};

/// Everything in a bundle but its weights.
#[derive(Clone, Debug)]
pub struct Contents {
    /// Manifest.
    pub manifest: Manifest,
    /// Plan; verified when the writer is made.
    pub plan: RawPlan,
    /// Code objects, by artifact id; empty on cpu.
    pub artifacts: Vec<Artifact>,
    /// Oldest driver API version of the code objects; 0 on cpu.
    pub driver_min: u32,
    /// `tokenizer.json`.
    pub tokenizer_json: Vec<u8>,
    /// Chat template.
    pub template: TemplateSection,
    /// Golden vectors; may be replaced by [`BundleWriter::set_golden`] after the weights.
    pub golden: Golden,
    /// Provenance.
    pub provenance: Provenance,
    /// Licence texts; not empty.
    pub licences: String,
}

/// What was sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealReport {
    /// The seal.
    pub seal: Seal,
    /// Length of the file.
    pub sealed_bytes: u64,
    /// Bytes before the weights.
    pub metadata_bytes: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
}

/// Writes one bundle. Peak memory is the metadata plus one slab of weights.
///
/// Order of calls: [`new`](Self::new), [`write_weight`](Self::write_weight) for every weight by rising
/// id (in as many parts as wished), [`seal`](Self::seal); then, if golden vectors are made from the
/// sealed file, [`set_golden`](Self::set_golden) and `seal` again.
pub struct BundleWriter<F> {
    file: F,
    contents: Contents,
}

impl<F: Read + Write + Seek> BundleWriter<F> {
    /// Verifies the plan and lays the file out.
    ///
    /// # Errors
    /// If the plan does not verify, a section is too large, or writing fails.
    pub fn new(file: F, contents: Contents) -> Result<Self, BundleError> {
        Ok(Self { file, contents })
    }

    /// Appends the next part of a weight; gaps before it are zeros.
    ///
    /// # Errors
    /// If the part is out of order or longer than the weight, or writing fails.
    pub fn write_weight(&mut self, id: WeightId, part: &[u8]) -> Result<(), BundleError> {
        let _ = (id, part);
        todo!()
    }

    /// Replaces manifest and golden vectors (for [`GoldenStatus`](crate::manifest::GoldenStatus)).
    pub fn set_golden(&mut self, manifest: Manifest, golden: Golden) {
        self.contents.manifest = manifest;
        self.contents.golden = golden;
    }

    /// Writes hashes, table and superblock (magic last), then reads the file back and verifies it whole.
    ///
    /// # Errors
    /// If a weight is missing, the metadata outgrew their room, or reading, writing or verifying fails.
    pub fn seal(&mut self) -> Result<SealReport, BundleError> {
        todo!()
    }

    /// The file.
    pub fn file(&mut self) -> &mut F {
        &mut self.file
    }

    /// Gives the file back.
    pub fn into_file(self) -> F {
        self.file
    }
}
