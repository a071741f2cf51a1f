//! One compile from request to report: the order of everything, and nothing else.

use crate::catalogue::{Catalogue, CatalogueError};
use crate::checkpoint::{Checkpoint, CheckpointError, Files};
use crate::golden::{self, GoldenError, Proof};
use crate::graph::{self, Graph, Precision};
use crate::hub::{self, HubError};
use crate::passes::{self, LowerError, Settings, Unit};
use crate::paths;
use crate::profile::{Profile, ProfileError, builtin};
use crate::progress::{Phase, Progress};
use crate::reproduce::ReproduceError;
use crate::schedule;
use crate::seal::{self, Hashes, SealError};
use oxide_bundle::dtype::DType;
use oxide_bundle::dump::PlanText;
use oxide_bundle::manifest::{GoldenStatus, Ledger, Limits, Target};
use oxide_bundle::plan::KvGeometry;
use oxide_bundle::step::StepBounds;
use serde::Serialize;
use std::path::PathBuf;

/// Logit-bias entries that a step holds for each row (`logit_bias`, and stop ids held back by `min_tokens`).
const BIAS_PER_ROW: u32 = 1024;

/// What to compile.
#[derive(Clone, Debug)]
pub struct Request {
    /// The profile.
    pub profile: Profile,
    /// The target.
    pub target: Target,
    /// The checkpoint's folder; looked up in `cache` if `None`.
    pub model: Option<PathBuf>,
    /// Where the bundle goes.
    pub output: PathBuf,
    /// Shortens the context.
    pub context_max: Option<u32>,
    /// Lowers the number of sequences.
    pub seqs_max: Option<u32>,
    /// Whether the golden vectors are made and proven.
    pub golden: GoldenStatus,
    /// Folder of sm90 artifacts; `None` takes those that the compiler was built with.
    pub artifacts: Option<PathBuf>,
    /// Hugging Face cache.
    pub cache: hub::Cache,
}

/// A representation that `--dump` prints.
#[derive(Copy, Clone, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// After the graph passes.
    Graph,
    /// Kernel calls by class.
    Schedule,
    /// The verified plan.
    Plan,
}

/// What was compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The file.
    #[serde(serialize_with = "crate::paths::lossy")]
    pub output: PathBuf,
    /// Its seal.
    pub seal: String,
    /// Its length.
    pub file_bytes: u64,
    /// Bytes before the weights.
    pub metadata_bytes: u64,
    /// Profile.
    pub profile: String,
    /// Target.
    pub target: Target,
    /// Limits.
    pub limits: Limits,
    /// Memory.
    pub ledger: Ledger,
    /// Kernels of the plan.
    pub kernels: usize,
    /// Batch classes.
    pub entries: usize,
    /// Whether golden vectors were proven.
    pub golden: GoldenStatus,
    /// Whether they were compared with ids of a reference implementation.
    pub golden_reference: bool,
    /// Greedy prompts proven and their ids that bind.
    pub golden_prompts: usize,
    /// Greedy ids that bind.
    pub golden_ids: u32,
}

