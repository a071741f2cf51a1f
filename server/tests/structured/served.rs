//! The real server on the shipped model's bundle: constrained answers over HTTP.

use crate::client::{Connection, Events, Reply, assemble};
use crate::schemas::schemas;
use oxide_testkit::{ServerProcess, tiny_bundle};
use serde_json::{Value, json};
use std::rc::Rc;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_oxide-run");

thread_local! {
    /// One server a test: it ends with the test's thread.
    static SERVER: Rc<ServerProcess> = Rc::new(start());
}

fn start() -> ServerProcess {
    let server = ServerProcess::start(PROGRAM, &tiny_bundle(), &["--threads", "2"]);
    let start = Instant::now();
    while send(&server, "GET", "/ready", &[]).status != 200 {
        assert!(start.elapsed() < Duration::from_secs(30), "the server is not ready");
        std::thread::sleep(Duration::from_millis(2));
    }
    server
}

/// The server of the running test.
pub(crate) fn server() -> Rc<ServerProcess> {
    SERVER.with(Rc::clone)
}

fn send(server: &ServerProcess, method: &str, path: &str, body: &[u8]) -> Reply {
    let mut connection = Connection::open(server.address());
    connection.send(method, path, &[("content-type", "application/json")], body);
    connection.reply()
}

fn with(mut body: Value, fields: &Value) -> Value {
    let members = fields.as_object().expect("an object");
    body.as_object_mut().expect("an object").extend(members.clone());
    body
}

/// A chat request with further fields.
pub(crate) fn request(fields: &Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": "Write about the sea."}], "max_tokens": 60, "temperature": 1.0, "seed": 1}),
        fields,
    )
}

/// A whole answer.
pub(crate) fn chat(fields: &Value) -> Reply {
    send(&server(), "POST", "/v1/chat/completions", request(fields).to_string().as_bytes())
}

/// The chunks of a streamed answer.
pub(crate) fn stream(fields: &Value) -> Vec<Value> {
    let mut connection = Connection::open(server().address());
    let body = with(request(fields), &json!({"stream": true})).to_string();
    connection.send("POST", "/v1/chat/completions", &[("content-type", "application/json")], body.as_bytes());
    Events::begin(connection).rest()
}

fn content(reply: &Reply) -> (String, String) {
    let choice = reply.ok()["choices"][0].clone();
    let text = choice["message"]["content"].as_str().expect("content").to_owned();
    (text, choice["finish_reason"].as_str().expect("a reason").to_owned())
}

fn schema_format(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "answer", "strict": true, "schema": schema}})
}

