//! What a soak found: counts, samples, latencies, and whether each promise holds.

use super::SoakArgs;
use super::gauges::Gauges;
use super::ledger::Seen;
use super::target::{Card, Target};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// The server's own histogram from noticing that a client left to freed pages.
const CANCEL_TO_FREE: &str = "oxide_cancel_to_free_seconds";
/// Between tokens of a choice: about a step.
const INTER_TOKEN: &str = "oxide_inter_token_latency_seconds";

/// The process at rest.
#[derive(Copy, Clone, Debug)]
pub(super) struct Sample {
    /// Since the beginning of the load.
    pub(super) seconds: f64,
    pub(super) resident_bytes: f64,
    pub(super) open_fds: f64,
}

/// Everything that a soak found.
pub(super) struct Report {
    args: SoakArgs,
    card: Card,
    started: bool,
    clients: usize,
    pub(super) seen: Seen,
    /// At every rest; the first after the warm-up.
    pub(super) samples: Vec<Sample>,
    /// Metrics after the warm-up, and at the last rest.
    pub(super) before: Gauges,
    pub(super) after: Gauges,
    /// From a client's leaving to freed pages, beside load and without.
    pub(super) freed_loaded: Vec<Duration>,
    pub(super) freed_idle: Vec<Duration>,
    /// Of a server that was started here.
    pub(super) exit_code: Option<i32>,
}

/// A promise and whether it holds.
pub(super) struct Verdict {
    pub(super) promise: &'static str,
    pub(super) holds: bool,
    found: String,
}

/// Nearest-rank percentiles, in milliseconds.
fn percentiles(times: &[Duration]) -> Value {
    let mut sorted: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    sorted.sort_by(f64::total_cmp);
    let at = |part: f64| sorted.get(((sorted.len() as f64 * part).ceil() as usize).saturating_sub(1)).copied();
    json!({ "count": sorted.len(), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0) })
}

impl Report {
    pub(super) fn new(args: &SoakArgs, target: &Target, clients: usize) -> Self {
        Self {
            args: args.clone(),
            card: target.card.clone(),
            started: target.started(),
            clients,
            seen: Seen::default(),
            samples: Vec::new(),
            before: Gauges::default(),
            after: Gauges::default(),
            freed_loaded: Vec::new(),
            freed_idle: Vec::new(),
            exit_code: None,
        }
    }

