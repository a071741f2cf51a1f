//! Synthetic checkpoints: a Hugging Face folder of any profile's shape, from a seed.
//!
//! The same seed gives the same bytes, whatever the number of threads. Weights are scaled so that greedy
//! decoding rarely meets a near tie: a few dozen rows of the head are loud, so that the largest logit
//! stands out, and layers add less the deeper they are, so that rounding is not amplified.

use crate::random::Random;
use anyhow::{Context, bail, ensure};
use clap::Args;
use half::bf16;
use oxide_compile::graph::{Precision, build};
use oxide_compile::profile::{EmbeddedFile, Family, Profile, builtin};
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Elements made by one task.
const CHUNK_ELEMENTS: usize = 1 << 19;
/// Rows of the head that are loud.
const LOUD_ROWS: u32 = 64;
/// Size of a loud row's elements, and of the others'.
const LOUD: f64 = 0.1;
const QUIET: f64 = 0.0125;
/// Standard deviation of a loud row's logit.
const LOGIT_STD: f64 = 5.0;
/// Standard deviation of attention scores: peaked enough that single tokens matter.
const SCORE_STD: f64 = 1.5;

#[derive(Args)]
pub(crate) struct SynthArgs {
    /// Name of a shipped profile, or a path to a .toml file
    profile: String,
    /// Folder to write; made if it does not exist
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Seed of the weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder with tokenizer.json and tokenizer_config.json [default: oxide-tiny's, padded to the profile's vocabulary]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Number of safetensors files
    #[arg(long, default_value_t = 1)]
    shards: u32,
}

/// Writes the folder.
///
/// # Errors
/// If the profile is unknown or a file cannot be written.
pub(crate) fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let profile = Profile::load(&args.profile)?;
    ensure!((1..=1000).contains(&args.shards), "--shards {} is outside 1..=1000", args.shards);
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    let tensors = tensors(&profile)?;
    write_json(&args.out, "config.json", &config(&profile))?;
    write_text(args, &profile)?;
    let bytes = write_shards(args, &tensors)?;
    println!("{}: {} tensors, {bytes} bytes, seed {}", args.out.display(), tensors.len(), args.seed);
    Ok(())
}

/// A tensor to write.
struct Tensor {
    name: String,
    shape: Vec<u32>,
    fill: Fill,
}

/// What a tensor holds.
#[derive(Copy, Clone)]
enum Fill {
    /// One value.
    Constant(f64),
    /// Uniform with this standard deviation.
    Noise(f64),
    /// Uniform, with loud rows this far apart.
    Rows { loud_every: u32 },
}

impl Tensor {
    fn elements(&self) -> usize {
        self.shape.iter().map(|&n| n as usize).product()
    }
}

