//! Shortest texts that complete a lexeme, found on the automaton of the lexer.
//!
//! The automaton is built as far as it is walked. A search goes by bytes in breadth, so that the first end it
//! meets is a nearest one; among the texts of that length it met, one of the fewest tokens is taken.

use super::tree::Tree;
use super::vocabulary::Vocabulary;
use llguidance::HashMap;
use llguidance::derivre::{NextByte, StateID};
use llguidance::earley::ParserRecognizer;
use llguidance::earley::lexerspec::LexemeIdx;
use std::sync::Arc;

/// States that a search visits by all bytes, which finds a shortest text.
const STATES_MAX: usize = 256;
/// States after which it looks at hints, where they may be taken.
const NEAR_STATES_MAX: usize = 24;
/// Steps along hints in all, and once an end was found.
const HINT_STEPS_MAX: usize = 8_000;
const SHORTER_STEPS_MAX: usize = 400;
/// How it looks on where those do not do: by which bytes, with how many states abreast, and in all.
const FURTHER: [(&[u8], usize, usize); 3] = [(FEW, 8, 40_000), (PLAIN, 64, 4_000), (&ORDER, usize::MAX, 4_000)];
/// Bytes that are tried where a text is long.
const FEW: &[u8] = b"\"a0A-_ .@/:";
/// Bytes of a hint that a text may leave out.
const HINT_STARTS_MAX: usize = 256;
/// Texts that are kept.
const KEPT_MAX: usize = 20_000;

/// A text and its fewest tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text {
    /// What is written.
    pub(super) bytes: Vec<u8>,
    /// Tokens that spell it.
    pub(super) tokens: u32,
}

/// The state after a byte.
pub(super) fn step(lexer: &mut ParserRecognizer<'_>, state: StateID, byte: u8) -> StateID {
    lexer.lexer_mut().transition_start_state(state, Some(byte), &None)
}

/// Whether a lexeme may end in a state.
pub(super) fn accepts(lexer: &mut ParserRecognizer<'_>, state: StateID) -> bool {
    !lexer.lexer_mut().try_lexeme_end(state).is_error()
}

/// Lexemes that are under way in a state.
pub(super) fn possible(lexer: &ParserRecognizer<'_>, state: StateID) -> Vec<LexemeIdx> {
    lexer.lexer().possible_lexemes(state).iter().collect()
}

/// The state with one lexeme alone under way.
pub(super) fn alone(lexer: &mut ParserRecognizer<'_>, state: StateID, lexeme: LexemeIdx) -> StateID {
    let mut only = lexer.lexer().lexer_spec().alloc_lexeme_set();
    only.add(lexeme);
    lexer.lexer_mut().limit_state_to(state, &only)
}

/// The state before any byte of some lexemes.
pub(super) fn start(lexer: &mut ParserRecognizer<'_>, lexemes: impl Iterator<Item = LexemeIdx>) -> StateID {
    let mut set = lexer.lexer().lexer_spec().alloc_lexeme_set();
    lexemes.for_each(|lexeme| set.add(lexeme));
    lexer.lexer_mut().start_state(&set)
}

/// Shortest texts that were found, by state.
pub(super) struct Texts {
    kept: HashMap<StateID, Option<Text>>,
    /// Most places at which tokens are tried, for one text.
    spell_steps: u32,
    /// Texts whose ends may show the way.
    hints: Arc<[Vec<u8>]>,
    /// Longest text along a hint that is taken without a search for a shorter one, in bytes.
    taken: usize,
}

impl Texts {
    /// Tries so many places for the fewest tokens of a text, and `hints` where a search does not get to an end, or
    /// before it if what they give has at most `taken` bytes.
    pub(super) fn new(spell_steps: u32, hints: Arc<[Vec<u8>]>, taken: usize) -> Self {
        Self { kept: HashMap::default(), spell_steps, hints, taken }
    }

