//! Disconnects, overload, deadlines, aborts, draining and failure.

use crate::client::assemble;
use crate::harness::{Live, Setup, chat_body, greedy_body, streamed};
use oxide_run::http::ServeError;
use oxide_runtime::engine::scripted::{DeviceFault, Failing};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const LONG: u32 = 400;

#[test]
fn a_client_that_goes_away_frees_its_pages_at_once() {
    let live = Setup::default().gated().start();
    for round in 1..=50 {
        let mut events = live.stream_chat(json!({"max_tokens": LONG}));
        live.steps(1);
        events.data();
        drop(events);
        live.wait("counted", |live| live.metric("oxide_client_disconnects_total") == f64::from(round));
        live.steps(1);
        live.wait("freed after the step that ran", |live| live.stats().running == 0 && live.stats().pages_in_use == 0);
    }
    live.wait_idle();
    assert!(live.stats().pages_cached > 0, "whole pages stay for others");
}

#[test]
fn a_client_that_leaves_before_the_answer_frees_its_pages() {
    let live = Setup::default().gated().start();
    let connection = live.post_unanswered("/v1/completions", &greedy_body(json!({"prompt": [1], "max_tokens": LONG})));
    live.steps(1);
    live.wait("running", |live| live.stats().running == 1);
    drop(connection);
    live.wait("counted", |live| live.metric("oxide_client_disconnects_total") == 1.0);
    live.steps(1);
    live.wait_idle();
}

#[test]
fn queued_requests_of_a_gone_client_are_never_prefilled() {
    let live = Setup::default().paused().start();
    let prompt: Vec<u32> = (0..300).collect();
    let body = streamed(greedy_body(json!({"prompt": prompt, "max_tokens": 8})));
    let queued: Vec<_> = (0..20).map(|_| live.post_unanswered("/v1/completions", &body)).collect();
    live.wait_queued(20);
    drop(queued);
    live.wait_queued(0);
    live.resume();
    live.complete(json!({"prompt": [1], "max_tokens": 1})).ok();
    assert_eq!(live.stats().prefill_tokens, 1);
}

#[test]
fn a_full_queue_answers_at_once_and_accepted_requests_finish() {
    let live = Setup::default().engine(|engine| engine.queue_max = 3).paused().start();
    // Eight find a slot, three wait beyond them.
    let accepted: Vec<_> = (0..8 + 3).map(|_| live.stream_chat(json!({"max_tokens": 4}))).collect();
    live.wait_queued(11);
    for body in [chat_body(json!({})), streamed(chat_body(json!({})))] {
        // The quickest of several: the others may have met a busy machine.
        let tries = (0..9).map(|_| {
            let start = Instant::now();
            let reply = live.post("/v1/chat/completions", &body);
            (start.elapsed(), reply)
        });
        let (quickest, reply) = tries.min_by_key(|(took, _)| *took).expect("nine tries");
        assert!(quickest < Duration::from_millis(50), "{quickest:?}");
        assert_eq!((reply.status, reply.error()["code"].as_str()), (503, Some("server_is_overloaded")));
        let number = |name: &str| reply.header(name).and_then(|value| value.parse::<u64>().ok()).expect("a number");
        assert!(number("retry-after") >= 1 && number("retry-after-ms") >= 1);
    }
    assert_eq!(live.metric("oxide_requests_waiting"), 11.0);
    live.resume();
    for mut events in accepted {
        assert_eq!(assemble(&events.rest(), 1)[0].finish.as_deref(), Some("length"));
    }
    live.wait_idle();
}

#[test]
fn a_key_with_its_fill_gets_429_and_others_do_not() {
    let mut live = Setup::default()
        .options(|options| {
            options.api_keys = vec!["one".to_owned(), "two".to_owned()];
            options.requests_per_key_max = Some(1);
        })
        .paused()
        .start();
    live.key = Some("one");
    let mut first = live.stream_chat(json!({"max_tokens": 2}));
    let reply = live.chat(json!({}));
    assert_eq!((reply.status, reply.error()["code"].as_str()), (429, Some("rate_limit_exceeded")));
    assert!(reply.header("retry-after").is_some() && reply.header("retry-after-ms").is_some());
    live.key = Some("two");
    let mut other = live.stream_chat(json!({"max_tokens": 2}));
    live.resume();
    assemble(&first.rest(), 1);
    assemble(&other.rest(), 1);
    live.key = Some("one");
    live.wait("given back", |live| live.chat(json!({"max_tokens": 1})).status == 200);
}

