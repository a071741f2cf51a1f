//! `bench`: decode and prefill speed, next to what this machine's memory gives in the same run.
//!
//! Decode: sequences of equal length are submitted while the engine is paused, so that all start
//! together; the time is from first to last token, the bytes are the weights that one step reads.
//! Memory: the weight section is read in place by as many threads as compute, between the rounds.
//! Prompts are random ids of a fixed seed and never share a prefix. Medians over the rounds.

use super::args::BenchArgs;
use super::error::CliError;
use super::output;
use crate::model::{LoadOptions, LoadedModel};
use oxide_runtime::engine::{ChoiceTrace, EngineEvent, EngineRequest, EventStream};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Decode at one batch size.
struct DecodeRow {
    batch: u32,
    tokens_per_second: f64,
    step: Duration,
    weight_bytes_per_second: f64,
}

/// Prefill of one length.
struct PrefillRow {
    tokens: u32,
    tokens_per_second: f64,
    first_token: Duration,
}

/// A deterministic source of prompt ids (splitmix64), so that two runs measure the same work.
struct Ids {
    state: u64,
    known: u32,
}

impl Ids {
    fn prompt(&mut self, length: u32) -> Vec<u32> {
        (0..length).map(|_| self.next()).collect()
    }

    fn next(&mut self) -> u32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) % u64::from(self.known.max(1))) as u32
    }
}

pub(super) fn run(args: &BenchArgs, load: &LoadOptions, started: Instant) -> Result<(), CliError> {
    let model = LoadedModel::load(load)?;
    let ready = started.elapsed();
    let mut ids = Ids { state: 1, known: model.engine.limits().vocab_known };
    let first_token = generate(&model, vec![ids.prompt(16.min(model.engine.limits().context_max / 2))], 1)?;
    let process_to_first_token = started.elapsed();
    let threads = load.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let batches = batches(&model, args)?;
    let lengths = prefill_lengths(&model, args)?;
    let mut reads = Vec::new();
    let mut decode = vec![Vec::new(); batches.len()];
    for _ in 0..args.rounds {
        for (times, &batch) in decode.iter_mut().zip(&batches) {
            reads.push(read_speed(model.bundle.weights(), threads));
            times.push(decode_step(&model, args, &mut ids, batch)?);
        }
    }
    let bytes = step_bytes(&model);
    let decode: Vec<DecodeRow> = batches.into_iter().zip(decode).map(|(batch, times)| DecodeRow::of(batch, median(times), bytes)).collect();
    let prefill = lengths.into_iter().map(|tokens| measure_prefill(&model, args, &mut ids, tokens)).collect::<Result<Vec<_>, _>>()?;
    let report = Report {
        model: &model,
        threads,
        rounds: args.rounds,
        ready,
        process_to_first_token,
        first_token: prefill_time(&first_token),
        read: median_f64(reads),
        bytes,
        decode,
        prefill,
    };
    output::report(args.json, &report.to_json(), || report.describe())?;
    model.engine.stop();
    model.engine.join();
    Ok(())
}

struct Report<'a> {
    model: &'a LoadedModel,
    threads: usize,
    rounds: u32,
    ready: Duration,
    process_to_first_token: Duration,
    first_token: Duration,
    /// Bytes a second of plain reading.
    read: f64,
    /// Weight bytes of a decode step.
    bytes: u64,
    decode: Vec<DecodeRow>,
    prefill: Vec<PrefillRow>,
}

impl DecodeRow {
    fn of(batch: u32, step: Duration, bytes: u64) -> Self {
        let seconds = step.as_secs_f64().max(1e-9);
        Self { batch, step, tokens_per_second: f64::from(batch) / seconds, weight_bytes_per_second: bytes as f64 / seconds }
    }
}

