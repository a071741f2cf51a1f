//! Whole plans: a model of one layer that uses every contract.

use super::*;
use crate::device::cpu::{CpuDevice, CpuOptions};
use crate::device::reference::{self, AttendInputs};
use crate::device::{Device, DeviceError, StepInputs, StepOutputs};
use oxide_bundle::contract::{Activation, Contract, Heads, Linear, Op, Phase, Role};
use oxide_bundle::dtype::{DType, F32Bits};
use oxide_bundle::ids::{BufferId, EntryId, KernelId, WeightId};
use oxide_bundle::ledger::ledger;
use oxide_bundle::manifest::{GenerationDefaults, GoldenStatus, Limits, Manifest, ModelInfo, SpecialTokens, Target};
use oxide_bundle::plan::{
    BatchClass, BufferDecl, BufferKind, EntryDecl, Extent, KernelDecl, KvGeometry, Operand, PLAN_VERSION, Plan, RawPlan, RowOrder, Step,
    Sym, Value, WeightDecl, WeightLayout,
};
use oxide_bundle::step::{NONE, SamplingRow, StepBounds, TOP_LOGPROBS_MAX};
use std::sync::Arc;

/// Absolute, on log-probabilities of a one-layer model whose logits are a few units large.
const LOGPROB_TOLERANCE: f64 = 1e-4;

const VOCAB: u32 = 50;
const KNOWN: u32 = 47;
const DIM: u32 = 32;
const INTER: u32 = 48;
const CONTEXT: u32 = 40;
const HEADS: Heads = Heads { q: 2, kv: 1, dim: 16, page_tokens: 4 };
const PAGES: u32 = 64;
const EPS: f32 = 1e-5;
const DECODE: EntryId = EntryId(0);
const MIXED: EntryId = EntryId(1);

/// Row-major weights of the model.
struct Model {
    embed: Vec<u16>,
    rope: Vec<f32>,
    norms: [Vec<u16>; 3],
    qkv: Vec<u16>,
    qkv_bias: Vec<u16>,
    qk_norm: Vec<u16>,
    o: Vec<u16>,
    gate_up: Vec<u16>,
    down: Vec<u16>,
    head: Vec<u16>,
}

impl Model {
    fn new() -> Self {
        let mut random = Random(11);
        let mut matrix = |n: u32, k: u32| random.bf16s((n * k) as usize);
        let (embed, qkv, qkv_bias) = (matrix(VOCAB, DIM), matrix(HEADS.qkv_width(), DIM), matrix(HEADS.qkv_width(), 1));
        let (qk_norm, o, gate_up, down) = (matrix(2, HEADS.dim), matrix(DIM, DIM), matrix(2 * INTER, DIM), matrix(DIM, INTER));
        let (head, norms) = (matrix(VOCAB, DIM), [matrix(1, DIM), matrix(1, DIM), matrix(1, DIM)]);
        let rope = (0..CONTEXT * HEADS.dim / 2)
            .flat_map(|i| {
                let angle = (i / (HEADS.dim / 2)) as f32 * 10_000_f32.powf(-((i % (HEADS.dim / 2)) as f32) * 2.0 / HEADS.dim as f32);
                [angle.cos(), angle.sin()]
            })
            .collect();
        Self { embed, rope, norms, qkv, qkv_bias, qk_norm, o, gate_up, down, head }
    }

