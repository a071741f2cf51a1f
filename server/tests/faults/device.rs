//! A device that fails or stalls under a live server.

use crate::client::{Events, assemble};
use crate::harness::{Setup, chat_body, drawn, greedy_body, streamed};
use crate::injection::settle;
use oxide_run::http::ServeError;
use oxide_runtime::engine::scripted::{Call, DeviceFault, Failing};
use serde_json::{Value, json};
use std::time::Duration;

const LONG: u32 = 400;

fn faulty(fault: DeviceFault, depth: usize) -> Setup {
    Setup::default().script(|script| {
        script.faults.push(fault);
        script.depth = depth;
    })
}

#[test]
fn a_device_failure_in_any_call_is_told_to_every_request_and_ends_the_server() {
    for (call, at) in [(Call::Submit, 0), (Call::Submit, 5), (Call::Collect, 0), (Call::Collect, 4), (Call::CopyPages, 0)] {
        for failing in [Failing::Error, Failing::Panic] {
            for depth in [1, 2] {
                let mut live = faulty(DeviceFault { call, at, failing }, depth).paused().start();
                let mut whole =
                    live.post_unanswered("/v1/completions", &greedy_body(json!({"prompt": [1, 2, 3], "n": 3, "max_tokens": LONG})));
                let mut stream = live.post_unanswered("/v1/chat/completions", &streamed(chat_body(json!({"max_tokens": LONG}))));
                live.wait_queued(2);
                live.resume();
                let reply = whole.reply();
                let what = format!("{failing:?} in {call:?} {at} at depth {depth}");
                assert_eq!((reply.status, reply.error()["code"].as_str()), (500, Some("engine_failed")), "{what}");
                // Before its head a stream can still be refused with a status.
                let (status, _) = stream.head();
                assert!(matches!(status, 200 | 500), "{what}: {status}");
                assert!(matches!(live.join(), Err(ServeError::Engine(_))), "{what}");
                let stats = live.stats();
                assert_eq!((stats.running, stats.waiting, stats.pages_in_use), (0, 0, 0), "{what}: {stats:?}");
            }
        }
    }
}

#[test]
fn a_stream_under_way_ends_with_the_failure_and_done() {
    let mut live = faulty(DeviceFault { call: Call::Collect, at: 3, failing: Failing::Error }, 1).gated().start();
    live.steps(1);
    let mut stream = Events::begin(live.post_unanswered("/v1/chat/completions", &streamed(chat_body(json!({"max_tokens": LONG})))));
    stream.data();
    live.open_gate();
    let last: Value = stream.rest().pop().expect("an error");
    assert_eq!(last["error"]["code"], "engine_failed", "{last}");
    assert!(matches!(live.join(), Err(ServeError::Engine(_))));
}

#[test]
fn a_step_that_stalls_delays_its_requests_and_nothing_else() {
    for call in [Call::Submit, Call::Collect, Call::CopyPages] {
        let fault =
            DeviceFault { call, at: if call == Call::CopyPages { 0 } else { 2 }, failing: Failing::Slow(Duration::from_millis(300)) };
        let live = faulty(fault, 2).options(|options| options.keep_alive = Duration::from_millis(50)).start();
        let mut stream = live.stream_complete(json!({"prompt": [1, 2, 3], "n": 2, "max_tokens": 12}));
        assert_eq!(live.get("/health").status, 200, "the server answers meanwhile");
        live.post("/tokenize", &json!({"prompt": "Hello"})).ok();
        let text = crate::harness::tokenizer().decode(&drawn(&[1, 2, 3], 12), true);
        for choice in assemble(&stream.rest(), 2) {
            assert_eq!((choice.text.as_str(), choice.finish.as_deref()), (text.as_str(), Some("length")), "{call:?}");
        }
        drop(stream);
        settle(&live);
    }
}
