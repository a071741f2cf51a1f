//! A deterministic fake device, for tests of the engine and of servers.
//!
//! Its KV memory holds one word a token, a hash of the token, its position and the word before it *as
//! read through the block table*. The logits of a row hash every word that the row's block table leads
//! to. So a wrong slot, a stale page, a missed copy or a wrong source shows up as a wrong token, and
//! the right tokens are known without any device: [`greedy`]. Inputs are checked against the contract
//! of [`InputSlot`](oxide_bundle::step::InputSlot); a violation is a device error that says which.

use super::options::EngineLimits;
use crate::device::{Device, DeviceError, DeviceInfo, StepInputs, StepOutputs};
use oxide_bundle::dtype::DType;
use oxide_bundle::ids::EntryId;
use oxide_bundle::plan::{BatchClass, EntryDecl, KvGeometry, PLAN_VERSION, Plan, RawPlan};
use oxide_bundle::step::{HISTORY_IN_PROMPT, NONE, SamplingRow, StepBounds, TOP_LOGPROBS_MAX, row_flags};
use std::collections::{HashSet, VecDeque};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How a [`ScriptedDevice`] behaves.
#[derive(Debug)]
pub struct Script {
    /// Pages of the KV pool.
    pub kv_pages: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Longest sequence.
    pub context_max: u32,
    /// Ids, all known to the tokenizer.
    pub vocab: u32,
    /// Batch classes of the plan.
    pub classes: Vec<BatchClass>,
    /// Bias entries of a step.
    pub bias_max: u32,
    /// History entries of a step.
    pub history_max: u32,
    /// Steps in flight.
    pub depth: usize,
    /// Time that a step takes.
    pub step_time: Duration,
    /// Calls that go wrong.
    pub faults: Vec<DeviceFault>,
    /// An id that turns the logits of every row that sees it into NaN.
    pub poison: Option<u32>,
    /// If given, each step waits for one message before it is collected; a closed channel lets all pass.
    pub gate: Option<Receiver<()>>,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            kv_pages: 64,
            page_tokens: 4,
            context_max: 128,
            vocab: 61,
            classes: vec![
                BatchClass::Decode { seqs: 1 },
                BatchClass::Decode { seqs: 8 },
                BatchClass::Mixed { tokens: 16, seqs: 8 },
                BatchClass::Mixed { tokens: 64, seqs: 8 },
            ],
            bias_max: 64,
            history_max: 512,
            depth: 1,
            step_time: Duration::ZERO,
            faults: Vec::new(),
            poison: None,
            gate: None,
        }
    }
}

/// A call of the engine to its device.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`Device::submit`].
    Submit,
    /// [`Device::collect`].
    Collect,
    /// [`Device::copy_pages`].
    CopyPages,
}

impl DeviceFault {
    /// Makes the submission of step `at`, from 0, go wrong.
    pub fn submitting(at: u64, failing: Failing) -> Self {
        Self { call: Call::Submit, at, failing }
    }
}

/// How a call goes wrong.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Failing {
    /// It returns an error.
    Error,
    /// It panics.
    Panic,
    /// It takes this much longer.
    Slow(Duration),
}

/// A call that goes wrong.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct DeviceFault {
    /// Which call.
    pub call: Call,
    /// Its number, from 0, among the calls of its kind.
    pub at: u64,
    /// How.
    pub failing: Failing,
}

/// What a step looked like.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct StepRecord {
    /// Class of the entry.
    pub class: BatchClass,
    /// Tokens of the step.
    pub tokens: u32,
    /// Sequences of the step.
    pub seqs: u32,
    /// Logit rows of the step.
    pub rows: u32,
    /// Tokens whose id was the previous step's.
    pub sourced: u32,
}

/// Steps submitted so far.
#[derive(Clone, Debug, Default)]
pub struct StepLog(Arc<Mutex<Vec<StepRecord>>>);

impl StepLog {
    /// A copy of the records.
    pub fn steps(&self) -> Vec<StepRecord> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn push(&self, record: StepRecord) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record);
    }
}