    /// Judges everything.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let mut verdicts = vec![self.answers(), self.coverage(), self.failures(), self.memory(), self.descriptors()];
        verdicts.extend(self.args.gate_latency.map(|limit| self.latency(limit)));
        if self.started {
            let found = self.exit_code.map_or_else(|| "no exit code".to_owned(), |code| format!("exit code {code}"));
            verdicts.push(Verdict { promise: "the server ends in order", holds: self.exit_code == Some(0), found });
        }
        verdicts
    }

    /// The clients' judgement, idle accounting included: whatever is broken is in the ledger.
    fn answers(&self) -> Verdict {
        let found = format!("{} requests, {} broken promises", self.seen.count(|_| true), self.seen.broken_total);
        let promise = "one terminal answer each, of an intended kind; fixed greedy text; accounting back to zero";
        Verdict { promise, holds: self.seen.broken_total == 0, found }
    }

    /// A soak in which nothing happened shows nothing.
    fn coverage(&self) -> Verdict {
        let wanted: [(&str, u64); 4] = [
            ("finished", self.seen.count(|outcome| outcome == "finished")),
            ("left", self.seen.count(|outcome| outcome == "client left")),
            ("same greedy text", self.seen.count(|outcome| outcome.ends_with(" text"))),
            ("overflow", self.seen.count(|outcome| outcome.starts_with("503") || outcome.starts_with("429"))),
        ];
        // A server with a long queue of its own does not overflow.
        let holds = wanted.iter().all(|(name, count)| *count > 0 || (*name == "overflow" && !self.started));
        let found = wanted.map(|(name, count)| format!("{count} {name}")).join(", ");
        Verdict { promise: "answers, disconnects and overflow happened", holds, found }
    }

    fn failures(&self) -> Verdict {
        let names = ["oxide_panics_total", "oxide_generation_errors_total", "oxide_engine_failed_total"];
        let found = names.map(|name| format!("{name} {}", self.after.get(name) - self.before.get(name))).join(", ");
        let holds = names.iter().all(|name| self.after.get(name) == self.before.get(name));
        Verdict { promise: "no failure inside", holds, found }
    }

    fn memory(&self) -> Verdict {
        let (Some(first), Some(last)) = (self.samples.first(), self.samples.last()) else {
            return Verdict { promise: "memory flat", holds: false, found: "no sample".to_owned() };
        };
        let growth = last.resident_bytes - first.resident_bytes;
        let allowed = (first.resident_bytes * self.args.memory_percent / 100.0).max((self.args.memory_floor_mib << 20) as f64);
        let found = format!(
            "{:.2} MiB after the warm-up, {:.2} at the end: {:+.2} %",
            first.resident_bytes / f64::from(1 << 20),
            last.resident_bytes / f64::from(1 << 20),
            100.0 * growth / first.resident_bytes
        );
        Verdict { promise: "resident memory flat", holds: growth <= allowed, found }
    }

    fn descriptors(&self) -> Verdict {
        let (first, last) = (self.samples.first(), self.samples.last());
        let holds = matches!((first, last), (Some(first), Some(last)) if last.open_fds <= first.open_fds);
        let count = |sample: Option<&Sample>| sample.map_or(f64::NAN, |sample| sample.open_fds);
        Verdict { promise: "file descriptors flat", holds, found: format!("{} then {}", count(first), count(last)) }
    }

    fn latency(&self, limit_ms: f64) -> Verdict {
        let bound = self.after.quantile_bound(&self.before, CANCEL_TO_FREE, 0.99).map(|seconds| seconds * 1e3);
        let loaded = percentiles(&self.freed_loaded)["p99_ms"].as_f64();
        let idle = percentiles(&self.freed_idle)["p99_ms"].as_f64();
        let holds = [bound, loaded, idle].iter().all(|time| time.is_some_and(|time| time <= limit_ms));
        let found = format!("p99 in ms: clients beside load {loaded:.1?}, without {idle:.1?}; the server's bucket {bound:?}");
        Verdict { promise: "pages freed in time", holds, found }
    }

    /// The whole report.
    pub(super) fn to_json(&self, verdicts: &[Verdict]) -> Value {
        let outcomes: Vec<Value> =
            self.seen.outcomes.iter().map(|((kind, outcome), count)| json!({ "kind": kind, "outcome": outcome, "count": count })).collect();
        let samples: Vec<Value> = self
            .samples
            .iter()
            .map(|sample| json!({ "seconds": sample.seconds, "resident_bytes": sample.resident_bytes, "open_fds": sample.open_fds }))
            .collect();
        let bucket = |histogram: &str, part| self.after.quantile_bound(&self.before, histogram, part).map(|seconds| seconds * 1e3);
        json!({
            "model": self.card.model, "seal": self.card.seal, "device": self.card.device,
            "seconds": self.args.seconds, "clients": self.clients, "seqs_max": self.card.seqs_max, "seed": self.args.seed,
            "outcomes": outcomes,
            "samples": samples,
            "cancel_to_free": {
                "clients_beside_load": percentiles(&self.freed_loaded),
                "clients_without_load": percentiles(&self.freed_idle),
                "server": {
                    "count": self.after.get(&format!("{CANCEL_TO_FREE}_count")) - self.before.get(&format!("{CANCEL_TO_FREE}_count")),
                    "p50_bucket_ms": bucket(CANCEL_TO_FREE, 0.5), "p99_bucket_ms": bucket(CANCEL_TO_FREE, 0.99),
                },
            },
            "inter_token": { "p50_bucket_ms": bucket(INTER_TOKEN, 0.5), "p99_bucket_ms": bucket(INTER_TOKEN, 0.99) },
            "broken": self.seen.broken,
            "verdicts": verdicts.iter().map(|verdict| json!({ "promise": verdict.promise, "holds": verdict.holds, "found": verdict.found })).collect::<Vec<_>>(),
        })
    }

    /// The same for people.
    pub(super) fn to_table(&self, verdicts: &[Verdict]) -> String {
        let mut text = format!(
            "{} on {}\n{} clients, {} sequences, {} s of load, seed {}\n\n",
            self.card.model, self.card.device, self.clients, self.card.seqs_max, self.args.seconds, self.args.seed
        );
        let mut line = |content: String| writeln!(text, "{content}").expect("writing to a string cannot fail");
        for ((kind, outcome), count) in &self.seen.outcomes {
            line(format!("{kind:<22} {outcome:<32} {count:>9}"));
        }
        line(String::new());
        for (label, times) in [("beside load", &self.freed_loaded), ("without load", &self.freed_idle)] {
            line(format!("client left to pages freed, {label}: {}", percentiles(times)));
        }
        line(String::new());
        for Verdict { promise, holds, found } in verdicts {
            line(format!("{} {promise}: {found}", if *holds { "holds " } else { "BROKEN" }));
        }
        text
    }
}