impl Report<'_> {
    fn to_json(&self) -> Value {
        let decode = self.decode.iter().map(|row| {
            json!({
                "batch": row.batch,
                "tokens_per_second": row.tokens_per_second,
                "step_ms": row.step.as_secs_f64() * 1e3,
                "weight_bytes_per_second": row.weight_bytes_per_second,
                "of_read": row.weight_bytes_per_second / self.read,
            })
        });
        let prefill = self.prefill.iter().map(|row| {
            json!({ "tokens": row.tokens, "tokens_per_second": row.tokens_per_second, "first_token_ms": row.first_token.as_secs_f64() * 1e3 })
        });
        json!({
            "name": self.model.manifest().name,
            "seal": self.model.bundle.seal().to_string(),
            "device": self.model.device.name,
            "threads": self.threads,
            "rounds": self.rounds,
            "startup_s": self.ready.as_secs_f64(),
            "process_to_first_token_s": self.process_to_first_token.as_secs_f64(),
            "first_token_ms": self.first_token.as_secs_f64() * 1e3,
            "load_ms": {
                "open": self.model.times.open.as_secs_f64() * 1e3,
                "text": self.model.times.text.as_secs_f64() * 1e3,
                "weights_and_link": self.model.times.weights_and_link.as_secs_f64() * 1e3,
                "total": self.model.times.total.as_secs_f64() * 1e3,
            },
            "read_bytes_per_second": self.read,
            "step_weight_bytes": self.bytes,
            "decode": decode.collect::<Vec<_>>(),
            "prefill": prefill.collect::<Vec<_>>(),
        })
    }

    fn describe(&self) -> String {
        let mut out = format!(
            "{} on {}\nstart to ready {:.3} s, to first token {:.3} s; plain read of the weights {:.1} GB/s ({} threads)\n\n",
            self.model.manifest().name,
            self.model.device.name,
            self.ready.as_secs_f64(),
            self.process_to_first_token.as_secs_f64(),
            self.read / 1e9,
            self.threads
        );
        out += "decode   batch    tokens/s    step ms    GB/s    of read\n";
        for row in &self.decode {
            let (speed, of_read) = (row.weight_bytes_per_second / 1e9, 100.0 * row.weight_bytes_per_second / self.read);
            let step_ms = row.step.as_secs_f64() * 1e3;
            out += &format!("{:>14}{:>12.1}{step_ms:>11.3}{speed:>8.1}{of_read:>9.0} %\n", row.batch, row.tokens_per_second);
        }
        out += "\nprefill tokens    tokens/s    first token ms\n";
        for row in &self.prefill {
            out += &format!("{:>14}{:>12.0}{:>18.2}\n", row.tokens, row.tokens_per_second, row.first_token.as_secs_f64() * 1e3);
        }
        out
    }
}

fn batches(model: &LoadedModel, args: &BenchArgs) -> Result<Vec<u32>, CliError> {
    let most = model.engine.limits().seqs_max;
    let mut batches = allowed("--batch", &args.batch, &[1, 2, 4, 8, most], most)?;
    batches.sort_unstable();
    batches.dedup();
    Ok(batches)
}

fn prefill_lengths(model: &LoadedModel, args: &BenchArgs) -> Result<Vec<u32>, CliError> {
    allowed("--prefill", &args.prefill, &[128, 512, 1024], model.engine.limits().context_max - 1)
}

/// What was asked for, all of which must be possible, or those of `default` that are.
fn allowed(flag: &str, asked: &[u32], default: &[u32], most: u32) -> Result<Vec<u32>, CliError> {
    if let Some(wrong) = asked.iter().find(|&asked| !(1..=most).contains(asked)) {
        return Err(CliError::Request(format!("{flag} {wrong} is outside 1 to {most} of this bundle")));
    }
    let chosen = if asked.is_empty() { default } else { asked };
    Ok(chosen.iter().copied().filter(|value| (1..=most).contains(value)).collect())
}

/// Time of one decode step.
fn decode_step(model: &LoadedModel, args: &BenchArgs, ids: &mut Ids, batch: u32) -> Result<Duration, CliError> {
    let context = model.engine.limits().context_max;
    let prompt = args.prompt_tokens.clamp(1, context / 2);
    let tokens = args.decode_tokens.clamp(2, context - prompt);
    let traces = generate(model, (0..batch).map(|_| ids.prompt(prompt)).collect(), tokens)?;
    let slowest = traces.iter().map(|trace| trace.decode).max().unwrap_or_default();
    Ok(slowest / (tokens - 1))
}

