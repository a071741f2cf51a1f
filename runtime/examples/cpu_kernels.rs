//! Measures projections of the cpu device against a plain read of the same weights.
//!
//! `cargo run --release -p oxide-runtime --example cpu_kernels [THREADS] [ISA] [N K LAYERS]`
//!
//! The plan is an embedding and `LAYERS` pairs of projections `K → N → K`, so that weights come from
//! memory as in a model. Figures are medians; for a ratio, compare figures of one run.

use oxide_bundle::contract::{Contract, Linear, Op, Role};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::ids::{BufferId, EntryId, KernelId, WeightId};
use oxide_bundle::ledger::ledger;
use oxide_bundle::manifest::{GenerationDefaults, GoldenStatus, Limits, Manifest, ModelInfo, SpecialTokens, Target};
use oxide_bundle::plan::{
    BatchClass, BufferDecl, BufferKind, EntryDecl, Extent, KernelDecl, KvGeometry, Operand, PLAN_VERSION, Plan, RawPlan, RowOrder, Step,
    Sym, Value, WeightDecl, WeightLayout,
};
use oxide_bundle::step::{NONE, StepBounds};
use oxide_runtime::device::cpu::{CpuDevice, CpuOptions, Isa};
use oxide_runtime::device::{Device, StepInputs, StepOutputs};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

const VOCAB: u32 = 16;
const TOKENS_MAX: u32 = 512;
const REPEATS: usize = 15;

/// Weights, aligned.
struct Words(Vec<u64>);

impl AsRef<[u8]> for Words {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| args.get(at).map_or(Ok(default), |text| text.parse());
    let threads = number(0, std::thread::available_parallelism()?.get())?;
    let isa = args.get(1).and_then(|name| Isa::ALL.into_iter().find(|isa| isa.to_string() == *name)).unwrap_or_else(Isa::best);
    let (n, k, layers) = (number(2, 1536)? as u32, number(3, 576)? as u32, number(4, 64)? as u32);
    let raw = plan(n, k, layers);
    let bytes = raw.weights.iter().map(|weight| weight.offset_bytes + weight.size_bytes).max().unwrap_or(0);
    let weights = Arc::new(Words((0..bytes.div_ceil(8)).map(weight_word).collect()));
    let read = median(|| plain_read(&weights.0, threads));
    let plan = Arc::new(Plan::verify(raw.clone(), &manifest(&raw, n, k))?);
    let options = CpuOptions { threads: Some(threads), isa: Some(isa), kv_pages: 1 };
    let mut device = CpuDevice::link(plan, Arc::clone(&weights) as _, options)?;
    println!("{}, {} MB of weights [{n}, {k}] and back", device.info().name, bytes / 1_000_000);
    println!("plain read       {:7.1} GB/s", bytes as f64 / read / 1e9);
    for tokens in [1, 2, 4, 8, 16, 64, TOKENS_MAX] {
        let inputs = inputs(tokens);
        let mut outputs = StepOutputs::default();
        let mut result = Ok(());
        let time = median(|| result = device.submit(EntryId(0), &inputs).and_then(|()| device.collect(&mut outputs)));
        result?;
        let flops = 2.0 * f64::from(tokens) * f64::from(n) * f64::from(k) * f64::from(2 * layers);
        let (rate, share) = (bytes as f64 / time / 1e9, read / time * 100.0);
        println!("{tokens:4} tokens {:9.3} ms {rate:7.1} GB/s ({share:3.0} % of the read) {:8.1} GFLOP/s", time * 1e3, flops / time / 1e9);
    }
    Ok(())
}

fn median(mut run: impl FnMut()) -> f64 {
    run();
    let mut times: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[REPEATS / 2]
}

/// Four bf16 of about a hundredth.
fn weight_word(index: u64) -> u64 {
    let noise = index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
    0x3c00_3c00_3c00_3c00 | (noise & 0x807f_807f_807f_807f)
}

fn plain_read(words: &[u64], threads: usize) {
    std::thread::scope(|scope| {
        for part in words.chunks(words.len().div_ceil(threads)) {
            scope.spawn(move || {
                let mut sums = [0_u64; 16];
                for chunk in part.chunks_exact(16) {
                    sums.iter_mut().zip(chunk).for_each(|(sum, word)| *sum ^= word);
                }
                black_box(sums);
            });
        }
    });
}

