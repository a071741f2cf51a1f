//! Log-probabilities of chats and completions.

use crate::harness::{EOS, Live, Setup, drawn, tokenizer};
use serde_json::{Value, json};

fn content(reply: &Value) -> &Vec<Value> {
    reply["choices"][0]["logprobs"]["content"].as_array().expect("logprobs")
}

fn bytes(entry: &Value) -> Vec<u8> {
    entry["bytes"].as_array().expect("bytes").iter().map(|byte| byte.as_u64().expect("a byte") as u8).collect()
}

fn shown(reply: &Value) -> String {
    reply["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

/// A bias that beats every logit of the device.
fn forced(ids: &[u32]) -> Value {
    ids.iter().map(|id| (id.to_string(), json!(50))).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn every_token_has_its_alternatives_falling() {
    let live = Live::start();
    let reply = live.chat(json!({"logprobs": true, "top_logprobs": 5, "max_tokens": 12})).ok();
    assert_eq!(content(&reply).len(), 12);
    for entry in content(&reply) {
        assert!(entry["logprob"].as_f64().is_some_and(|logprob| logprob <= 0.0));
        let top = entry["top_logprobs"].as_array().expect("alternatives");
        let logprobs: Vec<f64> = top.iter().filter_map(|entry| entry["logprob"].as_f64()).collect();
        assert!(logprobs.len() == 5 && logprobs.is_sorted_by(|a, b| a >= b));
        assert_eq!(top[0]["token"], entry["token"], "greedy draws the likeliest");
    }
    assert!(
        live.chat(json!({"logprobs": true, "max_tokens": 2})).ok()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == json!([])
    );
}

/// Messages after which the device draws valid UTF-8 in 12 tokens.
fn clean_messages(live: &Live) -> Value {
    let messages = (0..100).map(|index| json!([{"role": "user", "content": format!("Hello {index}")}]));
    let clean = |messages: &Value| !shown(&live.chat(json!({"messages": messages, "max_tokens": 12})).ok()).contains('\u{FFFD}');
    messages.into_iter().find(clean).expect("some conversation is clean")
}

#[test]
fn bytes_of_all_entries_are_the_text() {
    let live = Live::start();
    let messages = clean_messages(&live);
    let reply = live.chat(json!({"messages": messages, "logprobs": true, "top_logprobs": 20, "max_tokens": 12})).ok();
    let joined: Vec<u8> = content(&reply).iter().flat_map(bytes).collect();
    assert_eq!(joined, shown(&reply).as_bytes());
    assert_eq!(content(&reply).len(), 12);
}

#[test]
fn a_character_split_over_tokens_has_its_bytes_in_its_entries() {
    let live = Live::start();
    let pieces = tokenizer().encode_plain("\u{1FAE0}").expect("ids");
    assert!(pieces.len() > 1, "the character is no single token");
    let echo = json!({"prompt": pieces, "echo": true, "max_tokens": 0, "logprobs": 5});
    let reply = live.complete(echo).ok();
    let logprobs = &reply["choices"][0]["logprobs"];
    assert_eq!(reply["choices"][0]["text"], "\u{1FAE0}");
    assert_eq!(logprobs["text_offset"], json!(vec![0; pieces.len()]));
    let spelled = "\u{1FAE0}".bytes().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    let tokens: String =
        logprobs["tokens"].as_array().expect("tokens").iter().filter_map(|token| token.as_str()?.strip_prefix("bytes:")).collect();
    assert_eq!(tokens, spelled);
    assert!(!reply.to_string().contains('\u{FFFD}'));
}

#[test]
fn the_end_token_keeps_its_name_and_shows_no_bytes() {
    let live = Live::start();
    let reply = live.chat(json!({"logprobs": true, "top_logprobs": 2, "logit_bias": forced(&[EOS]), "ignore_eos": false})).ok();
    assert_eq!(content(&reply).len(), 1);
    let entry = &content(&reply)[0];
    assert_eq!((entry["token"].as_str(), bytes(entry).len()), (Some("<|im_end|>"), 0));
    assert_eq!(entry["top_logprobs"][0]["token"], "<|im_end|>");
}

#[test]
fn tokens_hidden_by_a_stop_have_no_entry() {
    let live = Live::start();
    let messages = clean_messages(&live);
    let whole = live.chat(json!({"messages": messages, "logprobs": true, "max_tokens": 12})).ok();
    let tokens: Vec<String> = content(&whole).iter().map(|entry| entry["token"].as_str().expect("text").to_owned()).collect();
    let stop: String = tokens[5].chars().skip(1).chain(tokens[6].chars()).collect();
    let reply = live.chat(json!({"messages": messages, "logprobs": true, "max_tokens": 12, "stop": stop})).ok();
    let joined: Vec<u8> = content(&reply).iter().flat_map(bytes).collect();
    assert_eq!(joined, shown(&reply).as_bytes());
    assert_eq!(content(&reply).len(), 6);
}

#[test]
fn completion_arrays_have_one_length_and_true_offsets() {
    let live = Live::start();
    let reply = live.complete(json!({"prompt": [1], "max_tokens": 20, "logprobs": 2})).ok();
    let logprobs = &reply["choices"][0]["logprobs"];
    let array = |name: &str| logprobs[name].as_array().unwrap_or_else(|| panic!("{name}"));
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(array(name).len(), 20, "{name}");
    }
    let text: Vec<char> = reply["choices"][0]["text"].as_str().expect("text").chars().collect();
    let offsets: Vec<usize> = array("text_offset").iter().map(|offset| offset.as_u64().expect("offset") as usize).collect();
    assert!(offsets.is_sorted());
    for (token, offset) in array("tokens").iter().zip(offsets) {
        let token = token.as_str().expect("text");
        let here: String = text[offset..].iter().take(token.chars().count()).collect();
        assert!(token == here || token.starts_with("bytes:"), "{token:?} at {offset}, found {here:?}");
    }
    for (top, token) in array("top_logprobs").iter().zip(array("tokens")) {
        let top = top.as_object().expect("alternatives");
        assert!((2..=3).contains(&top.len()) && top.contains_key(token.as_str().expect("text")));
    }
}

#[test]
fn echoed_prompts_have_log_probabilities_but_for_the_first_token() {
    let live = Live::start();
    let prompt = "The cat sat on the mat";
    let reply = live.complete(json!({"prompt": prompt, "max_tokens": 3, "logprobs": 1, "echo": true})).ok();
    let logprobs = &reply["choices"][0]["logprobs"];
    let ids = tokenizer().encode_prompt(prompt).expect("ids");
    assert_eq!(logprobs["tokens"].as_array().map(Vec::len), Some(ids.len() + 3));
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
    assert!(logprobs["token_logprobs"][1].is_number());
    let text = reply["choices"][0]["text"].as_str().expect("text");
    let offsets: Vec<usize> =
        logprobs["text_offset"].as_array().expect("offsets").iter().map(|offset| offset.as_u64().expect("offset") as usize).collect();
    assert!(offsets.is_sorted() && offsets[ids.len()] == prompt.chars().count() && offsets[ids.len() + 2] <= text.chars().count());
    let scored = live.complete(json!({"prompt": prompt, "max_tokens": 0, "logprobs": 1, "echo": true})).ok();
    assert_eq!(scored["choices"][0]["text"], prompt);
    assert_eq!(scored["choices"][0]["logprobs"]["token_logprobs"].as_array().map(Vec::len), Some(ids.len()));
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    live.wait_idle();
}

#[test]
fn an_impossible_token_has_the_least_log_probability_and_no_infinity_is_sent() {
    let live = Live::start();
    let first = drawn(&[1], 1)[0];
    let reply = live.complete(json!({"prompt": [1], "max_tokens": 2, "logprobs": 20, "logit_bias": forced(&[first])}));
    for literal in ["NaN", "Infinity", "inf"] {
        assert!(!reply.text().contains(literal));
    }
    let top = reply.ok()["choices"][0]["logprobs"]["top_logprobs"][0].clone();
    assert!(
        top.as_object()
            .expect("alternatives")
            .values()
            .all(|logprob| logprob.as_f64().is_some_and(|value| (-9999.0..=0.0).contains(&value)))
    );
}

#[test]
fn logits_that_are_no_numbers_fail_that_request_only() {
    let live = Setup::default().script(|script| script.poison = Some(99)).start();
    for body in [json!({"prompt": [99]}), json!({"prompt": [99], "logprobs": 3})] {
        let reply = live.complete(body);
        assert_eq!((reply.status, reply.error()["type"].as_str()), (500, Some("server_error")));
    }
    live.complete(json!({"prompt": [98], "logprobs": 3})).ok();
    live.wait_idle();
}
