//! The real program on the shipped model's real bundle, over HTTP: the reference's tokens, streams under
//! load, signals, logs.

#[expect(dead_code, reason = "shared with the tests over the scripted device, which use all of it")]
#[path = "../http/client.rs"]
mod client;

use client::{Connection, Event, Events, Reply, assemble};
use oxide_testkit::{ServerProcess, repo, tiny_bundle};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_oxide-run");
const PATIENCE: Duration = Duration::from_secs(60);

fn start(args: &[&str]) -> ServerProcess {
    let server = ServerProcess::start(PROGRAM, &tiny_bundle(), args);
    wait("ready", || get(&server, "/ready").status == 200);
    server
}

fn wait(what: &str, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn get(server: &ServerProcess, path: &str) -> Reply {
    let mut connection = Connection::open(server.address());
    connection.send("GET", path, &[], b"");
    connection.reply()
}

fn post(address: SocketAddr, path: &str, body: &Value) -> Connection {
    let mut connection = Connection::open(address);
    connection.send("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes());
    connection
}

fn complete(server: &ServerProcess, body: &Value) -> Value {
    post(server.address(), "/v1/completions", body).reply().ok()
}

fn chat(content: &str, rest: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32});
    body.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
    body
}

fn metric(server: &ServerProcess, name: &str) -> f64 {
    let text = get(server, "/metrics").text();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name)).unwrap_or_else(|| panic!("no metric {name}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

fn reference() -> Vec<Value> {
    let text = std::fs::read(repo().join("profiles/oxide-tiny/reference.json")).expect("the reference is in the repository");
    let reference: Value = serde_json::from_slice(&text).expect("JSON");
    reference["prompts"].as_array().expect("prompts").clone()
}

/// Leading reference ids that bind: up to the first step whose top two logits nearly tie.
fn binding(prompt: &Value) -> Vec<u64> {
    let ids = prompt["greedy_f32"].as_array().expect("ids");
    let gaps = prompt["gap_f32"].as_array().expect("gaps");
    let clear = gaps.iter().take_while(|gap| gap.as_f64().is_some_and(|gap| gap >= 0.25)).count();
    ids.iter().take(clear).filter_map(Value::as_u64).collect()
}

#[test]
fn all_reference_prompts_at_once_get_the_reference_s_text() {
    let server = start(&[]);
    let reference = reference();
    let prompts: Vec<&Value> = reference.iter().map(|prompt| &prompt["prompt_ids"]).collect();
    let body = json!({"prompt": prompts, "temperature": 0, "max_tokens": 24, "ignore_eos": true, "skip_special_tokens": false});
    let reply = complete(&server, &body);
    for (prompt, choice) in reference.iter().zip(reply["choices"].as_array().expect("choices")) {
        let ids: Vec<u64> = binding(prompt).into_iter().take(24).collect();
        let text = post(server.address(), "/detokenize", &json!({"tokens": ids})).reply().ok()["prompt"].as_str().expect("text").to_owned();
        let text = text.trim_end_matches('\u{FFFD}');
        assert!(choice["text"].as_str().expect("text").starts_with(text), "{choice} does not start with {text:?}");
    }
}

#[test]
fn streams_equal_whole_answers_on_fifty_prompts() {
    let server = start(&[]);
    let texts = ["日本語を話せますか", "Say \u{1FAE0} \u{1F979} 龜", "مرحبا بالعالم", "    fn main() {\n\tprintln!();\n}", "Count to five"];
    for index in 0..50 {
        let text = format!("{} {index}", texts[index % texts.len()]);
        let extra = json!({"ignore_eos": index % 2 == 0});
        let whole = post(server.address(), "/v1/chat/completions", &chat(&text, extra.clone())).reply().ok();
        let mut body = chat(&text, extra);
        body["stream"] = true.into();
        let streamed = assemble(&Events::begin(post(server.address(), "/v1/chat/completions", &body)).rest(), 1);
        let choice = &whole["choices"][0];
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(streamed[0].text), &json!(streamed[0].finish)));
    }
}

