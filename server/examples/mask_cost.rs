//! Measures constraints on a tokenizer: preparation, compilation of a schema with a hundred properties,
//! and masks, one at a time and eight together, as they come when text is drawn under them.
//!
//! `cargo run --release -p oxide-run --example mask_cost -- tokenizer.json [steps]`

use oxide_run::grammar::{Compiled, Constraint, ConstraintKind, Grammars};
use oxide_runtime::engine::{LogitsMask, MaskVerdict};
use oxide_text::Tokenizer;
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BATCH: usize = 8;
/// Tokens that are drawn before a mask begins anew, so that its output never ends.
const OUTPUT_TOKENS: u32 = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: mask_cost tokenizer.json [steps]")?;
    let steps: usize = args.next().map_or(Ok(400), |text| text.parse())?;
    let mut out = std::io::stdout().lock();
    let tokenizer = Arc::new(Tokenizer::from_json(&std::fs::read(path)?)?);
    let eos: Vec<u32> = ["<|im_end|>", "<|endoftext|>"].iter().filter_map(|text| tokenizer.token_id(text)).collect();
    let grammars = Grammars::new(Arc::clone(&tokenizer), &eos);
    let compile = |kind| grammars.compile(&Constraint { param: "schema".to_owned(), kind });
    let start = Instant::now();
    compile(ConstraintKind::Schema(json!({"type": "null"})))?;
    writeln!(out, "vocabulary of {} ids prepared in {:.1} ms", tokenizer.vocab_known(), millis(start.elapsed()))?;
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        compile(ConstraintKind::Schema(hundred_properties()))?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    writeln!(out, "100 properties compiled in {:.1} ms (median of 10)\n", millis(times[5]))?;
    let [name, budget, p50, p99, mean] = ["constraint", "budget", "p50", "p99", "mean"];
    writeln!(out, "{name:<22} {budget:>8}   one mask, ms: {p50:>7} {p99:>7} {mean:>7}   {BATCH} masks, ms: {p50:>7} {p99:>7} {mean:>7}")?;
    for (name, schema) in schemas() {
        let compiled = compile(ConstraintKind::Schema(schema))?;
        for budget in [100_000, 2_000] {
            let one = measure(&tokenizer, &compiled, budget, 1, steps);
            let eight = measure(&tokenizer, &compiled, budget, BATCH, steps);
            writeln!(out, "{name:<22} {budget:>8}                 {}                  {}", spread(one), spread(eight))?;
        }
    }
    Ok(())
}

fn hundred_properties() -> Value {
    let kinds = ["string", "integer", "boolean", "number"];
    let members: serde_json::Map<_, _> = (0..100).map(|index| (format!("property_{index}"), json!({"type": kinds[index % 4]}))).collect();
    let required: Vec<&String> = members.keys().collect();
    json!({"type": "object", "properties": members, "required": required, "additionalProperties": false})
}

fn schemas() -> [(&'static str, Value); 6] {
    let record = json!({"type": "object", "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    }, "required": ["name", "age", "tags"], "additionalProperties": false});
    let text = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"], "additionalProperties": false});
    let pattern = json!({"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{4}$"}});
    let node = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "value": {"type": "number"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    }, "required": ["value", "children"], "additionalProperties": false}}});
    [
        ("any JSON value", json!({})),
        ("free text in an object", text),
        ("strings of a pattern", pattern),
        ("40 records or more", json!({"type": "array", "minItems": 40, "items": record})),
        ("recursive tree", node),
        ("100 properties", hundred_properties()),
    ]
}

/// From the beginning of `count` masks to the last one filled, at every step.
fn measure(tokenizer: &Tokenizer, compiled: &Compiled, budget: u32, count: usize, steps: usize) -> Vec<Duration> {
    let factory = compiled.clone().masks(budget);
    let mut masks: Vec<(Box<dyn LogitsMask>, u32)> = (0..count).map(|_| (factory(), 0)).collect();
    let mut words = vec![0; 151_936_usize.max(tokenizer.vocab_known() as usize).div_ceil(32)];
    let (mut times, mut state) = (Vec::with_capacity(steps), 1_u64);
    for _ in 0..steps {
        let start = Instant::now();
        masks.iter_mut().for_each(|(mask, drawn)| mask.begin(budget - *drawn));
        let mut next = Vec::new();
        for (mask, _) in &mut masks {
            let verdict = mask.fill(&mut words);
            next.push((verdict == MaskVerdict::Continue).then(|| draw(&words, &mut state)).flatten());
        }
        times.push(start.elapsed());
        for ((mask, drawn), id) in masks.iter_mut().zip(next) {
            *drawn += 1;
            let goes_on = id.is_some_and(|id| mask.accept(id) == MaskVerdict::Continue);
            if !goes_on || *drawn >= OUTPUT_TOKENS {
                (*mask, *drawn) = (factory(), 0);
            }
        }
    }
    times
}

/// A set bit near a place chosen at random.
fn draw(words: &[u32], state: &mut u64) -> Option<u32> {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let start = (*state >> 33) as usize % words.len();
    let place = (0..words.len()).map(|offset| (start + offset) % words.len()).find(|place| words[*place] != 0)?;
    Some(place as u32 * 32 + words[place].trailing_zeros())
}

fn spread(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>() / times.len().max(1) as u32;
    let [median, high] = [times.len() / 2, times.len() * 99 / 100].map(|at| times.get(at).copied().unwrap_or_default());
    format!("{:>7.3} {:>7.3} {:>7.3}", millis(median), millis(high), millis(mean))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
