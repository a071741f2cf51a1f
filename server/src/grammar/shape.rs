//! The rules of a compiled grammar, with what its symbols cost at least.
//!
//! A cost is a number of tokens: each lexeme is spelled by itself, so it is a bound from above for texts of
//! several lexemes. Costs of a lexeme come from [`super::lexemes`], those of rules are the least fixed point.

use super::lexemes::{self, Text, Texts};
use super::vocabulary::Vocabulary;
use llguidance::TokenParser;
use llguidance::earley::lexerspec::LexemeIdx;
use llguidance::{HashMap, HashSet};
use std::sync::Arc;

/// What stands after the last symbol of a rule.
pub(super) const END: u32 = u32::MAX;
/// Longest text that completes an output, in bytes.
pub(super) const OUTPUT_BYTES_MAX: u64 = 32_768;

/// Most symbols of rules that are read until their costs are settled.
const SETTLE_STEPS_MAX: usize = 20_000_000;
/// Most states of all lexemes that are looked at one by one.
const LEXER_STATES_MAX: usize = 20_000;
/// Places at which tokens are tried for a lexeme's text.
const SPELL_STEPS_MAX: u32 = 60_000;

/// Tokens, then bytes; compared in this order.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost(u64);

impl Cost {
    pub(super) const ZERO: Self = Self(0);
    /// Of what cannot be written.
    pub(super) const ENDLESS: Self = Self(u64::MAX);

    fn of(tokens: u32, bytes: usize) -> Self {
        Self((u64::from(tokens) << 32) | bytes as u64)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    pub(super) fn is_finite(self) -> bool {
        self != Self::ENDLESS
    }

    pub(super) fn tokens(self) -> u64 {
        self.0 >> 32
    }

    /// Whether a text of this cost is written out.
    pub(super) fn is_written(self) -> bool {
        self.0 & u64::from(u32::MAX) <= OUTPUT_BYTES_MAX && self.tokens() <= OUTPUT_BYTES_MAX
    }
}

/// What a text is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Bytes.
    Text(Vec<u8>),
    /// A control token.
    Token(u32),
}

/// A symbol of the grammar.
pub(super) struct Symbol {
    /// The lexeme of a terminal.
    pub(super) lexeme: Option<LexemeIdx>,
    /// Whether it may be empty.
    pub(super) nullable: bool,
    /// Where the right-hand sides of its rules begin.
    pub(super) rules: Vec<u32>,
    /// The class of its lexeme, which says what may be skipped before it.
    skip: Option<LexemeIdx>,
    least: Cost,
    /// The rule of the least cost; `None` for what is empty, and for terminals.
    best: Option<u32>,
}

/// The rules of a grammar.
pub(super) struct Shape {
    pub(super) symbols: Vec<Symbol>,
    /// Right-hand sides, each followed by `END`.
    rhs: Vec<u32>,
    /// The symbol whose rule a place belongs to.
    lhs: Vec<u32>,
    /// The least cost of a right-hand side from each place on.
    tail: Vec<Cost>,
    /// A shortest text of each terminal.
    texts: HashMap<LexemeIdx, Piece>,
    /// Lexemes that are skipped.
    skips: HashSet<LexemeIdx>,
    /// Whether something may be skipped at the beginning.
    pub(super) initial_skip: bool,
    /// Texts that may complete lexemes.
    pub(super) hints: Arc<[Vec<u8>]>,
}

impl Shape {
    /// Reads the grammar of a parser, whose lexer is used up to some part.
    ///
    /// # Errors
    /// Why it cannot be known how outputs of the grammar close, in words that follow its name.
    pub(super) fn new(parser: &mut TokenParser, vocabulary: &Vocabulary, hints: Arc<[Vec<u8>]>) -> Result<Self, String> {
        let mut shape = Self::rules(parser, hints)?;
        shape.find_texts(parser, vocabulary);
        shape.settle()?;
        Ok(shape)
    }

    /// The symbol that an output is.
    pub(super) const START: u32 = 0;

