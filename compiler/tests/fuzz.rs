//! Parsers of the compiler under mutated input. `OXIDE_FUZZ_SECONDS` sets the time of each.

use oxide_compile::graph;
use oxide_compile::profile::{BUILTIN, Profile};
use oxide_testkit::{fuzz, repo};
use std::fs;

#[test]
fn profiles_of_any_text_return() {
    let folder = repo().join("profiles");
    let corpus: Vec<Vec<u8>> = ["oxide-tiny", "smollm2-135m", "qwen2.5-1.5b"]
        .map(|name| fs::read(folder.join(name).with_extension("toml")).or_else(|_| fs::read(folder.join(format!("{name}.toml")))).unwrap())
        .to_vec();
    assert!(!BUILTIN.is_empty());
    fuzz("profile", &corpus, |data| drop(Profile::parse("fuzz", &String::from_utf8_lossy(data))));
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
