//! Profiles: what is shipped is valid, what is wrong is refused with everything that is wrong.

use oxide_bundle::manifest::Target;
use oxide_compile::profile::{BUILTIN, Profile, ProfileError};

#[test]
fn every_shipped_profile_is_valid_for_both_targets() {
    let names: Vec<_> = BUILTIN.iter().map(|found| found.name).collect();
    assert_eq!(names, ["oxide-tiny", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b"]);
    for found in BUILTIN {
        let profile = Profile::load(found.name).expect("valid");
        assert_eq!(profile.name, found.name);
        for target in [Target::Cpu, Target::Sm90] {
            profile.settings(target).expect("both targets");
        }
    }
}

#[test]
fn an_unknown_key_is_refused_by_name() {
    let text = crate::support::SMALL.replace("tied = false", "tied = false\nexperts = 8");
    let error = Profile::parse("small", &text).expect_err("refused").to_string();
    assert!(error.contains("unknown field `experts`"), "{error}");
}

#[test]
fn every_wrong_value_is_listed() {
    let text = crate::support::SMALL.replace("kv_heads = 1", "kv_heads = 2").replace("head_dim = 16", "head_dim = 15");
    let text = text.replace("page_tokens = 16", "page_tokens = 24").replace("decode = [1, 2, 4]", "decode = [2, 1]");
    let Err(ProfileError::Invalid { problems, .. }) = Profile::parse("small", &text) else { panic!("not refused") };
    let expected = ["dims.heads 3", "dims.head_dim 15", "page_tokens is 24", "must rise"];
    assert_eq!(problems.len(), expected.len(), "{problems:?}");
    for (problem, part) in problems.iter().zip(expected) {
        assert!(problem.contains(part), "{problem} does not say {part}");
    }
}

#[test]
fn an_unknown_name_lists_what_there_is() {
    let error = Profile::load("qwen9").expect_err("refused").to_string();
    assert!(error.contains("oxide-tiny, smollm2-135m"), "{error}");
}

#[test]
fn a_profile_may_be_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, crate::support::SMALL).expect("writes");
    assert_eq!(Profile::load(path.to_str().expect("UTF-8")).expect("valid").name, "small");
}

#[test]
fn classes_are_cut_to_the_sequences_asked_for() {
    let profile = crate::support::small();
    let classes = profile.settings(Target::Cpu).expect("there").classes(3);
    let text = format!("{classes:?}");
    assert_eq!(
        text,
        "[Decode { seqs: 1 }, Decode { seqs: 2 }, Decode { seqs: 3 }, Mixed { tokens: 8, seqs: 3 }, Mixed { tokens: 32, seqs: 3 }]"
    );
}
