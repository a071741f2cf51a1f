//! Runs, servers and the driver's log.

use crate::client::{Connection, Reply};
use oxide_testkit::{DriverCall, FakeCuda, ServerProcess, tiny_sm90_bundle};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_oxide-run");
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a finished command left.
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    /// Checks a failure: its exit code, and words that its message must have.
    pub(crate) fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        let missing: Vec<_> = words.iter().filter(|word| !self.err.contains(**word)).collect();
        assert!(missing.is_empty(), "{missing:?} not in: {}", self.err);
    }
}

pub(crate) fn run(fake: &FakeCuda, bundle: &Path, args: &[&str]) -> Run {
    let output = fake.command(PROGRAM).arg(bundle).args(args).stdin(Stdio::null()).output().expect("the program runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Generates `tokens` ids after the prompt 1, 2, 3.
pub(crate) fn generate(fake: &FakeCuda, tokens: u32) -> Run {
    generate_on(fake, &tiny_sm90_bundle(), tokens)
}

pub(crate) fn generate_on(fake: &FakeCuda, bundle: &Path, tokens: u32) -> Run {
    run(fake, bundle, &["generate", "--prompt-ids", "1,2,3", "-n", &tokens.to_string(), "--temperature", "0", "--ignore-eos", "--json"])
}

/// A server on the fake driver, ready.
pub(crate) fn serve(fake: &FakeCuda, args: &[&str]) -> ServerProcess {
    let server = ServerProcess::start_as(fake.command(PROGRAM), &tiny_sm90_bundle(), args);
    wait("ready", || get(&server, "/ready").status == 200);
    server
}

pub(crate) fn wait(what: &str, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn get(server: &ServerProcess, path: &str) -> Reply {
    let mut connection = Connection::open(server.address());
    connection.send("GET", path, &[], b"");
    connection.reply()
}

pub(crate) fn post(server: &ServerProcess, path: &str, body: &Value) -> Connection {
    let mut connection = Connection::open(server.address());
    connection.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes());
    connection
}

pub(crate) fn metric(server: &ServerProcess, name: &str) -> f64 {
    let text = get(server, "/metrics").text();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name)).unwrap_or_else(|| panic!("no metric {name}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Hashes of the bundle's code objects, as its own tool lists them.
pub(crate) fn sealed() -> BTreeSet<String> {
    let run = run(&FakeCuda::absent(), &tiny_sm90_bundle(), &["kernels", "--json"]);
    let value: Value = serde_json::from_str(&run.out).unwrap_or_else(|error| panic!("{error}: {}", run.err));
    let hash = |row: &Value| row["sha256"].as_str().expect("a hash").to_owned();
    value["artifacts"].as_array().expect("a list").iter().map(hash).collect()
}

/// Whether a call makes the device run kernels.
pub(crate) fn is_launch(call: &DriverCall) -> bool {
    ["cuLaunchKernelEx", "cuGraphLaunch"].contains(&call.name.as_str())
}

pub(crate) fn count(calls: &[DriverCall], name: &str) -> usize {
    calls.iter().filter(|call| call.name == name).count()
}

/// Nothing was launched.
pub(crate) fn assert_no_launch(fake: &FakeCuda) {
    let launched: Vec<_> = fake.calls().into_iter().filter(is_launch).collect();
    assert!(launched.is_empty(), "{launched:?}");
}

/// Everything was given back before the context was, and the driver refused nothing.
pub(crate) fn assert_freed(calls: &[DriverCall]) {
    let last = calls.last().expect("the driver was called");
    assert_eq!(last.name, "cuDevicePrimaryCtxRelease_v2");
    let live = last.get("live").expect("the driver says what is live");
    assert!(live.split(',').all(|pair| pair.ends_with(":0")), "not given back: {live}");
    for (made, gone) in [
        ("cuMemAlloc_v2", "cuMemFree_v2"),
        ("cuMemHostAlloc", "cuMemFreeHost"),
        ("cuModuleLoadData", "cuModuleUnload"),
        ("cuStreamCreate", "cuStreamDestroy_v2"),
        ("cuEventCreate", "cuEventDestroy_v2"),
        ("cuGraphInstantiateWithFlags", "cuGraphExecDestroy"),
        ("cuStreamEndCapture", "cuGraphDestroy"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
    ] {
        let made_count = calls.iter().filter(|call| call.name == made && call.code == 0).count();
        assert_eq!(made_count, count(calls, gone), "{made} and {gone}");
    }
}

/// Calls that the driver refused; the end of a list of parameters is told by a refusal.
pub(crate) fn refused(calls: &[DriverCall]) -> Vec<&DriverCall> {
    calls.iter().filter(|call| call.code != 0 && call.name != "cuFuncGetParamInfo").collect()
}