/// Why a compile failed.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The artifacts.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// A limit beyond the profile's.
    #[error("{flag} {found} is outside 1..={allowed} of profile `{profile}`")]
    Limit {
        /// The flag.
        flag: &'static str,
        /// Its value.
        found: u32,
        /// The largest allowed.
        allowed: u32,
        /// The profile.
        profile: String,
    },
    /// The checkpoint is nowhere.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Lowering.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// Writing the bundle.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The golden step.
    #[error(transparent)]
    Golden(#[from] GoldenError),
    /// Making a bundle again.
    #[error(transparent)]
    Reproduce(#[from] ReproduceError),
    /// The output would replace what is read.
    #[error("writing {output} would replace the input {input}: give another path with -o")]
    Overwrites {
        /// Where the bundle goes.
        output: PathBuf,
        /// What is read.
        input: PathBuf,
    },
    /// Printing the result.
    #[error("cannot write output: {0}")]
    Output(std::io::Error),
}

impl CompileError {
    /// Exit code of the command line; listed in `docs/operations.md`.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Output(_) => 1,
            Self::Overwrites { .. } => 2,
            Self::Profile(ProfileError::Unknown { .. }) => 3,
            Self::Profile(_) => 4,
            Self::Limit { .. } => 5,
            Self::Hub(error) => error.exit_code(),
            Self::Checkpoint(CheckpointError::MissingShard { .. }) => 11,
            Self::Checkpoint(CheckpointError::MissingFile { .. }) => 12,
            Self::Checkpoint(CheckpointError::Mismatch { .. }) => 13,
            Self::Checkpoint(CheckpointError::Read { .. } | CheckpointError::Malformed { .. }) => 14,
            Self::Lower(LowerError::MissingKernels { .. }) => 20,
            Self::Lower(_) => 21,
            Self::Catalogue(_) => 22,
            Self::Seal(_) => 30,
            Self::Golden(_) => 31,
            Self::Reproduce(ReproduceError::Differs { .. }) => 50,
            Self::Reproduce(_) => 51,
        }
    }
}

/// Limits after profile and flags.
pub fn limits(request: &Request) -> Result<Limits, CompileError> {
    let profile = &request.profile;
    let settings = profile.settings(request.target)?;
    let bounded = |flag, found: Option<u32>, allowed| match found {
        Some(found) if found == 0 || found > allowed => Err(CompileError::Limit { flag, found, allowed, profile: profile.name.clone() }),
        Some(found) => Ok((found, flag)),
        None => Ok((allowed, "profile")),
    };
    let (context_max, context_origin) = bounded("--max-context", request.context_max, profile.context_max)?;
    let (seqs_max, seqs_origin) = bounded("--max-seqs", request.seqs_max, settings.seqs_max())?;
    let step_tokens_max = settings.classes(seqs_max).iter().map(|class| class.tokens_max()).max().unwrap_or(0);
    Ok(Limits {
        context_max,
        context_origin: context_origin.to_owned(),
        seqs_max,
        seqs_origin: seqs_origin.to_owned(),
        step_tokens_max,
        page_tokens: settings.page_tokens,
    })
}

/// Settings of the pipeline for a request.
///
/// # Errors
/// If the profile has no such target, a limit is out of range, or the artifacts cannot be read.
pub fn settings(request: &Request) -> Result<Settings, CompileError> {
    let profile = &request.profile;
    let target = profile.settings(request.target)?;
    let limits = limits(request)?;
    let dims = profile.dims;
    let (act, catalogue) = match request.target {
        Target::Cpu => (DType::F32, Catalogue::Cpu),
        Target::Sm90 => (DType::Bf16, request.artifacts.as_deref().map_or_else(Catalogue::embedded, Catalogue::read)?),
    };
    let kv = KvGeometry {
        layers: dims.layers,
        page_tokens: target.page_tokens,
        kv_heads: dims.kv_heads,
        head_dim: dims.head_dim,
        dtype: target.kv_dtype,
    };
    let bounds = StepBounds {
        tokens_max: limits.step_tokens_max,
        seqs_max: limits.seqs_max,
        rows_max: limits.seqs_max,
        pages_per_seq_max: limits.context_max.div_ceil(target.page_tokens),
        bias_max: limits.seqs_max.saturating_mul(BIAS_PER_ROW),
        history_max: limits.seqs_max.saturating_mul(limits.context_max.min(dims.vocab)),
        vocab: dims.vocab,
    };
    let classes = target.classes(limits.seqs_max);
    Ok(Settings { target: request.target, act, weight: profile.dtype, kv, bounds, classes, catalogue })
}

/// A profile lowered for a target.
#[derive(Debug)]
pub struct Lowered {
    /// The graph before any pass: what the checkpoint is checked against.
    pub graph: Graph,
    /// Every representation after it.
    pub unit: Unit,
    /// What the passes were told.
    pub settings: Settings,
}