    /// A shortest text after which the lexeme may end; `None` if none was found.
    pub(super) fn shortest(&mut self, lexer: &mut ParserRecognizer<'_>, vocabulary: &Vocabulary, from: StateID) -> Option<Text> {
        if from.is_dead() {
            return None;
        }
        if let Some(known) = self.kept.get(&from) {
            return known.clone();
        }
        if self.kept.len() > KEPT_MAX {
            self.kept.clear();
        }
        let found = self.search(lexer, vocabulary, from);
        self.kept.insert(from, found.clone());
        found
    }

    fn search(&mut self, lexer: &mut ParserRecognizer<'_>, vocabulary: &Vocabulary, from: StateID) -> Option<Text> {
        let near = if self.taken > 0 { NEAR_STATES_MAX } else { STATES_MAX };
        let (met, end) = Layers::search(lexer, from, &ORDER, usize::MAX, near);
        if let Some(end) = end {
            return self.keep(vocabulary, met.path(from, end), met.fewest(vocabulary, from, end, self.spell_steps));
        }
        if met.layer.len() <= near {
            return None;
        }
        if self.taken > 0
            && let Some(path) = self.hinted(lexer, from).filter(|path| path.bytes.len() <= self.taken)
        {
            return self.keep(vocabulary, path, None);
        }
        let (met, end) = Layers::search(lexer, from, &ORDER, usize::MAX, STATES_MAX);
        if let Some(end) = end {
            return self.keep(vocabulary, met.path(from, end), met.fewest(vocabulary, from, end, self.spell_steps));
        }
        if met.layer.len() <= STATES_MAX {
            return None;
        }
        if let Some(path) = self.hinted(lexer, from) {
            return self.keep(vocabulary, path, None);
        }
        FURTHER.iter().find_map(|(bytes, abreast, states)| {
            let (met, end) = Layers::search(lexer, from, bytes, *abreast, *states);
            self.keep(vocabulary, met.path(from, end?), met.fewest(vocabulary, from, end?, self.spell_steps))
        })
    }

    /// The shortest way to an end along a hint or an end of one.
    fn hinted(&self, lexer: &mut ParserRecognizer<'_>, from: StateID) -> Option<Path> {
        let (mut shortest, mut steps): (Option<Path>, usize) = (None, 0);
        for hint in self.hints.iter() {
            for start in 0..hint.len().min(HINT_STARTS_MAX) {
                let bytes = hint.get(start..).unwrap_or_default();
                if steps > if shortest.is_some() { SHORTER_STEPS_MAX } else { HINT_STEPS_MAX } {
                    return shortest;
                }
                let known = shortest.as_ref().map_or(usize::MAX, |path| path.bytes.len());
                let (mut path, mut at) = (Path::default(), from);
                for &byte in bytes.iter().take(known.saturating_sub(1)) {
                    steps += 1;
                    let next = step(lexer, at, byte);
                    if next.is_dead() {
                        break;
                    }
                    path.bytes.push(byte);
                    path.states.push(at);
                    at = next;
                    if accepts(lexer, at) {
                        shortest = Some(path);
                        break;
                    }
                }
            }
        }
        shortest
    }

    /// Keeps what is known along a path, and tells the text of its beginning.
    fn keep(&mut self, vocabulary: &Vocabulary, path: Path, fewest: Option<Text>) -> Option<Text> {
        // Its ends complete the lexeme too, from where they begin.
        let counts = vocabulary.counts(&path.bytes);
        for (index, state) in path.states.iter().enumerate().skip(1) {
            let bytes = path.bytes.get(index..).unwrap_or_default().to_vec();
            if let Some(&Some(tokens)) = counts.get(index) {
                self.kept.entry(*state).or_insert(Some(Text { bytes, tokens }));
            }
        }
        fewest.or_else(|| Some(Text { tokens: (*counts.first()?)?, bytes: path.bytes }))
    }
}

/// Bytes of a way, and the state before each.
#[derive(Default)]
struct Path {
    bytes: Vec<u8>,
    states: Vec<StateID>,
}

