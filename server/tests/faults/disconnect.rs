//! Clients that leave: wherever the server is with a request then, nothing of it stays behind.
//!
//! The sweeps drop the connection after its first poll, after its second, and so on until a request gets
//! its answer. Every place of the path takes a poll of its own; each is also aimed at.

use crate::harness::{Live, Setup};
use crate::injection::{Injection, Metrics, injected, settle};
use crate::requests::{Kind, Raw, exchange, kind, kinds, prefix_prompt, status};
use oxide_run::faults::Place;
use serde_json::json;
use std::sync::Arc;

/// More polls than any request takes.
const POLLS_MAX: u64 = 2000;
/// More polls than a request takes once it is queued.
const POLLS_AT_REST: u64 = 8;

fn one_request_a_key() -> (Setup, Arc<Injection>) {
    injected(Setup::default().options(|options| options.requests_per_key_max = Some(1)))
}

/// Pages of the prefix that are pinned although it has no name.
fn check_pins(live: &Live) {
    if !live.get("/v1/prefixes").ok()["data"].as_array().expect("a list").is_empty() {
        assert_eq!(live.request("DELETE", "/v1/prefixes/p", &[], b"").status, 200);
    }
    let told = live.post("/v1/explain", &json!({"prompt": prefix_prompt(), "max_tokens": 1})).ok();
    assert_eq!(told["prompts"][0]["prefix_cache"]["pinned_tokens"], 0, "{told}");
}

/// Sends the request to a server that may drop it; where it did, or `None` if it answered.
fn attempt(live: &Live, injection: &Injection, kind: &Kind) -> Option<Option<Place>> {
    let answer = exchange(live.address, &kind.bytes());
    settle(live);
    let cut = injection.end();
    if cut.is_none() {
        assert_eq!(status(&answer), Some(kind.status), "{}: {}", kind.name, String::from_utf8_lossy(&answer));
    }
    if kind.path.starts_with("/v1/prefixes") {
        check_pins(live);
    }
    cut
}

#[test]
fn a_client_that_leaves_at_any_await_point_leaves_nothing_behind() {
    let (setup, injection) = one_request_a_key();
    let live = setup.start();
    for kind in kinds() {
        for place in [Place::Accepted, Place::Head].iter().chain(kind.places) {
            injection.cut_at(*place);
            // With no step run, a stream's events are still to come when its head is sent.
            if *place == Place::Stream {
                live.engine.pause();
            }
            assert_eq!(attempt(&live, &injection, &kind), Some(Some(*place)), "{} does not pass {place:?}", kind.name);
            live.resume();
        }
        for polls in 0.. {
            assert!(polls < POLLS_MAX, "{} takes more than {POLLS_MAX} polls", kind.name);
            injection.cut_after(polls);
            if attempt(&live, &injection, &kind).is_none() {
                break;
            }
        }
    }
    assert_eq!(Metrics::of(&live).get("oxide_panics_total"), 0.0);
    live.chat(json!({"max_tokens": 2})).ok();
}

#[test]
fn a_client_that_leaves_while_the_model_loads_leaves_nothing_behind() {
    let (setup, injection) = one_request_a_key();
    let mut live = setup.slow_load().start();
    for name in ["a chat", "a streamed chat", "tokenizing", "a prefix", "the models"] {
        let kind = Kind { status: 503, ..kind(name) };
        for polls in 0..POLLS_MAX {
            injection.cut_after(polls);
            let answer = exchange(live.address, &kind.bytes());
            live.wait("the connection's end", |live| live.metric("oxide_connections") == 1.0);
            if injection.end().is_none() {
                assert_eq!(status(&answer), Some(503), "a request never waits for the model: {name}");
                break;
            }
        }
    }
    live.finish_loading();
    live.wait("ready", |live| live.get("/ready").status == 200);
    live.chat(json!({"max_tokens": 2})).ok();
    settle(&live);
}

#[test]
fn a_client_that_leaves_on_the_way_to_the_queue_or_in_it_leaves_nothing_behind() {
    let (setup, injection) = one_request_a_key();
    let live = setup.paused().start();
    for name in ["a chat", "a streamed chat", "a constrained stream", "several choices", "a prefix"] {
        let kind = kind(name);
        let mut waited = 0;
        for polls in 0.. {
            assert!(polls < POLLS_MAX, "{name} never waits");
            injection.cut_after(polls);
            let mut client = Raw::open(live.address);
            client.write(&kind.bytes());
            live.wait("the cut, or the queue", |live| injection.was_cut() || live.stats().waiting == 1);
            // A request can be queued a few polls before it is at rest there.
            waited += u64::from(!injection.was_cut());
            drop(client);
            settle(&live);
            injection.end();
            if waited == POLLS_AT_REST {
                break;
            }
        }
        let mut client = Raw::open(live.address);
        client.write(&kind.bytes());
        live.wait_queued(1);
        if name.contains("stream") {
            assert_eq!(status(&client.read(16)), Some(200), "the head comes while the request waits");
        }
        drop(client);
        settle(&live);
    }
    let stats = live.stats();
    assert_eq!((stats.steps, stats.admitted), (0, 0), "{stats:?}");
    assert_eq!(Metrics::of(&live).get("oxide_panics_total"), 0.0);
}

#[test]
fn a_client_that_leaves_after_any_byte_leaves_nothing_behind() {
    let (setup, _injection) = one_request_a_key();
    let live = setup.start();
    for name in ["a streamed chat", "a constrained chat", "several choices"] {
        let bytes = kind(name).bytes();
        for sent in 0..bytes.len() {
            Raw::open(live.address).write(&bytes[..sent]);
            if sent % 16 == 0 {
                settle(&live);
            }
        }
        settle(&live);
        let length = exchange(live.address, &bytes).len();
        for received in (0..length).step_by(1 + length / 40) {
            let mut client = Raw::open(live.address);
            client.write(&bytes);
            client.read(received);
            drop(client);
            settle(&live);
        }
        assert_eq!(status(&exchange(live.address, &bytes)), Some(200), "{name}");
        settle(&live);
    }
    assert_eq!(Metrics::of(&live).get("oxide_panics_total"), 0.0);
}
