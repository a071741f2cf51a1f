//! Graph text files: passes, verifier and parser against their expected output.
//!
//! A file of `tests/filetests/` says in its first line what is done with the text before `----`; the text
//! after it is what must come out. `UPDATE_FILETESTS=1` writes what comes out instead.

use oxide_bundle::dtype::DType;
use oxide_bundle::manifest::Target;
use oxide_bundle::plan::{BatchClass, KvGeometry};
use oxide_bundle::step::StepBounds;
use oxide_compile::catalogue::Catalogue;
use oxide_compile::graph::{self, Graph, Precision};
use oxide_compile::passes::{self, Settings};
use oxide_compile::profile::{BUILTIN, Profile};
use oxide_compile::schedule;
use proptest::prelude::*;
use std::fs;
use std::path::Path;

fn settings() -> Settings {
    let bounds = StepBounds { tokens_max: 4, seqs_max: 2, rows_max: 2, pages_per_seq_max: 4, bias_max: 8, history_max: 8, vocab: 64 };
    Settings {
        target: Target::Cpu,
        act: DType::F32,
        weight: DType::Bf16,
        kv: KvGeometry { layers: 1, page_tokens: 16, kv_heads: 1, head_dim: 8, dtype: DType::F32 },
        bounds,
        classes: vec![BatchClass::Decode { seqs: 2 }, BatchClass::Mixed { tokens: 4, seqs: 2 }],
        catalogue: Catalogue::Cpu,
    }
}

fn run(action: &str, text: &str) -> String {
    let parsed = match graph::parse(text) {
        Ok(graph) => graph,
        Err(error) => return format!("{error}\n"),
    };
    match action {
        "parse" => graph::print(&parsed),
        "verify" => graph::verify(&parsed).map_or_else(|error| format!("{error}\n"), |()| "valid\n".to_owned()),
        "schedule" => lowered("schedule", parsed, |unit| unit.schedule.as_ref().map(schedule::print)),
        pass => lowered(pass, parsed, |unit| Some(graph::print(&unit.graph))),
    }
}

fn lowered(pass: &str, graph: Graph, show: impl Fn(&passes::Unit) -> Option<String>) -> String {
    assert!(passes::names().any(|name| name == pass), "no pass {pass}");
    match passes::lower_through(pass, graph, &settings()) {
        Ok(unit) => show(&unit).expect("the pass makes it"),
        Err(error) => format!("{error}\n"),
    }
}

fn check(path: &Path) -> Result<(), String> {
    let file = fs::read_to_string(path).expect("readable");
    let (input, expected) = file.split_once("----\n").unwrap_or((&file, ""));
    let action = input.lines().next().and_then(|line| line.strip_prefix("// run: ")).expect("the first line says what to run");
    let found = run(action, input);
    if std::env::var_os("UPDATE_FILETESTS").is_some() {
        fs::write(path, format!("{input}----\n{found}")).expect("writable");
        return Ok(());
    }
    if found == expected { Ok(()) } else { Err(format!("{}:\n--- expected\n{expected}--- found\n{found}", path.display())) }
}

#[test]
fn files_give_what_they_say() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests");
    let mut paths: Vec<_> = fs::read_dir(folder).expect("the folder").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    assert!(paths.len() >= 8, "only {} files", paths.len());
    let failed: Vec<String> = paths.iter().filter_map(|path| check(path).err()).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn text_form_round_trips_for_every_profile_before_and_after_the_passes() {
    for found in BUILTIN {
        let profile = Profile::load(found.name).expect("valid");
        let built = graph::build(&profile, Precision { act: DType::F32 }, 64).expect("builds");
        let fused = passes::lower_through("choose_layouts", built.clone(), &settings()).expect("lowers").graph;
        for graph in [built, fused] {
            graph::verify(&graph).expect("valid");
            let text = graph::print(&graph);
            let again = graph::parse(&text).expect("parses");
            graph::verify(&again).expect("valid");
            assert_eq!(graph::print(&again), text);
        }
    }
}

proptest! {
    #[test]
    fn the_parser_never_panics(text in "\\PC{0,200}") {
        let _ = graph::parse(&text);
    }

    #[test]
    fn damaged_graphs_are_refused_or_verified_without_a_panic(cut in 0_usize..4000, put in "[ -~]{0,6}") {
        let graph = graph::build(&crate::support::small(), Precision { act: DType::F32 }, 96).expect("builds");
        let mut text = graph::print(&graph);
        let at = cut.min(text.len());
        text.replace_range(at..(at + put.len()).min(text.len()), &put);
        if let Ok(graph) = graph::parse(&text) {
            let _ = graph::verify(&graph);
            let _ = passes::lower_through("choose_layouts", graph, &settings());
        }
    }
}
