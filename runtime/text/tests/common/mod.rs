//! The tokenizers that the tests share.

use oxide_text::Tokenizer;
use serde_json::Value;
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
