//! A mutation fuzzer that needs nothing but stable Rust: a corpus, mutations, a clock.
//!
//! `OXIDE_FUZZ_SECONDS` says how long each target runs (1 without it). Seeds are counted up from 0, so a
//! run that fails prints a seed that fails again.

use crate::json::mutated_json;
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Bytes of an input that a failure shows.
const SHOWN_BYTES: usize = 2048;
/// Longest input that mutations grow to.
const INPUT_BYTES_MAX: usize = 1 << 20;
/// Values that checks tend to get wrong.
const INTERESTING: [u8; 12] = [0, 1, 0x7f, 0x80, 0x8f, 0x9f, 0xc0, 0xcf, 0xd9, 0xdd, 0xdf, 0xff];

/// Runs `target` on mutations of `corpus` until the time is up. Returns the number of inputs.
///
/// # Panics
/// If `target` panics; the message has the seed and the start of the input.
pub fn fuzz(name: &str, corpus: &[Vec<u8>], target: impl Fn(&[u8])) -> u64 {
    run(name, |seed| mutated(corpus, seed), Vec::clone, |input| target(input))
}

/// As [`fuzz`], on mutations of JSON values: members and elements come, go, repeat, and change their type and size.
///
/// # Panics
/// If `target` panics; the message has the seed and the start of the value.
pub fn fuzz_json(name: &str, corpus: &[Value], target: impl Fn(&Value)) -> u64 {
    run(name, |seed| mutated_json(corpus, seed), |value| value.to_string().into_bytes(), target)
}

fn run<T>(name: &str, input: impl Fn(u64) -> T, show: impl Fn(&T) -> Vec<u8>, target: impl Fn(&T)) -> u64 {
    let limit = Duration::from_secs(std::env::var("OXIDE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1));
    let start = Instant::now();
    let mut seed = 0;
    while start.elapsed() < limit {
        let input = input(seed);
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            let shown = show(&input);
            panic!("{name}: seed {seed} fails; {} bytes: {}", shown.len(), shown[..shown.len().min(SHOWN_BYTES)].escape_ascii());
        }
        seed += 1;
    }
    println!("{name}: {seed} inputs in {:.0} s", start.elapsed().as_secs_f64());
    seed
}

/// splitmix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn mutated(corpus: &[Vec<u8>], seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut input = corpus.get(random.below(corpus.len())).cloned().unwrap_or_default();
    for _ in 0..=random.below(8) {
        mutate(&mut input, corpus, &mut random);
    }
    input.truncate(INPUT_BYTES_MAX);
    input
}

fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let length = random.below(16) + 1;
    let end = (at + length).min(input.len());
    match random.below(8) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = INTERESTING[random.below(INTERESTING.len())],
        2 => drop(input.splice(at..at, (0..length).map(|_| random.next() as u8).collect::<Vec<_>>())),
        3 => drop(input.drain(at..end)),
        4 => {
            let piece = input[at..end].repeat(random.below(64) + 1);
            drop(input.splice(at..at, piece));
        }
        5 => input.truncate(at),
        6 => {
            let other = corpus.get(random.below(corpus.len())).map(Vec::as_slice).unwrap_or_default();
            let from = random.below(other.len() + 1);
            let to = (from + random.below(256)).min(other.len());
            drop(input.splice(at..end, other[from..to].to_vec()));
        }
        _ => {
            let number = [0, 1, u64::MAX, i64::MAX as u64, u64::from(u32::MAX), random.next()][random.below(6)];
            let bytes = number.to_le_bytes();
            let bytes = &bytes[..[1, 2, 4, 8][random.below(4)]];
            drop(input.splice(at..end, bytes.to_vec()));
        }
    }
}
