//! `load`: a multi-threaded streaming client for any OpenAI-compatible server.
//!
//! Prompts are random token ids that share no prefix; every answer runs to its full length
//! (`ignore_eos`). Closed loop by default: each of `--concurrency` clients sends its next request when
//! the last one ended; with `--rate` requests start on a clock instead.

use crate::client::Endpoint;
use crate::random::Random;
use anyhow::ensure;
use clap::Args;
use serde_json::{Value, json};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Options of `load`.
#[derive(Args, Clone)]
pub(crate) struct LoadArgs {
    /// Server, for example http://127.0.0.1:8080/v1
    url: String,
    /// Name of the model
    #[arg(long, default_value = "")]
    model: String,
    /// Bearer key
    #[arg(long)]
    api_key: Option<String>,
    /// Requests in flight
    #[arg(long, default_value_t = 32)]
    concurrency: u32,
    /// Requests in all [default: four times the concurrency]
    #[arg(long)]
    requests: Option<u32>,
    /// Prompt tokens
    #[arg(long, default_value_t = 256)]
    input: u32,
    /// Completion tokens
    #[arg(long, default_value_t = 128)]
    output: u32,
    /// Requests a second, started on a clock
    #[arg(long)]
    rate: Option<f64>,
    /// Ids are drawn below this
    #[arg(long, default_value_t = 151_643)]
    vocab: u32,
    /// Seed of the prompts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What one request saw.
struct Sample {
    first_token: Duration,
    total: Duration,
    tokens: u32,
    gaps: Vec<Duration>,
}

/// Runs the load and reports.
///
/// # Errors
/// If the address is wrong, or every request failed.
pub(crate) fn run(args: &LoadArgs) -> anyhow::Result<()> {
    let endpoint = Endpoint::parse(&args.url, args.api_key.clone())?;
    let requests = args.requests.unwrap_or(args.concurrency * 4);
    let next = AtomicU32::new(0);
    let samples = Mutex::new(Vec::new());
    let errors = Mutex::new(Vec::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.concurrency.max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= requests {
                        return;
                    }
                    wait_turn(args, start, index);
                    match one_request(args, &endpoint, index) {
                        Ok(sample) => samples.lock().expect("no holder panics").push(sample),
                        Err(error) => errors.lock().expect("no holder panics").push(format!("{error:#}")),
                    }
                }
            });
        }
    });
    let elapsed = start.elapsed();
    let samples = samples.into_inner().expect("no holder panicked");
    let errors = errors.into_inner().expect("no holder panicked");
    ensure!(!samples.is_empty(), "every request failed: {}", errors.first().map_or("", String::as_str));
    let report = report(args, &samples, &errors, elapsed);
    if args.json {
        println!("{report}");
    } else {
        print!("{}", table(&report));
    }
    Ok(())
}

fn wait_turn(args: &LoadArgs, start: Instant, index: u32) {
    if let Some(rate) = args.rate {
        let due = Duration::from_secs_f64(f64::from(index) / rate.max(1e-6));
        std::thread::sleep(due.saturating_sub(start.elapsed()));
    }
}

fn one_request(args: &LoadArgs, endpoint: &Endpoint, index: u32) -> anyhow::Result<Sample> {
    let mut random = Random::new(args.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(index)));
    let mut body = json!({
        "prompt": random.ids(args.input, args.vocab),
        "max_tokens": args.output,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    if !args.model.is_empty() {
        body["model"] = args.model.clone().into();
    }
    let mut sample = Sample { first_token: Duration::ZERO, total: Duration::ZERO, tokens: 0, gaps: Vec::new() };
    let start = Instant::now();
    let mut last = None;
    endpoint.post_stream("/completions", &body.to_string(), |data| {
        let now = start.elapsed();
        if data.contains("\"error\"") {
            anyhow::bail!("error in the stream: {data}");
        }
        if data.contains("\"completion_tokens\"") && !data.contains("\"usage\":null") {
            let value: Value = serde_json::from_str(data)?;
            sample.tokens = value["usage"]["completion_tokens"].as_u64().unwrap_or(0) as u32;
        } else if data != "[DONE]" {
            match last {
                None => sample.first_token = now,
                Some(before) => sample.gaps.push(now - before),
            }
            last = Some(now);
        }
        Ok(())
    })?;
    sample.total = start.elapsed();
    ensure!(sample.tokens == args.output, "{} tokens instead of {}", sample.tokens, args.output);
    Ok(sample)
}

fn percentile(sorted: &[f64], part: f64) -> f64 {
    let index = ((sorted.len() as f64 - 1.0) * part).round() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

/// Percentiles in milliseconds.
fn distribution(values: impl Iterator<Item = Duration>) -> Value {
    let mut sorted: Vec<f64> = values.map(|value| value.as_secs_f64() * 1e3).collect();
    sorted.sort_by(f64::total_cmp);
    let at = |part| percentile(&sorted, part);
    json!({ "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0) })
}

fn report(args: &LoadArgs, samples: &[Sample], errors: &[String], elapsed: Duration) -> Value {
    let tokens: u64 = samples.iter().map(|sample| u64::from(sample.tokens)).sum();
    let seconds = elapsed.as_secs_f64();
    json!({
        "url": args.url,
        "concurrency": args.concurrency,
        "rate": args.rate,
        "input_tokens": args.input,
        "output_tokens": args.output,
        "requests": samples.len(),
        "errors": errors.len(),
        "first_error": errors.first(),
        "seconds": seconds,
        "requests_per_second": samples.len() as f64 / seconds,
        "output_tokens_per_second": tokens as f64 / seconds,
        "first_token_ms": distribution(samples.iter().map(|sample| sample.first_token)),
        "gap_ms": distribution(samples.iter().flat_map(|sample| sample.gaps.iter().copied())),
        "total_ms": distribution(samples.iter().map(|sample| sample.total)),
    })
}

fn table(report: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let mut out = format!(
        "{} requests of {} in / {} out, {} at once, in {:.2} s ({} errors)\n{:.1} requests/s, {:.0} output tokens/s\n",
        report["requests"],
        report["input_tokens"],
        report["output_tokens"],
        report["concurrency"],
        number(&report["seconds"]),
        report["errors"],
        number(&report["requests_per_second"]),
        number(&report["output_tokens_per_second"]),
    );
    for (key, label) in [("first_token_ms", "first token"), ("gap_ms", "gap"), ("total_ms", "whole answer")] {
        let row = &report[key];
        out += &format!(
            "{label:>12}: p50 {:8.2} ms   p90 {:8.2}   p99 {:8.2}   max {:8.2}\n",
            number(&row["p50"]),
            number(&row["p90"]),
            number(&row["p99"]),
            number(&row["max"]),
        );
    }
    out
}