/// Bytes that complete a lexeme from any state of it; `None` if it has more states than are left to be looked at.
pub(super) fn farthest(lexer: &mut ParserRecognizer<'_>, from: StateID, states_left: &mut usize) -> Option<u64> {
    let mut numbers: HashMap<StateID, usize> = HashMap::default();
    numbers.insert(from, 0);
    let (mut states, mut before) = (vec![from], vec![Vec::new()]);
    let mut index = 0;
    while let Some(&state) = states.get(index) {
        *states_left = states_left.checked_sub(1)?;
        for byte in ORDER.into_iter().filter(|_| !state.has_lowest_match()) {
            let next = step(lexer, state, byte);
            if next.is_dead() {
                continue;
            }
            let number = *numbers.entry(next).or_insert_with(|| {
                states.push(next);
                before.push(Vec::new());
                states.len() - 1
            });
            if let Some(before) = before.get_mut(number).filter(|before: &&mut Vec<usize>| before.last() != Some(&index)) {
                before.push(index);
            }
        }
        index += 1;
    }
    let mut open: Vec<usize> = (0..states.len()).filter(|index| states.get(*index).is_some_and(|state| accepts(lexer, *state))).collect();
    let mut seen: Vec<bool> = vec![false; states.len()];
    let mut bytes = 0;
    open.iter().for_each(|index| seen[*index] = true);
    loop {
        let mut next: Vec<usize> = Vec::new();
        for index in open.iter().filter_map(|index| before.get(*index)).flatten() {
            if !std::mem::replace(&mut seen[*index], true) {
                next.push(*index);
            }
        }
        if next.is_empty() {
            return Some(bytes);
        }
        bytes += 1;
        open = next;
    }
}

/// What a search in breadth met.
struct Layers {
    /// Bytes to each state.
    layer: HashMap<StateID, u32>,
    before: HashMap<StateID, (StateID, u8)>,
    /// Steps from each state to the layer after its own.
    edges: HashMap<StateID, Vec<(u8, StateID)>>,
}

impl Layers {
    /// Searches by some bytes, with so many states abreast and in all, and tells the first end met.
    fn search(
        lexer: &mut ParserRecognizer<'_>,
        from: StateID,
        bytes: &[u8],
        abreast_max: usize,
        states_max: usize,
    ) -> (Self, Option<StateID>) {
        let mut met = Self { layer: HashMap::default(), before: HashMap::default(), edges: HashMap::default() };
        met.layer.insert(from, 0);
        if accepts(lexer, from) {
            return (met, Some(from));
        }
        let mut open = vec![from];
        for depth in 1.. {
            let mut next_open = Vec::new();
            for state in open {
                if let Some(end) = met.leave(lexer, state, bytes, depth, &mut next_open) {
                    return (met, Some(end));
                }
            }
            if next_open.is_empty() || next_open.len() > abreast_max || met.layer.len() > states_max {
                break;
            }
            open = next_open;
        }
        (met, None)
    }

    /// Goes on from a state; tells an end if it meets one.
    fn leave(
        &mut self,
        lexer: &mut ParserRecognizer<'_>,
        state: StateID,
        bytes: &[u8],
        depth: u32,
        open: &mut Vec<StateID>,
    ) -> Option<StateID> {
        let forced = match lexer.lexer_mut().next_byte(state) {
            NextByte::ForcedByte(byte) => Some(byte),
            _ => None,
        };
        let bytes = if forced.is_some() { &[] } else { bytes };
        for byte in forced.into_iter().chain(bytes.iter().copied()) {
            let next = step(lexer, state, byte);
            if next.is_dead() {
                continue;
            }
            let layer = *self.layer.entry(next).or_insert_with(|| {
                self.before.insert(next, (state, byte));
                open.push(next);
                depth
            });
            if layer == depth {
                self.edges.entry(state).or_default().push((byte, next));
            }
            if accepts(lexer, next) {
                return Some(next);
            }
        }
        None
    }

    fn path(&self, from: StateID, end: StateID) -> Path {
        let (mut path, mut at) = (Path::default(), end);
        while at != from {
            let Some((before, byte)) = self.before.get(&at) else { break };
            path.bytes.push(*byte);
            path.states.push(*before);
            at = *before;
        }
        path.bytes.reverse();
        path.states.reverse();
        path
    }

