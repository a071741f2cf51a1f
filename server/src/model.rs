//! A bundle made ready to answer: opened and verified, tokenizer and template built, device linked, engine started.
//!
//! The one place where the edge meets devices; everything else in this package sees the engine's
//! handle and text. Tokenizer and template are built on a thread of their own while the weights are
//! verified.

use oxide_bundle::manifest::{Manifest, Target, TemplateSection};
use oxide_bundle::{Bundle, Mode, Seal};
use oxide_runtime::device::cpu::{CpuDevice, CpuOptions, Isa};
use oxide_runtime::device::cuda::{AdmitError, CudaDevice, CudaOptions};
use oxide_runtime::device::{Device, DeviceError, DeviceInfo};
use oxide_runtime::engine::{Engine, EngineHandle, EngineLimits, EngineOptions};
use oxide_runtime::mapping::Access;
use oxide_runtime::open::{OpenError, OpenOptions, Weights, open_bundle};
use oxide_text::{ChatTemplate, TemplateError, TemplateTokens, Tokenizer, TokenizerError};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How to load a bundle.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The file.
    pub path: PathBuf,
    /// Mapping or copy.
    pub access: Access,
    /// Verification; [`Mode::Metadata`] counts as [`Mode::Copy`], since weights are about to be used.
    pub mode: Mode,
    /// The seal that the file must have.
    pub expect: Option<Seal>,
    /// Compute threads; all processors if `None`.
    pub threads: Option<usize>,
    /// Instruction set; the best if `None`.
    pub isa: Option<Isa>,
    /// Bytes of the KV pool; the bundle's default if `None`.
    pub kv_bytes: Option<u64>,
    /// Engine options.
    pub engine: EngineOptions,
}

impl LoadOptions {
    /// Defaults for a file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            access: Access::default(),
            mode: Mode::Copy,
            expect: None,
            threads: None,
            isa: None,
            kv_bytes: None,
            engine: EngineOptions::default(),
        }
    }
}