    /// Log-probabilities after the last of `ids`, by the reference.
    fn logprobs(&self, ids: &[u32]) -> Vec<f64> {
        let narrow = |values: Vec<f64>| values.into_iter().map(|value| value as f32).collect::<Vec<_>>();
        let linear = |x: &[f32], weight: &[u16], k: u32| narrow(reference::linear(x, &widen(weight), k as usize, None));
        let norm = |x: &[f32], i: usize| narrow(reference::rms_norm(x, &widen(&self.norms[i]), EPS));
        let dim = DIM as usize;
        let mut h: Vec<f32> = ids.iter().flat_map(|id| widen(&self.embed[*id as usize * dim..][..dim])).collect();
        let qkv = narrow(reference::linear(&norm(&h, 0), &widen(&self.qkv), dim, Some(&widen(&self.qkv_bias))));
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for (position, row) in qkv.chunks(HEADS.qkv_width() as usize).enumerate() {
            let angles = &self.rope[position * HEADS.dim as usize..][..HEADS.dim as usize];
            for (head, x) in row.chunks(HEADS.dim as usize).enumerate() {
                let weight = |which: usize| widen(&self.qk_norm[which * HEADS.dim as usize..][..HEADS.dim as usize]);
                let turned = |which| narrow(reference::rope(&narrow(reference::rms_norm(x, &weight(which), EPS)), angles));
                match head {
                    0 | 1 => q.extend(turned(0)),
                    2 => k.extend(turned(1)),
                    _ => v.extend_from_slice(x),
                }
            }
        }
        let length = ids.len() as u32;
        let attended = narrow(reference::attend(AttendInputs {
            heads: Heads { page_tokens: length, ..HEADS },
            q: &q,
            k_plane: &k,
            v_plane: &v,
            query_starts: &[0, length],
            kv_lens: &[length],
            block_tables: &[0],
            table_stride: 1,
        }));
        let add = |h: &mut [f32], x: &[f32]| h.iter_mut().zip(x).for_each(|(h, x)| *h += x);
        add(&mut h, &linear(&attended, &self.o, DIM));
        let gate_up: Vec<f64> = reference::linear(&norm(&h, 1), &widen(&self.gate_up), dim, None);
        add(&mut h, &linear(&narrow(reference::swiglu(&gate_up, 2 * INTER as usize)), &self.down, INTER));
        let logits = linear(&norm(&h[h.len() - dim..], 2), &self.head, DIM);
        let known = &logits[..KNOWN as usize];
        let sum = known.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
        known.iter().map(|x| f64::from(*x) - sum).collect()
    }
}

/// Builds a plan and its weight section.
struct Builder {
    raw: RawPlan,
    weights: Vec<u8>,
}

impl Builder {
    fn new(kv: DType) -> Self {
        let bounds = StepBounds {
            tokens_max: 32,
            seqs_max: 4,
            rows_max: 4,
            pages_per_seq_max: CONTEXT / HEADS.page_tokens,
            bias_max: 16,
            history_max: 16,
            vocab: VOCAB,
        };
        let kv = KvGeometry { layers: 1, page_tokens: HEADS.page_tokens, kv_heads: HEADS.kv, head_dim: HEADS.dim, dtype: kv };
        let entry = |class| EntryDecl { class, steps: Vec::new() };
        let entries = vec![entry(BatchClass::Decode { seqs: 4 }), entry(BatchClass::Mixed { tokens: 32, seqs: 4 })];
        let (buffers, weights, kernels) = (Vec::new(), Vec::new(), Vec::new());
        Self { raw: RawPlan { version: PLAN_VERSION, bounds, kv, arena_bytes: 0, buffers, weights, kernels, entries }, weights: Vec::new() }
    }

    fn weight(&mut self, dtype: DType, shape: &[u32], layout: WeightLayout, rows: RowOrder, bytes: &[u8]) -> Value {
        let offset = self.weights.len().next_multiple_of(256);
        self.weights.resize(offset, 0);
        self.weights.extend_from_slice(bytes);
        let id = WeightId(self.raw.weights.len() as u32);
        self.raw.weights.push(WeightDecl {
            name: id.to_string(),
            sources: Vec::new(),
            dtype,
            shape: shape.to_vec(),
            layout,
            rows,
            offset_bytes: offset as u64,
            size_bytes: bytes.len() as u64,
        });
        Value::Weight(id)
    }

    fn vector(&mut self, shape: &[u32], weight: &[u16]) -> Value {
        self.weight(DType::Bf16, shape, WeightLayout::RowMajor, RowOrder::Concat, bytemuck::cast_slice(weight))
    }

    fn matrix(&mut self, n: u32, k: u32, rows: RowOrder, weight: &[u16]) -> Value {
        let panels = panel16(weight, n as usize, k as usize);
        self.weight(DType::Bf16, &[n, k], WeightLayout::Panel16, rows, bytemuck::cast_slice(&panels))
    }

