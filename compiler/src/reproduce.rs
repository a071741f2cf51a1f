//! Making a bundle again from the recipe that is sealed in it, and naming what came out otherwise.
//!
//! The recipe is the profile's text and the flags that changed the result; checkpoint and sm90 artifacts come from
//! the caller. A bundle made by another release, or from another checkpoint, shows where it parts.

use crate::compile::{CompileError, Request, compile};
use crate::hub;
use crate::profile::{Profile, ProfileError};
use crate::progress::Progress;
use oxide_bundle::BundleError;
use oxide_bundle::container::{Recipe, Section, SectionKind, read_recipe};
use oxide_bundle::manifest::{GoldenStatus, Target};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// What the caller adds to the recipe.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The checkpoint's folder; looked up in `cache` if `None`.
    pub model: Option<PathBuf>,
    /// Folder of sm90 artifacts; those built in if `None`.
    pub artifacts: Option<PathBuf>,
    /// Hugging Face cache.
    pub cache: hub::Cache,
    /// Where the bundle made again stays; beside the original and removed afterwards if `None`.
    pub output: Option<PathBuf>,
}

/// How the bundle made again compares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reproduction {
    /// Whether every byte is the same.
    pub reproduced: bool,
    /// Seal of the original.
    pub seal: String,
    /// Seal of the bundle made again.
    pub seal_again: String,
    /// Release that made the original, and this one.
    pub compilers: [String; 2],
    /// First section, in file order, that differs.
    pub first_difference: Option<String>,
    /// Every section that differs.
    pub sections: Vec<String>,
    /// Input files whose hash differs from the recipe's.
    pub inputs: Vec<String>,
}

/// Why a bundle cannot be made again.
#[derive(Debug, thiserror::Error)]
pub enum ReproduceError {
    /// The file cannot be read, or is no bundle.
    #[error("bundle {path}: {source}")]
    Bundle {
        /// The file.
        path: PathBuf,
        /// Why.
        source: BundleError,
    },
    /// The recipe's profile is of another release.
    #[error("the recipe was written by release {compiler} and is not one of this release: {source}; use release {compiler}")]
    Profile {
        /// The release that wrote it.
        compiler: String,
        /// What is wrong.
        source: ProfileError,
    },
    /// An option of the recipe that this release does not have.
    #[error("the recipe's option `{name}` is `{value}`, which this release does not know: use release {compiler}")]
    Option {
        /// The option.
        name: String,
        /// Its value.
        value: String,
        /// The release that wrote it.
        compiler: String,
    },
    /// The bundle made again is another one.
    #[error("not reproduced: section {section} is the first that differs")]
    Differs {
        /// The section.
        section: String,
    },
}

/// Makes a bundle again and compares.
///
/// # Errors
/// If the bundle cannot be read, its recipe is not of this release, or the compile fails.
pub fn reproduce(bundle: &Path, sources: &Sources, progress: &mut dyn Progress) -> Result<Reproduction, CompileError> {
    let original = read(bundle)?;
    let request = request(&original, bundle, sources)?;
    let made = compile(&request, progress).and_then(|_| Ok(read(&request.output)?));
    if sources.output.is_none() {
        // Best effort: it is not there if the compile failed.
        let _ = std::fs::remove_file(&request.output);
    }
    Ok(compare(&original, &made?))
}

/// The request that a recipe stands for.
///
/// # Errors
/// If the profile or an option is not of this release.
pub fn request(recipe: &Recipe, bundle: &Path, sources: &Sources) -> Result<Request, CompileError> {
    let provenance = &recipe.provenance;
    let parsed = Profile::parse("of the recipe", &provenance.profile_toml);
    let profile = parsed.map_err(|source| ReproduceError::Profile { compiler: provenance.compiler.clone(), source })?;
    let mut beside = bundle.as_os_str().to_owned();
    beside.push(".reproduced");
    let mut request = Request {
        profile,
        target: recipe.superblock.target.target,
        model: sources.model.clone(),
        output: sources.output.clone().unwrap_or_else(|| beside.into()),
        context_max: None,
        seqs_max: None,
        golden: GoldenStatus::Proven,
        artifacts: sources.artifacts.clone(),
        cache: sources.cache.clone(),
    };
    for (name, value) in &provenance.options {
        apply(&mut request, name, value).ok_or_else(|| ReproduceError::Option {
            name: name.clone(),
            value: value.clone(),
            compiler: provenance.compiler.clone(),
        })?;
    }
    Ok(request)
}

fn apply(request: &mut Request, name: &str, value: &str) -> Option<()> {
    match name {
        "max-context" => request.context_max = Some(value.parse().ok()?),
        "max-seqs" => request.seqs_max = Some(value.parse().ok()?),
        "no-golden" if value == "true" => request.golden = GoldenStatus::Unproven,
        "target" => request.target = [Target::Cpu, Target::Sm90].into_iter().find(|target| target.to_string() == value)?,
        _ => return None,
    }
    Some(())
}

fn read(path: &Path) -> Result<Recipe, ReproduceError> {
    let read = File::open(path).map_err(BundleError::from).and_then(|mut file| read_recipe(&mut file));
    read.map_err(|source| ReproduceError::Bundle { path: path.to_owned(), source })
}

fn compare(original: &Recipe, again: &Recipe) -> Reproduction {
    let sections = differing(&original.sections, &again.sections);
    let (seal, seal_again) = (original.superblock.seal(), again.superblock.seal());
    let reproduced = seal == seal_again;
    // Hashes follow from the other sections, and the superblock from all.
    let first = sections.iter().find(|name| **name != SectionKind::HASH.to_string()).or(sections.first()).cloned();
    Reproduction {
        reproduced,
        seal: seal.to_string(),
        seal_again: seal_again.to_string(),
        compilers: [&original.provenance, &again.provenance].map(|provenance| provenance.compiler.clone()),
        first_difference: (!reproduced).then(|| first.unwrap_or_else(|| SectionKind::HEAD.to_string())),
        sections,
        inputs: differing_inputs(&original.provenance.inputs, &again.provenance.inputs),
    }
}

/// Kinds of the sections that differ, in file order.
fn differing(original: &[Section], again: &[Section]) -> Vec<String> {
    let same = |left: &Section, right: &Section| (left.length, left.root) == (right.length, right.root);
    let other = |section: &Section, all: &[Section]| all.iter().find(|found| found.kind == section.kind).cloned();
    let changed = original.iter().filter(|section| !other(section, again).is_some_and(|found| same(section, &found)));
    let added = again.iter().filter(|section| other(section, original).is_none());
    changed.chain(added).map(|section| section.kind.to_string()).collect()
}

fn differing_inputs(original: &BTreeMap<String, String>, again: &BTreeMap<String, String>) -> Vec<String> {
    let names: BTreeSet<&String> = original.keys().chain(again.keys()).collect();
    names.into_iter().filter(|name| original.get(*name) != again.get(*name)).cloned().collect()
}
