//! Requests that no server should take, and the statuses that say so.

use super::target::{BODY_BYTES_MAX, Target};
use super::wire::request;
use crate::random::Random;
use serde_json::{Value, json};

/// A bad request.
pub(super) struct Fault {
    pub(super) name: &'static str,
    pub(super) bytes: Vec<u8>,
    /// Statuses that answer it.
    pub(super) statuses: &'static [u16],
    /// Whether the connection may be closed without an answer.
    pub(super) silence: bool,
}

const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("Content-Type", "application/json");

/// Bodies that a chat refuses with 400, and why.
fn bad_chats() -> [(&'static str, Value); 16] {
    let with = |field: &str, value: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 4 });
        body[field] = value;
        body
    };
    let format = |schema: Value| json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
    let function = |name: &str| json!([{ "type": "function", "function": { "name": name, "parameters": { "type": "object" } } }]);
    let mut unknown_tool = with("tools", function("known"));
    unknown_tool["tool_choice"] = json!({ "type": "function", "function": { "name": "unknown" } });
    [
        ("type of a number", with("temperature", json!("hot"))),
        ("range of temperature", with("temperature", json!(2.5))),
        ("range of top_p", with("top_p", json!(-0.5))),
        ("no choices", with("n", json!(0))),
        ("too many choices", with("n", json!(1_000_000))),
        ("negative limit", with("max_tokens", json!(-1))),
        ("limit beyond the context", with("max_tokens", json!(1_u64 << 40))),
        ("no messages", with("messages", json!([]))),
        ("unknown role", with("messages", json!([{ "role": "alien", "content": "a" }]))),
        ("an image", with("messages", json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]))),
        ("unknown stop id", with("stop_token_ids", json!([1_000_000_000]))),
        ("schema keyword", with("response_format", format(json!({ "not": {} })))),
        ("schema without value", with("response_format", format(json!({ "enum": [] })))),
        ("broken regex", with("guided_regex", json!("(a"))),
        ("unknown tool", unknown_tool),
        ("unimplemented field", with("reasoning_effort", json!("high"))),
    ]
}

/// Draws a bad request.
pub(super) fn draw(target: &Target, key: &str, random: &mut Random) -> Fault {
    let auth = ("Authorization", key);
    let plain = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 4 }).to_string();
    let fault = |name, statuses, bytes| Fault { name, bytes, statuses, silence: false };
    let post = |headers: &[(&str, &str)], body: &[u8]| request("POST", CHAT, headers, body);
    match random.below(24) {
        0..=7 => {
            let bodies = bad_chats();
            let (name, body) = &bodies[random.below(bodies.len() as u64) as usize];
            fault(name, &[400], post(&[auth, JSON], body.to_string().as_bytes()))
        }
        8 => fault("broken JSON", &[400], post(&[auth, JSON], &plain.as_bytes()[..plain.len() - 1])),
        9 => fault("NaN", &[400], post(&[auth, JSON], plain.replace('4', "NaN").as_bytes())),
        10 => fault("deep JSON", &[400], post(&[auth, JSON], format!("{{\"a\":{}", "[".repeat(10_000)).as_bytes())),
        11 => fault("not UTF-8", &[400], post(&[auth, JSON], b"{\"messages\":\"\xff\xfe\"}")),
        12 => fault("content type", &[415], post(&[auth, ("Content-Type", "text/plain")], plain.as_bytes())),
        13 => fault("compressed", &[415], post(&[auth, JSON, ("Content-Encoding", "gzip")], plain.as_bytes())),
        14 if target.started() => fault("large body", &[413], post(&[auth, JSON], &vec![b' '; BODY_BYTES_MAX + BODY_BYTES_MAX / 4])),
        14 => fault("no body", &[400], post(&[auth, JSON], b"")),
        15 => fault("unknown model", &[404], post(&[auth, JSON], plain.replacen('{', "{\"model\":\"no-such\",", 1).as_bytes())),
        16 => fault("unknown path", &[404], request("GET", "/v2/chat", &[auth], b"")),
        17 => fault("unknown request", &[404], request("DELETE", "/v1/requests/no-such", &[auth], b"")),
        18 => fault("method", &[405], request("PUT", CHAT, &[auth, JSON], plain.as_bytes())),
        19 => fault("bad deadline", &[400], post(&[auth, JSON, ("X-Deadline-Ms", "soon")], plain.as_bytes())),
        20 => fault("large head", &[431], post(&[auth, JSON, ("X-Padding", &"x".repeat(40 << 10))], plain.as_bytes())),
        21 if target.keys.is_empty() => fault("unknown model card", &[404], request("GET", "/v1/models/no-such", &[], b"")),
        21 => fault("wrong key", &[401], post(&[("Authorization", "Bearer wrong"), JSON], plain.as_bytes())),
        22 => Fault { silence: true, ..fault("no HTTP", &[400], b"\x16\x03\x01\x02\x00 hello\r\n\r\n".to_vec()) },
        _ => {
            let chunks = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n";
            let mut bytes = format!("POST {CHAT} HTTP/1.1\r\nHost: soak\r\nAuthorization: {key}\r\n").into_bytes();
            bytes.extend_from_slice(chunks);
            Fault { silence: true, ..fault("broken chunks", &[400], bytes) }
        }
    }
}
