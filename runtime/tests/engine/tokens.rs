//! Tokens do not depend on batch, chunking, depth, cache, forks or preemption.

use crate::support::*;
use oxide_bundle::plan::BatchClass;
use oxide_runtime::engine::scripted::{Script, greedy};
use oxide_runtime::engine::{EngineOptions, EngineRequest, SamplingParams};

/// Requests of many shapes: short, long, sampled, penalised, several choices.
fn mixed_requests() -> Vec<EngineRequest> {
    let mut requests = Vec::new();
    for seed in 0..10 {
        let mut request = request(&prompt(seed, 1 + seed * 7), 3 + seed * 2);
        if seed % 3 == 1 {
            request.sampling = SamplingParams { temperature: 1.0, seed: u64::from(seed), ..SamplingParams::default() };
        }
        if seed % 4 == 2 {
            request.sampling.repetition_penalty = 1.5;
            request.sampling.frequency_penalty = 0.25;
        }
        if seed == 4 || seed == 7 {
            request.n = 3;
        }
        requests.push(request);
    }
    requests
}

fn tokens_together(script: Script, options: EngineOptions) -> Vec<Vec<Vec<u32>>> {
    let engine = start(script, options).0;
    let outcomes = run_together(&engine, mixed_requests());
    assert_idle(&engine);
    outcomes.into_iter().map(|outcome| outcome.tokens).collect()
}

fn tokens_alone() -> Vec<Vec<Vec<u32>>> {
    let engine = start(Script::default(), EngineOptions { prefix_cache: false, ..EngineOptions::default() }).0;
    mixed_requests().into_iter().map(|request| run(&engine, request).tokens).collect()
}

#[test]
fn a_request_gets_the_models_tokens() {
    let prompt = prompt(3, 11);
    assert_eq!(run(&engine(), request(&prompt, 20)).only(), greedy(&prompt, 20, VOCAB));
}

#[test]
fn a_batch_gives_the_tokens_of_each_request_alone() {
    assert_eq!(tokens_together(Script::default(), EngineOptions::default()), tokens_alone());
}

#[test]
fn chunking_changes_no_token() {
    for chunk in [1, 2, 5, 13] {
        let options = EngineOptions { chunk_tokens: Some(chunk), ..EngineOptions::default() };
        assert_eq!(tokens_together(Script::default(), options), tokens_alone(), "chunks of {chunk}");
    }
}

#[test]
fn running_ahead_changes_no_token() {
    for depth in [2, 3] {
        let script = Script { depth, ..Script::default() };
        assert_eq!(tokens_together(script, EngineOptions::default()), tokens_alone(), "depth {depth}");
    }
}

#[test]
fn other_page_sizes_change_no_token() {
    for page_tokens in [1, 3, 16] {
        let script = Script { page_tokens, kv_pages: 512 / page_tokens, ..Script::default() };
        assert_eq!(tokens_together(script, EngineOptions::default()), tokens_alone(), "pages of {page_tokens}");
    }
}

#[test]
fn preemption_changes_no_token() {
    for depth in [1, 2] {
        for preemptions_max in [0, 1, 100] {
            let options = EngineOptions { overcommit: true, preemptions_max, ..EngineOptions::default() };
            let engine = start(Script { depth, kv_pages: 27, ..Script::default() }, options).0;
            let outcomes = run_together(&engine, mixed_requests());
            let tokens: Vec<_> = outcomes.into_iter().map(|outcome| outcome.tokens).collect();
            assert_eq!(tokens, tokens_alone(), "depth {depth}, at most {preemptions_max} preemptions");
            assert!(engine.stats().preemptions > 0, "the pool was meant to be too small");
            assert_idle(&engine);
        }
    }
}

#[test]
fn choices_are_the_requests_of_the_next_seeds() {
    for len in [1, 7, 8, 9] {
        for depth in [1, 2] {
            let engine = start(Script { depth, ..Script::default() }, EngineOptions::default()).0;
            let with_seed = |seed, n| {
                let sampling = SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
                EngineRequest { n, sampling, ..request(&prompt(5, len), 9) }
            };
            let choices = run(&engine, with_seed(40, 4)).tokens;
            let alone: Vec<_> = (40..44).map(|seed| run(&engine, with_seed(seed, 1)).tokens.remove(0)).collect();
            assert_eq!(choices, alone, "prompt of {len}, depth {depth}");
            assert!(choices.iter().any(|tokens| *tokens != choices[0]), "seeds make a difference");
            assert_idle(&engine);
        }
    }
}

#[test]
fn one_token_for_several_choices_needs_no_copies() {
    let engine = engine();
    let outcome = run(&engine, EngineRequest { n: 5, ..request(&prompt(1, 6), 1) });
    assert_eq!(outcome.tokens, vec![greedy(&prompt(1, 6), 1, VOCAB); 5]);
    assert_idle(&engine);
}

#[test]
fn the_smallest_class_that_fits_runs() {
    let (engine, log) = start(Script::default(), EngineOptions::default());
    run(&engine, request(&prompt(0, 10), 3));
    let classes: Vec<_> = log.steps().iter().map(|step| step.class).collect();
    let (mixed, decode) = (BatchClass::Mixed { tokens: 16, seqs: 8 }, BatchClass::Decode { seqs: 1 });
    assert_eq!(classes, [mixed, decode, decode]);
}

#[test]
fn decodes_ride_along_with_a_long_prefill() {
    let options = EngineOptions { chunk_tokens: Some(10), ..EngineOptions::default() };
    let (engine, log) = start(Script { kv_pages: 128, ..Script::default() }, options);
    run_together(&engine, vec![request(&prompt(0, 2), 12), request(&prompt(1, 60), 2)]);
    let mixed: Vec<_> = log.steps().into_iter().filter(|step| step.seqs == 2 && step.tokens > 2).collect();
    assert!(mixed.len() >= 6, "{mixed:?}");
    assert!(mixed.iter().all(|step| step.tokens <= 10 && step.rows >= 1), "{mixed:?}");
}

#[test]
fn a_deep_device_runs_one_step_ahead_unless_the_host_is_needed() {
    let sourced = |request| {
        let (engine, log) = start(Script { depth: 2, ..Script::default() }, EngineOptions::default());
        run(&engine, request);
        log.steps().iter().map(|step| step.sourced).sum::<u32>()
    };
    assert_eq!(sourced(request(&[1, 2, 3], 9)), 8);
    let penalties = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
    assert_eq!(sourced(EngineRequest { sampling: penalties, ..request(&[1, 2, 3], 9) }), 0);
}
