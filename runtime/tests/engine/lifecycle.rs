//! Cancellation, slow clients, drain, stop, failure: exactly one terminal event, and every page back.

use crate::support::*;
use oxide_runtime::engine::scripted::{DeviceFault, Failing, Script, greedy};
use oxide_runtime::engine::{EngineEvent, EngineHealth, EngineOptions, EngineRequest, FinishReason, RejectReason};
use std::sync::mpsc;
use std::time::Duration;

const CANCELLED: Option<End> = Some(End::Finished(FinishReason::Cancelled));

#[test]
fn cancelling_a_waiting_request_runs_nothing() {
    let engine = engine();
    engine.pause();
    let stream = engine.submit(EngineRequest { n: 2, ..request(&[1], 5) }).unwrap();
    assert!(engine.abort("test"));
    assert_eq!(read(stream, 2).ends, vec![CANCELLED; 2]);
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.waiting, stats.cancelled), (0, 0, 2));
    assert!(!engine.abort("test") && !engine.abort("never"));
}

#[test]
fn a_cancelled_request_is_gone_after_the_step_that_runs() {
    for (depth, steps) in [(1, 1), (2, 2)] {
        let (permit, gate) = mpsc::channel();
        let options = EngineOptions { chunk_tokens: Some(4), ..EngineOptions::default() };
        let engine = start(Script { depth, gate: Some(gate), ..Script::default() }, options).0;
        let mut stream = engine.submit(request(&prompt(1, 60), 5)).unwrap();
        assert_eq!(stream.blocking_recv(), Some(EngineEvent::Admitted { cached_tokens: 0 }));
        stream.cancel();
        for _ in 0..steps {
            permit.send(()).unwrap();
        }
        assert!(matches!(stream.blocking_recv(), Some(EngineEvent::Finished { reason: FinishReason::Cancelled, .. })));
        let stats = engine.stats();
        assert_eq!((stats.pages_in_use, stats.running), (0, 0));
        assert!(stats.steps <= steps, "{stats:?}");
        assert_eq!(stream.blocking_recv(), None);
    }
}

#[test]
fn dropping_the_stream_cancels() {
    let (permit, gate) = mpsc::channel();
    let engine = start(Script { gate: Some(gate), ..Script::default() }, EngineOptions::default()).0;
    for _ in 0..20 {
        let mut stream = engine.submit(EngineRequest { n: 3, ..request(&prompt(1, 9), 60) }).unwrap();
        permit.send(()).unwrap();
        while !matches!(stream.blocking_recv(), Some(EngineEvent::Token { .. })) {}
        drop(stream);
        permit.send(()).unwrap();
        wait_for(&engine, "pages back", |stats| stats.pages_in_use == 0 && stats.running == 0);
    }
    assert_eq!(engine.stats().cancelled, 60);
    assert!(!engine.abort("test"), "nothing is remembered");
}

#[test]
fn cancelling_one_leaves_its_neighbours_alone() {
    let engine = start(Script { depth: 2, ..Script::default() }, EngineOptions::default()).0;
    engine.pause();
    let streams: Vec<_> = (0..6).map(|seed| engine.submit(request(&prompt(seed, 13), 60)).unwrap()).collect();
    engine.resume();
    for (seed, stream) in (0..).zip(streams) {
        if seed % 2 == 0 {
            drop(stream);
        } else {
            assert_eq!(read(stream, 1).only(), greedy(&prompt(seed, 13), 60, VOCAB));
        }
    }
}

#[test]
fn a_client_that_reads_nothing_is_cancelled_and_never_waited_for() {
    let engine = start(Script::default(), EngineOptions { events_max: 10, ..EngineOptions::default() }).0;
    let slow = engine.submit(request(&[1, 2], 100)).unwrap();
    let prompt = [3, 4];
    wait_for(&engine, "the slow one's end", |stats| stats.cancelled == 1);
    assert_idle(&engine);
    let quick = engine.submit(request(&prompt, 5)).unwrap();
    assert_eq!(read(quick, 1).only(), greedy(&prompt, 5, VOCAB));
    let mut slow_events = 0;
    let mut slow = slow;
    let mut last = None;
    while let Some(event) = slow.blocking_recv() {
        slow_events += 1;
        last = Some(event);
    }
    assert_eq!(slow_events, 10);
    assert!(matches!(last, Some(EngineEvent::Finished { reason: FinishReason::Cancelled, .. })));
}

#[test]
fn a_client_that_reads_late_loses_nothing() {
    let engine = engine();
    let stream = engine.submit(EngineRequest { n: 4, ..request(&prompt(1, 9), 30) }).unwrap();
    wait_for(&engine, "the end", |stats| stats.finished == 4);
    assert_eq!(read(stream, 4).tokens, vec![greedy(&prompt(1, 9), 30, VOCAB); 4]);
}

