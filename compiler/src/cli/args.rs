//! Arguments. The environment is read here and nowhere else.

use crate::compile::{CompileError, Request, Stage};
use crate::hub;
use crate::profile::{Profile, builtin};
use crate::reproduce::Sources;
use clap::{Parser, Subcommand};
use oxide_bundle::manifest::{GoldenStatus, Target};
use std::path::{Path, PathBuf};

/// Lowers a model profile and its checkpoint, offline, into one sealed bundle.
#[derive(Debug, Parser)]
#[command(name = "oxide-compile", version, arg_required_else_help = true)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(
    after_help = "Examples:\n  oxide-compile oxide-tiny --target cpu -o tiny.oxb\n  oxide-compile pull qwen2.5-1.5b\n  oxide-compile qwen2.5-1.5b --target cpu --dump plan"
)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    compile: CompileArgs,
}

impl Args {
    /// The command; without a name it is `compile`.
    pub(super) fn command(self) -> Command {
        self.command.unwrap_or(Command::Compile(self.compile))
    }
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Lists the shipped profiles.
    Profiles {
        /// Prints JSON.
        #[arg(long)]
        json: bool,
    },
    /// Lists the sm90 kernel artifacts.
    Kernels(KernelsArgs),
    /// Downloads a profile's checkpoint into the Hugging Face cache; resumes, checks hashes.
    Pull(PullArgs),
    /// Makes a bundle again from the recipe sealed in it, and names the first section that differs.
    Reproduce(ReproduceArgs),
    /// Compiles a profile; the word may be left out.
    Compile(CompileArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct KernelsArgs {
    /// Folder of artifacts [default: those built in]
    #[arg(long, value_name = "DIR")]
    pub(super) artifacts: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct CacheArgs {
    /// Hugging Face cache of repositories [default: $HF_HOME/hub or ~/.cache/huggingface/hub].
    #[arg(long, value_name = "DIR", env = "HF_HUB_CACHE")]
    cache_dir: Option<PathBuf>,
    #[arg(long, hide = true, env = "HF_HOME")]
    hf_home: Option<PathBuf>,
    #[arg(long, hide = true, env = "XDG_CACHE_HOME")]
    xdg_cache_home: Option<PathBuf>,
    #[arg(long, hide = true, env = "HOME", default_value = ".")]
    home: PathBuf,
}

impl CacheArgs {
    fn hf_home(&self) -> PathBuf {
        let cache = || self.xdg_cache_home.clone().unwrap_or_else(|| self.home.join(".cache"));
        self.hf_home.clone().unwrap_or_else(|| cache().join("huggingface"))
    }

    pub(super) fn cache(&self) -> hub::Cache {
        hub::Cache::at(self.cache_dir.clone().unwrap_or_else(|| self.hf_home().join("hub")))
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct PullArgs {
    /// Name of a shipped profile, or a path to a .toml file.
    pub(super) profile: String,
    /// Commit or branch instead of the profile's.
    #[arg(long)]
    pub(super) revision: Option<String>,
    /// Hub to download from.
    #[arg(long, value_name = "URL", env = "HF_ENDPOINT", default_value = "https://huggingface.co")]
    pub(super) endpoint: String,
    /// Access token [default: the file `token` of the Hugging Face home].
    #[arg(long, env = "HF_TOKEN", hide_env_values = true)]
    token: Option<String>,
    #[command(flatten)]
    pub(super) cache: CacheArgs,
    /// Prints JSON.
    #[arg(long)]
    pub(super) json: bool,
}

impl PullArgs {
    pub(super) fn token(&self) -> Option<String> {
        let stored = || std::fs::read_to_string(self.cache.hf_home().join("token")).ok();
        self.token.clone().or_else(stored).map(|token| token.trim().to_owned()).filter(|token| !token.is_empty())
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct ReproduceArgs {
    /// The bundle.
    pub(super) bundle: PathBuf,
    /// Checkpoint: a Hugging Face folder [default: the Hugging Face cache].
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Keeps the bundle made again [default: it is removed].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Folder of sm90 artifacts [default: those built in]
    #[arg(long, value_name = "DIR")]
    artifacts: Option<PathBuf>,
    #[command(flatten)]
    cache: CacheArgs,
    /// Prints JSON, and no progress.
    #[arg(long)]
    pub(super) json: bool,
}

impl ReproduceArgs {
    pub(super) fn sources(&self) -> Sources {
        Sources { model: self.model.clone(), artifacts: self.artifacts.clone(), cache: self.cache.cache(), output: self.output.clone() }
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct CompileArgs {
    /// Name of a shipped profile, or a path to a .toml file.
    #[arg(required = true)]
    profile: Option<String>,
    /// What to compile for: cpu or sm90.
    #[arg(long, value_parser = target, required = true)]
    target: Option<Target>,
    /// Checkpoint: a Hugging Face folder [default: the Hugging Face cache].
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The bundle [default: PROFILE-TARGET.oxb].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Longest sequence, at most the profile's.
    #[arg(long, value_name = "N")]
    max_context: Option<u32>,
    /// Sequences running together, at most the profile's.
    #[arg(long, value_name = "N")]
    max_seqs: Option<u32>,
    /// Prints a representation and stops; needs no checkpoint.
    #[arg(long, value_name = "STAGE")]
    pub(super) dump: Option<Stage>,
    /// Prints the report as JSON, and no progress.
    #[arg(long)]
    pub(super) json: bool,
    /// Seals without running the model; the bundle says that it is unproven.
    #[arg(long)]
    no_golden: bool,
    /// Folder of sm90 artifacts [default: those built in]
    #[arg(long, value_name = "DIR")]
    artifacts: Option<PathBuf>,
    #[command(flatten)]
    cache: CacheArgs,
}

impl CompileArgs {
    /// The profile where it is a file.
    pub(super) fn profile_file(&self) -> Option<&Path> {
        self.profile.as_deref().filter(|name| builtin(name).is_none()).map(Path::new)
    }

    pub(super) fn request(&self) -> Result<Request, CompileError> {
        // Both are required by the parser, unless a subcommand is given, and then this is not called.
        let profile = Profile::load(self.profile.as_deref().unwrap_or_default())?;
        let target = self.target.unwrap_or(Target::Cpu);
        let output = self.output.clone().unwrap_or_else(|| PathBuf::from(format!("{}-{target}.oxb", profile.name)));
        Ok(Request {
            profile,
            target,
            model: self.model.clone(),
            output,
            context_max: self.max_context,
            seqs_max: self.max_seqs,
            golden: if self.no_golden { GoldenStatus::Unproven } else { GoldenStatus::Proven },
            artifacts: self.artifacts.clone(),
            cache: self.cache.cache(),
        })
    }
}

fn target(text: &str) -> Result<Target, String> {
    match text {
        "cpu" => Ok(Target::Cpu),
        "sm90" => Ok(Target::Sm90),
        other => Err(format!("no target `{other}`, there are cpu and sm90")),
    }
}
