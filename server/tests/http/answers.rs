//! Whole answers: shape, limits, stops, choices, batches, determinism, prefix cache.

use crate::harness::{CONTEXT, EOS, Live, MODEL, PAGE, Setup, drawn, tokenizer};
use serde_json::{Value, json};
use std::sync::Barrier;

fn text(reply: &Value) -> &str {
    reply["choices"][0]["text"].as_str().or(reply["choices"][0]["message"]["content"].as_str()).expect("text")
}

/// The text of the ids that the device draws after `prompt`.
fn expected(prompt: &[u32], count: usize) -> String {
    tokenizer().decode(&drawn(prompt, count), true)
}

#[test]
fn a_chat_has_the_shape_of_the_api() {
    let live = Live::start();
    let reply = live.chat(json!({"max_tokens": 8})).ok();
    assert_eq!(reply["object"], "chat.completion");
    assert!(reply["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")) && reply["created"].is_u64());
    assert_eq!((reply["model"].as_str(), reply["system_fingerprint"].as_str()), (Some(MODEL), Some("fp_abababababab")));
    let choice = &reply["choices"][0];
    assert_eq!((choice["index"].as_u64(), choice["message"]["role"].as_str()), (Some(0), Some("assistant")));
    assert_eq!((choice["finish_reason"].as_str(), &choice["logprobs"]), (Some("length"), &Value::Null));
    let count = |name: &str| reply["usage"][name].as_u64().expect(name);
    assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));
}

#[test]
fn a_completion_has_the_shape_of_the_api_and_sixteen_tokens_unless_asked() {
    let live = Live::start();
    let reply = live.complete(json!({"prompt": [1, 2, 3]})).ok();
    assert!(reply["object"] == "text_completion" && reply["id"].as_str().is_some_and(|id| id.starts_with("cmpl-")));
    assert_eq!((reply["usage"]["prompt_tokens"].as_u64(), reply["usage"]["completion_tokens"].as_u64()), (Some(3), Some(16)));
    assert_eq!(text(&reply), expected(&[1, 2, 3], 16));
}

#[test]
fn exactly_max_tokens_are_drawn_when_the_end_is_ignored() {
    let live = Live::start();
    for count in [1, 7, 100] {
        let reply = live.complete(json!({"prompt": "a", "max_tokens": count})).ok();
        assert_eq!((&reply["usage"]["completion_tokens"], &reply["choices"][0]["finish_reason"]), (&json!(count), &json!("length")));
    }
}

#[test]
fn the_same_greedy_request_gives_the_same_text() {
    let live = Live::start();
    let ask = || text(&live.complete(json!({"prompt": "a b", "max_tokens": 20})).ok()).to_owned();
    assert_eq!(ask(), ask());
}

#[test]
fn text_and_its_ids_are_the_same_prompt() {
    let live = Live::start();
    let ids = tokenizer().encode_prompt("The cat sat").expect("ids");
    let (a, b) = (live.complete(json!({"prompt": "The cat sat"})).ok(), live.complete(json!({"prompt": ids})).ok());
    assert_eq!((text(&a), &a["usage"]["prompt_tokens"]), (text(&b), &b["usage"]["prompt_tokens"]));
}

/// What the device says after the prompt `[1]` if nothing stops it.
fn free_text(live: &Live, count: usize) -> String {
    text(&live.complete(json!({"prompt": [1], "max_tokens": count})).ok()).to_owned()
}

#[test]
fn text_is_cut_at_the_first_character_of_a_stop_wherever_it_lies() {
    let live = Live::start();
    let whole = free_text(&live, 12);
    let starts: Vec<usize> = whole.char_indices().map(|(at, _)| at).collect();
    for window in [1, 3, 7, 12] {
        for from in (0..starts.len().saturating_sub(window)).step_by(3) {
            let stop = &whole[starts[from]..starts[from + window]];
            let cut = whole.find(stop).expect("it is there");
            if whole.contains('\u{FFFD}') && stop.contains('\u{FFFD}') {
                continue;
            }
            let reply = live.complete(json!({"prompt": [1], "max_tokens": 12, "stop": stop})).ok();
            assert_eq!(text(&reply), &whole[..cut], "stop {stop:?}");
            let choice = &reply["choices"][0];
            assert_eq!((choice["finish_reason"].as_str(), choice["stop_reason"].as_str()), (Some("stop"), Some(stop)));
            let kept = live.complete(json!({"prompt": [1], "max_tokens": 12, "stop": [stop], "include_stop_str_in_output": true})).ok();
            assert_eq!(text(&kept), &whole[..cut + stop.len()]);
        }
    }
    live.wait_idle();
}

