//! Who is let in, in what order, and what the others hear.

use crate::support::*;
use oxide_runtime::engine::scripted::Script;
use oxide_runtime::engine::{EngineEvent, EngineOptions, EngineRequest, EventStream, FinishReason, RejectReason, SamplingParams};
use std::ops::Range;
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[test]
fn an_admitted_request_is_never_preempted() {
    let engine = start(Script { kv_pages: 16, ..Script::default() }, EngineOptions::default()).0;
    let requests = (0..8).map(|seed| request(&prompt(seed, 10), 20)).collect();
    for outcome in run_together(&engine, requests) {
        assert_eq!(outcome.only().len(), 20);
    }
    assert_eq!(engine.stats().preemptions, 0);
    assert_idle(&engine);
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let engine = start(Script { kv_pages: 10, ..Script::default() }, EngineOptions::default()).0;
    assert_eq!(run(&engine, request(&prompt(0, 30), 11)).only().len(), 11, "40 positions are exactly 10 pages");
    assert_eq!(engine.submit(request(&prompt(0, 30), 12)).unwrap_err(), RejectReason::NeverFits { need: 11, pool: 10 });
    let four = EngineRequest { n: 4, ..request(&prompt(0, 30), 8) };
    assert_eq!(engine.submit(four).unwrap_err(), RejectReason::NeverFits { need: 7 + 4 * 3, pool: 10 });
}

#[test]
fn over_commit_runs_a_request_that_fills_the_pool_exactly() {
    let options = EngineOptions { overcommit: true, ..EngineOptions::default() };
    let engine = start(Script { kv_pages: 10, ..Script::default() }, options).0;
    assert_eq!(run(&engine, request(&prompt(0, 40), 1)).only().len(), 1);
    let both = vec![request(&prompt(1, 20), 21), request(&prompt(2, 20), 21)];
    assert!(run_together(&engine, both).iter().all(|outcome| outcome.only().len() == 21));
    assert_idle(&engine);
}