#[test]
fn tokens_do_not_depend_on_company_or_cache() {
    let server = start(&[]);
    let ask = |body: &Value| post(server.address(), "/v1/chat/completions", body).reply().ok()["choices"][0]["message"]["content"].clone();
    let bodies = [
        chat("Tell me a story", json!({"temperature": 1, "seed": 1, "ignore_eos": true})),
        chat("Tell me a story", json!({"ignore_eos": true})),
    ];
    let alone: Vec<Value> = bodies.iter().map(ask).collect();
    std::thread::scope(|scope| {
        let asks: Vec<_> = (0..32)
            .map(|index| {
                let body = if index < 2 {
                    bodies[index].clone()
                } else {
                    chat(&format!("{index}"), json!({"temperature": 1, "ignore_eos": true}))
                };
                scope.spawn(move || ask(&body))
            })
            .collect();
        let crowded: Vec<Value> = asks.into_iter().map(|ask| ask.join().expect("answered")).collect();
        assert_eq!(crowded[..2], alone);
    });
}

/// A third of the clients leave in the middle; nothing is lost, leaked or left behind, and SIGTERM under load is orderly.
#[test]
fn load_with_disconnects_leaves_nothing_behind() {
    let server = start(&["--max-queue", "256"]);
    let address = server.address();
    let round = |seconds: u64| {
        let (finished, left) = (AtomicU32::new(0), AtomicU32::new(0));
        let start = Instant::now();
        let goes_on = |finished: &AtomicU32, left: &AtomicU32| {
            let enough = finished.load(Ordering::Relaxed) > 50 && left.load(Ordering::Relaxed) > 50;
            start.elapsed() < if enough { Duration::from_secs(seconds) } else { PATIENCE }
        };
        std::thread::scope(|scope| {
            for client in 0..64 {
                let (finished, left, goes_on) = (&finished, &left, &goes_on);
                scope.spawn(move || {
                    let mut turn = client;
                    while goes_on(finished, left) {
                        let body = chat(&format!("Hello {turn}"), json!({"stream": true, "ignore_eos": true, "max_tokens": 8 + turn % 25}));
                        let mut events = Events::begin(post(address, "/v1/chat/completions", &body));
                        if turn % 3 == 0 {
                            (0..turn % 5).for_each(|_| assert!(matches!(events.data(), Event::Data(_))));
                            left.fetch_add(1, Ordering::Relaxed);
                        } else {
                            assert_eq!(assemble(&events.rest(), 1)[0].finish.as_deref(), Some("length"));
                            finished.fetch_add(1, Ordering::Relaxed);
                        }
                        turn += 1;
                    }
                });
            }
        });
        (finished.into_inner(), left.into_inner())
    };
    let settle = || {
        wait("idle", || {
            ["oxide_requests_running", "oxide_requests_waiting", "oxide_kv_pages_in_use"].iter().all(|name| metric(&server, name) == 0.0)
        });
        wait("connections gone", || metric(&server, "oxide_connections") <= 1.0);
        let pages = |state: &str| metric(&server, &format!("oxide_kv_pages_{state}"));
        assert_eq!(pages("free") + pages("cached"), pages("capacity"));
        (metric(&server, "oxide_resident_memory_bytes"), metric(&server, "oxide_open_fds"))
    };
    let (finished, left) = round(2);
    assert!(finished > 50 && left > 50, "{finished} finished, {left} left");
    let (memory, fds) = settle();
    round(3);
    let (memory_after, fds_after) = settle();
    assert!(fds_after <= fds + 2.0, "{fds} to {fds_after} file descriptors");
    assert!(memory_after < memory * 1.10 + 8e6, "{memory} to {memory_after} bytes");
    assert_eq!(metric(&server, "oxide_panics_total") + metric(&server, "oxide_generation_errors_total"), 0.0);
}

