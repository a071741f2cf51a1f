//! Outputs that always close: keeps a constrained output within reach of its end.
//!
//! A *witness* is a text that completes the output from where it stands; the fewest tokens that spell it
//! bound what is still needed. With `left` tokens after the next one, a token may be drawn if the bound
//! after it is at most `left`:
//!
//! ```text
//! slack = left − bound
//!   slack ≥ what any token can add        every token that the grammar allows
//!   slack ≥ what n bytes of structure add tokens with at most n such bytes, and the witness
//!   otherwise                             the witness, and tokens that were tried: after each of them a
//!                                         known text closes the output within `left`
//! ```
//!
//! What a token can add comes from the schema ([`super::growth`]). The witness is recomputed only when
//! the bound that is carried along is too loose to allow what ordinary tokens have. Everything counts work, never time, so that
//! equal requests get equal masks.

use super::compile::Limits;
use super::vocabulary::Vocabulary;
use llguidance::TokenParser;
use llguidance::toktrie::Recognizer;

/// Searches for a witness, the cheap ones first.
const SEARCHES: [Effort; 7] = [
    Effort { bytes_max: 64, steps: 300, alike: 1 },
    Effort { bytes_max: 32, steps: 400, alike: 3 },
    Effort { bytes_max: 128, steps: 800, alike: 3 },
    Effort { bytes_max: 32, steps: 3_000, alike: usize::MAX },
    Effort { bytes_max: 512, steps: 1_500, alike: 3 },
    Effort { bytes_max: 2_048, steps: 4_000, alike: 3 },
    Effort { bytes_max: 8_192, steps: 10_000, alike: 3 },
];
/// Further places tried to shorten a witness.
const SHORTEN_STEPS: u32 = 200;
/// Tokens tried one by one.
const TRIED_MAX: usize = 96;
/// Bytes of witnesses that are read for them.
const TRIED_BYTES_MAX: usize = 8_192;
/// Tokens after which a new witness is searched for.
const SEARCHED_MAX: usize = 6;
/// Suffixes of an old witness that are tried before a new one is searched for.
const SUFFIXES_MAX: usize = 48;
/// Bytes of structure that few tokens exceed: `"},{"` has four.
const ORDINARY_STRUCTURE: u32 = 4;
/// First bytes of a suffix that are looked at before all of it is.
const PREVIEW_BYTES: usize = 16;
/// Bytes that a token may add beside its commitments: the rest of an escape or a character.
const ESCAPE_BYTES: u64 = 8;

/// The order in which bytes are tried: those that close come first.
const ORDER: &[u8] = b"}]\",:0123456789nultrefas{[-.Eabcdghijkmopqvwxyz_ABCDFGHIJKLMNOPQRSTUVWXYZ/+@#()<>=;!?$%&*'^`|~\\";

/// How far and how hard a search looks.
#[derive(Copy, Clone, Debug)]
struct Effort {
    /// Longest witness.
    bytes_max: usize,
    /// Places tried.
    steps: u32,
    /// Digits, lower-case and upper-case letters tried at each place, of each.
    alike: usize,
}

/// What is known of an output's rest.
#[derive(Clone, Debug)]
pub(super) struct Closing {
    /// Tokens that suffice, as far as is known.
    bound: u64,
    /// A text that completes the output, from where `bound` was exact on.
    witness: Vec<u8>,
    /// Its tokens, the last one first.
    tokens: Vec<u32>,
    /// Whether the witness completes the output from here.
    current: bool,
}

/// Characters that close nothing where they are text.
const BRACKETS: &[u8] = b"}]{[,:";

/// Digits, lower-case letters, upper-case letters and `_`, the rest.
fn kind(byte: u8) -> usize {
    match byte {
        b'0'..=b'9' => 0,
        b'a'..=b'z' => 1,
        b'A'..=b'Z' | b'_' => 2,
        _ => 3,
    }
}

/// Reads and moves a parser by bytes.
struct Search<'a> {
    parser: &'a mut TokenParser,
    vocabulary: &'a Vocabulary,
    path: Vec<u8>,
    best: Option<Vec<u8>>,
    steps: u32,
    alike: usize,
}

impl Closing {
    /// Of an output that has not begun: searches for a witness.
    pub(super) fn start(parser: &mut TokenParser, vocabulary: &Vocabulary) -> Option<Self> {
        let witness = find_witness(parser, vocabulary, &SEARCHES)?;
        Self::of(witness, vocabulary)
    }

    fn of(witness: Vec<u8>, vocabulary: &Vocabulary) -> Option<Self> {
        let mut tokens = vocabulary.spell(&witness)?;
        tokens.reverse();
        Some(Self { bound: tokens.len() as u64, witness, tokens, current: true })
    }

    /// Tokens that suffice to complete the output.
    pub(super) fn bound(&self) -> u64 {
        self.bound
    }

