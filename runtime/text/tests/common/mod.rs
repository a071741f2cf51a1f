//! The tokenizers that the tests share.

use oxide_text::Tokenizer;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// `tokenizer.json` of the shipped model.
pub(crate) fn tiny_json() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../profiles/oxide-tiny/tokenizer.json");
    serde_json::from_slice(&std::fs::read(path).expect("the tiny model is in the repository")).expect("it is JSON")
}

/// The shipped model's tokenizer.
pub(crate) fn tiny() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_json(tiny_json().to_string().as_bytes()).expect("the tiny tokenizer loads"))
}

/// The same with the markup of reasoning models, which is not marked special.
#[allow(dead_code, reason = "not every test file uses it")]
pub(crate) fn reasoning() -> Arc<Tokenizer> {
    let mut json = tiny_json();
    let markup = ["<think>", "</think>", "<tool_response>", "</tool_response>"];
    let added = json["added_tokens"].as_array_mut().expect("added tokens");
    for (id, content) in (4096..).zip(markup) {
        added.push(json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false}));
    }
    Arc::new(Tokenizer::from_json(json.to_string().as_bytes()).expect("the extended tokenizer loads"))
}
