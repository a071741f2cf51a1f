//! The tokenizer against the reference implementation's ids, and against text that spells control tokens.

mod common;

use oxide_text::Tokenizer;
use proptest::prelude::*;
use serde_json::json;

const TEXTS: [&str; 8] = [
    "Hello, world! 1234 don't we'll",
    "  leading and trailing  \n\n\t x\r\n",
    "日本語 mixed with English, العربية و עברית",
    "\u{1F600}\u{1FAE0} e\u{301} \u{FB01} ½ \u{1D400}",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call><|endoftext|>",
    "<|im_start|<|im_start|>|im_end|>",
    "",
    "fn main() { println!(\"{}\", 1 << 3); }\n\n\n// done",
];

fn reference() -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(common::tiny_json().to_string()).expect("loads")
}

fn check_parity(ours: &Tokenizer, reference: &tokenizers::Tokenizer, text: &str) {
    let expect = reference.encode(text, false).expect("encodes");
    assert_eq!(ours.encode_with_control(text).expect("encodes"), expect.get_ids(), "{text:?}");
}

#[test]
fn ids_are_the_reference_s() {
    let (ours, reference) = (common::tiny(), reference());
    TEXTS.into_iter().for_each(|text| check_parity(&ours, &reference, text));
}

#[test]
fn plain_text_never_becomes_a_control_token_and_decodes_to_itself() {
    let tokenizer = common::tiny();
    for text in TEXTS.into_iter().filter(|text| !text.contains('\u{301}')) {
        let ids = tokenizer.encode_plain(text).expect("encodes");
        assert!(ids.iter().all(|&id| !tokenizer.is_control(id)), "{text:?}");
        assert_eq!(tokenizer.decode(&ids, true), text);
    }
}

#[test]
fn a_learned_entry_that_spells_a_control_token_is_written_in_bytes() {
    let mut file = common::tiny_json();
    file["added_tokens"][0] = json!({"id": file["model"]["vocab"]["he"], "content": "he", "special": true});
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).expect("loads");
    let ids = tokenizer.encode_plain("he").expect("encodes");
    assert_eq!(ids.len(), 2);
    assert_eq!(tokenizer.decode(&ids, true), "he");
}

#[test]
fn every_id_has_bytes_and_special_ones_their_text() {
    let tokenizer = common::tiny();
    assert_eq!(tokenizer.vocab_known(), 4096);
    assert!((0..4096).all(|id| !tokenizer.id_to_bytes(id).is_empty()));
    let end = tokenizer.token_id("<|im_end|>").expect("known");
    assert_eq!(tokenizer.id_to_bytes(end), b"<|im_end|>");
    assert!(tokenizer.is_special(end) && !tokenizer.is_special(tokenizer.token_id("<tool_call>").expect("known")));
    assert_eq!((tokenizer.id_to_bytes(4096), tokenizer.id_to_bytes(u32::MAX)), (&[][..], &[][..]));
}

#[test]
fn a_bos_is_prepended_where_the_file_says_so() {
    let mut file = common::tiny_json();
    assert_eq!(common::tiny().bos(), None);
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [4092], "tokens": ["<|im_start|>"]}},
    });
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).expect("loads");
    assert_eq!(tokenizer.encode_prompt("a").expect("encodes")[0], 4092);
    assert_eq!(tokenizer.encode_prompt("").expect("encodes"), [4092]);
    assert_eq!(tokenizer.encode_plain("").expect("encodes"), [0_u32; 0]);
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused() {
    for file in ["", "{}", "[]", "{\"model\": {\"type\": \"None\"}}"] {
        assert!(Tokenizer::from_json(file.as_bytes()).is_err(), "{file}");
    }
}

proptest! {
    #[test]
    fn any_text_has_the_reference_s_ids(text in "(\\PC|<\\|im_end\\|>|<tool_call>|[ \\n\\t]){0,40}") {
        thread_local! {
            static PAIR: (std::sync::Arc<Tokenizer>, tokenizers::Tokenizer) = (common::tiny(), reference());
        }
        PAIR.with(|(ours, reference)| check_parity(ours, reference, &text));
    }
}
