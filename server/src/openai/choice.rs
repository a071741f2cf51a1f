//! One choice of an answer: ids in; text, log-probabilities and the reason of its end out.
//!
//! What is certain collects in [`Choice::text`] and [`Choice::entries`]; a streaming answer takes it
//! after every step, another one at the end. **Invariant:** nothing is added after [`Choice::ended`] is set.
//!
//! Ends, in order of precedence: a stop string or stop id seen here, then what the engine says.

use super::common::Stop;
use crate::tools::{CallDelta, CallForm, CallParser};
use oxide_runtime::engine::{FinishReason, TokenLogprobs};
use oxide_text::{DecodeOptions, StreamDecoder, Tokenizer};
use std::collections::VecDeque;
use std::sync::Arc;

/// What all choices of a request share.
#[derive(Clone)]
pub struct ChoiceRules {
    /// Bytes of ids.
    pub tokenizer: Arc<Tokenizer>,
    /// The request's stops.
    pub stop: Stop,
    /// The model's own end ids.
    pub eos: Vec<u32>,
    /// Leaves special tokens out of the text.
    pub skip_special_tokens: bool,
    /// How the text holds tool calls; `None` if it holds none.
    pub calls: Option<CallForm>,
}

impl ChoiceRules {
    /// Ids that the engine stops at: the model's own unless ignored, the request's, and stop strings that are one control token.
    pub fn engine_stop_ids(&self) -> Vec<u32> {
        let own = self.eos.iter().copied().filter(|_| !self.stop.ignore_eos);
        let decoder = self.decoder();
        let mut ids: Vec<u32> = own.chain(self.stop.ids.iter().copied()).chain(decoder.stop_ids()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn decoder(&self) -> StreamDecoder {
        let options = DecodeOptions {
            stop: self.stop.strings.clone(),
            include_stop: self.stop.include_in_output,
            // The parser of calls sees marks that are special tokens; the others are left out before.
            skip_special: self.skip_special_tokens && self.calls.is_none(),
        };
        StreamDecoder::new(Arc::clone(&self.tokenizer), options)
    }

    /// Whether a token is left out of the text before anything reads it.
    fn leaves_out(&self, id: u32) -> bool {
        self.calls.is_some()
            && self.skip_special_tokens
            && self.tokenizer.is_special(id)
            && !std::str::from_utf8(self.tokenizer.id_to_bytes(id)).is_ok_and(CallParser::is_mark)
    }

    /// Whether drawing `id` ends the choice by itself, and by whose wish.
    fn stop_id(&self, id: u32) -> Option<StopReason> {
        if self.stop.ids.contains(&id) {
            return Some(StopReason::Id(id));
        }
        (!self.stop.ignore_eos && self.eos.contains(&id)).then_some(StopReason::Model)
    }
}

/// What made a choice end, beyond `finish_reason`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model, or a limit of tokens.
    Model,
    /// A stop string.
    Text(String),
    /// An id of `stop_token_ids`.
    Id(u32),
    /// The deadline passed; the text is what there was.
    Deadline,
    /// Aborted by id; the text is what there was.
    Aborted,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// `finish_reason`.
    pub finish: &'static str,
    /// `stop_reason`.
    pub reason: StopReason,
}

/// Log-probabilities of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The token.
    pub id: u32,
    /// Its log-probability; `None` for a prompt's first token.
    pub logprob: Option<f32>,
    /// Alternatives, falling.
    pub top: Vec<(u32, f32)>,
    /// Characters of the choice's text before it.
    pub offset: usize,
    /// How many of its bytes the text shows.
    pub bytes_shown: usize,
    /// Characters of the text once it is shown.
    end: usize,
}

/// One choice.
pub struct Choice {
    rules: Arc<ChoiceRules>,
    decoder: StreamDecoder,
    parser: Option<CallParser>,
    /// Certain text that was not taken yet.
    pub text: String,
    /// News of tool calls that were not taken yet.
    pub calls: Vec<CallDelta>,
    /// Log-probabilities of certain tokens that were not taken yet.
    pub entries: Vec<Entry>,
    waiting: VecDeque<Entry>,
    /// Characters of the echoed prompt.
    echoed: usize,
    /// Tokens drawn.
    pub tokens: u32,
    /// Set once the choice ended.
    pub ended: Option<Ended>,
}

impl Choice {
    /// A choice with nothing drawn.
    pub fn new(rules: &Arc<ChoiceRules>) -> Self {
        Self {
            decoder: rules.decoder(),
            parser: rules.calls.clone().map(CallParser::new),
            rules: Arc::clone(rules),
            text: String::new(),
            calls: Vec::new(),
            entries: Vec::new(),
            waiting: VecDeque::new(),
            echoed: 0,
            tokens: 0,
            ended: None,
        }
    }

    /// Starts the text with the prompt's.
    pub fn echo(&mut self, prompt: &str, entries: &[Entry]) {
        self.text.push_str(prompt);
        self.echoed = prompt.chars().count();
        self.entries.extend_from_slice(entries);
    }

    /// Adds a drawn token. After the end it changes nothing.
    pub fn token(&mut self, id: u32, logprobs: Option<TokenLogprobs>) {
        if self.ended.is_some() {
            return;
        }
        self.tokens += 1;
        let stop_id = self.rules.stop_id(id).filter(|_| !self.decoder.stop_ids().any(|stop| stop == id));
        let stops = stop_id.is_some() && !self.rules.stop.include_in_output;
        let hidden = stops || (self.rules.leaves_out(id) && !self.decoder.stop_ids().any(|stop| stop == id));
        if hidden {
            self.note(id, logprobs, None);
        } else {
            let decoded = self.decoder.push(id);
            self.show(&decoded.text);
            let shown = !(self.rules.skip_special_tokens && self.rules.tokenizer.is_special(id));
            self.note(id, logprobs, shown.then_some(decoded.offset));
            if let Some(hit) = decoded.stop {
                let text = self.rules.stop.strings.get(hit.index).cloned().unwrap_or_default();
                return self.end("stop", StopReason::Text(text));
            }
        }
        match stop_id {
            Some(reason) => self.end("stop", reason),
            None => self.settle(),
        }
    }