    fn buffer(&mut self, axis: Sym, width: u32) -> Value {
        let rows = if axis == Sym::Rows { 4 } else { 32 };
        let size_bytes = u64::from(rows * width * 4);
        let id = BufferId(self.raw.buffers.len() as u32);
        self.raw.buffers.push(BufferDecl {
            label: id.to_string(),
            dtype: DType::F32,
            elements: Extent::sym(axis, width),
            kind: BufferKind::Scratch,
            offset_bytes: self.raw.arena_bytes,
            size_bytes,
        });
        self.raw.arena_bytes += size_bytes.next_multiple_of(256);
        Value::Buffer(id)
    }

    fn launch(&mut self, op: impl Fn(Phase) -> Op, operands: &[(Role, Value)]) {
        let operands: Vec<Operand> = operands.iter().map(|(role, value)| Operand { role: *role, value: *value }).collect();
        for (entry, phase) in [(0, Phase::Decode), (1, Phase::Mixed)] {
            let contract = Contract { op: op(phase), act: DType::F32, weight: DType::Bf16, kv: self.raw.kv.dtype, out: DType::F32 };
            let kernel = KernelId(self.raw.kernels.len() as u32);
            self.raw.kernels.push(KernelDecl { contract, code: None });
            let grid = [Extent::lit(1); 3];
            self.raw.entries[entry].steps.push(Step::Launch { kernel, grid, operands: operands.clone() });
        }
    }

    fn linear(&mut self, linear: Linear, operands: &[(Role, Value)]) {
        self.launch(|_| Op::Linear(linear), operands);
    }

    fn model(&mut self, model: &Model) {
        let (eps, width) = (F32Bits::new(EPS), HEADS.qkv_width());
        let embed = self.matrix(VOCAB, DIM, RowOrder::Concat, &model.embed);
        let table = self.weight(
            DType::F32,
            &[CONTEXT, HEADS.dim / 2, 2],
            WeightLayout::RowMajor,
            RowOrder::Concat,
            bytemuck::cast_slice(&model.rope),
        );
        let norms = [0, 1, 2].map(|i| self.vector(&[DIM], &model.norms[i]));
        let qkv = self.matrix(width, DIM, RowOrder::Concat, &model.qkv);
        let bias = self.vector(&[width], &model.qkv_bias);
        let qk_norm = self.vector(&[2, HEADS.dim], &model.qk_norm);
        let o = self.matrix(DIM, DIM, RowOrder::Concat, &model.o);
        let gate_up = interleave16(&model.gate_up, 2 * INTER as usize, DIM as usize);
        let gate_up = self.matrix(2 * INTER, DIM, RowOrder::Interleave(16), &gate_up);
        let down = self.matrix(DIM, INTER, RowOrder::Concat, &model.down);
        let head = self.matrix(VOCAB, DIM, RowOrder::Concat, &model.head);
        let [h, n, x_qkv, q, a] = [DIM, DIM, width, HEADS.q * HEADS.dim, HEADS.q * HEADS.dim].map(|width| self.buffer(Sym::Tokens, width));
        let [d, m] = [DIM, INTER].map(|width| self.buffer(Sym::Tokens, width));
        let [r, rn, logits] = [DIM, DIM, VOCAB].map(|width| self.buffer(Sym::Rows, width));
        use Role::{Bias, KPlane, NormWeight, Out, Residual, RopeTable, VPlane, Weight, X};
        let planes = [(KPlane, Value::KPlane(0)), (VPlane, Value::VPlane(0))];
        self.launch(|_| Op::Embed { vocab: VOCAB, dim: DIM }, &[(Weight, embed), (Out, h)]);
        self.launch(|_| Op::RmsNorm { dim: DIM, eps }, &[(X, h), (NormWeight, norms[0]), (Out, n)]);
        let biased = Linear { bias: true, ..Linear::plain(width, DIM) };
        self.linear(biased, &[(X, n), (Weight, qkv), (Bias, bias), (Out, x_qkv)]);
        self.launch(|_| Op::QkNorm { heads: HEADS, eps }, &[(X, x_qkv), (NormWeight, qk_norm)]);
        self.launch(|_| Op::RopeAppend { heads: HEADS }, &[&[(X, x_qkv), (RopeTable, table)], &planes[..], &[(Out, q)]].concat());
        self.launch(|phase| Op::Attend { heads: HEADS, phase }, &[&[(X, q)], &planes[..], &[(Out, a)]].concat());
        self.linear(Linear::plain(DIM, DIM), &[(X, a), (Weight, o), (Out, d)]);
        self.launch(|_| Op::AddRmsNorm { dim: DIM, eps }, &[(X, d), (Residual, h), (NormWeight, norms[1]), (Out, n)]);
        let swiglu = Linear { act: Activation::SwiGlu, ..Linear::plain(2 * INTER, DIM) };
        self.linear(swiglu, &[(X, n), (Weight, gate_up), (Out, m)]);
        let residual = Linear { residual: true, ..Linear::plain(DIM, INTER) };
        self.linear(residual, &[(X, m), (Weight, down), (Residual, h), (Out, h)]);
        self.launch(|_| Op::TakeRows { dim: DIM }, &[(X, h), (Out, r)]);
        self.launch(|_| Op::RmsNorm { dim: DIM, eps }, &[(X, r), (NormWeight, norms[2]), (Out, rn)]);
        self.linear(Linear::plain(VOCAB, DIM), &[(X, rn), (Weight, head), (Out, logits)]);
        self.launch(|_| Op::Sample { vocab: VOCAB, vocab_known: KNOWN }, &[(X, logits)]);
    }

