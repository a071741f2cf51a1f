//! Outputs close whatever the regular expression and the budget: the shortest output that is told is one that
//! fits, no smaller limit would do for what is usual, and nothing is cut from there on.

use crate::sampler::{Outcome, Random, Taste, compile, draw};
use oxide_run::grammar::ConstraintKind;
use serde_json::{Value, json};

/// Regular expressions that a text matches as a whole.
const WHOLE: [&str; 34] = [
    ".*foo",
    "[a-z]*foo",
    "a.*b",
    ".+foo.+bar",
    "(?i)abc",
    "(?i).*straße",
    r"\d{3}",
    r"\w+@\w+\.(com|org)",
    "(a|b)*abb",
    "(foo|bar|.*baz)",
    "x{3,}y{2,5}z?",
    "[^a]*a[^b]*b[^c]*c",
    "(ab|c[0-9]{30})+",
    "(a{7}|b{5})*c",
    r"[\s\S]{0,40}end",
    "(?s).*\nfoo",
    r"[^\s]{1,8}",
    "é+日?",
    "[à-ÿ]{2,4}",
    "[一-龠]{1,3}です",
    r"\p{Greek}+",
    r"\p{Lu}\p{Ll}{2,}",
    ".{10}",
    ".{3}😀.{3}",
    "(0|[1-9][0-9]*)([.][0-9]+)?",
    "#[0-9a-fA-F]{6}",
    "[01]+(,[01]+)*;",
    "(GET|POST) /[a-z/]{0,30} HTTP/1[.][01]",
    "([a-z]+ ){5}[a-z]+[.]",
    ".*(foo.*bar|bar.*foo).*",
    "q?w?e?r?t?y?!",
    "((a|b)c){4}",
    "(yes|no|maybe|international relations)",
    "-?[0-9]{1,18}",
];

/// Patterns of a schema, which are found anywhere in a string unless they are anchored.
const FOUND: [&str; 26] = [
    "b",
    "ab+c",
    "(?i)abc",
    r"\d{3}$",
    "^foo",
    "foo$",
    "^a.*b$",
    "a.*b",
    "(foo|bar)$",
    "[A-Z]{2}-[0-9]{4}",
    "^[^\"]*\"[^\"]*$",
    r"\\",
    "\t",
    "日本",
    "[α-ω]{3}$",
    "😀",
    r"^\p{Lu}",
    r"^(\w+\s)+\w+\.$",
    "x.{5}y",
    "^.{12}$",
    "^(a{7}|b{5})*c$",
    "[0-9]+(\\.[0-9]+)?$",
    "^(?:(?:25[0-5]|1[0-9]{2}|[1-9]?[0-9])\\.){3}[0-9]{1,3}$",
    "[/]$",
    "^$|^never$",
    ".",
];

/// Further parts of a string's schema beside a pattern.
fn bounded() -> Vec<Value> {
    vec![
        json!({"type": "string", "pattern": "^(aaa)*$", "minLength": 4}),
        json!({"type": "string", "pattern": "^(aaa)*$", "minLength": 4, "maxLength": 6}),
        json!({"type": "string", "pattern": "b", "minLength": 8, "maxLength": 9}),
        json!({"type": "string", "pattern": "^(a{7}|b{5})*$", "minLength": 23, "maxLength": 40}),
        json!({"type": "string", "pattern": "[0-9]$", "maxLength": 3}),
        json!({"allOf": [{"type": "string", "pattern": "foo"}, {"type": "string", "pattern": "bar"}]}),
        json!({"type": "string", "format": "date", "pattern": "^29"}),
        json!({"type": "object", "patternProperties": {"foo": {"type": "integer"}}, "properties": {"xfoo": {"const": 1}}, "required": ["xfoo"], "additionalProperties": false}),
        json!({"type": "object", "patternProperties": {"a.*b": {"pattern": "c$"}}, "additionalProperties": false, "minProperties": 1}),
        json!({"type": "array", "items": {"type": "string", "pattern": "foo"}, "minItems": 3}),
        deep_or_deeper(),
        json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
        json!({"type": "array", "items": {"type": ["integer", "null"], "exclusiveMaximum": 1e19, "minimum": 1_000_000}, "minItems": 1}),
        json!({"type": "integer", "multipleOf": 997, "minimum": 10000, "maximum": 99_999_999}),
    ]
}