fn streams_under_way(server: &ServerProcess, count: u32, tokens: u32) -> Vec<Events> {
    let body = |index: u32| chat(&format!("{index}"), json!({"stream": true, "ignore_eos": true, "max_tokens": tokens}));
    let begin = |index| Events::begin(post(server.address(), "/v1/chat/completions", &body(index)));
    let mut streams: Vec<Events> = (0..count).map(begin).collect();
    streams.iter_mut().for_each(|events| assert!(matches!(events.data(), Event::Data(_))));
    streams
}

#[test]
fn sigterm_finishes_live_streams_and_exits_0() {
    let server = start(&["--drain-seconds", "20"]);
    let streams = streams_under_way(&server, 8, 300);
    server.signal("TERM");
    for mut events in streams {
        let chunks = events.rest();
        assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_sigterm_forces_the_end() {
    let server = start(&["--drain-seconds", "600"]);
    let stuck = streams_under_way(&server, 8, 1900);
    // Far more than it can finish before the second signal, however busy the machine is.
    let body = chat("Hello", json!({"ignore_eos": true, "max_tokens": 1900}));
    let waiting: Vec<Connection> = (0..200).map(|_| post(server.address(), "/v1/chat/completions", &body)).collect();
    wait("queued", || metric(&server, "oxide_requests_waiting") > 100.0);
    server.signal("TERM");
    wait("draining", || get(&server, "/ready").status == 503);
    server.signal("TERM");
    assert_ne!(server.wait().code(), Some(0));
    drop((stuck, waiting));
}

#[test]
fn the_log_line_carries_the_request_id() {
    let mut child = Command::new(PROGRAM)
        .arg(tiny_bundle())
        .args(["serve", "--port", "0", "--log-json"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the server starts");
    let (sender, log) = mpsc::channel();
    let lines = BufReader::new(child.stderr.take().expect("piped")).lines().map_while(Result::ok);
    std::thread::spawn(move || lines.for_each(|line| drop(sender.send(line))));
    // Lines of different tasks may come in any order, so those passed over are kept.
    let mut passed: Vec<Value> = Vec::new();
    let mut line = |message: &str| -> Value {
        let wanted = |entry: &Value| entry["fields"]["message"] == message;
        while !passed.iter().any(wanted) {
            let text = log.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no line {message:?} after {passed:?}"));
            passed.push(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}")));
        }
        let at = passed.iter().position(wanted).expect("it is there");
        passed.remove(at)["fields"].clone()
    };
    let address: SocketAddr = line("listening")["address"].as_str().expect("an address").parse().expect("an address");
    line("ready");
    let mut connection = Connection::open(address);
    let body = chat("Hi", json!({"max_tokens": 2, "ignore_eos": true})).to_string();
    connection.send("POST", "/v1/chat/completions", &[("content-type", "application/json"), ("x-request-id", "mine-7")], body.as_bytes());
    assert_eq!(connection.reply().header("x-request-id"), Some("mine-7"));
    let ended = line("generation ended");
    assert_eq!((ended["request_id"].as_str(), ended["completion_tokens"].as_u64()), (Some("mine-7"), Some(2)));
    assert_eq!(line("request answered")["request_id"], "mine-7");
    child.kill().expect("it can be ended");
    child.wait().expect("it ends");
}

#[test]
fn keys_come_from_flags_and_from_a_file() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    writeln!(file, "from-file").expect("writable");
    let path = file.path().to_str().expect("UTF-8").to_owned();
    let server = start(&["--api-key", "from-flag", "--api-key-file", &path]);
    let status = |key: &str| {
        let mut connection = Connection::open(server.address());
        connection.send("GET", "/v1/models", &[("authorization", &format!("Bearer {key}"))], b"");
        connection.reply().status
    };
    assert_eq!(["from-flag", "from-file", "other"].map(status), [200, 200, 401]);
}
