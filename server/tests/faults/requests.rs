//! One request of each kind, as bytes on the wire.

use crate::harness::{MODEL, chat_body, greedy_body, streamed};
use crate::injection::ID;
use oxide_run::faults::Place;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A kind of request.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    pub(crate) body: Value,
    /// Status of the answer if nothing goes wrong.
    pub(crate) status: u16,
    /// Places that it passes one after the other, beside those that all pass.
    pub(crate) places: &'static [Place],
}

impl Kind {
    /// The request, as the last one of its connection.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let Self { method, path, body, .. } = self;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let length = if *method == "POST" { format!("content-length: {}\r\n", body.len()) } else { String::new() };
        format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-request-id: {ID}\r\n{length}\r\n{body}").into_bytes()
    }
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn tool() -> Value {
    let parameters = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
    json!({"type": "function", "function": {"name": "f", "parameters": parameters}})
}

/// More bytes than are tokenized where they are.
fn long() -> Value {
    json!({"user": "x".repeat(5000)})
}

/// The prompt of the named prefix: two pages and more.
pub(crate) fn prefix_prompt() -> Vec<u32> {
    (100..140).collect()
}

/// A request of every kind.
pub(crate) fn kinds() -> Vec<Kind> {
    use Place::{Body, Compile, Flush, Pin, Pinned, Probe, Stream, Submit, Tokenize, Wait};
    let post = |name, path, body, places| Kind { name, method: "POST", path, body, status: 200, places };
    let chat = |name, more, places| post(name, "/v1/chat/completions", chat_body(with(json!({"max_tokens": 6}), more)), places);
    let complete =
        |name, more, places| post(name, "/v1/completions", greedy_body(with(json!({"prompt": [5, 6, 7], "max_tokens": 6}), more)), places);
    let whole = &[Body, Tokenize, Submit, Wait];
    let events = &[Body, Tokenize, Submit, Wait, Stream, Flush];
    let constrained = &[Body, Tokenize, Compile, Submit, Wait];
    let regex = json!({"guided_regex": "[a-c]{2,4}", "ignore_eos": false});
    vec![
        chat("a chat", json!({}), whole),
        chat("a long chat", long(), whole),
        chat("a streamed chat", streamed(json!({"stream_options": {"include_usage": true}, "logprobs": true, "trace": true})), events),
        chat("a constrained chat", regex.clone(), constrained),
        chat("a constrained stream", streamed(regex.clone()), &[Body, Tokenize, Compile, Submit, Wait, Stream, Flush]),
        chat("a forced call", json!({"tools": [tool()], "tool_choice": "required", "max_tokens": 64, "ignore_eos": false}), constrained),
        complete("several choices", json!({"n": 3}), whole),
        complete("several choices streamed", streamed(json!({"n": 3})), events),
        complete("two prompts with echo", json!({"prompt": [[5, 6, 7], [8, 9]], "echo": true, "logprobs": 2}), whole),
        complete("a stopped text", json!({"stop": ["e"], "max_tokens": 40}), whole),
        post("an explanation", "/v1/explain", chat_body(regex), &[Body, Tokenize, Compile, Probe]),
        post("tokenizing", "/tokenize", json!({"prompt": "Hello"}), &[Body, Tokenize]),
        post("tokenizing much", "/tokenize", json!({"prompt": "ab ".repeat(2000)}), &[Body, Tokenize]),
        post("detokenizing", "/detokenize", json!({"tokens": [5, 6, 7]}), &[Body]),
        post("rendering", "/v1/chat/completions/render", chat_body(json!({})), &[Body, Tokenize]),
        post("a prefix", "/v1/prefixes", json!({"name": "p", "prompt": prefix_prompt()}), &[Body, Tokenize, Pin, Pinned]),
        Kind { status: 400, ..post("a refused chat", "/v1/chat/completions", json!({"model": MODEL}), &[Body]) },
        Kind { method: "GET", ..post("the prefixes", "/v1/prefixes", Value::Null, &[]) },
        Kind { method: "GET", ..post("the models", "/v1/models", Value::Null, &[]) },
        Kind { method: "GET", ..post("the metrics", "/metrics", Value::Null, &[]) },
        Kind { method: "DELETE", status: 404, ..post("an abort", "/v1/requests/nobody", Value::Null, &[]) },
        Kind { method: "DELETE", status: 404, ..post("an unnamed prefix", "/v1/prefixes/nobody", Value::Null, &[]) },
    ]
}

/// The kind of this name.
pub(crate) fn kind(name: &str) -> Kind {
    kinds().into_iter().find(|kind| kind.name == name).unwrap_or_else(|| panic!("no kind {name}"))
}

/// A connection that may break at any time.
pub(crate) struct Raw(TcpStream);

impl Raw {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server accepts");
        stream.set_nodelay(true).expect("socket option");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("socket option");
        Self(stream)
    }

    /// Writes what the other side takes.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Reads up to `count` bytes.
    pub(crate) fn read(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        // A reset is an end like any other; only silence is not.
        if let Err(error) = Read::by_ref(&mut self.0).take(count as u64).read_to_end(&mut bytes) {
            assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "the server neither answers nor hangs up");
        }
        bytes
    }

    /// Reads to the end.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        self.read(usize::MAX)
    }
}

/// Sends bytes and reads what comes until the connection ends.
pub(crate) fn exchange(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut raw = Raw::open(address);
    raw.write(bytes);
    raw.rest()
}

/// The status of an answer.
pub(crate) fn status(answer: &[u8]) -> Option<u16> {
    String::from_utf8_lossy(answer).split(' ').nth(1)?.parse().ok()
}
