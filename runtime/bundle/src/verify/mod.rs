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

use crate::artifact::ArtifactManifest;
use crate::ids::KernelId;
use crate::manifest::Manifest;
use crate::plan::{BatchClass, Bindings, KernelCode, Plan, RawPlan};

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

    /// Checks that every kernel's code object is sealed and is made for the kernel's contract.
    ///
    /// # Errors
    /// All that are missing or of another contract.
    pub fn check_artifacts(&self, manifests: &[&ArtifactManifest]) -> Result<(), PlanErrors> {
        let mut report = Report::default();
        for (index, kernel) in (0..).zip(&self.raw.kernels) {
            let Some(KernelCode { artifact, symbol }) = &kernel.code else { continue };
            let place = || Place::Row(KernelId(index).to_string());
            match manifests.get(artifact.index()) {
                None => {
                    let message = format!("{} names code object {artifact}, the bundle has {}", kernel.contract, manifests.len());
                    report.add(place(), PlanErrorKind::MissingArtifact, message);
                }
                Some(manifest) => report.require(
                    manifest.contract == kernel.contract && manifest.symbol == *symbol,
                    place,
                    PlanErrorKind::BadKernel,
                    || {
                        format!(
                            "{} runs {symbol}, code object {artifact} has {} for {}",
                            kernel.contract, manifest.symbol, manifest.contract
                        )
                    },
                ),
            }
        }
        PlanErrors::from_list(report.errors).map_or(Ok(()), Err)
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
