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
//! What a token can add comes from the schema ([`super::growth`]) or from the automata of the lexemes. The witness
//! comes from [`super::track`] and is recomputed only when the bound that is carried along is too loose to allow
//! what ordinary tokens have; until then nothing of the output is read. Everything counts work, never time, so
//! that equal requests get equal masks.

use super::compile::{Committed, Limits};
use super::shape::{Piece, Shape};
use super::track::Tracker;
use super::vocabulary::Vocabulary;
use llguidance::TokenParser;
use std::sync::Arc;

/// Tokens tried one by one.
const TRIED_MAX: usize = 64;
/// Tokens of known endings that are read for them.
const TRIED_TOKENS_MAX: usize = 2_048;
/// Counted bytes that few tokens exceed: `"},{"` has four of structure.
const ORDINARY_COUNT: u32 = 4;
/// Bytes that a token may add beside its commitments: the rest of an escape or a character.
const ESCAPE_BYTES: u64 = 8;

/// What is known of a grammar: its costs, and a parser at the beginning whose lexer they were found with.
pub(super) struct Known {
    shape: Shape,
    parser: TokenParser,
    /// Longest rest of a lexeme that hints may give: what a token is known to add at most.
    taken: usize,
}

impl Known {
    /// Reads a grammar.
    ///
    /// # Errors
    /// Why it cannot be known how its outputs close.
    pub(super) fn new(parser: &TokenParser, vocabulary: &Vocabulary, hints: Vec<Vec<u8>>) -> Result<Self, String> {
        let mut parser = parser.deep_clone();
        let shape = Shape::new(&mut parser, vocabulary, hints.into())?;
        Ok(Self { shape, parser, taken: 0 })
    }

    /// What a token can add to what is needed, as far as the automata of the lexemes tell; `None` if they are too
    /// large.
    pub(super) fn committed(&self, by: Committed) -> Option<u64> {
        match by {
            Committed::Schema(committed) => Some(committed),
            Committed::SchemaAndAutomata(committed) => Some(committed.max(self.shape.inside_lexemes(&self.parser)?)),
            Committed::Grammar => Some(self.shape.inside_lexemes(&self.parser)?.saturating_add(self.shape.begun_at_once())),
        }
    }

    /// Says what a token adds at most.
    pub(super) fn adding(self, committed: u64) -> Self {
        Self { taken: usize::try_from(committed).unwrap_or(usize::MAX), ..self }
    }

    fn tracker(&self) -> Option<Tracker> {
        Tracker::new(self.parser.deep_clone(), &self.shape, self.taken)
    }
}

/// What is known of an output's rest.
#[derive(Clone)]
pub(super) struct Closing {
    /// Tokens that suffice, as far as is known.
    bound: u64,
    /// Tokens that complete the output, from where `bound` was exact on, the last one first; with each, how many
    /// suffice for any end of the text from it on.
    tokens: Vec<(u32, u64)>,
    /// Tokens that may be needed beyond that, where it is open which of several beginnings the output has.
    open: u64,
    /// Whether they complete the output from here.
    current: bool,
    /// Tokens of the output.
    drawn: Vec<u32>,
    reader: Reader,
    known: Arc<Known>,
}

/// Reads the output where that is needed. A copy begins anew.
#[derive(Default)]
struct Reader {
    /// With the tokens that it has read.
    tracker: Option<(Box<Tracker>, usize)>,
}

impl Clone for Reader {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Reader {
    /// The tracker behind all tokens.
    fn at_end(&mut self, known: &Known, vocabulary: &Vocabulary, drawn: &[u32]) -> Option<&mut Tracker> {
        // A lexer that used up its limits is replaced once.
        for _ in 0..2 {
            if self.tracker.is_none() {
                self.tracker = Some((Box::new(known.tracker()?), 0));
            }
            let (tracker, read) = self.tracker.as_mut()?;
            let rest = drawn.get(*read..)?;
            let followed = rest.iter().try_for_each(|id| tracker.token(&known.shape, vocabulary, *id)).is_some();
            *read = drawn.len();
            if followed && !tracker.failed() {
                break;
            }
            self.tracker = None;
        }
        self.tracker.as_mut().map(|(tracker, _)| &mut **tracker)
    }
}

impl Closing {
    /// Of an output that has not begun: `None` if no text is known that it could be.
    pub(super) fn start(parser: &mut TokenParser, vocabulary: &Vocabulary, known: Arc<Known>) -> Option<Self> {
        let (tokens, drawn, reader) = (Vec::new(), Vec::new(), Reader::default());
        let mut closing = Self { bound: u64::MAX, tokens, open: 0, current: false, drawn, reader, known };
        closing.refresh(parser, vocabulary);
        closing.current.then_some(closing)
    }

    /// Tokens that suffice to complete the output.
    pub(super) fn bound(&self) -> u64 {
        self.bound
    }

    /// Follows a token that was drawn.
    pub(super) fn advance(&mut self, id: u32, vocabulary: &Vocabulary, limits: &Limits) {
        self.drawn.push(id);
        if self.current && self.tokens.last().is_some_and(|(next, _)| *next == id) {
            self.tokens.pop();
            self.bound = self.tokens.len() as u64;
            return;
        }
        let bound = self.reach();
        self.current = false;
        self.bound = limits.cap(bound.saturating_add(growth(limits, vocabulary.counted(id, limits.counted))));
    }

    /// Tokens that suffice from here on wherever the output turns, but for what it begins.
    fn reach(&self) -> u64 {
        match self.tokens.last() {
            Some((_, worst)) if self.current => worst.saturating_add(self.open),
            _ => self.bound,
        }
    }

