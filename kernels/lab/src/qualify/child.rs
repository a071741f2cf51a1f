//! One process a kernel: the parent runs this program again with `--one NAME`, reads what it prints, and
//! ends it when its time is over.
//!
//! The child prints a line of JSON before each case and one after it, so that the case in which it hung
//! or died is known.

use super::broken::Fault;
use super::check::{CaseReport, check};
use super::lower::WeightCache;
use super::problems::Weights;
use super::report::KernelReport;
use super::subject::Subject;
use super::{QualifyArgs, places};
use anyhow::Context;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Bytes of a child's complaints that are kept.
const STDERR_MAX: usize = 2000;

/// What a child says.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The device that it runs on.
    Device(String),
    /// A case begins.
    Begin(String),
    /// A case was checked.
    Case(CaseReport),
    /// All cases were checked.
    End,
}

/// Checks one kernel in this process.
///
/// # Errors
/// If its device cannot be opened, or nobody reads.
pub(super) fn run_one(args: &QualifyArgs, subject: &Subject) -> anyhow::Result<()> {
    let (mut place, mut witness) = places(args, subject)?;
    let info = place.info();
    say(&Line::Device(format!("{}: {}", info.kind, info.name)))?;
    let (mut weights, mut cache) = (Weights::default(), WeightCache::default());
    for index in 0..args.cases {
        let case = subject.case(index, args.seed, &mut weights);
        say(&Line::Begin(case.label()))?;
        say(&Line::Case(check(&mut *place, witness.as_mut(), &case, subject.manifest(), &mut cache)))?;
    }
    say(&Line::End)
}

fn say(line: &Line) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(line)?)?;
    out.flush().context("nobody reads the results")
}

/// Checks every kernel, some at once, and prints a line for each.
pub(super) fn run_all(args: &QualifyArgs, subjects: &[Subject]) -> Vec<KernelReport> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(subject) = subjects.get(index) else { return };
            let report = run_isolated(args, subject, args.self_test.filter(|_| index == 0));
            eprintln!("{}", report.line());
            results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, report));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.clamp(1, subjects.len()) {
            scope.spawn(work);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, report)| report).collect()
}

fn run_isolated(args: &QualifyArgs, subject: &Subject, fault: Option<Fault>) -> KernelReport {
    let mut report = KernelReport::new(subject);
    let start = Instant::now();
    let deadline = start + Duration::from_secs(args.timeout);
    match spawn(args, subject, fault) {
        Ok(child) => watch(child, deadline, args.timeout, &mut report),
        Err(error) => report.fault(format!("its process cannot be started: {error:#}")),
    }
    report.seconds = start.elapsed().as_secs_f64();
    report
}

fn spawn(args: &QualifyArgs, subject: &Subject, fault: Option<Fault>) -> anyhow::Result<Child> {
    let mut command = Command::new(std::env::current_exe().context("this program's own path is unknown")?);
    let device = args.device.to_possible_value().context("a hidden device")?;
    command.args(["qualify", "--device", device.get_name(), "--one", &subject.name]);
    command.arg("--artifacts").arg(&args.artifacts);
    command.args(["--cases", &args.cases.to_string(), "--seed", &args.seed.to_string()]);
    command.args(["--threads", &args.threads.to_string(), "--ordinal", &args.ordinal.to_string()]);
    if let Some(fault) = fault.and_then(|fault| fault.to_possible_value()) {
        command.args(["--self-test", fault.get_name()]);
    }
    Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

/// Reads a child to its end, or ends it at `deadline`.
fn watch(mut child: Child, deadline: Instant, seconds: u64, report: &mut KernelReport) {
    let lines = read_lines(&mut child);
    let complaints = child.stderr.take().map(|stderr| std::thread::spawn(move || tail(stderr)));
    let mut current: Option<String> = None;
    let mut ended = false;
    let hung = loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Line::Device(device)) => report.device = device,
            Ok(Line::Begin(case)) => current = Some(case),
            Ok(Line::Case(case)) => {
                current = None;
                report.cases.push(case);
            }
            Ok(Line::End) => ended = true,
            Err(RecvTimeoutError::Timeout) => break true,
            Err(RecvTimeoutError::Disconnected) => break false,
        }
    };
    if hung {
        // It may have ended by itself meanwhile.
        let _ = child.kill();
    }
    let status = child.wait();
    let complaints = complaints.and_then(|thread| thread.join().ok()).unwrap_or_default();
    let place = current.map_or_else(|| "before its first case or between two".to_owned(), |case| format!("in case {case}"));
    if hung {
        report.fault(format!("no end after {seconds} s, {place}"));
    } else if !ended || !status.as_ref().is_ok_and(ExitStatus::success) {
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        report.fault(format!("its process died ({how}) {place}: {}", complaints));
    }
}

fn read_lines(child: &mut Child) -> Receiver<Line> {
    let (send, receive) = channel();
    if let Some(stdout) = child.stdout.take() {
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let Ok(line) = serde_json::from_str(&line) else { continue };
                if send.send(line).is_err() {
                    return;
                }
            }
        });
    }
    receive
}

/// The end of what a child complained about, in one line.
fn tail(mut stderr: impl Read) -> String {
    let mut bytes = Vec::new();
    // What was read before a failure is kept.
    let _ = stderr.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(STDERR_MAX)..]).into_owned();
    let words = text.split("stack backtrace:").next().unwrap_or_default().split_whitespace();
    words.collect::<Vec<_>>().join(" ")
}