/// The fake device.
#[derive(Debug)]
pub struct ScriptedDevice {
    script: Script,
    plan: Arc<Plan>,
    memory: Vec<u64>,
    log: StepLog,
    /// Calls so far, by kind.
    calls: [u64; 3],
    previous: Vec<u32>,
    in_flight: VecDeque<StepOutputs>,
}

impl ScriptedDevice {
    /// A device that follows `script`.
    pub fn new(script: Script) -> Self {
        let memory = (0..u64::from(script.kv_pages) * u64::from(script.page_tokens)).map(|slot| mix(slot, 0xDEAD)).collect();
        let plan = Arc::new(Plan::unverified(plan_of(&script)));
        Self { script, plan, memory, log: StepLog::default(), calls: [0; 3], previous: Vec::new(), in_flight: VecDeque::new() }
    }

    /// Limits for an engine over this device.
    pub fn limits(&self) -> EngineLimits {
        EngineLimits::of(self, self.script.context_max, self.plan.bounds().seqs_max, self.script.vocab)
    }

    /// The device's log, shared.
    pub fn log(&self) -> StepLog {
        self.log.clone()
    }

    /// Counts a call, and fails it if the script says so.
    fn fault(&mut self, call: Call) -> Result<(), DeviceError> {
        let count = &mut self.calls[call as usize];
        let at = std::mem::replace(count, *count + 1);
        for fault in self.script.faults.iter().filter(|fault| fault.call == call && fault.at == at) {
            match fault.failing {
                Failing::Error => return Err(DeviceError::Failed { message: format!("scripted failure of {call:?}") }),
                Failing::Panic => panic!("scripted panic of {call:?}"),
                Failing::Slow(time) => std::thread::sleep(time),
            }
        }
        Ok(())
    }

    fn run(&mut self, inputs: &StepInputs) -> StepOutputs {
        let ids: Vec<u32> = inputs.token_ids.iter().zip(&inputs.token_sources).map(|(id, source)| self.resolve(*id, *source)).collect();
        let mut seq_of = vec![0; ids.len()];
        for seq in 0..inputs.seqs() as usize {
            for token in inputs.query_starts[seq] as usize..inputs.query_starts[seq + 1] as usize {
                seq_of[token] = seq;
                let position = inputs.positions[token];
                let before = position.checked_sub(1).map_or(START, |before| self.memory[self.slot(inputs, seq, before)]);
                self.memory[inputs.kv_slots[token] as usize] = self.word(before, ids[token], position);
            }
        }
        let mut outputs = StepOutputs::default();
        for row in 0..inputs.rows() as usize {
            let token = inputs.logit_rows[row] as usize;
            let words = (0..=inputs.positions[token]).map(|position| self.memory[self.slot(inputs, seq_of[token], position)]);
            let logits = logits(words, self.script.vocab);
            sample(&logits, inputs, row, &mut outputs);
        }
        if inputs.sampling.iter().all(|row| matches!(row.logprobs, 0 | NONE)) {
            // As a GPU does.
            (outputs.top_ids, outputs.top_logprobs) = (Vec::new(), Vec::new());
        }
        outputs
    }

    fn word(&self, before: u64, id: u32, position: u32) -> u64 {
        if self.script.poison == Some(id) || before == POISON { POISON } else { word(before, id, position) }
    }

    fn resolve(&self, id: u32, source: u32) -> u32 {
        if source == NONE { id } else { self.previous.get(source as usize).copied().unwrap_or(NONE) }
    }

    fn slot(&self, inputs: &StepInputs, seq: usize, position: u32) -> usize {
        let (page, offset) = (position / self.script.page_tokens, position % self.script.page_tokens);
        let stride = self.plan.bounds().pages_per_seq_max as usize;
        (inputs.block_tables[seq * stride + page as usize] * self.script.page_tokens + offset) as usize
    }
}

