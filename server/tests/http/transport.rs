//! What happens before a request means anything: health, keys, CORS, ids, limits, broken bodies.

use crate::harness::{Live, MODEL, Setup, chat_body};
use serde_json::json;
use std::time::Duration;

#[test]
fn health_and_ready_answer_503_until_the_bundle_is_loaded() {
    let mut live = Setup::default().options(|options| options.api_keys = vec!["secret".to_owned()]).slow_load().start();
    for path in ["/health", "/ready"] {
        let reply = live.get(path);
        assert_eq!((reply.status, reply.error()["code"].as_str()), (503, Some("model_loading")), "{path}");
    }
    live.key = Some("secret");
    let refused = live.chat(json!({}));
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(live.get("/v1/models").status, 503);
    live.finish_loading();
    live.key = None;
    live.wait("ready", |live| live.get("/ready").status == 200);
    assert_eq!(live.get("/health").ok()["status"], "ok");
}

#[test]
fn unknown_paths_and_methods_get_json_errors() {
    let live = Live::start();
    assert_eq!(live.get("/nope").error()["code"], "unknown_url");
    assert_eq!(live.get("/nope").status, 404);
    let wrong = live.get("/v1/chat/completions");
    assert_eq!((wrong.status, wrong.error()["code"].as_str()), (405, Some("method_not_allowed")));
    assert!(wrong.header("allow").is_some_and(|allow| allow.contains("POST")), "{:?}", wrong.headers);
    assert_eq!(live.request("PUT", "/v1/models", &[], b"").status, 405);
}

#[test]
fn a_path_that_is_no_text_gets_a_json_error() {
    let live = Live::start();
    for (method, path) in [("GET", "/v1/models/%ff"), ("DELETE", "/v1/requests/%ff"), ("DELETE", "/v1/prefixes/%ff")] {
        let reply = live.request(method, path, &[], b"");
        assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("unknown_url")), "{path}");
    }
}

#[test]
fn the_request_id_is_echoed_or_made() {
    let live = Live::start();
    assert_eq!(live.request("GET", "/version", &[("X-Request-Id", "abc")], b"").header("x-request-id"), Some("abc"));
    let ids: Vec<String> = (0..2).map(|_| live.get("/nope").header("x-request-id").expect("an id").to_owned()).collect();
    assert!(ids[0].starts_with("req-") && ids[0] != ids[1]);
}

#[test]
fn a_preflight_needs_no_key() {
    let live = Setup::default().options(|options| options.api_keys = vec!["secret".to_owned()]).start();
    let headers = [
        ("Origin", "https://app.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization, x-mine"),
    ];
    let reply = live.request("OPTIONS", "/v1/chat/completions", &headers, b"");
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization, x-mine"));
    assert!(reply.header("access-control-allow-methods").is_some_and(|methods| methods.contains("POST")));
}

#[test]
fn only_listed_origins_get_cors_headers() {
    let live = Setup::default().options(|options| options.cors_origins = vec!["https://a.example".to_owned()]).start();
    let origin = |origin: &str| live.request("GET", "/version", &[("Origin", origin)], b"");
    assert_eq!(origin("https://a.example").header("access-control-allow-origin"), Some("https://a.example"));
    assert_eq!(origin("https://b.example").header("access-control-allow-origin"), None);
}

#[test]
fn a_key_is_required_where_one_is_set() {
    let mut live = Setup::default().options(|options| options.api_keys = vec!["one".to_owned(), "two".to_owned()]).start();
    for (method, path) in [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("DELETE", "/v1/requests/a")] {
        for headers in [&[][..], &[("Authorization", "Bearer wrong")], &[("Authorization", "Basic one")]] {
            let reply = live.request(method, path, headers, b"{}");
            let error = reply.error();
            assert_eq!(
                (reply.status, error["code"].as_str(), error["type"].as_str()),
                (401, Some("invalid_api_key"), Some("invalid_request_error"))
            );
        }
    }
    for scheme in ["Bearer", "bearer", "BEARER"] {
        assert_eq!(live.request("GET", "/v1/models", &[("Authorization", &format!("{scheme} two"))], b"").status, 200);
    }
    for path in ["/health", "/ready", "/version", "/metrics", "/openapi.json"] {
        assert_eq!(live.get(path).status, 200, "{path} is open");
    }
    live.key = Some("one");
    live.chat(json!({"max_tokens": 1})).ok();
}

#[test]
fn a_body_over_the_limit_is_refused_and_the_server_lives() {
    let live = Setup::default().options(|options| options.body_bytes_max = 10_000).start();
    let at = |length: usize| {
        let mut body = json!({"model": MODEL, "prompt": "a", "max_tokens": 1, "user": ""});
        let pad = length - body.to_string().len();
        body["user"] = "x".repeat(pad).into();
        live.post("/v1/completions", &body)
    };
    at(10_000).ok();
    let reply = at(10_001);
    assert_eq!((reply.status, reply.error()["code"].as_str()), (413, Some("body_too_large")));
    let mut chunked = live.connect();
    chunked.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n");
    chunked.write(format!("{:x}\r\n{}\r\n0\r\n\r\n", 10_001, "x".repeat(10_001)).as_bytes());
    assert_eq!(chunked.reply().status, 413);
    at(1_000).ok();
}

