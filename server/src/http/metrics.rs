//! Counters, gauges and histograms in the Prometheus text format 0.0.4.
//!
//! Names start with `oxide_` and end with their unit; `docs/serving.md` lists them. Recording is a few
//! atomic additions; only the counter of answered requests takes a lock, once a request.

use crate::journal::JournalCounts;
use oxide_runtime::device::LaunchCounters;
use oxide_runtime::engine::{BUCKETS_S, EngineStats, Histogram};
use std::collections::BTreeMap;
use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Everything that the server counts itself.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// Open connections.
    pub(crate) connections: AtomicI64,
    /// Acceptance to first token.
    pub(crate) ttft: Histogram,
    /// Between tokens of one choice.
    pub(crate) itl: Histogram,
    /// Acceptance to last byte, of generations.
    pub(crate) duration: Histogram,
    /// Acceptance to admission.
    pub(crate) queue: Histogram,
    /// Prompt tokens of admitted requests.
    pub(crate) prompt_tokens: AtomicU64,
    /// Of these, found in the prefix cache.
    pub(crate) cached_tokens: AtomicU64,
    /// Tokens drawn for clients.
    pub(crate) completion_tokens: AtomicU64,
    /// Unknown request fields that were accepted.
    pub(crate) unknown_fields: AtomicU64,
    /// Generations whose client went away.
    pub(crate) disconnects: AtomicU64,
    /// Generations aborted by id.
    pub(crate) aborts: AtomicU64,
    /// Generations that failed inside.
    pub(crate) errors: AtomicU64,
    /// Panics contained.
    pub(crate) panics: AtomicU64,
}

impl Metrics {
    /// Counts an answered request.
    pub(crate) fn answered(&self, endpoint: &'static str, status: u16) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry((endpoint, status)).or_default() += 1;
    }

    /// The exposition, with what the engine and the operating system say.
    pub(crate) fn render(&self, info: &Info<'_>, engine: Option<&EngineStats>, launches: Option<&LaunchCounters>) -> String {
        let mut text = String::with_capacity(12 << 10);
        self.write_server(&mut text, info);
        counter(
            &mut text,
            "oxide_panics_total",
            "Panics contained: each failed one request.",
            self.panics.load(Ordering::Relaxed) + info.mask_panics,
        );
        self.write_latencies(&mut text);
        if let Some(times) = info.cancel_to_free {
            let help = "A client's leaving or an abort, to the return of the request's slots and KV pages.";
            histogram(&mut text, times, "oxide_cancel_to_free_seconds", help);
        }
        write_engine(&mut text, engine.unwrap_or(&EngineStats::default()));
        if let Some(launches) = launches {
            write_launches(&mut text, launches);
        }
        if let Some(journal) = info.journal {
            write_journal(&mut text, journal);
        }
        write_process(&mut text);
        text
    }

    fn write_server(&self, text: &mut String, info: &Info<'_>) {
        header(text, "oxide_build_info", "gauge", "Version and model; always 1.");
        let labels = format!("version=\"{}\",model=\"{}\"", label(info.version), label(info.model));
        sample(text, &format!("oxide_build_info{{{labels}}}"), 1);
        gauge(text, "oxide_ready", "Whether requests are taken (1) or not (0).", u8::from(info.ready));
        gauge(text, "oxide_start_time_seconds", "Unix time of the start of the process.", info.started_unix);
        header(text, "oxide_requests_total", "counter", "Requests answered, by endpoint and HTTP status.");
        for ((endpoint, status), count) in &*self.requests.lock().unwrap_or_else(PoisonError::into_inner) {
            sample(text, &format!("oxide_requests_total{{endpoint=\"{endpoint}\",status=\"{status}\"}}"), count);
        }
        gauge(text, "oxide_requests_in_flight", "Generations being answered.", info.live);
        gauge(text, "oxide_connections", "Open connections.", self.connections.load(Ordering::Relaxed));
        for (name, help, value) in [
            ("oxide_prompt_tokens_total", "Prompt tokens of admitted requests.", &self.prompt_tokens),
            ("oxide_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache.", &self.cached_tokens),
            ("oxide_completion_tokens_total", "Tokens generated for clients.", &self.completion_tokens),
            ("oxide_unknown_fields_total", "Unknown request fields accepted and ignored.", &self.unknown_fields),
            ("oxide_client_disconnects_total", "Generations whose client went away.", &self.disconnects),
            ("oxide_aborts_total", "Generations aborted by id.", &self.aborts),
            ("oxide_generation_errors_total", "Generations that failed inside the server.", &self.errors),
        ] {
            counter(text, name, help, value.load(Ordering::Relaxed));
        }
    }