impl Device for ScriptedDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo { kind: "scripted", name: "scripted".to_owned() }
    }

    fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    fn kv_pages(&self) -> u32 {
        self.script.kv_pages
    }

    fn depth(&self) -> usize {
        self.script.depth
    }

    fn submit(&mut self, entry: EntryId, inputs: &StepInputs) -> Result<(), DeviceError> {
        self.fault(Call::Submit)?;
        let class = self.plan.entries().get(entry.index()).map(|entry| entry.class);
        let bad =
            |reason: String| DeviceError::BadLaunch { entry: entry.to_string(), step: "all".into(), kernel: "scripted".into(), reason };
        let class = class.ok_or_else(|| bad("no such entry".to_owned()))?;
        self.check(class, inputs).map_err(bad)?;
        let sourced = inputs.token_sources.iter().filter(|source| **source != NONE).count() as u32;
        self.log.push(StepRecord { class, tokens: inputs.tokens(), seqs: inputs.seqs(), rows: inputs.rows(), sourced });
        let outputs = self.run(inputs);
        self.previous.clone_from(&outputs.sampled_ids);
        self.in_flight.push_back(outputs);
        Ok(())
    }

    fn collect(&mut self, outputs: &mut StepOutputs) -> Result<(), DeviceError> {
        if let Some(gate) = &self.script.gate {
            let _ = gate.recv();
        }
        if !self.script.step_time.is_zero() {
            std::thread::sleep(self.script.step_time);
        }
        self.fault(Call::Collect)?;
        *outputs = self.in_flight.pop_front().ok_or(DeviceError::Failed { message: "nothing in flight".to_owned() })?;
        Ok(())
    }

    fn copy_pages(&mut self, pairs: &[(u32, u32)]) -> Result<(), DeviceError> {
        self.fault(Call::CopyPages)?;
        let page = self.script.page_tokens as usize;
        for (from, to) in pairs {
            let (from, to) = (*from as usize * page, *to as usize * page);
            self.memory.copy_within(from..from + page, to);
        }
        Ok(())
    }
}

/// Checks of what the engine promises.
impl ScriptedDevice {
    fn check(&self, class: BatchClass, inputs: &StepInputs) -> Result<(), String> {
        let (tokens, seqs, rows) = (inputs.tokens(), inputs.seqs(), inputs.rows());
        require(self.in_flight.len() < self.script.depth, "too many steps in flight")?;
        require(tokens > 0 && tokens <= class.tokens_max() && seqs.max(rows) <= class.seqs_max(), "the batch does not fit its class")?;
        if let BatchClass::Decode { .. } = class {
            let one_each = tokens == seqs && seqs == rows && inputs.logit_rows.iter().copied().eq(0..rows);
            require(one_each, "a decode class takes one token and one row a sequence, in order")?;
        }
        let stride = self.plan.bounds().pages_per_seq_max as usize;
        let lengths = inputs.token_sources.len() == inputs.token_ids.len()
            && inputs.positions.len() == inputs.token_ids.len()
            && inputs.kv_slots.len() == inputs.token_ids.len()
            && inputs.block_tables.len() == seqs as usize * stride
            && inputs.query_starts.len() == seqs as usize + 1;
        require(lengths, "slots have unequal lengths")?;
        require(inputs.block_tables.iter().all(|page| *page < self.script.kv_pages), "a block table names no page")?;
        require(inputs.query_starts[0] == 0 && inputs.query_starts[seqs as usize] == tokens, "query starts do not cover the tokens")?;
        let sources = inputs.token_sources.iter().all(|source| *source == NONE || (*source as usize) < self.previous.len());
        require(sources, "a source names no row of the previous step")?;
        for seq in 0..seqs as usize {
            self.check_seq(seq, inputs)?;
        }
        self.check_writes(inputs)?;
        self.check_rows(inputs)
    }

    fn check_seq(&self, seq: usize, inputs: &StepInputs) -> Result<(), String> {
        let range = inputs.query_starts[seq] as usize..inputs.query_starts[seq + 1] as usize;
        require(!range.is_empty(), "a sequence has no token")?;
        let first = inputs.kv_lens[seq].checked_sub(range.len() as u32).ok_or("kv_len is shorter than the chunk")?;
        for (position, token) in (first..).zip(range) {
            require(inputs.positions[token] == position, "positions are not contiguous up to kv_len")?;
            require(inputs.kv_slots[token] as usize == self.slot(inputs, seq, position), "a slot is not in the block table")?;
            let id = inputs.token_ids[token];
            require(id < self.script.vocab, "an id is outside the vocabulary")?;
        }
        Ok(())
    }