#[test]
fn a_body_announced_over_the_limit_is_refused_before_it_is_sent() {
    let live = Setup::default()
        .options(|options| {
            options.body_bytes_max = 10_000;
            options.body_timeout = Duration::from_secs(600);
        })
        .start();
    for expect in ["", "expect: 100-continue\r\n"] {
        let mut connection = live.connect();
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10001\r\n{expect}\r\n");
        connection.write(head.as_bytes());
        // Nothing of the body is sent; a `100 Continue` would be the first head.
        let reply = connection.reply();
        assert_eq!((reply.status, reply.error()["code"].as_str()), (413, Some("body_too_large")), "{expect}");
    }
    let mut connection = live.connect();
    connection.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10000\r\nexpect: 100-continue\r\n\r\n");
    assert_eq!(connection.head().0, 100, "what fits is asked for");
}

#[test]
fn a_body_that_does_not_arrive_is_given_up() {
    let live = Setup::default().options(|options| options.body_timeout = Duration::from_millis(50)).start();
    let mut connection = live.connect();
    connection.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{");
    let reply = connection.reply();
    assert_eq!((reply.status, reply.error()["code"].as_str()), (408, Some("body_timeout")));
}

#[test]
fn broken_json_is_a_400_that_says_what_is_wrong() {
    let live = Live::start();
    let nested = "[".repeat(10_000);
    let deep = format!("{{\"prompt\":{nested}");
    for (body, words) in [
        ("{\"model\":", "EOF"),
        ("", "empty"),
        ("[1,2]", "must be a JSON object"),
        ("{\"prompt\":\"a\",\"temperature\":NaN}", "no NaN"),
        ("{\"prompt\":\"a\",\"temperature\":-Infinity}", "no NaN"),
        ("{\"prompt\":\"a\",\"temperature\":1e999}", "out of range"),
        ("{\"prompt\":\"\\ud800\"}", "not valid JSON"),
        (nested.as_str(), "nests deeper"),
        (deep.as_str(), "nests deeper"),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/chat/completions/render"] {
            let reply = live.post_raw(path, body.as_bytes());
            let error = reply.error();
            assert_eq!((reply.status, error["type"].as_str()), (400, Some("invalid_request_error")), "{path}");
            assert!(error["message"].as_str().is_some_and(|message| message.contains(words)), "{words}: {error}");
        }
    }
    assert_eq!(live.post_raw("/v1/completions", b"{\"prompt\":\"\xff\"}").status, 400);
    live.chat(json!({"max_tokens": 1})).ok();
}

#[test]
fn huge_numbers_are_refused_without_wrapping() {
    let live = Live::start();
    for number in ["1099511627776", "18446744073709551616", "-9223372036854775809", "1e300", "99999999999999999999999999"] {
        let body = format!("{{\"prompt\":\"a\",\"max_tokens\":{number}}}");
        assert_eq!(live.post_raw("/v1/completions", body.as_bytes()).status, 400, "{number}");
    }
}

#[test]
fn another_content_type_is_refused() {
    let live = Live::start();
    let body = chat_body(json!({"max_tokens": 1})).to_string();
    let send = |kind: &str| live.request("POST", "/v1/chat/completions", &[("content-type", kind)], body.as_bytes());
    let reply = send("text/plain");
    assert_eq!((reply.status, reply.error()["code"].as_str()), (415, Some("unsupported_media_type")));
    send("application/json; charset=utf-8").ok();
    live.request("POST", "/v1/chat/completions", &[], body.as_bytes()).ok();
}

#[test]
fn a_compressed_body_is_refused_by_name() {
    let live = Live::start();
    let body = chat_body(json!({"max_tokens": 1})).to_string();
    let send = |encoding: &str| live.request("POST", "/v1/chat/completions", &[("content-encoding", encoding)], body.as_bytes());
    let reply = send("gzip");
    assert_eq!((reply.status, reply.error()["code"].as_str()), (415, Some("unsupported_media_type")));
    assert!(reply.error()["message"].as_str().is_some_and(|message| message.contains("gzip")));
    send("identity").ok();
}

#[test]
fn a_head_over_the_limit_is_refused() {
    let live = Live::start();
    let names: Vec<String> = (0..70).map(|index| format!("x-{index}")).collect();
    let headers: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
    let reply = live.request("GET", "/version", &headers, b"");
    assert_eq!((reply.status, reply.error()["code"].as_str()), (431, Some("head_too_large")));
    assert_eq!(live.request("GET", "/version", &[("x-long", &"x".repeat(33 << 10))], b"").status, 431);
}

#[test]
fn a_connection_answers_several_requests() {
    let live = Live::start();
    let mut connection = live.connect();
    for _ in 0..3 {
        connection.send(
            "POST",
            "/v1/chat/completions",
            &[("content-type", "application/json")],
            chat_body(json!({"max_tokens": 2})).to_string().as_bytes(),
        );
        connection.reply().ok();
        connection.send("POST", "/v1/chat/completions", &[], b"{");
        assert_eq!(connection.reply().status, 400);
    }
}

#[test]
fn connections_beyond_the_limit_wait_their_turn() {
    let live = Setup::default().options(|options| options.connections_max = 1).start();
    let first = {
        let mut first = live.connect();
        first.send("GET", "/version", &[], b"");
        first.reply().ok();
        first
    };
    let mut second = live.connect();
    second.send("GET", "/version", &[], b"");
    drop(first);
    second.reply().ok();
}
