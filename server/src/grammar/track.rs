//! Follows an output through its grammar, so that the cheapest way to complete it is known at every byte.
//!
//! The library's parser tells what may come next and not what is still missing. This one reads the same bytes
//! with the same lexer by the same algorithm (Earley's), one row a lexeme, and keeps for each row what is
//! needed at least once a symbol that was begun there is complete:
//!
//! ```text
//! needed after X, begun in row r  =  min over rules A → … X β that wait in r:  β  +  needed after A, begun where A was
//! needed at a byte                =  min over lexemes L under way:  rest of L  +  needed after L
//! ```
//!
//! It runs only where an output comes near its end: until then ids are collected and not read. Whoever uses
//! what it says checks it against the library.

use super::lexemes::{self, Text, Texts};
use super::shape::{Cost, END, Piece, Shape, cost};
use super::vocabulary::Vocabulary;
use llguidance::derivre::StateID;
use llguidance::earley::ParserRecognizer;
use llguidance::earley::lexerspec::LexemeIdx;
use llguidance::{HashMap, HashSet, TokenParser};
use std::sync::Arc;

/// Most items of a row.
const ROW_ITEMS_MAX: usize = 4_000;

/// Places at which tokens are tried for the rest of a lexeme.
const SPELL_STEPS_MAX: u32 = 1_000;

/// A place in a rule, and the row in which the rule began.
type Item = (u32, u32);

/// What is needed after something, and the item that waits for it; no item where the output is complete.
type Needed = (Cost, Option<Item>);

/// What may come between two lexemes.
struct Row {
    items: Vec<Item>,
    /// What is needed after each symbol that is waited for.
    after: HashMap<u32, Needed>,
    /// Of terminals, by lexeme, with the symbol.
    terminals: HashMap<LexemeIdx, (Cost, Item)>,
    /// The same with the dearest of what may have been begun.
    dearest: HashMap<u32, Cost>,
    /// Whether the output may end here.
    complete: bool,
    /// The lexer's state.
    start: StateID,
}

/// A parser that knows what is missing.
pub(super) struct Tracker {
    /// Holds the lexer.
    parser: TokenParser,
    rows: Vec<Row>,
    state: StateID,
    /// Whether a lexeme is under way.
    inside: bool,
    texts: Texts,
}

/// Where a tracker can go back to.
#[derive(Copy, Clone)]
pub(super) struct Mark {
    rows: usize,
    state: StateID,
    inside: bool,
}

impl Tracker {
    /// At the beginning of an output; `None` if the grammar is too large. Rests of lexemes that hints give are taken
    /// up to so many bytes.
    pub(super) fn new(parser: TokenParser, shape: &Shape, taken: usize) -> Option<Self> {
        let texts = Texts::new(SPELL_STEPS_MAX, Arc::clone(&shape.hints), taken);
        let mut tracker = Self { parser, rows: Vec::new(), state: StateID::DEAD, inside: false, texts };
        let rules = shape.symbol(Shape::START).map(|symbol| symbol.rules.clone()).unwrap_or_default();
        let items = rules.into_iter().map(|rule| (rule, 0)).collect();
        tracker.push_row(shape, items)?;
        Some(tracker)
    }