#[test]
fn a_stop_that_never_comes_changes_nothing() {
    let live = Live::start();
    let whole = free_text(&live, 12);
    let last = whole.chars().next_back().expect("text");
    let reply = live.complete(json!({"prompt": [1], "max_tokens": 12, "stop": format!("{last}\u{1}never")})).ok();
    assert_eq!((text(&reply), &reply["choices"][0]["finish_reason"]), (whole.as_str(), &json!("length")));
}

#[test]
fn a_stop_id_ends_the_text_and_is_reported() {
    let live = Live::start();
    let ids = drawn(&[1], 5);
    let stop = ids[3];
    assert!(!ids[..3].contains(&stop));
    let reply = live.complete(json!({"prompt": [1], "max_tokens": 12, "stop_token_ids": [stop]})).ok();
    assert_eq!(text(&reply), tokenizer().decode(&ids[..3], true));
    let choice = &reply["choices"][0];
    assert_eq!((choice["finish_reason"].as_str(), choice["stop_reason"].as_u64()), (Some("stop"), Some(u64::from(stop))));
    assert_eq!(reply["usage"]["completion_tokens"], 4);
    let kept = live.complete(json!({"prompt": [1], "max_tokens": 12, "stop_token_ids": [stop], "include_stop_str_in_output": true})).ok();
    assert_eq!(text(&kept), tokenizer().decode(&ids[..4], true));
}

#[test]
fn the_models_own_end_stops_and_leaves_no_trace_in_the_text() {
    let live = Setup { eos: vec![drawn(&[1], 3)[2]], ..Setup::default() }.start();
    let reply = live.complete(json!({"prompt": [1], "max_tokens": 12, "ignore_eos": false})).ok();
    assert_eq!(text(&reply), expected(&[1], 2));
    let choice = &reply["choices"][0];
    assert_eq!((choice["finish_reason"].as_str(), &choice["stop_reason"]), (Some("stop"), &Value::Null));
    assert_eq!(live.complete(json!({"prompt": [1], "max_tokens": 12})).ok()["usage"]["completion_tokens"], 12, "unless it is ignored");
}

#[test]
fn a_stop_string_that_is_a_special_token_fires_on_its_id() {
    let live = Live::start();
    let force = json!({EOS.to_string(): 100});
    for skip in [true, false] {
        let reply = live.complete(json!({
            "prompt": [1], "max_tokens": 12, "stop": "<|im_end|>", "skip_special_tokens": skip, "logit_bias": force
        }));
        let reply = reply.ok();
        let choice = &reply["choices"][0];
        assert_eq!((choice["finish_reason"].as_str(), choice["stop_reason"].as_str()), (Some("stop"), Some("<|im_end|>")));
        assert_eq!((text(&reply), &reply["usage"]["completion_tokens"]), ("", &json!(1)));
    }
}

#[test]
fn special_tokens_are_shown_on_request() {
    let live = Live::start();
    let ask = |skip: bool| {
        let body = json!({"prompt": [1], "max_tokens": 2, "logit_bias": {EOS.to_string(): 100}, "skip_special_tokens": skip});
        text(&live.complete(body).ok()).to_owned()
    };
    assert_eq!((ask(true).as_str(), ask(false).as_str()), ("", "<|im_end|><|im_end|>"));
}

#[test]
fn min_tokens_delays_the_end() {
    let live = Live::start();
    let force = json!({EOS.to_string(): 50});
    let ask = |min: u32| {
        let body = json!({"prompt": [1], "max_tokens": 40, "min_tokens": min, "logit_bias": force, "ignore_eos": false});
        live.complete(body).ok()["usage"]["completion_tokens"].as_u64().expect("a count")
    };
    assert_eq!((ask(0), ask(20)), (1, 21));
}

