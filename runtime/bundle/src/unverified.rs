//! Plans that no verifier saw, for scripted devices in tests. Never compiled into the product.

use crate::plan::{Plan, RawPlan};

impl Plan {
    /// Believes `raw`. What executes such a plan must not rely on anything that the verifier promises.
    pub fn unverified(raw: RawPlan) -> Self {
        Self { raw }
    }
}
