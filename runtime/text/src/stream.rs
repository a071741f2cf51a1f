//! Ids to text, one at a time.
//!
//! Owns UTF-8 hold-back, stop strings and what is shown of special tokens. Rules:
//!
//! - Bytes come from the vocabulary. Bytes of an unfinished character are held; bytes that can never
//!   become one give U+FFFD as in [`String::from_utf8_lossy`]. No other U+FFFD appears.
//! - With `skip_special`, special tokens contribute nothing, as if they were not there.
//! - Stop strings are matched on text, whatever the token boundaries; the match that is complete
//!   first wins (of two complete at the same character, the longer one), and text is cut at its first
//!   character (after its last, with `include_stop`). Text that could still become a stop is held.
//! - A stop string that is exactly a control token's text also fires on that token's id, shown or not.
//! - **The one flush rule**: [`StreamDecoder::finish`] releases held text; an unfinished character at
//!   the very end is dropped (its bytes still show in log-probabilities).

use crate::tokenizer::Tokenizer;
use std::sync::Arc;

/// What to hide and where to stop.
#[derive(Clone, Debug, Default)]
pub struct DecodeOptions {
    /// Stop strings, none empty.
    pub stop: Vec<String>,
    /// Keeps the stop string in the text.
    pub include_stop: bool,
    /// Hides special tokens.
    pub skip_special: bool,
}

/// A stop string that fired.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct StopHit {
    /// Index into [`DecodeOptions::stop`].
    pub index: usize,
}

/// What one id added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Text that may be shown now.
    pub text: String,
    /// Characters of text before this id's, held ones included.
    pub offset: usize,
    /// Set when a stop string fired: no more ids are wanted, the rest is in `text`.
    pub stop: Option<StopHit>,
}

/// What was left at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Held text, now certain.
    pub text: String,
}

/// Turns the ids of one choice into text.
pub struct StreamDecoder {
    tokenizer: Arc<Tokenizer>,
    options: DecodeOptions,
    /// Ids of stop strings that are control tokens, with their index.
    stop_ids: Vec<(u32, usize)>,
    /// Bytes of an unfinished character.
    pending: Vec<u8>,
    /// Text not shown yet: a suffix that could become a stop.
    held: String,
    /// Characters decoded so far, held ones included.
    decoded_chars: usize,
    /// Characters shown so far.
    shown_chars: usize,
    stopped: Option<StopHit>,
}

impl StreamDecoder {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, mut options: DecodeOptions) -> Self {
        // An empty stop would match everywhere; the index of the others must not move.
        let stop_ids = options
            .stop
            .iter()
            .enumerate()
            .filter_map(|(index, stop)| tokenizer.control().by_text(stop).map(|token| (token.id, index)))
            .collect();
        options.stop.shrink_to_fit();
        Self { tokenizer, options, stop_ids, pending: Vec::new(), held: String::new(), decoded_chars: 0, shown_chars: 0, stopped: None }
    }

    /// Ids on which a stop string fires: the engine may stop on them too.
    pub fn stop_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.stop_ids.iter().map(|&(id, _)| id)
    }

    /// Adds an id. After a stop fired, nothing more is shown.
    pub fn push(&mut self, id: u32) -> Decoded {
        let offset = self.decoded_chars;
        if self.stopped.is_some() {
            return Decoded { text: String::new(), offset, stop: self.stopped };
        }
        if let Some(&(_, index)) = self.stop_ids.iter().find(|&&(stop, _)| stop == id) {
            return self.stop_on_id(index, offset);
        }
        if !(self.options.skip_special && self.tokenizer.is_special(id)) {
            self.pending.extend_from_slice(self.tokenizer.id_to_bytes(id));
        }
        let scanned = self.held.len();
        self.take_characters();
        let text = match self.first_stop(scanned) {
            Some((range, index)) => self.cut(range, index),
            None => self.release(),
        };
        Decoded { text, offset, stop: self.stopped }
    }

    /// Ends the text; see the flush rule.
    pub fn finish(&mut self) -> Tail {
        self.pending.clear();
        let text = std::mem::take(&mut self.held);
        self.shown_chars += text.chars().count();
        Tail { text }
    }

    /// The stop that fired.
    pub fn stopped(&self) -> Option<StopHit> {
        self.stopped
    }

    /// Characters shown so far. A token whose [`Decoded::offset`] is not below this once the choice
    /// ended was hidden by a stop.
    pub fn shown_chars(&self) -> usize {
        self.shown_chars
    }

    fn stop_on_id(&mut self, index: usize, offset: usize) -> Decoded {
        self.stopped = Some(StopHit { index });
        self.pending.clear();
        let mut text = std::mem::take(&mut self.held);
        if self.options.include_stop {
            text.push_str(&self.options.stop[index]);
        }
        self.shown_chars += text.chars().count();
        Decoded { text, offset, stop: self.stopped }
    }

    /// Moves whole characters from `pending` to `held`.
    fn take_characters(&mut self) {
        let complete = self.pending.len() - incomplete_tail(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..complete]);
        self.decoded_chars += text.chars().count();
        self.held.push_str(&text);
        self.pending.drain(..complete);
    }

    /// The stop complete first, among those that end after `scanned` bytes of `held`.
    fn first_stop(&self, scanned: usize) -> Option<(std::ops::Range<usize>, usize)> {
        let ends = |stop: &str| {
            let from = (scanned + 1).saturating_sub(stop.len());
            let from = (0..=from.min(self.held.len())).rev().find(|&at| self.held.is_char_boundary(at))?;
            self.held[from..].find(stop).map(|at| from + at..from + at + stop.len())
        };
        let hits = self.options.stop.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        hits.filter_map(|(index, stop)| ends(stop).map(|range| (range, index))).min_by_key(|(range, _)| (range.end, range.start))
    }

    fn cut(&mut self, range: std::ops::Range<usize>, index: usize) -> String {
        let keep = if self.options.include_stop { range.end } else { range.start };
        self.stopped = Some(StopHit { index });
        self.pending.clear();
        let mut text = std::mem::take(&mut self.held);
        text.truncate(keep);
        self.shown_chars += text.chars().count();
        text
    }

    /// Releases all held text but the longest suffix that begins a stop.
    fn release(&mut self) -> String {
        let keep = self.options.stop.iter().map(|stop| longest_beginning(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        let text = std::mem::replace(&mut self.held, held);
        self.shown_chars += text.chars().count();
        text
    }
}

/// Bytes at the end that are the beginning of a character not finished yet.
pub(crate) fn incomplete_tail(bytes: &[u8]) -> usize {
    let window = &bytes[bytes.len().saturating_sub(3)..];
    for (at, &byte) in window.iter().enumerate().rev() {
        if byte & 0xC0 != 0x80 {
            let tail = &window[at..];
            let unfinished = std::str::from_utf8(tail).is_err_and(|e| e.error_len().is_none());
            return if unfinished { tail.len() } else { 0 };
        }
    }
    0
}

/// Length of the longest proper beginning of `stop` that ends `text`.
fn longest_beginning(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest).rev().find(|&len| stop.is_char_boundary(len) && text.ends_with(&stop[..len])).unwrap_or(0)
}
