//! Checkpoints: everything that does not fit the profile is refused, by name and all together.

use crate::support::{Model, Source, compile, request, small};
use oxide_compile::checkpoint::CheckpointError;
use oxide_compile::profile::Profile;
use oxide_compile::{CompileError, Report};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn compile_in(folder: &Path) -> Result<Report, CompileError> {
    compile_as(small(), folder)
}

fn compile_as(profile: Profile, folder: &Path) -> Result<Report, CompileError> {
    let made = compile(&request(profile, folder, &folder.join("out.oxb")));
    if made.is_err() {
        let left = fs::read_dir(folder).expect("readable").filter_map(Result::ok);
        let left: Vec<_> = left.filter(|entry| entry.file_name().to_string_lossy().contains("oxb")).collect();
        assert!(left.is_empty(), "a failed compile left {left:?}");
    }
    made
}

fn problems(made: Result<Report, CompileError>) -> Vec<String> {
    match made {
        Err(CompileError::Checkpoint(CheckpointError::Mismatch { problems, .. })) => problems,
        other => panic!("expected a mismatch, got {other:?}"),
    }
}

/// Compiles the small model with one config key changed; returns the problems.
fn with_config(key: &str, value: Value) -> Vec<String> {
    let folder = folder();
    let mut model = Model::of(&small());
    model.config.insert(key.to_owned(), value);
    model.write(folder.path());
    problems(compile_in(folder.path()))
}

#[test]
fn config_that_changes_numerics_is_refused_by_name() {
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0 });
    for (key, value) in [
        ("model_type", json!("llama")),
        ("hidden_act", json!("gelu")),
        ("use_sliding_window", json!(true)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("rope_scaling", json!({ "rope_type": "yarn", "factor": 4.0 })),
        ("rope_scaling", llama3),
        ("partial_rotary_factor", json!(0.5)),
        ("mlp_bias", json!(true)),
        ("attn_logit_softcapping", json!(50.0)),
        ("quantization_config", json!({ "quant_method": "awq" })),
        ("rope_interleaved", json!(true)),
        ("pretraining_tp", json!(2)),
        ("head_dim", json!(32)),
        ("num_hidden_layers", json!(3)),
        ("num_key_value_heads", json!(3)),
        ("rms_norm_eps", json!(1e-5)),
        ("rope_theta", json!(1e6)),
        ("tie_word_embeddings", json!(true)),
        ("max_position_embeddings", json!(64)),
    ] {
        let problems = with_config(key, value);
        assert!(problems.len() == 1 && problems[0].contains(key), "{key}: {problems:?}");
    }
}

#[test]
fn inert_config_is_accepted() {
    let folder = folder();
    let mut model = Model::of(&small());
    for (key, value) in [
        ("partial_rotary_factor", json!(1.0)),
        ("quantization_config", json!(null)),
        ("layer_types", json!(["full_attention", "full_attention"])),
        ("rope_scaling", json!({ "rope_type": "default" })),
        ("sliding_window", json!(4096)),
        ("transformers_version", json!("4.40.0")),
    ] {
        model.config.insert(key.to_owned(), value);
    }
    model.write(folder.path());
    compile_in(folder.path()).expect("compiles");
}

#[test]
fn llama_refuses_biases_and_sliding_windows() {
    let llama = Profile::parse("small", &crate::support::SMALL.replace("qwen2", "llama")).expect("valid");
    for (key, value) in [("attention_bias", json!(true)), ("sliding_window", json!(1024))] {
        let folder = folder();
        let mut model = Model::of(&llama);
        model.config.insert(key.to_owned(), value);
        model.write(folder.path());
        let problems = problems(compile_as(llama.clone(), folder.path()));
        assert!(problems.len() == 1 && problems[0].contains(key), "{problems:?}");
    }
}

#[test]
fn llama3_rope_scaling_must_agree_in_every_number() {
    let scaling = "\n[numerics.rope_scaling]\nfactor = 8.0\nlow_freq_factor = 1.0\nhigh_freq_factor = 4.0\noriginal_context = 64\n";
    let text = crate::support::SMALL.replace("qwen2", "llama").replace("\n[source]", &format!("{scaling}\n[source]"));
    let llama = Profile::parse("small", &text).expect("valid");
    let mut model = Model::of(&llama);
    let right = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let mut wrong = right.clone();
    wrong["factor"] = json!(32.0);
    let folder = folder();
    model.config.insert("rope_scaling".to_owned(), wrong);
    model.write(folder.path());
    let found = problems(compile_as(llama.clone(), folder.path()));
    assert_eq!(found, ["config.json: rope_scaling.factor is 32.0, the profile says 8"]);
    model.config.insert("rope_scaling".to_owned(), right);
    model.write(folder.path());
    compile_as(llama, folder.path()).expect("compiles");
}

