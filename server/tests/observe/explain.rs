//! `/v1/explain` says before what the answer, its usage and its trace say after; named prefixes stay cached.

use crate::client::{Connection, Events};
use crate::{PATIENCE, PROGRAM, get, metric, post, send, start};
use oxide_testkit::{ServerProcess, tiny_bundle};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

fn explain(server: &ServerProcess, body: &Value) -> Value {
    post(server.address(), "/v1/explain", body).ok()
}

fn delete(server: &ServerProcess, path: &str) -> crate::client::Reply {
    let mut connection = Connection::open(server.address());
    connection.send("DELETE", path, &[], b"");
    connection.reply()
}

/// A prompt of `count` ids that no other call with another `kind` shares a token with at the start.
fn ids(kind: u64, count: u64) -> Vec<u64> {
    (0..count).map(|index| 300 + (kind * 37 + index * 11) % 500).collect()
}

#[test]
fn the_prompt_the_values_and_their_origins_are_told_without_model_work() {
    let server = start(&[]);
    let body = json!({
        "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0.25, "frequency_penalty": 0.5, "seed": 7,
        "stop": ["\n\n"], "stop_token_ids": [9], "n": 2,
    });
    let told = explain(&server, &body);
    let rendered = post(server.address(), "/v1/chat/completions/render", &body).ok();
    let prompt = &told["prompts"][0];
    assert_eq!((&told["endpoint"], &told["n"]), (&json!("chat.completions"), &json!(2)));
    assert_eq!((&prompt["text"], &prompt["tokens"], &prompt["count"]), (&rendered["prompt"], &rendered["tokens"], &rendered["count"]));

    let card = get(server.address(), "/v1/models").ok()["data"][0].clone();
    let value = |name: &str| (told["sampling"][name]["value"].clone(), told["sampling"][name]["from"].clone());
    assert_eq!(value("temperature"), (json!(0.25), json!("request")));
    assert_eq!(value("frequency_penalty"), (json!(0.5), json!("request")));
    assert_eq!(value("presence_penalty"), (json!(0.0), json!("default")));
    assert_eq!(value("top_p"), (card["default_sampling"]["top_p"].clone(), json!("generation_config")));
    assert_eq!(value("seed"), (json!(7), json!("request")));
    assert_eq!(value("max_tokens").1, "context");
    assert_eq!(
        prompt["max_tokens"].as_u64(),
        Some(card["max_model_len"].as_u64().expect("a limit") - prompt["count"].as_u64().expect("a count"))
    );
    let stops = told["stop"]["ids"].as_array().expect("ids");
    assert!(stops.iter().any(|stop| stop["id"] == 9 && stop["from"] == "request"));
    assert!(stops.iter().any(|stop| stop["from"] == "model" && stop["text"].as_str().is_some_and(|text| text.starts_with('<'))));
    assert_eq!(told["stop"]["strings"], json!(["\n\n"]));

    let page = card["bundle"]["page_tokens"].as_u64().expect("a page");
    let (count, limit) = (prompt["count"].as_u64().expect("count"), prompt["max_tokens"].as_u64().expect("limit"));
    let shared = count / page;
    assert_eq!(prompt["memory"]["kv_pages_max"], shared + 2 * ((count + limit - 1).div_ceil(page) - shared));
    assert_eq!(prompt["admission"]["verdict"], "at once");
    assert_eq!(metric(server.address(), "oxide_engine_steps_total"), 0.0, "the model did nothing");
    assert_eq!(metric(server.address(), "oxide_engine_admitted_total"), 0.0);
}

#[test]
fn explain_refuses_what_the_endpoint_would_refuse() {
    let server = start(&[]);
    for body in [
        json!({"messages": [{"role": "user", "content": "a"}], "temperature": 3}),
        json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1_000_000}),
        json!({"prompt": "a", "n": 0}),
        json!({"max_tokens": 5}),
        json!({"prompt": "a", "model": "other"}),
        json!({"prompt": "a", "guided_regex": "("}),
    ] {
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let (told, real) = (post(server.address(), "/v1/explain", &body), post(server.address(), path, &body));
        assert_eq!((told.status, told.error()), (real.status, real.error()), "{body}");
    }
}

