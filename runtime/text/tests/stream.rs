//! The stream decoder on the shipped tokenizer, whose vocabulary has every single byte.

mod common;

use oxide_text::{DecodeOptions, StreamDecoder, Tokenizer};
use proptest::prelude::*;
use std::sync::Arc;

/// Ids of single bytes.
fn byte_ids(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u32> {
    let id = |byte: u8| (0..tokenizer.vocab_known()).find(|&id| tokenizer.id_to_bytes(id) == [byte]).expect("every byte has an id");
    bytes.iter().map(|&byte| id(byte)).collect()
}

/// What a client sees: the texts in order, and which stop fired.
fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], options: DecodeOptions) -> (Vec<String>, Option<usize>) {
    let mut decoder = StreamDecoder::new(Arc::clone(tokenizer), options);
    let mut shown = Vec::new();
    for &id in ids {
        let decoded = decoder.push(id);
        shown.push(decoded.text);
        if decoded.stop.is_some() {
            break;
        }
    }
    let stopped = decoder.stopped().map(|hit| hit.index);
    shown.push(decoder.finish().text);
    assert_eq!(decoder.shown_chars(), shown.concat().chars().count());
    (shown, stopped)
}

fn stops(stop: &[&str]) -> DecodeOptions {
    DecodeOptions { stop: stop.iter().map(|s| (*s).to_owned()).collect(), include_stop: false, skip_special: true }
}

fn shown(tokenizer: &Arc<Tokenizer>, text: &str, stop: &[&str]) -> (String, Option<usize>) {
    let (texts, hit) = stream(tokenizer, &byte_ids(tokenizer, text.as_bytes()), stops(stop));
    (texts.concat(), hit)
}

#[test]
fn a_character_split_over_tokens_comes_whole() {
    let tokenizer = common::tiny();
    let (texts, _) = stream(&tokenizer, &byte_ids(&tokenizer, "a\u{1FAE0}b".as_bytes()), DecodeOptions::default());
    assert_eq!(texts, ["a", "", "", "", "\u{1FAE0}", "b", ""]);
}

#[test]
fn an_unfinished_character_at_the_end_is_dropped_and_the_rest_kept() {
    let tokenizer = common::tiny();
    let bytes = "مرحبا".as_bytes();
    let (texts, _) = stream(&tokenizer, &byte_ids(&tokenizer, &bytes[..bytes.len() - 1]), DecodeOptions::default());
    assert_eq!(texts.concat(), "مرحب");
}

#[test]
fn bytes_that_can_never_be_text_become_replacement_characters_at_once() {
    let tokenizer = common::tiny();
    let (texts, _) = stream(&tokenizer, &byte_ids(&tokenizer, b"\xE6a\xFFb\xF0\x9F"), DecodeOptions::default());
    assert_eq!(texts, ["", "\u{FFFD}a", "\u{FFFD}", "b", "", "", ""]);
}

#[test]
fn nothing_of_a_stop_is_shown() {
    let tokenizer = common::tiny();
    let (texts, hit) = stream(&tokenizer, &byte_ids(&tokenizer, b"ABCDEFGHIJK"), stops(&["DEFGHIJ"]));
    assert_eq!(texts.concat(), "ABC");
    assert_eq!(hit, Some(0));
    assert!(texts.iter().all(|text| !text.contains('D')));
}

#[test]
fn text_held_for_a_stop_that_does_not_come_is_released() {
    let tokenizer = common::tiny();
    assert_eq!(shown(&tokenizer, "ABCDEFX", &["DEFGHIJ"]), ("ABCDEFX".into(), None));
    assert_eq!(shown(&tokenizer, "ABCDEF", &["DEFGHIJ"]), ("ABCDEF".into(), None));
    assert_eq!(shown(&tokenizer, "aabaabaac", &["aabaac"]), ("aab".into(), Some(0)));
}

#[test]
fn the_stop_complete_first_wins_whatever_the_token_boundaries() {
    let tokenizer = common::tiny();
    let whole = tokenizer.encode_plain("the quick brown fox").expect("encodes");
    let single = byte_ids(&tokenizer, b"the quick brown fox");
    for ids in [whole, single] {
        let (texts, hit) = stream(&tokenizer, &ids, stops(&["brown fox", "row", "k b"]));
        assert_eq!((texts.concat(), hit), ("the quic".into(), Some(2)));
    }
}

#[test]
fn a_stop_inside_one_token_and_one_over_several_cut_at_their_first_character() {
    let tokenizer = common::tiny();
    let ids = tokenizer.encode_plain("I think beta gamma delta").expect("encodes");
    for (stop, expect) in [("beta gamma", "I think "), ("gamma", "I think beta "), ("amma d", "I think beta g"), ("hin", "I t")] {
        assert_eq!(stream(&tokenizer, &ids, stops(&[stop])).0.concat(), expect);
    }
}

