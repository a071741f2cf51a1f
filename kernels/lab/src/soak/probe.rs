//! How long after a client left are its pages free?
//!
//! Opens streams, closes their sockets, and polls `/metrics` until the engine has counted them as
//! cancelled; it publishes that number together with the pages that are free by then. What is measured
//! includes the way from socket to server, the step under way, and half a poll on average: an upper bound.

use super::gauges::Scraper;
use super::target::Target;
use super::wire::{Connection, request};
use anyhow::{Context, bail, ensure};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

/// Streams that are left at a time.
pub(super) const VICTIMS: usize = 4;
const CANCELLED: &str = "oxide_engine_cancelled_total";
/// Longest wait for pages; so long that only a leak reaches it.
const FREED_WITHIN: Duration = Duration::from_secs(60);
/// Longest time to bring all streams under way.
const BEGUN_WITHIN: Duration = Duration::from_secs(120);
/// Longest answer of a stream that is left, in tokens: it must not end before.
const TOKENS_MAX: u32 = 1024;

/// Leaves [`VICTIMS`] streams at once; how long each took to be cancelled.
///
/// # Errors
/// If streams do not begin, or pages are not freed.
pub(super) fn leave_streams(target: &Target, scraper: &mut Scraper, seed: u64) -> anyhow::Result<Vec<Duration>> {
    let streams: Vec<Connection> = (0..VICTIMS).map(|index| begin(target, seed + index as u64)).collect::<Result<_, _>>()?;
    let before = scraper.read()?.get(CANCELLED);
    let left = Instant::now();
    drop(streams);
    let mut times = Vec::with_capacity(VICTIMS);
    while times.len() < VICTIMS {
        let cancelled = scraper.read()?.get(CANCELLED) - before;
        let elapsed = left.elapsed();
        ensure!(elapsed < FREED_WITHIN, "{} of {VICTIMS} left streams were not cancelled within {FREED_WITHIN:?}", VICTIMS - times.len());
        while (times.len() as f64) < cancelled && times.len() < VICTIMS {
            times.push(elapsed);
        }
    }
    Ok(times)
}

/// Starts a stream and reads its first event.
fn begin(target: &Target, seed: u64) -> anyhow::Result<Connection> {
    let tokens = TOKENS_MAX.min(target.card.context_max / 2);
    let body = json!({
        "prompt": format!("Story number {seed}"), "max_tokens": tokens, "ignore_eos": true, "stream": true, "seed": seed,
    });
    let bearer = target.probe_key.as_ref().map_or_else(String::new, |key| format!("Bearer {key}"));
    let headers = [("Content-Type", "application/json"), ("Authorization", bearer.as_str())];
    let bytes = request("POST", "/v1/completions", &headers, body.to_string().as_bytes());
    let started = Instant::now();
    while started.elapsed() < BEGUN_WITHIN {
        let mut connection = Connection::open(&target.address)?;
        connection.send(&bytes)?;
        let head = connection.head()?;
        match head.status {
            200 => {
                first_event(&mut connection, &head)?;
                return Ok(connection);
            }
            429 | 503 => std::thread::sleep(Duration::from_millis(20)),
            status => bail!("a probe's stream is refused with {status}"),
        }
    }
    bail!("a probe's stream did not begin within {BEGUN_WITHIN:?}")
}

fn first_event(connection: &mut Connection, head: &super::wire::Head) -> anyhow::Result<()> {
    let mut lines = BufReader::with_capacity(256, connection.body(head));
    let mut line = String::new();
    while lines.read_line(&mut line).context("a probe's stream broke off")? > 0 {
        if line.starts_with("data:") {
            ensure!(!line.contains("\"error\""), "a probe's stream failed: {line}");
            return Ok(());
        }
        line.clear();
    }
    bail!("a probe's stream ended before it began")
}
