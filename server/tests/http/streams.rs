//! Streamed answers.

use crate::client::{Event, Events, assemble};
use crate::harness::{EOS, Live, Setup, chat_body, drawn, streamed, tokenizer};
use oxide_runtime::engine::scripted::{DeviceFault, Failing};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_stream_is_events_that_end_with_done_and_leaves_the_connection_usable() {
    let live = Live::start();
    let mut events = live.stream_chat(json!({}));
    assert!(events.headers.iter().any(|(name, value)| name == "cache-control" && value == "no-cache"));
    let chunks = events.rest();
    let choices = assemble(&chunks, 1);
    assert_eq!(choices[0].finish.as_deref(), Some("length"));
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk.get("usage").is_none()));
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["delta"], json!({}), "the finish comes with an empty delta");
    let mut connection = live.connect();
    for _ in 0..2 {
        connection.send("POST", CHAT, &[], streamed(chat_body(json!({"max_tokens": 2}))).to_string().as_bytes());
        assert!(connection.reply().text().ends_with("data: [DONE]\n\n"));
    }
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let live = Live::start();
    for index in 0..50 {
        let messages = json!([{"role": "user", "content": format!("日本語 {index} \u{1FAE0} مرحبا\n    fn main() {{}}")}]);
        let body = json!({"messages": messages, "max_tokens": 24});
        let whole = live.chat(body.clone()).ok();
        let parts = assemble(&live.stream_chat(body).rest(), 1);
        assert_eq!(whole["choices"][0]["message"]["content"], parts[0].text, "{index}");
    }
    let body = json!({"prompt": [[1], [2]], "n": 2, "max_tokens": 9, "temperature": 1, "seed": 3});
    let whole = live.complete(body.clone()).ok();
    let parts = assemble(&live.stream_complete(body).rest(), 4);
    let texts: Vec<&str> = whole["choices"].as_array().expect("choices").iter().filter_map(|choice| choice["text"].as_str()).collect();
    assert_eq!(texts, parts.iter().map(|part| part.text.as_str()).collect::<Vec<_>>());
}

#[test]
fn a_character_split_over_tokens_comes_whole() {
    let pieces = tokenizer().encode_plain("\u{1FAE0}\u{1F979}龜").expect("ids");
    assert!(pieces.len() > 3);
    let live = Live::start();
    let chunks = live.stream_complete(json!({"prompt": pieces, "echo": true, "max_tokens": 1})).rest();
    assert!(assemble(&chunks, 1)[0].text.starts_with("\u{1FAE0}\u{1F979}龜"));
    // The bytes of one character, each its own step: nothing is shown before the last.
    let mut gated = Setup::default().gated().start();
    let first = tokenizer().encode_plain("\u{1FAE0}").expect("ids");
    let lead = json!({"prompt": [1], "max_tokens": 1, "logit_bias": {first[0].to_string(): 50}});
    gated.open_gate();
    assert_eq!(gated.complete(lead.clone()).ok()["choices"][0]["text"], "", "an unfinished character is dropped");
    assert_eq!(assemble(&gated.stream_complete(lead).rest(), 1)[0].text, "");
}

#[test]
fn usage_comes_once_and_only_on_request() {
    let live = Live::start();
    let chunks = live.stream_chat(json!({"stream_options": {"include_usage": true}, "max_tokens": 5})).rest();
    let (last, others) = chunks.split_last().expect("chunks");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 5);
    assert_eq!(last["usage"]["prompt_tokens"], live.chat(json!({"max_tokens": 5})).ok()["usage"]["prompt_tokens"]);
    assert!(others.iter().all(|chunk| chunk.as_object().expect("object").contains_key("usage") && chunk["usage"].is_null()));
    for options in [json!({}), json!({"include_usage": false}), Value::Null] {
        let chunks = live.stream_chat(json!({"stream_options": options})).rest();
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"] != json!([])));
    }
}

#[test]
fn continuous_usage_counts_drawn_tokens() {
    let live = Live::start();
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let chunks = live.stream_complete(json!({"prompt": [1], "max_tokens": 30, "stream_options": options})).rest();
    let counts: Vec<u64> = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().expect("a count")).collect();
    assert!(counts.is_sorted() && counts.last() == Some(&30));
}

#[test]
fn no_beginning_of_a_completed_stop_is_ever_sent() {
    let live = Live::start();
    let ids = drawn(&[1], 14);
    let whole = tokenizer().decode(&ids, true);
    let chars: Vec<(usize, char)> = whole.char_indices().collect();
    for from in [4, 9, 15] {
        let stop: String = chars[from..from + 8].iter().map(|(_, char)| *char).collect();
        let cut = whole.find(&stop).expect("it is there");
        let parts = assemble(&live.stream_complete(json!({"prompt": [1], "max_tokens": 14, "stop": stop})).rest(), 1);
        assert_eq!(
            (parts[0].text.as_str(), parts[0].finish.as_deref(), &parts[0].stop_reason),
            (&whole[..cut], Some("stop"), &json!(stop))
        );
    }
    let tail: String = chars[chars.len() - 3..].iter().map(|(_, char)| *char).collect();
    let parts = assemble(&live.stream_complete(json!({"prompt": [1], "max_tokens": 14, "stop": format!("{tail}\u{1}")})).rest(), 1);
    assert_eq!(parts[0].text, whole, "held text is sent if the stop does not complete");
}