    /// Follows a token that was drawn.
    pub(super) fn advance(&mut self, id: u32, vocabulary: &Vocabulary, limits: &Limits) {
        if self.current && self.tokens.last() == Some(&id) {
            self.tokens.pop();
            self.witness.drain(..vocabulary.token(id).len().min(self.witness.len()));
            self.bound = self.tokens.len() as u64;
            return;
        }
        self.current = false;
        self.bound = limits.cap(self.bound.saturating_add(growth(limits, vocabulary.structure(id))));
    }

    /// Takes tokens out of a mask after which the output might not close with `left` tokens.
    pub(super) fn restrict(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary, limits: &Limits, left: u64, words: &mut [u32]) {
        let fits = |bound: u64| limits.cap(bound.saturating_add(growth(limits, vocabulary.structure_max()))) <= left;
        if fits(self.bound) || (!self.current && self.restrict_loosely(vocabulary, limits, left, words)) {
            return;
        }
        self.refresh(parser, vocabulary);
        if fits(self.bound) || !self.current {
            return;
        }
        let first = self.tokens.last().copied();
        match self.structure_allowed(limits, left).map(|structure| vocabulary.class(structure)) {
            Some(None) => {}
            Some(Some(class)) => {
                keep(words, &class.words);
                allow(words, first);
                allow_all(words, vocabulary.eos(), parser.is_accepting());
            }
            None => {
                let tried = self.tried(parser, vocabulary, left, words);
                words.fill(0);
                tried.into_iter().chain(first).for_each(|id| allow(words, Some(id)));
                allow_all(words, vocabulary.eos(), parser.is_accepting());
            }
        }
    }

    /// Takes out the tokens with more structure than the bound as it is carried along allows, if that leaves the
    /// ordinary ones: what is drawn then keeps the output within reach of its end, with whatever witness.
    fn restrict_loosely(&self, vocabulary: &Vocabulary, limits: &Limits, left: u64, words: &mut [u32]) -> bool {
        let class = self.structure_allowed(limits, left).and_then(|structure| vocabulary.class(structure));
        let Some(class) = class.filter(|class| class.structure_max >= ORDINARY_STRUCTURE) else { return false };
        if !words.iter().zip(&class.words).any(|(word, allowed)| word & allowed != 0) {
            return false;
        }
        keep(words, &class.words);
        true
    }

    /// Bytes of structure that a token may have so that what it adds is within the slack.
    fn structure_allowed(&self, limits: &Limits, left: u64) -> Option<u32> {
        let slack = left.checked_sub(self.bound)?.checked_sub(ESCAPE_BYTES)?;
        let commitments = slack / limits.committed.max(1);
        u32::try_from(commitments.checked_sub(1)?).ok()
    }

    /// Makes the witness one from here, and the bound exact.
    fn refresh(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary) {
        if self.current {
            return;
        }
        let witness = if parser.is_accepting() {
            Some(Vec::new())
        } else {
            // What was drawn may stand for the beginning of the old witness.
            let suffixes = (0..self.witness.len().min(SUFFIXES_MAX)).filter_map(|start| self.witness.get(start..));
            let mut old = suffixes.filter(|suffix| begins(parser, vocabulary, suffix) && closes(parser, vocabulary, &[], suffix).is_some());
            old.next().map(<[u8]>::to_vec).or_else(|| find_witness(parser, vocabulary, &SEARCHES))
        };
        if let Some(found) = witness.and_then(|witness| Self::of(witness, vocabulary)) {
            *self = found;
        }
    }

    /// Tokens of the mask after which a text is known that closes the output with `left` tokens.
    fn tried(&self, parser: &mut TokenParser, vocabulary: &Vocabulary, left: u64, words: &[u32]) -> Vec<u32> {
        let (mut kept, mut searches) = (Vec::new(), 0);
        let tried_max = (TRIED_BYTES_MAX / self.witness.len().max(1)).clamp(8, TRIED_MAX);
        let is_text = |id: &u32| !vocabulary.token(*id).is_empty();
        // A grammar that allows control tokens allows few, and says much with them.
        let control = bits(words).filter(|id| !is_text(id) && !vocabulary.eos().contains(id));
        for id in control.chain(bits(words).filter(is_text)).take(tried_max) {
            let rest = self.witness.strip_prefix(vocabulary.token(id)).unwrap_or(&self.witness);
            let bound = match closes(parser, vocabulary, &[id], rest) {
                Some(bound) => Some(bound),
                None if searches < SEARCHED_MAX => {
                    searches += 1;
                    bound_after(parser, vocabulary, id)
                }
                None => None,
            };
            if bound.is_some_and(|bound| bound <= left) {
                kept.push(id);
            }
        }
        kept
    }
}

/// Tokens that one with so many bytes of structure can add to what is needed.
fn growth(limits: &Limits, structure: u32) -> u64 {
    limits.committed.saturating_mul(u64::from(structure) + 1).saturating_add(ESCAPE_BYTES)
}

fn allow(words: &mut [u32], id: Option<u32>) {
    if let Some(id) = id
        && let Some(word) = words.get_mut((id / 32) as usize)
    {
        *word |= 1 << (id % 32);
    }
}

