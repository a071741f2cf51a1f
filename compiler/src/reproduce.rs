//! Making a bundle again from the recipe that is sealed in it, and naming what came out otherwise.
//!
//! The recipe is the profile's text and the flags that changed the result; checkpoint and sm90 artifacts come from
//! the caller. A bundle made by another release, or from another checkpoint, shows where it parts.

use crate::compile::{CompileError, Request, compile};
use crate::hub;
use crate::paths;
use crate::profile::{Profile, ProfileError};
use crate::progress::Progress;
use oxide_bundle::BundleError;
use oxide_bundle::container::layout::{FEATURE_GENERATED, SUPERBLOCK_BYTES};
use oxide_bundle::container::{Recipe, Section, SectionKind, check_header, read_recipe, verify_stream};
use oxide_bundle::manifest::{GoldenStatus, Target};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
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
    /// Whether every byte up to the trailer is the same.
    pub reproduced: bool,
    /// Bytes of signatures behind the sealed ones; no recipe makes them.
    pub trailer_bytes: u64,
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
    /// The weights were never a checkpoint's.
    #[error("bundle {path} is a ghost: its weights are generated and no recipe makes it; reproduce the original, and make its ghost again")]
    Ghost {
        /// The file.
        path: PathBuf,
    },
    /// The bundle made again is another one.
    #[error("not reproduced: section {section} is the first that differs")]
    Differs {
        /// The section.
        section: String,
    },
}

/// Makes a bundle again and compares every byte.
///
/// # Errors
/// If the bundle cannot be read, is damaged or a ghost, its recipe is not of this release, the output would replace
/// the bundle, or the compile fails.
pub fn reproduce(bundle: &Path, sources: &Sources, progress: &mut dyn Progress) -> Result<Reproduction, CompileError> {
    let named = |source: BundleError| ReproduceError::Bundle { path: bundle.to_owned(), source };
    if is_ghost(bundle).map_err(named)? {
        return Err(ReproduceError::Ghost { path: bundle.to_owned() }.into());
    }
    let original = read(bundle)?;
    File::open(bundle).map_err(BundleError::from).and_then(|mut file| verify_stream(&mut file)).map_err(named)?;
    let request = request(&original, bundle, sources)?;
    paths::refuse_overwriting(&request.output, [bundle])?;
    let made = compile(&request, progress).and_then(|_| Ok(compare(&original, bundle, &request.output)?));
    if sources.output.is_none() {
        // Best effort: it is not there if the compile failed.
        let _ = std::fs::remove_file(&request.output);
    }
    made
}

/// Whether the weights are generated when the bundle is loaded.
fn is_ghost(bundle: &Path) -> Result<bool, BundleError> {
    let mut header = Vec::new();
    File::open(bundle)?.take(SUPERBLOCK_BYTES as u64).read_to_end(&mut header)?;
    // What is no bundle, or cut short, is refused in full words by what reads it next.
    let superblock = header.first_chunk().and_then(|header| check_header(header).ok());
    Ok(superblock.is_some_and(|superblock| superblock.features_incompatible & FEATURE_GENERATED != 0))
}

