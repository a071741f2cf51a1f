//! Every committed sm90 artifact is what its manifest and the lock say: no GPU needed.

use oxide_bundle::artifact::{ARTIFACT_FORMAT, ArtifactManifest};
use oxide_bundle::cubin;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What the repository may spend on artifacts.
const TOTAL_BYTES_MAX: u64 = 20 << 20;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../artifacts/sm90")
}

fn manifests() -> Vec<(PathBuf, ArtifactManifest)> {
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| {
            let manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (path, manifest)
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

#[test]
fn every_cubin_is_what_its_manifest_says() {
    let mut wrong = Vec::new();
    let found = manifests();
    assert!(!found.is_empty());
    for (path, manifest) in &found {
        assert_eq!(manifest.format, ARTIFACT_FORMAT);
        assert_eq!(path.file_stem().unwrap().to_str(), Some(manifest.sha256.as_str()), "a manifest is named by its cubin's hash");
        if let Err(error) = cubin::check(manifest, &fs::read(path.with_extension("cubin")).unwrap()) {
            wrong.push(error.to_string());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn names_are_unique_and_the_lock_lists_exactly_these() {
    let found: BTreeMap<String, String> = manifests().into_iter().map(|(_, manifest)| (manifest.name, manifest.sha256)).collect();
    assert_eq!(found.len(), manifests().len(), "two artifacts share a name");
    let lock: serde_json::Value = serde_json::from_slice(&fs::read(folder().join("kernels.lock")).unwrap()).unwrap();
    let listed: BTreeMap<String, String> = lock["artifacts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["name"].as_str().unwrap().to_owned(), row["sha256"].as_str().unwrap().to_owned()))
        .collect();
    assert_eq!(listed, found);
}

#[test]
fn the_folder_holds_nothing_else_and_stays_small() {
    let known: Vec<String> = manifests().into_iter().map(|(_, manifest)| manifest.sha256).collect();
    let mut total = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        total += fs::metadata(&path).unwrap().len();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        assert!(stem == "kernels" || known.contains(&stem), "{} belongs to no manifest", path.display());
    }
    assert!(total < TOTAL_BYTES_MAX, "{total} bytes of artifacts");
}

#[test]
fn a_changed_byte_another_architecture_and_a_cut_are_refused() {
    let (path, manifest) = manifests().swap_remove(0);
    let good = fs::read(path.with_extension("cubin")).unwrap();
    let refused = |bytes: &[u8]| cubin::check(&manifest, bytes).unwrap_err().to_string();
    let mut changed = good.clone();
    *changed.last_mut().unwrap() ^= 1;
    assert!(refused(&changed).contains("SHA-256"));
    let mut other = good.clone();
    other[49] = 80;
    assert!(refused(&other).contains("architecture is sm_80a"));
    for length in [0, 4, 63, 64, good.len() / 2, good.len() - 1] {
        refused(&good[..length]);
    }
}
