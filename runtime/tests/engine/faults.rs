//! A device that fails, panics or stalls in any of its calls, and a pool that runs dry at any point:
//! one terminal event a choice, right tokens where there are some, and accounts at zero.

use crate::support::*;
use oxide_runtime::engine::scripted::{Call, DeviceFault, Failing, Script, greedy};
use oxide_runtime::engine::{EngineHandle, EngineHealth, EngineOptions, EngineRequest, FinishReason, RejectReason};
use std::sync::mpsc;
use std::time::Duration;

/// Tokens that each request draws, none fewer than the latest fault.
const TOKENS: u32 = 40;

/// Requests that run, and some that do not fit beside them.
fn requests() -> Vec<EngineRequest> {
    let request = |seed: u32, n: u32| EngineRequest { n, id: format!("request {seed}"), ..request(&prompt(seed, 21), TOKENS) };
    vec![request(0, 2), request(1, 1), request(2, 3), request(3, 1), request(4, 2)]
}

/// Every call that goes wrong, early and late.
fn calls() -> impl Iterator<Item = (Call, u64)> {
    let steps = (0..10).flat_map(|at| [(Call::Submit, at), (Call::Collect, at)]);
    steps.chain([(Call::CopyPages, 0)])
}

fn faulty(call: Call, at: u64, failing: Failing, depth: usize, overcommit: bool) -> EngineHandle {
    let script = Script { depth, kv_pages: 48, faults: vec![DeviceFault { call, at, failing }], ..Script::default() };
    start(script, EngineOptions { overcommit, ..EngineOptions::default() }).0
}

#[test]
fn a_failure_of_any_call_fails_each_open_choice_once_and_ends_the_engine() {
    for (call, at) in calls() {
        for failing in [Failing::Error, Failing::Panic] {
            for (depth, overcommit) in [(1, false), (2, false), (1, true), (2, true)] {
                let what = format!("{failing:?} of {call:?} {at}, depth {depth}, over-commit {overcommit}");
                let engine = faulty(call, at, failing, depth, overcommit);
                for outcome in run_together(&engine, requests()) {
                    for end in outcome.ends {
                        assert!(matches!(&end, Some(End::Failed(message)) if message.contains("scripted")), "{what}: {end:?}");
                    }
                }
                engine.join();
                assert!(matches!(engine.health(), EngineHealth::Failed(message) if message.contains("scripted")), "{what}");
                assert_eq!(engine.submit(request(&[1], 1)).unwrap_err(), RejectReason::Draining, "{what}");
                assert!(!engine.abort("request 0"), "{what}: nothing is remembered");
                assert_idle(&engine);
            }
        }
    }
}

#[test]
fn a_call_that_stalls_changes_no_token() {
    for (call, at) in calls().step_by(3).chain([(Call::CopyPages, 0)]) {
        let engine = faulty(call, at, Failing::Slow(Duration::from_millis(5)), 2, false);
        for (request, outcome) in requests().into_iter().zip(run_together(&engine, requests())) {
            assert_eq!(outcome.tokens, vec![greedy(&request.prompt, TOKENS as usize, VOCAB); request.n as usize], "{call:?} {at}");
        }
        assert_idle(&engine);
    }
}

#[test]
fn requests_cancelled_during_a_stall_end_after_it_and_give_everything_back() {
    for depth in [1, 2] {
        let (permit, gate) = mpsc::channel();
        let engine = start(Script { depth, kv_pages: 48, gate: Some(gate), ..Script::default() }, EngineOptions::default()).0;
        let streams: Vec<_> = requests().into_iter().map(|request| (request.n, engine.submit(request).unwrap())).collect();
        (0..2).for_each(|_| permit.send(()).unwrap());
        wait_for(&engine, "a step that stalls", |stats| stats.decode_tokens > 0);
        streams.iter().for_each(|(_, stream)| stream.cancel());
        drop(permit);
        for (choices, stream) in streams {
            for end in read(stream, choices as usize).ends {
                assert_eq!(end, Some(End::Finished(FinishReason::Cancelled)));
            }
        }
        assert_idle(&engine);
    }
}

#[test]
fn a_pool_that_runs_dry_at_any_point_changes_no_token() {
    let mut preemptions = 0;
    // From the least that holds the largest request to more than all need.
    for kv_pages in (36..110).step_by(3) {
        for depth in [1, 2] {
            let script = Script { depth, kv_pages, ..Script::default() };
            let engine = start(script, EngineOptions { overcommit: true, ..EngineOptions::default() }).0;
            for (request, outcome) in requests().into_iter().zip(run_together(&engine, requests())) {
                let right = vec![greedy(&request.prompt, TOKENS as usize, VOCAB); request.n as usize];
                assert_eq!(outcome.tokens, right, "{kv_pages} pages, depth {depth}");
            }
            preemptions += engine.stats().preemptions;
            assert_idle(&engine);
        }
    }
    assert!(preemptions > 0, "some pool was too small for all");
}

#[test]
fn a_request_is_counted_from_its_submission_to_its_end() {
    for depth in [1, 2] {
        let (permit, gate) = mpsc::channel();
        let engine = start(Script { depth, gate: Some(gate), ..Script::default() }, EngineOptions::default()).0;
        for seed in 0..20 {
            let mut stream = engine.submit(request(&prompt(seed, 9), 3)).unwrap();
            let mut steps = 0;
            while steps < 3 {
                let stats = engine.stats();
                assert!(stats.running + stats.waiting > 0, "{stats:?}");
                if stats.running == 1 || steps > 0 {
                    permit.send(()).unwrap();
                    steps += 1;
                }
            }
            while stream.blocking_recv().is_some() {}
            assert_idle(&engine);
        }
    }
}
