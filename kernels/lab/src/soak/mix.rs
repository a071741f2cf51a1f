//! Draws requests: what is asked, what must be answered, how the client behaves.

use super::judge::Promise;
use super::pace::Mode;
use crate::random::Random;
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const WORDS: [&str; 24] = [
    "the", "cat", "river", "and", "stone", "under", "a", "green", "light", "walks", "to", "city", "of", "seven", "bridges", "where",
    "music", "is", "born", "in", "winter", "naïve", "東京", "🦀",
];
/// Names of the kinds of good requests and the share of each, in hundredths.
pub(super) const KINDS: [(&str, u64); 10] = [
    ("chat", 22),
    ("completion", 18),
    ("several choices", 10),
    ("several prompts", 5),
    ("JSON schema", 14),
    ("regex or choice", 6),
    ("tools, auto", 5),
    ("tools, required", 7),
    ("log-probabilities", 5),
    ("no generation", 8),
];

/// A request, and how it is made.
pub(super) struct Errand {
    /// Index into [`KINDS`].
    pub(super) kind: usize,
    pub(super) path: &'static str,
    pub(super) body: Value,
    pub(super) headers: Vec<(&'static str, String)>,
    /// `None` for endpoints that generate nothing; they must answer 200.
    pub(super) promise: Option<Promise>,
    pub(super) manner: Manner,
}

/// How a client behaves.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    /// Reads to the end.
    Patient,
    /// Reads to the end, with pauses.
    Slow,
    /// Leaves after this part (per mille) of the request's bytes.
    LeavesWhileSending(u64),
    /// Leaves this long after the request was sent.
    LeavesAfter(Duration),
    /// Leaves after this many events of the stream.
    LeavesInStream(u64),
    /// Ends its sending side this long after the request was sent, then reads what comes.
    HalfCloses(Duration),
    /// Aborts the request by its id from another connection, then reads to the end.
    Aborts(Duration),
}

/// Draws the next request; `supported` says which of [`KINDS`] the server answers at all.
pub(super) fn draw(random: &mut Random, mode: Mode, context_max: u32, supported: &[bool; KINDS.len()]) -> Errand {
    let calm = mode == Mode::Calm;
    // Without early ends by text nobody cancels a thing in calm mode.
    let allowed = |kind: usize| supported[kind] && (!calm || matches!(kind, 0 | 1 | 2 | 9));
    let total: u64 = (0..KINDS.len()).filter(|kind| allowed(*kind)).map(|kind| KINDS[kind].1).sum();
    let mut point = random.below(total);
    let kind = (0..KINDS.len()).filter(|kind| allowed(*kind)).find(|kind| {
        let here = point < KINDS[*kind].1;
        point = point.saturating_sub(KINDS[*kind].1);
        here
    });
    let mut errand = of_kind(kind.unwrap_or(0), random, context_max);
    if !calm {
        misbehave(&mut errand, random);
    }
    errand
}

/// A well-behaved request of a kind.
pub(super) fn of_kind(kind: usize, random: &mut Random, context_max: u32) -> Errand {
    let mut errand = match kind {
        0 => chat(random, context_max),
        1 => completion(random, context_max),
        2 => several_choices(random, context_max),
        3 => several_prompts(random, context_max),
        4 => {
            let form = json!({ "response_format": schema(random) });
            constrained(random, context_max, &form, true)
        }
        5 => {
            let form = pattern(random);
            constrained(random, context_max, &form, false)
        }
        6 => tools(random, context_max, false),
        7 => tools(random, context_max, true),
        8 => logprobs(random, context_max),
        _ => no_generation(random, context_max),
    };
    errand.kind = kind;
    errand
}

fn generation(random: &mut Random, path: &'static str, mut body: Value, chat: bool) -> Errand {
    let stream = random.percent(60);
    body["max_tokens"] = length(random).into();
    body["stream"] = stream.into();
    if stream && random.percent(50) {
        body["stream_options"] = json!({ "include_usage": true });
    }
    sample(random, &mut body);
    let promise = Promise { choices: 1, chat, stream, ..Promise::default() };
    Errand { kind: 0, path, body, headers: Vec::new(), promise: Some(promise), manner: Manner::Patient }
}

/// Mostly short answers, some long ones.
fn length(random: &mut Random) -> u64 {
    match random.below(10) {
        0 => 1,
        1..=6 => 2 + random.below(40),
        7 | 8 => 40 + random.below(80),
        _ => 120 + random.below(120),
    }
}