#[test]
fn a_constraint_is_told_with_the_keywords_it_enforces() {
    let server = start(&[]);
    let schema = json!({"type": "object", "properties": {"title": {"type": "string", "maxLength": 4}}, "required": ["title"], "additionalProperties": false});
    let body = json!({"prompt": "a", "max_tokens": 64, "guided_json": schema});
    let constraint = explain(&server, &body)["constraint"].clone();
    assert_eq!((&constraint["field"], &constraint["kind"]), (&json!("guided_json"), &json!("json_schema")));
    assert_eq!(constraint["enforced_keywords"], json!(["additionalProperties", "maxLength", "properties", "required", "type"]));
    assert!(constraint["shortest_tokens"].as_u64().is_some_and(|tokens| tokens >= 2), "{constraint}");
}

#[test]
fn the_prefix_cache_is_told_as_the_answer_finds_it_and_a_miss_has_its_reason() {
    let server = start(&[]);
    let page = get(server.address(), "/v1/models").ok()["data"][0]["bundle"]["page_tokens"].as_u64().expect("a page");
    let prompt = ids(1, 3 * page + 2);
    let body = |prompt: &[u64]| json!({"prompt": prompt, "max_tokens": 1, "trace": true});
    let told = |body: &Value| explain(&server, body)["prompts"][0]["prefix_cache"].clone();
    let run = |body: &Value| {
        let answer = post(server.address(), "/v1/completions", body).ok();
        assert_eq!(answer["choices"][0]["trace"]["cached_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]);
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached tokens")
    };

    let before = told(&body(&prompt));
    assert_eq!((&before["expected_cached_tokens"], &before["miss"]["reason"]), (&json!(0), &json!("absent")));
    assert_eq!(run(&body(&prompt)), 0);
    let after = told(&body(&prompt));
    assert_eq!((&after["expected_cached_tokens"], &after["miss"]), (&json!(3 * page), &Value::Null));
    assert_eq!(run(&body(&prompt)), 3 * page);

    let mut other = prompt.clone();
    other[page as usize + 3] = 999;
    let differs = told(&body(&other));
    assert_eq!((&differs["miss"]["reason"], &differs["miss"]["token"]), (&json!("differs"), &json!(page + 3)), "{differs}");
    assert_eq!(differs["expected_cached_tokens"], page);
    assert_eq!(run(&body(&other)), page);

    let mut salted = body(&prompt);
    salted["cache_salt"] = "tenant".into();
    assert_eq!(told(&salted)["miss"]["reason"], "absent");
    assert_eq!(told(&body(&prompt[..page as usize]))["miss"]["reason"], "too_short");
    let mut echo = body(&prompt);
    echo["echo"] = true.into();
    echo["logprobs"] = 1.into();
    assert_eq!(told(&echo)["miss"]["reason"], "prompt_logprobs");
    let uncached = start(&["--no-prefix-cache"]);
    assert_eq!(explain(&uncached, &body(&prompt))["prompts"][0]["prefix_cache"]["miss"]["reason"], "disabled");
}

#[test]
fn the_trace_comes_by_field_or_header_whole_or_streamed() {
    let server = start(&[]);
    let body = json!({"prompt": ids(2, 40), "max_tokens": 20, "ignore_eos": true, "n": 2});
    let check = |trace: &Value| {
        for name in ["queue_ms", "prefill_ms", "decode_ms", "kv_page_seconds"] {
            assert!(trace[name].as_f64().is_some_and(|value| value >= 0.0 && value.is_finite()), "{name}: {trace}");
        }
        assert!(trace["decode_ms"].as_f64() > Some(0.0) && trace["kv_page_seconds"].as_f64() > Some(0.0), "{trace}");
        assert_eq!(trace["preemptions"], 0);
    };
    let header = send(server.address(), "/v1/completions", &[("x-trace", "1")], &body).reply().ok();
    header["choices"].as_array().expect("choices").iter().for_each(|choice| check(&choice["trace"]));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    streamed["trace"] = true.into();
    let chunks = Events::begin(send(server.address(), "/v1/completions", &[], &streamed)).rest();
    let ends: Vec<&Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().expect("choices"))
        .filter(|choice| choice["finish_reason"].is_string())
        .collect();
    assert_eq!(ends.len(), 2);
    ends.iter().for_each(|end| check(&end["trace"]));
    assert!(post(server.address(), "/v1/completions", &body).ok()["choices"][0].get("trace").is_none(), "only when asked for");
}

/// Fills the whole pool with other prompts, twice over.
fn flood(server: &ServerProcess, page: u64, pages: u64) {
    let each = 12 * page;
    let prompts: Vec<Vec<u64>> =
        (0..2 * pages / 12 + 1).map(|index| ids(50 + index, each).iter().map(|id| (id + 13 * index) % 4000).collect()).collect();
    for chunk in prompts.chunks(32) {
        post(server.address(), "/v1/completions", &json!({"prompt": chunk, "max_tokens": 1})).ok();
    }
}

#[test]
fn a_named_prefix_is_prewarmed_and_survives_what_evicts_others() {
    let server = start(&["--kv-memory", "3MiB"]);
    let card = get(server.address(), "/v1/models").ok()["data"][0]["bundle"].clone();
    let (page, pages) = (card["page_tokens"].as_u64().expect("a page"), card["kv_pages"].as_u64().expect("pages"));
    let (kept, plain) = (ids(3, 4 * page + 1), ids(4, 4 * page + 1));
    let made = post(server.address(), "/v1/prefixes", &json!({"name": "house rules", "prompt": kept})).ok();
    assert_eq!((&made["pinned_tokens"], &made["cached_before"]), (&json!(4 * page), &json!(0)));
    post(server.address(), "/v1/completions", &json!({"prompt": plain, "max_tokens": 1})).ok();
    flood(&server, page, pages);
    assert!(metric(server.address(), "oxide_prefix_evictions_total") > 0.0, "{pages} pages were not filled");
    let cached = |prompt: &[u64]| {
        let answer = post(server.address(), "/v1/completions", &json!({"prompt": prompt, "max_tokens": 1})).ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached tokens")
    };
    assert_eq!((cached(&kept), cached(&plain)), (4 * page, 0));
    let listed = get(server.address(), "/v1/prefixes").ok();
    assert_eq!((&listed["data"][0]["name"], &listed["data"][0]["pinned_tokens"]), (&json!("house rules"), &json!(4 * page)));

    assert_eq!(delete(&server, "/v1/prefixes/house%20rules").ok()["deleted"], true);
    assert_eq!(delete(&server, "/v1/prefixes/house%20rules").status, 404);
    assert_eq!(get(server.address(), "/v1/prefixes").ok()["data"], json!([]));
    flood(&server, page, pages);
    assert_eq!(cached(&kept), 0, "without its pin it goes like any other");
    for (body, param) in
        [(json!({"prompt": "a"}), "name"), (json!({"name": "x", "prompt": ["a", "b"]}), "prompt"), (json!({"name": ""}), "name")]
    {
        post(server.address(), "/v1/prefixes", &body).refused(400, param);
    }
}

#[test]
fn the_page_is_whole_and_needs_no_key_and_no_other_host() {
    let server = start(&["--api-key", "secret"]);
    let page = get(server.address(), "/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(
        page.header("content-security-policy")
            .is_some_and(|policy| policy.starts_with("default-src 'none'") && policy.contains("connect-src 'self'"))
    );
    let text = page.text();
    for outside in ["src=\"http", "href=\"http", "url(http", "import ", "<link rel=\"stylesheet\""] {
        assert!(!text.contains(outside), "{outside}");
    }
    assert_eq!(get(server.address(), "/v1/models").status, 401);
}

#[test]
fn the_log_line_of_a_generation_carries_the_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let (log, port) = (folder.path().join("log"), folder.path().join("port"));
    let stderr = std::fs::File::create(&log).expect("writable");
    let mut server = Command::new(PROGRAM)
        .arg(tiny_bundle())
        .args(["serve", "--port", "0", "--log-json", "--port-file"])
        .arg(&port)
        .stderr(stderr)
        .spawn()
        .expect("the server starts");
    let begun = Instant::now();
    let address = loop {
        match std::fs::read_to_string(&port) {
            Ok(text) => break format!("127.0.0.1:{}", text.trim()).parse().expect("an address"),
            Err(_) => assert!(begun.elapsed() < PATIENCE, "the server does not become ready"),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    send(address, "/v1/completions", &[("x-request-id", "mine")], &json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true}))
        .reply()
        .ok();
    let status = Command::new("kill").args(["-TERM", &server.id().to_string()]).status();
    assert!(status.expect("kill runs").success() && server.wait().expect("it ends").success());
    let text = std::fs::read_to_string(&log).expect("readable");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON lines"));
    let line = lines.map(|line| line["fields"].clone()).find(|fields| fields["message"] == "generation ended").expect("the line is there");
    assert_eq!((&line["request_id"], &line["completion_tokens"], &line["preemptions"]), (&json!("mine"), &json!(3), &json!(0)));
    for name in ["queue_ms", "prefill_ms", "decode_ms", "kv_page_seconds", "first_token_ms", "total_ms"] {
        assert!(line[name].as_f64().is_some_and(|value| value >= 0.0), "{name}: {line}");
    }
}
