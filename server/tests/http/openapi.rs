//! The server's own description says what the server does.

use crate::harness::{Live, Setup, greedy_body};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const SOURCES: [&str; 7] = [
    include_str!("../../src/openai/chat_request.rs"),
    include_str!("../../src/openai/common.rs"),
    include_str!("../../src/openai/completion_request.rs"),
    include_str!("../../src/openai/rules.rs"),
    include_str!("../../src/openai/tools.rs"),
    include_str!("../../src/http/tokenize.rs"),
    include_str!("../../src/http/generate.rs"),
];

fn document() -> Value {
    Live::start().get("/openapi.json").ok()
}

fn properties(document: &Value, schema: &str) -> BTreeSet<String> {
    document["components"]["schemas"][schema]["properties"].as_object().expect("properties").keys().cloned().collect()
}

/// The text between each `before` and the next quote.
fn quoted<'a>(source: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    source.split(before).skip(1).filter_map(|rest| rest.split('"').next())
}

#[test]
fn every_route_is_described_and_every_described_route_exists() {
    let document = document();
    let described: BTreeSet<String> = document["paths"].as_object().expect("paths").keys().cloned().collect();
    let routes: BTreeSet<String> =
        quoted(include_str!("../../src/http/router.rs"), ".route(\"").map(|path| path.replace("{*id}", "{id}")).collect();
    assert_eq!(described, routes);
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let live = Live::start();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for method in methods.as_object().expect("methods").keys() {
            let reply = live.request(&method.to_uppercase(), path, &[], b"");
            let missing = reply.status == 405 || (reply.status == 404 && reply.error()["code"] == "unknown_url");
            assert!(!missing, "{method} {path}: {}", reply.status);
        }
    }
}

#[test]
fn every_described_field_is_known_to_a_strict_server() {
    let document = document();
    let strict = Setup::default().options(|options| options.strict = true).start();
    for (schema, path, minimal) in [
        ("CompletionRequest", "/v1/completions", greedy_body(json!({"prompt": "a", "max_tokens": 1}))),
        ("ChatRequest", "/v1/chat/completions", greedy_body(json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}))),
        ("TokenizeRequest", "/tokenize", json!({"model": "oxide-tiny", "prompt": "a"})),
        ("DetokenizeRequest", "/detokenize", json!({"model": "oxide-tiny", "tokens": [1]})),
    ] {
        let mut body = minimal;
        for name in properties(&document, schema) {
            body.as_object_mut().expect("an object").entry(name).or_insert(Value::Null);
        }
        assert_eq!(strict.post(path, &body).status, 200, "{path}: {}", strict.post(path, &body).text());
    }
}

#[test]
fn every_field_that_is_read_is_described() {
    let document = document();
    let described: BTreeSet<String> = document["components"]["schemas"]
        .as_object()
        .expect("schemas")
        .values()
        .flat_map(|schema| schema["properties"].as_object().into_iter().flatten())
        .flat_map(|(name, schema)| {
            let inner = schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone());
            std::iter::once(name.clone()).chain(inner).collect::<Vec<_>>()
        })
        .collect();
    let mut read = 0;
    for source in SOURCES.map(|source| source.split("#[cfg(test)]").next().expect("code")) {
        let readers = ["boolean", "string", "integer", "array", "object", "take", "has"].map(|reader| format!("fields.{reader}(\""));
        let direct = readers.iter().flat_map(|reader| quoted(source, reader));
        let other =
            quoted(source, "number(fields, \"").chain(quoted(source, "take_millis(fields, \"")).chain(quoted(source, "options.boolean(\""));
        let refused = quoted(source, "    (\"").chain(quoted(source, "refuse_unless(fields, \""));
        for name in direct.chain(other).chain(refused) {
            read += 1;
            assert!(described.contains(name), "`{name}` is read and not described");
        }
    }
    assert!(read > 60, "found only {read} fields: the sources changed their form");
}
