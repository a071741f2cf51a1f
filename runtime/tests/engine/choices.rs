//! Choices that their reader ends: their pages come back, and nobody else's tokens change.

use crate::support::*;
use oxide_runtime::engine::scripted::Script;
use oxide_runtime::engine::{EngineEvent, EngineOptions, EngineRequest, FinishReason, SamplingParams};
use std::sync::mpsc;

const STOP: Option<End> = Some(End::Finished(FinishReason::Stop));
const LENGTH: Option<End> = Some(End::Finished(FinishReason::Length));

/// Three choices that differ.
fn three(max_tokens: u32) -> EngineRequest {
    let sampling = SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::default() };
    EngineRequest { n: 3, sampling, ..request(&prompt(3, 4), max_tokens) }
}

#[test]
fn an_ended_choice_gives_its_pages_back_and_its_siblings_stay_as_they_were() {
    let alone = run(&engine(), three(60));
    assert!(alone.tokens[0] != alone.tokens[1] && alone.tokens[1] != alone.tokens[2], "the choices differ");
    for depth in [1, 2] {
        let (permit, gate) = mpsc::channel();
        let (engine, log) = start(Script { depth, gate: Some(gate), ..Script::default() }, EngineOptions::default());
        let mut stream = engine.submit(three(60)).unwrap();
        let mut outcome = Outcome::new(3);
        (0..18).for_each(|_| permit.send(()).unwrap());
        while outcome.tokens[2].len() < 18 {
            outcome.add(stream.blocking_recv().unwrap());
        }
        let before = wait_for(&engine, "three choices", |stats| stats.running == 3 && stats.steps >= 18);
        stream.end_choice(1);
        permit.send(()).unwrap();
        let after = wait_for(&engine, "two choices", |stats| stats.running == 2);
        assert_eq!(after.pages_in_use + 5, before.pages_in_use, "the five pages that it shared with nobody are back");
        drop(permit);
        while outcome.ends.contains(&None) {
            outcome.add(stream.blocking_recv().unwrap());
        }
        assert_eq!(outcome.ends, [LENGTH, STOP, LENGTH]);
        assert_eq!((&outcome.tokens[0], &outcome.tokens[2]), (&alone.tokens[0], &alone.tokens[2]));
        assert!(outcome.tokens[1].len() < 22 && alone.tokens[1].starts_with(&outcome.tokens[1]), "{outcome:?}");
        let wide = log.steps().iter().filter(|step| step.rows == 3).count();
        assert!(wide <= 19 + depth, "{wide} steps drew for the ended choice");
        assert_eq!((engine.stats().finished, engine.stats().cancelled), (3, 0));
        assert_idle(&engine);
    }
}

#[test]
fn a_choice_ended_before_it_began_ends_with_its_first_token() {
    let engine = engine();
    let alone = run(&engine, three(10));
    engine.pause();
    let stream = engine.submit(three(10)).unwrap();
    stream.end_choice(2);
    stream.end_choice(7);
    engine.resume();
    let outcome = read(stream, 3);
    assert_eq!(outcome.ends, [LENGTH, LENGTH, STOP]);
    assert_eq!((&outcome.tokens[..2], &outcome.tokens[2][..]), (&alone.tokens[..2], &alone.tokens[2][..1]));
    assert_idle(&engine);
}

#[test]
fn a_request_whose_choices_all_ended_is_over() {
    let (permit, gate) = mpsc::channel();
    let engine = start(Script { gate: Some(gate), ..Script::default() }, EngineOptions::default()).0;
    let mut stream = engine.submit(three(60)).unwrap();
    (0..2).for_each(|_| permit.send(()).unwrap());
    while !matches!(stream.blocking_recv(), Some(EngineEvent::Token { choice: 2, .. })) {}
    (0..3).for_each(|choice| stream.end_choice(choice));
    // The reader leaves, as a server does that needs no traces.
    drop(stream);
    drop(permit);
    wait_for(&engine, "the end", |stats| stats.running == 0 && stats.finished + stats.cancelled == 3);
    assert_eq!(engine.stats().cancelled, 0, "they ended before they were given up");
    assert!(engine.stats().steps < 10);
    assert_idle(&engine);
}
