//! Measures constraints on a tokenizer: preparation, compilation of a schema with a hundred properties,
//! and masks of eight sequences at a time.
//!
//! `cargo run --release -p oxide-run --example mask_cost -- tokenizer.json [steps]`

use oxide_run::grammar::{Constraint, ConstraintKind, Grammars};
use oxide_runtime::engine::{LogitsMask, MaskVerdict};
use oxide_text::Tokenizer;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BATCH: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: mask_cost tokenizer.json [steps]")?;
    let steps: usize = args.next().map_or(Ok(100), |text| text.parse())?;
    let mut out = std::io::stdout().lock();
    let tokenizer = Arc::new(Tokenizer::from_json(&std::fs::read(path)?)?);
    let eos: Vec<u32> = ["<|im_end|>", "<|endoftext|>"].iter().filter_map(|text| tokenizer.token_id(text)).collect();
    let grammars = Grammars::new(Arc::clone(&tokenizer), &eos);
    let compile = |schema| grammars.compile(&Constraint { param: "schema".to_owned(), kind: ConstraintKind::Schema(schema) });
    let start = Instant::now();
    compile(json!({"type": "null"}))?;
    writeln!(out, "vocabulary of {} ids prepared in {:.1} ms", tokenizer.vocab_known(), millis(start.elapsed()))?;
    let kinds = ["string", "integer", "boolean", "number"];
    let members: serde_json::Map<_, _> = (0..100).map(|index| (format!("property_{index}"), json!({"type": kinds[index % 4]}))).collect();
    let required: Vec<&String> = members.keys().collect();
    let schema = json!({"type": "object", "properties": members, "required": required, "additionalProperties": false});
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        compile(schema.clone())?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    writeln!(out, "100 properties compiled in {:.1} ms (median of 10)", millis(times[5]))?;
    let compiled = compile(schema)?;
    for budget in [100_000, 1_500] {
        let factory = compiled.clone().masks(budget);
        let masks: Vec<Box<dyn LogitsMask>> = (0..BATCH).map(|_| factory()).collect();
        measure(&mut out, &tokenizer, masks, budget, steps)?;
    }
    Ok(())
}

fn measure(
    out: &mut impl Write,
    tokenizer: &Tokenizer,
    mut masks: Vec<Box<dyn LogitsMask>>,
    budget: u32,
    steps: usize,
) -> std::io::Result<()> {
    let mut words = vec![0; 151_936_usize.max(tokenizer.vocab_known() as usize).div_ceil(32)];
    let (mut waits, mut accepts) = (Vec::new(), Vec::new());
    let mut state = 1_u64;
    for step in 0..steps {
        let start = Instant::now();
        masks.iter_mut().for_each(|mask| mask.begin(budget - step as u32));
        let mut drawn = Vec::new();
        for mask in &mut masks {
            let verdict = mask.fill(&mut words);
            drawn.push((verdict == MaskVerdict::Continue).then(|| draw(&words, &mut state)).flatten());
        }
        waits.push(start.elapsed());
        let start = Instant::now();
        for (mask, id) in masks.iter_mut().zip(drawn) {
            if let Some(id) = id {
                mask.accept(id);
            }
        }
        accepts.push(start.elapsed());
    }
    let mut line = |name: &str, mut times: Vec<Duration>| {
        times.sort_unstable();
        let mean = times.iter().sum::<Duration>() / times.len().max(1) as u32;
        let [median, high] = [times.len() / 2, times.len() * 95 / 100].map(|at| times.get(at).copied().unwrap_or_default());
        writeln!(out, "budget {budget}: {name}: mean {:.3} ms, median {:.3} ms, 95th {:.3} ms", millis(mean), millis(median), millis(high))
    };
    line("masks of 8, from begin to the last filled", waits)?;
    line("accept of 8", accepts)
}

/// A set bit near a place chosen at random.
fn draw(words: &[u32], state: &mut u64) -> Option<u32> {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let start = (*state >> 33) as usize % words.len();
    let place = (0..words.len()).map(|offset| (start + offset) % words.len()).find(|place| words[*place] != 0)?;
    Some(place as u32 * 32 + words[place].trailing_zeros())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
