//! Calls that the model may or may not make: strict functions, and answers that are calls or constrained text.

use crate::sampler::{EOS, Random, compile, tokenizer};
use crate::served::{chat, stream};
use crate::tool_calls::{calls_of, check_call, time, weather, whole_calls};
use oxide_run::grammar::{Compiled, ConstraintKind, Marked};
use oxide_runtime::engine::MaskVerdict;
use serde_json::{Value, json};

/// Ids of the marks in the shipped tokenizer.
const OPEN: u32 = 4094;
const CLOSE: u32 = 4095;
const CLOSE_TEXT: &str = "</tool_call>";

fn call_schema() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["name", "arguments"],
        "properties": {"name": {"const": "get_weather"}, "arguments": weather()["function"]["parameters"]},
    })
}

fn marked(text: Option<ConstraintKind>) -> Compiled {
    let (open, close, separator) = ("<tool_call>".to_owned(), CLOSE_TEXT.to_owned(), "\n".to_owned());
    compile(ConstraintKind::Marked(Marked { text: text.map(Box::new), open, close, separator, schema: call_schema(), most: 16 }))
        .expect("compiles")
}

fn allowed(words: &[u32]) -> Vec<u32> {
    (0..4096).filter(|id| words[(id / 32) as usize] >> (id % 32) & 1 == 1).collect()
}

/// Draws evenly among what is allowed after `forced`, until `done` or the budget is used up.
fn draw(compiled: &Compiled, forced: &[u32], budget: u32, seed: u64, done: impl Fn(&str) -> bool) -> (String, u32) {
    let (mut random, tokenizer) = (Random::new(seed), tokenizer());
    let mut mask = compiled.clone().masks(budget)();
    let (mut ids, mut words) = (Vec::new(), vec![0; 4096 / 32]);
    for left in (1..=budget).rev() {
        mask.begin(left);
        assert_eq!(mask.fill(&mut words), MaskVerdict::Continue);
        let options = allowed(&words);
        let id = forced.get(ids.len()).copied().unwrap_or_else(|| options[random.below(options.len())]);
        assert!(options.contains(&id), "{id} is not allowed after {:?}", tokenizer.decode(&ids, false));
        ids.push(id);
        let verdict = mask.accept(id);
        assert_ne!(verdict, MaskVerdict::Failed, "{:?}", tokenizer.decode(&ids, false));
        let text = tokenizer.decode(&ids, false);
        if verdict == MaskVerdict::Complete || (ids.len() >= forced.len() && done(&text)) {
            return (text, left - 1);
        }
    }
    (tokenizer.decode(&ids, false), 0)
}

fn check_text(text: &str) {
    let body = text.strip_suffix(CLOSE_TEXT).unwrap_or_else(|| panic!("not closed: {text}"));
    let body = body.split_once("<tool_call>").expect("a mark").1;
    let call: Value = serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body:?}"));
    assert!(jsonschema::is_valid(&call_schema(), &call), "{call}");
}

#[test]
fn a_call_in_free_text_follows_its_schema_from_its_mark_on_and_closes_in_time() {
    let compiled = marked(None);
    let text = tokenizer().encode_with_control("Let me look, {\"that\": \"is\", no call}.\n<tool_call>").expect("it encodes");
    assert_eq!(text.last(), Some(&OPEN));
    for seed in 0..12 {
        for budget in [70, 110, 400] {
            let budget = budget + text.len() as u32;
            let (drawn, _) = draw(&compiled, &text, budget, seed, |text| text.ends_with(CLOSE_TEXT));
            check_text(&drawn);
        }
    }
}

#[test]
fn a_mark_that_is_spelled_out_begins_a_call_too() {
    let compiled = marked(None);
    let mark: Vec<u32> =
        b"ab <tool_call>".iter().map(|byte| tokenizer().encode_plain(&char::from(*byte).to_string()).expect("it encodes")[0]).collect();
    assert!(!mark.contains(&OPEN));
    for seed in 0..6 {
        check_text(&draw(&compiled, &mark, 300, seed, |text| text.ends_with(CLOSE_TEXT)).0);
    }
}

#[test]
fn free_text_is_free_before_and_after_a_call_and_a_call_that_could_not_close_is_not_begun() {
    let compiled = marked(None);
    assert_eq!(compiled.shortest(), None);
    let mut mask = compiled.masks(400)();
    let mut words = vec![0; 4096 / 32];
    let mut at = |budget| {
        mask.begin(budget);
        assert_eq!(mask.fill(&mut words), MaskVerdict::Continue);
        let options = allowed(&words);
        (options.len(), options.contains(&OPEN), EOS.iter().all(|id| options.contains(id)))
    };
    assert_eq!(at(400), (4096, true, true));
    assert_eq!(at(10), (4095, false, true), "the shortest call takes more than nine tokens");
    let whole = tokenizer().encode_with_control(
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\", \"unit\": \"celsius\"}}\n</tool_call>",
    );
    let whole = whole.expect("it encodes");
    assert_eq!(whole.last(), Some(&CLOSE));
    let after = whole.len() as u32;
    let (text, left) = draw(&marked(None), &whole, 9000, 1, |_| true);
    assert_eq!((text.ends_with(CLOSE_TEXT), left), (true, 9000 - after));
    // Everything may follow, another call too.
    let again: Vec<u32> = whole.iter().copied().chain([4091, 300, 301]).chain(whole.iter().copied()).collect();
    assert!(draw(&marked(None), &again, 9000, 1, |_| true).0.ends_with(CLOSE_TEXT));
}

