//! Constraints by themselves: what is refused, what is matched, and how outputs end.

use crate::sampler::{Outcome, Taste, compile, draw, tokenizer};
use oxide_run::grammar::ConstraintKind;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longer than a compile may take on a busy machine, far shorter than these inputs would take unbounded.
const PATIENCE: Duration = Duration::from_secs(20);

fn refused(kind: ConstraintKind) -> String {
    let start = Instant::now();
    let shown: String = format!("{kind:?}").chars().take(120).collect();
    let error = compile(kind).err().unwrap_or_else(|| panic!("not refused: {shown}"));
    assert!(start.elapsed() < PATIENCE, "refused after {:?}: {error}", start.elapsed());
    error
}

#[test]
fn a_schema_that_cannot_be_enforced_is_refused_by_name() {
    for (schema, word) in [
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}), "`if`"),
        (json!({"type": "object", "unevaluatedProperties": false}), "unevaluatedProperties"),
        (json!({"type": "string", "format": "no-such-format"}), "format"),
        (json!({"type": "string", "pattern": "("}), "pattern"),
        (json!({"type": "string", "pattern": "(?=a)b"}), "pattern"),
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (json!({"$ref": "https://example.com/schema"}), "$ref"),
        (json!({"$ref": "#/$defs/missing"}), "$ref"),
        (json!({"$ref": "#"}), "$ref"),
        (json!({"type": "array", "maxItems": u64::MAX}), "maxItems"),
        (json!({"type": "array", "minItems": u64::MAX}), "minItems"),
        (json!({"type": "string", "minLength": 1e30}), "minLength"),
        (json!({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}), "no value"),
        (json!({"type": "object", "required": ["a"], "additionalProperties": false}), "no value"),
        (json!({"x-guidance": {"lenient": true}}), "x-guidance"),
        (json!(false), "no value"),
        (json!({"type": "integer", "minimum": 5, "maximum": 4}), "cannot be compiled"),
        (json!({"type": "string", "maxLenght": 1}), "maxLenght"),
        (json!({"type": "object", "properties": {"a": {"foo": 1}}}), "`foo`"),
        (json!({"const": 9_007_199_254_740_993_u64}), "9007199254740993"),
        (json!({"enum": []}), "`enum`"),
        (json!({"type": "string", "pattern": "a$b"}), "`pattern`"),
        (json!({"const": 1, "enum": [2]}), "`const`"),
    ] {
        let error = refused(ConstraintKind::Schema(schema.clone()));
        assert!(error.contains(word), "{schema}: {error}");
        assert!(!error.contains('\n') && error.len() < 500, "{error}");
    }
}

#[test]
fn hostile_constraints_are_refused_quickly() {
    refused(ConstraintKind::Regex("(".repeat(60_000)));
    refused(ConstraintKind::Regex(format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000))));
    let start = Instant::now();
    let _ = compile(ConstraintKind::Regex("(((a{1,1000}){1,1000}){1,1000}){1,1000}".to_owned()));
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    refused(ConstraintKind::Lark(format!("start: {}\"a\"{}", "(".repeat(60_000), ")".repeat(60_000))));
    refused(ConstraintKind::Lark("%llguidance {\"no_forcing\": true}\nstart: \"a\"".to_owned()));
    refused(ConstraintKind::Lark("start: %json {\"x-guidance\": {\"lenient\": true}}".to_owned()));
    refused(ConstraintKind::Lark("start: missing".to_owned()));
    refused(ConstraintKind::Lark(String::new()));
    for endless in ["start: start", "start: a\na: b\nb: a\n", "start: \"a\" start"] {
        assert!(refused(ConstraintKind::Lark(endless.to_owned())).contains("no finite output"), "{endless}");
    }
    let wide = (0..60_000).map(|index| (format!("k{index}"), json!({"type": "string"}))).collect::<serde_json::Map<_, _>>();
    refused(ConstraintKind::Schema(json!({"type": "object", "properties": wide})));
    let deep = (0..100).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    refused(ConstraintKind::Schema(deep));
}