#[test]
fn choices_are_numbered_and_their_prompt_is_counted_once() {
    let live = Live::start();
    let reply = live.complete(json!({"prompt": [1, 2, 3], "n": 3, "seed": 5, "temperature": 1, "max_tokens": 6})).ok();
    let indices: Vec<u64> = reply["choices"].as_array().expect("choices").iter().filter_map(|choice| choice["index"].as_u64()).collect();
    assert_eq!(indices, [0, 1, 2]);
    assert_eq!((&reply["usage"]["prompt_tokens"], &reply["usage"]["completion_tokens"]), (&json!(3), &json!(18)));
    let greedy = live.complete(json!({"prompt": [1, 2, 3], "n": 3, "max_tokens": 6})).ok();
    assert!(greedy["choices"].as_array().expect("choices").iter().all(|choice| choice["text"] == greedy["choices"][0]["text"]));
    live.wait_idle();
}

#[test]
fn a_batch_answers_every_prompt_in_order() {
    let live = Live::start();
    let reply = live.complete(json!({"prompt": [[1], [2, 3], [4]], "n": 2, "max_tokens": 4})).ok();
    let texts: Vec<&str> = reply["choices"].as_array().expect("choices").iter().filter_map(|choice| choice["text"].as_str()).collect();
    let (a, b, c) = (expected(&[1], 4), expected(&[2, 3], 4), expected(&[4], 4));
    assert_eq!(texts, [&a, &a, &b, &b, &c, &c]);
    assert_eq!((&reply["usage"]["prompt_tokens"], &reply["usage"]["completion_tokens"]), (&json!(4), &json!(24)));
    let strings = live.complete(json!({"prompt": ["one", "two"], "max_tokens": 2})).ok();
    assert_eq!(strings["choices"].as_array().map(Vec::len), Some(2));
}

#[test]
fn echo_puts_the_prompt_first() {
    let live = Live::start();
    let reply = live.complete(json!({"prompt": "Hello <|im_start|>there", "echo": true, "max_tokens": 3})).ok();
    let ids = tokenizer().encode_prompt("Hello <|im_start|>there").expect("ids");
    assert_eq!(text(&reply), format!("Hello <|im_start|>there{}", expected(&ids, 3)));
    let only = live.complete(json!({"prompt": "Hello", "echo": true, "max_tokens": 0})).ok();
    assert_eq!((text(&only), &only["usage"]["completion_tokens"]), ("Hello", &json!(0)));
    assert_eq!(only["choices"][0]["finish_reason"], "length");
}

#[test]
fn a_banned_token_is_not_drawn() {
    let live = Live::start();
    let first = drawn(&[1], 1)[0];
    let reply = live.complete(json!({"prompt": [1], "max_tokens": 1, "logit_bias": {first.to_string(): -100}})).ok();
    assert_ne!(text(&reply), tokenizer().decode(&[first], true));
}

#[test]
fn tokens_do_not_depend_on_the_company() {
    let live = Live::start();
    let seeded = |index: u32| json!({"prompt": [1, index], "max_tokens": 24, "temperature": 1, "seed": 1});
    let plain = |index: u32| json!({"prompt": [9, index], "max_tokens": 24});
    let alone: Vec<String> = [seeded(0), plain(0)].map(|body| text(&live.complete(body).ok()).to_owned()).into();
    let barrier = Barrier::new(32);
    std::thread::scope(|scope| {
        let asks: Vec<_> = (0..32)
            .map(|index| {
                let (barrier, live) = (&barrier, &live);
                let body = if index % 2 == 0 { seeded(index / 2) } else { plain(index / 2) };
                scope.spawn(move || {
                    barrier.wait();
                    text(&live.complete(body).ok()).to_owned()
                })
            })
            .collect();
        let texts: Vec<String> = asks.into_iter().map(|ask| ask.join().expect("answered")).collect();
        assert_eq!(texts[..2], alone);
    });
    live.wait_idle();
}

