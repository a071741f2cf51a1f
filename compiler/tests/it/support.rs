//! Small checkpoints, written by the tests themselves, and the profile that they fit.

use half::{bf16, f16};
use oxide_bundle::manifest::{GoldenStatus, Target};
use oxide_compile::hub::Cache;
use oxide_compile::profile::{Profile, builtin};
use oxide_compile::progress::Silent;
use oxide_compile::{CompileError, Report, Request};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A two-layer Qwen2 of odd dimensions over oxide-tiny's tokenizer.
pub(crate) const SMALL: &str = r#"
name = "small"
family = "qwen2"
dtype = "bf16"
context_max = 96

[dims]
layers = 2
hidden = 48
intermediate = 80
heads = 3
kv_heads = 1
head_dim = 16
vocab = 4100
tied = false

[numerics]
norm_eps = 1e-6
rope_theta = 10000.0

[source]
repository = "test/small"
revision = "main"
licence = "MIT"

[tokenizer]
vocab_known = 4096
control = ["<|im_start|>"]
chat_template = true
tool_dialect = "hermes"

[target.cpu]
kv_dtype = "f32"
page_tokens = 16
kv_memory_mib = 1
decode = [1, 2, 4]
mixed = [[8, 4], [32, 4]]
"#;

pub(crate) fn small() -> Profile {
    Profile::parse("small", SMALL).expect("a valid profile")
}

/// Element type that a checkpoint is written in.
#[derive(Copy, Clone, PartialEq)]
pub(crate) enum Source {
    Bf16,
    F16,
    F32,
}

/// A checkpoint in memory; tests change it before it is written.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub(crate) source: Source,
}

impl Model {
    /// Random weights of a profile's shape. Values are exact in BF16 and F16.
    pub(crate) fn of(profile: &Profile) -> Self {
        let dims = profile.dims;
        let (hidden, inner) = (dims.hidden as usize, dims.intermediate as usize);
        let (q, kv) = (dims.q_width() as usize, dims.kv_width() as usize);
        let mut model = Self { config: config(profile), tensors: BTreeMap::new(), source: Source::Bf16 };
        model.random("model.embed_tokens.weight", &[dims.vocab as usize, hidden]);
        model.random("model.norm.weight", &[hidden]);
        if !dims.tied {
            model.random("lm_head.weight", &[dims.vocab as usize, hidden]);
        }
        for layer in 0..dims.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            model.random(&name("input_layernorm.weight"), &[hidden]);
            model.random(&name("post_attention_layernorm.weight"), &[hidden]);
            for (part, n, k) in [("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)] {
                model.random(&name(&format!("self_attn.{part}_proj.weight")), &[n, k]);
                if part != "o" && profile.family.qkv_bias() {
                    model.random(&name(&format!("self_attn.{part}_proj.bias")), &[n]);
                }
            }
            for (part, n, k) in [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)] {
                model.random(&name(&format!("mlp.{part}_proj.weight")), &[n, k]);
            }
        }
        model
    }

    fn random(&mut self, name: &str, shape: &[usize]) {
        let mut state = name.bytes().fold(7_u64, |state, byte| state.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let values = (0..shape.iter().product()).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 57) as f32 - 63.5) / 128.0
        });
        let values = values.collect();
        self.tensors.insert(name.to_owned(), (shape.to_vec(), values));
    }

    /// Writes config, text files and one safetensors file.
    pub(crate) fn write(&self, folder: &Path) {
        self.write_text(folder);
        fs::write(folder.join("model.safetensors"), self.safetensors(|_| true)).expect("writes");
    }

    /// Writes the tensors into as many shards, with an index.
    pub(crate) fn write_sharded(&self, folder: &Path, shards: usize) {
        self.write_text(folder);
        let shard_of: BTreeMap<&String, usize> = self.tensors.keys().enumerate().map(|(i, name)| (name, i % shards)).collect();
        let file = |shard: usize| format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
        for shard in 0..shards {
            fs::write(folder.join(file(shard)), self.safetensors(|name| shard_of[name] == shard)).expect("writes");
        }
        let map: Map<String, Value> = shard_of.iter().map(|(name, shard)| ((*name).clone(), file(*shard).into())).collect();
        fs::write(folder.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).expect("writes");
    }

    fn write_text(&self, folder: &Path) {
        fs::create_dir_all(folder).expect("makes the folder");
        fs::write(folder.join("config.json"), Value::Object(self.config.clone()).to_string()).expect("writes");
        for file in builtin("oxide-tiny").expect("is shipped").checkpoint {
            if file.name.contains("token") || file.name.contains("generation") {
                fs::write(folder.join(file.name), file.bytes).expect("writes");
            }
        }
    }

    fn safetensors(&self, keep: impl Fn(&String) -> bool) -> Vec<u8> {
        let (name, size) = match self.source {
            Source::Bf16 => ("BF16", 2),
            Source::F16 => ("F16", 2),
            Source::F32 => ("F32", 4),
        };
        let mut header = Map::new();
        let mut data = Vec::new();
        for (tensor, (shape, values)) in self.tensors.iter().filter(|(name, _)| keep(name)) {
            let start = data.len();
            for &value in values {
                match self.source {
                    Source::Bf16 => data.extend(bf16::from_f32(value).to_le_bytes()),
                    Source::F16 => data.extend(f16::from_f32(value).to_le_bytes()),
                    Source::F32 => data.extend(value.to_le_bytes()),
                }
            }
            assert_eq!(data.len() - start, values.len() * size);
            header.insert(tensor.clone(), json!({ "dtype": name, "shape": shape, "data_offsets": [start, data.len()] }));
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        file
    }
}

/// `config.json` of a profile, as transformers writes it.
pub(crate) fn config(profile: &Profile) -> Map<String, Value> {
    let dims = profile.dims;
    let value = json!({
        "architectures": ["Any"], "model_type": profile.family.model_type(), "hidden_act": "silu",
        "hidden_size": dims.hidden, "intermediate_size": dims.intermediate, "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads, "num_key_value_heads": dims.kv_heads, "head_dim": dims.head_dim,
        "vocab_size": dims.vocab, "max_position_embeddings": profile.context_max, "rms_norm_eps": profile.numerics.norm_eps,
        "rope_theta": profile.numerics.rope_theta, "rope_scaling": null, "tie_word_embeddings": dims.tied,
        "use_sliding_window": false, "sliding_window": null, "attention_dropout": 0.0,
    });
    value.as_object().expect("an object").clone()
}

/// A compile of `profile` from `model` for the cpu target.
pub(crate) fn request(profile: Profile, model: &Path, output: &Path) -> Request {
    Request {
        profile,
        target: Target::Cpu,
        model: Some(model.to_owned()),
        output: output.to_owned(),
        context_max: None,
        seqs_max: None,
        golden: GoldenStatus::Unproven,
        artifacts: Some("nowhere".into()),
        cache: Cache::at("nowhere"),
    }
}

pub(crate) fn compile(request: &Request) -> Result<Report, CompileError> {
    oxide_compile::compile(request, &mut Silent)
}
