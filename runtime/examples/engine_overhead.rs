//! Host work of the engine for one decode step: a device that does nothing, and the processor time
//! that the engine thread takes between two steps (from `/proc/thread-self/schedstat`, so Linux only),
//! while another thread reads all streams.
//!
//! `cargo run --release -p oxide-runtime --example engine_overhead`

use oxide_bundle::dtype::DType;
use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::{BatchClass, EntryDecl, KvGeometry, PLAN_VERSION, Plan, RawPlan};
use oxide_bundle::step::StepBounds;
use oxide_runtime::device::{Device, DeviceError, DeviceInfo, StepInputs, StepOutputs};
use oxide_runtime::engine::{Engine, EngineEvent, EngineLimits, EngineOptions, EngineRequest};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const STEPS: u32 = 2000;
const VOCAB: u32 = 151_936;

/// First and last step between which time is taken: no prefill before, no end after.
const FIRST: u32 = 200;
const LAST: u32 = STEPS - 200;

/// Draws id 1 for every row at no cost, and notes the processor time of two steps.
struct NullDevice {
    steps: u32,
    nanos: Arc<[AtomicU64; 2]>,
    plan: Arc<Plan>,
    rows: VecDeque<usize>,
    depth: usize,
}

impl Device for NullDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { kind: "null", name: "null".to_owned() }
    }

    fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    fn kv_pages(&self) -> u32 {
        1 << 16
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn submit(&mut self, _entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        self.rows.push_back(inputs.logit_rows.len());
        self.steps += 1;
        if let Some(mark) = [FIRST, LAST].iter().position(|step| *step == self.steps) {
            self.nanos[mark].store(thread_nanos(), Ordering::Release);
        }
        Ok(())
    }

    fn collect(&mut self, outputs: &mut StepOutputs) -> Result<(), DeviceError> {
        let rows = self.rows.pop_front().unwrap_or(0);
        outputs.sampled_ids.clear();
        outputs.sampled_ids.resize(rows, 1);
        Ok(())
    }

    fn copy_pages(&mut self, _pairs: &[(u32, u32)]) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn device(depth: usize) -> NullDevice {
    let classes = [BatchClass::Decode { seqs: 256 }, BatchClass::Mixed { tokens: 4096, seqs: 256 }];
    let raw = RawPlan {
        version: PLAN_VERSION,
        bounds: StepBounds {
            tokens_max: 4096,
            seqs_max: 256,
            rows_max: 256,
            pages_per_seq_max: 2048,
            bias_max: 4096,
            history_max: 65_536,
            vocab: VOCAB,
        },
        kv: KvGeometry { layers: 1, page_tokens: 16, kv_heads: 1, head_dim: 1, dtype: DType::F32 },
        arena_bytes: 0,
        buffers: Vec::new(),
        weights: Vec::new(),
        kernels: Vec::new(),
        entries: classes.into_iter().map(|class| EntryDecl { class, steps: Vec::new() }).collect(),
    };
    NullDevice { steps: 0, nanos: Arc::default(), plan: Arc::new(Plan::unverified(raw)), rows: VecDeque::new(), depth }
}

fn request(index: u32) -> EngineRequest {
    let prompt = (0..16).map(|token| token + index * 16).collect();
    EngineRequest { stop_ids: vec![2, 3], ..EngineRequest::greedy(index.to_string(), prompt, STEPS) }
}

/// Processor time that the calling thread has taken.
fn thread_nanos() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts a thread's time");
    text.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("the first number is the time")
}

/// Processor time of one step with `seqs` sequences.
fn measure(seqs: u32, depth: usize) -> Duration {
    let device = device(depth);
    let nanos = Arc::clone(&device.nanos);
    let limits = EngineLimits::of(&device, 32_768, 256, VOCAB);
    let engine = Engine::start(Box::new(device), limits, EngineOptions { queue_max: 1000, ..EngineOptions::default() });
    engine.pause();
    let mut streams: Vec<_> = (0..seqs).map(|index| engine.submit(request(index)).expect("accepted")).collect();
    engine.resume();
    while engine.stats().finished < u64::from(seqs) {
        for stream in &mut streams {
            while let Some(EngineEvent::Token { .. } | EngineEvent::Admitted { .. }) = stream.try_recv() {}
        }
    }
    let [first, last] = [0, 1].map(|mark| nanos[mark].load(Ordering::Acquire));
    Duration::from_nanos((last - first) / u64::from(LAST - FIRST))
}

fn main() {
    for seqs in [32, 256] {
        println!("{seqs:4} sequences: {:?} a step, {:?} at depth 2", measure(seqs, 1), measure(seqs, 2));
    }
}
