//! The CUDA device: sealed cubins, one memory reservation, graphs for the decode classes.
//!
//! Admission order: target, driver and device against the bundle → every code object against its
//! manifest → one reservation for the whole ledger → weights, each chunk hashed before its transfer →
//! graphs → ready. A step allocates nothing and waits for nothing: inputs go through a ring of pinned
//! staging, outputs come back the same way, and the host may be one step ahead.
//! **Invariant:** only functions of sealed artifacts are launched; graph nodes are enumerated to prove it.

mod driver;
mod link;
mod place;
mod reserve;
mod slots;
mod upload;

pub use driver::{CudaError, DeviceProperties};
pub use link::LinkError;
pub use place::{Argument, CudaPlace, KernelLaunch};
pub use upload::UploadError;

use super::{Device, DeviceError, DeviceInfo, LaunchCounters, StepInputs, StepOutputs};
use crate::open::Weights;
use driver::{Context, Event, Graph, GraphNode, Module, PinnedMemory, Stream};
use link::{BoundStep, Kernel};
use oxide_bundle::Bundle;
use oxide_bundle::container::layout::WEIGHT_CHUNK_BYTES;
use oxide_bundle::ids::{EntryId, StepId};
use oxide_bundle::manifest::Target;
use oxide_bundle::plan::{BatchClass, Bindings, Plan};
use oxide_bundle::step::{InputSlot, OutputSlot, TOP_LOGPROBS_MAX};
use reserve::{Reservation, reserve};
use slots::{InputLayout, Padded};
use std::collections::VecDeque;
use std::sync::Arc;

/// Steps in flight: the host prepares one while the device runs another.
const DEPTH: usize = 2;
/// Changed spans of the block tables that are sent one by one: beyond, one transfer of all rows is quicker.
const TABLE_SPANS_MAX: usize = 32;

/// How to link.
#[derive(Copy, Clone, Debug)]
pub struct CudaOptions {
    /// Device number.
    pub ordinal: u32,
    /// KV pages; `None` takes what the bundle's ledger says, as far as it fits.
    pub kv_pages: Option<u32>,
    /// Replays decode classes as graphs; without, the same kernels are launched one by one.
    pub graphs: bool,
    /// Lets kernels start while their predecessor ends.
    pub pdl: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { ordinal: 0, kv_pages: None, graphs: true, pdl: true }
    }
}

/// Why a bundle was not admitted to a device.
#[derive(Debug, thiserror::Error)]
pub enum AdmitError {
    /// The driver is missing or failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device is not the target. All differences.
    #[error("this device cannot run the bundle: {}", .0.join("; "))]
    Target(Vec<String>),
    /// A code object or step is refused.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The ledger does not fit.
    #[error("{0}")]
    Memory(String),
    /// The weights are damaged, or could not be sent.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// A graph holds something that is not sealed.
    #[error("the graph of entry {entry} holds a node that is no sealed kernel: {node}")]
    ForeignNode {
        /// Entry.
        entry: EntryId,
        /// Node.
        node: String,
    },
}

/// A linked bundle on a GPU.
pub struct CudaDevice {
    // Dropped from top to bottom: users of memory and modules before what they use.
    programs: Vec<Program>,
    kernels: Vec<Kernel>,
    launches: Arc<LaunchCounters>,
    slots: Vec<StagingSlot>,
    in_flight: VecDeque<InFlight>,
    next_slot: usize,
    table_shadow: Vec<u32>,
    changed_rows: Vec<ChangedRow>,
    _modules: Vec<Module>,
    memory: Reservation,
    stream: Stream,
    context: Context,
    context_is_current: bool,
    plan: Arc<Plan>,
    kv_pages: u32,
}

struct Program {
    layout: InputLayout,
    steps: Vec<BoundStep>,
    graph: Option<Graph>,
}

/// Pinned memory of one step: inputs as they lie on the device, and room for the outputs.
struct StagingSlot {
    inputs: PinnedMemory,
    outputs: PinnedMemory,
    done: Event,
}

/// Words `first..end` of a block-table row.
struct ChangedRow {
    row: usize,
    first: usize,
    end: usize,
}

struct InFlight {
    entry: EntryId,
    slot: usize,
    rows: usize,
    top: bool,
}