    fn plan(&self) -> Arc<Plan> {
        let manifest = manifest(&self.raw);
        Arc::new(Plan::verify(self.raw.clone(), &manifest).unwrap_or_else(|errors| panic!("{errors}")))
    }

    fn link(&self, isa: Isa, threads: usize) -> Result<CpuDevice, DeviceError> {
        // As a mapping would be, aligned.
        let words: Vec<u64> =
            self.weights.chunks(8).map(|chunk| u64::from_le_bytes(std::array::from_fn(|i| *chunk.get(i).unwrap_or(&0)))).collect();
        let options = CpuOptions { threads: Some(threads), isa: Some(isa), kv_pages: PAGES };
        CpuDevice::link(self.plan(), Arc::new(Words(words)), options)
    }
}

struct Words(Vec<u64>);

impl AsRef<[u8]> for Words {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

fn manifest(raw: &RawPlan) -> Manifest {
    Manifest {
        name: "test".into(),
        profile: "test".into(),
        target: Target::Cpu,
        model: ModelInfo {
            family: "qwen2".into(),
            parameters: 1,
            layers: 1,
            hidden: DIM,
            intermediate: INTER,
            heads: HEADS.q,
            kv_heads: HEADS.kv,
            head_dim: HEADS.dim,
            vocab: VOCAB,
            vocab_known: KNOWN,
            tied: false,
            rope_theta: F32Bits::new(10_000.0),
            weight_dtype: DType::Bf16,
            kv_dtype: raw.kv.dtype,
        },
        limits: Limits {
            context_max: CONTEXT,
            context_origin: "model".into(),
            seqs_max: 4,
            seqs_origin: "profile".into(),
            step_tokens_max: 32,
            page_tokens: HEADS.page_tokens,
        },
        ledger: ledger(raw, PAGES),
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

fn device(kv: DType, isa: Isa, threads: usize) -> CpuDevice {
    let mut builder = Builder::new(kv);
    builder.model(&Model::new());
    builder.link(isa, threads).unwrap_or_else(|error| panic!("{error}"))
}

/// Rows of one sequence in a step: token ids (or the row that sampled it), and the first position.
struct Part<'a> {
    pages: &'a [u32],
    ids: &'a [u32],
    source: u32,
    first: u32,
}

fn step(parts: &[Part<'_>]) -> StepInputs {
    let stride = (CONTEXT / HEADS.page_tokens) as usize;
    let mut inputs = StepInputs { query_starts: vec![0], ..StepInputs::default() };
    for part in parts {
        for (i, id) in part.ids.iter().enumerate() {
            let position = part.first + i as u32;
            inputs.token_ids.push(*id);
            inputs.token_sources.push(part.source);
            inputs.positions.push(position);
            let page = part.pages[(position / HEADS.page_tokens) as usize];
            inputs.kv_slots.push(page * HEADS.page_tokens + position % HEADS.page_tokens);
        }
        let mut table = part.pages.to_vec();
        table.resize(stride, 0);
        inputs.block_tables.extend(table);
        inputs.query_starts.push(inputs.token_ids.len() as u32);
        inputs.kv_lens.push(part.first + part.ids.len() as u32);
        inputs.logit_rows.push(inputs.token_ids.len() as u32 - 1);
        inputs.sampling.push(SamplingRow { logprobs: TOP_LOGPROBS_MAX, ..SamplingRow::GREEDY });
    }
    inputs
}

fn run(device: &mut CpuDevice, entry: EntryId, inputs: &StepInputs) -> StepOutputs {
    let mut outputs = StepOutputs::default();
    device.submit(entry, inputs).unwrap_or_else(|error| panic!("{error}"));
    device.collect(&mut outputs).unwrap_or_else(|error| panic!("{error}"));
    outputs
}

fn part<'a>(pages: &'a [u32], ids: &'a [u32], first: u32) -> Part<'a> {
    Part { pages, ids, source: NONE, first }
}

const PAGES_A: [u32; 10] = [7, 3, 9, 1, 20, 21, 22, 23, 24, 25];
const PAGES_B: [u32; 10] = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39];

fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 7 + 3) % KNOWN).collect()
}

