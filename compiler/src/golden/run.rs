//! Greedy completions on the cpu device, step by step over its own little block table.

use super::GoldenError;
use super::reference::Prompt;
use crate::progress::{Phase, Progress};
use oxide_bundle::Bundle;
use oxide_bundle::container::Bytes;
use oxide_bundle::manifest::{GoldenGreedy, Target};
use oxide_bundle::step::{NONE, SamplingRow, TOP_LOGPROBS_MAX};
use oxide_runtime::device::cpu::{CpuDevice, CpuOptions, Isa};
use oxide_runtime::device::{Device, StepInputs, StepOutputs};
use oxide_runtime::mapping::{Access, Mapping};
use oxide_runtime::open::{OpenError, Weights};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Distance of the two largest logits under which float32 implementations may legitimately differ.
const GAP_MIN_F32: f32 = 0.05;
/// The same for a target that computes in BF16.
const GAP_MIN_BF16: f32 = 0.25;
/// Weights larger than this are let go of while the model runs, so that a compile stays small.
const RESIDENT_BYTES_MAX: usize = 256 << 20;
/// How often they are let go of.
const RELEASE_EVERY: Duration = Duration::from_millis(4);

/// Completes every prompt with the cpu bundle at `path` and compares with its reference. Ids bind as
/// `target` computes.
pub(super) fn greedy(
    path: &Path,
    prompts: &[Prompt],
    target: Target,
    progress: &mut dyn Progress,
) -> Result<Vec<GoldenGreedy>, GoldenError> {
    let opening = |source: OpenError| GoldenError::Open(source);
    let file = |source| OpenError::File { path: path.to_owned(), source };
    let mapping = Arc::new(Mapping::open(path, Access::Map).map_err(|source| opening(file(source)))?);
    let bundle = Bundle::parse(Arc::clone(&mapping) as Bytes);
    let bundle = bundle.map_err(|source| opening(OpenError::Refused { path: path.to_owned(), source }))?;
    let plan = Arc::clone(bundle.plan());
    let mut sequences = Vec::new();
    let mut pages = 0;
    for prompt in prompts {
        let sequence = Sequence::new(prompt, pages, plan.kv().page_tokens);
        pages += sequence.pages;
        sequences.push(sequence);
    }
    let options = CpuOptions { threads: None, isa: instruction_set(prompts), kv_pages: pages.max(1) };
    let device = CpuDevice::link(plan, Arc::new(Weights::of(&bundle)), options)?;
    let mut runner = Runner { device, inputs: StepInputs::default(), outputs: StepOutputs::default() };
    progress.start(Phase::Golden, sequences.iter().map(|sequence| (sequence.prompt.ids.len() + sequence.prompt.count) as u64).sum());
    while_releasing(&mapping, bundle.weights_range(), || {
        runner.prefill(&mut sequences, progress)?;
        runner.decode(&mut sequences, progress)
    })?;
    progress.finish();
    let vectors = sequences.into_iter().map(|sequence| sequence.vector(target)).collect::<Result<Vec<_>, _>>()?;
    // A prompt whose first step is a near tie binds no id, and so proves nothing.
    Ok(vectors.into_iter().filter(|vector| !vector.ids.is_empty()).collect())
}

/// Ids that a reference confirms are the same on every machine. Others are made with the portable
/// instructions, which every machine has, so that every machine seals the same bytes.
fn instruction_set(prompts: &[Prompt]) -> Option<Isa> {
    prompts.iter().any(|prompt| prompt.reference.is_none()).then_some(Isa::Portable)
}

/// Runs `work` while the pages of large weights are let go of from time to time.
fn while_releasing<T>(mapping: &Mapping, weights: Range<usize>, work: impl FnOnce() -> T) -> T {
    if weights.len() <= RESIDENT_BYTES_MAX {
        return work();
    }
    let (finished, waiting) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while waiting.recv_timeout(RELEASE_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                // A refusal costs memory, not correctness.
                let _ = mapping.release(weights.clone());
            }
        });
        let result = work();
        drop(finished);
        result
    })
}

struct Sequence<'a> {
    prompt: &'a Prompt,
    first_page: u32,
    pages: u32,
    page_tokens: u32,
    /// Tokens in the cache.
    cached: u32,
    ids: Vec<u32>,
    gaps: Vec<f32>,
}

impl<'a> Sequence<'a> {
    fn new(prompt: &'a Prompt, first_page: u32, page_tokens: u32) -> Self {
        let tokens = (prompt.ids.len() + prompt.count) as u32;
        Self { prompt, first_page, pages: tokens.div_ceil(page_tokens), page_tokens, cached: 0, ids: Vec::new(), gaps: Vec::new() }
    }

    fn wants(&self) -> bool {
        self.ids.len() < self.prompt.count
    }

    fn slot(&self, position: u32) -> u32 {
        self.first_page * self.page_tokens + position
    }

