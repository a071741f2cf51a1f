//! Bytes that nobody should send, to a live server. `OXIDE_FUZZ_SECONDS` sets the time of each.
//!
//! Whatever comes: every answer is whole HTTP, a refusal is the API's JSON and never a 500, nothing
//! panics, and once the clients are gone nothing of their requests is left.

use crate::client::{Connection, Reply};
use crate::harness::{Live, Setup};
use crate::injection::{Metrics, settle};
use crate::requests::{exchange, kinds};
use oxide_run::http::ServeOptions;
use oxide_testkit::{fuzz, fuzz_json};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// Inputs between two looks at the accounts.
const LOOK_EVERY: u32 = 200;

/// A server that gives up early on what does not come.
fn start() -> Live {
    let impatient = |options: &mut ServeOptions| {
        options.body_timeout = Duration::from_millis(100);
        options.head_timeout = Duration::from_millis(100);
        options.deadline_default = Some(Duration::from_millis(200));
    };
    Setup::default().options(impatient).script(|script| script.context_max = 128).start()
}

/// The server lives, nothing panicked, and nothing is left of any request.
fn check_server(live: &Live) {
    settle(live);
    assert_eq!(Metrics::of(live).get("oxide_panics_total"), 0.0);
}

/// Checks that an answer is what the API says.
fn check_reply(reply: &Reply) {
    let kind = reply.header("content-type").unwrap_or_default();
    if reply.status >= 400 {
        reply.error();
        assert_ne!(reply.status, 500, "{}", reply.text());
    } else if kind == "text/event-stream" {
        check_events(&reply.text());
    } else if kind == "application/json" {
        reply.json();
    }
}

fn check_events(text: &str) {
    let events: Vec<&str> = text.split_terminator("\n\n").filter(|event| !event.starts_with(':')).collect();
    let Some((&"data: [DONE]", events)) = events.split_last() else { panic!("no end: {text}") };
    for event in events {
        let json = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no event: {event}"));
        let value: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"));
        assert_ne!(value["error"]["type"], "server_error", "{value}");
    }
}

/// A connection that is made anew when the server closed it.
struct Client<'a> {
    live: &'a Live,
    connection: RefCell<Option<Connection>>,
    sent: Cell<u32>,
}

impl<'a> Client<'a> {
    fn new(live: &'a Live) -> Self {
        Self { live, connection: RefCell::new(None), sent: Cell::new(0) }
    }

    fn send(&self, method: &str, path: &str, body: &[u8]) {
        if self.sent.get() % LOOK_EVERY == LOOK_EVERY - 1 {
            *self.connection.borrow_mut() = None;
            check_server(self.live);
        }
        self.sent.set(self.sent.get() + 1);
        let mut connection = self.connection.borrow_mut().take().unwrap_or_else(|| self.live.connect());
        connection.send(method, path, &[], body);
        let reply = connection.reply();
        check_reply(&reply);
        if reply.header("connection") != Some("close") && reply.status != 408 && reply.status != 413 {
            *self.connection.borrow_mut() = Some(connection);
        }
    }
}

