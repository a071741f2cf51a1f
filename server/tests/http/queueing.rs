//! Where requests wait and when they are refused, as clients see it.

use crate::client::{Event, assemble};
use crate::harness::{Live, Setup};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Slots of the default script.
const SLOTS: u32 = 8;
/// Tokens of a request that runs until its gate opens.
const LONG: u32 = 400;

/// A gated server whose slots all run, and their streams.
fn full(setup: Setup) -> (Live, Vec<crate::client::Events>) {
    let live = setup.gated().start();
    let post = || live.post_unanswered("/v1/chat/completions", &streamed_chat(LONG));
    let mut connections = vec![post()];
    live.steps(1);
    live.wait("one runs", |live| live.stats().running == 1);
    connections.extend((1..SLOTS).map(|_| post()));
    live.wait_queued(SLOTS - 1);
    live.steps(2);
    live.wait("all slots run", |live| live.stats().running == SLOTS);
    (live, connections.into_iter().map(crate::client::Events::begin).collect())
}

fn streamed_chat(max_tokens: u32) -> Value {
    crate::harness::streamed(crate::harness::chat_body(json!({"max_tokens": max_tokens})))
}

#[test]
fn the_gauge_of_waiting_requests_reaches_the_bound_and_no_more() {
    let (mut live, running) = full(Setup::default().engine(|engine| engine.queue_max = 3));
    let waiting: Vec<_> = (0..3).map(|_| live.post_unanswered("/v1/chat/completions", &streamed_chat(4))).collect();
    live.wait_queued(3);
    for _ in 0..5 {
        let reply = live.chat(json!({}));
        assert_eq!((reply.status, reply.error()["code"].as_str()), (503, Some("server_is_overloaded")));
        assert!(reply.header("retry-after").is_some());
    }
    assert_eq!((live.metric("oxide_requests_waiting"), live.metric("oxide_requests_running")), (3.0, f64::from(SLOTS)));
    live.open_gate();
    for mut events in running.into_iter().chain(waiting.into_iter().map(crate::client::Events::begin)) {
        assert_eq!(assemble(&events.rest(), 1)[0].finish.as_deref(), Some("length"));
    }
    live.wait_idle();
}

/// What `/v1/explain` says of a full queue is what a request then hears.
#[test]
fn explain_tells_that_a_full_queue_refuses() {
    let (live, _running) = full(Setup::default().engine(|engine| engine.queue_max = 0));
    let mut asked = live.post_unanswered("/v1/explain", &crate::harness::chat_body(json!({"max_tokens": 4})));
    let answered = AtomicBool::new(false);
    let told = std::thread::scope(|scope| {
        // The engine answers between two steps.
        scope.spawn(|| {
            for _ in (0..LONG - 10).take_while(|_| !answered.load(Ordering::Acquire)) {
                live.steps(1);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let told = asked.reply().ok();
        answered.store(true, Ordering::Release);
        told
    });
    let admission = &told["prompts"][0]["admission"];
    assert_eq!((&admission["verdict"], &admission["code"]), (&json!("refused"), &json!("server_is_overloaded")), "{admission}");
}

#[test]
fn a_short_queue_refuses_nothing_while_slots_are_free() {
    for bound in [0, 1] {
        let live = Setup::default().engine(|engine| engine.queue_max = bound).start();
        for _ in 0..5 {
            let burst: Vec<_> = (0..SLOTS).map(|_| live.post_unanswered("/v1/chat/completions", &streamed_chat(8))).collect();
            for connection in burst {
                let chunks = crate::client::Events::begin(connection).rest();
                assert_eq!(assemble(&chunks, 1)[0].finish.as_deref(), Some("length"));
            }
            live.wait_idle();
        }
    }
}

#[test]
fn a_wait_of_no_time_takes_what_can_start_and_refuses_the_rest() {
    let (mut live, running) = full(Setup::default().options(|options| options.queue_time_max = Some(Duration::ZERO)));
    let body = crate::harness::chat_body(json!({"max_tokens": 4}));
    let mut late = live.post_unanswered("/v1/chat/completions", &body);
    live.wait_queued(1);
    live.steps(1);
    let reply = late.reply();
    assert_eq!((reply.status, reply.error()["code"].as_str()), (503, Some("server_is_overloaded")));
    let message = reply.error()["message"].as_str().map(str::to_owned).expect("a message");
    assert!(message.ends_with("no slot, or no memory for the KV cache, was free at once"), "{message}");
    // A request may allow more.
    let patient =
        live.post_unanswered("/v1/chat/completions", &crate::harness::chat_body(json!({"max_tokens": 4, "max_queue_ms": 86_400_000})));
    live.wait_queued(1);
    live.open_gate();
    for mut events in running {
        assert_eq!(assemble(&events.rest(), 1)[0].finish.as_deref(), Some("length"));
    }
    let mut patient = patient;
    assert_eq!(patient.reply().ok()["choices"][0]["finish_reason"], "length");
    live.wait_idle();
    live.chat(json!({"max_tokens": 4})).ok();
}

#[test]
fn a_choice_that_met_its_stop_draws_no_more_and_its_siblings_stay_as_they_were() {
    let body = |more: Value| {
        let mut body = json!({"prompt": "Once upon", "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 100});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let free = Live::start().complete(body(json!({}))).ok();
    let text = |index: usize| free["choices"][index]["text"].as_str().expect("text").to_owned();
    let stop = stop_of(&text(1), &[text(0), text(2)]);
    let mut live = Setup::default().gated().start();
    let mut events = live.stream_complete_gated(body(json!({"stop": [stop]})));
    let mut chunks = Vec::new();
    while !chunks.iter().any(|chunk: &Value| chunk["choices"][0]["index"] == 1 && !chunk["choices"][0]["finish_reason"].is_null()) {
        let Event::Data(chunk) = events.data() else { panic!("the other choices go on") };
        chunks.push(chunk);
    }
    let before = live.stats();
    live.steps(2);
    live.wait("two choices run", |live| live.stats().running == 2);
    let after = live.stats();
    assert!(after.pages_in_use < before.pages_in_use, "{before:?} {after:?}");
    live.open_gate();
    chunks.extend(events.rest());
    let choices = assemble(&chunks, 3);
    assert_eq!((&choices[0].text, &choices[2].text), (&text(0), &text(2)));
    assert_eq!((choices[1].finish.as_deref(), &choices[1].stop_reason), (Some("stop"), &json!(stop)));
    assert!(text(1).starts_with(&(choices[1].text.clone() + &stop)));
    live.wait_idle();
    let stats = live.stats();
    assert_eq!((stats.finished, stats.cancelled), (3, 0));
    assert!(stats.decode_tokens <= 200 + u64::from(GATED_STEPS) + 2, "{stats:?}");
}

/// Steps after which the stop was met.
const GATED_STEPS: u32 = 40;

impl Live {
    fn stream_complete_gated(&self, body: Value) -> crate::client::Events {
        self.steps(GATED_STEPS as usize);
        self.stream_complete(body)
    }
}

/// Characters early in `text` that `others` do not have.
fn stop_of(text: &str, others: &[String]) -> String {
    let chars: Vec<char> = text.chars().take(20).collect();
    let windows = chars.windows(5).skip(2).map(|window| window.iter().collect::<String>());
    let mut fit = windows.filter(|stop| !stop.contains('\u{FFFD}') && others.iter().all(|other| !other.contains(stop)));
    fit.next().expect("a text of its own")
}
