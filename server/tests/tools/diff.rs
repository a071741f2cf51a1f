use crate::support::{folder, golden, run, run_on, short_bundle, text};
use oxide_testkit::tiny_bundle;

#[test]
fn a_bundle_equals_itself() {
    let run = run(&["diff", text(&tiny_bundle())]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    golden("diff_equal.txt", &run.out);
}

#[test]
fn a_shorter_context_shows_in_limits_ledger_and_plan_and_nowhere_else() {
    let run = run(&["diff", text(short_bundle())]);
    assert_eq!((run.code, run.err.as_str()), (Some(1), ""));
    golden("diff_short.txt", &run.out);
}

#[test]
fn json_names_every_aspect_and_both_values() {
    let run = run(&["diff", text(short_bundle()), "--json"]);
    let value = run.json();
    assert_eq!((run.code, &value["equal"]), (Some(1), &false.into()));
    let limits = value["differences"]["limits"].as_array().expect("a list");
    let context = limits.iter().find(|change| change["what"] == "context_max").expect("the context differs");
    assert_eq!((&context["left"], &context["right"]), (&2048.into(), &512.into()));
    assert_eq!(value["differences"]["tokenizer"].as_array().map(Vec::len), Some(0));
    let identity: Vec<&str> =
        value["differences"]["identity"].as_array().expect("a list").iter().filter_map(|change| change["what"].as_str()).collect();
    assert!(identity.contains(&"seal") && identity.contains(&"plan_root") && !identity.contains(&"kernels_root"), "{identity:?}");
}

#[test]
fn the_other_side_is_verified_too() {
    let folder = folder();
    let path = folder.path().join("bad.oxb");
    std::fs::write(&path, b"not a bundle").expect("writable");
    run(&["diff", text(&path)]).refused(21, &["bad.oxb"]);
    run_on(&path, &["diff", text(&tiny_bundle())]).refused(21, &["bad.oxb"]);
}