#[test]
fn an_answer_is_calls_or_text_that_satisfies_the_constraint() {
    let person = json!({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": false});
    let texts = [
        ConstraintKind::Schema(person.clone()),
        ConstraintKind::Regex("[a-c]{3}/[0-9]+".to_owned()),
        ConstraintKind::Choice(vec!["yes".to_owned(), "no \"way\"".to_owned()]),
    ];
    for (index, text) in texts.into_iter().enumerate() {
        let compiled = marked(Some(text));
        for seed in 0..8 {
            check_text(&draw(&compiled, &[OPEN], 120, seed, |text| text.ends_with(CLOSE_TEXT)).0);
            let first = |text: &str| tokenizer().encode_plain(text).expect("it encodes")[0];
            let begin = [first("{"), first("a"), first("y")][index];
            let (content, _) = draw(&compiled, &[begin], 60, seed, |_| false);
            let content = content.trim_end_matches("<|im_end|>").trim_end_matches("<|endoftext|>");
            match index {
                0 => assert!(jsonschema::is_valid(&person, &serde_json::from_str(content).expect(content)), "{content}"),
                1 => assert!(
                    content.split_once('/').is_some_and(|(a, b)| a.len() == 3 && b.bytes().all(|byte| byte.is_ascii_digit())),
                    "{content}"
                ),
                _ => assert_eq!(content, "yes"),
            }
        }
    }
}

#[test]
fn calls_without_marks_are_told_from_text_by_what_they_are() {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "parameters"],
        "properties": {"name": {"const": "get_weather"}, "parameters": weather()["function"]["parameters"]},
    });
    let person = json!({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": false});
    let text = Some(Box::new(ConstraintKind::Schema(person.clone())));
    let (open, close, separator) = (String::new(), String::new(), "; ".to_owned());
    let compiled =
        compile(ConstraintKind::Marked(Marked { text, open, close, separator, schema: schema.clone(), most: 2 })).expect("compiles");
    let (mut calls, mut texts) = (0, 0);
    for seed in 0..16 {
        let begin = if seed % 2 == 0 { "{\"name" } else { "{\"ag" };
        let bytes = begin.bytes().map(|byte| tokenizer().encode_plain(&char::from(byte).to_string()).expect("it encodes")[0]);
        let (drawn, _) = draw(&compiled, &bytes.collect::<Vec<_>>(), 300, seed, |_| false);
        let drawn = drawn.trim_end_matches("<|im_end|>").trim_end_matches("<|endoftext|>");
        let values: Vec<Value> = drawn
            .split("; {")
            .enumerate()
            .map(|(index, part)| {
                let part = if index == 0 { part.to_owned() } else { format!("{{{part}") };
                serde_json::from_str(&part).unwrap_or_else(|error| panic!("{error}: {drawn}"))
            })
            .collect();
        if values.iter().all(|value| jsonschema::is_valid(&schema, value)) && values.len() <= 2 {
            calls += 1;
        } else {
            assert!(matches!(&values[..], [value] if jsonschema::is_valid(&person, value)), "{drawn}");
            texts += 1;
        }
    }
    assert_eq!((calls, texts), (8, 8));
}

fn strict(tool: Value) -> Value {
    let mut tool = tool;
    tool["function"]["strict"] = true.into();
    tool
}

fn fields(more: Value) -> Value {
    let mut fields = json!({"tools": [strict(weather()), strict(time())], "tool_choice": "auto", "max_tokens": 120});
    fields.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    fields
}

#[test]
fn a_strict_call_that_the_model_chose_follows_its_schema() {
    for seed in 0..8 {
        let fields = fields(json!({"seed": seed, "logit_bias": {OPEN.to_string(): 100}}));
        let reply = chat(&fields).ok();
        let calls = reply["choices"][0]["message"]["tool_calls"].as_array().unwrap_or_else(|| panic!("no call: {reply}"));
        // A call that could not close is not begun, so that the last one is whole, too.
        calls.iter().for_each(check_call);
        assert_eq!(calls_of(&stream(&fields)).0, whole_calls(&reply));
    }
    let reply = chat(&fields(json!({"logit_bias": {OPEN.to_string(): -100}, "max_tokens": 20}))).ok();
    assert!(reply["choices"][0]["message"]["content"].is_string(), "{reply}");
}

#[test]
fn response_format_is_for_the_content_where_the_model_calls_nothing() {
    let schema =
        json!({"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "strict": true, "schema": schema}});
    for seed in 0..8 {
        let content = chat(&fields(json!({"seed": seed, "response_format": format, "logit_bias": {OPEN.to_string(): -100}}))).ok();
        let choice = &content["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap_or_else(|| panic!("no content: {content}"));
        assert!(jsonschema::is_valid(&schema, &serde_json::from_str(text).expect(text)), "{text}");
        assert_eq!((choice["finish_reason"].as_str(), choice["message"].get("tool_calls")), (Some("stop"), None));
        let calls = chat(&fields(json!({"seed": seed, "response_format": format, "logit_bias": {OPEN.to_string(): 100}}))).ok();
        let choice = &calls["choices"][0];
        assert_eq!((choice["finish_reason"].as_str(), choice["message"]["content"].is_null()), (Some("tool_calls"), true), "{calls}");
        choice["message"]["tool_calls"].as_array().expect("calls").iter().for_each(check_call);
    }
    chat(&fields(json!({"response_format": format, "max_tokens": 2}))).refused(400, "max_tokens");
}

#[test]
fn json_mode_beside_tools_gives_an_object_or_calls() {
    for seed in 0..6 {
        let reply = chat(&fields(json!({"seed": seed, "response_format": {"type": "json_object"}}))).ok();
        let message = &reply["choices"][0]["message"];
        match message["content"].as_str() {
            Some(text) => assert!(serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object()), "{text}"),
            None => message["tool_calls"].as_array().expect("calls").iter().for_each(check_call),
        }
    }
}
