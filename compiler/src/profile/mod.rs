//! Profiles: what a model is, and how each target runs it. One TOML file a model.
//!
//! A profile is an expectation: the checkpoint's `config.json` must agree with it
//! ([`crate::checkpoint::config`]). Unknown keys are refused. Nothing here reads a checkpoint.

mod builtin;
mod check;

pub use builtin::{BUILTIN, Builtin, EmbeddedFile, builtin};

use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::manifest::{Target, ToolDialect};
use oxide_bundle::plan::BatchClass;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Largest profile file read.
const PROFILE_BYTES_MAX: u64 = 1 << 20;

/// Why a profile is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// No such built-in profile, and no such file.
    #[error("no profile `{name}`: known are {known}; a path to a .toml file works too")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The file cannot be read.
    #[error("profile {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not a profile.
    #[error("profile `{name}`: {source}")]
    Parse {
        /// Which.
        name: String,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// Values that do not go together; all of them.
    #[error("profile `{name}`: {}", problems.join("; "))]
    Invalid {
        /// Which.
        name: String,
        /// Each problem.
        problems: Vec<String>,
    },
    /// The profile has no section for the target.
    #[error("profile `{name}` has no [target.{target}] section")]
    NoTarget {
        /// Which.
        name: String,
        /// The target asked for.
        target: Target,
    },
}

/// Model family: decides tensor names and which config keys matter.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// `Qwen2ForCausalLM`: q/k/v biases.
    Qwen2,
    /// `LlamaForCausalLM`: no biases.
    Llama,
}

impl Family {
    /// `model_type` in `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Qwen2 => "qwen2",
            Self::Llama => "llama",
        }
    }

    /// Whether q, k and v projections have biases.
    pub const fn qkv_bias(self) -> bool {
        match self {
            Self::Qwen2 => true,
            Self::Llama => false,
        }
    }
}

/// A profile, checked.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name of profile and model.
    pub name: String,
    /// Family.
    pub family: Family,
    /// Element type of weights.
    pub dtype: DType,
    /// Longest sequence.
    pub context_max: u32,
    /// Dimensions.
    pub dims: Dims,
    /// Constants of the arithmetic.
    pub numerics: Numerics,
    /// Where the checkpoint comes from.
    pub source: Source,
    /// What tokenizer and template must be like.
    pub tokenizer: Expectations,
    /// Which checkpoint the shipped reference ids are of; of any that fits, if absent.
    #[serde(default)]
    pub reference: Option<ReferenceScope>,
    /// Settings of each target.
    pub target: Targets,
    /// The TOML text that it was read from.
    #[serde(skip)]
    pub toml: String,
}

/// Dimensions of a model.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dims {
    /// Transformer layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Width of the MLP.
    pub intermediate: u32,
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Width of a head; even.
    pub head_dim: u32,
    /// Rows of the embedding.
    pub vocab: u32,
    /// Whether head and embedding are one tensor.
    pub tied: bool,
}

impl Dims {
    /// Width of a query row.
    pub const fn q_width(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Width of a key or value row.
    pub const fn kv_width(&self) -> u32 {
        self.kv_heads * self.head_dim
    }
}

/// Constants of the arithmetic.
#[derive(Copy, Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Numerics {
    /// Added to the mean square.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Frequency scaling, if any.
    #[serde(default)]
    pub rope_scaling: Option<Llama3Scaling>,
}

impl Numerics {
    /// The epsilon as kernels use it.
    pub fn eps(&self) -> F32Bits {
        F32Bits::new(self.norm_eps as f32)
    }
}

/// RoPE scaling of type `llama3`.
#[derive(Copy, Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3Scaling {
    /// Divides low frequencies.
    pub factor: f64,
    /// Wavelengths above `original_context / low_freq_factor` are scaled in full.
    pub low_freq_factor: f64,
    /// Wavelengths below `original_context / high_freq_factor` are left alone.
    pub high_freq_factor: f64,
    /// Context that the model was pretrained with.
    pub original_context: u32,
}

/// Where a checkpoint comes from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Hugging Face repository.
    pub repository: String,
    /// Commit, or a branch.
    pub revision: String,
    /// SPDX identifier of the weights' licence.
    pub licence: String,
}

