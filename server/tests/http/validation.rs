//! Requests that are refused, each with a 400 that names its field, and the limits of what is accepted.

use crate::client::Reply;
use crate::harness::{CONTEXT, Live, MODEL, Setup, chat_body, streamed};
use serde_json::{Value, json};

fn chat(live: &Live, field: &str, value: Value) -> Reply {
    live.chat(json!({ field: value }))
}

#[test]
fn another_model_is_not_found() {
    let live = Live::start();
    for reply in [live.chat(json!({"model": "no-such"})), live.complete(json!({"model": "no-such", "prompt": "a"}))] {
        reply.refused(404, "model");
        assert_eq!(reply.error()["code"], "model_not_found");
    }
}

#[test]
fn messages_must_be_a_list_of_messages() {
    let live = Live::start();
    chat(&live, "messages", json!([])).refused(400, "messages");
    chat(&live, "messages", json!("hi")).refused(400, "messages");
    live.post("/v1/chat/completions", &json!({"model": MODEL})).refused(400, "messages");
    chat(&live, "messages", json!([{"role": "alien", "content": "a"}])).refused(400, "messages[0].role");
}

#[test]
fn a_developer_speaks_as_system() {
    let live = Live::start();
    let prompt = |role: &str| {
        let messages = json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
        live.post("/v1/chat/completions/render", &json!({"messages": messages})).ok()["prompt"].clone()
    };
    assert_eq!(prompt("developer"), prompt("system"));
}

#[test]
fn numbers_outside_their_range_are_named() {
    let live = Live::start();
    for (field, values) in [
        ("temperature", vec![json!(-0.1), json!(2.1), json!("hot")]),
        ("top_p", vec![json!(1.5), json!(-0.1)]),
        ("presence_penalty", vec![json!(2.5), json!(-2.5)]),
        ("frequency_penalty", vec![json!(2.5), json!(-2.5)]),
        ("repetition_penalty", vec![json!(0), json!(-1)]),
        ("min_p", vec![json!(-0.1), json!(1.1)]),
        ("top_k", vec![json!(-2), json!(1.5)]),
        ("n", vec![json!(0), json!(9), json!(129), json!(100_000), json!(1_u64 << 40)]),
        ("max_tokens", vec![json!(-1), json!(0)]),
        ("seed", vec![json!("x"), json!(1.5)]),
        ("min_tokens", vec![json!(-1), json!(17)]),
        ("top_logprobs", vec![json!(3)]),
        ("stream", vec![json!("yes")]),
        ("stream_options", vec![json!({"include_usage": true})]),
        ("stop", vec![json!([""]), json!(7), json!("x".repeat(1025))]),
        ("stop_token_ids", vec![json!([1_000_000_000]), json!([-1])]),
        ("logit_bias", vec![json!({"abc": 1}), json!({"99999999": 1}), json!({"-1": 1}), json!([1])]),
        ("cache_salt", vec![json!(7), json!("x".repeat(257))]),
        ("deadline_ms", vec![json!(0), json!("1")]),
    ] {
        for value in values {
            chat(&live, field, value).refused(400, field);
        }
    }
    live.chat(json!({"logprobs": true, "top_logprobs": 21})).refused(400, "top_logprobs");
    live.chat(json!({"max_tokens": 1})).ok();
}

#[test]
fn headers_that_cannot_be_read_are_quoted() {
    let live = Live::start();
    let body = chat_body(json!({"max_tokens": 1})).to_string();
    let send = |name: &str, value: &str| live.request("POST", "/v1/chat/completions", &[(name, value)], body.as_bytes());
    for (name, value, found) in [
        ("x-deadline-ms", "abc", "an integer, not `abc`"),
        ("x-deadline-ms", "", "an integer, not empty"),
        ("x-deadline-ms", "+5", "an integer, not `+5`"),
        ("x-deadline-ms", "null", "an integer, not `null`"),
        ("x-deadline-ms", "0", "not 0"),
        ("x-max-queue-ms", "z", "an integer, not `z`"),
        ("x-max-queue-ms", "-1", "not -1"),
        ("x-trace", "foo", "1 or 0, not `foo`"),
        ("x-trace", "", "1 or 0, not empty"),
    ] {
        let reply = send(name, value);
        reply.refused(400, name);
        let message = reply.error()["message"].as_str().map(str::to_owned).expect("a message");
        assert!(message.ends_with(found), "{name}: {value}: {message}");
    }
    for (value, traced) in [("1", true), ("True", true), ("0", false), ("false", false)] {
        assert_eq!(send("x-trace", value).ok()["choices"][0].get("trace").is_some(), traced, "{value}");
    }
    send("x-deadline-ms", " 600000 ").ok();
}

#[test]
fn fields_within_stream_options_are_named_by_their_path() {
    let live = Live::start();
    for name in ["include_usage", "continuous_usage_stats", "include_obfuscation"] {
        let path = format!("stream_options.{name}");
        let reply = live.chat(json!({"stream": true, "stream_options": {name: 1}}));
        reply.refused(400, &path);
        assert_eq!(reply.error()["message"], format!("`{path}` must be true or false, not an integer"));
    }
}