#[test]
fn streamed_log_probabilities_are_those_of_the_whole_answer() {
    let live = Live::start();
    let body = json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 20});
    let whole = live.chat(body.clone()).ok();
    let chunks = live.stream_chat(body).rest();
    let entries: Vec<Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array()).flatten().cloned().collect();
    assert_eq!(json!(entries), whole["choices"][0]["logprobs"]["content"]);
}

#[test]
fn comments_keep_a_silent_stream_alive_from_the_start() {
    let mut live = Setup::default().options(|options| options.keep_alive = Duration::from_millis(30)).gated().start();
    let start = Instant::now();
    let mut events = live.stream_chat(json!({"max_tokens": 3}));
    assert!((0..4).all(|_| events.next() == Some(Event::Comment)));
    assert!(start.elapsed() >= Duration::from_millis(60));
    live.open_gate();
    assert_eq!(assemble(&events.rest(), 1)[0].finish.as_deref(), Some("length"));
}

#[test]
fn comments_keep_a_queued_stream_alive() {
    let live = Setup::default().options(|options| options.keep_alive = Duration::from_millis(30)).paused().start();
    let mut queued = live.stream_chat(json!({"max_tokens": 3}));
    live.wait_queued(1);
    assert!((0..3).all(|_| queued.next() == Some(Event::Comment)));
    live.resume();
    assemble(&queued.rest(), 1);
}

#[test]
fn a_failure_under_way_is_an_error_event_and_done() {
    let live = Setup::default().script(|script| script.faults = vec![DeviceFault::submitting(4, Failing::Error)]).gated().start();
    let mut events = live.stream_chat(json!({"max_tokens": 100}));
    live.steps(1);
    assert!(matches!(events.data(), Event::Data(_)), "the stream began");
    live.steps(4);
    let chunks = events.rest();
    let error = &chunks.last().expect("chunks")["error"];
    assert_eq!((error["type"].as_str(), error["code"].as_str()), (Some("server_error"), Some("engine_failed")));
    assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk.get("error").is_none()));
}

#[test]
fn tokens_come_as_they_are_drawn() {
    let live = Setup::default().gated().start();
    let mut events = live.stream_chat(json!({"max_tokens": 3}));
    live.steps(1);
    let Event::Data(role) = events.data() else { panic!("a chunk") };
    assert_eq!(role["choices"][0]["delta"]["role"], "assistant");
    let Event::Data(first) = events.data() else { panic!("a chunk") };
    assert!(first["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()));
    live.steps(3);
    let rest = events.rest();
    assert_eq!(rest.last().expect("chunks")["choices"][0]["finish_reason"], "length");
}

#[test]
fn an_answer_without_text_still_names_the_role_and_finishes() {
    let live = Live::start();
    let chunks = live.stream_chat(json!({"logit_bias": {EOS.to_string(): 50}, "ignore_eos": false})).rest();
    assert_eq!(chunks.len(), 2);
    assert_eq!((assemble(&chunks, 1)[0].text.as_str(), chunks[1]["choices"][0]["finish_reason"].as_str()), ("", Some("stop")));
}

#[test]
fn an_echo_is_streamed_before_the_text() {
    let live = Live::start();
    for logprobs in [Value::Null, json!(1)] {
        let body = json!({"prompt": "Hello there", "echo": true, "max_tokens": 3, "logprobs": logprobs});
        let whole = live.complete(body.clone()).ok();
        let chunks = live.stream_complete(body).rest();
        assert_eq!(assemble(&chunks, 1)[0].text, whole["choices"][0]["text"].as_str().expect("text"));
    }
    let only = live.stream_complete(json!({"prompt": "Hello there", "echo": true, "max_tokens": 0})).rest();
    assert_eq!(assemble(&only, 1)[0].text, "Hello there");
}

#[test]
fn a_trace_comes_with_the_finish() {
    let live = Live::start();
    let stop = tokenizer().decode(&drawn(&[1], 1), true);
    for stop in [Value::Null, json!(stop)] {
        let chunks = live.stream_complete(json!({"prompt": [1], "max_tokens": 9, "trace": true, "stop": stop})).rest();
        assert!(chunks.last().expect("chunks")["choices"][0]["trace"]["queue_ms"].is_f64());
    }
}

/// Streams that are read slowly lose nothing.
#[test]
fn a_slow_reader_gets_every_token() {
    let live = Live::start();
    let mut events: Events = live.stream_complete(json!({"prompt": [1], "max_tokens": 400}));
    live.wait("drawn", |live| live.stats().running == 0);
    assert_eq!(assemble(&events.rest(), 1)[0].text, tokenizer().decode(&drawn(&[1], 400), true));
}