    /// The text of fewest tokens among the shortest that were met; `None` if there are too many to try.
    fn fewest(&self, vocabulary: &Vocabulary, from: StateID, end: StateID, mut steps: u32) -> Option<Text> {
        let mut states: Vec<(u32, StateID)> = self.layer.iter().map(|(state, layer)| (*layer, *state)).collect();
        states.sort_unstable_by_key(|(layer, state)| (std::cmp::Reverse(*layer), state.as_u32()));
        // Of each state from which the end is met: fewest tokens, and the first of them with where it leads.
        let mut best: HashMap<StateID, (u32, Vec<u8>, StateID)> = HashMap::default();
        best.insert(end, (0, Vec::new(), end));
        let mut leads: HashMap<StateID, Vec<(u8, StateID)>> = HashMap::default();
        for (_, state) in states {
            let Some(edges) = self.edges.get(&state).filter(|_| state != end) else { continue };
            let edges: Vec<(u8, StateID)> = edges.iter().copied().filter(|(_, next)| *next == end || leads.contains_key(next)).collect();
            if edges.is_empty() {
                continue;
            }
            leads.insert(state, edges);
            let mut walk = Walk { vocabulary, leads: &leads, best: &best, bytes: Vec::new(), found: None, steps };
            walk.from(Tree::ROOT, state);
            steps = walk.steps;
            if steps == 0 {
                return None;
            }
            if let Some(found) = walk.found {
                best.insert(state, found);
            }
        }
        let (mut bytes, mut at) = (Vec::new(), from);
        let tokens = best.get(&from)?.0;
        while at != end {
            let (_, token, next) = best.get(&at)?;
            bytes.extend_from_slice(token);
            at = *next;
        }
        Some(Text { bytes, tokens })
    }
}

/// Tokens that can be written from a state on shortest ways.
struct Walk<'a> {
    vocabulary: &'a Vocabulary,
    leads: &'a HashMap<StateID, Vec<(u8, StateID)>>,
    best: &'a HashMap<StateID, (u32, Vec<u8>, StateID)>,
    bytes: Vec<u8>,
    found: Option<(u32, Vec<u8>, StateID)>,
    steps: u32,
}

impl Walk<'_> {
    /// Follows the tree of tokens; as deep as the longest token.
    fn from(&mut self, node: u32, state: StateID) {
        for (byte, next) in self.leads.get(&state).into_iter().flatten() {
            self.steps = self.steps.saturating_sub(1);
            let Some(child) = self.vocabulary.tree().child(node, *byte).filter(|_| self.steps > 0) else { continue };
            self.bytes.push(*byte);
            if self.vocabulary.tree().id(child).is_some()
                && let Some((tokens, ..)) = self.best.get(next)
                && self.found.as_ref().is_none_or(|(known, ..)| tokens + 1 < *known)
            {
                self.found = Some((tokens + 1, self.bytes.clone(), *next));
            }
            self.from(child, *next);
            self.bytes.pop();
        }
    }
}

/// Bytes in the order in which they are tried: what ends a string, then what is plain, then all others.
const ORDER: [u8; 255] = order();
/// Those that are printable ASCII.
const PLAIN: &[u8] = ORDER.first_chunk::<95>().expect("there are 255");

const fn order() -> [u8; 255] {
    const FIRST: &[u8] = b"\"}],:0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-. ";
    let (mut order, mut count, mut part) = ([0; 255], 0, 0);
    while count < FIRST.len() {
        order[count] = FIRST[count];
        count += 1;
    }
    while part < 3 {
        let (mut byte, end) = [(b' ', b'~' + 1), (0, b' '), (b'~' + 1, 0xFF)][part];
        while byte < end {
            let (mut known, mut index) = (false, 0);
            while index < FIRST.len() {
                known |= FIRST[index] == byte;
                index += 1;
            }
            if !known {
                order[count] = byte;
                count += 1;
            }
            byte += 1;
        }
        part += 1;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_tried_once_and_printable_ones_first() {
        let mut sorted = ORDER;
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..0xFF));
        assert!(PLAIN.iter().all(|byte| (b' '..=b'~').contains(byte)));
    }
}