    /// Ends the choice as the engine says, unless it ended already.
    pub fn finish(&mut self, reason: FinishReason) {
        if self.ended.is_some() {
            return;
        }
        match reason {
            FinishReason::Stop => self.end("stop", StopReason::Model),
            FinishReason::Length => self.end("length", StopReason::Model),
            FinishReason::Deadline => self.end("length", StopReason::Deadline),
            FinishReason::Cancelled => self.end("length", StopReason::Aborted),
        }
    }

    /// Queues the token's log-probabilities. `offset` is `None` for a token that the text does not show.
    fn note(&mut self, id: u32, logprobs: Option<TokenLogprobs>, offset: Option<usize>) {
        let Some(TokenLogprobs { logprob, top }) = logprobs else { return };
        let bytes = self.rules.tokenizer.id_to_bytes(id);
        let last = self.waiting.back().map_or(self.decoder.shown_chars(), |entry| entry.end);
        let (offset, end, bytes_shown) = match offset {
            Some(offset) => (offset, offset + characters(bytes), bytes.len()),
            None => (last, last, 0),
        };
        self.waiting.push_back(Entry { id, logprob: Some(logprob), top, offset, bytes_shown, end });
    }

    /// Adds text, split into content and calls.
    fn show(&mut self, text: &str) {
        match &mut self.parser {
            Some(parser) => parser.push(text, &mut self.text, &mut self.calls),
            None => self.text.push_str(text),
        }
    }

    /// Moves entries whose text is shown to those that may be taken.
    fn settle(&mut self) {
        let shown = self.decoder.shown_chars();
        while self.waiting.front().is_some_and(|entry| entry.end <= shown) {
            self.take_entry(None);
        }
    }

    fn take_entry(&mut self, bytes_shown: Option<usize>) {
        if let Some(mut entry) = self.waiting.pop_front() {
            entry.offset += self.echoed;
            entry.bytes_shown = bytes_shown.unwrap_or(entry.bytes_shown);
            self.entries.push(entry);
        }
    }

    fn end(&mut self, finish: &'static str, reason: StopReason) {
        let rest = self.decoder.finish().text;
        self.show(&rest);
        if let Some(parser) = &mut self.parser {
            parser.finish(&mut self.text);
        }
        let calls = self.parser.as_ref().is_some_and(CallParser::ends_with_calls);
        let finish = if calls && finish == "stop" { "tool_calls" } else { finish };
        self.settle();
        let shown = self.decoder.shown_chars();
        let cut = self.decoder.stopped().is_some();
        while let Some(entry) = self.waiting.front() {
            if cut && entry.offset >= shown {
                break;
            }
            let bytes = self.rules.tokenizer.id_to_bytes(entry.id);
            let visible = if entry.bytes_shown == 0 { 0 } else { visible_bytes(bytes, shown.saturating_sub(entry.offset)) };
            self.take_entry(Some(visible));
        }
        self.waiting.clear();
        self.ended = Some(Ended { finish, reason });
    }
}

/// Characters that a token's bytes touch: those it starts, and one that it continues.
fn characters(bytes: &[u8]) -> usize {
    let starts = bytes.iter().filter(|byte| !is_continuation(**byte)).count();
    starts + usize::from(bytes.first().is_some_and(|byte| is_continuation(*byte)))
}

/// Leading bytes of a token that belong to its first `characters` characters.
fn visible_bytes(bytes: &[u8], characters: usize) -> usize {
    let mut touched = 0;
    for (index, byte) in bytes.iter().enumerate() {
        touched += usize::from(index == 0 || !is_continuation(*byte));
        if touched > characters {
            return index;
        }
    }
    bytes.len()
}

fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}

/// Entries of an echoed prompt: the first token has no log-probability.
pub fn prompt_entries(tokenizer: &Arc<Tokenizer>, prompt: &[u32], logprobs: Vec<TokenLogprobs>) -> Vec<Entry> {
    let mut decoder = StreamDecoder::new(Arc::clone(tokenizer), DecodeOptions::default());
    let first = std::iter::once(None);
    let logprobs = first.chain(logprobs.into_iter().map(Some));
    prompt
        .iter()
        .zip(logprobs)
        .map(|(&id, logprobs)| {
            let offset = decoder.push(id).offset;
            let bytes = tokenizer.id_to_bytes(id);
            let (logprob, top) = logprobs.map_or((None, Vec::new()), |found| (Some(found.logprob), found.top));
            Entry { id, logprob, top, offset, bytes_shown: bytes.len(), end: offset + characters(bytes) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_visible_part_of_a_token_ends_at_a_character() {
        let token = "aé日".as_bytes();
        let lengths: Vec<usize> = (0..=4).map(|count| visible_bytes(token, count)).collect();
        assert_eq!(lengths, [0, 1, 3, 6, 6]);
        assert_eq!(visible_bytes(&[0x9F, 0x98, b'a'], 1), 2);
        assert_eq!((characters(&[0x9F, b'a']), characters("日".as_bytes()), characters(b"")), (2, 1, 0));
    }
}