    fn rules(parser: &TokenParser, hints: Arc<[Vec<u8>]>) -> Result<Self, String> {
        let grammar = parser.parser.grammar();
        let spec = grammar.lexer_spec();
        if grammar.parametric() {
            return Err("uses parameters of rules (`::`), which are not supported here".to_owned());
        }
        if spec.has_stop || spec.has_max_tokens {
            return Err("uses `stop` or `max_tokens` of rules, which are not supported here".to_owned());
        }
        let mut numbers: HashMap<usize, u32> = HashMap::default();
        numbers.insert(grammar.start().as_index(), 0);
        let mut order = vec![grammar.start()];
        let (mut symbols, mut rhs, mut lhs) = (Vec::new(), Vec::new(), Vec::new());
        while let Some(&symbol) = order.get(symbols.len()) {
            let data = grammar.sym_data(symbol);
            let mut rules = Vec::new();
            for rule in grammar.rules_of(symbol) {
                rules.push(rhs.len() as u32);
                for part in grammar.rule_rhs(*rule).0 {
                    let next = numbers.len() as u32;
                    let number = *numbers.entry(part.as_index()).or_insert_with(|| {
                        order.push(*part);
                        next
                    });
                    rhs.push(number);
                }
                rhs.push(END);
                lhs.resize(rhs.len(), symbols.len() as u32);
            }
            let skip = data.lexeme.map(|lexeme| spec.skip_id(spec.lexeme_spec(lexeme).class()));
            let (lexeme, nullable) = (data.lexeme, data.is_nullable);
            symbols.push(Symbol { lexeme, nullable, rules, skip, least: Cost::ENDLESS, best: None });
        }
        let tail = vec![Cost::ENDLESS; rhs.len()];
        let skips = symbols.iter().filter_map(|symbol: &Symbol| symbol.skip).collect();
        Ok(Self { symbols, rhs, lhs, tail, texts: HashMap::default(), skips, initial_skip: spec.allow_initial_skip, hints })
    }

    fn find_texts(&mut self, parser: &mut TokenParser, vocabulary: &Vocabulary) {
        let mut texts = Texts::new(SPELL_STEPS_MAX, Arc::clone(&self.hints), 0);
        let mut costs: HashMap<LexemeIdx, Cost> = HashMap::default();
        for symbol in &mut self.symbols {
            let Some(lexeme) = symbol.lexeme else { continue };
            symbol.least = *costs.entry(lexeme).or_insert_with(|| {
                let (cost, piece) = shortest_of(parser, vocabulary, &mut texts, lexeme);
                self.texts.extend(piece.map(|piece| (lexeme, piece)));
                cost
            });
        }
    }

    /// Costs of rules, from those of terminals.
    fn settle(&mut self) -> Result<(), String> {
        for symbol in &mut self.symbols {
            if symbol.nullable {
                symbol.least = Cost::ZERO;
            }
        }
        let mut steps = SETTLE_STEPS_MAX;
        loop {
            let mut changed = false;
            steps = steps.checked_sub(self.rhs.len()).ok_or("has too many rules that refer to one another")?;
            // What a symbol refers to mostly comes after it.
            for index in (0..self.symbols.len()).rev() {
                let rules = self.symbols.get(index).map(|symbol| symbol.rules.clone()).unwrap_or_default();
                for rule in rules {
                    let cost = self.sum(rule);
                    if let Some(symbol) = self.symbols.get_mut(index)
                        && cost < symbol.least
                    {
                        (symbol.least, symbol.best, changed) = (cost, Some(rule), true);
                    }
                }
            }
            if !changed {
                break;
            }
        }
        let mut cost = Cost::ZERO;
        for place in (0..self.rhs.len()).rev() {
            cost = match self.rhs.get(place) {
                Some(&END) | None => Cost::ZERO,
                Some(symbol) => cost.plus(self.least(*symbol)),
            };
            if let Some(tail) = self.tail.get_mut(place) {
                *tail = cost;
            }
        }
        Ok(())
    }

    fn sum(&self, rule: u32) -> Cost {
        let parts = self.rhs.get(rule as usize..).unwrap_or_default().iter().take_while(|symbol| **symbol != END);
        parts.fold(Cost::ZERO, |sum, symbol| sum.plus(self.least(*symbol)))
    }

    /// Tokens that are needed at most for what can begin with one lexeme, behind it: a rule of every symbol.
    pub(super) fn begun_at_once(&self) -> u64 {
        let dearest = |symbol: &Symbol| symbol.rules.iter().map(|rule| self.tail(*rule)).filter(|cost| cost.is_finite()).max();
        self.symbols.iter().filter_map(dearest).map(Cost::tokens).fold(0, u64::saturating_add)
    }