#[test]
fn a_full_queue_refuses_with_an_estimate_and_the_waiting_ones_finish() {
    let engine = start(Script::default(), EngineOptions { queue_max: 3, ..EngineOptions::default() }).0;
    run(&engine, request(&prompt(0, 5), 5));
    engine.pause();
    // Eight find a slot, three wait beyond them.
    let streams: Vec<_> = (0..8 + 3).map(|seed| engine.submit(request(&prompt(seed, 5), 5)).unwrap()).collect();
    for _ in 0..100 {
        match engine.submit(request(&[1], 5)).unwrap_err() {
            RejectReason::QueueFull { limit, retry_after } => {
                assert_eq!(limit, 3);
                assert!(retry_after > Duration::ZERO && retry_after < Duration::from_secs(600));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(engine.stats().waiting, 11, "refused while nothing ran");
    assert_eq!(engine.backlog().waiting, 11);
    engine.resume();
    for stream in streams {
        read(stream, 1).only();
    }
    assert_eq!((engine.stats().rejected, engine.stats().waiting), (100, 0));
}

#[test]
fn the_backlog_grows_with_the_work() {
    let engine = start(Script { step_time: Duration::from_millis(1), ..Script::default() }, EngineOptions::default()).0;
    run(&engine, request(&prompt(0, 20), 20));
    engine.pause();
    let _first = engine.submit(request(&prompt(1, 20), 20)).unwrap();
    let small = engine.backlog();
    let _more: Vec<_> = (0..9).map(|seed| engine.submit(request(&prompt(seed, 20), 20)).unwrap()).collect();
    let large = engine.backlog();
    assert!(small.tokens_per_second > 0.0 && small.tokens >= 20, "{small:?}");
    assert_eq!((large.waiting, large.tokens), (10, small.tokens * 10));
    assert!(large.drain > small.drain * 9 && large.drain > large.room, "{small:?} {large:?}");
}

#[test]
fn the_wait_behind_a_long_completion_is_not_estimated_by_short_ones() {
    let script = Script { step_time: Duration::from_millis(3), kv_pages: 2048, context_max: 4096, ..Script::default() };
    let engine = start(script, EngineOptions::default()).0;
    let long = engine.submit(request(&prompt(0, 4), 4000)).unwrap();
    let nothing_finished = engine.backlog();
    assert_eq!((nothing_finished.room, nothing_finished.drain), (Duration::from_secs(1), Duration::from_secs(1)));
    for seed in 1..4 {
        run(&engine, request(&prompt(seed, 4), 1));
    }
    wait_for(&engine, "a hundred steps", |stats| stats.steps > 100);
    let backlog = engine.backlog();
    assert!(backlog.tokens >= 50 && backlog.room > Duration::from_millis(20), "{backlog:?}");
    drop(long);
}

#[test]
fn waiting_too_long_is_answered_without_running() {
    let engine = engine();
    engine.pause();
    let soon = Duration::from_millis(5);
    let queue_time = engine.submit(EngineRequest { queue_time_max: Some(soon), ..request(&[1], 5) }).unwrap();
    let deadline = engine.submit(EngineRequest { deadline: Some(Instant::now() + soon), ..request(&[1], 5) }).unwrap();
    let patient = engine.submit(EngineRequest { deadline: Some(Instant::now() + soon * 10_000), ..request(&[1], 5) }).unwrap();
    assert!(matches!(&read(queue_time, 1).ends[0], Some(End::Rejected(RejectReason::QueueTime { waited, .. })) if *waited >= soon));
    assert_eq!(read(deadline, 1).ends, [Some(End::Rejected(RejectReason::Deadline))]);
    assert_eq!((engine.stats().waiting, engine.stats().steps), (1, 0));
    engine.resume();
    read(patient, 1).only();
}

#[test]
fn a_running_request_ends_at_its_deadline_with_its_tokens() {
    // A busy machine may not reach the first step before a short deadline; then a longer one shows the same.
    let ended = [40, 400, 4_000, 40_000].into_iter().any(|patience_ms| {
        let (permit, gate) = mpsc::channel();
        let engine = start(Script { gate: Some(gate), ..Script::default() }, EngineOptions::default()).0;
        let deadline = Instant::now() + Duration::from_millis(patience_ms);
        let stream = engine.submit(EngineRequest { n: 2, deadline: Some(deadline), ..request(&[1, 2], 100) }).unwrap();
        (0..3).for_each(|_| permit.send(()).unwrap());
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        drop(permit);
        let outcome = read(stream, 2);
        assert_idle(&engine);
        if outcome.tokens[0].is_empty() {
            return false;
        }
        assert_eq!(outcome.ends, vec![Some(End::Finished(FinishReason::Deadline)); 2]);
        assert!(outcome.tokens[0].len() <= 4, "{outcome:?}");
        true
    });
    assert!(ended, "no step ran within forty seconds");
}

#[test]
fn keys_share_by_tokens_and_a_key_is_first_in_first_out() {
    let classes = vec![oxide_bundle::plan::BatchClass::Mixed { tokens: 64, seqs: 1 }];
    let options = EngineOptions { fair_quantum_tokens: 16, ..EngineOptions::default() };
    let engine = start(Script { classes, ..Script::default() }, options).0;
    engine.pause();
    let submit = |key: u64, index: u32| {
        let before = Instant::now();
        let stream = engine.submit(EngineRequest { fair_key: key, ..request(&prompt(index, 8), 8) }).unwrap();
        (before..Instant::now(), stream)
    };
    let flood: Vec<_> = (0..12).map(|index| submit(1, index)).collect();
    let late: Vec<_> = (0..3).map(|index| submit(2, 20 + index)).collect();
    engine.resume();
    // The earliest and the latest moment of each admission: it was submitted somewhere within the call.
    let admitted = |(submitted, mut stream): (Range<Instant>, EventStream)| loop {
        if let Some(EngineEvent::Finished { trace, .. }) = stream.blocking_recv() {
            return submitted.start + trace.queue..submitted.end + trace.queue;
        }
    };
    let [flood, late] = [flood, late].map(|streams| streams.into_iter().map(admitted).collect::<Vec<_>>());
    let ahead = flood.iter().filter(|other| other.end < late[2].start).count();
    assert!(ahead <= 5, "{ahead} of the first key ran before the last of the late one");
    for (index, pair) in [&flood, &late].into_iter().flat_map(|key| key.windows(2).enumerate()) {
        assert!(pair[0].start <= pair[1].end, "request {index} was overtaken by the next of its key");
    }
}

#[test]
fn requests_outside_the_limits_are_named() {
    let engine = engine();
    let penalties = SamplingParams { presence_penalty: 1.0, ..SamplingParams::default() };
    let cases: Vec<(EngineRequest, &str)> = vec![
        (request(&[], 1), "prompt is empty"),
        (request(&[61], 1), "prompt holds id 61"),
        (request(&prompt(0, 100), 29), "exceed the context of 128"),
        (request(&[1], u32::MAX), "exceed the context"),
        (EngineRequest { n: 0, ..request(&[1], 1) }, "n is 0"),
        (EngineRequest { n: 9, ..request(&[1], 1) }, "n is 9, allowed are 1 to 8"),
        (request(&[1], 0), "max_tokens is 0"),
        (EngineRequest { stop_ids: vec![1_000_000], ..request(&[1], 1) }, "stop_ids holds id 1000000"),
        (EngineRequest { prompt_logprobs: Some(21), ..request(&[1], 1) }, "21 log-probabilities"),
        (EngineRequest { stop_ids: vec![1; 65], ..request(&[1], 1) }, "65 ids"),
        (
            EngineRequest { sampling: SamplingParams { logit_bias: vec![(99, 1.0)], ..penalties }, ..request(&[1], 1) },
            "logit_bias holds id 99",
        ),
    ];
    for (request, expect) in cases {
        match engine.submit(request).unwrap_err() {
            RejectReason::Invalid(message) => assert!(message.contains(expect), "{message} / {expect}"),
            other => panic!("{other:?} / {expect}"),
        }
    }
    assert_idle(&engine);
}

#[test]
fn bias_and_history_beyond_one_step_wait_their_turn() {
    let sampling =
        SamplingParams { repetition_penalty: 2.0, logit_bias: (0..20).map(|id| (id, 0.5)).collect(), ..SamplingParams::default() };
    let requests: Vec<_> = (0..6).map(|seed| EngineRequest { sampling: sampling.clone(), ..request(&prompt(seed, 10), 10) }).collect();
    let script = Script { bias_max: 50, history_max: 60, ..Script::default() };
    let together = run_together(&start(script, EngineOptions::default()).0, requests.clone());
    let engine = engine();
    for (outcome, request) in together.iter().zip(requests) {
        assert_eq!(outcome.only(), run(&engine, request).only());
    }
}
