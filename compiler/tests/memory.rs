//! Peak memory of a compile does not grow with the checkpoint. Alone in its process, to be measured.

#[expect(dead_code, reason = "one test uses a part")]
#[path = "it/support.rs"]
mod support;

use oxide_bundle::manifest::GoldenStatus;
use oxide_compile::Request;
use oxide_compile::profile::Profile;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write as _;
use support::{Model, compile, config, request};

/// Resident bytes at most, for weights of twice that.
const RESIDENT_MAX: u64 = 300 << 20;

fn peak_resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// A checkpoint of zeros as a file with a hole.
fn write_zeros(profile: &Profile, folder: &std::path::Path) -> u64 {
    Model { config: config(profile), tensors: Default::default(), source: support::Source::Bf16 }.write(folder);
    let graph = oxide_compile::graph::build(profile, oxide_compile::graph::Precision { act: oxide_bundle::dtype::DType::F32 }, 1);
    let graph = graph.expect("builds");
    let mut header = Map::new();
    let mut end = 0_u64;
    for weight in graph.weights_used().into_iter().map(|weight| graph.weight(weight)).filter(|weight| !weight.sources.is_empty()) {
        let start = end;
        end += 2 * weight.shape.iter().map(|&n| u64::from(n)).product::<u64>();
        header.insert(weight.sources[0].clone(), json!({ "dtype": "BF16", "shape": weight.shape, "data_offsets": [start, end] }));
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(folder.join("model.safetensors")).expect("makes");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("writes");
    file.write_all(header.as_bytes()).expect("writes");
    file.set_len(8 + header.len() as u64 + end).expect("extends");
    end
}

#[test]
fn a_compile_stays_small_and_so_does_its_golden_step() {
    let text = support::SMALL.replace("hidden = 48", "hidden = 2048").replace("intermediate = 80", "intermediate = 8192");
    let text = text.replace("heads = 3", "heads = 32").replace("kv_heads = 1", "kv_heads = 4").replace("head_dim = 16", "head_dim = 64");
    let text = text.replace("vocab = 4100", "vocab = 24576").replace("layers = 2", "layers = 4").replace("tied = false", "tied = true");
    let profile = Profile::parse("small", &text).expect("valid");
    let folder = tempfile::tempdir().expect("a folder");
    let weights = write_zeros(&profile, folder.path());
    assert!(weights > 2 * RESIDENT_MAX * 9 / 10, "only {weights} bytes of weights");
    let wanted = request(profile, folder.path(), &folder.path().join("out.oxb"));
    compile(&Request { golden: GoldenStatus::Proven, ..wanted }).expect("compiles");
    if let Some(peak) = peak_resident() {
        assert!(peak < RESIDENT_MAX, "{} MiB were resident for {} MiB of weights", peak >> 20, weights >> 20);
    }
}