fn plan(n: u32, k: u32, layers: u32) -> RawPlan {
    let bounds = StepBounds {
        tokens_max: TOKENS_MAX,
        seqs_max: TOKENS_MAX,
        rows_max: TOKENS_MAX,
        pages_per_seq_max: 1,
        bias_max: 0,
        history_max: 0,
        vocab: VOCAB,
    };
    let kv = KvGeometry { layers: 1, page_tokens: 16, kv_heads: 1, head_dim: 16, dtype: DType::F32 };
    let mut raw = RawPlan {
        version: PLAN_VERSION,
        bounds,
        kv,
        arena_bytes: 0,
        buffers: Vec::new(),
        weights: Vec::new(),
        kernels: Vec::new(),
        entries: vec![EntryDecl { class: BatchClass::Mixed { tokens: TOKENS_MAX, seqs: TOKENS_MAX }, steps: Vec::new() }],
    };
    let [narrow, wide] = [k, n].map(|width| buffer(&mut raw, width));
    let table = weight(&mut raw, VOCAB, k);
    launch(&mut raw, Op::Embed { vocab: VOCAB, dim: k }, vec![(Role::Weight, table), (Role::Out, narrow)]);
    for _ in 0..layers {
        for (from, to, n, k) in [(narrow, wide, n, k), (wide, narrow, k, n)] {
            let matrix = weight(&mut raw, n, k);
            launch(&mut raw, Op::Linear(Linear::plain(n, k)), vec![(Role::X, from), (Role::Weight, matrix), (Role::Out, to)]);
        }
    }
    raw
}

fn buffer(raw: &mut RawPlan, width: u32) -> Value {
    let id = BufferId(raw.buffers.len() as u32);
    let size_bytes = u64::from(TOKENS_MAX) * u64::from(width) * 4;
    let (elements, offset_bytes) = (Extent::sym(Sym::Tokens, width), raw.arena_bytes);
    raw.buffers.push(BufferDecl {
        label: id.to_string(),
        dtype: DType::F32,
        elements,
        kind: BufferKind::Scratch,
        offset_bytes,
        size_bytes,
    });
    raw.arena_bytes += size_bytes.next_multiple_of(256);
    Value::Buffer(id)
}

fn weight(raw: &mut RawPlan, n: u32, k: u32) -> Value {
    let id = WeightId(raw.weights.len() as u32);
    let end = raw.weights.last().map_or(0, |last| last.offset_bytes + last.size_bytes);
    raw.weights.push(WeightDecl {
        name: id.to_string(),
        sources: Vec::new(),
        dtype: DType::Bf16,
        shape: vec![n, k],
        layout: WeightLayout::Panel16,
        rows: RowOrder::Concat,
        offset_bytes: end.next_multiple_of(256),
        size_bytes: u64::from(n.next_multiple_of(16)) * u64::from(k) * 2,
    });
    Value::Weight(id)
}

fn launch(raw: &mut RawPlan, op: Op, operands: Vec<(Role, Value)>) {
    let kernel = KernelId(raw.kernels.len() as u32);
    raw.kernels
        .push(KernelDecl { contract: Contract { op, act: DType::F32, weight: DType::Bf16, kv: DType::F32, out: DType::F32 }, code: None });
    let operands = operands.into_iter().map(|(role, value)| Operand { role, value }).collect();
    raw.entries[0].steps.push(Step::Launch { kernel, grid: [Extent::lit(1); 3], operands });
}

fn inputs(tokens: u32) -> StepInputs {
    StepInputs {
        token_ids: (0..tokens).map(|token| token % VOCAB).collect(),
        token_sources: vec![NONE; tokens as usize],
        positions: vec![0; tokens as usize],
        kv_slots: vec![0; tokens as usize],
        block_tables: vec![0; tokens as usize],
        query_starts: (0..=tokens).collect(),
        kv_lens: vec![1; tokens as usize],
        ..StepInputs::default()
    }
}

fn manifest(raw: &RawPlan, n: u32, k: u32) -> Manifest {
    Manifest {
        name: "bench".into(),
        profile: "bench".into(),
        target: Target::Cpu,
        model: ModelInfo {
            family: "llama".into(),
            parameters: 0,
            layers: 1,
            hidden: k,
            intermediate: n,
            heads: 1,
            kv_heads: 1,
            head_dim: raw.kv.head_dim,
            vocab: VOCAB,
            vocab_known: VOCAB,
            tied: false,
            rope_theta: F32Bits::new(10_000.0),
            weight_dtype: DType::Bf16,
            kv_dtype: raw.kv.dtype,
        },
        limits: Limits {
            context_max: raw.kv.page_tokens,
            context_origin: "model".into(),
            seqs_max: TOKENS_MAX,
            seqs_origin: "profile".into(),
            step_tokens_max: TOKENS_MAX,
            page_tokens: raw.kv.page_tokens,
        },
        ledger: ledger(raw, 1),
        tokens: SpecialTokens { bos: None, eos: Vec::new(), pad: None, add_bos: false, control: Default::default() },
        generation: GenerationDefaults {
            temperature: F32Bits::new(0.0),
            top_p: F32Bits::new(1.0),
            top_k: 0,
            min_p: F32Bits::new(0.0),
            repetition_penalty: F32Bits::new(1.0),
        },
        golden: GoldenStatus::Unproven,
    }
}
