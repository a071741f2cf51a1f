//! `compare`: greedy ids of a bundle against a reference made by transformers.
//!
//! Equal ids are demanded up to the first step whose two largest logits lie closer than the arithmetic
//! can tell apart; after a legitimate divergence texts differ. Each prompt runs alone, in a full batch,
//! on the prefix cache, and beside requests that are cancelled; on the cpu target all of these must give
//! equal ids to the last, whatever the gaps.

mod reference;
mod ways;

use crate::opened::{self, Opened};
use anyhow::{Context, bail};
use clap::Args;
use oxide_bundle::manifest::Target;
use oxide_runtime::device::cuda::CudaOptions;
use reference::{Prompt, Reference};
use serde::Serialize;
use std::path::PathBuf;
use ways::{Answer, Runner, Way};

/// Differences of the two largest logits that f32 and BF16 arithmetic may turn round.
const GAP_CPU: f32 = 0.05;
const GAP_SM90: f32 = 0.25;

/// Options of `compare`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompareArgs {
    /// Bundle
    bundle: PathBuf,
    /// Reference: a file like `profiles/*/reference.json`, or of `kernels/lab/reference_ids.py`
    reference: PathBuf,
    /// Ids are demanded up to the first step whose top two logits are closer [default: 0.05 on cpu, 0.25 on sm90]
    #[arg(long, value_name = "LOGITS")]
    gap: Option<f32>,
    /// Sequences of the full batch [default: as many as the bundle serves]
    #[arg(long, value_name = "N")]
    batch: Option<u32>,
    /// Compare log-probabilities too, where the reference has them, to within the gap
    #[arg(long)]
    logits: bool,
    /// Launch kernels one by one instead of replaying graphs (GPU)
    #[arg(long)]
    no_graphs: bool,
    /// Launch without programmatic dependent launch (GPU)
    #[arg(long)]
    no_pdl: bool,
    /// Write the results to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What was found of one prompt.
#[derive(Debug, Serialize)]
struct PromptReport {
    name: String,
    prompt_tokens: usize,
    /// Ids demanded, of those that the reference has.
    demanded: usize,
    steps: usize,
    /// Log-probabilities compared.
    logprobs: usize,
    /// Largest difference of a log-probability.
    logprob_error: f32,
    /// Prompt tokens found in the prefix cache by the run that should find some.
    cached_tokens: u32,
    /// Everything wrong; empty for a pass.
    faults: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    target: String,
    seal: String,
    device: String,
    gap: f32,
    batch: u32,
    prompts: Vec<PromptReport>,
}

/// Compares.
///
/// # Errors
/// If bundle or reference cannot be read, a request fails, or an id differs.
pub(crate) fn run(args: &CompareArgs) -> anyhow::Result<()> {
    let reference = Reference::load(&args.reference)?;
    let cuda = CudaOptions { graphs: !args.no_graphs, pdl: !args.no_pdl, ..CudaOptions::default() };
    let Opened { engine, manifest, seal, device } = opened::open(&args.bundle, cuda)?;
    let is_cpu = manifest.target == Target::Cpu;
    let gap = args.gap.unwrap_or(if is_cpu { GAP_CPU } else { GAP_SM90 });
    let batch = args.batch.unwrap_or(manifest.limits.seqs_max).clamp(1, manifest.limits.seqs_max);
    let prompts: Vec<Prompt> = reference.prompts.into_iter().filter_map(|prompt| prompt.fitted(manifest.limits.context_max)).collect();
    if prompts.is_empty() {
        bail!("no prompt of the reference fits the bundle's context of {} tokens", manifest.limits.context_max);
    }
    let mut judge = Judge::new(&prompts, gap, args.logits, is_cpu);
    let runner = Runner { engine: &engine, prompts: &prompts, logprobs: args.logits };
    for way in Way::ALL {
        for (prompt, answer) in runner.run(way, batch).with_context(|| format!("running the prompts {}", way.name()))? {
            judge.hear(prompt, way, answer, manifest.limits.page_tokens);
        }
    }
    engine.stop();
    engine.join();
    let report = Report { model: manifest.name, target: manifest.target.to_string(), seal, device, gap, batch, prompts: judge.reports };
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    print!("{}", table(&report));
    if args.logits && report.prompts.iter().all(|prompt| prompt.logprobs == 0) {
        bail!("{} has no log-probabilities to compare", args.reference.display());
    }
    let failed = report.prompts.iter().filter(|prompt| !prompt.faults.is_empty()).count();
    if failed > 0 { bail!("{failed} of {} prompts differ", report.prompts.len()) } else { Ok(()) }
}

