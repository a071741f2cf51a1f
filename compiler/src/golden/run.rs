//! Greedy completions on the cpu device, step by step over its own little block table.

use super::GoldenError;
use super::reference::Prompt;
use crate::progress::{Phase, Progress};
use oxide_bundle::Mode;
use oxide_bundle::manifest::GoldenGreedy;
use oxide_bundle::step::{NONE, SamplingRow, TOP_LOGPROBS_MAX};
use oxide_runtime::device::cpu::{CpuDevice, CpuOptions};
use oxide_runtime::device::{Device, StepInputs, StepOutputs};
use oxide_runtime::open::{OpenOptions, open_bundle};
use std::path::Path;
use std::sync::Arc;

/// Distance of the two largest logits under which float32 implementations may legitimately differ.
const GAP_MIN: f32 = 0.05;

/// Completes every prompt of the bundle at `path` and compares with its reference.
pub(super) fn greedy(path: &Path, prompts: &[Prompt], progress: &mut dyn Progress) -> Result<Vec<GoldenGreedy>, GoldenError> {
    let opened = open_bundle(path, OpenOptions { mode: Mode::Metadata, ..OpenOptions::default() })?;
    let plan = Arc::clone(opened.bundle.plan());
    let page_tokens = plan.kv().page_tokens;
    let mut sequences = Vec::new();
    let mut pages = 0;
    for prompt in prompts {
        let sequence = Sequence::new(prompt, pages, page_tokens);
        pages += sequence.pages;
        sequences.push(sequence);
    }
    let options = CpuOptions { threads: None, isa: None, kv_pages: pages.max(1) };
    let device = CpuDevice::link(plan, Arc::new(opened.weights.clone()), options)?;
    let mut runner = Runner { device, inputs: StepInputs::default(), outputs: StepOutputs::default() };
    progress.start(Phase::Golden, sequences.iter().map(|sequence| (sequence.prompt.ids.len() + sequence.prompt.count) as u64).sum());
    runner.prefill(&mut sequences, progress)?;
    runner.decode(&mut sequences, progress)?;
    progress.finish();
    sequences.into_iter().map(Sequence::vector).collect()
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

    /// Leading ids up to the first near tie, of this run or of the reference.
    fn vector(self) -> Result<GoldenGreedy, GoldenError> {
        let Self { prompt, ids, gaps, .. } = self;
        let reference = prompt.reference.as_ref();
        let mut binding = 0;
        for (position, (&found, &gap)) in ids.iter().zip(&gaps).enumerate() {
            let expected = reference.and_then(|r| Some((*r.greedy.get(position)?, *r.gaps.get(position)?)));
            let (expected, gap) = expected.map_or((found, gap), |(id, reference_gap)| (id, gap.min(reference_gap)));
            if gap < GAP_MIN {
                break;
            }
            if found != expected {
                return Err(GoldenError::Differs { prompt: prompt.name.clone(), position, found, expected, gap });
            }
            binding += 1;
        }
        Ok(GoldenGreedy { name: prompt.name.clone(), prompt: prompt.ids.clone(), ids, binding })
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
