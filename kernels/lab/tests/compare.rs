//! `oxide-lab compare` from outside: the shipped model equals its reference, and a difference is named.

use oxide_bundle::manifest::{GoldenStatus, Target};
use oxide_compile::hub::Cache;
use oxide_compile::profile::Profile;
use oxide_compile::progress::Silent;
use oxide_compile::{Request, compile};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

fn profile_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../profiles/oxide-tiny")
}

/// The shipped model's bundle, compiled once.
fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = BUNDLE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let output = folder.path().join("tiny.oxb");
        let request = Request {
            profile: Profile::load("oxide-tiny").expect("shipped"),
            target: Target::Cpu,
            model: Some(profile_folder()),
            output: output.clone(),
            context_max: None,
            seqs_max: None,
            golden: GoldenStatus::Unproven,
            artifacts: Some("nowhere".into()),
            cache: Cache::at("nowhere"),
        };
        compile(&request, &mut Silent).expect("compiles");
        (folder, output)
    });
    path
}

/// The shortest prompts of the reference, changed by `change`.
fn reference(folder: &TempDir, change: impl FnOnce(&mut Vec<Value>)) -> PathBuf {
    let text = std::fs::read_to_string(profile_folder().join("reference.json")).expect("shipped");
    let whole: Value = serde_json::from_str(&text).expect("JSON");
    let mut prompts: Vec<Value> = whole["prompts"].as_array().expect("prompts").iter().take(3).cloned().collect();
    change(&mut prompts);
    let path = folder.path().join("reference.json");
    std::fs::write(&path, json!({ "prompts": prompts }).to_string()).expect("writes");
    path
}

fn compare(reference: &Path, args: &[&str]) -> Output {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_oxide-lab"));
    lab.arg("compare").arg(bundle()).arg(reference).args(args).output().expect("runs")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_shipped_model_equals_its_reference() {
    let folder = tempfile::tempdir().expect("a folder");
    let report = folder.path().join("report.json");
    let path = profile_folder().join("reference.json");
    let output = compare(&path, &["--logits", "--batch", "16", "--json", report.to_str().expect("UTF-8")]);
    assert!(output.status.success(), "{}", text(&output));
    let report: Value = serde_json::from_str(&std::fs::read_to_string(report).expect("written")).expect("JSON");
    let prompts = report["prompts"].as_array().expect("prompts");
    assert_eq!(prompts.len(), 12);
    let number = |prompt: &Value, key: &str| prompt[key].as_u64().expect("a number");
    assert!(prompts.iter().map(|prompt| number(prompt, "demanded")).sum::<u64>() > 300, "{report}");
    assert!(prompts.iter().all(|prompt| number(prompt, "logprobs") > 0 && number(prompt, "cached_tokens") > 0), "{report}");
}

#[test]
fn a_wrong_id_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = reference(&folder, |prompts| {
        prompts[1]["greedy_f32"][0] = json!(7);
        prompts[1]["gap_f32"][0] = json!(5.0);
    });
    let output = compare(&path, &["--batch", "4"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("id 0 is") && text(&output).contains("transformers has 7"), "{}", text(&output));
    assert!(text(&output).contains("1 of 3 prompts differ"), "{}", text(&output));
}

#[test]
fn a_wrong_id_behind_a_near_tie_is_not_demanded() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = reference(&folder, |prompts| {
        prompts[0]["greedy_f32"][1] = json!(7);
        prompts[0]["gap_f32"][1] = json!(0.1);
    });
    assert!(compare(&path, &["--batch", "4", "--gap", "0.25"]).status.success());
    assert_eq!(compare(&path, &["--batch", "4", "--gap", "0.05"]).status.code(), Some(1));
}

#[test]
fn a_wrong_log_probability_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = reference(&folder, |prompts| prompts[2]["first_logits_f32_stats"]["logsumexp"] = json!(99.0));
    assert!(compare(&path, &["--batch", "4"]).status.success(), "log-probabilities are compared on demand");
    let output = compare(&path, &["--batch", "4", "--logits"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("log-probability of id"), "{}", text(&output));
}

#[test]
fn a_reference_without_log_probabilities_cannot_prove_any() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = reference(&folder, |prompts| {
        for prompt in prompts {
            let fields = prompt.as_object_mut().expect("an object");
            fields.remove("first_top5_f32");
        }
    });
    let output = compare(&path, &["--batch", "4", "--logits"]);
    assert!(!output.status.success() && text(&output).contains("no log-probabilities"), "{}", text(&output));
}
