//! From plan and checkpoint to one sealed file: `NAME.partial` → verified → renamed into place.
//!
//! An interrupted compile leaves no bundle, only a `.partial` that the next one replaces.

use crate::checkpoint::Checkpoint;
use crate::compile::{Lowered, Report, Request};
use crate::golden::Proof;
use crate::passes::{Settings, Unit, artifacts_used};
use crate::profile::Profile;
use crate::progress::{Phase, Progress};
use crate::weights::{self, RopeTable, WeightError};
use oxide_bundle::dtype::F32Bits;
use oxide_bundle::manifest::{Golden, GoldenStatus, Limits, Manifest, ModelInfo, Provenance};
use oxide_bundle::plan::{KvGeometry, RawPlan};
use oxide_bundle::section::Artifact;
use oxide_bundle::{BundleError, BundleWriter, Contents, SealReport, ledger};
use rayon::prelude::*;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Licence files looked for in a checkpoint.
const LICENCE_FILES: [&str; 4] = ["LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"];
/// Largest licence file read.
const LICENCE_BYTES_MAX: u64 = 1 << 20;

/// Why a bundle could not be sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The file cannot be made, written or renamed.
    #[error("cannot write {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// An input cannot be read.
    #[error("cannot read {path}: {source}")]
    Input {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The bundle does not hold together: a bug of the compiler.
    #[error("sealing: {0}")]
    Bundle(#[from] BundleError),
    /// A weight cannot be made.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The pipeline left something out.
    #[error("sealing: the pipeline left no {0}")]
    Incomplete(&'static str),
    /// Something of the checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
}

/// A bundle being written.
pub struct Draft {
    partial: Partial,
    output: PathBuf,
    writer: BundleWriter<File>,
    manifest: Manifest,
    plan: RawPlan,
    table: RopeTable,
    sealed: Option<SealReport>,
    proof: Option<Proof>,
}

impl Draft {
    /// Assembles everything but the weights and makes the partial file.
    ///
    /// # Errors
    /// If an input cannot be read, the plan does not verify, or the file cannot be made.
    pub fn new(request: &Request, lowered: &Lowered, limits: Limits, checkpoint: &Checkpoint, inputs: &Hashes) -> Result<Self, SealError> {
        let Lowered { unit, settings, .. } = lowered;
        let profile = &request.profile;
        let plan = unit.plan.clone().ok_or(SealError::Incomplete("plan"))?;
        let manifest = manifest(profile, &plan, limits, settings, checkpoint);
        let (artifacts, driver_min) = artifacts(unit, settings)?;
        let licences = licences(profile, checkpoint)? + &kernel_terms(&artifacts);
        let contents = Contents {
            manifest: manifest.clone(),
            plan: plan.clone(),
            artifacts,
            driver_min,
            tokenizer_json: checkpoint.text.tokenizer_json.clone(),
            template: checkpoint.text.template_section(profile),
            golden: Golden::default(),
            provenance: provenance(request, inputs),
            licences,
        };
        let partial = Partial::create(&request.output)?;
        let file = partial.file.try_clone().map_err(|source| SealError::File { path: partial.path.clone(), source })?;
        let writer = BundleWriter::new(file, contents)?;
        let table = RopeTable::new(&profile.numerics, profile.dims.head_dim);
        Ok(Self { partial, output: request.output.clone(), writer, manifest, plan, table, sealed: None, proof: None })
    }

    /// Where the partial file is.
    pub fn path(&self) -> &Path {
        &self.partial.path
    }

    /// Converts and writes every weight.
    ///
    /// # Errors
    /// If a tensor cannot be read or the file cannot be written.
    pub fn write_weights(&mut self, checkpoint: &Checkpoint, progress: &mut dyn Progress) -> Result<(), SealError> {
        progress.start(Phase::Weights, self.plan.weights.iter().map(|weight| weight.size_bytes).sum());
        let writer = &mut self.writer;
        weights::write_all(&self.plan, &checkpoint.inventory, &self.table, |id, part| {
            progress.advance(part.len() as u64);
            writer.write_weight(id, part).map_err(SealError::from)
        })?;
        progress.finish();
        Ok(())
    }

    /// Seals the file and reads it back.
    ///
    /// # Errors
    /// If it cannot be written or does not verify.
    pub fn seal(&mut self, progress: &mut dyn Progress) -> Result<(), SealError> {
        progress.start(Phase::Seal, 0);
        self.sealed = Some(self.writer.seal()?);
        progress.finish();
        Ok(())
    }

    /// Puts proven golden vectors in and seals again.
    ///
    /// # Errors
    /// As [`Draft::seal`].
    pub fn prove(&mut self, proof: Proof, progress: &mut dyn Progress) -> Result<(), SealError> {
        self.manifest.golden = GoldenStatus::Proven;
        self.writer.set_golden(self.manifest.clone(), proof.golden.clone());
        self.proof = Some(proof);
        self.seal(progress)
    }

    /// Moves the sealed file into place.
    ///
    /// # Errors
    /// If it was never sealed, or cannot be synced or renamed.
    pub fn publish(self) -> Result<Report, SealError> {
        let sealed = self.sealed.ok_or(SealError::Incomplete("sealed file"))?;
        self.partial.publish(&self.output)?;
        let greedy = self.proof.as_ref().map(|proof| proof.golden.greedy.as_slice()).unwrap_or_default();
        Ok(Report {
            output: self.output,
            seal: sealed.seal.to_string(),
            file_bytes: sealed.sealed_bytes,
            metadata_bytes: sealed.metadata_bytes,
            profile: self.manifest.profile,
            target: self.manifest.target,
            limits: self.manifest.limits,
            ledger: self.manifest.ledger,
            kernels: self.plan.kernels.len(),
            entries: self.plan.entries.len(),
            golden: self.manifest.golden,
            golden_reference: self.proof.as_ref().is_some_and(|proof| proof.reference),
            golden_prompts: greedy.len(),
            golden_ids: greedy.iter().map(|vector| vector.binding).sum(),
        })
    }
}

/// `NAME.partial`, removed again unless published.
struct Partial {
    path: PathBuf,
    file: File,
    published: bool,
}

impl Partial {
    fn create(output: &Path) -> Result<Self, SealError> {
        let mut name = output.as_os_str().to_owned();
        name.push(".partial");
        let path = PathBuf::from(name);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|source| SealError::File { path: path.clone(), source })?;
        Ok(Self { path, file, published: false })
    }

    fn publish(mut self, output: &Path) -> Result<(), SealError> {
        let error = |source| SealError::File { path: output.to_owned(), source };
        self.file.sync_all().map_err(error)?;
        std::fs::rename(&self.path, output).map_err(error)?;
        self.published = true;
        let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(error)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: a leftover is replaced by the next compile.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn manifest(profile: &Profile, plan: &RawPlan, limits: Limits, settings: &Settings, checkpoint: &Checkpoint) -> Manifest {
    let kv_memory_mib = profile.settings(settings.target).map_or(0, |target| target.kv_memory_mib);
    let pages = kv_pages(&plan.kv, kv_memory_mib, plan.bounds.pages_per_seq_max);
    Manifest {
        name: profile.name.clone(),
        profile: profile.name.clone(),
        target: settings.target,
        model: model_info(profile, plan, settings),
        limits,
        ledger: ledger::ledger(plan, pages),
        tokens: checkpoint.text.tokens.clone(),
        generation: checkpoint.text.generation.clone(),
        golden: GoldenStatus::Unproven,
    }
}

/// Pages of the default pool: as many as fit the memory, and at least one whole context.
fn kv_pages(kv: &KvGeometry, memory_mib: u32, pages_per_seq: u32) -> u32 {
    let page_bytes = kv.bytes_per_token().saturating_mul(u64::from(kv.page_tokens)).max(1);
    let fitting = (u64::from(memory_mib) << 20) / page_bytes;
    u32::try_from(fitting).unwrap_or(u32::MAX).max(pages_per_seq)
}

fn model_info(profile: &Profile, plan: &RawPlan, settings: &Settings) -> ModelInfo {
    let dims = profile.dims;
    let elements = |shape: &[u32]| shape.iter().map(|&n| u64::from(n)).product::<u64>();
    let learned = plan.weights.iter().filter(|weight| !weight.sources.is_empty());
    ModelInfo {
        family: profile.family.model_type().to_owned(),
        parameters: learned.map(|weight| elements(&weight.shape)).sum(),
        layers: dims.layers,
        hidden: dims.hidden,
        intermediate: dims.intermediate,
        heads: dims.heads,
        kv_heads: dims.kv_heads,
        head_dim: dims.head_dim,
        vocab: dims.vocab,
        vocab_known: profile.tokenizer.vocab_known,
        tied: dims.tied,
        rope_theta: F32Bits::new(profile.numerics.rope_theta as f32),
        weight_dtype: settings.weight,
        kv_dtype: settings.kv.dtype,
    }
}

fn artifacts(unit: &Unit, settings: &Settings) -> Result<(Vec<Artifact>, u32), SealError> {
    let schedule = unit.schedule.as_ref().ok_or(SealError::Incomplete("schedule"))?;
    let mut sealed = Vec::new();
    let mut driver_min = 0;
    for index in artifacts_used(schedule) {
        let kernel = settings.catalogue.kernels().get(index).ok_or(SealError::Incomplete("artifact"))?;
        let code = kernel.code.read().map_err(|source| SealError::Input { path: kernel.manifest.name.clone().into(), source })?;
        sealed.push(Artifact { code, manifest: kernel.manifest.clone() });
        driver_min = driver_min.max(kernel.manifest.driver_min);
    }
    Ok((sealed, driver_min))
}

/// The licence that the profile names, and the licence files of the checkpoint in full.
fn licences(profile: &Profile, checkpoint: &Checkpoint) -> Result<String, SealError> {
    let crate::profile::Source { repository, revision, licence } = &profile.source;
    let mut text = format!("Weights, tokenizer and template: {licence}, from {repository} at {revision}.\n");
    for name in LICENCE_FILES {
        if let Some(bytes) = checkpoint.files.read(name, LICENCE_BYTES_MAX)? {
            text.push_str(&format!("\n{name}\n\n{}\n", String::from_utf8_lossy(&bytes)));
        }
    }
    Ok(text)
}

/// Terms of the code objects and the toolchains that made them.
fn kernel_terms(artifacts: &[Artifact]) -> String {
    let toolchain = |artifact: &Artifact| -> String {
        let tools = artifact.manifest.toolchain.iter().filter(|(name, _)| !name.ends_with("_sha256"));
        tools.map(|(name, version)| format!("{name} {version}")).collect::<Vec<_>>().join(", ")
    };
    let toolchains: BTreeSet<String> = artifacts.iter().map(toolchain).collect();
    match artifacts.len() {
        0 => String::new(),
        count => format!("\nKernels ({count} code objects): MIT, compiled by {}.\n", toolchains.into_iter().collect::<Vec<_>>().join("; ")),
    }
}

/// SHA-256 of every input file by its name, as hex digits.
pub type Hashes = BTreeMap<String, String>;

/// Hashes every file of a checkpoint that a compile reads, in parallel.
///
/// # Errors
/// If one cannot be read.
pub fn hash_inputs(checkpoint: &Checkpoint) -> Result<Hashes, SealError> {
    let names = ["config.json".to_owned()].into_iter();
    let names = names.chain(checkpoint.text.files.iter().cloned()).chain(checkpoint.inventory.shards.iter().cloned());
    let names: Vec<String> = names.collect();
    let hash = |name: &String| Ok((name.clone(), hash_file(checkpoint, name)?));
    Ok(names.par_iter().map(hash).collect::<Result<Vec<_>, SealError>>()?.into_iter().collect())
}

fn provenance(request: &Request, inputs: &Hashes) -> Provenance {
    let flags = [("max-context", request.context_max), ("max-seqs", request.seqs_max)];
    let mut options: BTreeMap<String, String> =
        flags.into_iter().filter_map(|(flag, value)| Some((flag.to_owned(), value?.to_string()))).collect();
    options.insert("target".to_owned(), request.target.to_string());
    if request.golden == GoldenStatus::Unproven {
        options.insert("no-golden".to_owned(), "true".to_owned());
    }
    Provenance {
        compiler: env!("CARGO_PKG_VERSION").to_owned(),
        profile_toml: request.profile.toml.clone(),
        options,
        inputs: inputs.clone(),
    }
}

fn hash_file(checkpoint: &Checkpoint, name: &str) -> Result<String, SealError> {
    let mut hash = Sha256::new();
    let error = |source| SealError::Input { path: checkpoint.files.path(name), source };
    let missing = || error(io::Error::from(io::ErrorKind::NotFound));
    match checkpoint.files.open(name)?.ok_or_else(missing)? {
        crate::checkpoint::Blob::Static(bytes) => hash.update(bytes),
        crate::checkpoint::Blob::File(mut file, _) => {
            let mut buffer = vec![0; 1 << 20];
            loop {
                match file.read(&mut buffer).map_err(error)? {
                    0 => break,
                    count => hash.update(&buffer[..count]),
                }
            }
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
