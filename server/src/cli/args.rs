//! Arguments. Every field of [`crate::http::ServeOptions`] and of the loader that operators need has its flag here.

use super::error::CliError;
use super::replay::ReplayArgs;
use super::size;
use super::tools::ToolCommand;
use crate::model::LoadOptions;
use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use oxide_bundle::{Mode, Seal};
use oxide_runtime::device::cpu::Isa;
use oxide_runtime::engine::EngineOptions;
use oxide_runtime::mapping::Access;
use std::net::IpAddr;
use std::path::PathBuf;

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 unexpected (diff: the bundles differ), 2 wrong command line, 3 request refused, 4 device refuses the bundle,
5 engine failed, 6 golden vector not reproduced, 7 server failed, 8 input file unusable, 9 does not fit,
10 tokenizer or template unusable, 11 replay differs, 12 not signed by a trusted key, 13 against the policy, 18 bundle not found, 19 bundle unreadable,
20-99 bundle refused (docs/bundle-format.md), 130 interrupted";

/// Runs a sealed bundle made by oxide-compile.
#[derive(Clone, Debug, Parser)]
#[command(name = "oxide-run", version, about, after_help = EXIT_CODES, subcommand_required = true, arg_required_else_help = true)]
pub struct Args {
    /// Bundle to run
    #[arg(value_name = "BUNDLE")]
    pub(super) bundle: PathBuf,
    #[command(flatten)]
    pub(super) load: LoadArgs,
    #[command(subcommand)]
    pub(super) command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct LoadArgs {
    /// Compute threads [default: all processors]
    #[arg(long, global = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,
    /// Instruction set of the cpu device [default: the best that this processor has]
    #[arg(long, global = true)]
    pub(super) isa: Option<IsaArg>,
    /// Memory of the KV cache, for example 2GiB [default: the bundle's]
    #[arg(long, global = true, value_name = "SIZE", value_parser = size::parse)]
    pub(super) kv_memory: Option<u64>,
    /// Refuse a bundle with another seal
    #[arg(long, global = true, value_name = "SEAL")]
    pub(super) expect: Option<Seal>,
    /// Read the bundle into memory instead of mapping it (network file systems)
    #[arg(long, global = true)]
    pub(super) no_mmap: bool,
}

/// Instruction sets by name.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum IsaArg {
    /// Plain code
    Portable,
    /// AVX2 and FMA
    Avx2,
    /// AVX-512
    Avx512,
    /// AMX tiles of BF16, beside AVX-512
    AmxBf16,
}

impl From<IsaArg> for Isa {
    fn from(arg: IsaArg) -> Self {
        match arg {
            IsaArg::Portable => Self::Portable,
            IsaArg::Avx2 => Self::Avx2,
            IsaArg::Avx512 => Self::Avx512,
            IsaArg::AmxBf16 => Self::AmxBf16,
        }
    }
}

/// What to do with the bundle.
#[derive(Clone, Debug, Subcommand)]
pub(super) enum Command {
    /// Serve the OpenAI-compatible HTTP API
    Serve(Box<ServeArgs>),
    /// Talk to the model in the terminal
    Chat(ChatArgs),
    /// Complete a prompt, or many at once
    Generate(GenerateArgs),
    /// Measure speed: decode, prefill, memory bandwidth, start
    Bench(BenchArgs),
    /// Print what the bundle is
    Inspect(InspectArgs),
    /// Check every hash; with --full also the golden vectors
    Verify(VerifyArgs),
    /// Tell how much fits into a given memory
    Fit(FitArgs),
    /// Draw the tokens of journaled requests again and compare
    Replay(ReplayArgs),
    #[command(flatten)]
    Tool(ToolCommand),
}

