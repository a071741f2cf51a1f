//! Over HTTP: any limit that is taken is enough, from the shortest output on that is told.

use crate::client::Connection;
use crate::served::{chat, request, server};
use serde_json::{Value, json};

/// Patterns of strings that are hard to end by luck.
const PATTERNS: [&str; 9] = ["b", "ab+c", "(?i)abc", r"\d{3}$", "^[a-z]*foo$", "foo.*bar", "[A-Z]{2}-[0-9]{4}$", "日本$", "^[^\"]*\"$"];
/// The same for whole texts.
const WHOLE: [&str; 5] = [".*foo", "[a-z]*foo", "a.*b", "(?i).*END", "([a-z]+ ){3}[.]"];

/// Tokens of the shortest output that a request is told.
fn shortest(fields: &Value) -> u64 {
    let mut connection = Connection::open(server().address());
    let body = request(fields).to_string();
    connection.send("POST", "/v1/explain", &[("content-type", "application/json")], body.as_bytes());
    let reply = connection.reply().ok();
    reply["constraint"]["shortest_tokens"].as_u64().unwrap_or_else(|| panic!("not known: {reply}"))
}

fn with(fields: &Value, more: Value) -> Value {
    let mut fields = fields.clone();
    fields.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    fields
}

fn check(fields: &Value, check: impl Fn(&Value)) {
    let shortest = shortest(fields);
    for (seed, more) in [0, 1, 3, 10].into_iter().flat_map(|more| [1, 2].map(|seed| (seed, more))) {
        let reply = chat(&with(fields, json!({"max_tokens": shortest + more, "seed": seed}))).ok();
        check(&reply["choices"][0]);
    }
}

fn refused_below(fields: &Value) {
    if let below @ 1.. = shortest(fields) - 1 {
        chat(&with(fields, json!({"max_tokens": below}))).refused(400, "max_tokens");
    }
}

fn schema(pattern: &str) -> Value {
    json!({"type": "object", "properties": {"it": {"type": "string", "pattern": pattern}}, "required": ["it"], "additionalProperties": false})
}

fn closed(choice: &Value, finish: &str) {
    assert_eq!(choice["finish_reason"], finish, "{choice}");
}

#[test]
fn answers_of_any_pattern_are_whole_whatever_the_limit_that_is_taken() {
    for pattern in PATTERNS {
        let schema = schema(pattern);
        let fields = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "it", "strict": true, "schema": schema}}});
        check(&fields, |choice| {
            closed(choice, "stop");
            let text = choice["message"]["content"].as_str().expect("content");
            let value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{pattern}: {error}: {text}"));
            assert!(jsonschema::is_valid(&schema, &value), "{pattern}: {text}");
        });
        refused_below(&fields);
    }
}

#[test]
fn answers_of_any_regular_expression_are_whole_whatever_the_limit_that_is_taken() {
    for pattern in WHOLE {
        let fields = json!({"guided_regex": pattern});
        check(&fields, |choice| {
            closed(choice, "stop");
            let text = choice["message"]["content"].as_str().expect("content");
            assert!(llguidance::derivre::Regex::new(pattern).expect(pattern).is_match(text), "{pattern}: {text:?}");
        });
        refused_below(&fields);
    }
}

#[test]
fn calls_of_any_pattern_are_whole_whatever_the_limit_that_is_enough_for_them() {
    for pattern in PATTERNS {
        let schema = schema(pattern);
        let tools = json!([{"type": "function", "function": {"name": "f", "strict": true, "parameters": schema}}]);
        let valid = |choice: &Value| {
            for call in choice["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("no call: {choice}")) {
                let arguments = call["function"]["arguments"].as_str().expect("text");
                let value = serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{pattern}: {error}: {arguments}"));
                assert!(jsonschema::is_valid(&schema, &value), "{pattern}: {arguments}");
            }
        };
        check(&json!({"tools": tools, "tool_choice": "required"}), |choice| {
            closed(choice, "tool_calls");
            valid(choice);
        });
        check(&json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}}), |choice| {
            closed(choice, "stop");
            valid(choice);
        });
    }
}

/// The id of the mark that begins a call in the shipped tokenizer.
const OPEN: u32 = 4094;

#[test]
fn a_strict_call_of_any_pattern_that_the_model_begins_is_whole() {
    for pattern in PATTERNS {
        let schema = schema(pattern);
        let tools = json!([{"type": "function", "function": {"name": "f", "strict": true, "parameters": schema}}]);
        let forced = json!({"tools": tools, "tool_choice": "required"});
        for (seed, more) in [2, 4, 10, 25].into_iter().enumerate() {
            let bias = json!({OPEN.to_string(): 100});
            let fields = json!({"tools": tools, "seed": seed, "max_tokens": shortest(&forced) + more, "logit_bias": bias});
            let reply = chat(&fields).ok();
            for call in reply["choices"][0]["message"]["tool_calls"].as_array().into_iter().flatten() {
                let arguments = call["function"]["arguments"].as_str().expect("text");
                let value = serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{pattern}: {error}: {arguments}"));
                assert!(jsonschema::is_valid(&schema, &value), "{pattern}: {arguments}");
            }
        }
    }
}

#[test]
fn a_constraint_that_could_never_close_is_refused() {
    for (fields, param) in [
        (json!({"guided_regex": "a{1000000}"}), "guided_regex"),
        (json!({"guided_json": {"type": "string", "pattern": "^a{100000}$"}}), "guided_json"),
    ] {
        let reply = chat(&fields);
        reply.refused(400, param);
        assert!(reply.text().contains("complete output"), "{}", reply.text());
    }
}