#[test]
fn more_tokens_than_any_context_are_counted_as_they_were_asked_for() {
    let live = Live::start();
    let replies = |field: &str, count: i64| {
        [live.chat(json!({ field: count })), live.complete(json!({"prompt": [5, 6], field: count}))]
            .map(|reply| reply.error()["message"].to_string())
    };
    for message in replies("max_tokens", 1 << 40) {
        assert!(message.contains("1099511627776 for the completion"), "{message}");
    }
    let [_, message] = replies("max_tokens", i64::MAX);
    assert!(message.contains("9223372036854775809 were requested (2 in the prompt, 9223372036854775807 for"), "{message}");
    live.chat(json!({"max_tokens": 1_i64 << 40, "clamp_max_tokens": true})).ok();
}

#[test]
fn a_top_p_of_zero_is_greedy() {
    let live = Live::start();
    let text = |body: Value| live.chat(body).ok()["choices"][0]["message"]["content"].clone();
    assert_eq!(text(json!({"temperature": 1, "top_p": 0, "seed": 1})), text(json!({})));
}

#[test]
fn a_limit_beyond_the_context_is_told_all_numbers() {
    let live = Live::start();
    for limit in [json!(1_u64 << 40), json!(CONTEXT)] {
        let reply = live.chat(json!({"max_tokens": limit}));
        reply.refused(400, "max_tokens");
        let error = reply.error();
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(error["message"].as_str().is_some_and(|text| text.contains(&CONTEXT.to_string()) && !text.contains('-')), "{error}");
    }
}

#[test]
fn a_limit_beyond_the_context_is_lowered_on_request() {
    let live = Live::start();
    let prompt = vec![7; CONTEXT as usize - 10];
    let reply = live.complete(json!({"prompt": prompt, "max_tokens": 65_535, "clamp_max_tokens": true})).ok();
    assert_eq!((&reply["usage"]["completion_tokens"], &reply["choices"][0]["finish_reason"]), (&json!(10), &json!("length")));
    let live = Setup::default().options(|options| options.clamp_max_tokens = true).start();
    assert_eq!(live.complete(json!({"prompt": prompt, "max_tokens": 65_535})).ok()["usage"]["completion_tokens"], 10);
}

#[test]
fn without_a_limit_a_chat_goes_up_to_the_context() {
    let live = Live::start();
    for limit in [json!({"max_tokens": null}), json!({})] {
        let mut body = chat_body(limit);
        if body["max_tokens"] == 16 {
            body.as_object_mut().expect("object").remove("max_tokens");
        }
        let usage = live.post("/v1/chat/completions", &body).ok()["usage"].clone();
        assert_eq!(usage["total_tokens"], CONTEXT);
    }
}

#[test]
fn the_newer_limit_wins() {
    let live = Live::start();
    let reply = live.chat(json!({"max_tokens": 5, "max_completion_tokens": 3})).ok();
    assert_eq!(reply["usage"]["completion_tokens"], 3);
}

#[test]
fn a_prompt_longer_than_the_context_is_told_both_numbers() {
    let live = Live::start();
    for (ids, limit) in [(CONTEXT + 1, None), (CONTEXT, None), (CONTEXT + 186, Some(1))] {
        let mut body = json!({"prompt": vec![7; ids as usize]});
        if let Some(limit) = limit {
            body["max_tokens"] = json!(limit);
        }
        let reply = live.complete(body);
        assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("context_length_exceeded")));
        let message = reply.error()["message"].as_str().expect("text").to_owned();
        assert!(message.contains(&CONTEXT.to_string()) && message.contains(&ids.to_string()) && !message.contains('-'), "{message}");
    }
    let long = "word ".repeat(2 * CONTEXT as usize);
    let reply = live.chat(json!({"messages": [{"role": "user", "content": long}]}));
    assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("context_length_exceeded")));
}

#[test]
fn a_prompt_of_megabytes_is_refused_before_it_is_tokenized_whole() {
    let live = Live::start();
    for text in ["a".repeat(4 << 20), "7".repeat(4 << 20), "é ".repeat(1 << 20)] {
        let reply = live.complete(json!({"prompt": text}));
        assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("context_length_exceeded")));
        let message = reply.error()["message"].as_str().expect("text").to_owned();
        assert!(message.contains(&format!("{} bytes", text.len())) && message.contains(&CONTEXT.to_string()), "{message}");
    }
}

#[test]
fn a_prompt_is_truncated_on_request() {
    let live = Live::start();
    let prompt: Vec<u32> = (0..600).map(|id| id % 100).collect();
    let cut = live.complete(json!({"prompt": prompt, "truncate_prompt_tokens": 20, "max_tokens": 4})).ok();
    let tail = live.complete(json!({"prompt": prompt[580..], "max_tokens": 4})).ok();
    assert_eq!(cut["usage"]["prompt_tokens"], 20);
    assert_eq!(cut["choices"][0]["text"], tail["choices"][0]["text"]);
}

