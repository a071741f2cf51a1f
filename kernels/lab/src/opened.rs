//! A bundle opened, linked to the device that it was compiled for, and an engine started on it.

use oxide_bundle::Mode;
use oxide_bundle::manifest::{Manifest, Target};
use oxide_runtime::device::Device;
use oxide_runtime::device::cpu::{CpuDevice, CpuOptions};
use oxide_runtime::device::cuda::{CudaDevice, CudaOptions};
use oxide_runtime::engine::{Engine, EngineHandle, EngineLimits, EngineOptions};
use oxide_runtime::open::{OpenOptions, open_bundle};
use std::path::Path;
use std::sync::Arc;

/// Requests that may wait.
const QUEUE_MAX: usize = 4096;

/// An engine that runs a bundle.
pub(crate) struct Opened {
    /// The engine.
    pub(crate) engine: EngineHandle,
    /// The bundle's manifest.
    pub(crate) manifest: Manifest,
    /// Its seal.
    pub(crate) seal: String,
    /// Name of the device.
    pub(crate) device: String,
}

/// Opens a bundle and starts an engine.
///
/// # Errors
/// If the bundle or the device is refused.
pub(crate) fn open(bundle: &Path, cuda: CudaOptions) -> anyhow::Result<Opened> {
    let opened = open_bundle(bundle, OpenOptions { mode: Mode::Copy, ..OpenOptions::default() })?;
    let manifest = opened.bundle.manifest().clone();
    let device: Box<dyn Device> = match manifest.target {
        Target::Cpu => {
            let options = CpuOptions { threads: None, isa: None, kv_pages: manifest.ledger.kv_pages_default };
            Box::new(CpuDevice::link(Arc::clone(opened.bundle.plan()), Arc::new(opened.weights.clone()), options)?)
        }
        Target::Sm90 => Box::new(CudaDevice::link(&opened.bundle, &opened.weights, cuda)?),
    };
    let name = device.info().name;
    let limits = EngineLimits::of(&*device, manifest.limits.context_max, manifest.limits.seqs_max, manifest.model.vocab_known);
    let engine = Engine::start(device, limits, EngineOptions { queue_max: QUEUE_MAX, ..EngineOptions::default() });
    Ok(Opened { engine, manifest, seal: opened.bundle.seal().to_string(), device: name })
}
