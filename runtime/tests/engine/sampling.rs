//! Rows: stop ids, bias, minimum lengths, masks, log-probabilities, and failures of one choice alone.

use crate::support::*;
use oxide_runtime::engine::scripted::{Script, greedy};
use oxide_runtime::engine::{EngineOptions, EngineRequest, FinishReason, LogitsMask, MaskVerdict, SamplingParams};
use std::sync::{Arc, Mutex};

#[test]
fn a_stop_id_is_the_last_token() {
    for depth in [1, 2] {
        let engine = start(Script { depth, ..Script::default() }, EngineOptions::default()).0;
        let expect = greedy(&[5, 6, 7], 12, VOCAB);
        let stop = expect[4];
        let outcome = run(&engine, EngineRequest { stop_ids: vec![stop], ..request(&[5, 6, 7], 30) });
        let end = expect.iter().position(|id| *id == stop).unwrap();
        assert_eq!(outcome.tokens[0], expect[..=end]);
        assert_eq!(outcome.ends, [Some(End::Finished(FinishReason::Stop))]);
        let other = run(&engine, request(&[8, 9], 12));
        assert_eq!(other.only(), greedy(&[8, 9], 12, VOCAB), "a discarded step leaves nothing behind");
        assert_idle(&engine);
    }
}

#[test]
fn stop_ids_are_not_drawn_before_min_tokens() {
    let engine = engine();
    let all: Vec<u32> = (0..VOCAB).filter(|id| *id != 9).collect();
    let base = EngineRequest { stop_ids: all, ..request(&[5, 6, 7], 30) };
    let outcome = run(&engine, EngineRequest { min_tokens: 10, ..base.clone() });
    assert_eq!(outcome.tokens[0][..10], [9; 10]);
    assert_eq!(outcome.ends, [Some(End::Finished(FinishReason::Stop))]);
    assert_eq!(run(&engine, base).tokens[0].len(), 1);
}

#[test]
fn a_biased_id_is_or_is_not_drawn() {
    let engine = engine();
    let first = greedy(&[1, 2], 1, VOCAB)[0];
    let with = |id, bias| {
        let sampling = SamplingParams { logit_bias: vec![(id, bias)], ..SamplingParams::default() };
        run(&engine, EngineRequest { sampling, ..request(&[1, 2], 6) }).tokens.remove(0)
    };
    assert_eq!(with(17, 100.0), [17; 6]);
    assert!(!with(first, -100.0).contains(&first));
}

#[test]
fn penalties_look_at_the_output_as_it_grows() {
    let engine = engine();
    let sampling = SamplingParams { presence_penalty: 1000.0, ..SamplingParams::default() };
    let mut tokens = run(&engine, EngineRequest { sampling, ..request(&[1, 2], VOCAB) }).tokens.remove(0);
    tokens.sort_unstable();
    assert_eq!(tokens, (0..VOCAB).collect::<Vec<_>>(), "each id once");
}

#[test]
fn logprobs_name_the_drawn_token_and_the_best_others() {
    let sampling = SamplingParams { logprobs: Some(3), temperature: 1.0, seed: 3, ..SamplingParams::default() };
    let outcome = run(&engine(), EngineRequest { sampling, ..request(&[4, 4], 8) });
    assert_eq!(outcome.logprobs[0].len(), 8);
    for entry in &outcome.logprobs[0] {
        assert_eq!(entry.top.len(), 3);
        assert!(entry.logprob <= entry.top[0].1 && entry.top.is_sorted_by(|a, b| a.1 >= b.1));
    }
}

#[test]
fn prompt_logprobs_are_the_same_however_they_are_chunked() {
    let ask = |chunk_tokens, max_tokens| {
        let engine = start(Script::default(), EngineOptions { chunk_tokens, ..EngineOptions::default() }).0;
        run(&engine, request(&prompt(2, 30), 1));
        let outcome = run(&engine, EngineRequest { prompt_logprobs: Some(2), ..request(&prompt(2, 30), max_tokens) });
        assert_idle(&engine);
        (outcome.prompt, outcome.tokens)
    };
    let (prompt_logprobs, tokens) = ask(None, 4);
    assert_eq!((prompt_logprobs.len(), tokens[0].len()), (29, 4));
    assert_eq!(ask(Some(3), 4), (prompt_logprobs.clone(), tokens));
    assert_eq!(ask(None, 0), (prompt_logprobs, vec![Vec::new()]));
}

#[test]
fn a_nan_fails_its_own_choice_only() {
    for depth in [1, 2] {
        let engine = start(Script { depth, poison: Some(60), ..Script::default() }, EngineOptions::default()).0;
        let sick = request(&[1, 60, 2], 5);
        let well = request(&[1, 2, 3], 5);
        let outcomes = run_together(&engine, vec![sick, well]);
        assert!(matches!(&outcomes[0].ends[0], Some(End::Failed(message)) if message.contains("NaN")), "{:?}", outcomes[0]);
        assert_eq!(outcomes[1].tokens[0].len(), 5);
        assert_idle(&engine);
    }
}