    /// The leading ids up to the first near tie. With a reference they are the reference's, by its gaps.
    fn vector(self, target: Target) -> Result<GoldenGreedy, GoldenError> {
        let Self { prompt, ids, gaps, .. } = self;
        if let Some(reference) = &prompt.reference {
            let compared = ids.iter().zip(&reference.greedy).zip(&reference.gaps).enumerate();
            for (position, ((&found, &expected), &gap)) in compared.take_while(|(_, (_, gap))| **gap >= GAP_MIN_F32) {
                if found != expected {
                    return Err(GoldenError::Differs { prompt: prompt.name.clone(), position, found, expected, gap });
                }
            }
        }
        let gaps = prompt.reference.as_ref().map_or(&gaps, |reference| &reference.gaps);
        let gap_min = match target {
            Target::Cpu => GAP_MIN_F32,
            Target::Sm90 => GAP_MIN_BF16,
        };
        let binding = ids.iter().zip(gaps).take_while(|(_, gap)| **gap >= gap_min).count();
        let ids = ids.into_iter().take(binding).collect();
        Ok(GoldenGreedy { name: prompt.name.clone(), prompt: prompt.ids.clone(), ids, binding: binding as u32 })
    }
}

struct Runner {
    device: CpuDevice,
    inputs: StepInputs,
    outputs: StepOutputs,
}

impl Runner {
    /// Prompts one after the other, in chunks of the largest class.
    fn prefill(&mut self, sequences: &mut [Sequence<'_>], progress: &mut dyn Progress) -> Result<(), GoldenError> {
        let chunk_tokens = self.device.plan().bounds().tokens_max.max(1) as usize;
        for sequence in sequences.iter_mut().filter(|sequence| sequence.wants()) {
            let ids = &sequence.prompt.ids;
            for chunk in ids.chunks(chunk_tokens) {
                self.inputs.clear();
                self.inputs.query_starts.push(0);
                self.push(sequence, chunk);
                let last = sequence.cached as usize + chunk.len() == ids.len();
                self.submit(if last { 1 } else { 0 })?;
                sequence.cached += chunk.len() as u32;
                progress.advance(chunk.len() as u64);
                if last {
                    self.take(0, sequence)?;
                }
            }
        }
        Ok(())
    }

    /// One id a sequence and step, all sequences that want one together.
    fn decode(&mut self, sequences: &mut [Sequence<'_>], progress: &mut dyn Progress) -> Result<(), GoldenError> {
        let seqs_max = self.device.plan().bounds().seqs_max.max(1) as usize;
        loop {
            let mut running: Vec<&mut Sequence<'_>> = sequences.iter_mut().filter(|s| !s.ids.is_empty() && s.wants()).collect();
            if running.is_empty() {
                return Ok(());
            }
            for group in running.chunks_mut(seqs_max) {
                self.inputs.clear();
                self.inputs.query_starts.push(0);
                for sequence in group.iter() {
                    let last = sequence.ids.last().copied().into_iter().collect::<Vec<_>>();
                    self.push(sequence, &last);
                }
                self.submit(group.len())?;
                for (row, sequence) in group.iter_mut().enumerate() {
                    sequence.cached += 1;
                    self.take(row, sequence)?;
                }
                progress.advance(group.len() as u64);
            }
        }
    }

    /// Adds a sequence's next tokens to the step.
    fn push(&mut self, sequence: &Sequence<'_>, tokens: &[u32]) {
        let inputs = &mut self.inputs;
        for (&id, position) in tokens.iter().zip(sequence.cached..) {
            inputs.token_ids.push(id);
            inputs.token_sources.push(NONE);
            inputs.positions.push(position);
            inputs.kv_slots.push(sequence.slot(position));
        }
        let stride = self.device.plan().bounds().pages_per_seq_max;
        inputs.block_tables.extend((0..stride).map(|page| sequence.first_page + page.min(sequence.pages - 1)));
        inputs.query_starts.push(inputs.token_ids.len() as u32);
        inputs.kv_lens.push(sequence.cached + tokens.len() as u32);
        inputs.logit_rows.push(inputs.token_ids.len() as u32 - 1);
    }

    /// Runs the step, with logits of its first `rows` sequences.
    fn submit(&mut self, rows: usize) -> Result<(), GoldenError> {
        let inputs = &mut self.inputs;
        inputs.logit_rows.truncate(rows);
        inputs.sampling = vec![SamplingRow { logprobs: 2, ..SamplingRow::GREEDY }; rows];
        inputs.bias_starts = vec![0; rows + 1];
        inputs.history_starts = vec![0; rows + 1];
        let decode = inputs.tokens() == inputs.seqs();
        let entry = self.device.plan().entry_for(decode, inputs.tokens(), inputs.seqs());
        let entry = entry.ok_or(GoldenError::NoClass { tokens: inputs.tokens() })?;
        self.device.submit(entry, inputs)?;
        self.device.collect(&mut self.outputs)?;
        Ok(())
    }

    /// Takes a row's id and the distance of its two largest logits.
    fn take(&self, row: usize, sequence: &mut Sequence<'_>) -> Result<(), GoldenError> {
        let id = self.outputs.sampled_ids.get(row).copied().filter(|&id| id != NONE);
        let position = sequence.ids.len();
        let id = id.ok_or_else(|| GoldenError::NotANumber { prompt: sequence.prompt.name.clone(), position })?;
        let top = self.outputs.top_logprobs.get(row * TOP_LOGPROBS_MAX as usize..).unwrap_or_default();
        let gap = match top {
            [first, second, ..] => first - second,
            _ => 0.0,
        };
        sequence.ids.push(id);
        sequence.gaps.push(gap);
        Ok(())
    }
}