/// Compares answers as they come.
struct Judge<'a> {
    prompts: &'a [Prompt],
    gap: f32,
    logits: bool,
    /// Whether all ways must agree to the last id.
    is_invariant: bool,
    first: Vec<Option<Vec<u32>>>,
    reports: Vec<PromptReport>,
}

impl<'a> Judge<'a> {
    fn new(prompts: &'a [Prompt], gap: f32, logits: bool, is_invariant: bool) -> Self {
        let report = |prompt: &Prompt| PromptReport {
            name: prompt.name.clone(),
            prompt_tokens: prompt.prompt_ids.len(),
            demanded: prompt.demanded(gap),
            steps: prompt.greedy_f32.len(),
            logprobs: 0,
            logprob_error: 0.0,
            cached_tokens: 0,
            faults: Vec::new(),
        };
        Self { prompts, gap, logits, is_invariant, first: vec![None; prompts.len()], reports: prompts.iter().map(report).collect() }
    }

    fn hear(&mut self, index: usize, way: Way, answer: Answer, page_tokens: u32) {
        let prompt = &self.prompts[index];
        let report = &mut self.reports[index];
        if let Some(fault) = prompt.difference(&answer.ids, self.gap) {
            report.faults.push(format!("{}: {fault}", way.name()));
        }
        match &self.first[index] {
            None => self.first[index] = Some(answer.ids.clone()),
            Some(first) if self.is_invariant && *first != answer.ids => {
                let at = first.iter().zip(&answer.ids).position(|(a, b)| a != b).unwrap_or(answer.ids.len().min(first.len()));
                report.faults.push(format!("{}: id {at} differs from the run alone", way.name()));
            }
            Some(_) => {}
        }
        if way == Way::Prefix {
            report.cached_tokens = answer.cached_tokens;
            if answer.cached_tokens == 0 && prompt.prompt_ids.len() > page_tokens as usize {
                report.faults.push(format!("{}: no page was found in the cache", way.name()));
            }
        }
        if self.logits {
            for (what, found, wanted) in prompt.logprobs(&answer, self.gap) {
                report.logprobs += 1;
                let error = (found - wanted).abs();
                report.logprob_error = report.logprob_error.max(error);
                if error.is_nan() || error > self.gap {
                    report.faults.push(format!("{}: {what} is {found}, transformers has {wanted}", way.name()));
                }
            }
        }
    }
}

fn table(report: &Report) -> String {
    let mut out = format!("{} ({}) on {}, gap {}, batch {}\n", report.model, report.target, report.device, report.gap, report.batch);
    out +=
        &format!("{:<24} {:>8} {:>10} {:>8} {:>10} {:>10}  {}\n", "prompt", "tokens", "demanded", "cached", "logprobs", "error", "verdict");
    for prompt in &report.prompts {
        let demanded = format!("{}/{}", prompt.demanded, prompt.steps);
        let verdict = prompt.faults.first().map_or_else(|| "equal".to_owned(), |fault| format!("DIFFERS {fault}"));
        out += &format!(
            "{:<24} {:>8} {demanded:>10} {:>8} {:>10} {:>10.4}  {verdict}\n",
            prompt.name, prompt.prompt_tokens, prompt.cached_tokens, prompt.logprobs, prompt.logprob_error
        );
    }
    let demanded: usize = report.prompts.iter().map(|prompt| prompt.demanded).sum();
    let steps: usize = report.prompts.iter().map(|prompt| prompt.steps).sum();
    out += &format!("{} prompts, {demanded} ids demanded of {steps}, each {}\n", report.prompts.len(), Way::ALL.map(Way::name).join(", "));
    out
}
