//! Tools over HTTP: forced calls, streams of deltas, histories, refusals.

use crate::client::Connection;
use crate::served::{chat, server, stream};
use oxide_run::openai::choice::{Choice, ChoiceRules};
use oxide_run::openai::common::Stop;
use oxide_run::tools::CallForm;
use oxide_text::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

pub(crate) fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather", "description": "temp > 10 & humidity < 50 (user's choice)",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"], "additionalProperties": false,
        },
    }})
}

pub(crate) fn time() -> Value {
    json!({"type": "function", "function": {"name": "get_time", "parameters": {
        "type": "object", "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"], "additionalProperties": false,
        "$defs": {"zone": {"type": "integer", "minimum": -12, "maximum": 14}},
    }}})
}

fn fields(choice: Value, more: Value) -> Value {
    let mut fields = json!({"tools": [weather(), time()], "tool_choice": choice, "max_tokens": 120});
    fields.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    fields
}

fn named() -> Value {
    json!({"type": "function", "function": {"name": "get_weather"}})
}

pub(crate) fn check_call(call: &Value) {
    assert_eq!(call["type"], "function");
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("call_")), "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().expect("text")).expect("JSON");
    let tool =
        [weather(), time()].into_iter().find(|tool| tool["function"]["name"] == call["function"]["name"]).expect("an offered function");
    assert!(jsonschema::is_valid(&tool["function"]["parameters"], &arguments), "{arguments}");
}

#[test]
fn a_required_call_names_a_tool_and_follows_its_schema() {
    for seed in 0..8 {
        let reply = chat(&fields(json!("required"), json!({"seed": seed}))).ok();
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{reply}");
        assert!(choice["message"]["content"].is_null(), "{reply}");
        let calls = choice["message"]["tool_calls"].as_array().expect("calls");
        calls.iter().for_each(check_call);
        let ids: std::collections::BTreeSet<&str> = calls.iter().map(|call| call["id"].as_str().expect("id")).collect();
        assert_eq!(ids.len(), calls.len(), "ids are unique");
    }
}

#[test]
fn without_parallel_calls_there_is_one() {
    for seed in 0..4 {
        let reply = chat(&fields(json!("required"), json!({"seed": seed, "parallel_tool_calls": false}))).ok();
        assert_eq!(reply["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{reply}");
    }
}

#[test]
fn a_named_call_is_that_function_and_stops() {
    let reply = chat(&fields(named(), json!({}))).ok();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{reply}");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"]["name"], "get_weather");
    check_call(call);
}

/// Puts the deltas of a stream together, checking what each promises.
pub(crate) fn calls_of(chunks: &[Value]) -> (Vec<(String, String)>, String, String) {
    let (mut calls, mut content, mut finish): (Vec<(String, String)>, _, _) = (Vec::new(), String::new(), String::new());
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices")) {
        content.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        if let Some(reason) = choice["finish_reason"].as_str() {
            reason.clone_into(&mut finish);
        }
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = delta["index"].as_u64().expect("every delta has an index") as usize;
            if index == calls.len() {
                assert!(delta["id"].is_string() && delta["type"] == "function", "{delta}");
                calls.push((delta["function"]["name"].as_str().expect("a name").to_owned(), String::new()));
            } else {
                assert!(delta.get("id").is_none() && delta["function"].get("name").is_none(), "{delta}");
            }
            calls[index].1.push_str(delta["function"]["arguments"].as_str().expect("arguments"));
        }
    }
    (calls, content, finish)
}

pub(crate) fn whole_calls(reply: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let calls = reply["choices"][0]["message"]["tool_calls"].as_array().into_iter().flatten();
    calls.map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"]))).collect()
}

#[test]
fn streamed_calls_equal_the_whole_ones() {
    for (choice, seed) in [(json!("required"), 1), (json!("required"), 5), (named(), 2), (json!("auto"), 3)] {
        let fields = fields(choice.clone(), json!({"seed": seed}));
        let (calls, content, finish) = calls_of(&stream(&fields));
        let reply = chat(&fields).ok();
        assert_eq!(calls, whole_calls(&reply), "{choice}");
        assert_eq!(finish, reply["choices"][0]["finish_reason"], "{choice}");
        assert_eq!(content, reply["choices"][0]["message"]["content"].as_str().unwrap_or_default());
    }
}

