//! Policies: what an operator does not allow is named, all of it, before anything runs.

use crate::support::{Run, folder, run, run_on, short_bundle, text};
use oxide_testkit::{ServerProcess, tiny_bundle};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

const PROGRAM: &str = env!("CARGO_BIN_EXE_oxide-run");

/// A folder with a policy, and a key pair `a` beside it.
struct Office {
    folder: tempfile::TempDir,
}

impl Office {
    fn new() -> Self {
        let office = Self { folder: folder() };
        run_on(&office.path("a"), &["keygen"]).succeeded();
        office
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, policy: &Value) -> PathBuf {
        let path = self.path("policy.json");
        fs::write(&path, policy.to_string()).expect("written");
        path
    }

    fn verify(&self, policy: &Value) -> Run {
        run(&["verify", "--policy", text(&self.write(policy))])
    }
}

fn seal() -> String {
    run(&["inspect", "--json"]).json()["seal"].as_str().expect("a seal").to_owned()
}

#[test]
fn each_rule_alone_allows_and_refuses() {
    let office = Office::new();
    for (rule, good, bad, words) in [
        ("licences", json!(["Apache-2.0", "MIT"]), json!(["Apache-2.0"]), "`MIT` is not allowed (allowed: Apache-2.0)"),
        ("seals", json!([seal()]), json!(["00".repeat(32)]), "is not one of 1"),
        ("targets", json!(["cpu"]), json!(["sm90"]), "`cpu` is not allowed (allowed: sm90)"),
        ("profiles", json!(["oxide-tiny"]), json!([]), "`oxide-tiny` is not allowed"),
    ] {
        office.verify(&json!({ rule: good })).succeeded();
        office.verify(&json!({ rule: bad })).refused(13, &["violates the policy", &format!("{rule}: "), words]);
    }
    office.verify(&json!({"keys": ["a.pub"]})).refused(13, &["keys: ", "signed by nobody"]);
}

#[test]
fn all_violations_are_told_and_nothing_is_served() {
    let office = Office::new();
    let policy = office.write(&json!({
        "licences": ["GPL-3.0-only"], "keys": ["a.pub"], "seals": ["11".repeat(32)], "targets": ["sm90"], "profiles": ["other"], "golden": "proven",
    }));
    let refused = run_on(short_bundle(), &["serve", "--port", "0", "--policy", text(&policy)]);
    let rules = ["licences: ", "keys: ", "seals: ", "targets: ", "profiles: ", "golden: "];
    assert_eq!(refused.code, Some(13), "{}", refused.err);
    assert!(rules.iter().all(|rule| refused.err.contains(rule)), "{}", refused.err);
}

#[test]
fn a_bundle_that_meets_its_policy_is_served() {
    let office = Office::new();
    let bundle = office.path("m.oxb");
    fs::copy(tiny_bundle(), &bundle).expect("copied");
    run_on(&bundle, &["sign", "--key", text(&office.path("a"))]).succeeded();
    let policy =
        office.write(&json!({"licences": ["MIT"], "keys": ["a.pub"], "seals": [seal()], "targets": ["cpu"], "profiles": ["oxide-tiny"]}));
    drop(ServerProcess::start(PROGRAM, &bundle, &["--policy", text(&policy)]));
}

#[test]
fn a_file_that_is_no_policy_is_refused_by_name() {
    let office = Office::new();
    for (policy, word) in [
        (json!({}), "demands nothing"),
        (json!({"licenses": ["MIT"]}), "unknown field `licenses`"),
        (json!({"golden": "maybe"}), "unknown variant `maybe`"),
        (json!({"seals": ["xyz"]}), "xyz"),
        (json!({"keys": ["missing.pub"]}), "missing.pub"),
        (json!([]), "is no policy"),
    ] {
        let path = office.write(&policy);
        run(&["serve", "--port", "0", "--policy", text(&path)]).refused(8, &[word]);
    }
    run(&["verify", "--policy", "/no/such/file"]).refused(8, &["/no/such/file"]);
}