#[test]
fn a_prompt_must_hold_known_tokens() {
    let live = Live::start();
    for prompt in [json!([-1]), json!([1_000_000_000]), json!([4096]), json!([]), json!(""), json!([[]]), json!(["a", ""]), json!({})] {
        let reply = live.complete(json!({"prompt": prompt}));
        assert_eq!(reply.status, 400, "{prompt}");
        assert_eq!(reply.error()["param"], "prompt");
    }
    live.post("/v1/completions", &json!({"model": MODEL})).refused(400, "prompt");
    live.complete(json!({"prompt": "a", "max_tokens": 0})).refused(400, "max_tokens");
    live.complete(json!({"prompt": "a", "logprobs": 21})).refused(400, "logprobs");
    live.complete(json!({"prompt": "a"})).ok();
}

#[test]
fn a_bias_outside_the_range_is_clamped_or_refused_when_strict() {
    let live = Live::start();
    let reply = live.complete(json!({"prompt": "a", "max_tokens": 1, "logit_bias": {"11": 1000}, "logprobs": 0})).ok();
    assert_eq!(reply["choices"][0]["text"], String::from_utf8_lossy(crate::harness::tokenizer().id_to_bytes(11)).as_ref());
    let strict = Setup::default().options(|options| options.strict = true).start();
    let body = json!({"model": MODEL, "prompt": "a", "logit_bias": {"11": 1000}});
    strict.post("/v1/completions", &body).refused(400, "logit_bias");
}

#[test]
fn strict_mode_refuses_what_openai_refuses() {
    let strict = Setup::default().options(|options| options.strict = true).start();
    let post = |body: Value| strict.post("/v1/completions", &body);
    post(json!({"prompt": "a"})).refused(400, "model");
    let reply = post(json!({"model": MODEL, "prompt": "a", "frobnicate": 1}));
    reply.refused(400, "frobnicate");
    assert_eq!(reply.error()["code"], "unknown_parameter");
    post(json!({"model": MODEL, "prompt": "a", "stop": ["1", "2", "3", "4", "5"]})).refused(400, "stop");
    post(json!({"model": MODEL, "prompt": "a", "max_tokens": 2, "stop": ["1", "2", "3", "4"], "user": "u"})).ok();
}

#[test]
fn lenient_mode_takes_the_default_model_and_counts_unknown_fields() {
    let live = Live::start();
    let body = json!({"prompt": "a", "max_tokens": 1, "frobnicate": 1, "stop": ["1", "2", "3", "4", "5"]});
    assert_eq!(live.post("/v1/completions", &body).ok()["model"], MODEL);
    assert_eq!(live.metric("oxide_unknown_fields_total"), 1.0);
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let live = Live::start();
    for (field, value) in [
        ("tools", json!([])),
        ("tool_choice", json!("required")),
        ("functions", json!([])),
        ("response_format", json!({"type": "json_schema"})),
        ("guided_whitespace_pattern", json!(" ")),
        ("guided_decoding_backend", json!("outlines")),
        ("audio", json!({})),
        ("modalities", json!(["audio"])),
        ("prediction", json!({})),
        ("reasoning_effort", json!("low")),
        ("chat_template", json!("{{ 1 }}")),
        ("best_of", json!(2)),
        ("suffix", json!("x")),
        ("store", json!(true)),
        ("use_beam_search", json!(true)),
        ("prompt_logprobs", json!(1)),
        ("echo", json!(true)),
    ] {
        let reply = chat(&live, field, value);
        reply.refused(400, field);
    }
    live.complete(json!({"prompt": "a", "best_of": 2})).refused(400, "best_of");
    live.complete(json!({"prompt": "a", "suffix": "x"})).refused(400, "suffix");
    live.chat(json!({"response_format": {"type": "text"}, "tool_choice": "none", "suffix": "", "best_of": 1, "max_tokens": 1})).ok();
}

#[test]
fn an_image_is_refused_not_dropped() {
    let live = Live::start();
    let content = json!([{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": "data:,"}}]);
    chat(&live, "messages", json!([{"role": "user", "content": content}])).refused(400, "messages[0].content[1].type");
}

#[test]
fn a_refused_stream_is_json_with_a_status() {
    let live = Live::start();
    let reply = live.post("/v1/chat/completions", &streamed(chat_body(json!({"temperature": 3}))));
    reply.refused(400, "temperature");
    assert_eq!(reply.header("content-type"), Some("application/json"));
    for body in [json!({"n": 0}), json!({"model": "x"})] {
        assert!(live.post("/v1/chat/completions", &streamed(chat_body(body))).status >= 400);
    }
}

#[test]
fn tool_calls_of_the_history_reach_the_template_as_objects() {
    let live = Live::start();
    let with = |arguments: Value| {
        let call = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        let messages = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": call},
            {"role": "tool", "tool_call_id": "1", "content": "ok"}
        ]);
        live.post("/v1/chat/completions/render", &json!({"messages": messages}))
    };
    assert_eq!(with(json!("{\"b\": 1, \"a\": [\"<\"]}")).ok()["prompt"], with(json!({"b": 1, "a": ["<"]})).ok()["prompt"]);
    with(json!("{")).refused(400, "messages[1].tool_calls[0].function.arguments");
}
