//! Parsers of the compiler under mutated input. `OXIDE_FUZZ_SECONDS` sets the time of each.

use oxide_compile::graph;
use oxide_compile::profile::{BUILTIN, Profile};
use oxide_testkit::{fuzz, fuzz_json, repo};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

fn profile(name: &str) -> PathBuf {
    repo().join("profiles").join(format!("{name}.toml"))
}

#[test]
fn profiles_of_any_text_return() {
    let corpus = ["oxide-tiny", "smollm2-135m", "qwen2.5-1.5b"].map(|name| fs::read(profile(name)).unwrap());
    assert!(!BUILTIN.is_empty());
    fuzz("profile", &corpus, |data| drop(Profile::parse("fuzz", &String::from_utf8_lossy(data))));
}

#[test]
fn profiles_of_any_values_return() {
    let texts = ["oxide-tiny", "smollm2-135m", "qwen2.5-1.5b"].map(|name| fs::read_to_string(profile(name)).unwrap());
    let corpus: Vec<Value> = texts.iter().map(|text| toml::from_str(text).unwrap()).collect();
    fuzz_json("profile values", &corpus, |value| {
        // TOML has no null: such a value is no profile to begin with.
        if let Ok(text) = toml::to_string(value) {
            drop(Profile::parse("fuzz", &text));
        }
    });
}

#[test]
fn graphs_of_any_text_return() {
    let folder = repo().join("compiler/tests/filetests");
    let corpus: Vec<Vec<u8>> = fs::read_dir(folder).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect();
    fuzz("graph", &corpus, |data| {
        let text = String::from_utf8_lossy(data);
        if let Ok(parsed) = graph::parse(&text) {
            let printed = graph::print(&parsed);
            let again = graph::parse(&printed).expect("what was printed parses");
            assert_eq!(graph::print(&again), printed, "printing is stable");
        }
    });
}