    /// Takes tokens out of a mask after which the output might not close with `left` tokens.
    pub(super) fn restrict(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary, limits: &Limits, left: u64, words: &mut [u32]) {
        let most = growth(limits, vocabulary.counted_max(limits.counted));
        let fits = |bound: u64| limits.cap(bound.saturating_add(most)) <= left;
        if fits(self.reach()) || (!self.current && self.restrict_loosely(vocabulary, limits, left, words)) {
            return;
        }
        self.refresh(parser, vocabulary);
        if fits(self.reach()) || !self.current {
            return;
        }
        let first = self.tokens.last().map(|(id, _)| *id);
        match self.counted_allowed(limits, left).map(|count| vocabulary.class(count, limits.counted)) {
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
        let class = self.counted_allowed(limits, left).and_then(|count| vocabulary.class(count, limits.counted));
        let Some(class) = class.filter(|class| class.most >= ORDINARY_COUNT) else { return false };
        if !words.iter().zip(&class.words).any(|(word, allowed)| word & allowed != 0) {
            return false;
        }
        keep(words, &class.words);
        true
    }

    /// Counted bytes that a token may have so that what it adds is within the slack.
    fn counted_allowed(&self, limits: &Limits, left: u64) -> Option<u32> {
        let slack = left.checked_sub(self.reach())?.checked_sub(ESCAPE_BYTES)?;
        let commitments = slack / limits.committed.max(1);
        u32::try_from(commitments.checked_sub(1)?).ok()
    }

    /// Makes the bound exact.
    fn refresh(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary) {
        if self.current {
            return;
        }
        let found = if parser.is_accepting() { Some((Vec::new(), 0)) } else { self.cheapest(parser, vocabulary, None) };
        let Some((mut tokens, least)) = found else { return };
        tokens.reverse();
        let tracker = self.reader.at_end(&self.known, vocabulary, &self.drawn);
        let most = tracker.map_or(0, |tracker| tracker.dearest(&self.known.shape, vocabulary));
        (self.bound, self.open) = (tokens.len() as u64, most.saturating_sub(least));
        (self.tokens, self.current) = (tokens, true);
    }

    /// The tokens of a cheapest way to complete the output, after one more token if it is given, with each how
    /// many suffice for any end of the text from it on; and the tokens of its lexemes one by one.
    fn cheapest(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary, next: Option<u32>) -> Option<(Vec<(u32, u64)>, u64)> {
        let shape = &self.known.shape;
        let tracker = self.reader.at_end(&self.known, vocabulary, &self.drawn)?;
        let mark = tracker.mark();
        let followed = next.is_none_or(|id| tracker.token(shape, vocabulary, id).is_some());
        let rest = if followed { tracker.rest(shape, vocabulary) } else { None };
        tracker.go_back(mark);
        let (cost, pieces) = rest?;
        let tokens = spell(&pieces, vocabulary)?;
        closes(parser, vocabulary, next, &tokens).then_some((tokens, cost.tokens()))
    }

    /// Tokens of the mask after which a text is known that closes the output with `left` tokens.
    fn tried(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary, left: u64, words: &[u32]) -> Vec<u32> {
        let tried_max = (TRIED_TOKENS_MAX / self.tokens.len().max(1)).clamp(4, TRIED_MAX);
        let is_text = |id: &u32| !vocabulary.token(*id).is_empty();
        // A grammar that allows control tokens allows few, and says much with them.
        let control = bits(words).filter(|id| !is_text(id) && !vocabulary.eos().contains(id));
        let tried: Vec<u32> = control.chain(bits(words).filter(is_text)).take(tried_max).collect();
        let closes = |id: &u32| self.cheapest(parser, vocabulary, Some(*id)).is_some_and(|(tokens, _)| tokens.len() as u64 <= left);
        tried.into_iter().filter(closes).collect()
    }
}

/// Tokens that one with so many counted bytes can add to what is needed.
fn growth(limits: &Limits, count: u32) -> u64 {
    limits.committed.saturating_mul(u64::from(count) + 1).saturating_add(ESCAPE_BYTES)
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

/// Whether `tokens` complete the output, after one more token if it is given.
fn closes(parser: &mut TokenParser, vocabulary: &Vocabulary, next: Option<u32>, tokens: &[(u32, u64)]) -> bool {
    let ids = tokens.iter().map(|(id, _)| *id);
    let path: Vec<u32> = next.into_iter().chain(ids).chain(vocabulary.eos().first().copied()).collect();
    parser.validate_tokens_raw(&path).is_ok_and(|valid| valid == path.len())
}

/// The fewest tokens of a text; with each, how many suffice for any end of the text from it on.
fn spell(pieces: &[Piece], vocabulary: &Vocabulary) -> Option<Vec<(u32, u64)>> {
    let (mut tokens, mut after, mut text) = (Vec::new(), 0, Vec::new());
    // From the last piece to the first, each run of text as a whole.
    for piece in pieces.iter().rev().map(Some).chain([None]) {
        if let Some(Piece::Text(bytes)) = piece {
            text.extend(bytes.iter().rev());
            continue;
        }
        text.reverse();
        let spelled = vocabulary.spell(&text)?;
        text.clear();
        tokens.extend(spelled.iter().rev().map(|(id, worst)| (*id, u64::from(*worst) + after)));
        after += spelled.first().map_or(0, |(_, worst)| u64::from(*worst));
        if let Some(Piece::Token(id)) = piece {
            after += 1;
            tokens.push((*id, after));
        }
    }
    tokens.reverse();
    Some(tokens)
}
