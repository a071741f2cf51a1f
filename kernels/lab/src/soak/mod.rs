//! `soak`: many clients, good, bad and rude, against one server; what must hold holds, or the exit code says so.
//!
//! ```text
//!   rest ─▶ storm (warm-up) ─▶ rest ─▶ [ storm ─▶ calm + probes ─▶ rest + probes ] × segments ─▶ SIGTERM
//!    │ fixed answer             │ first sample                      │ sample
//! ```
//!
//! *Storm* is the whole mix at twice the server's sequences. *Calm* is load of the same size in which
//! nobody leaves, so that the cancellations that the server counts are the probes'. At *rest* there is no
//! request and no connection but the one that scrapes: gauges must be zero, memory and descriptors flat.

mod faults;
mod gauges;
mod judge;
mod ledger;
mod mix;
mod pace;
mod probe;
mod report;
mod target;
mod visit;
mod wire;

use anyhow::{bail, ensure};
use clap::Args;
use gauges::{Gauges, Scraper};
use ledger::Ledger;
use pace::{Mode, Pace};
use report::{Report, Sample};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use target::Target;
use visit::{Load, Visitor};

/// Longest storm without a rest.
const SEGMENT_SECONDS: u64 = 300;
/// Longest wait for clients to follow, and for a server without requests to be idle.
const PATIENCE: Duration = Duration::from_secs(300);
/// Rounds of probes in each calm and each rest, and how long they may take together.
const PROBE_ROUNDS: u32 = 12;
const PROBE_TIME: Duration = Duration::from_secs(30);
/// Stack of a client.
const STACK_BYTES: usize = 512 << 10;

/// Options of `soak`.
#[derive(Args, Clone)]
pub(crate) struct SoakArgs {
    /// Bundle to serve with limits that twice its capacity overflows; or the address of an idle server,
    /// for example http://127.0.0.1:8080
    target: String,
    /// Seconds of load
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seconds of load before the first sample of memory [default: a quarter, at most 180]
    #[arg(long)]
    warm_seconds: Option<u64>,
    /// Clients [default: twice the sequences that the server runs]
    #[arg(long)]
    clients: Option<u32>,
    /// Key of a running server; repeatable, the last one is for probes
    #[arg(long)]
    api_key: Vec<String>,
    /// Seed of the mix
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Largest growth of resident memory, in percent
    #[arg(long, default_value_t = 2.0)]
    memory_percent: f64,
    /// Growth of resident memory that is no growth, in MiB: allocators of short runs are not settled
    #[arg(long, default_value_t = 0)]
    memory_floor_mib: u64,
    /// Fail if the 99th percentile from a client's leaving to freed pages is longer than this many milliseconds
    #[arg(long, value_name = "MS")]
    gate_latency: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Further arguments of `oxide-run BUNDLE serve`
    #[arg(last = true)]
    serve: Vec<String>,
}

/// Runs the soak and reports.
///
/// # Errors
/// If the server cannot be used, or a promise is broken.
pub(crate) fn run(args: &SoakArgs) -> anyhow::Result<()> {
    let mut target = if args.target.starts_with("http://") {
        ensure!(args.serve.is_empty(), "a running server takes no further arguments");
        Target::running(&args.target, args.api_key.clone())?
    } else {
        Target::start(&PathBuf::from(&args.target), &args.serve)?
    };
    let clients = args.clients.unwrap_or(2 * target.card.seqs_max).max(1) as usize;
    let greedy = visit::ask_fixed_prompt(&target)?;
    let supported = visit::supported_kinds(&target)?;
    let (pace, ledger) = (Pace::new(clients), Ledger::default());
    let load = Load { target: &target, pace: &pace, ledger: &ledger, supported, greedy: &greedy };
    let mut report = Report::new(args, &target, clients);
    let ended = std::thread::scope(|scope| {
        for client in 0..clients {
            let (load, seed) = (&load, args.seed.wrapping_mul(1_000_003).wrapping_add(client as u64));
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            thread.spawn_scoped(scope, move || Visitor::new(load, seed).run(client)).expect("the system gives a thread");
        }
        let ended = conduct(args, &load, &mut report);
        pace.set(Mode::Stop);
        ended
    });
    if let Err(error) = ended {
        ledger.broken(format!("{error:#}"));
    }
    report.exit_code = target.end()?;
    report.seen = std::mem::take(&mut *ledger.lock());
    let verdicts = report.verdicts();
    if args.json {
        println!("{}", report.to_json(&verdicts));
    } else {
        print!("{}", report.to_table(&verdicts));
    }
    let broken: Vec<&str> = verdicts.iter().filter(|verdict| !verdict.holds).map(|verdict| verdict.promise).collect();
    if broken.is_empty() { Ok(()) } else { bail!("broken: {}", broken.join("; ")) }
}

