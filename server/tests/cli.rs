//! The command line as a user meets it: the real program on the shipped model's real bundle.

use oxide_testkit::{repo, tiny_bundle};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_oxide-run");

/// What a finished command left.
struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    fn of(output: &Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("output is UTF-8");
        Self { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }

    fn json(&self) -> Value {
        assert_eq!(self.code, Some(0), "{}", self.err);
        serde_json::from_str(&self.out).expect("one JSON value")
    }

    /// Checks a refusal: its exit code, and words that its message must have.
    fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.err);
        assert!(self.err.starts_with("error: ") && words.iter().all(|word| self.err.contains(word)), "{}", self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
    }
}

fn command(bundle: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.arg(bundle).args(args).stdin(Stdio::null());
    command
}

fn run_on(bundle: &Path, args: &[&str]) -> Run {
    Run::of(&command(bundle, args).output().expect("the program runs"))
}

fn run(args: &[&str]) -> Run {
    run_on(&tiny_bundle(), args)
}

fn start(args: &[&str]) -> Child {
    let mut command = command(&tiny_bundle(), args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

fn run_with_input(args: &[&str], input: &str) -> Run {
    let mut child = start(args);
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("the program reads");
    Run::of(&child.wait_with_output().expect("the program ends"))
}

fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(status.expect("kill runs").success());
}

fn scratch(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).expect("writable");
    (folder, path)
}

/// Prompts and greedy ids of the reference implementation.
fn reference() -> Vec<(String, Vec<u32>)> {
    let text = std::fs::read_to_string(repo().join("profiles/oxide-tiny/reference.json")).expect("the reference is there");
    let reference: Value = serde_json::from_str(&text).expect("JSON");
    let prompts = reference["prompts"].as_array().expect("prompts").iter();
    let ids = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).expect("ids");
    let list = |ids: Vec<u32>| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    prompts.map(|prompt| (list(ids(&prompt["prompt_ids"])), ids(&prompt["greedy_f32"])[..12].to_vec())).collect()
}