/// Two kinds of nested arrays that only their innermost values tell apart: one closes at once, the other needs
/// many more items at each level.
fn deep_or_deeper() -> Value {
    let nest = |inner: Value, count: u64| (0..5).fold(inner, |items, _| json!({"type": "array", "items": items, "minItems": count}));
    json!({"anyOf": [nest(json!({"type": "integer"}), 1), nest(json!({"type": "string", "maxLength": 1}), 4)]})
}

fn matches(schema: &Value, text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    jsonschema::options().should_validate_formats(true).build(schema).expect("a valid schema").is_valid(&value)
}

/// Whether a text matches as a whole; the syntax is that of Rust, which no validator of schemas has.
fn whole(pattern: &str, text: &str) -> bool {
    llguidance::derivre::Regex::new(pattern).expect(pattern).is_match(text)
}

/// What is wrong with outputs of several budgets.
fn faults(name: &str, kind: ConstraintKind, valid: impl Fn(&str) -> bool) -> Vec<String> {
    let compiled = match compile(kind) {
        Ok(compiled) => compiled,
        Err(error) => return vec![format!("{name}: {error}")],
    };
    let Some(shortest) = compiled.shortest().and_then(|shortest| u32::try_from(shortest).ok()) else {
        return vec![format!("{name}: no shortest output is known")];
    };
    // Every request may draw a token at least.
    let shortest = shortest.max(1);
    let mut found = Vec::new();
    for seed in 0..6 {
        for more in [0, 1, 3, 10, 40] {
            let taste = [Taste::Even, Taste::Long, Taste::Endless][(seed % 3) as usize];
            match draw(&compiled, shortest + more, seed * 100 + u64::from(more), taste) {
                Outcome::Complete(text) if valid(&text) => {}
                Outcome::Complete(text) => found.push(format!("{name} ({taste:?}): {text:?} does not match")),
                Outcome::Cut(text) => found.push(format!("{name} ({taste:?}): not closed within {shortest} + {more}: {text:?}")),
            }
        }
    }
    found
}

fn expect_none(found: &[String]) {
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n"));
}

#[test]
fn texts_of_any_regular_expression_close_within_any_budget_that_is_taken() {
    let each = |pattern: &&str| faults(pattern, ConstraintKind::Regex((*pattern).to_owned()), |text| whole(pattern, text));
    expect_none(&WHOLE.iter().flat_map(each).collect::<Vec<_>>());
}

#[test]
fn strings_of_any_pattern_close_within_any_budget_that_is_taken() {
    let schemas = FOUND.iter().map(|pattern| json!({"type": "string", "pattern": pattern})).chain(bounded());
    let each = |schema: Value| faults(&schema.to_string(), ConstraintKind::Schema(schema.clone()), |text| matches(&schema, text));
    expect_none(&schemas.flat_map(each).collect::<Vec<_>>());
}

/// Lark grammars, and what begins and ends every text of theirs.
const LARK: [(&str, &str, &str); 7] = [
    ("start: \"(\" list \")\"\nlist: NUMBER (\",\" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n", "(", ")"),
    ("start: \"<\" start \">\" | \"x\"", "", ""),
    ("start: \"a\" rest\nrest: /x{30}/ \";\" | \"b\" rest | \";\"", "a", ";"),
    ("start: sum\nsum: sum \"+\" product | product\nproduct: product \"*\" atom | atom\natom: /[0-9]+/ | \"(\" sum \")\"", "", ""),
    ("start: item+ \"end\"\nitem: WORD \" \" | \"[\" item item item \"]\"\nWORD: /[A-Z]{2,6}/", "", "end"),
    ("%ignore /[ ]{1,4}/\nstart: \"begin\" (\"a\" | \"bb\" \"ccc\" | block)* \"end\"\nblock: \"{\" start \"}\"", "begin", "end"),
    ("start: \"k\" \"=\" VALUE\nVALUE: /\\/\\*[a-z ]*\\*\\//", "k=/*", "*/"),
];

#[test]
fn texts_of_lark_grammars_close_within_any_budget_that_is_taken() {
    let each = |(grammar, first, last): &(&str, &str, &str)| {
        faults(grammar, ConstraintKind::Lark((*grammar).to_owned()), |text| text.starts_with(first) && text.ends_with(last))
    };
    expect_none(&LARK.iter().flat_map(each).collect::<Vec<_>>());
}