/// Leads the clients through the phases.
fn conduct(args: &SoakArgs, load: &Load<'_>, report: &mut Report) -> anyhow::Result<()> {
    let mut scraper = Scraper::new(&load.target.address);
    let warm = args.warm_seconds.unwrap_or((args.seconds / 4).min(180)).min(args.seconds);
    let began = Instant::now();
    storm(load.pace, warm);
    report.before = rest(load, &mut scraper, report, began)?;
    let left = args.seconds - warm;
    let segments = left.div_ceil(SEGMENT_SECONDS).max(1);
    for segment in 0..segments {
        storm(load.pace, left / segments);
        calm(load, &mut scraper, report, segment)?;
        report.after = rest(load, &mut scraper, report, began)?;
        report.freed_idle.extend(probes(load, &mut scraper, 1 << 32 | segment << 16)?);
    }
    idle(load, &mut scraper)?;
    Ok(())
}

fn storm(pace: &Pace, seconds: u64) {
    pace.set(Mode::Storm);
    std::thread::sleep(Duration::from_secs(seconds));
}

/// Probes beside load in which nobody else leaves.
fn calm(load: &Load<'_>, scraper: &mut Scraper, report: &mut Report, segment: u64) -> anyhow::Result<()> {
    load.pace.set(Mode::Calm);
    ensure!(load.pace.all_follow(PATIENCE), "a client's request did not end within {PATIENCE:?}");
    report.freed_loaded.extend(probes(load, scraper, segment << 16)?);
    Ok(())
}

fn probes(load: &Load<'_>, scraper: &mut Scraper, seed: u64) -> anyhow::Result<Vec<Duration>> {
    let (started, mut times) = (Instant::now(), Vec::new());
    for round in 0..PROBE_ROUNDS {
        times.extend(probe::leave_streams(load.target, scraper, seed + 100 * u64::from(round))?);
        if started.elapsed() > PROBE_TIME {
            break;
        }
    }
    Ok(times)
}

/// Stops all clients, waits until the server is idle and takes a sample.
fn rest(load: &Load<'_>, scraper: &mut Scraper, report: &mut Report, began: Instant) -> anyhow::Result<Gauges> {
    load.pace.set(Mode::Rest);
    ensure!(load.pace.all_rest(PATIENCE), "a client's request did not end within {PATIENCE:?}");
    let gauges = idle(load, scraper)?;
    report.samples.push(Sample {
        seconds: began.elapsed().as_secs_f64(),
        resident_bytes: gauges.get("oxide_resident_memory_bytes"),
        open_fds: gauges.get("oxide_open_fds"),
    });
    Ok(gauges)
}

/// Waits until nothing is left of any request.
fn idle(load: &Load<'_>, scraper: &mut Scraper) -> anyhow::Result<Gauges> {
    let started = Instant::now();
    loop {
        let gauges = scraper.read()?;
        let left = left_over(&gauges, load.target.started());
        if left.is_empty() {
            return Ok(gauges);
        }
        ensure!(started.elapsed() < PATIENCE, "{PATIENCE:?} after the last request: {}", left.join(", "));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What an idle server should not have; `alone` if nobody else may have connections.
fn left_over(gauges: &Gauges, alone: bool) -> Vec<String> {
    let zero = ["oxide_requests_running", "oxide_requests_waiting", "oxide_requests_in_flight", "oxide_kv_pages_in_use"];
    let mut left: Vec<String> =
        zero.iter().filter(|name| gauges.get(name) != 0.0).map(|name| format!("{name} is {}", gauges.get(name))).collect();
    let pages = ["oxide_kv_pages_free", "oxide_kv_pages_cached"].iter().map(|name| gauges.get(name)).sum::<f64>();
    if pages != gauges.get("oxide_kv_pages_capacity") {
        left.push(format!("{pages} pages are free or cached, of {}", gauges.get("oxide_kv_pages_capacity")));
    }
    if alone && gauges.get("oxide_connections") != 1.0 {
        left.push(format!("{} connections are open", gauges.get("oxide_connections")));
    }
    left
}
