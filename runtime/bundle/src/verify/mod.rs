//! The only door from [`RawPlan`] to [`Plan`].
//!
//! Collects every error with its place. Believes nothing that it can recompute: sizes come from
//! contracts, liveness from the steps, totals from the tables. Counts and dimensions are bounded first;
//! arithmetic after that cannot overflow.

mod entries;
mod error;
mod liveness;
mod roles;
mod tables;

pub use error::{Place, PlanError, PlanErrorKind, PlanErrors};

use crate::ids::KernelId;
use crate::manifest::Manifest;
use crate::plan::{BatchClass, Bindings, Plan, RawPlan};

impl Plan {
    /// Verifies a decoded plan against its manifest.
    ///
    /// # Errors
    /// Every error found (at most 1000), in order of place.
    pub fn verify(raw: RawPlan, manifest: &Manifest) -> Result<Self, PlanErrors> {
        let mut report = Report::default();
        tables::check_counts(&raw, &mut report);
        if report.errors.is_empty() {
            tables::check(&raw, manifest, &mut report);
            entries::check(&raw, manifest, &mut report);
            liveness::check(&raw, &mut report);
        }
        match PlanErrors::from_list(report.errors) {
            Some(errors) => Err(errors),
            None => Ok(Self { raw }),
        }
    }

    /// Checks that every kernel's code object is among the `artifact_count` sealed ones.
    ///
    /// # Errors
    /// All that are missing.
    pub fn check_artifacts(&self, artifact_count: usize) -> Result<(), PlanErrors> {
        let missing = (0..).zip(&self.raw.kernels).filter_map(|(index, kernel)| {
            let code = kernel.code.as_ref().filter(|code| code.artifact.index() >= artifact_count)?;
            let message = format!("kernel {} names code object {}, the bundle has {artifact_count}", kernel.contract, code.artifact);
            Some(PlanError { place: Place::Row(KernelId(index).to_string()), kind: PlanErrorKind::MissingArtifact, message })
        });
        PlanErrors::from_list(missing.collect()).map_or(Ok(()), Err)
    }
}

/// Errors collected at most.
const ERRORS_MAX: usize = 1000;

/// Collects errors.
#[derive(Default)]
struct Report {
    errors: Vec<PlanError>,
}

impl Report {
    fn add(&mut self, place: Place, kind: PlanErrorKind, message: String) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(PlanError { place, kind, message });
        }
    }

    /// Adds an error unless `holds`. The message is made only then.
    fn require(&mut self, holds: bool, place: impl FnOnce() -> Place, kind: PlanErrorKind, message: impl FnOnce() -> String) {
        if !holds {
            self.add(place(), kind, message());
        }
    }
}

/// The symbols at the bounds of a class. KV pages do not bound buffers; grids use the manifest's pool.
fn bindings(class: BatchClass, kv_pages: u32) -> Bindings {
    Bindings { tokens: class.tokens_max(), seqs: class.seqs_max(), rows: class.seqs_max(), kv_pages }
}