#[test]
fn missing_extra_and_misshaped_tensors_are_listed_together() {
    let folder = folder();
    let mut model = Model::of(&small());
    model.tensors.remove("model.layers.1.mlp.up_proj.weight");
    model.tensors.remove("model.layers.0.self_attn.k_proj.bias");
    model.tensors.insert("model.layers.0.extra.weight".to_owned(), (vec![2], vec![0.0, 1.0]));
    model.tensors.insert("model.norm.weight".to_owned(), (vec![47], vec![1.0; 47]));
    model.config.insert("hidden_act".to_owned(), json!("relu"));
    model.write(folder.path());
    let found = problems(compile_in(folder.path())).join("\n");
    for expected in [
        "hidden_act is \"relu\"",
        "model.layers.1.mlp.up_proj.weight [80, 48] is missing",
        "model.layers.0.self_attn.k_proj.bias [16] is missing",
        "model.layers.0.extra.weight [2] is not part of the model",
        "model.norm.weight has shape [47], expected [48]",
    ] {
        assert!(found.contains(expected), "`{expected}` is not in:\n{found}");
    }
}

#[test]
fn a_missing_shard_is_an_error_of_its_own() {
    let folder = folder();
    Model::of(&small()).write_sharded(folder.path(), 3);
    fs::remove_file(folder.path().join("model-00002-of-00003.safetensors")).expect("removes");
    let error = compile_in(folder.path()).expect_err("refused");
    assert_eq!(error.exit_code(), 11);
    assert!(error.to_string().contains("1 of 3 shards are missing: model-00002-of-00003.safetensors"), "{error}");
}

#[test]
fn truncated_and_foreign_files_are_refused() {
    let folder = folder();
    let model = Model::of(&small());
    model.write(folder.path());
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).expect("readable");
    for length in [0, 5, 8, 200, whole.len() - 1] {
        fs::write(&path, &whole[..length]).expect("writes");
        let error = compile_in(folder.path()).expect_err("refused");
        assert_eq!(error.exit_code(), 14, "{length} bytes: {error}");
    }
    fs::write(&path, "this is a text file, not tensors").expect("writes");
    assert!(compile_in(folder.path()).expect_err("refused").to_string().contains("not a safetensors file"));
}

#[test]
fn a_shard_outside_the_folder_is_refused() {
    let folder = folder();
    Model::of(&small()).write(folder.path());
    let index = json!({ "weight_map": { "model.norm.weight": "../model.safetensors" } });
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).expect("writes");
    assert!(compile_in(folder.path()).expect_err("refused").to_string().contains("not in the checkpoint's folder"));
}

#[test]
fn missing_text_files_are_named() {
    for (name, code) in [("tokenizer.json", 12), ("config.json", 12), ("tokenizer_config.json", 13)] {
        let folder = folder();
        Model::of(&small()).write(folder.path());
        fs::remove_file(folder.path().join(name)).expect("removes");
        let error = compile_in(folder.path()).expect_err("refused");
        assert_eq!(error.exit_code(), code, "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_template_that_does_not_compile_is_refused_and_a_jinja_file_wins() {
    let folder = folder();
    Model::of(&small()).write(folder.path());
    fs::write(folder.path().join("chat_template.jinja"), "{% for m in messages %}").expect("writes");
    let found = problems(compile_in(folder.path()));
    assert!(found.len() == 1 && found[0].starts_with("chat template:"), "{found:?}");
}

#[test]
fn sources_of_every_type_and_shape_of_folder_give_the_same_weights() {
    let mut roots = Vec::new();
    for (source, shards) in [(Source::Bf16, 1), (Source::F16, 1), (Source::F32, 1), (Source::F32, 4)] {
        let folder = folder();
        let model = Model { source, ..Model::of(&small()) };
        if shards == 1 {
            model.write(folder.path())
        } else {
            model.write_sharded(folder.path(), shards)
        }
        compile_in(folder.path()).expect("compiles");
        let bytes = fs::read(folder.path().join("out.oxb")).expect("readable");
        let bundle = oxide_bundle::Bundle::parse(std::sync::Arc::new(bytes)).expect("valid");
        roots.push(bundle.weights().to_vec());
    }
    assert!(roots.windows(2).all(|pair| pair[0] == pair[1]));
}