/// A field of each request and its value, by path.
fn bodies() -> Vec<Value> {
    let more = json!({
        "model": "oxide-tiny", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "stop": ["a", "b"],
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "min_tokens": 1,
        "stop_token_ids": [7], "max_completion_tokens": 4, "cache_salt": "s", "deadline_ms": 50, "max_queue_ms": 50, "trace": true,
        "truncate_prompt_tokens": 3, "logprobs": true, "top_logprobs": 3, "stream_options": {"include_usage": true},
        "response_format": {"type": "json_object"}, "guided_choice": ["a", "b"], "guided_json": {"type": "integer"},
        "guided_grammar": "start: \"a\"+", "tools": [], "parallel_tool_calls": false, "chat_template_kwargs": {"a": 1},
    });
    let messages = json!([
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"n\":1}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]);
    let chat = json!({"messages": messages, "max_tokens": 3});
    let members = more.as_object().expect("an object").iter().map(|(name, value)| json!({name: value, "prompt": [5, 6], "max_tokens": 3}));
    let kinds = kinds().into_iter().filter(|kind| kind.method == "POST").map(|kind| kind.body);
    kinds.chain(members).chain([chat, more.clone()]).collect()
}

const PATHS: [&str; 7] =
    ["/v1/chat/completions", "/v1/completions", "/v1/explain", "/tokenize", "/detokenize", "/v1/chat/completions/render", "/v1/prefixes"];

#[test]
fn bodies_of_any_json_are_answered() {
    let live = start();
    let client = Client::new(&live);
    let turn = Cell::new(0);
    fuzz_json("json bodies", &bodies(), |body| {
        turn.set((turn.get() + 1) % PATHS.len());
        client.send("POST", PATHS[turn.get()], body.to_string().as_bytes());
    });
    drop(client);
    check_server(&live);
}

#[test]
fn bodies_of_any_bytes_are_answered() {
    let live = start();
    let client = Client::new(&live);
    let corpus: Vec<Vec<u8>> = bodies().iter().map(|body| body.to_string().into_bytes()).collect();
    let turn = Cell::new(0);
    fuzz("byte bodies", &corpus, |body| {
        turn.set((turn.get() + 1) % PATHS.len());
        client.send("POST", PATHS[turn.get()], body);
    });
    drop(client);
    check_server(&live);
}

#[test]
fn ids_of_any_bytes_are_answered() {
    let live = start();
    let client = Client::new(&live);
    let corpus = [b"chatcmpl-0123".to_vec(), b"req-1".to_vec(), "\u{E9}/..%2e".as_bytes().to_vec()];
    fuzz("ids", &corpus, |id| {
        let id: String = id.iter().take(300).map(|byte| format!("%{byte:02x}")).collect();
        client.send("DELETE", &format!("/v1/requests/{id}"), b"");
        client.send("DELETE", &format!("/v1/prefixes/{id}"), b"");
        client.send("GET", &format!("/v1/models/{id}"), b"");
    });
    drop(client);
    check_server(&live);
}

/// Whole exchanges, some of several requests.
fn exchanges() -> Vec<Vec<u8>> {
    let simple = kinds().iter().map(super::requests::Kind::bytes).collect::<Vec<_>>();
    let body = r#"{"prompt":[5,6],"max_tokens":2}"#;
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5;ext=1\r\n{}\r\n{:x}\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n",
        &body[..5],
        body.len() - 5,
        &body[5..]
    );
    let kept = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let old = format!("POST /v1/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let expecting = "POST /tokenize HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 14\r\n\r\n{\"prompt\":\"a\"}".to_owned();
    let headers = "GET /version HTTP/1.1\r\nhost: a\r\nauthorization: Bearer x\r\norigin: https://a\r\nx-request-id: \u{E9}\r\nx-deadline-ms: 5\r\n\r\n";
    let preflight = "OPTIONS /v1/models HTTP/1.1\r\nhost: a\r\norigin: null\r\naccess-control-request-method: POST\r\n\r\n";
    let pipelined = [kept.as_str(), &chunked, headers, &kept].concat();
    let others = [chunked, kept, old, expecting, headers.to_owned(), preflight.to_owned(), pipelined];
    simple.into_iter().chain(others.map(String::into_bytes)).collect()
}

/// Cuts answers apart; every one must be whole.
fn check_answers(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        bytes = check_answer(bytes);
    }
}

fn check_answer(bytes: &[u8]) -> &[u8] {
    let shown = || bytes[..bytes.len().min(400)].escape_ascii().to_string();
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or_else(|| panic!("a head that has no end: {}", shown()));
    let head = std::str::from_utf8(&bytes[..end]).expect("heads are text");
    let mut rest = &bytes[end + 4..];
    let mut lines = head.split("\r\n");
    let first = lines.next().expect("a first line");
    assert!(first.starts_with("HTTP/1.1 ") || first.starts_with("HTTP/1.0 "), "{first}");
    let status: u16 = first.get(9..12).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("no status: {first}"));
    let headers: Vec<(String, String)> =
        lines.map(|line| line.split_once(": ").unwrap_or_else(|| panic!("no header: {line}"))).map(owned).collect();
    let mut reply = Reply { status, headers, body: Vec::new() };
    if status < 200 || status == 204 {
        return rest;
    }
    if reply.header("transfer-encoding") == Some("chunked") {
        (reply.body, rest) = unchunked(rest);
    } else if let Some(length) = reply.header("content-length") {
        let length: usize = length.parse().expect("a number");
        let (body, after) = rest.split_at_checked(length).unwrap_or_else(|| panic!("a body that is cut: {}", shown()));
        (reply.body, rest) = (body.to_vec(), after);
    } else {
        (reply.body, rest) = (rest.to_vec(), &[]);
    }
    // What is no HTTP is refused by the protocol itself, without a body.
    if !(status >= 400 && reply.body.is_empty()) {
        check_reply(&reply);
    }
    rest
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

fn unchunked(mut rest: &[u8]) -> (Vec<u8>, &[u8]) {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|window| window == b"\r\n").expect("a chunk size");
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).expect("text"), 16).expect("a chunk size");
        let (chunk, after) = rest[end + 2..].split_at_checked(size).expect("a whole chunk");
        body.extend_from_slice(chunk);
        rest = after.strip_prefix(b"\r\n").expect("the end of a chunk");
        if size == 0 {
            return (body, rest);
        }
    }
}

#[test]
fn connections_of_any_bytes_are_answered_in_whole() {
    let live = start();
    let count = Cell::new(0_u32);
    fuzz("exchanges", &exchanges(), |bytes| {
        let last = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
        check_answers(&exchange(live.address, &[bytes, last].concat()));
        count.set(count.get() + 1);
        if count.get().is_multiple_of(LOOK_EVERY) {
            check_server(&live);
        }
    });
    check_server(&live);
}