fn measure_prefill(model: &LoadedModel, args: &BenchArgs, ids: &mut Ids, tokens: u32) -> Result<PrefillRow, CliError> {
    let times =
        (0..args.rounds).map(|_| Ok(prefill_time(&generate(model, vec![ids.prompt(tokens)], 1)?))).collect::<Result<Vec<_>, CliError>>()?;
    let first_token = median(times);
    Ok(PrefillRow { tokens, first_token, tokens_per_second: f64::from(tokens) / first_token.as_secs_f64().max(1e-9) })
}

fn prefill_time(traces: &[ChoiceTrace]) -> Duration {
    traces.iter().map(|trace| trace.queue + trace.prefill).max().unwrap_or_default()
}

/// Runs prompts together to `tokens` tokens each.
fn generate(model: &LoadedModel, prompts: Vec<Vec<u32>>, tokens: u32) -> Result<Vec<ChoiceTrace>, CliError> {
    let several = prompts.len() > 1;
    if several {
        model.engine.pause();
    }
    let streams: Result<Vec<EventStream>, _> = prompts.into_iter().map(|prompt| model.engine.submit(request(prompt, tokens))).collect();
    model.engine.resume();
    streams?.into_iter().map(finished).collect()
}

fn finished(mut stream: EventStream) -> Result<ChoiceTrace, CliError> {
    while let Some(event) = stream.blocking_recv() {
        match event {
            EngineEvent::Finished { trace, .. } => return Ok(trace),
            EngineEvent::Failed { message, .. } => return Err(CliError::Engine(message)),
            EngineEvent::Rejected(reason) => return Err(reason.into()),
            EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. } | EngineEvent::Token { .. } => {}
        }
    }
    Err(CliError::Engine("the stream ended without a result".into()))
}

fn request(prompt: Vec<u32>, max_tokens: u32) -> EngineRequest {
    EngineRequest::greedy("bench", prompt, max_tokens)
}

/// Weight bytes that a decode step reads: every tensor once, but an untied embedding, of which a few rows are read.
fn step_bytes(model: &LoadedModel) -> u64 {
    let (manifest, plan) = (model.manifest(), model.bundle.plan());
    let is_embedding = |name: &str| !manifest.model.tied && name == "embed";
    let weights = plan.weights().iter().filter(|weight| !is_embedding(&weight.name));
    weights.map(|weight| weight.size_bytes).sum()
}

/// Bytes read at least in one measurement, so that starting threads does not count.
const READ_BYTES_MIN: usize = 256 << 20;

/// Bytes a second of `threads` threads that add up the words of `bytes`, each its own part, several times if they are few.
fn read_speed(bytes: &[u8], threads: usize) -> f64 {
    let part = bytes.len().div_ceil(threads.max(1)).max(1);
    let passes = READ_BYTES_MIN.div_ceil(bytes.len().max(1));
    let read = |part: &[u8]| (0..passes).fold(0_u64, |total, _| total.wrapping_add(sum_words(std::hint::black_box(part))));
    let start = Instant::now();
    let total = std::thread::scope(|scope| {
        let readers: Vec<_> = bytes.chunks(part).map(|part| scope.spawn(move || read(part))).collect();
        readers.into_iter().fold(0_u64, |total, reader| total.wrapping_add(reader.join().unwrap_or_default()))
    });
    std::hint::black_box(total);
    (passes * bytes.len()) as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

fn sum_words(bytes: &[u8]) -> u64 {
    // Sixteen independent sums let the compiler use whole vector registers and keep many loads in flight.
    let mut sums = [0_u64; 16];
    for block in bytes.chunks_exact(128) {
        for (sum, word) in sums.iter_mut().zip(block.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn median_f64(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