/// The request that a recipe stands for.
///
/// # Errors
/// If the profile or an option is not of this release.
pub fn request(recipe: &Recipe, bundle: &Path, sources: &Sources) -> Result<Request, CompileError> {
    let provenance = &recipe.provenance;
    let parsed = Profile::parse("of the recipe", &provenance.profile_toml);
    let profile = parsed.map_err(|source| ReproduceError::Profile { compiler: provenance.compiler.clone(), source })?;
    let mut request = Request {
        profile,
        target: recipe.superblock.target.target,
        model: sources.model.clone(),
        output: sources.output.clone().unwrap_or_else(|| beside(bundle)),
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

/// A path beside the bundle where nothing is.
fn beside(bundle: &Path) -> PathBuf {
    let path = |number: u32| {
        let mut path = bundle.as_os_str().to_owned();
        path.push(".reproduced");
        if number > 0 {
            path.push(format!(".{number}"));
        }
        PathBuf::from(path)
    };
    (0..).map(path).find(|path| path.symlink_metadata().is_err()).unwrap_or_else(|| path(0))
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

fn compare(original: &Recipe, path: &Path, path_again: &Path) -> Result<Reproduction, ReproduceError> {
    let again = read(path_again)?;
    let mut sections = differing(&original.sections, &again.sections);
    let (seal, seal_again) = (original.superblock.seal(), again.superblock.seal());
    let sealed_bytes = original.superblock.sealed_bytes;
    let read_error = |path: &Path, error: io::Error| ReproduceError::Bundle { path: path.to_owned(), source: error.into() };
    if sections.is_empty() && seal == seal_again {
        // Equal hashes promise equal bytes; the promise is kept by reading them.
        let differs = first_difference(path, path_again, sealed_bytes).map_err(|error| read_error(path, error))?;
        sections.extend(differs.map(|offset| section_at(&original.sections, offset)));
    }
    let reproduced = sections.is_empty() && seal == seal_again;
    // Hashes follow from the other sections, and the superblock from all.
    let first = sections.iter().find(|name| **name != SectionKind::HASH.to_string()).or(sections.first()).cloned();
    let file_bytes = std::fs::metadata(path).map_err(|error| read_error(path, error))?.len();
    Ok(Reproduction {
        reproduced,
        trailer_bytes: file_bytes.saturating_sub(sealed_bytes),
        seal: seal.to_string(),
        seal_again: seal_again.to_string(),
        compilers: [&original.provenance, &again.provenance].map(|provenance| provenance.compiler.clone()),
        first_difference: (!reproduced).then(|| first.unwrap_or_else(|| SectionKind::HEAD.to_string())),
        sections,
        inputs: differing_inputs(&original.provenance.inputs, &again.provenance.inputs),
    })
}

/// Offset of the first of `length` bytes in which two files differ.
fn first_difference(left: &Path, right: &Path, length: u64) -> io::Result<Option<u64>> {
    let open = |path: &Path| Ok::<_, io::Error>(BufReader::with_capacity(1 << 20, File::open(path)?.take(length)));
    let (mut left, mut right) = (open(left)?, open(right)?);
    let mut offset = 0;
    loop {
        let (ours, theirs) = (left.fill_buf()?, right.fill_buf()?);
        let count = ours.len().min(theirs.len());
        let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        if same < count || (count == 0 && ours.len() != theirs.len()) {
            return Ok(Some(offset + same as u64));
        }
        if count == 0 {
            return Ok(None);
        }
        left.consume(count);
        right.consume(count);
        offset += count as u64;
    }
}

/// The section that an offset is in; what is in none is counted to the head.
fn section_at(sections: &[Section], offset: u64) -> String {
    let found = sections.iter().find(|section| (section.offset..section.end()).contains(&offset));
    found.map_or(SectionKind::HEAD, |section| section.kind).to_string()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_differs_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let (left, right) = (folder.path().join("left"), folder.path().join("right"));
        let bytes = vec![7; (1 << 20) + 100];
        std::fs::write(&left, &bytes).expect("written");
        let difference = |change: &dyn Fn(&mut Vec<u8>), length: usize| {
            let mut changed = bytes.clone();
            change(&mut changed);
            std::fs::write(&right, changed).expect("written");
            first_difference(&left, &right, length as u64).expect("readable")
        };
        let all = bytes.len();
        assert_eq!(difference(&|_| {}, all), None);
        assert_eq!(difference(&|bytes| bytes[(1 << 20) + 3] = 0, all), Some((1 << 20) + 3));
        assert_eq!(difference(&|bytes| bytes[50] = 0, 50), None, "beyond the length");
        assert_eq!(difference(&|bytes| bytes.truncate(60), all), Some(60));
    }
}