#[test]
fn the_shortest_output_of_usual_forms_is_no_longer_than_it_must_be() {
    let format = |name: &str| ConstraintKind::Schema(json!({"type": "string", "format": name}));
    let regex = |pattern: &str| ConstraintKind::Regex(pattern.to_owned());
    for (kind, most) in [
        (format("email"), 7),
        (format("ipv6"), 5),
        (format("ipv4"), 9),
        (format("uuid"), 38),
        (format("date"), 12),
        (format("date-time"), 22),
        (format("hostname"), 3),
        (format("uri"), 12),
        (format("duration"), 5),
        (regex("a.*b"), 2),
        (regex(".*foo"), 3),
        (regex("[a-z]*foo"), 3),
        (regex("(x|international)"), 1),
        (ConstraintKind::Schema(json!({"type": "string", "pattern": "b"})), 3),
        (ConstraintKind::Schema(json!({"type": "string", "pattern": r"\d{3}$"})), 5),
    ] {
        let shortest = compile(kind.clone()).expect("compiles").shortest().expect("known");
        assert!(shortest <= most, "{kind:?}: {shortest}");
    }
}

#[test]
fn what_cannot_be_known_to_close_is_refused_by_name() {
    for (kind, word) in [
        (ConstraintKind::Regex("a{1000000}".to_owned()), "complete output"),
        (ConstraintKind::Schema(json!({"type": "string", "pattern": "^a{100000}$"})), "complete output"),
        (ConstraintKind::Schema(json!({"type": "string", "minLength": 100_000})), "complete output"),
        (ConstraintKind::Schema(json!({"type": "array", "items": {"type": "string"}, "minItems": 100_000})), "complete output"),
        (ConstraintKind::Lark("start: A \"!\"\nA: /(a|b)*a(a|b){17}/".to_owned()), "too many ways"),
        (ConstraintKind::Lark("start: A \"b\"\nA[max_tokens=5]: /.*/".to_owned()), "max_tokens"),
        (ConstraintKind::Lark("start: A \"end\"\nA: /[a-z]+/".to_owned()), "complete output"),
    ] {
        let error = compile(kind.clone()).err().unwrap_or_else(|| panic!("not refused: {kind:?}"));
        assert!(error.contains(word), "{kind:?}: {error}");
    }
}

/// A regular expression made at random.
fn made(random: &mut Random, depth: u32) -> String {
    const ATOMS: [&str; 20] = [
        "a", "b", "foo", "[a-z]", "[0-9]", r"\d", r"\w", "[^a]", ".", "é", "[α-ω]", "日", "😀", r"\s", r"\.", "-", "[A-F0-9]", "(?i:end)",
        "\"", r"\\",
    ];
    const REPEATS: [&str; 8] = ["*", "+", "?", "{2}", "{1,4}", "{3,}", "{0,12}", "{17}"];
    let inner = |random: &mut Random| made(random, depth - 1);
    match if depth == 0 { 0 } else { random.below(6) } {
        0 => ATOMS[random.below(ATOMS.len())].to_owned(),
        1 | 2 => (0..2 + random.below(3)).map(|_| inner(random)).collect(),
        3 => format!("({}|{})", inner(random), inner(random)),
        4 => format!("(?:{}){}", inner(random), REPEATS[random.below(REPEATS.len())]),
        _ => format!("{}{}", ATOMS[random.below(8)], REPEATS[random.below(REPEATS.len())]),
    }
}

#[test]
fn texts_of_made_regular_expressions_close_within_any_budget_that_is_taken() {
    let mut random = Random::new(7);
    let patterns: Vec<String> = (0..60).map(|_| made(&mut random, 3)).collect();
    let each = |pattern: &String| faults(pattern, ConstraintKind::Regex(pattern.clone()), |text| whole(pattern, text));
    expect_none(&patterns.iter().flat_map(each).collect::<Vec<_>>());
}

#[test]
fn strings_of_made_patterns_close_within_any_budget_that_is_taken() {
    let mut random = Random::new(11);
    let mut found = Vec::new();
    for index in 0..60 {
        let (begin, pattern, end) = (["", "^"][random.below(2)], made(&mut random, 3), ["", "$"][random.below(2)]);
        let mut schema = json!({"type": "string", "pattern": format!("{begin}(?:{pattern}){end}")});
        let members = schema.as_object_mut().expect("an object");
        if index % 3 == 1 {
            members.insert("maxLength".to_owned(), (20 + random.below(30)).into());
        }
        if index % 6 == 1 {
            members.insert("minLength".to_owned(), random.below(9).into());
        }
        match compile(ConstraintKind::Schema(schema.clone())) {
            // What no string satisfies, and what the library cannot tell.
            Err(error) if error.contains("cannot be compiled") || error.contains("too many ways") => continue,
            _ => found.extend(faults(&schema.to_string(), ConstraintKind::Schema(schema.clone()), |text| matches(&schema, text))),
        }
    }
    expect_none(&found);
}
