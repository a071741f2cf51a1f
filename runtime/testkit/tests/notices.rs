//! `THIRD_PARTY_NOTICES.md` is what the dependency tree of the shipped binaries says, licence texts included.
//! `OXIDE_BLESS=1` rewrites it.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SHIPPED: [&str; 3] = ["oxide-compile", "oxide-run", "oxide-lab"];

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository root exists")
}

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(repo())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Ids of all packages that end up in the shipped binaries (dev and build-only edges left out).
fn shipped(metadata: &Value) -> BTreeSet<String> {
    let nodes: BTreeMap<&str, &Value> =
        metadata["resolve"]["nodes"].as_array().expect("nodes").iter().map(|node| (text(node, "id"), node)).collect();
    let mut todo: Vec<String> = metadata["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .filter(|package| SHIPPED.contains(&text(package, "name")) && package["source"].is_null())
        .map(|package| text(package, "id").to_owned())
        .collect();
    let mut seen = BTreeSet::new();
    while let Some(id) = todo.pop() {
        if !seen.insert(id.clone()) {
            continue;
        }
        for dep in nodes[id.as_str()]["deps"].as_array().expect("deps") {
            let normal = dep["dep_kinds"].as_array().expect("dep_kinds").iter().any(|kind| kind["kind"].is_null());
            if normal {
                todo.push(text(dep, "pkg").to_owned());
            }
        }
    }
    seen
}

/// Licence files at the root of a package, by file name.
fn licence_files(manifest: &str) -> Vec<(String, String)> {
    let folder = Path::new(manifest).parent().expect("a manifest has a folder");
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("the package's source is there") {
        let path = entry.expect("readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let upper = name.to_uppercase();
        if path.is_file() && ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"].iter().any(|word| upper.starts_with(word)) {
            let body = fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
            found.push((name, body.trim_end().to_owned()));
        }
    }
    found.sort();
    found
}

fn render(metadata: &Value) -> String {
    let ids = shipped(metadata);
    let mut rows = Vec::new();
    for package in metadata["packages"].as_array().expect("packages") {
        if ids.contains(text(package, "id")) && !package["source"].is_null() {
            rows.push((text(package, "name"), text(package, "version"), text(package, "license"), text(package, "manifest_path")));
        }
    }
    rows.sort();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut out = String::from(
        "# Third-party notices\n\nThe binaries contain these packages. Generated from the dependency tree; a test keeps it true.\n\n",
    );
    out += "| package | version | licence |\n|---|---|---|\n";
    for (name, version, licence, manifest) in &rows {
        let _ = writeln!(out, "| {name} | {version} | {licence} |");
        for (file, body) in licence_files(manifest) {
            texts.entry(body).or_default().push(format!("{name} {version} ({file})"));
        }
    }
    out += "\n# Licence texts\n";
    let mut blocks: Vec<(Vec<String>, String)> = texts.into_iter().map(|(body, users)| (users, body)).collect();
    blocks.sort();
    for (users, body) in blocks {
        let _ = write!(out, "\n## {}\n\n```text\n{}\n```\n", users.join(", "), body.replace("```", "'''"));
    }
    out
}

#[test]
fn notices_match_the_dependency_tree() {
    let wanted = render(&metadata());
    let path = repo().join("THIRD_PARTY_NOTICES.md");
    if std::env::var_os("OXIDE_BLESS").is_some() {
        fs::write(&path, &wanted).expect("writable");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "THIRD_PARTY_NOTICES.md is stale; run `just bless`");
}
