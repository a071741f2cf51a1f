//! `oxide-compile reproduce`: the recipe in a bundle makes the same bundle, and what differs is named.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn oxide(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxide-compile"));
    command.args(args).current_dir(folder).env_clear().env("HOME", folder).output().expect("runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// A folder with a bundle made from other options than the profile's.
fn bundle() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let args = ["oxide-tiny", "--target", "cpu", "-o", "b.oxb", "--no-golden", "--max-context", "512", "--max-seqs", "4"];
    let output = oxide(folder.path(), &args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

/// The shipped checkpoint with other sampling defaults.
fn other_checkpoint(folder: &Path) -> PathBuf {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../profiles/oxide-tiny");
    let copy = folder.join("model");
    fs::create_dir(&copy).expect("a folder");
    for file in fs::read_dir(shipped).expect("shipped").map(|file| file.expect("readable")) {
        fs::copy(file.path(), copy.join(file.file_name())).expect("copied");
    }
    fs::write(copy.join("generation_config.json"), r#"{"do_sample": true, "temperature": 0.5}"#).expect("written");
    copy
}

#[test]
fn the_recipe_makes_the_same_bytes_and_leaves_nothing_behind() {
    let folder = bundle();
    let output = oxide(folder.path(), &["reproduce", "b.oxb"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout(&output).starts_with("reproduced: every byte is equal\nseal     "), "{}", stdout(&output));
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 1);
}

#[test]
fn another_checkpoint_is_named_by_section_and_file() {
    let folder = bundle();
    let model = other_checkpoint(folder.path());
    let output = oxide(folder.path(), &["reproduce", "b.oxb", "--model", model.to_str().expect("UTF-8"), "--json", "-o", "again.oxb"]);
    assert_eq!(output.status.code(), Some(50));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&report["reproduced"], &report["first_difference"]), (&false.into(), &"MANI".into()));
    assert_eq!(report["inputs"], serde_json::json!(["generation_config.json"]));
    assert_eq!(report["sections"], serde_json::json!(["HASH", "MANI", "PROV"]));
    assert!(folder.path().join("again.oxb").exists(), "kept with -o");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("section MANI is the first that differs"), "{errors}");
}

#[test]
fn a_damaged_bundle_has_no_recipe() {
    let folder = bundle();
    let path = folder.path().join("b.oxb");
    let mut bytes = fs::read(&path).expect("readable");
    bytes[5000] ^= 1;
    fs::write(&path, bytes).expect("writable");
    let output = oxide(folder.path(), &["reproduce", "b.oxb"]);
    assert_eq!(output.status.code(), Some(51));
    assert_eq!(oxide(folder.path(), &["reproduce", "missing.oxb"]).status.code(), Some(51));
}