    /// A page that is written belongs to one sequence.
    fn check_writes(&self, inputs: &StepInputs) -> Result<(), String> {
        let stride = self.plan.bounds().pages_per_seq_max as usize;
        let held = |seq: usize| {
            let pages = inputs.kv_lens[seq].div_ceil(self.script.page_tokens) as usize;
            &inputs.block_tables[seq * stride..seq * stride + pages]
        };
        for seq in 0..inputs.seqs() as usize {
            let tokens = inputs.query_starts[seq] as usize..inputs.query_starts[seq + 1] as usize;
            let written: HashSet<u32> = inputs.kv_slots[tokens].iter().map(|slot| slot / self.script.page_tokens).collect();
            for other in (0..inputs.seqs() as usize).filter(|other| *other != seq) {
                require(held(other).iter().all(|page| !written.contains(page)), "a page of one sequence is written by another")?;
            }
        }
        Ok(())
    }

    fn check_rows(&self, inputs: &StepInputs) -> Result<(), String> {
        let rows = inputs.rows() as usize;
        let bounds = self.plan.bounds();
        let words = bounds.vocab.div_ceil(32) as usize;
        let lengths = inputs.sampling.len() == rows
            && inputs.bias_starts.len() == rows + 1
            && inputs.history_starts.len() == rows + 1
            && inputs.bias_ids.len() == inputs.bias_values.len()
            && inputs.history_ids.len() == inputs.history_counts.len()
            && (inputs.mask.is_empty() || inputs.mask.len() == rows * words);
        require(lengths, "row slots have unequal lengths")?;
        require(inputs.bias_ids.len() <= bounds.bias_max as usize, "too many bias entries")?;
        require(inputs.history_ids.len() <= bounds.history_max as usize, "too many history entries")?;
        for (row, sampling) in inputs.sampling.iter().enumerate() {
            let position = inputs.positions.get(inputs.logit_rows[row] as usize).ok_or("a row names no token")?;
            require(sampling.counter == u64::from(*position) + 1, "a counter is not the position of the sampled token")?;
            let (bias, history) = (entries(&inputs.bias_starts, row), entries(&inputs.history_starts, row));
            require((sampling.flags & row_flags::BIAS != 0) != bias.is_empty(), "the bias flag and the bias entries disagree")?;
            require(sampling.flags & row_flags::HISTORY != 0 || history.is_empty(), "history without its flag")?;
            require(sampling.flags & row_flags::MASK == 0 || !inputs.mask.is_empty(), "a mask flag without masks")?;
            require(unique(&inputs.bias_ids[bias]) && unique(&inputs.history_ids[history]), "an id occurs twice in a row's list")?;
        }
        Ok(())
    }
}

fn require(holds: bool, reason: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(reason.to_owned()) }
}

fn unique(ids: &[u32]) -> bool {
    ids.iter().collect::<HashSet<_>>().len() == ids.len()
}

fn entries(starts: &[u32], row: usize) -> std::ops::Range<usize> {
    starts[row] as usize..starts[row + 1] as usize
}

/// The ids that follow `prompt` greedily, computed without a device.
pub fn greedy(prompt: &[u32], count: usize, vocab: u32) -> Vec<u32> {
    let mut ids = prompt.to_vec();
    for _ in 0..count {
        let mut before = START;
        let words: Vec<u64> = (0..)
            .zip(&ids)
            .map(|(position, id)| {
                before = word(before, *id, position);
                before
            })
            .collect();
        let logits = logits(words, vocab);
        ids.push(argmax(&logits));
    }
    ids.split_off(prompt.len())
}

/// KV word of a sequence that saw the poison id.
const POISON: u64 = 0;
/// KV word before the first.
const START: u64 = 1;

fn word(before: u64, id: u32, position: u32) -> u64 {
    mix(mix(before, u64::from(id)), u64::from(position)) | 1
}

