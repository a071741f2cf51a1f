//! Rules of the repository that no compiler checks.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which of our packages each of our packages may use (dev edges are free).
const EDGES: [(&str, &[&str]); 7] = [
    ("oxide-bundle", &[]),
    ("oxide-text", &[]),
    ("oxide-runtime", &["oxide-bundle"]),
    ("oxide-testkit", &[]),
    ("oxide-compile", &["oxide-bundle", "oxide-runtime", "oxide-text"]),
    ("oxide-run", &["oxide-bundle", "oxide-runtime", "oxide-text"]),
    ("oxide-lab", &["oxide-bundle", "oxide-compile", "oxide-runtime", "oxide-text"]),
];

/// Foreign packages that a package must never use.
const FORBIDDEN: [(&str, &[&str]); 4] = [
    ("oxide-bundle", &["tokio", "axum", "petgraph", "cudarc", "tokenizers", "minijinja"]),
    ("oxide-runtime", &["axum", "petgraph", "tokenizers", "minijinja", "serde_json"]),
    ("oxide-compile", &["cudarc", "axum", "tokio"]),
    ("oxide-run", &["cudarc", "petgraph", "memmap2"]),
];

/// Places whose Rust files may hold `unsafe`.
const UNSAFE_ALLOWED: [&str; 4] =
    ["runtime/src/mapping", "runtime/src/device/cuda", "runtime/src/device/cpu", "runtime/testkit/examples/fake_cuda/raw.rs"];

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository root exists")
}

fn tracked(suffix: &str) -> Vec<PathBuf> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(repo()).output().expect("git runs");
    let list = String::from_utf8(output.stdout).expect("paths are UTF-8");
    list.split('\0').filter(|path| path.ends_with(suffix)).map(PathBuf::from).filter(|path| repo().join(path).exists()).collect()
}

fn read(path: &Path) -> String {
    fs::read_to_string(repo().join(path)).expect("tracked files are readable")
}

fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(repo())
        .output()
        .expect("cargo runs");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let mut found = BTreeMap::new();
    for package in metadata["packages"].as_array().expect("packages") {
        let normal = package["dependencies"].as_array().expect("dependencies").iter().filter(|dep| dep["kind"].is_null());
        let names = normal.map(|dep| dep["name"].as_str().expect("name").to_owned()).collect();
        found.insert(package["name"].as_str().expect("name").to_owned(), names);
    }
    found
}

#[test]
fn packages_use_only_what_the_design_allows() {
    let found = dependencies();
    let mut wrong = Vec::new();
    for (name, allowed) in EDGES {
        for dep in found[name].iter().filter(|dep| dep.starts_with("oxide-") && !allowed.contains(&dep.as_str())) {
            wrong.push(format!("{name} must not use {dep}"));
        }
    }
    for (name, banned) in FORBIDDEN {
        for dep in found[name].iter().filter(|dep| banned.contains(&dep.as_str())) {
            wrong.push(format!("{name} must not use {dep}"));
        }
    }
    assert_eq!(found.len(), EDGES.len(), "a package is missing from the table of edges");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_compiler_meets_the_runtime_only_in_its_golden_step() {
    let sources = tracked(".rs").into_iter().filter(|path| path.starts_with("compiler/src"));
    let wrong: Vec<_> = sources.filter(|path| !path.to_string_lossy().contains("golden") && read(path).contains("oxide_runtime")).collect();
    assert!(wrong.is_empty(), "the runtime is used outside `golden`: {wrong:?}");
}

#[test]
fn every_module_says_what_it_owns() {
    let sources = tracked(".rs").into_iter().filter(|path| path.to_string_lossy().contains("src/"));
    let bare: Vec<_> = sources.filter(|path| !read(path).starts_with("//!")).collect();
    assert!(bare.is_empty(), "modules without `//!`: {bare:?}");
}

#[test]
fn unsafe_stays_in_its_rooms() {
    let mut wrong = Vec::new();
    for path in tracked(".rs") {
        let name = path.to_string_lossy().into_owned();
        if UNSAFE_ALLOWED.iter().any(|room| name.starts_with(room)) || name.contains("/tests/") {
            continue;
        }
        let body = read(&path);
        let mut code = body.lines().filter(|line| !line.trim_start().starts_with("//"));
        if code.any(|line| line.contains("unsafe {") || line.contains("unsafe fn") || line.contains("unsafe impl")) {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "unsafe outside its rooms: {wrong:?}");
}

#[test]
fn links_in_documents_lead_somewhere() {
    let mut broken = Vec::new();
    for path in tracked(".md").into_iter().filter(|path| path != Path::new("THIRD_PARTY_NOTICES.md")) {
        let folder = repo().join(path.parent().expect("a file has a folder"));
        for link in read(&path).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_top_level_is_what_the_owner_fixed() {
    let wanted = ["artifacts", "compiler", "docs", "kernels", "profiles", "runtime", "server"];
    for path in tracked("").iter().filter(|path| path.components().count() > 1) {
        let first = path.components().next().map(|part| part.as_os_str().to_string_lossy().into_owned()).unwrap_or_default();
        assert!(first.starts_with('.') || wanted.contains(&first.as_str()), "unexpected top-level folder {first}");
    }
}