#[test]
fn json_object_gives_an_object_without_long_whitespace() {
    for seed in 0..20 {
        let (text, finish) = content(&chat(&json!({"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 40})));
        assert!(serde_json::from_str::<Value>(&text).expect(&text).is_object(), "{text}");
        assert_eq!(finish, "stop", "{text}");
        let run = text.split(|char: char| !char.is_whitespace()).map(str::len).max();
        assert!(run <= Some(64), "{text:?}");
    }
}

#[test]
fn a_sample_of_schemas_validates_over_http_also_with_scant_budgets() {
    for (index, (name, schema)) in schemas().iter().enumerate().step_by(7) {
        let validator = jsonschema::options().should_validate_formats(true).build(schema).expect("a valid schema");
        for max_tokens in [90, 200] {
            let fields = json!({"response_format": schema_format(schema), "seed": index, "max_tokens": max_tokens});
            let reply = chat(&fields);
            if reply.status == 400 {
                assert!(reply.text().contains("shortest output"), "{name}: {}", reply.text());
                continue;
            }
            let (text, finish) = content(&reply);
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}: {text}"));
            assert!(validator.is_valid(&value), "{name}: {text}\n{schema}");
            assert_eq!(finish, "stop", "{name}: {text}");
        }
    }
}

#[test]
fn a_stream_of_constrained_text_equals_the_whole_answer() {
    let schema = json!({"type": "object", "properties": {"title": {"type": "string"}, "pages": {"type": "integer"}}, "required": ["title", "pages"], "additionalProperties": false});
    let fields = json!({"response_format": schema_format(&schema), "max_tokens": 50});
    let streamed = assemble(&stream(&fields), 1);
    assert_eq!((streamed[0].text.clone(), streamed[0].finish.clone().expect("an end")), content(&chat(&fields)));
}

#[test]
fn a_limit_below_the_shortest_output_is_refused() {
    let schema =
        json!({"type": "object", "properties": {"a_long_name_of_a_member": {"type": "integer"}}, "required": ["a_long_name_of_a_member"]});
    let reply = chat(&json!({"response_format": schema_format(&schema), "max_tokens": 2}));
    reply.refused(400, "max_tokens");
    assert!(reply.text().contains("shortest output"), "{}", reply.text());
}

#[test]
fn what_cannot_be_enforced_is_refused_and_the_engine_lives() {
    for (fields, param, word) in [
        (json!({"response_format": {"type": "json_schema"}}), "response_format", "json_schema"),
        (json!({"response_format": schema_format(&json!({"type": "string", "pattern": "("}))}), "response_format", "pattern"),
        (json!({"response_format": schema_format(&json!({"$ref": "http://example.com/x"}))}), "response_format", "$ref"),
        (json!({"response_format": schema_format(&json!({"type": "array", "uniqueItems": true}))}), "response_format", "uniqueItems"),
        (json!({"response_format": schema_format(&json!({"$ref": "#"}))}), "response_format", "$ref"),
        (json!({"response_format": schema_format(&json!({"type": "array", "maxItems": u64::MAX}))}), "response_format", "maxItems"),
        (json!({"guided_regex": "("}), "guided_regex", "regular expression"),
        (json!({"guided_regex": "(".repeat(60_000)}), "guided_regex", "regular expression"),
        (json!({"guided_grammar": "start: nothing"}), "guided_grammar", "nothing"),
        (json!({"structured_outputs": {"regex": "["}}), "structured_outputs.regex", "regular expression"),
        (json!({"guided_choice": []}), "guided_choice", "guided_choice"),
    ] {
        let reply = chat(&fields);
        reply.refused(400, param);
        assert!(reply.text().contains(word), "{word}: {}", reply.text());
    }
    chat(&json!({"max_tokens": 2})).ok();
}

#[test]
fn a_constraint_that_is_complete_beats_min_tokens() {
    let (text, finish) = content(&chat(&json!({"guided_choice": ["yes"], "min_tokens": 20, "max_tokens": 30})));
    assert_eq!((text.as_str(), finish.as_str()), ("yes", "stop"));
    let schema = json!({"type": "object", "additionalProperties": false});
    let (text, finish) = content(&chat(&json!({"response_format": schema_format(&schema), "min_tokens": 30, "max_tokens": 40})));
    assert!(serde_json::from_str::<Value>(&text).is_ok() && finish == "stop", "{text}");
}

#[test]
fn regular_expressions_choices_and_grammars_match_as_a_whole() {
    for seed in 0..10 {
        let (text, _) = content(&chat(&json!({"guided_regex": "[0-9]{3}-[a-f]{2}", "seed": seed})));
        assert!(text.len() == 6 && text.as_bytes()[3] == b'-', "{text}");
        let (text, _) = content(&chat(&json!({"guided_choice": ["red", "green", "blue"], "seed": seed})));
        assert!(["red", "green", "blue"].contains(&text.as_str()), "{text}");
        let (text, _) = content(&chat(&json!({"guided_grammar": "start: \"<\" /[a-z]{2,5}/ \">\"", "seed": seed})));
        assert!(text.starts_with('<') && text.ends_with('>') && text.len() <= 7, "{text}");
        let (text, _) = content(&chat(&json!({"structured_outputs": {"json": {"enum": ["é", 7]}}, "seed": seed})));
        assert!(["\"é\"", "7"].contains(&text.as_str()), "{text}");
    }
}

#[test]
fn ignoring_the_end_does_not_continue_past_a_complete_output() {
    let (text, finish) = content(&chat(&json!({"guided_choice": ["stop here"], "ignore_eos": true, "max_tokens": 40})));
    assert_eq!((text.as_str(), finish.as_str()), ("stop here", "stop"));
}

#[test]
fn log_probabilities_under_a_constraint_are_finite() {
    let reply = chat(&json!({"response_format": {"type": "json_object"}, "logprobs": true, "top_logprobs": 20, "max_tokens": 20}));
    let text = reply.text();
    assert!(!text.contains("NaN") && !text.contains("Infinity"), "{text}");
    for entry in reply.ok()["choices"][0]["logprobs"]["content"].as_array().expect("entries") {
        assert!(entry["logprob"].as_f64().is_some_and(|logprob| (-9999.0..=0.0).contains(&logprob)), "{entry}");
    }
}

#[test]
fn constrained_choices_of_one_request_are_each_complete() {
    let reply = chat(&json!({"n": 3, "response_format": {"type": "json_object"}, "max_tokens": 30})).ok();
    for choice in reply["choices"].as_array().expect("choices") {
        let text = choice["message"]["content"].as_str().expect("content");
        assert!(serde_json::from_str::<Value>(text).is_ok(), "{text}");
    }
}

#[test]
fn completions_take_constraints_too() {
    let body = json!({"prompt": "Colour:", "guided_choice": ["red", "blue"], "max_tokens": 10});
    let reply = send(&server(), "POST", "/v1/completions", body.to_string().as_bytes()).ok();
    assert!(["red", "blue"].contains(&reply["choices"][0]["text"].as_str().expect("text")), "{reply}");
    let body = json!({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]});
    send(&server(), "POST", "/v1/completions", body.to_string().as_bytes()).refused(400, "tools");
}
