//! Random load: whatever is submitted, cancelled, paused or preempted, tokens are right and pages come back.

use crate::support::*;
use oxide_runtime::engine::scripted::{Script, greedy};
use oxide_runtime::engine::{EngineOptions, EngineRequest, EventStream, FinishReason, RejectReason, SamplingParams};
use proptest::prelude::*;
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
enum Act {
    Submit { prompt: u32, len: u32, max_tokens: u32, n: u32, key: u64, penalties: bool, patience_ms: Option<u64> },
    Cancel(usize),
    Drop(usize),
    EndChoice(usize, u32),
    Read(usize),
    Pause,
    Resume,
}

fn act() -> impl Strategy<Value = Act> {
    let patience = prop::option::weighted(0.2, 0u64..3);
    let submit = (0u32..4, 1u32..60, 1u32..40, 1u32..4, 0u64..3, any::<bool>(), patience).prop_map(
        |(prompt, len, max_tokens, n, key, penalties, patience_ms)| Act::Submit { prompt, len, max_tokens, n, key, penalties, patience_ms },
    );
    prop_oneof![
        6 => submit,
        1 => (0usize..20).prop_map(Act::Cancel),
        1 => (0usize..20).prop_map(Act::Drop),
        2 => ((0usize..20), 0u32..4).prop_map(|(index, choice)| Act::EndChoice(index, choice)),
        2 => (0usize..20).prop_map(Act::Read),
        1 => Just(Act::Pause),
        2 => Just(Act::Resume),
    ]
}

struct Open {
    stream: EventStream,
    request: EngineRequest,
    cancelled: bool,
    ended: Vec<u32>,
}

fn check_end(open: Open) {
    let Open { stream, request, cancelled, ended } = open;
    let outcome = read(stream, request.n as usize);
    let whole = greedy(&request.prompt, request.max_tokens as usize, VOCAB);
    for ((choice, tokens), end) in (0..).zip(&outcome.tokens).zip(&outcome.ends) {
        if request.sampling.presence_penalty == 0.0 {
            assert!(whole.starts_with(tokens), "{tokens:?} of {whole:?}");
        }
        match end {
            Some(End::Finished(FinishReason::Length)) => assert_eq!(tokens.len(), request.max_tokens as usize),
            Some(End::Finished(FinishReason::Stop)) => assert!(ended.contains(&choice)),
            Some(End::Finished(FinishReason::Cancelled)) => assert!(cancelled),
            Some(End::Finished(FinishReason::Deadline) | End::Rejected(RejectReason::Deadline)) => assert!(request.deadline.is_some()),
            other => panic!("{other:?}"),
        }
    }
}

fn play(acts: Vec<Act>, script: Script, options: EngineOptions) {
    let engine = start(script, options).0;
    let mut open: Vec<Open> = Vec::new();
    for act in acts {
        match act {
            Act::Submit { prompt: seed, len, max_tokens, n, key, penalties, patience_ms } => {
                let presence_penalty = if penalties { 0.5 } else { 0.0 };
                let sampling = SamplingParams { presence_penalty, ..SamplingParams::default() };
                let deadline = patience_ms.map(|patience| Instant::now() + Duration::from_millis(patience));
                let request = EngineRequest { n, fair_key: key, sampling, deadline, ..request(&prompt(seed, len), max_tokens) };
                match engine.submit(request.clone()) {
                    Ok(stream) => open.push(Open { stream, request, cancelled: false, ended: Vec::new() }),
                    Err(RejectReason::QueueFull { .. } | RejectReason::NeverFits { .. }) => {}
                    Err(other) => panic!("{other:?}"),
                }
            }
            Act::Cancel(index) if !open.is_empty() => {
                let index = index % open.len();
                open[index].cancelled = true;
                open[index].stream.cancel();
            }
            Act::EndChoice(index, choice) if !open.is_empty() => {
                let index = index % open.len();
                open[index].ended.push(choice);
                open[index].stream.end_choice(choice);
            }
            Act::Drop(index) if !open.is_empty() => drop(open.swap_remove(index % open.len())),
            Act::Read(index) if !open.is_empty() => {
                engine.resume();
                check_end(open.swap_remove(index % open.len()));
            }
            Act::Cancel(_) | Act::Drop(_) | Act::EndChoice(..) | Act::Read(_) => {}
            Act::Pause => engine.pause(),
            Act::Resume => engine.resume(),
        }
        let stats = engine.stats();
        assert_eq!(stats.pages_free + stats.pages_cached + stats.pages_in_use, stats.pages_total, "{stats:?}");
    }
    engine.resume();
    open.into_iter().for_each(check_end);
    engine.drain();
    engine.join();
    assert_eq!(engine.health(), oxide_runtime::engine::EngineHealth::Stopped);
    assert_idle(&engine);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_load_keeps_every_promise(
        acts in prop::collection::vec(act(), 1..40),
        depth in 1usize..3,
        overcommit: bool,
        prefix_cache: bool,
        kv_pages in 12u32..60,
        chunk in prop::option::of(1u32..30),
        preemptions_max in 0u32..4,
    ) {
        let options = EngineOptions { queue_max: 16, chunk_tokens: chunk, prefix_cache, overcommit, preemptions_max, ..EngineOptions::default() };
        play(acts, Script { depth, kv_pages, ..Script::default() }, options);
    }
}
