//! The command line: output, exit codes, dumps.

use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn oxide(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxide-compile"));
    command.args(args).current_dir(folder).env_clear().env("HOME", folder);
    command.output().expect("runs")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

#[test]
fn the_shipped_model_compiles_from_any_folder_with_a_report() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = oxide(folder.path(), &["oxide-tiny", "--target", "cpu", "-o", "tiny.oxb", "--no-golden"]);
    assert!(output.status.success(), "{}", stderr(&output));
    for part in ["sealed   tiny.oxb", "seal     ", "limits   context 2048 tokens (profile)", "KV cache", "total"] {
        assert!(stdout(&output).contains(part), "no `{part}` in\n{}", stdout(&output));
    }
    assert!(stderr(&output).contains("writing weights"), "plain lines without a terminal");
    assert!(!stderr(&output).contains('\u{1b}'), "no escapes without a terminal");
}

#[test]
fn json_reports_are_json_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = oxide(folder.path(), &["oxide-tiny", "--target", "cpu", "--no-golden", "--json", "--max-context", "512"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["limits"]["context_max"], 512);
    assert_eq!(report["limits"]["context_origin"], "--max-context");
    assert_eq!(report["output"], "oxide-tiny-cpu.oxb");
    assert_eq!(report["seal"].as_str().map(str::len), Some(64));
    assert!(output.stderr.is_empty());
    let profiles = oxide(folder.path(), &["profiles", "--json"]);
    let profiles: Value = serde_json::from_slice(&profiles.stdout).expect("JSON");
    assert_eq!(profiles.as_array().map(Vec::len), Some(4));
}

#[test]
fn an_output_whose_name_is_no_text_is_reported_as_nearly_as_json_can() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = OsStr::from_bytes(b"b\xff.oxb");
    let args = ["oxide-tiny", "--target", "cpu", "--no-golden", "--json", "-o"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_oxide-compile"));
    let output = command.args(args).arg(name).current_dir(folder.path()).output().expect("runs");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["output"], "b\u{fffd}.oxb");
    assert!(folder.path().join(name).exists());
}

#[test]
fn each_stage_can_be_dumped_without_a_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    for (stage, start) in [("graph", "graph \"qwen2.5-1.5b\" {"), ("schedule", "schedule \"qwen2.5-1.5b\" {"), ("plan", "plan v")] {
        let output = oxide(folder.path(), &["qwen2.5-1.5b", "--target", "cpu", "--dump", stage]);
        assert!(output.status.success() && stdout(&output).starts_with(start), "{stage}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 0);
}

#[test]
fn output_that_nobody_reads_is_no_failure_and_output_that_cannot_be_written_is_one() {
    let commands: [&[&str]; 3] = [&["profiles"], &["kernels", "--json"], &["oxide-tiny", "--target", "cpu", "--dump", "plan"]];
    for args in commands {
        let closed_pipe = || std::io::pipe().expect("a pipe").1;
        let run = |stdout: Stdio, stderr: Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oxide-compile"));
            command.args(args).stdout(stdout).stderr(stderr).output().expect("runs")
        };
        let unread = run(closed_pipe().into(), closed_pipe().into());
        assert_eq!(unread.status.code(), Some(0), "{args:?}");
        let full = std::fs::File::create("/dev/full").expect("exists");
        let unwritten = run(full.into(), Stdio::piped());
        assert_eq!(unwritten.status.code(), Some(1), "{args:?}");
        assert!(stderr(&unwritten).contains("cannot write output: No space left"), "{}", stderr(&unwritten));
    }
}

#[test]
fn exit_codes_are_distinct() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("bad.toml"), "name = 3").expect("writes");
    let cases: [(&[&str], i32, &str); 9] = [
        (&["oxide-tiny"], 2, "--target"),
        (&["oxide-tiny", "--target", "tpu"], 2, "no target `tpu`"),
        (&["nothing", "--target", "cpu"], 3, "no profile `nothing`"),
        (&["bad.toml", "--target", "cpu"], 4, "bad.toml"),
        (&["oxide-tiny", "--target", "cpu", "--max-context", "4096"], 5, "--max-context 4096 is outside 1..=2048"),
        (&["qwen2.5-0.5b", "--target", "cpu"], 10, "oxide-compile pull qwen2.5-0.5b"),
        (&["oxide-tiny", "--target", "cpu", "--model", "gone"], 12, "config.json is missing"),
        (&["oxide-tiny", "--target", "sm90", "--artifacts", "gone"], 20, "no kernel for 12 contracts"),
        (&["oxide-tiny", "--target", "cpu", "-o", "gone/out.oxb"], 30, "gone/out.oxb.partial"),
    ];
    for (args, code, message) in cases {
        let output = oxide(folder.path(), args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn the_embedded_model_needs_no_pull() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = oxide(folder.path(), &["pull", "oxide-tiny"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("part of oxide-compile"));
}