/// Profile and flags → plan, without a checkpoint.
///
/// # Errors
/// If a limit is out of range, kernels are missing, or lowering fails.
pub fn lower(request: &Request) -> Result<Lowered, CompileError> {
    let settings = settings(request)?;
    let context = limits(request)?.context_max;
    let built = graph::build(&request.profile, Precision { act: settings.act }, context);
    let graph = built.map_err(|problem| LowerError::Pass { pass: "build", problem })?;
    let unit = passes::lower(graph.clone(), &settings)?;
    Ok(Lowered { graph, unit, settings })
}

/// Text of a representation.
///
/// # Errors
/// As [`lower`]; `graph` needs no kernels.
pub fn dump(request: &Request, stage: Stage) -> Result<String, CompileError> {
    if stage == Stage::Graph {
        let settings = settings(request)?;
        let context = limits(request)?.context_max;
        let built = graph::build(&request.profile, Precision { act: settings.act }, context);
        let graph = built.map_err(|problem| LowerError::Pass { pass: "build", problem })?;
        return Ok(graph::print(&passes::lower_through("choose_layouts", graph, &settings)?.graph));
    }
    let unit = lower(request)?.unit;
    Ok(match stage {
        Stage::Plan => unit.plan.as_ref().map(|plan| PlanText(plan).to_string()).unwrap_or_default(),
        Stage::Graph | Stage::Schedule => unit.schedule.as_ref().map(schedule::print).unwrap_or_default(),
    })
}

/// The checkpoint's files: the folder given, the embedded model, or the Hugging Face cache.
///
/// # Errors
/// If none has it; the error names the `pull` command.
pub fn files(request: &Request) -> Result<Files, CompileError> {
    if let Some(folder) = &request.model {
        return Ok(Files::Folder(folder.clone()));
    }
    let embedded = builtin(&request.profile.name).filter(|found| found.toml == request.profile.toml && !found.checkpoint.is_empty());
    match embedded {
        Some(found) => Ok(Files::Embedded(found.checkpoint)),
        None => Ok(Files::Folder(request.cache.snapshot(&request.profile)?)),
    }
}

/// Compiles a bundle.
///
/// # Errors
/// If anything is missing, does not fit, or cannot be written; nothing is left at the output path then.
pub fn compile(request: &Request, progress: &mut dyn Progress) -> Result<Report, CompileError> {
    progress.start(Phase::Lower, 0);
    let lowered = lower(request)?;
    progress.finish();
    progress.start(Phase::Check, 0);
    let files = files(request)?;
    paths::refuse_overwriting(&request.output, files.paths())?;
    let checkpoint = Checkpoint::open(files, &request.profile, &lowered.graph)?;
    let inputs = seal::hash_inputs(&checkpoint)?;
    progress.finish();
    let mut draft = seal::Draft::new(request, &lowered, limits(request)?, &checkpoint, &inputs)?;
    draft.write_weights(&checkpoint, progress)?;
    draft.seal(progress)?;
    if request.golden == GoldenStatus::Proven {
        let proof = match request.target {
            Target::Cpu => golden::prove(draft.path(), request, &checkpoint, &inputs, progress)?,
            Target::Sm90 => prove_on_cpu(request, &checkpoint, &inputs, progress)?,
        };
        draft.prove(proof, progress)?;
    }
    Ok(draft.publish()?)
}

/// Golden vectors of a target that this machine may not have: the same profile and checkpoint lowered for
/// cpu into a file beside the output, which is removed again.
fn prove_on_cpu(request: &Request, checkpoint: &Checkpoint, inputs: &Hashes, progress: &mut dyn Progress) -> Result<Proof, CompileError> {
    let mut output = request.output.clone().into_os_string();
    output.push(".golden");
    let cpu = Request { target: Target::Cpu, output: output.into(), seqs_max: None, ..request.clone() };
    let mut draft = seal::Draft::new(&cpu, &lower(&cpu)?, limits(&cpu)?, checkpoint, inputs)?;
    draft.write_weights(checkpoint, progress)?;
    draft.seal(progress)?;
    Ok(golden::prove(draft.path(), request, checkpoint, inputs, progress)?)
}