#[test]
fn a_model_matches_the_reference() {
    let wanted = Model::new().logprobs(&prompt(21));
    for (isa, _) in all_kernels() {
        let outputs = run(&mut device(DType::F32, isa, 2), MIXED, &step(&[part(&PAGES_A, &prompt(21), 0)]));
        let mut order: Vec<usize> = (0..KNOWN as usize).collect();
        order.sort_by(|a, b| wanted[*b].total_cmp(&wanted[*a]));
        assert_eq!(outputs.sampled_ids, [order[0] as u32]);
        let ids: Vec<usize> = outputs.top_ids.iter().map(|id| *id as usize).collect();
        let logprobs: Vec<f64> = ids.iter().map(|id| wanted[*id]).collect();
        assert_eq!(ids, order[..TOP_LOGPROBS_MAX as usize], "{isa}");
        assert_close(&outputs.top_logprobs, &logprobs, |_| LOGPROB_TOLERANCE, &format!("{isa}"));
    }
}

/// Everything that a step says of its first row.
fn row_bits(outputs: &StepOutputs) -> (u32, Vec<u32>, Vec<u32>) {
    let top = TOP_LOGPROBS_MAX as usize;
    (outputs.sampled_ids[0], outputs.top_ids[..top].to_vec(), bits(&outputs.top_logprobs[..top]))
}

#[test]
fn a_sequence_does_not_depend_on_chunks_neighbours_threads_or_feedback() {
    let (whole, other) = (prompt(21), prompt(9));
    for kv in [DType::F32, DType::Bf16] {
        for (isa, _) in all_kernels() {
            let mut alone = device(kv, isa, 1);
            let first = run(&mut alone, MIXED, &step(&[part(&PAGES_A, &whole, 0)]));
            let next = run(&mut alone, DECODE, &step(&[part(&PAGES_A, &first.sampled_ids, 21)]));

            let mut crowded = device(kv, isa, 3);
            let mut silent = step(&[part(&PAGES_A, &whole[..5], 0)]);
            silent.logit_rows.clear();
            silent.sampling.clear();
            assert!(run(&mut crowded, MIXED, &silent).sampled_ids.is_empty(), "a chunk needs no logits");
            run(&mut crowded, MIXED, &step(&[part(&PAGES_A, &whole[5..6], 5), part(&PAGES_B, &other, 0)]));
            let chunked = run(&mut crowded, MIXED, &step(&[part(&PAGES_A, &whole[6..], 6), part(&PAGES_B, &other[..1], 9)]));
            assert_eq!(row_bits(&chunked), row_bits(&first), "{isa} {kv}: prefill");
            let fed = Part { pages: &PAGES_A, ids: &[0], source: 0, first: 21 };
            let decoded = run(&mut crowded, DECODE, &step(&[fed, part(&PAGES_B, &other[..1], 10)]));
            assert_eq!(row_bits(&decoded), row_bits(&next), "{isa} {kv}: decode of the id that the last step sampled");
        }
    }
}

#[test]
fn copied_pages_hold_the_same_cache() {
    let whole = prompt(8);
    let mut device = device(DType::F32, Isa::best(), 2);
    let inputs = step(&[part(&PAGES_A, &whole, 0)]);
    run(&mut device, MIXED, &inputs);
    device.copy_pages(&[(PAGES_A[0], PAGES_B[0]), (PAGES_A[1], PAGES_B[1])]).unwrap();
    let [a, b] = [PAGES_A, PAGES_B].map(|pages| row_bits(&run(&mut device, DECODE, &step(&[part(&pages, &[5], 8)]))));
    assert_eq!(a, b);
    assert!(device.copy_pages(&[(0, PAGES)]).is_err());
}