#[test]
fn the_stop_is_kept_when_asked_for() {
    let tokenizer = common::tiny();
    let options = DecodeOptions { include_stop: true, ..stops(&["END"]) };
    let (texts, _) = stream(&tokenizer, &byte_ids(&tokenizer, b"a ENDS"), options);
    assert_eq!(texts.concat(), "a END");
}

#[test]
fn special_tokens_are_hidden_or_shown_and_stop_by_id() {
    let tokenizer = common::tiny();
    let ids = tokenizer.encode_with_control("a<|im_end|>b<tool_call>c").expect("encodes");
    let hide = DecodeOptions { skip_special: true, ..DecodeOptions::default() };
    assert_eq!(stream(&tokenizer, &ids, hide).0.concat(), "ab<tool_call>c");
    assert_eq!(stream(&tokenizer, &ids, DecodeOptions::default()).0.concat(), "a<|im_end|>b<tool_call>c");
    assert_eq!(stream(&tokenizer, &ids, stops(&["<|im_end|>"])), (vec!["a".into(), String::new(), String::new()], Some(0)));
}

#[test]
fn a_hidden_special_token_does_not_break_a_character() {
    let tokenizer = common::tiny();
    let mut ids = byte_ids(&tokenizer, "é".as_bytes());
    ids.insert(1, tokenizer.token_id("<|im_end|>").expect("known"));
    assert_eq!(stream(&tokenizer, &ids, stops(&[])).0.concat(), "é");
}

#[test]
fn offsets_count_characters_before_each_token() {
    let tokenizer = common::tiny();
    let mut decoder = StreamDecoder::new(Arc::clone(&tokenizer), stops(&["zz"]));
    let offsets: Vec<usize> = byte_ids(&tokenizer, "éaz!".as_bytes()).into_iter().map(|id| decoder.push(id).offset).collect();
    assert_eq!(offsets, [0, 0, 1, 2, 3]);
}

#[test]
fn tokens_from_the_stop_on_have_offsets_past_the_shown_text() {
    let tokenizer = common::tiny();
    let mut decoder = StreamDecoder::new(Arc::clone(&tokenizer), stops(&["CD"]));
    let offsets: Vec<usize> = byte_ids(&tokenizer, b"ABCD").into_iter().map(|id| decoder.push(id).offset).collect();
    let visible = offsets.iter().filter(|&&offset| offset < decoder.shown_chars()).count();
    assert_eq!((visible, decoder.shown_chars()), (2, 2));
}

proptest! {
    #[test]
    fn a_stream_is_the_whole_text(text in "\\PC{0,40}", cuts in prop::collection::vec(any::<bool>(), 0..200)) {
        let tokenizer = common::tiny();
        // Some words in whole tokens, some byte by byte.
        let mut ids = Vec::new();
        for (part, whole) in text.split_inclusive(' ').zip(cuts.into_iter().chain(std::iter::repeat(true))) {
            ids.extend(if whole { tokenizer.encode_plain(part).unwrap() } else { byte_ids(&tokenizer, part.as_bytes()) });
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.id_to_bytes(id)).copied().collect();
        let (texts, _) = stream(&tokenizer, &ids, DecodeOptions::default());
        prop_assert_eq!(texts.concat(), String::from_utf8(bytes).unwrap());
    }

    #[test]
    fn any_bytes_stream_as_they_decode_lossily(bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0xC0..=0xF7_u8, 0x80..=0xBF_u8], 0..40)) {
        let tokenizer = common::tiny();
        let ids = byte_ids(&tokenizer, &bytes);
        let (texts, _) = stream(&tokenizer, &ids, DecodeOptions::default());
        prop_assert_eq!(texts.concat(), tokenizer.decode(&ids, false));
    }

    #[test]
    fn stops_cut_as_a_search_of_the_whole_text_does(text in "[ab日]{0,24}", stop in prop::collection::vec("[ab日]{1,4}", 0..4)) {
        let tokenizer = common::tiny();
        let stop: Vec<&str> = stop.iter().map(String::as_str).collect();
        let first = stop.iter().filter_map(|s| text.find(s).map(|at| (at + s.len(), at))).min();
        let expect = first.map_or(text.as_str(), |(_, start)| &text[..start]);
        let (got, hit) = shown(&tokenizer, &text, &stop);
        prop_assert_eq!(got, expect);
        prop_assert_eq!(hit.is_some(), first.is_some());
    }
}
