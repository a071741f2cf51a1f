//! The shipped model on the cpu device: bit for bit the same alone, in a batch, in chunks, from the
//! cache, after a preemption, and beside cancelled neighbours.

use crate::support::*;
use oxide_runtime::device::cpu::{CpuDevice, CpuOptions};
use oxide_runtime::engine::{Engine, EngineHandle, EngineLimits, EngineOptions, EngineRequest, SamplingParams, TokenLogprobs};
use oxide_runtime::open::{OpenOptions, open_bundle};
use std::sync::{Arc, OnceLock};

/// Tokens and log-probabilities of each choice.
type Answer = (Vec<Vec<u32>>, Vec<Vec<TokenLogprobs>>);

fn start_real(kv_pages: u32, options: EngineOptions) -> EngineHandle {
    let opened = open_bundle(&oxide_testkit::tiny_bundle(), OpenOptions::default()).expect("the bundle opens");
    let manifest = opened.bundle.manifest();
    let cpu = CpuOptions { threads: None, isa: None, kv_pages };
    let device = CpuDevice::link(Arc::clone(opened.bundle.plan()), Arc::new(opened.weights.clone()), cpu).expect("the plan links");
    let limits = EngineLimits::of(&device, manifest.limits.context_max, manifest.limits.seqs_max, manifest.model.vocab_known);
    Engine::start(Box::new(device), limits, options)
}

fn requests() -> Vec<EngineRequest> {
    let sampling = |seed: u32| SamplingParams {
        logprobs: Some(3),
        temperature: if seed.is_multiple_of(2) { 0.0 } else { 0.8 },
        repetition_penalty: if seed.is_multiple_of(5) { 1.2 } else { 1.0 },
        seed: u64::from(seed),
        ..SamplingParams::default()
    };
    let prompt = |seed: u32, len: u32| (0..len).map(|index| (seed * 977 + index * index * 31 + index * 7) % 4096).collect::<Vec<_>>();
    let shape = |seed: u32| request(&prompt(seed, 1 + seed * 17 % 150), 8 + seed * 3);
    (0..12).map(|seed| EngineRequest { sampling: sampling(seed), n: 1 + seed % 3, ..shape(seed) }).collect()
}

fn answer(outcome: Outcome) -> Answer {
    assert!(outcome.ends.iter().all(|end| matches!(end, Some(End::Finished(_)))), "{:?}", outcome.ends);
    (outcome.tokens, outcome.logprobs)
}

fn alone() -> &'static [Answer] {
    static ALONE: OnceLock<Vec<Answer>> = OnceLock::new();
    ALONE.get_or_init(|| {
        let engine = start_real(256, EngineOptions { prefix_cache: false, ..EngineOptions::default() });
        requests().into_iter().map(|request| answer(run(&engine, request))).collect()
    })
}

fn together(engine: &EngineHandle) -> Vec<Answer> {
    let answers = run_together(engine, requests()).into_iter().map(answer).collect();
    assert_idle(engine);
    answers
}

#[test]
fn a_batch_is_bit_equal_to_each_request_alone() {
    assert_eq!(together(&start_real(1024, EngineOptions::default())), alone());
}

#[test]
fn chunks_are_bit_equal() {
    for chunk in [7, 33] {
        let options = EngineOptions { chunk_tokens: Some(chunk), ..EngineOptions::default() };
        assert_eq!(together(&start_real(1024, options)), alone(), "chunks of {chunk}");
    }
}

#[test]
fn a_warm_cache_is_bit_equal() {
    let engine = start_real(1024, EngineOptions::default());
    together(&engine);
    let cold = engine.stats().prefix_hits;
    assert_eq!(together(&engine), alone());
    assert!(engine.stats().prefix_hits > cold + 300, "{:?}", engine.stats());
}

#[test]
fn a_preemption_is_bit_equal() {
    let options = EngineOptions { overcommit: true, ..EngineOptions::default() };
    let singles = || requests().into_iter().map(|request| EngineRequest { n: 1, max_tokens: request.max_tokens + 40, ..request });
    let engine = start_real(30, options);
    let pressed: Vec<_> = run_together(&engine, singles().collect()).into_iter().map(answer).collect();
    assert!(engine.stats().preemptions > 0, "the pool was meant to be too small");
    let roomy = start_real(256, EngineOptions::default());
    let expect: Vec<_> = singles().map(|request| answer(run(&roomy, request))).collect();
    assert_eq!(pressed, expect);
    assert_idle(&engine);
}

#[test]
fn cancelled_neighbours_change_no_bit() {
    let engine = start_real(1024, EngineOptions::default());
    engine.pause();
    let streams: Vec<_> = requests().into_iter().map(|request| (request.n as usize, engine.submit(request).expect("accepted"))).collect();
    engine.resume();
    for (index, (choices, mut stream)) in streams.into_iter().enumerate() {
        if index % 3 == 0 {
            stream.blocking_recv();
            drop(stream);
        } else {
            assert_eq!(answer(read(stream, choices)), alone()[index], "request {index}");
        }
    }
    wait_for(&engine, "pages back", |stats| stats.pages_in_use == 0);
}

#[test]
fn prompt_log_probabilities_are_bit_equal_in_chunks() {
    let ask = |chunk_tokens| {
        let engine = start_real(256, EngineOptions { chunk_tokens, ..EngineOptions::default() });
        requests()
            .into_iter()
            .map(|request| run(&engine, EngineRequest { prompt_logprobs: Some(2), max_tokens: 0, ..request }).prompt)
            .collect()
    };
    let (whole, pieces): (Vec<_>, Vec<_>) = (ask(None), ask(Some(5)));
    assert_eq!(whole, pieces);
    assert!(whole.iter().flatten().all(|entry| entry.logprob < 0.0 && entry.top.len() == 2));
}