/// Options of `serve`; each sets a field of [`crate::http::ServeOptions`] or of the engine.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct ServeArgs {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub(super) host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    pub(super) port: u16,
    /// File that gets the port number once requests are taken
    #[arg(long, value_name = "FILE")]
    pub(super) port_file: Option<PathBuf>,
    /// Name that the model answers to [default: the bundle's]
    #[arg(long, value_name = "NAME")]
    pub(super) model_name: Option<String>,
    /// Key that clients must send; repeatable
    #[arg(long, value_name = "KEY")]
    pub(super) api_key: Vec<String>,
    /// File with one key a line
    #[arg(long, value_name = "FILE")]
    pub(super) api_key_file: Option<PathBuf>,
    /// Requests that one key may have in flight
    #[arg(long, value_name = "N")]
    pub(super) requests_per_key: Option<usize>,
    /// Origin that browsers may call from; repeatable [default: any]
    #[arg(long, value_name = "ORIGIN")]
    pub(super) cors_origin: Vec<String>,
    /// Refuse what OpenAI refuses: unknown fields, a missing model, more than 4 stops
    #[arg(long)]
    pub(super) strict: bool,
    /// Default to temperature 1 and top_p 1 instead of the model's own
    #[arg(long)]
    pub(super) openai_defaults: bool,
    /// Lower a max_tokens that does not fit instead of refusing the request
    #[arg(long)]
    pub(super) clamp_max_tokens: bool,
    /// Largest request body
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "8MiB")]
    pub(super) body_limit: u64,
    /// Open connections at most
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub(super) connections: usize,
    /// Requests that may wait beyond those that free sequence slots take; 0 refuses what finds no slot
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(super) max_queue: usize,
    /// Longest wait for admission; 0 refuses what finds no slot or no memory at once
    #[arg(long, value_name = "SECONDS")]
    pub(super) max_queue_seconds: Option<f64>,
    /// Deadline of requests that name none
    #[arg(long, value_name = "SECONDS")]
    pub(super) deadline_seconds: Option<f64>,
    /// Silence after which a stream gets a comment line
    #[arg(long, value_name = "SECONDS", default_value_t = 15.0)]
    pub(super) keep_alive_seconds: f64,
    /// How long live streams may finish after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub(super) drain_seconds: f64,
    /// Largest n
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(super) max_choices: u32,
    /// Prompts in one completion request at most
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(super) max_prompts: usize,
    /// Stop strings of a request at most
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) max_stops: usize,
    /// Tokens of a step while some request prefills [default: the largest sealed class]
    #[arg(long, value_name = "N")]
    pub(super) chunk_tokens: Option<u32>,
    /// Do not share KV pages between equal prefixes
    #[arg(long)]
    pub(super) no_prefix_cache: bool,
    /// Admit by the prompt alone and preempt by recompute when memory runs out
    #[arg(long)]
    pub(super) overcommit: bool,
    /// Refuse a bundle that is not signed by this public key (PEM); repeatable, one signer is enough
    #[arg(long, value_name = "FILE")]
    pub(super) require_key: Vec<PathBuf>,
    /// Refuse a bundle that violates this file of rules: licences, keys, seals, targets, profiles, golden
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    /// Run the bundle's golden vectors before becoming ready
    #[arg(long)]
    pub(super) self_test: bool,
    /// Folder for a journal of all requests, which `replay` reads; it holds prompts and answers as token ids
    #[arg(long, value_name = "DIR")]
    pub(super) journal: Option<PathBuf>,
    /// Size at which the next journal file begins
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "64MiB")]
    pub(super) journal_file_size: u64,
    /// Journal files kept; the oldest go first
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) journal_files: u32,
    /// Write logs as JSON lines
    #[arg(long)]
    pub(super) log_json: bool,
}

/// Sampling options of `chat` and `generate`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct SamplingArgs {
    /// Tokens to generate at most [default: generate 128, chat what fits]
    #[arg(long, short = 'n', value_name = "N")]
    pub(super) max_tokens: Option<u32>,
    /// Tokens before which the answer may not end
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) min_tokens: u32,
    /// 0 is greedy [default: the model's]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(super) temperature: Option<f32>,
    /// Nucleus mass [default: the model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(super) top_p: Option<f32>,
    /// Tokens kept; 0 keeps all [default: the model's]
    #[arg(long, value_name = "K")]
    pub(super) top_k: Option<u32>,
    /// Smallest probability relative to the best [default: the model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(super) min_p: Option<f32>,
    /// 1 is off [default: the model's]
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(super) repetition_penalty: Option<f32>,
    /// 0 is off
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(super) presence_penalty: f32,
    /// 0 is off
    #[arg(long, value_name = "R", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(super) frequency_penalty: f32,
    /// Seed of the random stream [default: from the clock]
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// Text that ends the answer; repeatable
    #[arg(long, value_name = "TEXT")]
    pub(super) stop: Vec<String>,
    /// Do not stop at the model's end-of-sequence tokens
    #[arg(long)]
    pub(super) ignore_eos: bool,
}

