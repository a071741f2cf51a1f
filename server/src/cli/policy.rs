//! What an operator allows to be served: a file of rules, checked before anything of a bundle runs.
//!
//! A rule that is absent demands nothing. All violations are told at once, each by the name of its rule.
//!
//! ```json
//! {"licences": ["MIT", "Apache-2.0"], "keys": ["release.pub"], "seals": ["…64 digits…"],
//!  "targets": ["sm90"], "profiles": ["qwen2.5-1.5b"], "golden": "proven"}
//! ```

use super::error::CliError;
use super::tools;
use crate::model::{LoadError, LoadOptions};
use crate::openai::fields::kind;
use crate::signing::PublicKey;
use oxide_bundle::manifest::GoldenStatus;
use oxide_bundle::{Bundle, Mode, Seal};
use oxide_runtime::open::{OpenOptions, open_bundle};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest policy file read, in bytes.
const POLICY_BYTES_MAX: u64 = 1 << 20;

/// Rules of a file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct RawPolicy {
    /// SPDX identifiers that the weights may have; an expression is allowed if its parts are.
    licences: Option<Vec<String>>,
    /// Files of public keys, relative to the policy; one of them must have signed.
    keys: Option<Vec<PathBuf>>,
    /// Seals, one of which the bundle must have.
    seals: Option<Vec<String>>,
    /// Targets by name.
    targets: Option<Vec<String>>,
    /// Profiles by name.
    profiles: Option<Vec<String>>,
    /// `proven` refuses a bundle whose golden vectors were not reproduced when it was sealed.
    golden: Option<GoldenRule>,
}

#[derive(Copy, Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum GoldenRule {
    Proven,
}

/// Rules, their keys and seals read.
pub(super) struct Policy {
    path: PathBuf,
    rules: RawPolicy,
    keys: Vec<PublicKey>,
    seals: Vec<Seal>,
}

impl Policy {
    /// Reads a policy and the keys that it names.
    ///
    /// # Errors
    /// If a file cannot be read, a rule is unknown, or none demands anything.
    pub(super) fn read(path: &Path) -> Result<Self, CliError> {
        let input = |reason: String| CliError::Input { path: path.display().to_string(), reason };
        let bytes = tools::read_bounded(path, POLICY_BYTES_MAX)?;
        if let Ok(other) = serde_json::from_slice::<Value>(&bytes)
            && !other.is_object()
        {
            return Err(input(format!("is no policy: it must be an object of rules, not {}", kind(&other))));
        }
        let rules: RawPolicy = serde_json::from_slice(&bytes).map_err(|error| input(format!("is no policy: {error}")))?;
        if rules == RawPolicy::default() {
            return Err(input("demands nothing; give at least one of licences, keys, seals, targets, profiles, golden".to_owned()));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let files: Vec<PathBuf> = rules.keys.iter().flatten().map(|key| folder.join(key)).collect();
        let seals = rules.seals.iter().flatten().map(|seal| seal.parse::<Seal>().map_err(|error| input(error.to_string())));
        let seals = seals.collect::<Result<_, _>>()?;
        Ok(Self { path: path.to_owned(), keys: tools::public_keys(&files)?, seals, rules })
    }

    /// Checks the bundle that would be loaded; what is loaded then must have the seal that was checked.
    ///
    /// # Errors
    /// [`CliError::Policy`] with every violation, or if the bundle is refused by itself.
    pub(super) fn enforce(&self, load: LoadOptions) -> Result<LoadOptions, CliError> {
        let options = OpenOptions { access: load.access, mode: Mode::Metadata, expect: load.expect };
        let bundle = open_bundle(&load.path, options).map_err(LoadError::from)?.bundle;
        self.check(&bundle, &load.path)?;
        Ok(LoadOptions { expect: Some(bundle.seal()), ..load })
    }

    /// Checks a bundle whose metadata is verified.
    ///
    /// # Errors
    /// [`CliError::Policy`] with every violation.
    pub(super) fn check(&self, bundle: &Bundle, path: &Path) -> Result<(), CliError> {
        let violations = self.violations(bundle, path);
        if violations.is_empty() {
            return Ok(());
        }
        let list: Vec<String> = violations.iter().map(|(rule, reason)| format!("\n  {rule}: {reason}")).collect();
        Err(CliError::Policy(format!("bundle {} violates the policy {}:{}", path.display(), self.path.display(), list.concat())))
    }

    fn violations(&self, bundle: &Bundle, path: &Path) -> Vec<(&'static str, String)> {
        let RawPolicy { licences, keys, seals, targets, profiles, golden } = &self.rules;
        let manifest = bundle.manifest();
        let licence = licences.as_deref().and_then(|allowed| licence_violation(tools::licence(bundle.licences()), allowed));
        let key = keys.as_ref().and_then(|_| tools::signer(bundle, path, None, &self.keys).err()).map(|error| error.to_string());
        let seal = bundle.seal();
        let seal = seals.as_ref().filter(|_| !self.seals.contains(&seal)).map(|_| format!("{seal} is not one of {}", self.seals.len()));
        let listed = |what: String, allowed: &Option<Vec<String>>| {
            let allowed = allowed.as_ref().filter(|allowed| !allowed.contains(&what))?;
            Some(format!("`{what}` is not allowed (allowed: {})", allowed.join(", ")))
        };
        let unproven = golden.filter(|GoldenRule::Proven| manifest.golden == GoldenStatus::Unproven);
        let unproven = unproven.map(|_| "the bundle was sealed with --no-golden".to_owned());
        let found = [
            ("licences", licence),
            ("keys", key),
            ("seals", seal),
            ("targets", listed(manifest.target.to_string(), targets)),
            ("profiles", listed(manifest.profile.clone(), profiles)),
            ("golden", unproven),
        ];
        found.into_iter().filter_map(|(rule, reason)| Some((rule, reason?))).collect()
    }
}

/// Why a licence is not allowed.
fn licence_violation(licence: Option<&str>, allowed: &[String]) -> Option<String> {
    match licence {
        None => Some("the bundle names no licence".to_owned()),
        Some(name) if is_allowed(name, allowed) => None,
        Some(name) => Some(format!("`{name}` is not allowed (allowed: {})", allowed.join(", "))),
    }
}

/// Whether an SPDX expression is satisfied: `OR` by one side, `AND` by both. One with parentheses has to be listed as it is.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let listed = |name: &str| allowed.iter().any(|known| known == name.trim());
    if listed(expression) {
        return true;
    }
    !expression.contains(['(', ')']) && expression.split(" OR ").any(|side| side.split(" AND ").all(listed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_allowed_by_their_parts() {
        let allowed = ["MIT".to_owned(), "Apache-2.0".to_owned(), "(ISC OR X) AND Y".to_owned()];
        for (expression, expected) in [
            ("MIT", true),
            ("GPL-3.0-only", false),
            ("GPL-3.0-only OR MIT", true),
            ("MIT AND GPL-3.0-only", false),
            ("MIT AND Apache-2.0", true),
            ("GPL-3.0-only AND MIT OR Apache-2.0", true),
            ("(MIT OR GPL-3.0-only) AND GPL-3.0-only", false),
            ("(ISC OR X) AND Y", true),
            ("Apache-2.0 WITH LLVM-exception", false),
        ] {
            assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
        }
        assert!(licence_violation(None, &allowed).is_some());
    }
}