#[test]
fn a_schema_of_a_hundred_properties_compiles_quickly() {
    let members =
        (0..100).map(|index| (format!("property_{index}"), json!({"type": ["string", "integer"]}))).collect::<serde_json::Map<_, _>>();
    let required: Vec<&String> = members.keys().take(10).collect();
    let schema = json!({"type": "object", "properties": members, "required": required, "additionalProperties": false});
    compile(ConstraintKind::Schema(json!({"type": "null"}))).expect("the vocabulary is prepared");
    let limit = Duration::from_millis(if cfg!(debug_assertions) { 500 } else { 50 });
    let quick = || {
        let start = Instant::now();
        compile(ConstraintKind::Schema(schema.clone())).expect("compiles");
        start.elapsed() < limit
    };
    // The first that meets an idle machine shows it; a busy one gets time to become idle.
    let start = Instant::now();
    while !quick() {
        assert!(start.elapsed() < PATIENCE * 3, "not once under {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn regular_expressions_and_choices_match_as_a_whole() {
    for (pattern, valid) in [
        (r"\d{3}-\d{2}", (|text: &str| text.len() == 6 && text.as_bytes()[3] == b'-') as fn(&str) -> bool),
        ("(yes|no|maybe)", |text: &str| ["yes", "no", "maybe"].contains(&text)),
        ("[ab]+", |text: &str| !text.is_empty() && text.bytes().all(|byte| b"ab".contains(&byte))),
    ] {
        let compiled = compile(ConstraintKind::Regex(pattern.to_owned())).expect(pattern);
        for seed in 0..20 {
            match draw(&compiled, 12, seed, Taste::Even) {
                Outcome::Complete(text) => assert!(valid(&text), "{pattern}: {text}"),
                Outcome::Cut(text) => panic!("{pattern}: cut at {text}"),
            }
        }
    }
    let options = ["left", "left turn", "日本", "quote \" and \\ backslash", "line\nbreak"].map(str::to_owned).to_vec();
    let compiled = compile(ConstraintKind::Choice(options.clone())).expect("choices");
    for seed in 0..40 {
        match draw(&compiled, 40, seed, Taste::Even) {
            Outcome::Complete(text) => assert!(options.contains(&text), "{text}"),
            Outcome::Cut(text) => panic!("cut at {text}"),
        }
    }
}

#[test]
fn a_lark_grammar_is_followed() {
    let grammar = "start: \"(\" list \")\"\nlist: NUMBER (\",\" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n";
    let compiled = compile(ConstraintKind::Lark(grammar.to_owned())).expect("compiles");
    for seed in 0..20 {
        if let Outcome::Complete(text) = draw(&compiled, 60, seed, Taste::Even) {
            let inner = text.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).expect(&text);
            assert!(inner.split(',').all(|number| number.parse::<u16>().is_ok()), "{text}");
        }
    }
}

#[test]
fn json_mode_gives_objects_that_close_with_any_budget() {
    let compiled = compile(ConstraintKind::Schema(json!({"type": "object"}))).expect("compiles");
    assert!(compiled.shortest().expect("a witness") <= 2);
    for seed in 0..60 {
        let budget = 2 + (seed as u32 * 7) % 150;
        match draw(&compiled, budget, seed, Taste::Endless) {
            Outcome::Complete(text) => assert!(serde_json::from_str::<Value>(&text).expect(&text).is_object()),
            Outcome::Cut(text) => panic!("not closed within {budget}: {text}"),
        }
    }
}

#[test]
fn the_end_is_allowed_exactly_where_the_grammar_may_stop() {
    let compiled = compile(ConstraintKind::Regex("ab?".to_owned())).expect("compiles");
    let mut mask = compiled.masks(10)();
    let (mut words, allowed) = (vec![0; 128], |words: &[u32], id: u32| words[(id / 32) as usize] >> (id % 32) & 1 == 1);
    let [a, b] = ["a", "b"].map(|text| tokenizer().token_id(text).expect("a byte"));
    mask.begin(10);
    mask.fill(&mut words);
    assert!(allowed(&words, a) && !allowed(&words, 4093) && !allowed(&words, b));
    mask.accept(a);
    mask.begin(9);
    mask.fill(&mut words);
    assert!(allowed(&words, b) && allowed(&words, 4093) && allowed(&words, 4091) && !allowed(&words, a));
    assert!(!allowed(&words, 4092), "a control token is never text");
}
