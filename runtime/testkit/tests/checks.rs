//! The tables of `docs/serving.md` that say which test shows which check: each check has one, and each test exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Checks of the serving interface. An id is never used for anything else; what is missing was withdrawn.
const CHECKS: &[u32] = &[
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 43,
    44, 45, 46, 47, 48, 49, 50, 52, 53, 55, 57, 58, 59, 61, 62, 63, 64, 65, 67, 68, 69, 70, 71, 72, 73, 75, 76, 77, 78, 79, 80, 81, 83, 84,
    85, 87, 88, 90, 91, 93, 95, 96, 97, 98, 99, 100,
];

/// Faults that users of other servers reported.
const FAULTS: &[u32] = &[
    1, 4, 6, 8, 9, 10, 11, 14, 15, 17, 18, 21, 22, 23, 24, 25, 27, 28, 29, 32, 33, 34, 35, 38, 39, 41, 43, 45, 47, 48, 50, 51, 52, 53, 55,
    56, 58, 60, 61, 62, 66, 67, 68, 70, 71,
];

/// Where tests of a prefix are; the prefix alone is the file, or a module in the folder. Others are modules of `server/tests/http`.
const PLACES: &[(&str, &str)] = &[
    ("live", "server/tests/live"),
    ("client", "server/tests/openai_client.py"),
    ("structured", "server/tests/structured"),
    ("observe", "server/tests/observe"),
    ("engine", "runtime/tests/engine"),
    ("text", "runtime/text/tests"),
    ("cpu", "runtime/src/device/cpu/tests"),
];

fn repo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository root exists")
}

/// A row of a table of checks.
#[derive(Debug, Default, PartialEq)]
struct Row {
    checks: BTreeSet<u32>,
    faults: BTreeSet<u32>,
    tests: Vec<String>,
}

/// Rows of all tables whose first column is called `check` or `fault`.
fn rows(document: &str) -> Vec<Row> {
    let (mut rows, mut inside) = (Vec::new(), false);
    for line in document.lines() {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        match (line.starts_with('|'), cells.first()) {
            (true, Some(&"check" | &"fault" | &"check, fault")) => inside = true,
            (true, Some(first)) if inside && !first.starts_with("---") => {
                // What follows a colon says what the fault was.
                let ids = first.split(':').next().unwrap_or_default();
                let tests = cells.last().into_iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
                rows.push(Row { tests: tests.map(str::to_owned).collect(), ..ids_of(ids) });
            }
            (true, _) => {}
            (false, _) => inside = false,
        }
    }
    rows
}

/// `B18–B20, B33, 61` as numbers: those with a `B` are checks.
fn ids_of(text: &str) -> Row {
    let mut row = Row::default();
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let number = |text: &str| text.trim_start_matches('B').parse::<u32>().unwrap_or_else(|error| panic!("`{text}` is no id: {error}"));
        let (first, last) =
            item.split_once('–').map_or_else(|| (number(item), number(item)), |(first, last)| (number(first), number(last)));
        if item.starts_with('B') { &mut row.checks } else { &mut row.faults }.extend(first..=last);
    }
    row
}

/// Texts of the files in which `prefix` has its tests.
fn sources(prefix: &str, module: Option<&str>) -> Vec<String> {
    let place = PLACES.iter().find(|(known, _)| *known == prefix).map(|(_, place)| repo().join(place));
    let files = match (place, module) {
        (None, _) => vec![repo().join(format!("server/tests/http/{prefix}.rs"))],
        (Some(place), Some(module)) => vec![place.join(format!("{module}.rs"))],
        (Some(place), None) if place.is_file() => vec![place],
        (Some(place), None) => fs::read_dir(&place).expect("a folder of tests").map(|entry| entry.expect("readable").path()).collect(),
    };
    let files = files.into_iter().filter(|file| file.is_file());
    files.map(|file| fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))).collect()
}

/// Whether `source` marks a function of this name as a test.
fn holds(source: &str, test: &str) -> bool {
    let mut before = "";
    source.lines().map(str::trim).any(|line| {
        let marked = before == "#[test]" || before.starts_with("#[tokio::test") || before == "@check";
        let found = marked && (line.starts_with(&format!("fn {test}(")) || line.starts_with(&format!("def {test}(")));
        before = line;
        found
    })
}

fn exists(name: &str) -> bool {
    let parts: Vec<&str> = name.split("::").collect();
    match parts[..] {
        [prefix, test] => sources(prefix, None).iter().any(|source| holds(source, test)),
        [prefix, module, test] => sources(prefix, Some(module)).iter().any(|source| holds(source, test)),
        _ => false,
    }
}

#[test]
fn every_check_and_every_fault_has_a_test_that_exists() {
    let document = fs::read_to_string(repo().join("docs/serving.md")).expect("the document is in the repository");
    let rows = rows(&document);
    let missing: Vec<&String> = rows.iter().flat_map(|row| &row.tests).filter(|test| !exists(test)).collect();
    assert!(missing.is_empty(), "tests that do not exist: {missing:#?}");
    let empty: Vec<&Row> = rows.iter().filter(|row| row.tests.is_empty()).collect();
    assert!(empty.is_empty(), "rows without a test: {empty:#?}");
    let shown = |ids: fn(&Row) -> &BTreeSet<u32>| rows.iter().flat_map(|row| ids(row).iter().copied()).collect::<BTreeSet<u32>>();
    assert_eq!(shown(|row| &row.checks), CHECKS.iter().copied().collect(), "checks");
    assert_eq!(shown(|row| &row.faults), FAULTS.iter().copied().collect(), "faults");
}

#[test]
fn the_tables_are_read_as_they_are_written() {
    let table = "| check, fault | test |\n|---|---|\n| B2–B4, 7 | `a::b`, `c` |\n\n| flag | test |\n|---|---|\n| B9 | `x` |\n";
    let row = Row { checks: [2, 3, 4].into(), faults: [7].into(), tests: vec!["a::b".to_owned(), "c".to_owned()] };
    assert_eq!(rows(table), [row]);
    assert!(holds("#[test]\nfn it() {", "it") && !holds("fn it() {", "it") && !holds("#[test]\nfn item() {", "it"));
    assert!(!exists("transport::no_such_test") && !exists("no_such_module::test") && !exists("no_such_test"));
}
