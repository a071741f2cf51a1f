//! What operators see of a live server on the shipped model's real bundle: explain, traces, the journal
//! and its replay, named prefixes, the page.

#[expect(dead_code, reason = "shared with the tests over the scripted device, which use all of it")]
#[path = "../http/client.rs"]
mod client;
mod explain;
mod journal;

use client::{Connection, Reply};
use oxide_testkit::{ServerProcess, tiny_bundle};
use serde_json::Value;
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_oxide-run");
const PATIENCE: Duration = Duration::from_secs(60);

fn start(args: &[&str]) -> ServerProcess {
    let server = ServerProcess::start(PROGRAM, &tiny_bundle(), args);
    let begun = Instant::now();
    while get(server.address(), "/ready").status != 200 {
        assert!(begun.elapsed() < PATIENCE, "the server does not become ready");
        std::thread::sleep(Duration::from_millis(2));
    }
    server
}

fn get(address: SocketAddr, path: &str) -> Reply {
    let mut connection = Connection::open(address);
    connection.send("GET", path, &[], b"");
    connection.reply()
}

fn send(address: SocketAddr, path: &str, headers: &[(&str, &str)], body: &Value) -> Connection {
    let mut connection = Connection::open(address);
    let mut all = vec![("content-type", "application/json")];
    all.extend_from_slice(headers);
    connection.send("POST", path, &all, body.to_string().as_bytes());
    connection
}

fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    send(address, path, &[], body).reply()
}

fn metric(address: SocketAddr, name: &str) -> f64 {
    let text = get(address, "/metrics").text();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name)).unwrap_or_else(|| panic!("no metric {name}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Runs a command on the bundle.
fn run(args: &[&str]) -> Output {
    Command::new(PROGRAM).arg(tiny_bundle()).args(args).stdin(Stdio::null()).output().expect("the program runs")
}