#[test]
fn a_deadline_before_the_first_token_is_a_504() {
    let live = Setup::default().paused().start();
    let body = chat_body(json!({}));
    let by_header = live.request("POST", "/v1/chat/completions", &[("X-Deadline-Ms", "30")], body.to_string().as_bytes());
    let by_field = live.chat(json!({"deadline_ms": 30}));
    // A stream that heard nothing for a while has begun with 200, as it may on a busy machine.
    let begun = |_: &u32| live.post("/v1/chat/completions", &streamed(chat_body(json!({"deadline_ms": 1}))));
    let in_stream = (0..20).map(|turn| begun(&turn)).find(|reply| reply.status != 200).expect("one is in time");
    for reply in [by_header, by_field, in_stream] {
        assert_eq!((reply.status, reply.error()["code"].as_str()), (504, Some("deadline_exceeded")));
    }
    live.request("POST", "/v1/chat/completions", &[("X-Deadline-Ms", "soon")], body.to_string().as_bytes()).refused(400, "x-deadline-ms");
}

#[test]
fn a_deadline_under_way_keeps_the_text_so_far() {
    // A busy machine may not reach the first step before a short deadline; then a longer one shows the same.
    let tries = [200, 2_000, 20_000].into_iter().map(|deadline_ms| {
        let mut live = Setup::default().gated().start();
        let body = greedy_body(json!({"prompt": [1], "max_tokens": LONG, "deadline_ms": deadline_ms}));
        let mut connection = live.post_unanswered("/v1/completions", &body);
        live.steps(3);
        // The deadline counts from acceptance, which was before the first step.
        live.wait("a step or an end", |live| {
            let stats = live.stats();
            stats.steps + stats.rejected + stats.finished + stats.cancelled > 0
        });
        std::thread::sleep(Duration::from_millis(deadline_ms));
        live.open_gate();
        let reply = connection.reply();
        live.wait_idle();
        reply
    });
    let reply = tries.into_iter().find(|reply| reply.status != 504).expect("a step within twenty seconds").ok();
    let choice = &reply["choices"][0];
    assert_eq!((choice["finish_reason"].as_str(), choice["stop_reason"].as_str()), (Some("length"), Some("deadline")));
    let drawn = reply["usage"]["completion_tokens"].as_u64().expect("a count");
    assert!(drawn > 0 && drawn <= 4 && choice["text"].as_str().is_some_and(|text| !text.is_empty()), "{reply}");
}

#[test]
fn a_wait_longer_than_allowed_is_refused() {
    let live = Setup::default().paused().start();
    let by_field = live.chat(json!({"max_queue_ms": 20}));
    let body = chat_body(json!({})).to_string();
    let by_header = live.request("POST", "/v1/chat/completions", &[("X-Max-Queue-Ms", "20")], body.as_bytes());
    for reply in [by_field, by_header] {
        assert_eq!((reply.status, reply.error()["code"].as_str()), (503, Some("server_is_overloaded")));
        assert!(reply.header("retry-after").is_some());
    }
}

#[test]
fn a_live_request_is_aborted_by_either_of_its_ids() {
    let live = Setup::default().gated().start();
    for by_request_id in [true, false] {
        let mut connection = live.connect();
        let body = streamed(chat_body(json!({"max_tokens": LONG})));
        connection.send("POST", "/v1/chat/completions", &[("x-request-id", "mine")], body.to_string().as_bytes());
        let mut events = crate::client::Events::begin(connection);
        live.steps(1);
        let crate::client::Event::Data(first) = events.data() else { panic!("a chunk") };
        let id = if by_request_id { "mine" } else { first["id"].as_str().expect("an id") };
        assert_eq!(live.request("DELETE", &format!("/v1/requests/{id}"), &[], b"").ok()["aborted"], true);
        live.steps(1);
        let last = events.rest().pop().expect("a finish");
        assert_eq!(
            (last["choices"][0]["finish_reason"].as_str(), last["choices"][0]["stop_reason"].as_str()),
            (Some("length"), Some("aborted"))
        );
        live.wait_idle();
        assert_eq!(live.request("DELETE", &format!("/v1/requests/{id}"), &[], b"").status, 404);
    }
}

