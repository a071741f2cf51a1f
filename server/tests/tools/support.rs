//! Bundles, runs and golden files for the tests of the bundle tools.

use oxide_testkit::{binary, repo, tiny_bundle};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// What a finished command left.
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }

    /// Checks a refusal: its exit code, and words that its message must have.
    pub(crate) fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.err);
        assert!(self.err.starts_with("error: ") && words.iter().all(|word| self.err.contains(word)), "{}", self.err);
    }

    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self
    }
}

fn finish(command: &mut Command) -> Run {
    let output = command.output().expect("the program runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

pub(crate) fn run_on(bundle: &Path, args: &[&str]) -> Run {
    finish(Command::new(env!("CARGO_BIN_EXE_oxide-run")).arg(bundle).args(args).stdin(Stdio::null()))
}

pub(crate) fn run(args: &[&str]) -> Run {
    run_on(&tiny_bundle(), args)
}

/// Runs with the first bytes of a file as standard input, as `curl -r` or `head -c` would give them.
pub(crate) fn run_piped(bytes: &[u8], args: &[&str]) -> Run {
    let folder = folder();
    let path = folder.path().join("start");
    std::fs::write(&path, bytes).expect("writable");
    let input = std::fs::File::open(&path).expect("readable");
    finish(Command::new(env!("CARGO_BIN_EXE_oxide-run")).arg("-").args(args).stdin(input))
}

pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a scratch folder")
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The shipped model with a shorter context: another bundle of the same model.
pub(crate) fn short_bundle() -> &'static Path {
    static SHORT: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let make = || {
        let folder = folder();
        let path = folder.path().join("short.oxb");
        let mut command = Command::new(binary("oxide-compile"));
        command.args(["oxide-tiny", "--target", "cpu", "--max-context", "512", "--no-golden", "-o"]).arg(&path);
        finish(command.current_dir(folder.path())).succeeded();
        (folder, path)
    };
    &SHORT.get_or_init(make).1
}

/// Compares output with a golden file, digests aside: they change with every release. `UPDATE_GOLDEN=1` writes it anew.
pub(crate) fn golden(name: &str, found: &str) {
    let path = repo().join("server/tests/tools/golden").join(name);
    let found = without_digests(found);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &found).expect("writable");
    }
    let wanted = std::fs::read_to_string(&path).expect("the golden file is there");
    assert!(found == wanted, "{name} differs; UPDATE_GOLDEN=1 writes it anew. Found:\n{found}");
}

/// Replaces words of 12 or 64 hex digits.
fn without_digests(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let (word, tail) = rest.split_at(end);
        let hex = word.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c));
        out.push_str(if hex && matches!(word.len(), 12 | 64) { "DIGEST" } else { word });
        let next = tail.chars().next();
        out.extend(next);
        rest = &tail[next.map_or(0, char::len_utf8)..];
    }
    out
}