impl CudaDevice {
    /// Admits a bundle to a device.
    ///
    /// # Errors
    /// See [`AdmitError`]; nothing has been launched then.
    pub fn link(bundle: &Bundle, weights: &Weights, options: CudaOptions) -> Result<Self, AdmitError> {
        let plan = Arc::clone(bundle.plan());
        let context = Context::open(options.ordinal)?;
        check_target(bundle, context.properties())?;
        let (modules, kernels) = link::load_kernels(bundle, context.properties())?;
        let stream = Stream::new()?;
        let layouts: Vec<_> = plan.entries().iter().map(|entry| InputLayout::new(plan.bounds(), entry.class)).collect();
        let input_bytes = layouts.iter().map(|layout| layout.bytes).max().unwrap_or(0);
        let memory = reserve(bundle, &context, input_bytes, options.kv_pages)?;
        memory.zero(&stream, bundle)?;
        upload::upload_weights(&context, &stream, bundle, weights, memory.addresses.weights, WEIGHT_CHUNK_BYTES as usize)?;
        let slots = (0..DEPTH).map(|_| StagingSlot::new(input_bytes, memory.outputs.bytes)).collect::<Result<_, _>>()?;
        let table_words = InputSlot::BlockTables.bytes(plan.bounds()) as usize / 4;
        let kv_pages = memory.addresses.kv_pages - 1;
        let mut device = Self {
            programs: Vec::new(),
            launches: Arc::new(launch_counters(bundle)),
            kernels,
            slots,
            in_flight: VecDeque::new(),
            next_slot: 0,
            table_shadow: vec![0; table_words],
            changed_rows: Vec::new(),
            _modules: modules,
            memory,
            stream,
            context,
            context_is_current: true,
            plan,
            kv_pages,
        };
        device.build_programs(layouts, options)?;
        device.drain()?;
        // The engine's thread makes the context current before its first step.
        device.context_is_current = false;
        Ok(device)
    }

    /// What the hardware is.
    pub fn properties(&self) -> &DeviceProperties {
        self.context.properties()
    }

    fn build_programs(&mut self, layouts: Vec<InputLayout>, options: CudaOptions) -> Result<(), AdmitError> {
        for (index, layout) in layouts.into_iter().enumerate() {
            let id = EntryId(index as u32);
            let steps =
                link::bind_entry(&self.plan, id, &self.kernels, &self.memory.addresses, &layout, &self.memory.outputs, options.pdl)?;
            let class = self.plan.entries()[index].class;
            let graph = match class {
                BatchClass::Decode { .. } if options.graphs => Some(self.capture(id, &steps)?),
                BatchClass::Decode { .. } | BatchClass::Mixed { .. } => None,
            };
            self.programs.push(Program { layout, steps, graph });
        }
        Ok(())
    }

    fn capture(&self, entry: EntryId, steps: &[BoundStep]) -> Result<Graph, AdmitError> {
        let bindings = link::bound_of(&self.plan.entries()[entry.index()], self.memory.addresses.kv_pages);
        let recorded = self.stream.capture(|| {
            let named = |(step, source)| LinkError::Driver { what: self.step_name(entry, steps, step), source }.into();
            run_steps(&self.stream, steps, bindings).map_err(named)
        });
        let graph = recorded.map_err(|error| match error {
            AdmitError::Cuda(source) => LinkError::Driver { what: format!("the graph of entry {entry}"), source }.into(),
            other => other,
        })?;
        let copies = steps.iter().any(|step| matches!(step, BoundStep::Copy { .. }));
        for node in graph.nodes()? {
            let sealed = match node {
                GraphNode::Kernel(function) => self.kernels.iter().any(|kernel| kernel.function == function),
                GraphNode::Copy => copies,
                GraphNode::Other(_) => false,
            };
            if !sealed {
                return Err(AdmitError::ForeignNode { entry, node: format!("{node:?}") });
            }
        }
        Ok(graph)
    }

    /// Waits for everything queued so far.
    fn drain(&self) -> Result<(), CudaError> {
        let event = Event::new()?;
        self.stream.record(&event)?;
        event.wait()
    }

    fn ensure_current(&mut self) -> Result<(), CudaError> {
        if !self.context_is_current {
            self.context.make_current()?;
            self.context_is_current = true;
        }
        Ok(())
    }