/// Takes out what is not in `allowed`.
fn keep(words: &mut [u32], allowed: &[u32]) {
    for (word, allowed) in words.iter_mut().zip(allowed.iter().chain(std::iter::repeat(&0))) {
        *word &= allowed;
    }
}

fn allow_all(words: &mut [u32], ids: &[u32], wanted: bool) {
    if wanted {
        ids.iter().for_each(|id| allow(words, Some(*id)));
    }
}

/// Ids of a mask, rising.
fn bits(words: &[u32]) -> impl Iterator<Item = u32> + '_ {
    let ids = |(index, word): (usize, &u32)| {
        let mut word = *word;
        std::iter::from_fn(move || {
            let bit = (word != 0).then(|| word.trailing_zeros())?;
            word &= word - 1;
            Some(index as u32 * 32 + bit)
        })
    };
    words.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(ids)
}

/// Whether the first bytes of `witness` may come next: a cheap look before [`closes`].
fn begins(parser: &mut TokenParser, vocabulary: &Vocabulary, witness: &[u8]) -> bool {
    let preview = witness.get(..PREVIEW_BYTES).unwrap_or(witness);
    let tokens = vocabulary.spell(preview);
    tokens.is_some_and(|tokens| parser.validate_tokens_raw(&tokens).is_ok_and(|valid| valid == tokens.len()))
}

/// Tokens of `witness` if it completes the output after the tokens `drawn`.
fn closes(parser: &mut TokenParser, vocabulary: &Vocabulary, drawn: &[u32], witness: &[u8]) -> Option<u64> {
    let rest = vocabulary.spell(witness)?;
    let eos = vocabulary.eos().first().copied()?;
    let path: Vec<u32> = drawn.iter().copied().chain(rest.iter().copied()).chain([eos]).collect();
    let valid = parser.validate_tokens_raw(&path).ok()?;
    (valid == path.len()).then_some(rest.len() as u64)
}

/// Tokens that suffice after `id`, searched for.
fn bound_after(parser: &mut TokenParser, vocabulary: &Vocabulary, id: u32) -> Option<u64> {
    parser.consume_token(id).ok()?;
    let witness = find_witness(parser, vocabulary, SEARCHES.get(..3).unwrap_or_default());
    parser.rollback(1).ok()?;
    Some(vocabulary.spell(&witness?)?.len() as u64)
}

/// Searches for a short text that completes the output.
fn find_witness(parser: &mut TokenParser, vocabulary: &Vocabulary, searches: &[Effort]) -> Option<Vec<u8>> {
    searches.iter().find_map(|&Effort { bytes_max, steps, alike }| {
        let mut search = Search { parser, vocabulary, path: Vec::new(), best: None, steps, alike };
        search.descend(bytes_max);
        search.best
    })
}

impl Search<'_> {
    /// Tries the bytes that may follow the path; the path and the parser are as before afterwards.
    fn descend(&mut self, bytes_max: usize) {
        if self.parser.is_accepting() {
            if self.best.is_none() {
                self.steps = self.steps.min(SHORTEN_STEPS);
            }
            self.best = Some(self.path.clone());
            return;
        }
        for byte in self.next_bytes() {
            let limit = self.best.as_ref().map_or(bytes_max, |best| best.len().saturating_sub(1));
            if self.steps == 0 || self.path.len() >= limit {
                return;
            }
            self.steps -= 1;
            let Some(id) = self.vocabulary.byte(byte) else { continue };
            if self.parser.consume_token(id).is_err() {
                return;
            }
            self.path.push(byte);
            self.descend(bytes_max);
            self.path.pop();
            if self.parser.rollback(1).is_err() {
                self.steps = 0;
            }
        }
    }

    /// Bytes that may come next, the most promising first.
    fn next_bytes(&mut self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.parser.parser.with_recognizer(|recognizer| {
            recognizer.trie_started("witness");
            let known = ORDER.iter().copied().filter(|byte| recognizer.byte_allowed(*byte)).collect::<Vec<_>>();
            let bytes = if known.is_empty() { (0..=0xFE).filter(|byte| recognizer.byte_allowed(*byte)).collect() } else { known };
            recognizer.trie_finished();
            bytes
        });
        // Where both may follow, a bracket is text and closes nothing.
        if bytes.contains(&b'a') {
            // Another kind of character is more likely to get ahead in a pattern than more of the same.
            let last = self.path.last().map(|byte| kind(*byte));
            bytes.sort_by_key(|byte| match (*byte, last) {
                (b'"', _) => 0,
                (byte, _) if BRACKETS.contains(&byte) => 4,
                (byte, Some(0..3)) if kind(byte) == 3 => 1,
                (byte, Some(last)) if kind(byte) != last => 2,
                (byte, _) => 2 + u8::from(kind(byte) == 3),
            });
        }
        let mut seen = [0_usize; 3];
        bytes.retain(|byte| {
            let count = seen.get_mut(kind(*byte));
            count.is_none_or(|count| {
                *count += 1;
                *count <= self.alike
            })
        });
        bytes
    }
}