/// SplitMix64's finaliser over both values.
fn mix(a: u64, b: u64) -> u64 {
    let mut z = (a ^ b.rotate_left(32)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn logits(words: impl IntoIterator<Item = u64>, vocab: u32) -> Vec<f32> {
    let Some(digest) = words.into_iter().try_fold(0, |digest, word| (word != POISON).then(|| mix(digest, word))) else {
        return vec![f32::NAN; vocab as usize];
    };
    (0..u64::from(vocab)).map(|id| (mix(digest, id) >> 40) as f32 / (1 << 21) as f32).collect()
}

fn argmax(values: &[f32]) -> u32 {
    let best = (0u32..).zip(values).max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map_or(NONE, |(id, _)| id)
}

/// Draws one row. Bias, mask, penalties, temperature and top-k are as the contract says; the draw itself
/// is only deterministic in (logits, parameters, seed, counter).
fn sample(logits: &[f32], inputs: &StepInputs, row: usize, outputs: &mut StepOutputs) {
    let sampling = inputs.sampling[row];
    let mut values = logits.to_vec();
    for entry in entries(&inputs.bias_starts, row) {
        values[inputs.bias_ids[entry] as usize] += inputs.bias_values[entry];
    }
    if sampling.flags & row_flags::MASK != 0 {
        let words = inputs.mask.len() / inputs.rows() as usize;
        let mask = &inputs.mask[row * words..(row + 1) * words];
        for (id, value) in values.iter_mut().enumerate() {
            if mask[id / 32] >> (id % 32) & 1 == 0 {
                *value = f32::NEG_INFINITY;
            }
        }
    }
    let failed = values.iter().any(|value| value.is_nan()) || values.iter().all(|value| *value == f32::NEG_INFINITY);
    let sum: f32 = values.iter().map(|value| value.exp()).sum();
    let logprobs: Vec<f32> = values.iter().map(|value| value - sum.ln()).collect();
    let id = match (failed, sampling.target) {
        (true, _) => NONE,
        (false, NONE) => draw(values, &sampling, inputs, row),
        (false, target) => target,
    };
    outputs.sampled_ids.push(id);
    outputs.sampled_logprobs.push(logprobs.get(id as usize).copied().unwrap_or(f32::NAN));
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| logprobs[*b as usize].total_cmp(&logprobs[*a as usize]).then(a.cmp(b)));
    for rank in 0..TOP_LOGPROBS_MAX as usize {
        let id = order.get(rank).copied().unwrap_or(NONE);
        outputs.top_ids.push(id);
        outputs.top_logprobs.push(logprobs.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY));
    }
}

fn draw(mut values: Vec<f32>, sampling: &SamplingRow, inputs: &StepInputs, row: usize) -> u32 {
    for entry in entries(&inputs.history_starts, row) {
        let value = &mut values[inputs.history_ids[entry] as usize];
        let count = inputs.history_counts[entry] & !HISTORY_IN_PROMPT;
        *value = if *value > 0.0 { *value / sampling.repetition_penalty } else { *value * sampling.repetition_penalty };
        if count > 0 {
            *value -= sampling.presence_penalty + sampling.frequency_penalty * count as f32;
        }
    }
    if sampling.temperature == 0.0 || sampling.top_k == 1 {
        return argmax(&values);
    }
    let best = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = values.iter().map(|value| f64::from((value - best) / sampling.temperature).exp()).collect();
    let mut left = (mix(sampling.seed, sampling.counter) >> 11) as f64 / (1u64 << 53) as f64 * weights.iter().sum::<f64>();
    for (id, weight) in (0..).zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return id;
        }
    }
    argmax(&values)
}

fn plan_of(script: &Script) -> RawPlan {
    let max = |of: fn(BatchClass) -> u32| script.classes.iter().map(|class| of(*class)).max().unwrap_or(0);
    let seqs_max = max(BatchClass::seqs_max);
    RawPlan {
        version: PLAN_VERSION,
        bounds: StepBounds {
            tokens_max: max(BatchClass::tokens_max),
            seqs_max,
            rows_max: seqs_max,
            pages_per_seq_max: script.context_max.div_ceil(script.page_tokens),
            bias_max: script.bias_max,
            history_max: script.history_max,
            vocab: script.vocab,
        },
        kv: KvGeometry { layers: 1, page_tokens: script.page_tokens, kv_heads: 1, head_dim: 1, dtype: DType::F32 },
        arena_bytes: 0,
        buffers: Vec::new(),
        weights: Vec::new(),
        kernels: Vec::new(),
        entries: script.classes.iter().map(|class| EntryDecl { class: *class, steps: Vec::new() }).collect(),
    }
}