#[test]
fn a_nan_among_scored_prompt_tokens_fails_the_request() {
    let engine = start(Script { poison: Some(60), ..Script::default() }, EngineOptions::default()).0;
    let outcome = run(&engine, EngineRequest { prompt_logprobs: Some(0), n: 2, ..request(&[1, 60, 2], 5) });
    assert!(outcome.ends.iter().all(|end| matches!(end, Some(End::Failed(_)))), "{outcome:?}");
    assert_idle(&engine);
}

/// Allows the next id of a list, then is complete. Logs its calls.
struct ListMask {
    ids: Vec<u32>,
    next: usize,
    calls: Arc<Mutex<Vec<String>>>,
}

impl LogitsMask for ListMask {
    fn begin(&mut self, budget: u32) {
        self.calls.lock().unwrap().push(format!("begin {budget}"));
    }

    fn fill(&mut self, words: &mut [u32]) -> MaskVerdict {
        self.calls.lock().unwrap().push("fill".to_owned());
        let Some(id) = self.ids.get(self.next) else { return MaskVerdict::Complete };
        words.fill(0);
        words[*id as usize / 32] |= 1 << (id % 32);
        MaskVerdict::Continue
    }

    fn accept(&mut self, id: u32) -> MaskVerdict {
        assert_eq!(id, self.ids[self.next], "the drawn id is the allowed one");
        self.next += 1;
        if self.next == self.ids.len() { MaskVerdict::Complete } else { MaskVerdict::Continue }
    }
}

fn list(ids: &[u32], calls: &Arc<Mutex<Vec<String>>>) -> oxide_runtime::engine::MaskFactory {
    let (ids, calls) = (ids.to_vec(), Arc::clone(calls));
    Arc::new(move || Box::new(ListMask { ids: ids.clone(), next: 0, calls: Arc::clone(&calls) }))
}

#[test]
fn a_mask_rules_what_is_drawn_and_ends_the_choice() {
    for depth in [1, 2] {
        let engine = start(Script { depth, ..Script::default() }, EngineOptions::default()).0;
        let calls = Arc::default();
        let masked = EngineRequest { mask: Some(list(&[7, 3, 3, 50], &calls)), n: 2, min_tokens: 20, ..request(&prompt(1, 9), 30) };
        let outcomes = run_together(&engine, vec![masked, request(&[1], 9)]);
        assert_eq!(outcomes[0].tokens, vec![vec![7, 3, 3, 50]; 2]);
        assert_eq!(outcomes[0].ends, vec![Some(End::Finished(FinishReason::Stop)); 2]);
        assert_eq!(outcomes[1].only(), greedy(&[1], 9, VOCAB), "an unmasked neighbour");
        assert_idle(&engine);
    }
}

#[test]
fn masks_begin_as_soon_as_a_token_is_known_and_know_the_budget() {
    let calls: Arc<Mutex<Vec<String>>> = Arc::default();
    run(&engine(), EngineRequest { mask: Some(list(&[7, 3, 9], &calls)), ..request(&[1], 2) });
    assert_eq!(*calls.lock().unwrap(), ["begin 2", "fill", "begin 1", "fill"]);
}

#[test]
fn an_only_allowed_stop_id_beats_min_tokens() {
    let calls = Arc::default();
    let request = EngineRequest { mask: Some(list(&[7, 3, 9], &calls)), stop_ids: vec![3], min_tokens: 10, ..request(&[1], 12) };
    let outcome = run(&engine(), request);
    assert_eq!((outcome.tokens, outcome.ends), (vec![vec![7, 3]], vec![Some(End::Finished(FinishReason::Stop))]));
}

#[test]
fn a_mask_complete_from_the_start_ends_without_a_token() {
    let engine = engine();
    let outcome = run(&engine, EngineRequest { mask: Some(list(&[], &Arc::default())), n: 3, ..request(&[1, 2], 5) });
    assert_eq!(outcome.tokens, vec![Vec::<u32>::new(); 3]);
    assert_eq!(outcome.ends, vec![Some(End::Finished(FinishReason::Stop)); 3]);
    assert_idle(&engine);
}

struct BrokenMask;

impl LogitsMask for BrokenMask {
    fn begin(&mut self, _budget: u32) {}

    fn fill(&mut self, _words: &mut [u32]) -> MaskVerdict {
        panic!("a bug in a grammar")
    }

    fn accept(&mut self, _id: u32) -> MaskVerdict {
        MaskVerdict::Continue
    }
}

#[test]
fn a_panic_inside_a_mask_fails_its_choice_only() {
    let engine = engine();
    let broken = EngineRequest { mask: Some(Arc::new(|| Box::new(BrokenMask))), ..request(&[1, 2], 5) };
    let unmakeable = EngineRequest { mask: Some(Arc::new(|| panic!("a bug in making a grammar"))), n: 2, ..request(&[1, 2], 5) };
    let outcomes = run_together(&engine, vec![broken, request(&[3], 5), unmakeable]);
    assert!(matches!(&outcomes[0].ends[0], Some(End::Failed(_))));
    assert!(outcomes[2].ends.iter().all(|end| matches!(end, Some(End::Failed(_)))));
    assert_eq!(outcomes[1].only(), greedy(&[3], 5, VOCAB));
    assert_idle(&engine);
}
