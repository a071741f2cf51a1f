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
fn a_file_where_the_copy_would_lie_stays_as_it_is() {
    let folder = bundle();
    let taken = folder.path().join("b.oxb.reproduced");
    fs::write(&taken, "mine").expect("writable");
    let output = oxide(folder.path(), &["reproduce", "b.oxb"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(&taken).expect("still there"), "mine");
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 2);
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

/// Reproduces the bundle with its bytes changed; the exit code and what was said.
fn reproduce_changed(folder: &Path, change: impl Fn(&mut Vec<u8>)) -> (Option<i32>, String) {
    let mut bytes = fs::read(folder.join("b.oxb")).expect("readable");
    change(&mut bytes);
    fs::write(folder.join("changed.oxb"), bytes).expect("writable");
    let output = oxide(folder, &["reproduce", "changed.oxb"]);
    assert!(output.stdout.is_empty(), "{}", stdout(&output));
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn damage_that_the_seal_does_not_show_is_not_called_equal() {
    let folder = bundle();
    let (code, errors) = reproduce_changed(folder.path(), |bytes| {
        let place = bytes.len() - 20;
        bytes[place] ^= 1;
    });
    assert!(code == Some(51) && errors.contains("WDAT"), "{code:?} {errors}");
    let (code, errors) = reproduce_changed(folder.path(), |bytes| bytes.extend(b"junk"));
    assert!(code == Some(51) && errors.contains("4 bytes"), "{code:?} {errors}");
    let (code, errors) = reproduce_changed(folder.path(), |bytes| bytes.truncate(bytes.len() - 1));
    assert!(code == Some(51) && errors.contains("truncated"), "{code:?} {errors}");
}

#[test]
fn a_ghost_has_nothing_to_be_made_again_from() {
    let folder = bundle();
    let bundle = fs::read(folder.path().join("b.oxb")).expect("readable");
    let bundle = oxide_bundle::Bundle::parse(std::sync::Arc::new(bundle)).expect("a bundle");
    let contents = oxide_bundle::Contents {
        manifest: bundle.manifest().clone(),
        plan: bundle.plan().raw().clone(),
        artifacts: Vec::new(),
        driver_min: 0,
        tokenizer_json: bundle.tokenizer_json().to_vec(),
        template: bundle.template().clone(),
        golden: bundle.golden().clone(),
        provenance: bundle.provenance().clone(),
        licences: bundle.licences().to_owned(),
    };
    let (bytes, _) = oxide_bundle::container::seal_ghost(contents).expect("a ghost");
    fs::write(folder.path().join("ghost.oxb"), bytes).expect("written");
    let output = oxide(folder.path(), &["reproduce", "ghost.oxb"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(51) && errors.contains("is a ghost"), "{errors}");
}

#[test]
fn no_input_is_written_over() {
    let folder = bundle();
    let path = folder.path().join("b.oxb");
    let before = fs::read(&path).expect("readable");
    std::os::unix::fs::symlink("b.oxb", folder.path().join("link.oxb")).expect("linked");
    fs::hard_link(&path, folder.path().join("hard.oxb")).expect("linked");
    for name in ["b.oxb", "./b.oxb", "link.oxb", "hard.oxb"] {
        let output = oxide(folder.path(), &["reproduce", "b.oxb", "-o", name]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && errors.contains("would replace the input"), "{name}: {errors}");
    }
    assert!(fs::read(&path).expect("readable") == before);
    let model = other_checkpoint(folder.path());
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../profiles/oxide-tiny.toml"), folder.path().join("mine.toml"))
        .expect("a profile");
    let weights = fs::read(model.join("model.safetensors")).expect("readable");
    for args in [
        ["oxide-tiny", "--target", "cpu", "--no-golden", "--model", "model", "-o", "model/model.safetensors"],
        ["mine.toml", "--target", "cpu", "--no-golden", "--model", "model", "-o", "mine.toml"],
    ] {
        let output = oxide(folder.path(), &args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && errors.contains("would replace the input"), "{args:?}: {errors}");
    }
    assert!(fs::read(model.join("model.safetensors")).expect("readable") == weights);
}