#[test]
fn a_call_that_is_cut_ends_with_length() {
    let fields = fields(json!("required"), json!({"max_tokens": 4}));
    assert_eq!(chat(&fields).ok()["choices"][0]["finish_reason"], "length");
    assert_eq!(calls_of(&stream(&fields)).2, "length");
}

#[test]
fn a_forbidden_call_leaves_no_trace() {
    for seed in 0..4 {
        let reply = chat(&fields(json!("none"), json!({"seed": seed, "max_tokens": 40}))).ok();
        let message = &reply["choices"][0]["message"];
        assert!(message.get("tool_calls").is_none(), "{reply}");
        assert!(!message["content"].as_str().expect("content").contains("tool_call>"), "{reply}");
    }
}

#[test]
fn tools_that_make_no_sense_are_refused() {
    for (body, param) in [
        (json!({"tools": []}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (fields(json!({"type": "function", "function": {"name": "other"}}), json!({})), "tool_choice"),
        (fields(json!("sometimes"), json!({})), "tool_choice"),
        (fields(json!("auto"), json!({"guided_grammar": "start: \"a\""})), "guided_grammar"),
        (json!({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}), "tools"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}]}),
            "tools",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}], "tool_choice": "required"}),
            "tools",
        ),
    ] {
        chat(&body).refused(400, param);
    }
}

fn rendered(messages: &Value) -> (u16, String) {
    let body = json!({"messages": messages, "tools": [weather()]}).to_string();
    let mut connection = Connection::open(server().address());
    connection.send("POST", "/v1/chat/completions/render", &[("content-type", "application/json")], body.as_bytes());
    let reply = connection.reply();
    let text = reply.json()["prompt"].as_str().unwrap_or_default().to_owned();
    (reply.status, text)
}

#[test]
fn a_history_of_calls_is_rendered_with_its_arguments_decoded() {
    let history = |arguments: &str| {
        json!([
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "21"},
        ])
    };
    let (status, prompt) = rendered(&history("{\"unit\":\"celsius\",\"city\":\"Köln\"}"));
    assert_eq!(status, 200);
    assert!(
        prompt
            .contains("<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"unit\": \"celsius\", \"city\": \"Köln\"}}\n</tool_call>"),
        "{prompt}"
    );
    assert!(prompt.contains("<tool_response>\n21\n</tool_response>"), "{prompt}");
    assert!(prompt.contains("\"description\": \"temp > 10 & humidity < 50 (user's choice)\""), "{prompt}");
    assert_eq!(rendered(&history("{\"unit\":")).0, 400);
}

#[test]
fn marks_that_are_special_tokens_reach_the_parser() {
    let path = oxide_testkit::repo().join("profiles/oxide-tiny/tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).expect("the shipped tokenizer")).expect("JSON");
    for token in file["added_tokens"].as_array_mut().expect("tokens") {
        token["special"] = true.into();
    }
    let tokenizer = Arc::new(Tokenizer::from_json(file.to_string().as_bytes()).expect("it loads"));
    let text = "Sure.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let mut ids = tokenizer.encode_with_control(text).expect("it encodes");
    // Another special token in between stays hidden.
    ids.insert(1, 4092);
    let rules = ChoiceRules {
        tokenizer,
        stop: Stop::default(),
        eos: vec![4093],
        skip_special_tokens: true,
        calls: Some(CallForm::Hermes { parallel: true, alone: false }),
    };
    let mut choice = Choice::new(&Arc::new(rules));
    ids.into_iter().chain([4093]).for_each(|id| choice.token(id, None));
    assert_eq!(choice.text, "Sure.");
    assert_eq!(choice.ended.expect("an end").finish, "tool_calls");
    let names: Vec<&str> = choice.calls.iter().filter_map(|call| call.head.as_ref()).map(|(_, name)| name.as_str()).collect();
    let arguments: String = choice.calls.iter().map(|call| call.arguments.as_str()).collect();
    assert_eq!((names, arguments.as_str()), (vec!["f"], "{\"a\": 1}"));
}
