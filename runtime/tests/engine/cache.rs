//! The prefix cache: what hits, what must not, what stays, what goes.

use crate::support::*;
use oxide_runtime::engine::scripted::{Script, greedy};
use oxide_runtime::engine::{EngineOptions, EngineRequest};
use std::sync::mpsc;

#[test]
fn a_repeated_prompt_hits_full_pages_but_recomputes_its_last_token() {
    let engine = engine();
    for (len, cached) in [(20, 16), (21, 20), (4, 0), (5, 4)] {
        let prompt = prompt(len, len);
        let first = run(&engine, request(&prompt, 6));
        let second = run(&engine, request(&prompt, 6));
        assert_eq!((first.cached_tokens, second.cached_tokens), (Some(0), Some(cached)), "prompt of {len}");
        assert_eq!(first.only(), second.only());
        assert_eq!(second.only(), greedy(&prompt, 6, VOCAB));
    }
}

#[test]
fn a_conversation_hits_what_was_generated_before() {
    let engine = engine();
    let mut turn = prompt(1, 10);
    turn.extend(run(&engine, request(&turn, 11)).only());
    turn.extend([3, 4, 5]);
    let outcome = run(&engine, request(&turn, 4));
    assert_eq!(outcome.cached_tokens, Some(20), "20 of 24 tokens lie in full pages that were computed");
    assert_eq!(outcome.only(), greedy(&turn, 4, VOCAB));
}

#[test]
fn salts_separate_and_a_changed_token_ends_the_hit() {
    let engine = engine();
    let salted = |salt: &[u8]| EngineRequest { cache_salt: salt.to_vec(), ..request(&prompt(9, 20), 2) };
    run(&engine, salted(b"a"));
    assert_eq!(run(&engine, salted(b"b")).cached_tokens, Some(0));
    assert_eq!(run(&engine, salted(b"a")).cached_tokens, Some(16));
    let mut changed = prompt(9, 20);
    changed[9] = (changed[9] + 1) % VOCAB;
    let outcome = run(&engine, EngineRequest { cache_salt: b"a".to_vec(), ..request(&changed, 5) });
    assert_eq!((outcome.cached_tokens, outcome.only()), (Some(8), &*greedy(&changed, 5, VOCAB)));
}

#[test]
fn the_cache_can_be_off() {
    let engine = start(Script::default(), EngineOptions { prefix_cache: false, ..EngineOptions::default() }).0;
    run(&engine, request(&prompt(1, 20), 2));
    assert_eq!(run(&engine, request(&prompt(1, 20), 2)).cached_tokens, Some(0));
    assert_eq!(engine.stats().pages_cached, 0);
}

#[test]
fn pages_unused_for_longest_are_evicted_and_tokens_stay_right() {
    let engine = start(Script { kv_pages: 12, ..Script::default() }, EngineOptions::default()).0;
    for round in 0..3 {
        for seed in 0..4 {
            let prompt = prompt(seed, 17);
            assert_eq!(run(&engine, request(&prompt, 6)).only(), greedy(&prompt, 6, VOCAB), "round {round}");
            assert_idle(&engine);
        }
    }
    assert!(engine.stats().evictions > 0);
    assert_eq!(run(&engine, request(&prompt(3, 17), 6)).cached_tokens, Some(16), "the latest is still there");
}

#[test]
fn full_pages_of_an_aborted_request_stay_cached() {
    let (permit, gate) = mpsc::channel();
    let options = EngineOptions { chunk_tokens: Some(8), ..EngineOptions::default() };
    let engine = start(Script { gate: Some(gate), ..Script::default() }, options).0;
    let mut stream = engine.submit(request(&prompt(2, 40), 5)).unwrap();
    permit.send(()).unwrap();
    permit.send(()).unwrap();
    wait_for(&engine, "the third chunk", |stats| stats.prefill_tokens >= 16 && stats.steps == 2 || stats.steps >= 3);
    stream.cancel();
    drop(permit);
    while stream.blocking_recv().is_some() {}
    assert!(engine.stats().pages_cached >= 4, "{:?}", engine.stats());
    let outcome = run(&engine, request(&prompt(2, 40), 5));
    assert!(outcome.cached_tokens >= Some(16), "{outcome:?}");
    assert_eq!(outcome.only(), greedy(&prompt(2, 40), 5, VOCAB));
}

#[test]
fn choices_share_the_pages_of_their_prompt() {
    let (permit, gate) = mpsc::channel();
    let engine = start(Script { gate: Some(gate), ..Script::default() }, EngineOptions::default()).0;
    let stream = engine.submit(EngineRequest { n: 4, ..request(&prompt(2, 18), 4) }).unwrap();
    permit.send(()).unwrap();
    let stats = wait_for(&engine, "the first tokens", |stats| stats.decode_tokens == 4);
    assert_eq!(stats.pages_in_use, 4 + 4, "4 shared pages, and 4 copies of the partial one");
    drop(permit);
    assert_eq!(read(stream, 4).tokens, vec![greedy(&prompt(2, 18), 4, VOCAB); 4]);
    assert_idle(&engine);
}

#[test]
fn hits_are_counted() {
    let engine = engine();
    run(&engine, request(&prompt(1, 20), 2));
    run(&engine, request(&prompt(1, 20), 2));
    let stats = engine.stats();
    assert_eq!((stats.prefix_queries, stats.prefix_hits, stats.prefill_tokens), (40, 16, 24));
}
