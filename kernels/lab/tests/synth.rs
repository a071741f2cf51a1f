//! Synthetic checkpoints: the same bytes from a seed, and a model that the compiler takes.

use oxide_bundle::manifest::{GoldenStatus, Target};
use oxide_compile::hub::Cache;
use oxide_compile::profile::{Profile, builtin};
use oxide_compile::progress::Silent;
use oxide_compile::{Request, compile};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// oxide-tiny's shape under a name of its own, so that it is not compared with oxide-tiny's reference.
fn profile(folder: &Path) -> PathBuf {
    let text = builtin("oxide-tiny").expect("shipped").toml.replace("name = \"oxide-tiny\"", "name = \"synthetic\"");
    let path = folder.join("synthetic.toml");
    fs::write(&path, text).expect("writes");
    path
}

fn synth(profile: &Path, out: &Path, threads: &str, more: &[&str]) {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_oxide-lab"));
    let output = lab.arg("synth").arg(profile).arg("--out").arg(out).args(more).env("RAYON_NUM_THREADS", threads).output();
    let output = output.expect("runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn weights(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("model.safetensors")).expect("readable")
}

#[test]
fn a_seed_gives_the_same_bytes_whatever_the_threads() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = profile(folder.path());
    let [a, b, c] = ["a", "b", "c"].map(|name| folder.path().join(name));
    synth(&profile, &a, "1", &["--seed", "5"]);
    synth(&profile, &b, "3", &["--seed", "5"]);
    synth(&profile, &c, "3", &["--seed", "6"]);
    assert!(weights(&a) == weights(&b));
    assert!(weights(&a) != weights(&c));
}

#[test]
fn a_sharded_synthetic_checkpoint_compiles_and_rarely_ties() {
    let folder = tempfile::tempdir().expect("a folder");
    let (profile, model) = (profile(folder.path()), folder.path().join("model"));
    synth(&profile, &model, "2", &["--seed", "1", "--shards", "3"]);
    assert!(model.join("model-00003-of-00003.safetensors").exists());
    let request = Request {
        profile: Profile::load(profile.to_str().expect("UTF-8")).expect("valid"),
        target: Target::Cpu,
        model: Some(model),
        output: folder.path().join("out.oxb"),
        context_max: None,
        seqs_max: None,
        golden: GoldenStatus::Proven,
        artifacts: Some("nowhere".into()),
        cache: Cache::at("nowhere"),
    };
    let report = compile(&request, &mut Silent).expect("compiles");
    assert!(!report.golden_reference && report.golden_prompts == 3);
    assert!(report.golden_ids >= 12, "only {} of 24 ids came before a near tie", report.golden_ids);
}
