use crate::support::{folder, golden, run, run_on, run_piped};
use oxide_testkit::tiny_bundle;
use serde_json::json;
use std::path::Path;

fn bytes() -> Vec<u8> {
    std::fs::read(tiny_bundle()).expect("readable")
}

#[test]
fn check_says_what_the_bundle_is_and_needs() {
    golden("check.txt", &run(&["check"]).succeeded().out);
}

#[test]
fn four_kib_from_a_pipe_tell_the_same_as_the_file() {
    let (piped, whole) = (run_piped(&bytes()[..4096], &["check", "--json"]), run(&["check", "--json"]));
    let (mut piped, mut whole) = (piped.succeeded().json(), whole.succeeded().json());
    assert_eq!(whole["file_bytes"], whole["sealed_bytes"]);
    assert_eq!((piped["file_bytes"].take(), whole["file_bytes"].take().is_u64()), (json!(null), true));
    assert_eq!(piped, whole);
}

#[test]
fn check_agrees_with_inspect() {
    let (check, inspect) = (run(&["check", "--json"]).json(), run(&["inspect", "--json"]).json());
    assert_eq!(check["seal"], inspect["seal"]);
    assert_eq!(check["limits"]["context_max"], inspect["limits"]["context_max"]);
    assert_eq!(check["weight_bytes"], inspect["ledger"]["weight_bytes"]);
    assert_eq!(check["limits"]["classes"], inspect["entries"].as_array().expect("a list").len());
}

#[test]
fn check_refuses_with_the_reader_s_exit_codes() {
    run_piped(&[], &["check"]).refused(20, &["empty"]);
    run_piped(b"#!/bin/sh", &["check"]).refused(21, &["not an oxide bundle"]);
    run_piped(&bytes()[..4095], &["check"]).refused(26, &["4095 bytes of 4096"]);
    let mut flipped = bytes()[..4096].to_vec();
    flipped[100] ^= 1;
    run_piped(&flipped, &["check"]).refused(28, &["HEAD"]);
    run_on(Path::new("/no/such/file.oxb"), &["check"]).refused(18, &["/no/such/file.oxb"]);
    run_piped(&bytes()[..4096], &["check", "--expect", &"0".repeat(64)]).refused(52, &["expected 0000"]);
}

#[test]
fn a_file_shorter_than_sealed_is_refused_without_reading_it() {
    let folder = folder();
    let path = folder.path().join("cut.oxb");
    std::fs::write(&path, &bytes()[..1 << 20]).expect("writable");
    run_on(&path, &["check"]).refused(26, &["1048576 bytes of"]);
}
