//! `config.json` against the profile. Every key that changes numerics is either equal to what will be
//! compiled or refused by name.

use super::{CheckpointError, Files};
use crate::profile::{Family, Llama3Scaling, Profile};
use serde_json::{Map, Value};

/// Largest `config.json` read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A decoded `config.json`.
pub type Config = Map<String, Value>;

/// Keys of arithmetic that no family here has, with the value at which they do nothing.
const NOT_IMPLEMENTED: &[(&str, Neutral)] = &[
    ("alibi", Neutral::Off),
    ("attention_chunk_size", Neutral::Off),
    ("attention_multiplier", Neutral::Off),
    ("attn_logit_softcapping", Neutral::Off),
    ("clip_qkv", Neutral::Off),
    ("embedding_multiplier", Neutral::One),
    ("final_logit_softcapping", Neutral::Off),
    ("layernorm_epsilon", Neutral::Off),
    ("logit_scale", Neutral::One),
    ("logits_scaling", Neutral::One),
    ("mlp_bias", Neutral::Off),
    ("no_rope_layers", Neutral::Off),
    ("num_experts", Neutral::Off),
    ("num_local_experts", Neutral::Off),
    ("parallel_residual", Neutral::Off),
    ("partial_rotary_factor", Neutral::One),
    ("pretraining_tp", Neutral::One),
    ("qk_layernorm", Neutral::Off),
    ("quantization_config", Neutral::Off),
    ("query_pre_attn_scalar", Neutral::Off),
    ("residual_multiplier", Neutral::One),
    ("rope_interleaved", Neutral::Off),
    ("rotary_pct", Neutral::One),
    ("scale_embeddings", Neutral::Off),
    ("use_parallel_residual", Neutral::Off),
    ("use_qk_norm", Neutral::Off),
    ("use_sliding_window", Neutral::Off),
];

/// When a key that is not implemented does nothing.
#[derive(Copy, Clone)]
enum Neutral {
    /// null, false, 0, empty.
    Off,
    /// null or 1.
    One,
}

impl Neutral {
    fn holds(self, value: &Value) -> bool {
        match self {
            _ if value.is_null() => true,
            Self::One => value.as_f64() == Some(1.0),
            Self::Off => match value {
                Value::Bool(on) => !on,
                Value::Number(n) => n.as_f64() == Some(0.0),
                Value::Array(items) => items.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                Value::Null => true,
                Value::String(_) => false,
            },
        }
    }
}

/// Reads `config.json`.
///
/// # Errors
/// If it is missing or is not a JSON object.
pub fn read(files: &Files) -> Result<Config, CheckpointError> {
    let bytes = files.require("config.json", CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| CheckpointError::Malformed { file: "config.json".to_owned(), problem: error.to_string() })
}

/// Every way in which the config is not what the profile says.
pub fn problems(config: &Config, profile: &Profile) -> Vec<String> {
    let mut check = Check { config, problems: Vec::new() };
    check.identity(profile);
    check.dimensions(profile);
    check.numerics(profile);
    check.attention(profile.family);
    for (key, neutral) in NOT_IMPLEMENTED {
        if let Some(value) = config.get(*key)
            && !neutral.holds(value)
        {
            check.problems.push(format!("config.json: {key} = {value} is not implemented"));
        }
    }
    check.problems
}

struct Check<'a> {
    config: &'a Config,
    problems: Vec<String>,
}

