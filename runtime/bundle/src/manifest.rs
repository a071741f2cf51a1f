//! The manifest: what the bundle is, for people and for the server. Everything that the plan does not say.

use crate::dtype::{DType, F32Bits};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What a bundle was compiled for.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// The host processor.
    Cpu,
    /// NVIDIA Hopper (`sm_90a`).
    Sm90,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Sm90 => "sm90",
        })
    }
}

/// Decoded manifest section (`MANI`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Model name that the server answers to by default.
    pub name: String,
    /// Profile it was compiled from.
    pub profile: String,
    /// Target.
    pub target: Target,
    /// The model.
    pub model: ModelInfo,
    /// Limits and their origin.
    pub limits: Limits,
    /// Exact memory arithmetic.
    pub ledger: Ledger,
    /// Tokens with a meaning.
    pub tokens: SpecialTokens,
    /// Sampling defaults from the model's generation config.
    pub generation: GenerationDefaults,
    /// Whether golden vectors were proven at seal time.
    pub golden: GoldenStatus,
}

/// Shape of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// `qwen2` or `llama`.
    pub family: String,
    /// Parameters, the tied head counted once.
    pub parameters: u64,
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
    /// Width of a head.
    pub head_dim: u32,
    /// Width of a logits row.
    pub vocab: u32,
    /// Ids that the tokenizer knows.
    pub vocab_known: u32,
    /// Whether head and embedding are one tensor.
    pub tied: bool,
    /// Base of the rotary frequencies.
    pub rope_theta: F32Bits,
    /// Element type of weights.
    pub weight_dtype: DType,
    /// Element type of the KV cache.
    pub kv_dtype: DType,
}

/// Limits of the bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Longest sequence, prompt and completion together.
    pub context_max: u32,
    /// Where that limit comes from: `"model"`, `"profile"` or `"--max-context"`.
    pub context_origin: String,
    /// Sequences running together.
    pub seqs_max: u32,
    /// Where that limit comes from: `"profile"` or `"--max-seqs"`.
    pub seqs_origin: String,
    /// Tokens of the largest step.
    pub step_tokens_max: u32,
    /// Tokens in a KV page.
    pub page_tokens: u32,
}

/// Where the memory goes, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ledger {
    /// Weight section.
    pub weight_bytes: u64,
    /// Arena of activations and workspace.
    pub arena_bytes: u64,
    /// Per-step input slots.
    pub input_bytes: u64,
    /// Per-step output slots.
    pub output_bytes: u64,
    /// KV bytes of one token.
    pub kv_bytes_per_token: u64,
    /// KV pages that the server allocates unless told otherwise.
    pub kv_pages_default: u32,
    /// KV bytes of that pool.
    pub kv_bytes_default: u64,
}

/// Tokens with a meaning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpecialTokens {
    /// Prepended to plain prompts if the tokenizer does so.
    pub bos: Option<u32>,
    /// Ids that end a generation.
    pub eos: Vec<u32>,
    /// Padding id.
    pub pad: Option<u32>,
    /// Whether `bos` is prepended to text prompts.
    pub add_bos: bool,
    /// Control ids by their text; message content never encodes to them.
    pub control: BTreeMap<String, u32>,
}

/// Sampling defaults (`generation_config.json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerationDefaults {
    /// Temperature; 0 when the model's config says not to sample.
    pub temperature: F32Bits,
    /// Nucleus mass.
    pub top_p: F32Bits,
    /// Ids kept; 0 keeps all.
    pub top_k: u32,
    /// Smallest relative probability.
    pub min_p: F32Bits,
    /// Repetition penalty.
    pub repetition_penalty: F32Bits,
}

/// Whether the golden vectors were run when the bundle was sealed.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoldenStatus {
    /// The lowered model reproduced its vectors on the cpu device, and the profile's reference ids where it ships some.
    Proven,
    /// Sealed with `--no-golden`.
    Unproven,
}

/// Golden vectors (`GOLD`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Golden {
    /// Prompts and the greedy ids that must follow.
    pub greedy: Vec<GoldenGreedy>,
    /// Texts and the ids that the tokenizer must give.
    pub tokenizer: Vec<GoldenText>,
    /// Conversations (JSON text) and the prompt that the template must render.
    pub template: Vec<GoldenTemplate>,
}

/// A greedy golden vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoldenGreedy {
    /// Name in reports.
    pub name: String,
    /// Prompt ids.
    pub prompt: Vec<u32>,
    /// Greedy ids, end-of-sequence ids included and not stopped at.
    pub ids: Vec<u32>,
    /// How many leading ids bind: up to the first step whose top two logits nearly tie.
    pub binding: u32,
}

/// A tokenizer parity vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoldenText {
    /// Input text.
    pub text: String,
    /// Its ids, special tokens parsed.
    pub ids: Vec<u32>,
}

/// A template parity vector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoldenTemplate {
    /// `{"messages": […], "tools": […]?}` as JSON.
    pub input: String,
    /// Rendered prompt, generation prompt added.
    pub rendered: String,
}

/// Tokenizer and template section (`TMPL`): what the text edge needs beside `tokenizer.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateSection {
    /// Jinja source of the chat template; `None` for a base model.
    pub chat_template: Option<String>,
    /// Text of the BOS token, as templates see it.
    pub bos_token: Option<String>,
    /// Text of the EOS token, as templates see it.
    pub eos_token: Option<String>,
    /// Dialect of tool calls.
    pub tool_dialect: ToolDialect,
}

/// How a model writes tool calls.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolDialect {
    /// The template takes no tools.
    None,
    /// `<tool_call>\n{"name": …, "arguments": …}\n</tool_call>` (Qwen2.5, Qwen3).
    Hermes,
    /// `{"name": …, "parameters": …}` (Llama 3.x).
    Llama3,
}

/// Recipe and input hashes (`PROV`). No paths, users or times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Version of the compiler.
    pub compiler: String,
    /// Profile as TOML text.
    pub profile_toml: String,
    /// Options that changed the result.
    pub options: BTreeMap<String, String>,
    /// SHA-256 of every input file by its name in the checkpoint folder.
    pub inputs: BTreeMap<String, String>,
}