/// A bundle that cannot be made ready.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is refused.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its tokenizer does not load.
    #[error("the bundle's tokenizer does not load: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// Its template does not compile.
    #[error("the bundle's chat template does not load: {0}")]
    Template(#[from] TemplateError),
    /// The device refuses the plan.
    #[error("cannot link the plan: {0}")]
    Device(#[from] DeviceError),
    /// The GPU does not admit the bundle.
    #[error("the GPU does not admit the bundle: {0}")]
    Admit(#[from] AdmitError),
    /// The instruction set asked for is absent.
    #[error("this processor has no {asked} (it has {available}): choose another --isa, or leave it out")]
    Isa {
        /// Asked for.
        asked: Isa,
        /// Best available.
        available: Isa,
    },
    /// The KV pool asked for is too small or too large.
    #[error("--kv-memory {asked_bytes} bytes is {pages} KV pages of {page_bytes} bytes, allowed are 1 to {max}: {hint}")]
    KvMemory {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Pages that is.
        pages: u64,
        /// Bytes of a page.
        page_bytes: u64,
        /// Most pages.
        max: u32,
        /// What to do.
        hint: &'static str,
    },
}

/// Tokenizer and template of a bundle.
#[derive(Clone)]
pub struct TextEdge {
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template; `None` for a base model.
    pub template: Option<Arc<ChatTemplate>>,
}

impl TextEdge {
    /// Builds both from a bundle.
    ///
    /// # Errors
    /// If one of them does not load.
    pub fn of(bundle: &Bundle) -> Result<Self, LoadError> {
        Self::new(bundle.tokenizer_json(), bundle.template(), bundle.manifest())
    }

    fn new(tokenizer_json: &[u8], section: &TemplateSection, manifest: &Manifest) -> Result<Self, LoadError> {
        let bos = manifest.tokens.bos.filter(|_| manifest.tokens.add_bos);
        let tokenizer = Tokenizer::from_json(tokenizer_json)?.with_bos(bos);
        let tokens = TemplateTokens { bos: section.bos_token.clone(), eos: section.eos_token.clone() };
        let template = section.chat_template.as_deref().map(|source| ChatTemplate::new(source, tokens, &tokenizer)).transpose()?;
        Ok(Self { tokenizer: Arc::new(tokenizer), template: template.map(Arc::new) })
    }
}

/// How long the stages of loading took.
#[derive(Copy, Clone, Debug, Default)]
pub struct LoadTimes {
    /// Opening and verifying metadata.
    pub open: Duration,
    /// Tokenizer and template, beside the weights.
    pub text: Duration,
    /// Verifying weights and linking.
    pub weights_and_link: Duration,
    /// From start to ready.
    pub total: Duration,
}

/// A bundle ready to answer. Cheap to clone.
#[derive(Clone)]
pub struct LoadedModel {
    /// The bundle: manifest, limits, golden vectors, seal.
    pub bundle: Bundle,
    /// Tokenizer and template.
    pub text: TextEdge,
    /// The engine.
    pub engine: EngineHandle,
    /// The device.
    pub device: DeviceInfo,
    /// Times of loading.
    pub times: LoadTimes,
}

impl LoadedModel {
    /// Opens, verifies, links and starts.
    ///
    /// # Errors
    /// If any of that fails; the message says what to do.
    pub fn load(options: &LoadOptions) -> Result<Self, LoadError> {
        let start = Instant::now();
        let opened = open_bundle(&options.path, OpenOptions { access: options.access, mode: Mode::Metadata, expect: options.expect })?;
        let (bundle, weights) = (opened.bundle, opened.weights);
        let open = start.elapsed();
        let (text, linked) = std::thread::scope(|scope| {
            let text = scope.spawn(|| {
                let start = Instant::now();
                TextEdge::of(&bundle).map(|edge| (edge, start.elapsed()))
            });
            let linked = verify_and_link(&bundle, &weights, options);
            (text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), linked)
        });
        let device = linked?;
        let (text, text_time) = text?;
        let (manifest, info) = (bundle.manifest(), device.info());
        let limits = EngineLimits::of(&*device, manifest.limits.context_max, manifest.limits.seqs_max, manifest.model.vocab_known);
        let engine = Engine::start(device, limits, options.engine.clone());
        let total = start.elapsed();
        let times = LoadTimes { open, text: text_time, weights_and_link: total.saturating_sub(open), total };
        Ok(Self { bundle, text, engine, device: info, times })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        self.bundle.manifest()
    }

    /// Ids that end a generation.
    pub fn eos(&self) -> &[u32] {
        &self.bundle.manifest().tokens.eos
    }
}

fn verify_and_link(bundle: &Bundle, weights: &Weights, options: &LoadOptions) -> Result<Box<dyn Device>, LoadError> {
    let refused = |source| OpenError::Refused { path: options.path.clone(), source };
    let manifest = bundle.manifest();
    match manifest.target {
        Target::Cpu => {
            check_isa(options.isa)?;
            let kv_pages = kv_pages(manifest, options.kv_bytes)?;
            bundle.verify_weights().map_err(refused)?;
            if options.mode == Mode::Full {
                bundle.verify_tensors().map_err(refused)?;
            }
            let cpu = CpuOptions { threads: options.threads, isa: options.isa, kv_pages };
            Ok(Box::new(CpuDevice::link(Arc::clone(bundle.plan()), Arc::new(weights.clone()), cpu)?))
        }
        Target::Sm90 => {
            let kv_pages = options.kv_bytes.map(|_| kv_pages(manifest, options.kv_bytes)).transpose()?;
            let cuda = CudaOptions { kv_pages, ..CudaOptions::default() };
            Ok(Box::new(CudaDevice::link(bundle, weights, cuda)?))
        }
    }
}

fn check_isa(asked: Option<Isa>) -> Result<(), LoadError> {
    match asked {
        Some(asked) if !asked.is_available() => Err(LoadError::Isa { asked, available: Isa::best() }),
        _ => Ok(()),
    }
}

/// Pages of the KV pool for `kv_bytes`, or the bundle's default.
///
/// # Errors
/// If that is no page, or more than can be numbered.
pub fn kv_pages(manifest: &Manifest, kv_bytes: Option<u64>) -> Result<u32, LoadError> {
    let Some(asked_bytes) = kv_bytes else {
        return Ok(manifest.ledger.kv_pages_default);
    };
    let page_bytes = page_bytes(manifest);
    let pages = asked_bytes / page_bytes.max(1);
    let max = u32::MAX / manifest.limits.page_tokens.max(1);
    match u32::try_from(pages) {
        Ok(pages) if (1..=max).contains(&pages) => Ok(pages),
        _ => {
            let hint = if pages == 0 { "give more memory" } else { "give less memory" };
            Err(LoadError::KvMemory { asked_bytes, pages, page_bytes, max, hint })
        }
    }
}

/// Bytes of a KV page, all layers.
pub fn page_bytes(manifest: &Manifest) -> u64 {
    manifest.ledger.kv_bytes_per_token.saturating_mul(u64::from(manifest.limits.page_tokens))
}