impl Check<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.config.get(key).filter(|value| !value.is_null())
    }

    fn equal(&mut self, key: &str, expected: &Value, default: Option<Value>) {
        let found = self.get(key).cloned().or(default);
        let same = match (&found, expected) {
            (Some(found), expected) if found.is_number() && expected.is_number() => found.as_f64() == expected.as_f64(),
            (Some(found), expected) => found == expected,
            (None, _) => false,
        };
        if !same {
            let found = found.map_or_else(|| "absent".to_owned(), |value| value.to_string());
            self.problems.push(format!("config.json: {key} is {found}, the profile says {expected}"));
        }
    }

    fn identity(&mut self, profile: &Profile) {
        self.equal("model_type", &profile.family.model_type().into(), None);
        self.equal("hidden_act", &"silu".into(), Some("silu".into()));
    }

    fn dimensions(&mut self, profile: &Profile) {
        let dims = profile.dims;
        self.equal("num_hidden_layers", &dims.layers.into(), None);
        self.equal("hidden_size", &dims.hidden.into(), None);
        self.equal("intermediate_size", &dims.intermediate.into(), None);
        self.equal("num_attention_heads", &dims.heads.into(), None);
        self.equal("num_key_value_heads", &dims.kv_heads.into(), Some(dims.heads.into()));
        let derived = dims.hidden.checked_div(dims.heads).unwrap_or(0);
        self.equal("head_dim", &dims.head_dim.into(), Some(derived.into()));
        self.equal("vocab_size", &dims.vocab.into(), None);
        self.equal("tie_word_embeddings", &dims.tied.into(), Some(false.into()));
        if let Some(trained) = self.get("max_position_embeddings").and_then(Value::as_u64)
            && u64::from(profile.context_max) > trained
        {
            let problem = format!("max_position_embeddings is {trained}, the profile says context_max = {}", profile.context_max);
            self.problems.push(format!("config.json: {problem}"));
        }
    }

    fn numerics(&mut self, profile: &Profile) {
        let numerics = profile.numerics;
        self.equal("rms_norm_eps", &numerics.norm_eps.into(), None);
        let parameters = self.get("rope_parameters").and_then(Value::as_object).cloned();
        let theta_inside = parameters.as_ref().and_then(|p| p.get("rope_theta")).cloned();
        self.equal("rope_theta", &numerics.rope_theta.into(), Some(theta_inside.unwrap_or_else(|| 10000.0.into())));
        let scaling = self.get("rope_scaling").and_then(Value::as_object).cloned().or(parameters);
        self.problems.extend(scaling_problems(scaling.as_ref(), numerics.rope_scaling));
    }

    fn attention(&mut self, family: Family) {
        match family {
            Family::Llama => {
                if self.get("attention_bias").is_some_and(|value| *value != false) {
                    self.problems.push("config.json: attention_bias = true is not implemented for llama".to_owned());
                }
                if self.get("sliding_window").is_some() {
                    self.problems.push("config.json: sliding_window is not implemented for llama".to_owned());
                }
            }
            // `sliding_window` counts for qwen2 only with `use_sliding_window`.
            Family::Qwen2 => {}
        }
        let layer_types = self.get("layer_types").and_then(Value::as_array);
        if layer_types.is_some_and(|types| types.iter().any(|ty| ty != "full_attention")) {
            self.problems.push("config.json: layer_types other than full_attention are not implemented".to_owned());
        }
    }
}

fn scaling_problems(found: Option<&Map<String, Value>>, expected: Option<Llama3Scaling>) -> Vec<String> {
    let kind = found.and_then(|scaling| scaling.get("rope_type").or_else(|| scaling.get("type"))).and_then(Value::as_str);
    match (kind.unwrap_or("default"), found, expected) {
        ("default", _, None) => Vec::new(),
        ("default", _, Some(_)) => vec!["config.json: rope_scaling is absent, the profile says llama3".to_owned()],
        ("llama3", Some(found), Some(expected)) => llama3_problems(found, expected),
        ("llama3", _, _) => vec!["config.json: rope_scaling is llama3, the profile says none".to_owned()],
        (other, _, _) => vec![format!("config.json: rope_scaling of type {other} is not implemented")],
    }
}

fn llama3_problems(found: &Map<String, Value>, expected: Llama3Scaling) -> Vec<String> {
    let Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_context } = expected;
    let keys = [
        ("factor", factor),
        ("low_freq_factor", low_freq_factor),
        ("high_freq_factor", high_freq_factor),
        ("original_max_position_embeddings", f64::from(original_context)),
    ];
    let differing = keys.into_iter().filter(|(key, expected)| found.get(*key).and_then(Value::as_f64) != Some(*expected));
    let words = |key: &str| found.get(key).map_or_else(|| "absent".to_owned(), ToString::to_string);
    differing.map(|(key, expected)| format!("config.json: rope_scaling.{key} is {}, the profile says {expected}", words(key))).collect()
}