/// Options of `chat`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub(super) system: Option<String>,
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
}

/// Options of `generate`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct GenerateArgs {
    /// Prompt
    #[arg(value_name = "PROMPT", group = "source")]
    pub(super) text: Option<String>,
    /// Prompt
    #[arg(long, value_name = "TEXT", group = "source")]
    pub(super) prompt: Option<String>,
    /// Prompt as token ids, for example 1,2,3
    #[arg(long, value_name = "IDS", group = "source", value_delimiter = ',', num_args = 1, allow_hyphen_values = true)]
    pub(super) prompt_ids: Option<Vec<i64>>,
    /// File with one prompt a line, run together: a JSON string, a list of ids, or an object with `prompt` (either) or
    /// `messages`, and optionally numbers named like the flags below; `-` is standard input
    #[arg(long, value_name = "FILE", group = "source")]
    pub(super) prompts_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template
    #[arg(long, conflicts_with = "prompt_ids")]
    pub(super) chat: bool,
    /// Keep special tokens in the text
    #[arg(long)]
    pub(super) keep_special: bool,
    /// Print one JSON object (one a line with --prompts-file)
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) sampling: SamplingArgs,
}

/// Options of `bench`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct BenchArgs {
    /// Batch sizes of the decode measurement [default: 1,2,4,8 and the bundle's largest]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(super) batch: Vec<u32>,
    /// Prompt lengths of the prefill measurement [default: 128,512,1024 as far as they fit]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(super) prefill: Vec<u32>,
    /// Tokens decoded by each sequence
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) decode_tokens: u32,
    /// Prompt tokens of each decoding sequence
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(super) prompt_tokens: u32,
    /// Repetitions; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) rounds: u32,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Options of `inspect`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct InspectArgs {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Options of `verify`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct VerifyArgs {
    /// Also check every tensor's digest and run the golden vectors
    #[arg(long)]
    pub(super) full: bool,
    /// Also ask for a signature by this public key (PEM); repeatable, one signer is enough
    #[arg(long, value_name = "FILE")]
    pub(super) key: Vec<PathBuf>,
    /// File of signatures [default: the bundle's trailer and BUNDLE.sig]
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(super) signature: Option<PathBuf>,
    /// Also check this file of rules, as `serve --policy` does
    #[arg(long, value_name = "FILE")]
    pub(super) policy: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Options of `fit`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct FitArgs {
    /// Memory of the device, for example 24GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) memory: u64,
    /// Tokens of each sequence, prompt and completion together [default: the bundle's context]
    #[arg(long, value_name = "N")]
    pub(super) context: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

impl Args {
    /// How to load the bundle.
    pub(super) fn load_options(&self) -> Result<LoadOptions, CliError> {
        let LoadArgs { threads, isa, kv_memory, expect, no_mmap } = &self.load;
        Ok(LoadOptions {
            path: self.bundle.clone(),
            access: if *no_mmap { Access::Copy } else { Access::Map },
            mode: Mode::Copy,
            expect: *expect,
            threads: threads.map(usize::from),
            isa: isa.map(Isa::from),
            kv_bytes: *kv_memory,
            engine: self.engine_options(),
        })
    }

    fn engine_options(&self) -> EngineOptions {
        match &self.command {
            Command::Serve(serve) => EngineOptions {
                queue_max: serve.max_queue,
                chunk_tokens: serve.chunk_tokens,
                prefix_cache: !serve.no_prefix_cache,
                overcommit: serve.overcommit,
                ..EngineOptions::default()
            },
            // A file of prompts is submitted as a whole and waits in the queue.
            _ => EngineOptions { queue_max: 1 << 20, ..EngineOptions::default() },
        }
    }
}