    fn write_latencies(&self, text: &mut String) {
        histogram(text, &self.ttft, "oxide_time_to_first_token_seconds", "Acceptance of a request to its first token.");
        histogram(text, &self.itl, "oxide_inter_token_latency_seconds", "Time between tokens of one choice.");
        histogram(text, &self.duration, "oxide_request_duration_seconds", "Acceptance of a generation to its end.");
        histogram(text, &self.queue, "oxide_queue_duration_seconds", "Acceptance of a request to its admission by the engine.");
    }
}

/// What the exposition says of the server itself.
pub(crate) struct Info<'a> {
    pub(crate) version: &'a str,
    pub(crate) model: &'a str,
    pub(crate) ready: bool,
    pub(crate) live: usize,
    pub(crate) started_unix: u64,
    /// Panics contained where masks are computed.
    pub(crate) mask_panics: u64,
    /// From a cancellation to freed slots and pages.
    pub(crate) cancel_to_free: Option<&'a Histogram>,
    /// If requests are journaled.
    pub(crate) journal: Option<JournalCounts>,
}

fn write_engine(text: &mut String, stats: &EngineStats) {
    let EngineStats { pages_total, pages_in_use, .. } = *stats;
    let utilization = if pages_total == 0 { 0.0 } else { f64::from(pages_in_use) / f64::from(pages_total) };
    gauge(text, "oxide_requests_running", "Sequences that the engine runs.", stats.running);
    gauge(text, "oxide_requests_waiting", "Requests that wait for admission.", stats.waiting);
    gauge(text, "oxide_kv_pages_capacity", "KV pages of the pool.", pages_total);
    gauge(text, "oxide_kv_pages_free", "KV pages never written or evicted.", stats.pages_free);
    gauge(text, "oxide_kv_pages_cached", "KV pages kept for prefix hits only.", stats.pages_cached);
    gauge(text, "oxide_kv_pages_in_use", "KV pages that running sequences hold.", pages_in_use);
    gauge(text, "oxide_kv_utilization_ratio", "KV pages in use, of the pool.", utilization);
    for (name, help, value) in [
        ("oxide_engine_steps_total", "Steps run.", stats.steps),
        ("oxide_engine_prefill_tokens_total", "Prompt tokens computed; cache hits not counted.", stats.prefill_tokens),
        ("oxide_engine_decode_tokens_total", "Tokens drawn.", stats.decode_tokens),
        ("oxide_prefix_query_tokens_total", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("oxide_prefix_hit_tokens_total", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ("oxide_engine_admitted_total", "Requests admitted.", stats.admitted),
        ("oxide_engine_finished_total", "Choices finished.", stats.finished),
        ("oxide_engine_cancelled_total", "Choices cancelled.", stats.cancelled),
        ("oxide_engine_rejected_total", "Requests rejected.", stats.rejected),
        ("oxide_engine_failed_total", "Choices failed.", stats.failed),
        ("oxide_engine_preemptions_total", "Sequences preempted.", stats.preemptions),
        ("oxide_prefix_evictions_total", "Pages evicted from the prefix cache.", stats.evictions),
    ] {
        counter(text, name, help, value);
    }
}

/// Launches of sealed kernels, by name and the hash of their code.
fn write_launches(text: &mut String, launches: &LaunchCounters) {
    header(text, "oxide_kernel_launches_total", "counter", "Launches of a sealed kernel, graph nodes included.");
    for (name, sha256, count) in launches.snapshot() {
        sample(text, &format!("oxide_kernel_launches_total{{kernel=\"{}\",sha256=\"{sha256}\"}}", label(name)), count);
    }
}

fn write_journal(text: &mut String, journal: JournalCounts) {
    let JournalCounts { written, dropped, failed } = journal;
    counter(text, "oxide_journal_entries_total", "Journal entries written.", written);
    counter(text, "oxide_journal_dropped_total", "Journal entries dropped because the writer was behind.", dropped);
    counter(text, "oxide_journal_failed_total", "Journal entries lost because the file system failed.", failed);
}

/// Memory and file descriptors, where the operating system tells.
fn write_process(text: &mut String) {
    if let Some(bytes) = resident_bytes() {
        gauge(text, "oxide_resident_memory_bytes", "Resident memory of the process.", bytes);
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        gauge(text, "oxide_open_fds", "Open file descriptors of the process.", open.count());
    }
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn header(text: &mut String, name: &str, kind: &str, help: &str) {
    writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("writing to a string cannot fail");
}

fn sample(text: &mut String, name: &str, value: impl Display) {
    writeln!(text, "{name} {value}").expect("writing to a string cannot fail");
}

fn histogram(text: &mut String, histogram: &Histogram, name: &str, help: &str) {
    header(text, name, "histogram", help);
    let cumulative = histogram.cumulative();
    for (bound, up_to) in BUCKETS_S.iter().zip(cumulative) {
        sample(text, &format!("{name}_bucket{{le=\"{bound}\"}}"), up_to);
    }
    // Buckets are read first, so a concurrent observation cannot make the last one exceed the count.
    let count = histogram.count().max(cumulative.last().copied().unwrap_or(0));
    sample(text, &format!("{name}_bucket{{le=\"+Inf\"}}"), count);
    sample(text, &format!("{name}_sum"), histogram.sum_seconds());
    sample(text, &format!("{name}_count"), count);
}

fn gauge(text: &mut String, name: &str, help: &str, value: impl Display) {
    header(text, name, "gauge", help);
    sample(text, name, value);
}

fn counter(text: &mut String, name: &str, help: &str, value: u64) {
    header(text, name, "counter", help);
    sample(text, name, value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn buckets_are_cumulative_and_start_at_one_millisecond() {
        let histogram = Histogram::default();
        histogram.observe(Duration::from_micros(500), 2);
        histogram.observe(Duration::from_millis(3), 1);
        histogram.observe(Duration::from_secs(1000), 1);
        let mut text = String::new();
        super::histogram(&mut text, &histogram, "x_seconds", "Help.");
        for line in
            ["x_seconds_bucket{le=\"0.001\"} 2", "x_seconds_bucket{le=\"0.005\"} 3", "x_seconds_bucket{le=\"+Inf\"} 4", "x_seconds_count 4"]
        {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }

    #[test]
    fn every_sample_belongs_to_a_declared_metric() {
        let metrics = Metrics::default();
        metrics.answered("chat", 200);
        let info = Info {
            version: "1",
            model: "a\"b",
            ready: true,
            live: 0,
            started_unix: 1,
            mask_panics: 0,
            cancel_to_free: Some(&metrics.ttft),
            journal: Some(JournalCounts::default()),
        };
        let text = metrics.render(&info, None, None);
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
            assert!(text.contains(&format!("# TYPE {base} ")) || text.contains(&format!("# TYPE {name} ")), "{name} is not declared");
        }
        assert!(!text.contains("_total_total") && text.contains("model=\"a\\\"b\""));
    }
}