fn sample(random: &mut Random, body: &mut Value) {
    if random.percent(40) {
        body["temperature"] = 0.into();
    } else {
        body["temperature"] = json!(random.below(16) as f64 / 10.0 + 0.1);
        body["top_p"] = json!(random.below(10) as f64 / 10.0 + 0.1);
        body["seed"] = random.below(1 << 40).into();
    }
    if random.percent(15) {
        body["presence_penalty"] = json!(0.5);
        body["frequency_penalty"] = json!(0.25);
        body["repetition_penalty"] = json!(1.1);
    }
    if random.percent(30) {
        body["ignore_eos"] = true.into();
    }
    if random.percent(15) {
        body["cache_salt"] = format!("salt-{}", random.below(3)).into();
    }
    if random.percent(10) {
        body["trace"] = true.into();
    }
}

fn words(random: &mut Random, count: u64) -> String {
    (0..count).map(|_| WORDS[random.below(WORDS.len() as u64) as usize]).collect::<Vec<_>>().join(" ")
}

/// Short, long, or with a beginning that other requests share.
fn text(random: &mut Random, context_max: u32) -> String {
    let long = u64::from(context_max) / 8;
    match random.below(10) {
        0..=4 => {
            let count = 1 + random.below(20);
            words(random, count)
        }
        5 | 6 => {
            let count = long / 4 + random.below(long);
            words(random, count)
        }
        _ => {
            let shared = words(&mut Random::new(random.below(4)), long / 2);
            format!("{shared} {}", words(random, 4))
        }
    }
}

fn chat(random: &mut Random, context_max: u32) -> Errand {
    let mut messages = vec![json!({ "role": "user", "content": text(random, context_max) })];
    if random.percent(30) {
        messages.insert(0, json!({ "role": "system", "content": "You are brief." }));
    }
    let body = json!({ "messages": messages, "truncate_prompt_tokens": context_max / 2 });
    generation(random, CHAT, body, true)
}

fn completion(random: &mut Random, context_max: u32) -> Errand {
    let body = json!({ "prompt": text(random, context_max), "truncate_prompt_tokens": context_max / 2 });
    generation(random, COMPLETIONS, body, false)
}

fn several_choices(random: &mut Random, context_max: u32) -> Errand {
    let mut errand = if random.percent(50) { chat(random, context_max) } else { completion(random, context_max) };
    let count = 2 + random.below(3);
    errand.body["n"] = count.into();
    expect(&mut errand).choices = count as usize;
    errand
}

fn several_prompts(random: &mut Random, context_max: u32) -> Errand {
    let mut errand = completion(random, context_max);
    let count = 2 + random.below(3);
    errand.body["prompt"] = (0..count).map(|_| text(random, context_max)).collect::<Vec<_>>().into();
    expect(&mut errand).choices = count as usize;
    errand
}

/// A request whose answer has a form; its limit leaves room for every form of this file.
fn constrained(random: &mut Random, context_max: u32, form: &Value, json: bool) -> Errand {
    let mut errand = if random.percent(70) { chat(random, context_max) } else { completion(random, context_max) };
    for (name, value) in form.as_object().into_iter().flatten() {
        errand.body[name] = value.clone();
    }
    errand.body["max_tokens"] = (96 + random.below(120)).into();
    expect(&mut errand).json = json;
    errand
}

fn schema(random: &mut Random) -> Value {
    let schema = match random.below(5) {
        0 => return json!({ "type": "json_object" }),
        1 => {
            json!({ "type": "object", "properties": { "name": { "type": "string", "maxLength": 20 }, "age": { "type": "integer", "minimum": 0, "maximum": 150 } }, "required": ["name", "age"], "additionalProperties": false })
        }
        2 => json!({ "type": "array", "items": { "enum": ["red", "grün", "青"] }, "minItems": 1, "maxItems": 5 }),
        3 => {
            json!({ "$ref": "#/$defs/node", "$defs": { "node": { "type": "object", "properties": { "value": { "type": "number" }, "next": { "anyOf": [{ "type": "null" }, { "$ref": "#/$defs/node" }] } }, "required": ["value", "next"], "additionalProperties": false } } })
        }
        _ => {
            json!({ "type": "object", "properties": { "id": { "type": "string", "pattern": "^[a-f0-9]{8}$" }, "on": { "type": "boolean" } }, "required": ["id"], "additionalProperties": false })
        }
    };
    json!({ "type": "json_schema", "json_schema": { "name": "answer", "schema": schema, "strict": true } })
}

fn pattern(random: &mut Random) -> Value {
    match random.below(3) {
        0 => json!({ "guided_regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}" }),
        1 => json!({ "guided_choice": ["yes", "no", "peut-être"] }),
        _ => json!({ "guided_grammar": "start: \"a\" | \"b\" start" }),
    }
}