#[test]
fn generate_gives_the_reference_s_ids_and_counts_them() {
    let (prompt, greedy) = &reference()[0];
    let run = run(&["generate", "--prompt-ids", prompt, "--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--json"]);
    let value = run.json();
    assert_eq!(value["token_ids"], json!(greedy));
    assert_eq!(value["finish_reason"], "length");
    let prompt_tokens = prompt.split(',').count();
    assert_eq!(value["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(value["usage"]["completion_tokens"], 12);
    assert_eq!(value["usage"]["total_tokens"], prompt_tokens + 12);
    assert!(value["text"].is_string());
}

#[test]
fn a_file_of_prompts_runs_together_and_answers_in_order() {
    let reference = reference();
    let lines: String = reference.iter().map(|(prompt, _)| format!("{{\"prompt_ids\":[{prompt}],\"max_tokens\":12}}\n")).collect();
    let (_folder, path) = scratch("prompts.jsonl", lines.as_bytes());
    let run = run(&["generate", "--prompts-file", path.to_str().expect("UTF-8"), "--temperature", "0", "--ignore-eos", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let answers: Vec<Value> = run.out.lines().map(|line| serde_json::from_str(line).expect("JSON lines")).collect();
    assert_eq!(answers.len(), reference.len());
    for (index, (answer, (_, greedy))) in answers.iter().zip(&reference).enumerate() {
        assert_eq!((&answer["index"], &answer["token_ids"]), (&json!(index), &json!(greedy)));
    }
}

#[test]
fn every_form_of_a_prompt_is_read() {
    let lines = "\"hello\"\n[1, 2, 3]\n{\"prompt\": [1, 2, 3], \"max_tokens\": 2}\n\n{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"temperature\": 0.5, \"seed\": 7}\n";
    let run = run_with_input(&["generate", "--prompts-file", "-", "-n", "3", "--temperature", "0", "--ignore-eos", "--json"], lines);
    let counts: Vec<Value> =
        run.out.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["usage"]["completion_tokens"].clone()).collect();
    assert_eq!(counts, [json!(3), json!(3), json!(2), json!(3)], "{}", run.err);
}

#[test]
fn options_in_a_file_of_prompts_are_read_or_named() {
    let lines =
        "{\"prompt\": [1, 2], \"min_tokens\": 3, \"ignore_eos\": true, \"stop\": \"x\", \"note\": 1}\n{\"prompt\": [1], \"note\": 2}\n";
    let run = run_with_input(&["generate", "--prompts-file", "-", "-n", "3", "--temperature", "0", "--json"], lines);
    assert_eq!((run.code, run.out.lines().count()), (Some(0), 2), "{}", run.err);
    let told = "line 1: the field `note` is not read\nline 1: the field `stop` is not read\n";
    assert_eq!(run.err.split('\n').collect::<std::collections::BTreeSet<_>>(), told.split('\n').collect());
    for line in ["{\"prompt\": [1], \"ignore_eos\": 1}", "{\"prompt\": [1], \"min_p\": \"0\"}"] {
        run_with_input(&["generate", "--prompts-file", "-"], line).refused(8, &["line 1", "is not"]);
    }
    run_with_input(&["generate", "--prompts-file", "-"], "{\"prompt\": [1], \"min_p\": 2}").refused(3, &["line 1", "2"]);
}

#[test]
fn a_measurement_that_the_bundle_cannot_make_is_refused() {
    run(&["bench", "--batch", "1,0"]).refused(3, &["--batch 0", "1 to 64"]);
    run(&["bench", "--batch", "65"]).refused(3, &["--batch 65", "1 to 64"]);
    run(&["bench", "--prefill", "2048"]).refused(3, &["--prefill 2048", "1 to 2047"]);
}

#[test]
fn a_prompt_comes_from_an_argument_a_flag_or_standard_input() {
    let flags = ["-n", "4", "--temperature", "0"];
    let argument = run(&[&["generate", "The capital of"], &flags[..]].concat());
    let flag = run(&[&["generate", "--prompt", "The capital of"], &flags[..]].concat());
    let input = run_with_input(&[&["generate"], &flags[..]].concat(), "The capital of");
    assert_eq!(argument.code, Some(0), "{}", argument.err);
    assert!(!argument.out.trim().is_empty());
    assert_eq!((&argument.out, &argument.out), (&flag.out, &input.out));
}

#[test]
fn a_seed_fixes_sampled_text() {
    let sample = |seed: &str| {
        run(&["generate", "Once upon", "-n", "16", "--temperature", "1.5", "--seed", seed, "--ignore-eos", "--json"]).json()["token_ids"]
            .clone()
    };
    assert_eq!(sample("5"), sample("5"));
    assert_ne!(sample("5"), sample("6"));
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let flags = ["generate", "--chat", "Count from 1 to 9.", "--temperature", "0", "--json"];
    let whole = run(&flags).json();
    let whole_text = whole["text"].as_str().expect("text");
    let stop = &whole_text[3..5];
    let cut = run(&[&flags[..], &["--stop", stop]].concat()).json();
    assert_eq!(cut["text"], whole_text[..whole_text.find(stop).expect("it is there")]);
    assert_eq!(cut["finish_reason"], "stop");
}

#[test]
fn requests_that_cannot_be_served_say_what_is_allowed() {
    run(&["generate", "--prompt-ids", "1,4096"]).refused(3, &["4096", "0 to 4095"]);
    run(&["generate", "--prompt-ids", "1,-2"]).refused(3, &["-2", "0 to 4095"]);
    run(&["generate", "--prompt-ids", "1", "-n", "2048"]).refused(3, &["2048", "context", "2047"]);
    run(&["generate", "--prompt-ids", "1", "-n", "0"]).refused(3, &["--max-tokens is 0"]);
    run(&["generate", ""]).refused(3, &["no tokens"]);
    run(&["generate", "x", "--temperature", "-1"]).refused(3, &["--temperature", "-1"]);
    run(&["generate", "x", "--stop", ""]).refused(3, &["--stop"]);
    let ids = vec!["1"; 2048].join(",");
    run(&["generate", "--prompt-ids", &ids]).refused(3, &["2048", "2047", "--max-context"]);
    run(&["generate", "--prompts-file", "/does/not/exist"]).refused(8, &["/does/not/exist"]);
    run_with_input(&["generate", "--prompts-file", "-"], "\"a\"\n{\"prompt\": 5}\n").refused(8, &["line 2"]);
    run_with_input(&["generate", "--prompts-file", "-"], "\"a\"\n[99999]\n").refused(3, &["line 2", "99999"]);
    assert_eq!(run(&["generate", "--prompt-ids", "1,x"]).code, Some(2));
}

#[test]
fn files_that_are_no_bundle_are_refused_each_in_its_own_way() {
    let sealed = std::fs::read(tiny_bundle()).expect("readable");
    let mut damaged = sealed.clone();
    let last = damaged.len() - 100_000;
    damaged[last] ^= 1;
    let cases: [(&[u8], i32, &[&str]); 4] = [
        (b"", 20, &["empty"]),
        (b"this is a text file, not a bundle\n", 21, &["not an oxide bundle"]),
        (&sealed[..sealed.len() / 2], 26, &["truncated"]),
        (&damaged, 45, &["WDAT"]),
    ];
    for (bytes, code, words) in cases {
        let (_folder, path) = scratch("model.oxb", bytes);
        for args in [&["generate", "x"][..], &["verify"]] {
            run_on(&path, args).refused(code, words);
        }
    }
    run_on(Path::new("/does/not/exist.oxb"), &["inspect"]).refused(18, &["/does/not/exist.oxb"]);
    run(&["inspect", "--expect", &"0".repeat(64)]).refused(52, &["seal"]);
}

#[test]
fn inspect_and_verify_describe_the_bundle() {
    let inspect = run(&["inspect", "--json"]).json();
    assert_eq!((&inspect["name"], &inspect["target"]), (&json!("oxide-tiny"), &json!("cpu")));
    assert_eq!(inspect["limits"]["context_max"], 2048);
    assert_eq!(inspect["seal"].as_str().map(str::len), Some(64));
    let verify = run(&["verify", "--full", "--json"]).json();
    assert_eq!((&verify["ok"], &verify["golden"]["failures"]), (&json!(true), &json!([])));
    assert_eq!(verify["seal"], inspect["seal"]);
    assert!(verify["golden"]["checked"].as_u64().is_some_and(|checked| checked > 0));
    assert!(run(&["inspect"]).out.contains("oxide-tiny"));
}

#[test]
fn fit_adds_up_and_refuses_what_is_too_small() {
    let fit = run(&["fit", "--memory", "200MiB", "--json"]).json();
    let field = |name: &str| fit[name].as_u64().expect("a number");
    let parts = ["weight_bytes", "arena_bytes", "input_bytes", "output_bytes", "kv_bytes", "unused_bytes"];
    assert_eq!(parts.into_iter().map(field).sum::<u64>(), 200 << 20);
    assert_eq!(field("kv_bytes"), field("kv_pages") * field("kv_page_bytes"));
    assert!(field("unused_bytes") < field("kv_page_bytes"));
    run(&["fit", "--memory", "5MB"]).refused(9, &["weights", "kv of one sequence", "--context"]);
}

#[test]
fn fit_counts_with_the_kv_memory_that_is_asked_for() {
    let fit = run(&["fit", "--memory", "1GiB", "--kv-memory", "64MiB", "--json"]).json();
    let field = |name: &str| fit[name].as_u64().expect("a number");
    assert_eq!(field("kv_pages"), (64 << 20) / field("kv_page_bytes"));
    assert_eq!(field("fixed_bytes") + field("kv_bytes") + field("unused_bytes"), 1 << 30);
    run(&["fit", "--memory", "1GiB", "--kv-memory", "2GiB"]).refused(9, &["--kv-memory 2147483648 B", "1073741824 B"]);
    let page = field("kv_page_bytes").to_string();
    run(&["fit", "--memory", "1GiB", "--kv-memory", &page]).refused(9, &["--kv-memory", "one sequence"]);
    run(&["fit", "--memory", "1GiB", "--kv-memory", "1"]).refused(4, &["KV"]);
    run(&["fit", "--memory", "5MB", "--kv-memory", "1GiB"]).refused(9, &["weights", "--context"]);
}

#[test]
fn bench_reports_speeds_and_what_memory_gives() {
    let args = ["bench", "--json", "--rounds", "1", "--batch", "1,2", "--prefill", "64", "--decode-tokens", "8"];
    let bench = run(&args).json();
    let positive = |value: &Value| value.as_f64().is_some_and(|number| number > 0.0);
    assert!(positive(&bench["read_bytes_per_second"]) && positive(&bench["process_to_first_token_s"]), "{bench}");
    let batches: Vec<&Value> = bench["decode"].as_array().expect("rows").iter().map(|row| &row["batch"]).collect();
    assert_eq!(batches, [&json!(1), &json!(2)]);
    assert!(positive(&bench["decode"][0]["tokens_per_second"]) && positive(&bench["decode"][0]["weight_bytes_per_second"]));
    assert_eq!(bench["prefill"][0]["tokens"], 64);
    assert!(positive(&bench["prefill"][0]["tokens_per_second"]));
}

#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let mut child = start(&["generate", "a", "-n", "2000", "--ignore-eos", "--temperature", "0"]);
    let mut out = child.stdout.take().expect("piped");
    out.read_exact(&mut [0; 4]).expect("text comes");
    drop(out);
    let run = Run::of(&child.wait_with_output().expect("ends"));
    assert_eq!((run.code, run.err.as_str()), (Some(0), ""));
}

#[test]
fn ctrl_c_ends_generate_with_130() {
    let mut child = start(&["generate", "a", "-n", "2000", "--ignore-eos", "--temperature", "0"]);
    child.stdout.as_mut().expect("piped").read_exact(&mut [0; 4]).expect("text comes");
    interrupt(&child);
    assert_eq!(Run::of(&child.wait_with_output().expect("ends")).code, Some(130));
}

#[test]
fn chat_answers_each_line_and_remembers_until_reset() {
    let question = "What is the capital of France?\n";
    let once = run_with_input(&["chat", "--temperature", "0"], question);
    let again = run_with_input(&["chat", "--temperature", "0"], &format!("{question}/reset\n{question}/exit\nnever read\n"));
    assert_eq!(once.code, Some(0), "{}", once.err);
    assert!(once.out.contains("Paris"), "{}", once.out);
    assert_eq!(again.out, once.out.repeat(2));
}

#[test]
fn chat_takes_messages_of_several_lines() {
    let block = run_with_input(&["chat", "--temperature", "0"], "\"\"\"\nCount from 1\nto 5.\n\"\"\"\n");
    let continued = run_with_input(&["chat", "--temperature", "0"], "Count from 1\\\nto 5.\n");
    assert_eq!(block.code, Some(0), "{}", block.err);
    assert_eq!(block.out.trim(), continued.out.trim());
}

#[test]
fn chat_refuses_a_message_that_does_not_fit_and_goes_on() {
    let long = "word ".repeat(3000);
    let run = run_with_input(&["chat", "--temperature", "0"], &format!("{long}\nWhat is the capital of France?\n"));
    assert_eq!(run.code, Some(0));
    assert!(run.err.contains("context") && run.out.contains("Paris"), "{} {}", run.err, run.out);
}

#[test]
fn ctrl_c_in_chat_stops_the_answer_and_not_the_conversation() {
    let mut child = start(&["chat", "-n", "1900", "--ignore-eos", "--temperature", "0"]);
    let mut input = child.stdin.take().expect("piped");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    input.write_all(b"Hello\n").expect("the program reads");
    out.read_exact(&mut [0; 4]).expect("text comes");
    interrupt(&child);
    out.read_until(b'\n', &mut Vec::new()).expect("the line ends");
    input.write_all(b"/exit\n").expect("the program reads on");
    assert_eq!(Run::of(&child.wait_with_output().expect("ends")).code, Some(0));
}

/// Status line and body of a plain GET.
fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).expect("the server listens");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("the server reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the server answers");
    answer
}