#[test]
fn bad_batches_are_refused_and_the_device_lives() {
    type Spoil = fn(&mut StepInputs);
    let good = || step(&[part(&PAGES_A, &[1, 2, 3], 0)]);
    let mut device = device(DType::F32, Isa::best(), 2);
    let cases: [(&str, Spoil); 14] = [
        ("token id", |inputs| inputs.token_ids[1] = VOCAB),
        ("token source", |inputs| inputs.token_sources[1] = 9),
        ("token_sources", |inputs| inputs.token_sources.clear()),
        ("positions", |inputs| inputs.positions[0] = CONTEXT),
        ("kv_slots", |inputs| inputs.kv_slots[2] = PAGES * HEADS.page_tokens),
        ("block_tables", |inputs| inputs.block_tables[0] = PAGES),
        ("query_starts", |inputs| inputs.query_starts[1] = 2),
        ("sequence 0", |inputs| inputs.kv_lens[0] = 2),
        ("sequence 0", |inputs| inputs.kv_lens[0] = CONTEXT + 1),
        ("logit_rows", |inputs| inputs.logit_rows[0] = 3),
        ("temperature", |inputs| inputs.sampling[0].temperature = f32::NAN),
        ("mask", |inputs| inputs.sampling[0].flags = oxide_bundle::step::row_flags::MASK),
        ("bias_starts", |inputs| inputs.sampling[0].flags = oxide_bundle::step::row_flags::BIAS),
        ("history_starts", |inputs| inputs.sampling[0].flags = oxide_bundle::step::row_flags::HISTORY),
    ];
    for (name, spoil) in cases {
        let mut inputs = good();
        spoil(&mut inputs);
        let error = device.submit(MIXED, &inputs).unwrap_err().to_string();
        assert!(error.contains(name), "{name}: {error}");
    }
    assert!(matches!(device.submit(DECODE, &good()), Err(DeviceError::OverEntry { .. })));
    assert!(matches!(device.submit(MIXED, &step(&[part(&PAGES_A, &prompt(33), 0)])), Err(DeviceError::OverEntry { .. })));
    assert!(device.submit(EntryId(2), &good()).is_err());
    assert!(device.collect(&mut StepOutputs::default()).is_err(), "nothing was submitted");
    device.submit(MIXED, &good()).unwrap();
    assert!(device.submit(MIXED, &good()).is_err(), "the last step was not collected");
    device.collect(&mut StepOutputs::default()).unwrap();
    run(&mut device, MIXED, &good());
}

#[test]
fn link_refuses_what_it_has_no_code_for() {
    let mut builder = Builder::new(DType::F32);
    builder.model(&Model::new());
    let normed = Linear { norm: Some(F32Bits::new(EPS)), ..Linear::plain(DIM, DIM) };
    builder.raw.kernels.push(KernelDecl {
        contract: Contract { op: Op::Linear(normed), act: DType::F32, weight: DType::Bf16, kv: DType::F32, out: DType::F32 },
        code: None,
    });
    let Err(DeviceError::MissingKernel { contract, device }) = builder.link(Isa::Portable, 1) else { panic!("linked") };
    assert!(contract.contains("linear") && device == "cpu", "{contract}");
}

#[test]
fn link_refuses_operands_that_do_not_fit() {
    let mut builder = Builder::new(DType::F32);
    builder.model(&Model::new());
    builder.weights.truncate(1000);
    let Err(DeviceError::BadLaunch { reason, step, .. }) = builder.link(Isa::Portable, 1) else { panic!("linked") };
    assert!(reason.contains("ends beyond the weight section") && step == "s0", "{step}: {reason}");

    let mut builder = Builder::new(DType::F32);
    builder.model(&Model::new());
    builder.raw.weights[8].rows = RowOrder::RotaryPairs;
    let Err(DeviceError::BadLaunch { reason, .. }) = builder.link(Isa::Portable, 1) else { panic!("linked") };
    assert!(reason.contains("`w8`") && reason.contains("RotaryPairs"), "{reason}");
}
