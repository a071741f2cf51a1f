//! Host work of the engine for one decode step: a device that does nothing, and the clock.
//!
//! `cargo run --release -p oxide-runtime --example engine_overhead`

use oxide_bundle::dtype::DType;
use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::{BatchClass, EntryDecl, KvGeometry, PLAN_VERSION, Plan, RawPlan};
use oxide_bundle::step::StepBounds;
use oxide_runtime::device::{Device, DeviceError, DeviceInfo, StepInputs, StepOutputs};
use oxide_runtime::engine::{Engine, EngineEvent, EngineLimits, EngineOptions, EngineRequest, SamplingParams};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

const STEPS: u32 = 2000;
const VOCAB: u32 = 151_936;

/// Draws id 1 for every row at no cost, and notes when steps came.
struct NullDevice {
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
    NullDevice { plan: Arc::new(Plan::unverified(raw)), rows: VecDeque::new(), depth }
}

fn request(index: u32) -> EngineRequest {
    EngineRequest {
        id: index.to_string(),
        prompt: (0..16).map(|token| token + index * 16).collect(),
        n: 1,
        max_tokens: STEPS,
        min_tokens: 0,
        stop_ids: vec![2, 3],
        sampling: SamplingParams::default(),
        prompt_logprobs: None,
        mask: None,
        cache_salt: Vec::new(),
        fair_key: 0,
        deadline: None,
        queue_time_max: None,
    }
}

/// Time of one step with `seqs` sequences; with `readers`, a thread reads all streams meanwhile.
fn measure(seqs: u32, depth: usize, readers: bool) -> Duration {
    let device = device(depth);
    let limits = EngineLimits::of(&device, 32_768, 256, VOCAB);
    let engine = Engine::start(Box::new(device), limits, EngineOptions { queue_max: 1000, ..EngineOptions::default() });
    engine.pause();
    let mut streams: Vec<_> = (0..seqs).map(|index| engine.submit(request(index)).expect("accepted")).collect();
    let start = Instant::now();
    engine.resume();
    while readers && engine.stats().finished < u64::from(seqs) {
        for stream in &mut streams {
            while let Some(EngineEvent::Token { .. } | EngineEvent::Admitted { .. }) = stream.try_recv() {}
        }
    }
    while engine.stats().finished < u64::from(seqs) {
        std::thread::sleep(Duration::from_millis(1));
    }
    start.elapsed() / STEPS
}

fn main() {
    for seqs in [1, 32, 256] {
        for depth in [1, 2] {
            let (alone, read) = (measure(seqs, depth, false), measure(seqs, depth, true));
            println!("{seqs:4} sequences, depth {depth}: {alone:?} a step, {read:?} with a reader");
        }
    }
}