#[test]
fn draining_finishes_what_was_accepted() {
    let engine = engine();
    engine.pause();
    let streams: Vec<_> = (0..20).map(|seed| engine.submit(request(&prompt(seed, 6), 9)).unwrap()).collect();
    engine.drain();
    assert_eq!(engine.health(), EngineHealth::Draining);
    assert_eq!(engine.submit(request(&[1], 1)).unwrap_err(), RejectReason::Draining);
    engine.resume();
    for stream in streams {
        assert_eq!(read(stream, 1).only().len(), 9);
    }
    engine.join();
    assert_eq!(engine.health(), EngineHealth::Stopped);
    assert_idle(&engine);
}

#[test]
fn stopping_cancels_what_runs_and_refuses_what_waits() {
    for depth in [1, 2] {
        let (permit, gate) = mpsc::channel();
        let script = Script { depth, kv_pages: 30, gate: Some(gate), ..Script::default() };
        let engine = start(script, EngineOptions::default()).0;
        let running = engine.submit(request(&prompt(0, 20), 100)).unwrap();
        permit.send(()).unwrap();
        wait_for(&engine, "the first token", |stats| stats.decode_tokens > 0);
        let waiting = engine.submit(request(&prompt(1, 20), 100)).unwrap();
        engine.stop();
        drop(permit);
        engine.join();
        assert_eq!(read(running, 1).ends, [CANCELLED]);
        assert_eq!(read(waiting, 1).ends, [Some(End::Rejected(RejectReason::Draining))]);
        assert_idle(&engine);
    }
}

#[test]
fn a_device_error_fails_everything_open_and_ends_the_engine() {
    for depth in [1, 2] {
        let faults = vec![DeviceFault::submitting(5, Failing::Error)];
        let engine = start(Script { depth, kv_pages: 30, faults, ..Script::default() }, EngineOptions::default()).0;
        let requests = vec![EngineRequest { n: 2, ..request(&prompt(0, 20), 40) }, request(&prompt(1, 20), 40)];
        for outcome in run_together(&engine, requests) {
            for end in outcome.ends {
                assert!(matches!(&end, Some(End::Failed(message)) if message.contains("scripted failure")), "{end:?}");
            }
        }
        engine.join();
        assert!(matches!(engine.health(), EngineHealth::Failed(message) if message.contains("scripted failure")));
        assert_eq!(engine.submit(request(&[1], 1)).unwrap_err(), RejectReason::Draining);
        assert_idle(&engine);
    }
}

#[test]
fn a_panic_in_the_engine_thread_is_heard_by_every_stream() {
    let faults = vec![DeviceFault::submitting(3, Failing::Panic)];
    let engine = start(Script { faults, ..Script::default() }, EngineOptions::default()).0;
    let outcomes = run_together(&engine, vec![request(&[1], 40), EngineRequest { n: 3, ..request(&[2], 40) }]);
    for end in outcomes.iter().flat_map(|outcome| &outcome.ends) {
        assert!(matches!(end, Some(End::Failed(message)) if message.contains("scripted panic")), "{end:?}");
    }
    assert!(matches!(engine.health(), EngineHealth::Failed(_)));
}

#[test]
fn dropping_the_last_handle_finishes_what_is_open() {
    let engine = engine();
    let stream = engine.submit(request(&[1, 2, 3], 50)).unwrap();
    drop(engine);
    assert_eq!(read(stream, 1).only(), greedy(&[1, 2, 3], 50, VOCAB));
}

#[test]
fn async_readers_are_woken() {
    let engine = engine();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let tokens = runtime.block_on(async {
        let mut stream = engine.submit(request(&[1, 2], 9)).unwrap();
        let mut outcome = Outcome::new(1);
        while let Some(event) = stream.recv().await {
            outcome.add(event);
        }
        outcome.tokens.remove(0)
    });
    assert_eq!(tokens, greedy(&[1, 2], 9, VOCAB));
}

#[test]
fn traces_tell_where_the_time_went() {
    let engine = start(Script { step_time: Duration::from_millis(2), ..Script::default() }, EngineOptions::default()).0;
    run(&engine, request(&prompt(1, 9), 1));
    engine.pause();
    let mut stream = engine.submit(request(&prompt(1, 9), 5)).unwrap();
    std::thread::sleep(Duration::from_millis(3));
    engine.resume();
    let trace = loop {
        if let Some(EngineEvent::Finished { trace, .. }) = stream.blocking_recv() {
            break trace;
        }
    };
    assert!(trace.queue >= Duration::from_millis(3) && trace.prefill >= Duration::from_millis(2), "{trace:?}");
    assert!(trace.decode >= Duration::from_millis(8) && trace.kv_page_seconds >= 0.010 * 3.0, "{trace:?}");
    assert_eq!((trace.cached_tokens, trace.preemptions), (8, 0));
}