#[test]
fn a_seed_repeats_and_its_absence_varies() {
    let live = Live::start();
    let ask = |seed: Value| text(&live.complete(json!({"prompt": [1], "temperature": 1, "seed": seed, "max_tokens": 20})).ok()).to_owned();
    assert_eq!(ask(json!(7)), ask(json!(7)));
    assert_ne!(ask(json!(7)), ask(json!(8)));
    assert_ne!(ask(Value::Null), ask(Value::Null));
}

#[test]
fn a_repeated_prompt_is_found_in_the_cache_and_a_salt_hides_it() {
    let live = Live::start();
    let prompt: Vec<u32> = (0..200).map(|id| id * 7 % 4000).collect();
    let ask = |salt: &str| live.complete(json!({"prompt": prompt, "max_tokens": 8, "cache_salt": salt})).ok();
    let cached = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    let (first, second, salted) = (ask(""), ask(""), ask("mine"));
    assert_eq!(cached(&first), 0);
    assert!(cached(&second) > 0 && cached(&second) < 200 && cached(&second).is_multiple_of(u64::from(PAGE)), "{second}");
    assert_eq!(cached(&salted), 0);
    assert_eq!(text(&first), text(&second));
    assert_eq!(cached(&ask("mine")), cached(&second));
}

#[test]
fn a_preempted_request_says_the_same() {
    let tight = |pages: u32| {
        Setup::default().script(|script| script.kv_pages = pages).engine(|engine| {
            engine.overcommit = true;
            engine.prefix_cache = false;
        })
    };
    let free: Vec<String> = (0..4).map(|index| expected(&[index], 200)).collect();
    let live = tight(20).start();
    std::thread::scope(|scope| {
        let asks: Vec<_> = (0..4)
            .map(|index| {
                let live = &live;
                scope.spawn(move || live.complete(json!({"prompt": [index], "max_tokens": 200})).ok())
            })
            .collect();
        for (ask, free) in asks.into_iter().zip(&free) {
            let reply = ask.join().expect("answered");
            assert_eq!((text(&reply), &reply["usage"]["completion_tokens"]), (free.as_str(), &json!(200)));
        }
    });
    assert!(live.stats().preemptions > 0, "the pool was too large to force a preemption");
    live.wait_idle();
}

#[test]
fn the_effective_trace_is_given_on_request() {
    let live = Live::start();
    let plain = live.complete(json!({"prompt": [1], "max_tokens": 3})).ok();
    assert!(plain["choices"][0].get("trace").is_none());
    let traced = live.complete(json!({"prompt": [1], "max_tokens": 3, "trace": true})).ok();
    let trace = &traced["choices"][0]["trace"];
    for name in ["queue_ms", "prefill_ms", "decode_ms", "kv_page_seconds"] {
        assert!(trace[name].is_f64(), "{trace}");
    }
    let stop = expected(&[1], 1);
    let stopped = live.complete(json!({"prompt": [1], "max_tokens": 400, "stop": stop, "trace": true})).ok();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(stopped["choices"][0]["trace"]["queue_ms"].is_f64());
}

#[test]
fn defaults_come_from_the_bundle_or_are_openais() {
    let card = |neutral: bool| {
        let live = Setup::default().options(|options| options.neutral_sampling = neutral).start();
        live.get("/v1/models").ok()["data"][0]["default_sampling"].clone()
    };
    assert_eq!(card(false).to_string(), r#"{"temperature":0.7,"top_p":0.8,"top_k":20,"min_p":0.0,"repetition_penalty":1.0}"#);
    assert_eq!(card(true).to_string(), r#"{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0,"repetition_penalty":1.0}"#);
}

#[test]
fn a_request_that_can_never_fit_is_refused() {
    let live = Setup::default().script(|script| script.kv_pages = 4).start();
    let reply = live.complete(json!({"prompt": [1], "max_tokens": CONTEXT - 1}));
    assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("context_length_exceeded")));
    live.complete(json!({"prompt": [1], "max_tokens": 10})).ok();
}
