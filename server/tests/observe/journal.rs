//! Every token of a loaded server can be drawn again from its journal.

use crate::client::Events;
use crate::{metric, post, run, send, start};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Requests of the load.
const REQUESTS: usize = 1000;
/// Clients that send them.
const CLIENTS: usize = 32;

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    files
}

fn journaled(folder: &Path) -> Vec<String> {
    let text = |file: &PathBuf| std::fs::read_to_string(file).expect("readable");
    files(folder).iter().flat_map(|file| text(file).lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn replay(path: &Path, more: &[&str]) -> Output {
    let path = path.to_str().expect("UTF-8");
    run(&[&["replay", path], more].concat())
}

/// Requests of every kind: sampled with and without a seed, greedy, several choices, penalties, stops, several prompts.
fn body(index: usize) -> Value {
    let mut body = json!({"prompt": format!("Once upon a time there were {} friends", index % 7), "max_tokens": 4 + index % 13});
    let extra = match index % 7 {
        0 => json!({"temperature": 1.0}),
        1 => json!({"temperature": 0.8, "top_p": 0.9, "seed": index, "n": 3}),
        2 => json!({"temperature": 1.3, "top_k": 40, "frequency_penalty": 0.7, "presence_penalty": 0.2, "stop": ["e", "a"]}),
        3 => json!({"temperature": 0, "ignore_eos": true, "repetition_penalty": 1.2}),
        4 => json!({"temperature": 1.0, "min_p": 0.02, "logit_bias": {"11": 3.3, "17": -5.5}, "prompt": ["The sun", "The moon"]}),
        5 => json!({"temperature": 1.1, "stream": true, "logprobs": 2}),
        _ => {
            json!({"temperature": 1.0, "guided_json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, "max_tokens": 40})
        }
    };
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

fn load(address: SocketAddr) {
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                for index in (client..REQUESTS).step_by(CLIENTS) {
                    let body = body(index);
                    match body["stream"] == true {
                        // Some clients leave after the head.
                        true if index % 4 == 1 => drop(Events::begin(send(address, "/v1/completions", &[], &body))),
                        true => drop(Events::begin(send(address, "/v1/completions", &[], &body)).rest()),
                        false => drop(post(address, "/v1/completions", &body).ok()),
                    }
                }
            });
        }
    });
}

#[test]
fn a_thousand_journaled_requests_of_a_loaded_server_replay_exactly() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    let server = start(&["--journal", path, "--journal-file-size", "200KiB", "--journal-files", "1000"]);
    load(server.address());
    assert_eq!(metric(server.address(), "oxide_journal_dropped_total"), 0.0);
    assert_eq!(metric(server.address(), "oxide_journal_failed_total"), 0.0);
    server.signal("TERM");
    assert!(server.wait().success());
    let expected: usize = (0..REQUESTS).map(|index| if index % 7 == 4 { 2 } else { 1 }).sum();
    assert_eq!(journaled(folder.path()).len(), expected, "one entry for each prompt, the last ones included");
    assert!(files(folder.path()).len() > 1, "files rotate");

    let output = replay(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let constrained = (0..REQUESTS).filter(|index| index % 7 == 6).count();
    assert_eq!((&report["entries"], &report["differences"], &report["constrained"]), (&json!(expected), &json!(0), &json!(constrained)));
    assert!(report["choices"].as_u64() > Some(expected as u64) && report["tokens"].as_u64() > Some(4 * REQUESTS as u64));
}

/// A request that outgrows its share of a small pool.
fn long_body(index: usize) -> Value {
    let mut body = json!({"prompt": format!("The story of number {index} begins"), "max_tokens": 60, "ignore_eos": true});
    let extra = match index % 4 {
        0 => json!({"temperature": 0}),
        1 => json!({"temperature": 1.0}),
        2 => json!({"temperature": 0.9, "seed": index, "frequency_penalty": 0.6, "repetition_penalty": 1.1}),
        _ => json!({"temperature": 1.0, "stream": true, "min_p": 0.05}),
    };
    body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
    body
}

#[test]
fn requests_that_were_preempted_replay_exactly() {
    const CLIENTS: usize = 16;
    const EACH: usize = 4;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    // Thirty-two pages of sixteen tokens: six requests fit whole, sixteen are let in.
    let server = start(&["--journal", path, "--overcommit", "--kv-memory", "2MiB"]);
    let address = server.address();
    let preemptions = || metric(address, "oxide_engine_preemptions_total");
    let mut rounds = 0;
    while preemptions() == 0.0 {
        assert!(rounds < 20, "sixteen clients at once never filled the pool");
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                scope.spawn(move || {
                    for index in 0..EACH {
                        let body = long_body(client * EACH + index);
                        match body["stream"] == true {
                            true => drop(Events::begin(send(address, "/v1/completions", &[], &body)).rest()),
                            false => assert_eq!(post(address, "/v1/completions", &body).ok()["usage"]["completion_tokens"], 60),
                        }
                    }
                });
            }
        });
        rounds += 1;
    }
    server.signal("TERM");
    assert!(server.wait().success());
    let output = replay(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let expected = rounds * CLIENTS * EACH;
    assert_eq!((&report["entries"], &report["differences"], &report["tokens"]), (&json!(expected), &json!(0), &json!(expected * 60)));
}

/// A journal of a few requests, as lines.
fn small_journal() -> Vec<Value> {
    let folder = tempfile::tempdir().expect("a folder");
    let server = start(&["--journal", folder.path().to_str().expect("UTF-8")]);
    for index in 0..4 {
        post(server.address(), "/v1/completions", &body(index)).ok();
    }
    server.signal("TERM");
    assert!(server.wait().success());
    journaled(folder.path()).iter().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn replay_names_the_first_difference_and_refuses_what_it_cannot_compare() {
    let lines = small_journal();
    assert_eq!(lines.len(), 4);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("changed.jsonl");
    let write = |lines: &[Value], tail: &str| {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&file, text + tail).expect("writable");
    };

    let mut changed = lines.clone();
    let journaled = changed[3]["choices"][0]["ids"][2].as_u64().expect("an id");
    changed[3]["choices"][0]["ids"][2] = (journaled ^ 1).into();
    write(&changed, "");
    let output = replay(&file, &["--json"]);
    assert_eq!(output.status.code(), Some(11), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let first = &report["first_difference"];
    assert_eq!((&report["differences"], &first["choice"], &first["token"]), (&json!(1), &json!(0), &json!(2)));
    assert_eq!(first["replayed"], json!(journaled.to_string()));
    assert!(first["place"].as_str().expect("a place").ends_with("changed.jsonl:4"));

    let mut foreign = lines.clone();
    foreign[1]["seal"] = "00".repeat(32).into();
    write(&foreign, "");
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("--any-seal"), "{}", text(&output.stderr));
    assert_eq!(replay(&file, &["--any-seal"]).status.code(), Some(0));

    write(&lines, "{\"v\":1,\"seal\":\"to");
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(0), "a torn last line is left out: {}", text(&output.stderr));
    assert!(text(&output.stdout).contains("warning") && text(&output.stdout).contains("every token is the same"));
    std::fs::write(&file, "not an entry\n").expect("writable");
    assert_eq!(replay(&file, &[]).status.code(), Some(8));
}

#[test]
fn a_journal_that_cannot_be_opened_ends_the_server_with_a_reason() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let output = run(&["serve", "--port", "0", "--journal", file.path().to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(7));
    assert!(text(&output.stderr).contains("cannot open the journal"), "{}", text(&output.stderr));
}
