//! A panic while one request is answered is that request's error and nobody else's.

use crate::client::Connection;
use crate::harness::{Live, Setup, drawn, greedy_body};
use crate::injection::{Injection, Metrics, injected, settle};
use crate::requests::{exchange, kind, status};
use oxide_run::faults::Place;
use serde_json::{Value, json};

/// The ids of the request beside.
const PROMPT: [u32; 3] = [1, 2, 3];
/// Its tokens.
const TOKENS: usize = 400;

/// Whether steps run while a request panics.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Steps {
    Held,
    Run,
}

/// Starts a request whose second step is held. It passes no more places until it has its answer.
fn bystander(live: &Live) -> Connection {
    live.steps(1);
    let connection = live.post_unanswered("/v1/completions", &greedy_body(json!({"prompt": PROMPT, "max_tokens": TOKENS})));
    live.wait("the first token", |live| live.stats().decode_tokens > 0);
    connection
}

fn check_bystander(mut connection: Connection) {
    let choice = connection.reply().ok()["choices"][0].clone();
    let text = crate::harness::tokenizer().decode(&drawn(&PROMPT, TOKENS), true);
    assert_eq!((choice["text"].as_str(), choice["finish_reason"].as_str()), (Some(text.as_str()), Some("length")));
}

/// Answers a request that panics at a place, beside one that does not. That one is held mid-way unless the
/// panic needs steps.
fn panicking(name: &str, place: Place, steps: Steps, check: impl Fn(&[u8])) {
    let (setup, injection) = injected(Setup::default().gated());
    let mut live = setup.start();
    let beside = bystander(&live);
    injection.panic_at(place);
    if steps == Steps::Run {
        live.open_gate();
    }
    check(&exchange(live.address, &kind(name).bytes()));
    assert!(!injection.is_armed(), "{name} does not pass {place:?}");
    live.open_gate();
    check_bystander(beside);
    settle(&live);
    after(&live, &injection, name);
}

/// The server is as it was, and has counted what happened.
fn after(live: &Live, injection: &Injection, name: &str) {
    let metrics = Metrics::of(live);
    assert_eq!((metrics.get("oxide_panics_total"), metrics.get("oxide_client_disconnects_total")), (1.0, 0.0), "{name}");
    injection.end();
    assert_eq!(status(&exchange(live.address, &kind(name).bytes())), Some(200), "{name}: the next one is answered");
    settle(live);
    assert_eq!(Metrics::of(live).get("oxide_panics_total"), 1.0);
}

fn is_500(answer: &[u8]) {
    let text = String::from_utf8_lossy(answer);
    assert_eq!(status(answer), Some(500), "{text}");
    let body: Value = serde_json::from_str(text.split("\r\n\r\n").nth(1).expect("a body")).expect("JSON");
    assert_eq!((&body["error"]["type"], &body["error"]["code"]), (&json!("server_error"), &json!("internal_error")), "{text}");
    assert!(text.contains("x-request-id"), "{text}");
}

/// A stream that ends with an error of its own.
fn is_error_event(answer: &[u8]) {
    let text = String::from_utf8_lossy(answer);
    assert_eq!(status(answer), Some(200), "{text}");
    let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let [.., error, "[DONE]"] = events[..] else { panic!("no error and end: {text}") };
    let error: Value = serde_json::from_str(error).expect("JSON");
    assert_eq!(error["error"]["code"], "internal_error", "{text}");
    assert!(text.ends_with("\r\n0\r\n\r\n"), "the body is whole: {text}");
}

#[test]
fn a_panic_before_the_answer_is_a_500_of_that_request_alone() {
    for (name, place) in [
        ("a chat", Place::Head),
        ("a chat", Place::Body),
        ("a chat", Place::Tokenize),
        ("a chat", Place::Submit),
        ("a chat", Place::Wait),
        ("a streamed chat", Place::Wait),
        ("an explanation", Place::Probe),
        ("detokenizing", Place::Body),
        ("rendering", Place::Tokenize),
        ("the models", Place::Head),
    ] {
        panicking(name, place, Steps::Held, is_500);
    }
}

#[test]
fn a_panic_on_a_thread_that_works_for_a_request_is_a_500_of_that_request_alone() {
    for (name, place, steps) in [
        ("a long chat", Place::TokenizeThread, Steps::Held),
        ("tokenizing much", Place::TokenizeThread, Steps::Held),
        ("a constrained chat", Place::CompileThread, Steps::Held),
        ("an explanation", Place::CompileThread, Steps::Held),
        ("a constrained chat", Place::MaskThread, Steps::Run),
    ] {
        panicking(name, place, steps, is_500);
    }
}

#[test]
fn a_panic_while_a_prefix_is_pinned_leaves_no_pin() {
    for place in [Place::Pin, Place::Pinned] {
        panicking("a prefix", place, Steps::Run, is_500);
    }
}

#[test]
fn a_panic_in_a_stream_is_its_last_event() {
    for place in [Place::Produce, Place::Stream] {
        for name in ["a streamed chat", "several choices streamed"] {
            panicking(name, place, Steps::Held, is_error_event);
        }
    }
}

#[test]
fn a_panic_outside_of_any_request_costs_its_connection_alone() {
    panicking("a chat", Place::Accepted, Steps::Held, |answer| assert!(answer.is_empty()));
}