#[test]
fn serve_proves_itself_answers_and_ends_in_order() {
    let server = oxide_testkit::ServerProcess::start(PROGRAM, &tiny_bundle(), &["--self-test", "--model-name", "tiny"]);
    while get(server.address(), "/health").starts_with("HTTP/1.1 503") {
        std::thread::yield_now();
    }
    assert!(get(server.address(), "/v1/models").contains("\"id\":\"tiny\""));
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn serve_ends_with_the_bundle_s_exit_code_if_it_does_not_load() {
    let sealed = std::fs::read(tiny_bundle()).expect("readable");
    let (_folder, path) = scratch("model.oxb", &sealed[..sealed.len() / 2]);
    let run = run_on(&path, &["serve", "--port", "0"]);
    assert_eq!(run.code, Some(26), "{}", run.err);
    assert!(run.err.contains("truncated"), "{}", run.err);
}

#[test]
fn a_server_outlives_the_reader_of_its_log() {
    let (_folder, port_file) = scratch("port", b"");
    let mut command = command(&tiny_bundle(), &["serve", "--port", "0", "--port-file", port_file.to_str().expect("UTF-8")]);
    let mut server = command.stderr(std::io::pipe().expect("a pipe").1).spawn().expect("starts");
    let taken = || !std::fs::read(&port_file).expect("readable").is_empty();
    while !taken() {
        assert_eq!(server.try_wait().expect("asked"), None, "the server ended");
        std::thread::yield_now();
    }
    server.kill().expect("killed");
    server.wait().expect("ended");
}

#[test]
fn what_says_nothing_is_refused() {
    let (_folder, empty) = scratch("journal-1-1.jsonl", b"");
    for path in [&empty, &empty.parent().expect("a folder").to_owned()] {
        run(&["replay", path.to_str().expect("UTF-8")]).refused(8, &["journal-1-1.jsonl", "holds no entry"]);
    }
    for key in ["", " ", "a "] {
        run(&["serve", "--port", "0", "--api-key", "good", "--api-key", key]).refused(2, &["--api-key"]);
    }
    for (policy, found) in
        [("[]", "an array"), ("7", "an integer"), ("null", "null"), ("[null,null,null,null,null,\"proven\"]", "an array")]
    {
        let (_folder, path) = scratch("policy.json", policy.as_bytes());
        let run = run(&["verify", "--policy", path.to_str().expect("UTF-8")]);
        run.refused(8, &["policy.json", "must be an object of rules", found]);
        assert!(!run.err.contains("struct"), "{}", run.err);
    }
}

#[test]
fn conversations_of_a_file_are_checked_as_those_of_requests_are() {
    for (line, words) in [
        (r#"{"messages":[{"role":"alien","content":"a"}]}"#, "messages[0].role"),
        (r#"{"messages":[{"role":"user","content":"a"}],"prompt":"b"}"#, "both `messages` and `prompt`"),
        (r#"{"prompt":"a","prompt_ids":[1]}"#, "both `prompt` and `prompt_ids`"),
        (r#"{"messages":[]}"#, "`messages` is empty"),
        (r#"{"messages":"hi"}"#, "`messages` must be"),
        (r#"{"messages":[{"role":"user"}]}"#, "messages[0].content"),
        (r#"{"messages":null}"#, "has none of"),
    ] {
        let run = run_with_input(&["generate", "--prompts-file", "-"], &format!("\"good\"\n\n{line}\n"));
        run.refused(8, &["line 3: ", words]);
    }
    let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"prompt":null}"#;
    let run = run_with_input(&["generate", "--prompts-file", "-", "-n", "2", "--json"], parts);
    assert_eq!(run.code, Some(0), "{}", run.err);
}