    /// Bytes that complete any lexeme from anywhere inside; `None` if the automata are too large to tell.
    pub(super) fn inside_lexemes(&self, parser: &TokenParser) -> Option<u64> {
        let mut parser = parser.deep_clone();
        let mut states = LEXER_STATES_MAX;
        let mut most = 0;
        for lexeme in self.texts.iter().filter(|(_, piece)| matches!(piece, Piece::Text(_))).map(|(lexeme, _)| *lexeme) {
            most = most.max(parser.parser.with_recognizer(|lexer| {
                let start = lexemes::start(lexer, std::iter::once(lexeme));
                lexemes::farthest(lexer, start, &mut states)
            })?);
        }
        if parser.parser.get_error().is_some() { None } else { Some(most) }
    }

    /// The symbol at a place, or `END`.
    pub(super) fn at(&self, place: u32) -> u32 {
        self.rhs.get(place as usize).copied().unwrap_or(END)
    }

    /// The symbol whose rule a place belongs to.
    pub(super) fn owner(&self, place: u32) -> u32 {
        self.lhs.get(place as usize).copied().unwrap_or(END)
    }

    /// What is still needed of a rule from a place on.
    pub(super) fn tail(&self, place: u32) -> Cost {
        self.tail.get(place as usize).copied().unwrap_or(Cost::ENDLESS)
    }

    pub(super) fn symbol(&self, symbol: u32) -> Option<&Symbol> {
        self.symbols.get(symbol as usize)
    }

    /// The least cost of a symbol.
    pub(super) fn least(&self, symbol: u32) -> Cost {
        self.symbol(symbol).map_or(Cost::ENDLESS, |symbol| symbol.least)
    }

    /// Appends a cheapest text of a symbol.
    pub(super) fn write_symbol(&self, symbol: u32, out: &mut Vec<Piece>) {
        let Some(symbol) = self.symbol(symbol) else { return };
        match symbol.lexeme {
            Some(lexeme) => out.extend(self.texts.get(&lexeme).cloned()),
            None => symbol.best.iter().for_each(|rule| self.write_tail(*rule, out)),
        }
    }

    /// Appends what completes a rule from a place on; work is bounded by the length of what is written.
    pub(super) fn write_tail(&self, place: u32, out: &mut Vec<Piece>) {
        let mut open = vec![place];
        while let Some(place) = open.pop() {
            let symbol = self.at(place);
            if symbol == END {
                continue;
            }
            open.push(place + 1);
            let Some(symbol) = self.symbol(symbol) else { continue };
            match symbol.lexeme {
                Some(lexeme) => out.extend(self.texts.get(&lexeme).cloned()),
                None => open.extend(symbol.best),
            }
        }
    }

    /// What may be skipped before a terminal.
    pub(super) fn skip_before(&self, symbol: u32) -> Option<LexemeIdx> {
        self.symbol(symbol)?.skip
    }

    /// Whether a lexeme is skipped.
    pub(super) fn is_skip(&self, lexeme: LexemeIdx) -> bool {
        self.skips.contains(&lexeme)
    }
}

/// The cost of a text.
pub(super) fn cost(text: &Text) -> Cost {
    Cost::of(text.tokens, text.bytes.len())
}

/// A shortest text of a lexeme.
fn shortest_of(parser: &mut TokenParser, vocabulary: &Vocabulary, texts: &mut Texts, lexeme: LexemeIdx) -> (Cost, Option<Piece>) {
    if let Some(id) = control_token(parser, vocabulary, lexeme) {
        return (Cost::of(1, 1), Some(Piece::Token(id)));
    }
    let text = parser.parser.with_recognizer(|lexer| {
        let start = lexemes::start(lexer, std::iter::once(lexeme));
        texts.shortest(lexer, vocabulary, start)
    });
    let text = text.filter(|text| text.bytes.len() as u64 <= OUTPUT_BYTES_MAX);
    text.map_or((Cost::ENDLESS, None), |text| (cost(&text), Some(Piece::Text(text.bytes))))
}

/// A token that the lexeme is, if it is one of control tokens.
fn control_token(parser: &TokenParser, vocabulary: &Vocabulary, lexeme: LexemeIdx) -> Option<u32> {
    let spec = parser.parser.grammar().lexer_spec();
    let mut only = spec.alloc_lexeme_set();
    only.add(lexeme);
    let specs = spec.token_range_lexemes(&only);
    let of_tokens = specs.first()?;
    (0..vocabulary.count()).find(|id| of_tokens.contains_token(*id))
}