    fn send_inputs(&mut self, entry: usize, inputs: &StepInputs, padded: Padded, slot: usize) -> Result<(), CudaError> {
        let layout = &self.programs[entry].layout;
        let padding_slot = self.kv_pages * self.plan.kv().page_tokens;
        let base = self.memory.addresses.inputs;
        let staging = &mut self.slots[slot].inputs;
        slots::write_hot(layout, inputs, padded, padding_slot, staging.bytes_mut());
        self.stream.upload(base, staging, 0, layout.hot_bytes as usize)?;
        let at = layout.offset(InputSlot::BlockTables);
        self.send_tables(inputs, slot, at)?;
        let layout = &self.programs[entry].layout;
        for (which, bytes) in slots::cold_slots(inputs) {
            let at = layout.offset(which);
            let staging = &mut self.slots[slot].inputs;
            staging.bytes_mut()[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
            self.stream.upload(base.offset(at), staging, at as usize, bytes.len())?;
        }
        Ok(())
    }

    /// Sends the parts of the block tables that differ from what the device has.
    ///
    /// In steady decode a sequence gets one new page in `page_tokens` steps, so a few words change: each
    /// is a transfer of its own. When many rows change (another batch composition), rows go as one block.
    fn send_tables(&mut self, inputs: &StepInputs, slot: usize, at: u64) -> Result<(), CudaError> {
        let stride = self.plan.bounds().pages_per_seq_max as usize;
        self.changed_rows.clear();
        for (row, (table, len)) in inputs.block_tables.chunks_exact(stride).zip(&inputs.kv_lens).enumerate() {
            let used = len.div_ceil(self.plan.kv().page_tokens) as usize;
            let shadow = &mut self.table_shadow[row * stride..row * stride + used];
            if let Some(first) = shadow.iter().zip(&table[..used]).position(|(old, new)| old != new) {
                shadow[first..].copy_from_slice(&table[first..used]);
                self.changed_rows.push(ChangedRow { row, first, end: used });
            }
        }
        let base = self.memory.addresses.inputs.offset(at);
        let staging = &mut self.slots[slot].inputs;
        if self.changed_rows.len() <= TABLE_SPANS_MAX {
            for &ChangedRow { row, first, end } in &self.changed_rows {
                let word = row * stride + first;
                slots::write_words(staging.bytes_mut(), at + 4 * word as u64, &self.table_shadow[word..row * stride + end], end - first, 0);
                self.stream.upload(base.offset(4 * word as u64), staging, at as usize + 4 * word, 4 * (end - first))?;
            }
            return Ok(());
        }
        let rows = self.changed_rows.last().map_or(0, |changed| changed.row + 1);
        let width = self.changed_rows.iter().map(|changed| changed.end).max().unwrap_or(0);
        for row in 0..rows {
            let words = &self.table_shadow[row * stride..row * stride + width];
            slots::write_words(staging.bytes_mut(), at + (row * stride * 4) as u64, words, width, 0);
        }
        self.stream.upload_rows(base, staging, at as usize, width * 4, rows, stride * 4)
    }

    fn run_program(&mut self, id: EntryId, bindings: Bindings) -> Result<(), DeviceError> {
        let entry = id.index();
        let program = &mut self.programs[entry];
        match &program.graph {
            Some(graph) => {
                let nodes = program.steps.len();
                self.stream.replay(graph).map_err(|error| self.failed(&format!("{id}: replay of its graph of {nodes} steps"), &error))?;
            }
            None => {
                for step in &mut program.steps {
                    if let BoundStep::Launch(launch) = step {
                        launch.bind(bindings);
                    }
                }
                let failed = |(step, error)| self.failed(&self.step_name(id, &self.programs[entry].steps, step), &error);
                run_steps(&self.stream, &self.programs[entry].steps, bindings).map_err(failed)?;
            }
        }
        for step in &self.programs[entry].steps {
            if let BoundStep::Launch(launch) = step {
                self.launches.add(self.kernels[launch.kernel].artifact.index());
            }
        }
        Ok(())
    }

    fn fetch_outputs(&mut self, slot: usize, rows: usize, top: bool) -> Result<(), CudaError> {
        let layout = &self.memory.outputs;
        let base = self.memory.addresses.outputs;
        let target = &mut self.slots[slot].outputs;
        let fetch = |target: &mut PinnedMemory, at: u64, bytes: usize| self.stream.download(target, at as usize, base.offset(at), bytes);
        fetch(target, 0, layout.hot_bytes as usize)?;
        if top {
            let bytes = rows * TOP_LOGPROBS_MAX as usize * 4;
            fetch(target, layout.offset(OutputSlot::TopIds), bytes)?;
            fetch(target, layout.offset(OutputSlot::TopLogprobs), bytes)?;
        }
        self.stream.record(&self.slots[slot].done)
    }

    fn submit_inner(&mut self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        self.ensure_current().map_err(|error| self.failed("making the context current", &error))?;
        let class = self.plan.entries()[entry.index()].class;
        let padded = match class {
            BatchClass::Decode { seqs } => Padded { tokens: seqs as usize, seqs: seqs as usize, rows: seqs as usize },
            BatchClass::Mixed { .. } => {
                Padded { tokens: inputs.tokens() as usize, seqs: inputs.seqs() as usize, rows: inputs.rows() as usize }
            }
        };
        let slot = self.next_slot;
        self.next_slot = (self.next_slot + 1) % self.slots.len();
        self.send_inputs(entry.index(), inputs, padded, slot)
            .map_err(|error| self.failed(&format!("{entry}: sending its inputs"), &error))?;
        let kv_pages = self.memory.addresses.kv_pages;
        let bindings = Bindings { tokens: padded.tokens as u32, seqs: padded.seqs as u32, rows: padded.rows as u32, kv_pages };
        self.run_program(entry, bindings)?;
        let rows = inputs.rows() as usize;
        let top = slots::wants_top(inputs);
        self.fetch_outputs(slot, rows, top).map_err(|error| self.failed(&format!("{entry}: fetching its outputs"), &error))?;
        self.in_flight.push_back(InFlight { entry, slot, rows, top });
        Ok(())
    }

    fn check_batch(&self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        let over =
            || DeviceError::OverEntry { entry: entry.to_string(), tokens: inputs.tokens(), seqs: inputs.seqs(), rows: inputs.rows() };
        let class = self.plan.entries().get(entry.index()).ok_or_else(over)?.class;
        let bounds = self.plan.bounds();
        let lists_fit = inputs.bias_ids.len() <= bounds.bias_max as usize && inputs.history_ids.len() <= bounds.history_max as usize;
        let fits = inputs.tokens() <= class.tokens_max() && inputs.seqs() <= class.seqs_max() && inputs.rows() <= class.seqs_max();
        if fits && lists_fit && self.in_flight.len() < DEPTH { Ok(()) } else { Err(over()) }
    }

    /// Entry, step and kernel, as messages name them.
    fn step_name(&self, entry: EntryId, steps: &[BoundStep], step: StepId) -> String {
        match steps.get(step.index()) {
            Some(BoundStep::Launch(launch)) => format!("{entry} {step} (kernel {})", self.kernels[launch.kernel].manifest.name),
            Some(BoundStep::Copy { .. }) | None => format!("{entry} {step} (copy)"),
        }
    }

    fn failed(&self, doing: &str, error: &CudaError) -> DeviceError {
        DeviceError::Failed { message: format!("{doing}: {error} ({})", self.context.properties().name) }
    }
}

impl Drop for CudaDevice {
    /// What the fields own is freed on this thread, which need not be the one that ran the steps.
    fn drop(&mut self) {
        let _ = self.context.make_current();
    }
}

fn launch_counters(bundle: &Bundle) -> LaunchCounters {
    let artifacts = bundle.artifacts().iter();
    LaunchCounters::new(artifacts.map(|entry| (entry.manifest.name.clone(), entry.manifest.sha256.clone())).collect())
}

/// Queues all steps; a failure names its step.
fn run_steps(stream: &Stream, steps: &[BoundStep], bindings: Bindings) -> Result<(), (StepId, CudaError)> {
    for (index, step) in steps.iter().enumerate() {
        let queued = match step {
            BoundStep::Launch(launch) => stream.launch(launch.function, &launch.shape, &launch.params),
            BoundStep::Copy { to, from, bytes } => stream.copy(*to, *from, u64::from(bytes.eval(bindings).unwrap_or(0))),
        };
        queued.map_err(|error| (StepId(index as u32), error))?;
    }
    Ok(())
}

impl StagingSlot {
    fn new(input_bytes: u64, output_bytes: u64) -> Result<Self, CudaError> {
        Ok(Self {
            inputs: PinnedMemory::alloc(input_bytes as usize)?,
            outputs: PinnedMemory::alloc(output_bytes as usize)?,
            done: Event::new()?,
        })
    }
}

fn check_target(bundle: &Bundle, device: &DeviceProperties) -> Result<(), AdmitError> {
    let mut wrong = Vec::new();
    let target = bundle.manifest().target;
    if target != Target::Sm90 {
        wrong.push(format!("the bundle was compiled for {target}, not for a GPU"));
    }
    if device.capability != (9, 0) {
        wrong.push(format!("the bundle needs compute capability 9.0, {} has {}.{}", device.name, device.capability.0, device.capability.1));
    }
    // One kernel stands for all that need more than this driver.
    if let Some(entry) = bundle.artifacts().iter().max_by_key(|entry| entry.manifest.driver_min)
        && i64::from(device.driver) < i64::from(entry.manifest.driver_min)
    {
        let (name, needs) = (&entry.manifest.name, api_version(i64::from(entry.manifest.driver_min)));
        let has = api_version(i64::from(device.driver));
        wrong.push(format!("kernel {name} needs driver API {needs}, this driver has {has}: install a newer driver"));
    }
    if wrong.is_empty() { Ok(()) } else { Err(AdmitError::Target(wrong)) }
}

/// `13.0` of 13000.
fn api_version(number: i64) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let properties = self.context.properties();
        DeviceInfo { kind: "cuda", name: format!("{} (driver API {})", properties.name, api_version(i64::from(properties.driver))) }
    }

    fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    fn kv_pages(&self) -> u32 {
        self.kv_pages
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn launch_counters(&self) -> Option<Arc<LaunchCounters>> {
        Some(Arc::clone(&self.launches))
    }

    fn submit(&mut self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        self.check_batch(entry, inputs)?;
        self.submit_inner(entry, inputs)
    }

    fn collect(&mut self, outputs: &mut StepOutputs) -> Result<(), DeviceError> {
        let Some(InFlight { entry, slot, rows, top }) = self.in_flight.pop_front() else {
            return Err(DeviceError::Failed { message: "nothing was submitted".into() });
        };
        self.slots[slot].done.wait().map_err(|error| self.failed(&format!("{entry}: running its kernels"), &error))?;
        let layout = &self.memory.outputs;
        let bytes = self.slots[slot].outputs.bytes();
        let words = |which: OutputSlot, count: usize| &bytes[layout.offset(which) as usize..][..4 * count];
        let top_count = if top { rows * TOP_LOGPROBS_MAX as usize } else { 0 };
        replace(&mut outputs.sampled_ids, words(OutputSlot::SampledIds, rows));
        replace(&mut outputs.sampled_logprobs, words(OutputSlot::SampledLogprobs, rows));
        replace(&mut outputs.top_ids, words(OutputSlot::TopIds, top_count));
        replace(&mut outputs.top_logprobs, words(OutputSlot::TopLogprobs, top_count));
        Ok(())
    }

    fn copy_pages(&mut self, pairs: &[(u32, u32)]) -> Result<(), DeviceError> {
        let page_bytes = self.plan.kv().plane_page_bytes();
        let plane_bytes = u64::from(self.memory.addresses.kv_pages) * page_bytes;
        let planes = 2 * u64::from(self.plan.kv().layers);
        self.ensure_current().map_err(|error| self.failed("making the context current", &error))?;
        for &(from, to) in pairs {
            if from >= self.kv_pages || to >= self.kv_pages {
                return Err(DeviceError::Failed { message: format!("copy of page {from} to {to} in a pool of {} pages", self.kv_pages) });
            }
            for plane in 0..planes {
                let base = self.memory.addresses.kv.offset(plane * plane_bytes);
                let at = |page: u32| base.offset(u64::from(page) * page_bytes);
                let copied = self.stream.copy(at(to), at(from), page_bytes);
                copied.map_err(|error| self.failed(&format!("copying page {from} to {to}"), &error))?;
            }
        }
        Ok(())
    }
}

fn replace<T: bytemuck::Pod>(target: &mut Vec<T>, bytes: &[u8]) {
    target.clear();
    target.extend_from_slice(bytemuck::cast_slice(bytes));
}