fn tools(random: &mut Random, context_max: u32, required: bool) -> Errand {
    let mut errand = chat(random, context_max);
    let function = |name: &str, property: &str| json!({ "type": "function", "function": { "name": name, "description": "Does it.", "parameters": { "type": "object", "properties": { property: { "type": "string", "maxLength": 16 } }, "required": [property], "additionalProperties": false } } });
    errand.body["tools"] = json!([function("weather", "city"), function("time", "zone")]);
    errand.body["max_tokens"] = (64 + random.below(100)).into();
    let named = required && random.percent(40);
    errand.body["tool_choice"] = match (required, named) {
        (false, _) => json!("auto"),
        (true, false) => json!("required"),
        (true, true) => json!({ "type": "function", "function": { "name": "time" } }),
    };
    expect(&mut errand).call = required;
    errand
}

fn logprobs(random: &mut Random, context_max: u32) -> Errand {
    if random.percent(50) {
        let mut errand = chat(random, context_max);
        errand.body["logprobs"] = true.into();
        errand.body["top_logprobs"] = random.below(6).into();
        return errand;
    }
    let mut errand = completion(random, context_max);
    errand.body["logprobs"] = random.below(6).into();
    errand.body["echo"] = random.percent(30).into();
    errand
}

fn no_generation(random: &mut Random, context_max: u32) -> Errand {
    let message = json!([{ "role": "user", "content": text(random, context_max) }]);
    let (path, body) = match random.below(3) {
        0 => ("/tokenize", json!({ "prompt": text(random, context_max) })),
        1 => ("/v1/chat/completions/render", json!({ "messages": message })),
        _ => ("/v1/explain", json!({ "messages": message, "max_tokens": 8, "truncate_prompt_tokens": context_max / 2 })),
    };
    Errand { kind: 0, path, body, headers: Vec::new(), promise: None, manner: Manner::Patient }
}

fn expect(errand: &mut Errand) -> &mut Promise {
    errand.promise.get_or_insert_default()
}

/// Adds deadlines, stops, aborts and bad manners.
fn misbehave(errand: &mut Errand, random: &mut Random) {
    errand.manner = manner(errand, random);
    let Some(promise) = &mut errand.promise else { return };
    if random.percent(8) {
        promise.deadline = true;
        let millis = 1 + random.below(400);
        match random.percent(50) {
            true => errand.body["deadline_ms"] = millis.into(),
            false => errand.headers.push(("X-Deadline-Ms", millis.to_string())),
        }
    }
    if random.percent(8) {
        promise.queue_time = true;
        errand.body["max_queue_ms"] = (1 + random.below(200)).into();
    }
    if !promise.json && !promise.call && random.percent(10) {
        errand.body["stop"] = json!(["the", "\n\n", "7"]);
    }
    if matches!(errand.manner, Manner::Aborts(_)) {
        promise.aborted = true;
        errand.headers.push(("X-Request-Id", format!("soak-{:016x}", random.next())));
    }
}

fn manner(errand: &Errand, random: &mut Random) -> Manner {
    let streams = errand.promise.as_ref().is_some_and(|promise| promise.stream);
    let pause = |random: &mut Random| Duration::from_millis(random.below(120));
    match random.below(100) {
        0..=49 => Manner::Patient,
        50..=55 => Manner::Slow,
        56..=63 => Manner::LeavesWhileSending(random.below(1000)),
        64..=74 => Manner::LeavesAfter(pause(random)),
        75..=90 if streams => Manner::LeavesInStream(random.below(24)),
        75..=90 => Manner::LeavesAfter(pause(random)),
        91..=93 => Manner::HalfCloses(pause(random)),
        _ if errand.promise.is_some() => Manner::Aborts(pause(random)),
        _ => Manner::Patient,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_and_manner_is_drawn_and_calm_has_no_bad_manners() {
        let mut random = Random::new(3);
        let (mut kinds, mut left, mut aborted) = ([0; KINDS.len()], 0, 0);
        for _ in 0..5000 {
            let errand = draw(&mut random, Mode::Storm, 2048, &[true; KINDS.len()]);
            kinds[errand.kind] += 1;
            left +=
                usize::from(matches!(errand.manner, Manner::LeavesAfter(_) | Manner::LeavesInStream(_) | Manner::LeavesWhileSending(_)));
            aborted += usize::from(errand.promise.is_some_and(|promise| promise.aborted));
        }
        assert!(kinds.iter().all(|count| *count > 100) && left > 1000 && aborted > 100, "{kinds:?} {left} {aborted}");
        for _ in 0..1000 {
            let errand = draw(&mut random, Mode::Calm, 2048, &[true; KINDS.len()]);
            assert_eq!(errand.manner, Manner::Patient);
            assert!(errand.body.get("stop").is_none() && errand.body.get("deadline_ms").is_none());
        }
    }

    #[test]
    fn what_is_not_supported_is_not_drawn() {
        let mut random = Random::new(3);
        let only_chat: [bool; KINDS.len()] = std::array::from_fn(|kind| kind == 0);
        assert!((0..200).all(|_| draw(&mut random, Mode::Storm, 2048, &only_chat).kind == 0));
    }
}