#[test]
fn a_request_of_another_key_cannot_be_aborted() {
    let mut live = Setup::default().options(|options| options.api_keys = vec!["one".to_owned(), "two".to_owned()]).paused().start();
    live.key = Some("one");
    let mut connection = live.post_unanswered("/v1/chat/completions", &streamed(chat_body(json!({"max_tokens": 2}))));
    live.wait_queued(1);
    let (_, headers) = connection.head();
    let id = headers.iter().find(|(name, _)| name == "x-request-id").map(|(_, id)| id.clone()).expect("an id");
    live.key = Some("two");
    assert_eq!(live.request("DELETE", &format!("/v1/requests/{id}"), &[], b"").status, 404);
    live.key = Some("one");
    assert_eq!(live.request("DELETE", &format!("/v1/requests/{id}"), &[], b"").status, 200);
}

#[test]
fn draining_refuses_new_requests_and_finishes_live_streams() {
    let mut live = Setup::default().paused().start();
    let mut streams: Vec<_> = (0..8).map(|_| live.stream_chat(json!({"max_tokens": 8}))).collect();
    live.wait_queued(8);
    live.terminate();
    live.wait("draining", |live| live.get("/ready").status == 503);
    assert_eq!(live.get("/health").status, 200);
    let refused = live.chat(json!({}));
    assert_eq!((refused.status, refused.error()["code"].as_str()), (503, Some("server_draining")));
    assert_eq!(refused.header("connection"), Some("close"));
    assert!(refused.header("retry-after").is_some());
    live.resume();
    for events in &mut streams {
        assert_eq!(assemble(&events.rest(), 1)[0].finish.as_deref(), Some("length"));
    }
    live.join().expect("an orderly end");
}

#[test]
fn a_second_signal_forces_the_end() {
    let mut live = Setup::default().paused().start();
    let _events = live.stream_chat(json!({"max_tokens": 8}));
    live.wait_queued(1);
    live.terminate();
    live.wait("draining", |live| live.get("/ready").status == 503);
    live.terminate();
    assert!(matches!(live.join(), Err(ServeError::Forced { live: 1 })));
}

#[test]
fn streams_that_outlive_the_drain_limit_are_cut_with_an_end() {
    let setup = Setup::default().script(|script| script.step_time = Duration::from_millis(50));
    let mut live = setup.options(|options| options.drain = Duration::from_millis(400)).start();
    let mut events = live.stream_chat(json!({"max_tokens": LONG}));
    events.data();
    let start = Instant::now();
    live.terminate();
    let last = events.rest().pop().expect("an end");
    assert!(last["choices"][0]["finish_reason"].is_string() || last["error"].is_object(), "{last}");
    live.join().expect("an orderly end");
    assert!(start.elapsed() < Duration::from_secs(15), "far from the twenty seconds that it would have run");
}

#[test]
fn a_signal_while_loading_ends_the_server() {
    let mut live = Setup::default().slow_load().start();
    live.terminate();
    live.join().expect("nothing to lose");
}

#[test]
fn an_engine_failure_reaches_every_open_request_and_ends_the_server() {
    for panics in [false, true] {
        let mut live = Setup::default()
            .script(|script| {
                script.faults = vec![DeviceFault::submitting(3, if panics { Failing::Panic } else { Failing::Error })];
            })
            .paused()
            .start();
        let mut stream = live.stream_chat(json!({"max_tokens": LONG}));
        let mut whole = live.post_unanswered("/v1/completions", &greedy_body(json!({"prompt": [1], "max_tokens": LONG})));
        live.wait_queued(2);
        live.resume();
        let last: Value = stream.rest().pop().expect("an error");
        assert_eq!(last["error"]["code"], "engine_failed", "{last}");
        let reply = whole.reply();
        assert_eq!((reply.status, reply.error()["code"].as_str()), (500, Some("engine_failed")));
        assert!(matches!(live.join(), Err(ServeError::Engine(_))));
    }
}

#[test]
fn a_taken_address_is_an_error_that_names_it() {
    let live = Live::start();
    let options = oxide_run::http::ServeOptions { port: live.address.port(), ..Default::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let error = runtime.block_on(oxide_run::http::Server::bind(options)).err().expect("the address is taken");
    assert!(error.to_string().contains(&live.address.to_string()), "{error}");
}

#[test]
fn the_port_file_is_written_once_requests_are_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("port");
    let mut live = Setup::default().options(|options| options.port_file = Some(path.clone())).slow_load().start();
    live.wait("listening", |live| live.get("/health").status == 503);
    assert!(!path.exists());
    live.finish_loading();
    live.wait("written", |_| path.exists());
    assert_eq!(std::fs::read_to_string(&path).expect("readable").trim(), live.address.port().to_string());
}
