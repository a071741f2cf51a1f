//! `bench`: the engine on a bundle, case by case, as a user of the engine sees it (wall clock).
//!
//! Decode: sequences of equal length start together; the time is from the moment all have their first
//! token to the moment all have their last, over the steps between. First token: one request alone.
//! Mix: all requests are submitted at once. Prompts are random ids that share no prefix.

use crate::opened::{self, Opened};
use crate::random::Random;
use anyhow::{Context, bail};
use clap::Args;
use oxide_runtime::device::cuda::CudaOptions;
use oxide_runtime::engine::{EngineEvent, EngineHandle, EngineRequest, EventStream};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Options of `bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Bundle
    bundle: PathBuf,
    /// Batch sizes of the decode cases
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,64,128,256")]
    batches: Vec<u32>,
    /// Prompt lengths of the first-token cases
    #[arg(long, value_delimiter = ',', default_value = "1024,4096,8191")]
    prompts: Vec<u32>,
    /// Prompt tokens of the decode cases
    #[arg(long, default_value_t = 128)]
    input: u32,
    /// Completion tokens of the decode cases
    #[arg(long, default_value_t = 256)]
    output: u32,
    /// Requests of the mix; 0 leaves it out
    #[arg(long, default_value_t = 512)]
    mix: u32,
    /// Rounds; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Launch kernels one by one instead of replaying graphs (GPU)
    #[arg(long)]
    no_graphs: bool,
    /// Launch without programmatic dependent launch (GPU)
    #[arg(long)]
    no_pdl: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the cases and reports.
///
/// # Errors
/// If the bundle is refused, or a request does not finish.
pub(crate) fn run(args: &BenchArgs) -> anyhow::Result<()> {
    let start = Instant::now();
    let cuda = CudaOptions { graphs: !args.no_graphs, pdl: !args.no_pdl, ..CudaOptions::default() };
    let Opened { engine, manifest, seal, device } = opened::open(&args.bundle, cuda)?;
    let ready = start.elapsed();
    let mut bench = Bench { engine, random: Random::new(7) };
    bench.decode(1, args.input.min(16), 8)?;
    let mut rows = Vec::new();
    let (seqs_max, context_max) = (bench.engine.limits().seqs_max, bench.engine.limits().context_max);
    for &batch in args.batches.iter().filter(|&&batch| batch <= seqs_max) {
        rows.push(bench.decode_row(args, batch)?);
    }
    for &length in args.prompts.iter().filter(|&&length| length < context_max) {
        rows.push(bench.prompt_row(args, length)?);
    }
    if args.mix > 0 {
        rows.push(bench.mix_row(args)?);
    }
    let report = json!({
        "model": manifest.name,
        "target": manifest.target.to_string(),
        "seal": seal,
        "device": device,
        "graphs": !args.no_graphs,
        "pdl": !args.no_pdl,
        "ready_s": ready.as_secs_f64(),
        "rows": rows,
    });
    if args.json {
        println!("{report}")
    } else {
        print!("{}", table(&report))
    }
    bench.engine.stop();
    bench.engine.join();
    Ok(())
}

struct Bench {
    engine: EngineHandle,
    random: Random,
}

impl Bench {
    fn submit(&mut self, input: u32, output: u32) -> anyhow::Result<EventStream> {
        let known = self.engine.limits().vocab_known;
        let request = EngineRequest::greedy(format!("bench-{}", self.random.next()), self.random.ids(input, known), output);
        self.engine.submit(request).context("the engine refused a request")
    }

    /// Time of one decode step at a batch size.
    fn decode(&mut self, batch: u32, input: u32, output: u32) -> anyhow::Result<Duration> {
        self.engine.pause();
        let streams = (0..batch).map(|_| self.submit(input, output)).collect::<anyhow::Result<Vec<_>>>();
        self.engine.resume();
        let mut streams = streams?;
        for stream in &mut streams {
            wait_token(stream)?;
        }
        let first = Instant::now();
        for stream in &mut streams {
            wait_end(stream)?;
        }
        Ok(first.elapsed() / (output - 1).max(1))
    }

    fn decode_row(&mut self, args: &BenchArgs, batch: u32) -> anyhow::Result<Value> {
        let times = (0..args.rounds).map(|_| self.decode(batch, args.input, args.output)).collect::<anyhow::Result<Vec<_>>>()?;
        let step = median(times).as_secs_f64();
        let name = format!("decode B={batch}, {}/{}", args.input, args.output);
        Ok(json!({ "case": name, "step_ms": step * 1e3, "tokens_per_second": f64::from(batch) / step }))
    }

    fn prompt_row(&mut self, args: &BenchArgs, length: u32) -> anyhow::Result<Value> {
        let mut times = Vec::new();
        for _ in 0..args.rounds {
            let start = Instant::now();
            let mut stream = self.submit(length, 1)?;
            wait_token(&mut stream)?;
            times.push(start.elapsed());
            wait_end(&mut stream)?;
        }
        let first = median(times).as_secs_f64();
        Ok(
            json!({ "case": format!("first token, {length} in"), "first_token_ms": first * 1e3, "tokens_per_second": f64::from(length) / first }),
        )
    }

    fn mix_row(&mut self, args: &BenchArgs) -> anyhow::Result<Value> {
        let (input, output) = (512.min(self.engine.limits().context_max / 2), 128.min(self.engine.limits().context_max / 4));
        let start = Instant::now();
        let streams = (0..args.mix).map(|_| self.submit(input, output)).collect::<anyhow::Result<Vec<_>>>()?;
        for mut stream in streams {
            wait_end(&mut stream)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let tokens = f64::from(args.mix) * f64::from(output);
        let name = format!("{} requests of {input}/{output}", args.mix);
        Ok(json!({ "case": name, "seconds": seconds, "tokens_per_second": tokens / seconds }))
    }
}

fn wait_token(stream: &mut EventStream) -> anyhow::Result<()> {
    loop {
        match stream.blocking_recv() {
            Some(EngineEvent::Token { .. }) => return Ok(()),
            Some(EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. }) => {}
            other => bail!("no token: {other:?}"),
        }
    }
}

fn wait_end(stream: &mut EventStream) -> anyhow::Result<()> {
    loop {
        match stream.blocking_recv() {
            Some(EngineEvent::Finished { .. }) => return Ok(()),
            Some(EngineEvent::Token { .. } | EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. }) => {}
            other => bail!("the request did not finish: {other:?}"),
        }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn table(report: &Value) -> String {
    let mut out = format!("{} ({}) on {}\n", report["model"], report["target"], report["device"]);
    out += &format!("start to ready {:.3} s\n", report["ready_s"].as_f64().unwrap_or(f64::NAN));
    for row in report["rows"].as_array().into_iter().flatten() {
        let number = |key: &str, unit: &str| row[key].as_f64().map_or(String::new(), |value| format!("{value:10.3} {unit}"));
        let time = number("step_ms", "ms/step") + &number("first_token_ms", "ms") + &number("seconds", "s");
        let rate = row["tokens_per_second"].as_f64().unwrap_or(f64::NAN);
        out += &format!("{:<28} {time:<20} {rate:12.0} tokens/s\n", row["case"].as_str().unwrap_or_default());
    }
    out
}