/// The tensors of a profile, sorted by name as checkpoints have them.
fn tensors(profile: &Profile) -> anyhow::Result<Vec<Tensor>> {
    let precision = Precision { act: oxide_bundle::dtype::DType::F32 };
    let graph = build(profile, precision, 1).map_err(anyhow::Error::msg)?;
    let mut tensors = Vec::new();
    for weight in graph.weights_used().into_iter().map(|weight| graph.weight(weight)) {
        if let [source] = weight.sources.as_slice() {
            tensors.push(Tensor { name: source.clone(), shape: weight.shape.clone(), fill: fill(profile, source, &weight.shape)? });
        }
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

fn fill(profile: &Profile, name: &str, shape: &[u32]) -> anyhow::Result<Fill> {
    let fan_in = f64::from(*shape.last().unwrap_or(&1)).sqrt();
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    let depth = 1.0 / f64::from(layer.unwrap_or(0) + 1).sqrt();
    let part = name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
    Ok(match part {
        "embed_tokens" | "lm_head" => Fill::Rows { loud_every: (profile.tokenizer.vocab_known / LOUD_ROWS).max(1) },
        "norm" => Fill::Constant(LOGIT_STD / (LOUD * f64::from(profile.dims.hidden).sqrt())),
        "input_layernorm" | "post_attention_layernorm" => Fill::Constant(1.0),
        "q_proj" | "k_proj" => Fill::Noise(SCORE_STD.sqrt() / fan_in),
        "v_proj" => Fill::Noise(1.0 / fan_in),
        "gate_proj" | "up_proj" => Fill::Noise(1.5 / fan_in),
        "o_proj" | "down_proj" => Fill::Noise(depth / fan_in),
        "bias" => Fill::Noise(0.1),
        other => bail!("no scale is known for tensor {name} ({other})"),
    })
}

/// `config.json` of a profile.
fn config(profile: &Profile) -> Value {
    let (dims, numerics) = (profile.dims, profile.numerics);
    let architecture = match profile.family {
        Family::Qwen2 => "Qwen2ForCausalLM",
        Family::Llama => "LlamaForCausalLM",
    };
    let scaling = numerics.rope_scaling.map(|scaling| {
        json!({
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": scaling.original_context,
        })
    });
    json!({
        "architectures": [architecture], "model_type": profile.family.model_type(), "hidden_act": "silu",
        "hidden_size": dims.hidden, "intermediate_size": dims.intermediate, "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads, "num_key_value_heads": dims.kv_heads, "head_dim": dims.head_dim,
        "vocab_size": dims.vocab, "max_position_embeddings": profile.context_max, "rms_norm_eps": numerics.norm_eps,
        "rope_theta": numerics.rope_theta, "rope_scaling": scaling, "tie_word_embeddings": dims.tied,
        "torch_dtype": "bfloat16", "use_cache": true,
    })
}

fn write_text(args: &SynthArgs, profile: &Profile) -> anyhow::Result<()> {
    let tiny = builtin("oxide-tiny").context("oxide-tiny is not part of this build")?.checkpoint;
    let files = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];
    for name in files {
        let given = args.tokenizer.as_ref().map(|folder| folder.join(name)).filter(|path| path.exists());
        match (given, &args.tokenizer) {
            (Some(path), _) => drop(fs::copy(&path, args.out.join(name)).with_context(|| path.display().to_string())?),
            (None, Some(folder)) if name == "tokenizer.json" => bail!("{} has no {name}", folder.display()),
            (None, Some(_)) => {}
            (None, None) if name == "tokenizer.json" => write_json(&args.out, name, &padded_tokenizer(embedded(tiny, name)?, profile)?)?,
            (None, None) => fs::write(args.out.join(name), embedded(tiny, name)?)?,
        }
    }
    Ok(())
}

fn embedded(files: &[EmbeddedFile], name: &str) -> anyhow::Result<&'static [u8]> {
    files.iter().find(|file| file.name == name).map(|file| file.bytes).with_context(|| format!("oxide-tiny has no {name}"))
}

/// oxide-tiny's tokenizer with entries that no text encodes to, up to the profile's vocabulary.
fn padded_tokenizer(json: &[u8], profile: &Profile) -> anyhow::Result<Value> {
    let mut tokenizer: Value = serde_json::from_slice(json)?;
    let added = tokenizer["added_tokens"].as_array().map_or(0, Vec::len);
    let vocab = tokenizer["model"]["vocab"].as_object_mut().context("the tokenizer has no vocabulary")?;
    let known = (vocab.len() + added) as u32;
    ensure!(profile.tokenizer.vocab_known >= known, "the profile knows fewer ids than oxide-tiny's tokenizer: pass --tokenizer");
    for id in known..profile.tokenizer.vocab_known {
        vocab.insert(format!("filler{id}"), id.into());
    }
    Ok(tokenizer)
}

fn write_json(folder: &Path, name: &str, value: &Value) -> anyhow::Result<()> {
    let path = folder.join(name);
    fs::write(&path, format!("{}\n", serde_json::to_string_pretty(value)?)).with_context(|| path.display().to_string())
}

