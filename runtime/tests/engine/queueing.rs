//! What waits and what is refused: a bounded line behind the slots, and waits of no time.

use crate::support::*;
use oxide_runtime::engine::scripted::{Script, greedy};
use oxide_runtime::engine::{EngineEvent, EngineHandle, EngineOptions, EngineRequest, EventStream, FinishReason, RejectReason};
use std::sync::mpsc;
use std::time::Duration;

/// Slots of the default script.
const SLOTS: u32 = 8;

fn queue(queue_max: usize) -> EngineOptions {
    EngineOptions { queue_max, ..EngineOptions::default() }
}

fn submit(engine: &EngineHandle, count: u32) -> Vec<EventStream> {
    (0..count).map(|seed| engine.submit(request(&prompt(seed, 5), 5)).expect("accepted")).collect()
}

fn is_full(engine: &EngineHandle, n: u32) -> bool {
    match engine.submit(EngineRequest { n, ..request(&[1], 5) }) {
        Err(RejectReason::QueueFull { .. }) => true,
        Err(other) => panic!("{other:?}"),
        Ok(_) => false,
    }
}

fn at_once(prompt: &[u32], max_tokens: u32) -> EngineRequest {
    EngineRequest { queue_time_max: Some(Duration::ZERO), ..request(prompt, max_tokens) }
}

#[test]
fn the_bound_is_on_what_finds_no_free_slot() {
    for bound in [0, 1, 3] {
        let engine = start(Script::default(), queue(bound as usize)).0;
        for _ in 0..3 {
            engine.pause();
            let streams = submit(&engine, SLOTS + bound);
            assert!(is_full(&engine, 1), "bound {bound}");
            engine.resume();
            for (seed, stream) in (0..).zip(streams) {
                assert_eq!(read(stream, 1).only(), greedy(&prompt(seed, 5), 5, VOCAB));
            }
        }
        assert_idle(&engine);
    }
}

#[test]
fn places_of_cancelled_requests_are_free_again() {
    let engine = start(Script::default(), queue(1)).0;
    for _ in 0..3 {
        engine.pause();
        let streams = submit(&engine, SLOTS + 1);
        assert!(is_full(&engine, 1));
        drop(streams);
        wait_for(&engine, "nobody waits", |stats| stats.waiting == 0);
    }
    engine.resume();
    run(&engine, request(&[1], 5)).only();
}

#[test]
fn each_choice_takes_a_slot() {
    let engine = start(Script::default(), queue(1)).0;
    engine.pause();
    let choices = |n| engine.submit(EngineRequest { n, ..request(&[1, 2], 5) }).expect("accepted");
    let streams = [choices(3), choices(5), choices(2)];
    assert!(is_full(&engine, 1), "eight slots are taken and one request waits");
    engine.resume();
    for (stream, n) in streams.into_iter().zip([3, 5, 2]) {
        read(stream, n);
    }
    engine.pause();
    let _fits = (choices(4), choices(4), choices(1));
    assert!(is_full(&engine, 1));
}

#[test]
fn a_preempted_request_resumes_though_the_queue_is_full() {
    let options = EngineOptions { overcommit: true, preemptions_max: 100, ..queue(1) };
    let engine = start(Script { kv_pages: 24, ..Script::default() }, options).0;
    engine.pause();
    let streams: Vec<_> = (0..SLOTS + 1).map(|seed| engine.submit(request(&prompt(seed, 8), 30)).expect("accepted")).collect();
    assert!(is_full(&engine, 1));
    engine.resume();
    for (seed, stream) in (0..).zip(streams) {
        assert_eq!(read(stream, 1).only(), greedy(&prompt(seed, 8), 30, VOCAB), "what was accepted is answered");
    }
    assert!(engine.stats().preemptions > 0);
    assert_eq!(engine.stats().rejected, 1);
    assert_idle(&engine);
}

#[test]
fn a_wait_of_no_time_refuses_what_finds_no_slot() {
    let (permit, gate) = mpsc::channel();
    let engine = start(Script { gate: Some(gate), kv_pages: 512, ..Script::default() }, EngineOptions::default()).0;
    let running: Vec<_> = (0..SLOTS).map(|seed| engine.submit(at_once(&prompt(seed, 5), 100)).expect("accepted")).collect();
    (0..3).for_each(|_| permit.send(()).unwrap());
    wait_for(&engine, "eight run", |stats| stats.running == SLOTS);
    let late = engine.submit(at_once(&[1], 5)).expect("nobody knows yet");
    let patient = engine.submit(request(&[1], 5)).expect("it may wait");
    // The refusal does not wait for the step after the one that runs.
    permit.send(()).unwrap();
    assert!(matches!(&read(late, 1).ends[0], Some(End::Rejected(RejectReason::QueueTime { .. }))));
    assert_eq!((engine.stats().running, engine.stats().waiting), (SLOTS, 1));
    drop(permit);
    running.into_iter().for_each(|stream| assert_eq!(read(stream, 1).only().len(), 100));
    read(patient, 1).only();
}

#[test]
fn a_wait_of_no_time_refuses_what_finds_no_pages() {
    let (permit, gate) = mpsc::channel();
    let engine = start(Script { gate: Some(gate), kv_pages: 20, ..Script::default() }, EngineOptions::default()).0;
    let large = engine.submit(at_once(&prompt(1, 10), 60)).expect("accepted");
    permit.send(()).unwrap();
    wait_for(&engine, "it runs", |stats| stats.running == 1);
    let late = engine.submit(at_once(&prompt(2, 10), 20)).expect("nobody knows yet");
    (0..2).for_each(|_| permit.send(()).unwrap());
    assert!(matches!(&read(late, 1).ends[0], Some(End::Rejected(RejectReason::QueueTime { .. }))));
    let small = engine.submit(at_once(&prompt(3, 4), 4)).expect("two pages are free");
    drop(permit);
    read(small, 1).only();
    read(large, 1).only();
}

#[test]
fn a_wait_of_no_time_does_not_count_the_turn_to_prefill() {
    let (permit, gate) = mpsc::channel();
    let options = EngineOptions { chunk_tokens: Some(8), ..EngineOptions::default() };
    let engine = start(Script { gate: Some(gate), kv_pages: 256, ..Script::default() }, options).0;
    // Each prompt takes five steps, and one is computed after the other.
    let mut streams: Vec<_> = (0..SLOTS).map(|seed| engine.submit(at_once(&prompt(seed, 40), 20)).expect("accepted")).collect();
    permit.send(()).unwrap();
    assert_eq!(streams[0].blocking_recv(), Some(EngineEvent::Admitted { cached_tokens: 0 }));
    assert!(streams[7].try_recv().is_none(), "it waits for its turn");
    drop(permit);
    let mut first = Outcome::new(1);
    while let Some(event) = streams[0].blocking_recv() {
        first.add(event);
    }
    assert_eq!(first.ends, [Some(End::Finished(FinishReason::Length))]);
    for (seed, stream) in (0..).zip(streams).skip(1) {
        assert_eq!(read(stream, 1).only(), greedy(&prompt(seed, 40), 20, VOCAB));
    }
}