/// The checkpoint that reference ids were made from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceScope {
    /// SHA-256 of its `model.safetensors`; another checkpoint is not compared with the reference.
    pub weights_sha256: String,
}

/// What tokenizer and template must be like.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectations {
    /// Ids that the tokenizer knows: one more than its largest id.
    pub vocab_known: u32,
    /// Texts that must be control tokens.
    pub control: Vec<String>,
    /// Whether a chat template is expected.
    pub chat_template: bool,
    /// Dialect of tool calls.
    pub tool_dialect: ToolDialect,
}

/// Settings of each target; a target without a section cannot be compiled for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Targets {
    /// The host processor.
    pub cpu: Option<TargetSettings>,
    /// NVIDIA Hopper.
    pub sm90: Option<TargetSettings>,
}

/// Settings of one target.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetSettings {
    /// Element type of the KV cache.
    pub kv_dtype: DType,
    /// Tokens in a KV page; a power of two.
    pub page_tokens: u32,
    /// Memory of the KV pool unless the server is told otherwise.
    pub kv_memory_mib: u32,
    /// Sequences of each decode class, rising.
    pub decode: Vec<u32>,
    /// Tokens and sequences of each mixed class, rising.
    pub mixed: Vec<(u32, u32)>,
}

impl TargetSettings {
    /// The classes, decode first, cut to `seqs_max` sequences.
    pub fn classes(&self, seqs_max: u32) -> Vec<BatchClass> {
        let mut decode: Vec<u32> = self.decode.iter().map(|&seqs| seqs.min(seqs_max)).collect();
        decode.dedup();
        let mut mixed: Vec<(u32, u32)> = self.mixed.iter().map(|&(tokens, seqs)| (tokens, seqs.min(seqs_max))).collect();
        mixed.dedup();
        let decode = decode.into_iter().map(|seqs| BatchClass::Decode { seqs });
        decode.chain(mixed.into_iter().map(|(tokens, seqs)| BatchClass::Mixed { tokens, seqs })).collect()
    }

    /// Sequences of the largest class.
    pub fn seqs_max(&self) -> u32 {
        self.decode.iter().copied().chain(self.mixed.iter().map(|&(_, seqs)| seqs)).max().unwrap_or(0)
    }
}

impl Profile {
    /// Reads a built-in profile by name, or a `.toml` file by path.
    ///
    /// # Errors
    /// If there is none, or it is not a valid profile.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        if let Some(found) = builtin(name) {
            return Self::parse(found.name, found.toml);
        }
        let path = Path::new(name);
        if path.extension().is_none_or(|ext| ext != "toml") {
            let known = BUILTIN.iter().map(|b| b.name).collect::<Vec<_>>().join(", ");
            return Err(ProfileError::Unknown { name: name.to_owned(), known });
        }
        let text = read_bounded(path).map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
        Self::parse(name, &text)
    }

    /// Parses and checks TOML text. `name` is for messages.
    ///
    /// # Errors
    /// If the text is not TOML, a key is unknown or missing, or values do not go together.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let parsed = toml::from_str::<Self>(text);
        let mut profile = parsed.map_err(|source| ProfileError::Parse { name: name.to_owned(), source: Box::new(source) })?;
        profile.toml = text.to_owned();
        let problems = profile.problems();
        if problems.is_empty() { Ok(profile) } else { Err(ProfileError::Invalid { name: name.to_owned(), problems }) }
    }

    /// Settings of a target.
    ///
    /// # Errors
    /// If the profile has none for it.
    pub fn settings(&self, target: Target) -> Result<&TargetSettings, ProfileError> {
        let found = match target {
            Target::Cpu => self.target.cpu.as_ref(),
            Target::Sm90 => self.target.sm90.as_ref(),
        };
        found.ok_or_else(|| ProfileError::NoTarget { name: self.name.clone(), target })
    }
}

fn read_bounded(path: &Path) -> std::io::Result<String> {
    let size = std::fs::metadata(path)?.len();
    if size > PROFILE_BYTES_MAX {
        return Err(std::io::Error::other(format!("is {size} bytes, a profile has at most {PROFILE_BYTES_MAX}")));
    }
    std::fs::read_to_string(path)
}