    fn lexer<T>(&mut self, call: impl FnOnce(&mut ParserRecognizer<'_>) -> T) -> T {
        self.parser.parser.with_recognizer(call)
    }

    /// Whether the lexer gave up.
    pub(super) fn failed(&self) -> bool {
        self.parser.parser.get_error().is_some()
    }

    pub(super) fn mark(&self) -> Mark {
        Mark { rows: self.rows.len(), state: self.state, inside: self.inside }
    }

    pub(super) fn go_back(&mut self, mark: Mark) {
        self.rows.truncate(mark.rows);
        (self.state, self.inside) = (mark.state, mark.inside);
    }

    /// Reads a token; `None` if it may not come here, or a limit is reached.
    pub(super) fn token(&mut self, shape: &Shape, vocabulary: &Vocabulary, id: u32) -> Option<()> {
        let bytes = vocabulary.token(id);
        if bytes.is_empty() {
            return self.control(shape, id);
        }
        bytes.iter().try_for_each(|byte| self.byte(shape, *byte))
    }

    fn byte(&mut self, shape: &Shape, byte: u8) -> Option<()> {
        let state = self.state;
        let mut next = self.lexer(|lexer| lexemes::step(lexer, state, byte));
        if next.is_dead() {
            self.end_lexeme(shape)?;
            let start = self.state;
            next = self.lexer(|lexer| lexemes::step(lexer, start, byte));
        }
        if next.is_dead() {
            return None;
        }
        (self.state, self.inside) = (next, true);
        if next.has_lowest_match() { self.end_lexeme(shape) } else { Some(()) }
    }

    fn control(&mut self, shape: &Shape, id: u32) -> Option<()> {
        if self.inside {
            self.end_lexeme(shape)?;
        }
        let spec = self.parser.parser.grammar().lexer_spec();
        let row = self.rows.last()?;
        let of_token = |lexeme: LexemeIdx| {
            let mut only = spec.alloc_lexeme_set();
            only.add(lexeme);
            spec.token_range_lexemes(&only).iter().any(|spec| spec.contains_token(id))
        };
        let lexemes: Vec<LexemeIdx> = row.terminals.keys().copied().filter(|lexeme| of_token(*lexeme)).collect();
        self.scan(shape, &lexemes)
    }

    /// Ends the lexeme under way.
    fn end_lexeme(&mut self, shape: &Shape) -> Option<()> {
        if !self.inside {
            return None;
        }
        let state = self.state;
        let ended = self.lexer(|lexer| {
            let possible = lexemes::possible(lexer, state);
            let mut ended = possible.clone();
            if possible.len() > 1 {
                ended.retain(|lexeme| {
                    let alone = lexemes::alone(lexer, state, *lexeme);
                    lexemes::accepts(lexer, alone)
                });
                // A lazy lexeme ends as soon as it can, and before the others.
                let lazy = lexer.lexer().lexer_spec().lazy_lexemes();
                if state.has_lowest_match() && ended.iter().any(|lexeme| lazy.contains(*lexeme)) {
                    ended.retain(|lexeme| lazy.contains(*lexeme));
                }
            } else if !lexemes::accepts(lexer, state) {
                ended.clear();
            }
            ended
        });
        if ended.iter().any(|lexeme| shape.is_skip(*lexeme)) {
            (self.state, self.inside) = (self.rows.last()?.start, false);
            return Some(());
        }
        self.scan(shape, &ended)
    }

    fn scan(&mut self, shape: &Shape, ended: &[LexemeIdx]) -> Option<()> {
        let row = self.rows.last()?;
        let waits = |item: &&Item| {
            let lexeme = shape.symbol(shape.at(item.0)).and_then(|symbol| symbol.lexeme);
            lexeme.is_some_and(|lexeme| ended.contains(&lexeme))
        };
        let items: Vec<Item> = row.items.iter().filter(waits).map(|(place, origin)| (place + 1, *origin)).collect();
        if items.is_empty() { None } else { self.push_row(shape, items) }
    }

    /// Adds a row that begins with some items.
    fn push_row(&mut self, shape: &Shape, items: Vec<Item>) -> Option<()> {
        let here = self.rows.len() as u32;
        let items = self.close(shape, items, here)?;
        let (after, dearest, terminals) = (HashMap::default(), HashMap::default(), HashMap::default());
        let mut row = Row { items, after, terminals, dearest, complete: false, start: StateID::DEAD };
        self.weigh(shape, &mut row, here);
        self.weigh_dearest(shape, &mut row, here);
        row.complete = here > 0
            && row.items.iter().any(|(place, origin)| shape.at(*place) == END && (*origin, shape.owner(*place)) == (0, Shape::START));
        if here == 0 {
            row.complete = shape.symbol(Shape::START).is_some_and(|symbol| symbol.nullable);
        }
        let mut lexemes: HashSet<LexemeIdx> = row.terminals.keys().copied().collect();
        if here > 0 || shape.initial_skip {
            lexemes.extend(row.items.iter().filter_map(|(place, _)| shape.skip_before(shape.at(*place))));
        }
        row.start = self.lexer(|lexer| lexemes::start(lexer, lexemes.into_iter()));
        (self.state, self.inside) = (row.start, false);
        self.rows.push(row);
        Some(())
    }

    /// All items of a row, from its first ones.
    fn close(&self, shape: &Shape, mut items: Vec<Item>, here: u32) -> Option<Vec<Item>> {
        let mut known: HashSet<Item> = items.iter().copied().collect();
        let mut index = 0;
        while let Some(&(place, origin)) = items.get(index) {
            index += 1;
            if index > ROW_ITEMS_MAX {
                return None;
            }
            let symbol = shape.at(place);
            let mut found: Vec<Item> = Vec::new();
            if symbol == END {
                let owner = shape.owner(place);
                let waiting = self.rows.get(origin as usize).map_or(&[][..], |row| &row.items);
                found.extend(waiting.iter().filter(|item| shape.at(item.0) == owner).map(|(place, origin)| (place + 1, *origin)));
            } else if let Some(symbol) = shape.symbol(symbol) {
                found.extend(symbol.rules.iter().map(|rule| (*rule, here)));
                found.extend(symbol.nullable.then_some((place + 1, origin)));
            }
            items.extend(found.into_iter().filter(|item| known.insert(*item)));
        }
        Some(items)
    }

    /// What is needed after each symbol that a row waits for.
    fn weigh(&self, shape: &Shape, row: &mut Row, here: u32) {
        let outer = |after: &HashMap<u32, Needed>, place: u32, origin: u32| {
            let owner = shape.owner(place);
            if owner == Shape::START && origin == 0 {
                return Cost::ZERO;
            }
            let after = if origin == here { Some(after) } else { self.rows.get(origin as usize).map(|row| &row.after) };
            after.and_then(|after| after.get(&owner)).map_or(Cost::ENDLESS, |needed| needed.0)
        };
        loop {
            let mut changed = false;
            for &(place, origin) in &row.items {
                let symbol = shape.at(place);
                if symbol == END {
                    continue;
                }
                let needed = shape.tail(place + 1).plus(outer(&row.after, place, origin));
                let known = row.after.entry(symbol).or_insert((Cost::ENDLESS, None));
                if needed < known.0 {
                    (*known, changed) = ((needed, Some((place, origin))), true);
                }
            }
            if !changed {
                break;
            }
        }
        for (place, _) in &row.items {
            let symbol = shape.at(*place);
            let lexeme = shape.symbol(symbol).and_then(|symbol| symbol.lexeme);
            let (Some(lexeme), Some(&(needed, Some(item)))) = (lexeme, row.after.get(&symbol)) else { continue };
            let known = row.terminals.entry(lexeme).or_insert((needed, item));
            *known = (*known).min((needed, item));
        }
    }

    /// What is needed at most after each symbol that a row waits for, whichever of the rules that were begun is
    /// the right one. What only begins in the row is still to be chosen, and its cheapest use counts.
    fn weigh_dearest(&self, shape: &Shape, row: &mut Row, here: u32) {
        let begun = row.items.iter().filter(|(place, origin)| *origin < here && shape.at(*place) != END);
        for &(place, origin) in begun {
            let needed = shape.tail(place + 1).plus(self.dearest_after(shape, (place, origin)));
            let known = row.dearest.entry(shape.at(place)).or_insert(Cost::ZERO);
            *known = if needed.is_finite() { needed.max(*known) } else { *known };
        }
        let settled: HashSet<u32> = row.dearest.keys().copied().collect();
        loop {
            let mut changed = false;
            for &(place, _) in row.items.iter().filter(|(_, origin)| *origin == here) {
                let (symbol, owner) = (shape.at(place), shape.owner(place));
                if symbol == END || settled.contains(&symbol) {
                    continue;
                }
                let outer = match owner == Shape::START && here == 0 {
                    true => Cost::ZERO,
                    false => row.dearest.get(&owner).copied().unwrap_or(Cost::ENDLESS),
                };
                let needed = shape.tail(place + 1).plus(outer);
                let known = row.dearest.entry(symbol).or_insert(Cost::ENDLESS);
                if needed < *known {
                    (*known, changed) = (needed, true);
                }
            }
            if !changed {
                break;
            }
        }
    }

    /// What is needed at most after the rule of an item, in a row that is there.
    fn dearest_after(&self, shape: &Shape, (place, origin): Item) -> Cost {
        let owner = shape.owner(place);
        if owner == Shape::START && origin == 0 {
            return Cost::ZERO;
        }
        self.rows.get(origin as usize).and_then(|row| row.dearest.get(&owner)).copied().unwrap_or(Cost::ENDLESS)
    }

    /// Tokens that complete the output from here whichever of the rules that were begun is the right one.
    pub(super) fn dearest(&mut self, shape: &Shape, vocabulary: &Vocabulary) -> u64 {
        let Some(here) = self.rows.len().checked_sub(1) else { return 0 };
        let texts = if self.inside { self.texts_under_way(vocabulary) } else { Vec::new() };
        let Some(row) = self.rows.get(here) else { return 0 };
        let finite = |cost: &Cost| cost.is_finite();
        let between = || {
            let begun = row.items.iter().filter(|(place, origin)| (*origin as usize) < here && shape.at(*place) != END);
            begun.map(|item| shape.tail(item.0).plus(self.dearest_after(shape, *item))).filter(finite).max()
        };
        let waits = |item: &&Item, lexeme: LexemeIdx| shape.symbol(shape.at(item.0)).is_some_and(|symbol| symbol.lexeme == Some(lexeme));
        let of_text = |(lexeme, text): &(LexemeIdx, Text)| {
            let after = match shape.is_skip(*lexeme) {
                true => between(),
                false => {
                    let items = row.items.iter().filter(|item| waits(item, *lexeme));
                    items.map(|item| shape.tail(item.0 + 1).plus(self.dearest_after(shape, *item))).filter(finite).max()
                }
            };
            cost(text).plus(after.unwrap_or(Cost::ZERO))
        };
        let dearest = if self.inside { texts.iter().map(of_text).filter(finite).max() } else { between() };
        dearest.map_or(0, Cost::tokens)
    }

    /// Of each lexeme under way, a text that completes it.
    fn texts_under_way(&mut self, vocabulary: &Vocabulary) -> Vec<(LexemeIdx, Text)> {
        let Self { parser, texts, state, .. } = self;
        parser.parser.with_recognizer(|lexer| {
            let possible = lexemes::possible(lexer, *state);
            let text = |lexeme| {
                let alone = lexemes::alone(lexer, *state, lexeme);
                Some((lexeme, texts.shortest(lexer, vocabulary, alone)?))
            };
            possible.into_iter().filter_map(text).collect()
        })
    }

    /// The cheapest way to complete the output from here and its cost; `None` if there is none of a length that is
    /// written out.
    pub(super) fn rest(&mut self, shape: &Shape, vocabulary: &Vocabulary) -> Option<(Cost, Vec<Piece>)> {
        let here = self.rows.len().checked_sub(1)?;
        if !self.inside {
            return self.rest_of_row(shape, here);
        }
        let texts = self.texts_under_way(vocabulary);
        let row = self.rows.get(here)?;
        let after = |(lexeme, text): &(LexemeIdx, Text)| {
            let needed = if shape.is_skip(*lexeme) { self.cost_of_row(shape, here) } else { row.terminals.get(lexeme)?.0 };
            Some(cost(text).plus(needed))
        };
        let ways = texts.iter().filter_map(|way| Some((after(way)?, way)));
        let (needed, (lexeme, text)) = ways.min_by(|one, other| (one.0, one.1.0.as_usize()).cmp(&(other.0, other.1.0.as_usize())))?;
        if !needed.is_written() {
            return None;
        }
        let mut pieces = vec![Piece::Text(text.bytes.clone())];
        if shape.is_skip(*lexeme) {
            pieces.extend(self.rest_of_row(shape, here)?.1);
        } else {
            self.write_after(shape, row.terminals.get(lexeme)?.1, &mut pieces);
        }
        Some((needed, pieces))
    }

    fn cost_of_row(&self, shape: &Shape, row: usize) -> Cost {
        let Some(row) = self.rows.get(row) else { return Cost::ENDLESS };
        let costs = row.terminals.values().map(|(needed, (place, _))| needed.plus(shape.least(shape.at(*place))));
        if row.complete { Cost::ZERO } else { costs.min().unwrap_or(Cost::ENDLESS) }
    }

    fn rest_of_row(&self, shape: &Shape, index: usize) -> Option<(Cost, Vec<Piece>)> {
        let row = self.rows.get(index)?;
        if row.complete {
            return Some((Cost::ZERO, Vec::new()));
        }
        let ways =
            row.terminals.iter().map(|(lexeme, (needed, item))| (needed.plus(shape.least(shape.at(item.0))), lexeme.as_usize(), *item));
        let (needed, _, (place, origin)) = ways.min()?;
        if !needed.is_written() {
            return None;
        }
        let mut pieces = Vec::new();
        shape.write_symbol(shape.at(place), &mut pieces);
        self.write_after(shape, (place, origin), &mut pieces);
        Some((needed, pieces))
    }

    /// Appends what is needed after the symbol that an item waits for.
    fn write_after(&self, shape: &Shape, item: Item, pieces: &mut Vec<Piece>) {
        let mut next = Some(item);
        while let Some((place, origin)) = next {
            shape.write_tail(place + 1, pieces);
            let owner = shape.owner(place);
            next = match owner == Shape::START && origin == 0 {
                true => None,
                false => self.rows.get(origin as usize).and_then(|row| row.after.get(&owner)).and_then(|needed| needed.1),
            };
        }
    }
}