fn write_shards(args: &SynthArgs, tensors: &[Tensor]) -> anyhow::Result<u64> {
    let total: u64 = tensors.iter().map(|tensor| 2 * tensor.elements() as u64).sum();
    if args.shards == 1 {
        return write_shard(&args.out.join("model.safetensors"), tensors, args.seed);
    }
    let per_shard = total.div_ceil(u64::from(args.shards));
    let mut groups: Vec<(u64, usize)> = Vec::new();
    for tensor in tensors {
        match groups.last_mut() {
            Some((bytes, count)) if *bytes < per_shard => (*bytes, *count) = (*bytes + 2 * tensor.elements() as u64, *count + 1),
            _ => groups.push((2 * tensor.elements() as u64, 1)),
        }
    }
    let mut map = Map::new();
    let mut rest = tensors;
    let mut written = 0;
    for (index, (_, count)) in groups.iter().enumerate() {
        let (shard, tail) = rest.split_at(*count);
        let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, groups.len());
        written += write_shard(&args.out.join(&name), shard, args.seed)?;
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), Value::from(name.clone()))));
        rest = tail;
    }
    write_json(&args.out, "model.safetensors.index.json", &json!({ "metadata": { "total_size": total }, "weight_map": map }))?;
    Ok(written)
}

fn write_shard(path: &Path, tensors: &[Tensor], seed: u64) -> anyhow::Result<u64> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut end = 0_u64;
    let mut starts = Vec::new();
    for tensor in tensors {
        let start = end;
        end += 2 * tensor.elements() as u64;
        starts.push(start);
        header.insert(tensor.name.clone(), json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end] }));
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let data = 8 + text.len() as u64;
    let file = File::create(path).with_context(|| path.display().to_string())?;
    file.set_len(data + end)?;
    file.write_all_at(&(text.len() as u64).to_le_bytes(), 0)?;
    file.write_all_at(&text, 8)?;
    for (tensor, start) in tensors.iter().zip(starts) {
        write_tensor(&file, data + start, tensor, seed).with_context(|| path.display().to_string())?;
    }
    Ok(data + end)
}

fn write_tensor(file: &File, offset: u64, tensor: &Tensor, seed: u64) -> anyhow::Result<()> {
    let elements = tensor.elements();
    let digest: [u8; 32] = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(&tensor.name).finalize().into();
    let key = u64::from_le_bytes(digest[..8].try_into().context("a digest has eight bytes")?);
    let maker = Maker::new(tensor);
    (0..elements.div_ceil(CHUNK_ELEMENTS)).into_par_iter().try_for_each(|chunk| {
        let first = chunk * CHUNK_ELEMENTS;
        let count = CHUNK_ELEMENTS.min(elements - first);
        let mut random = Random::new(key ^ (chunk as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93));
        let bytes = maker.chunk(first, count, &mut random);
        file.write_all_at(&bytes, offset + 2 * first as u64).map_err(anyhow::Error::from)
    })
}

/// Turns random bits into elements by table: every 16-bit number has its BF16 value.
struct Maker {
    columns: usize,
    loud_every: Option<usize>,
    plain: Vec<u16>,
    loud: Vec<u16>,
}

impl Maker {
    fn new(tensor: &Tensor) -> Self {
        let columns = tensor.shape.last().map_or(1, |&n| n as usize);
        match tensor.fill {
            Fill::Constant(value) => Self { columns, loud_every: None, plain: vec![bf16::from_f64(value).to_bits()], loud: Vec::new() },
            Fill::Noise(std) => Self { columns, loud_every: None, plain: uniform(std), loud: Vec::new() },
            Fill::Rows { loud_every } => {
                Self { columns, loud_every: Some(loud_every as usize), plain: uniform(QUIET), loud: uniform(LOUD) }
            }
        }
    }

    fn chunk(&self, first: usize, count: usize, random: &mut Random) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(2 * count);
        let mut bits = 0_u64;
        for element in first..first + count {
            bits = if (element - first).is_multiple_of(4) { random.next() } else { bits >> 16 };
            let table = match self.loud_every {
                Some(every) if (element / self.columns).is_multiple_of(every) => &self.loud,
                _ => &self.plain,
            };
            let value = if table.len() == 1 { table[0] } else { table[(bits & 0xFFFF) as usize] };
            bytes.extend(value.to_le_bytes());
        }
        bytes
    }
}

/// BF16 values of a uniform distribution with this standard deviation.
fn uniform(std: f64) -> Vec<u16> {
    let half_width = std * 3.0_f64.sqrt();
    (0..=u16::MAX).map(|n| bf16::from_f64((f64::from(n) / 32767.5 - 1.0) * half_width).to_bits()).collect()
}
