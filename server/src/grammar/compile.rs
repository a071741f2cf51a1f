//! Turns constraints into parsers, within bounds of size, memory and time.

use super::bounds::check_lark;
use super::closing::{Closing, Known};
use super::effective::ascii_classes;
use super::hints::hints;
use super::lark::check_finite;
use super::marked::{Around, MarkedMask, enforced, marked_grammar};
use super::mask::{GrammarMask, Workers};
use super::regex_growth::{Spelling, regex_growth};
use super::request::{Constraint, ConstraintKind};
use super::shape::OUTPUT_BYTES_MAX;
use super::vocabulary::{Counted, Vocabulary};
use crate::faults::{Faults, Place};
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, TokenParser};
use oxide_runtime::engine::MaskFactory;
use oxide_text::Tokenizer;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};

/// Longest time that a compilation may take.
const COMPILE_TIME_MAX: Duration = Duration::from_secs(5);
/// Stack of a compiling thread: the library's recursion is bounded by the depth of what it is given.
const COMPILE_STACK_BYTES: usize = 64 << 20;
/// Whitespace between two JSON tokens; none follows the end.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,8}";
/// Compilations at one time.
const COMPILE_THREADS_MAX: usize = 4;
/// What is said of a constraint whose automata are too large to tell how it closes.
const TANGLED: &str = "restricts one text in too many ways at once to know how it can be completed: a `pattern` beside a large `minLength`, \
                       several patterns of one text or overlapping names, or a large terminal; make them fewer or shorter";

/// A constraint that is refused: the field and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{param}` {reason}")]
pub struct GrammarError {
    /// The field.
    pub param: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Compiles constraints for one model. The vocabulary is prepared once, by whoever needs it first.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    eos: Vec<u32>,
    workers: Arc<Workers>,
    prepared: OnceLock<Result<Prepared, String>>,
    compiling: Arc<Semaphore>,
}

struct Prepared {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
}

/// What tells how much a commitment can add.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Committed {
    /// Bytes, read from a schema or a regular expression.
    Schema(u64),
    /// The same where several restrictions of one text hold at once: the automata tell what is in none of them.
    SchemaAndAutomata(u64),
    /// The rules and the automata.
    Grammar,
}

impl Committed {
    /// At least so many bytes.
    pub(super) fn at_least(self, bytes: u64) -> Self {
        match self {
            Self::Schema(known) => Self::Schema(known.max(bytes)),
            Self::SchemaAndAutomata(known) => Self::SchemaAndAutomata(known.max(bytes)),
            Self::Grammar => Self::Grammar,
        }
    }

    /// What tells of two grammars in one.
    pub(super) fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Schema(one), Self::Schema(other)) => Self::Schema(one.max(other)),
            (Self::Grammar, _) | (_, Self::Grammar) => Self::Grammar,
            (Self::Schema(one) | Self::SchemaAndAutomata(one), Self::Schema(other) | Self::SchemaAndAutomata(other)) => {
                Self::SchemaAndAutomata(one.max(other))
            }
        }
    }
}

/// What the request says of the rest of an output.
#[derive(Copy, Clone, Debug)]
pub(super) struct Bounds {
    pub(super) committed: Committed,
    /// Bytes that suffice from anywhere, if that is known.
    pub(super) absolute: Option<u64>,
}

/// What bounds the rest of an output.
#[derive(Copy, Clone, Debug)]
pub(super) struct Limits {
    /// Tokens that one commitment can add.
    pub(super) committed: u64,
    /// Which bytes can commit.
    pub(super) counted: Counted,
    /// Bytes that suffice from anywhere, if that is known.
    pub(super) absolute: Option<u64>,
}

impl Limits {
    /// A bound, lowered to what suffices from anywhere.
    pub(super) fn cap(&self, bound: u64) -> u64 {
        self.absolute.map_or(bound, |absolute| bound.min(absolute))
    }
}

/// A compiled constraint, ready to make masks.
#[derive(Clone)]
pub struct Compiled {
    parser: TokenParser,
    closing: Option<Closing>,
    limits: Limits,
    vocabulary: Arc<Vocabulary>,
    workers: Arc<Workers>,
    /// The free text that the output stands in.
    around: Option<Around>,
}

impl Grammars {
    /// For a tokenizer and the ids that end a text.
    pub fn new(tokenizer: Arc<Tokenizer>, eos: &[u32]) -> Arc<Self> {
        Self::with_faults(tokenizer, eos, Faults::default())
    }

    pub(crate) fn with_faults(tokenizer: Arc<Tokenizer>, eos: &[u32], faults: Faults) -> Arc<Self> {
        let workers = Arc::new(Workers::new(faults));
        Arc::new(Self {
            tokenizer,
            eos: eos.to_vec(),
            workers,
            prepared: OnceLock::new(),
            compiling: Arc::new(Semaphore::new(COMPILE_THREADS_MAX)),
        })
    }

    /// Prepares the vocabulary on a thread of its own, so that the first constrained request need not.
    pub fn prepare_in_background(self: &Arc<Self>) {
        let own = Arc::clone(self);
        // Without the thread the first request does the work.
        let _ = std::thread::Builder::new().name("grammar-vocabulary".to_owned()).spawn(move || own.prepared().is_ok());
    }

    /// Panics while masks were computed; each failed one choice.
    pub(crate) fn panics(&self) -> u64 {
        self.workers.panics()
    }

    fn prepared(&self) -> Result<&Prepared, String> {
        let prepare = || {
            let vocabulary = Arc::new(Vocabulary::new(&self.tokenizer, &self.eos));
            let slices = SlicedBiasComputer::json_slices();
            let mut factory = ParserFactory::new(&vocabulary.env(), InferenceCapabilities::default(), &slices)
                .map_err(|error| format!("the tokenizer's vocabulary cannot be constrained: {error}"))?;
            factory.quiet();
            *factory.limits_mut() = parser_limits();
            Ok(Prepared { vocabulary, factory })
        };
        self.prepared.get_or_init(prepare).as_ref().map_err(Clone::clone)
    }

    /// Compiles a constraint on a thread of its own, within `COMPILE_TIME_MAX`.
    ///
    /// # Errors
    /// As [`Grammars::compile`], or if it takes too long.
    ///
    /// # Panics
    /// If the compilation does: that is a bug of ours or of the library, not of the constraint.
    pub async fn compile_apart(self: &Arc<Self>, constraint: Constraint) -> Result<Compiled, GrammarError> {
        let refused = |reason: String| GrammarError { param: constraint.param.clone(), reason };
        let slow = || refused(format!("takes longer than {} s to compile; make it smaller", COMPILE_TIME_MAX.as_secs()));
        let (own, copy, (done, result)) = (Arc::clone(self), constraint.clone(), oneshot::channel());
        let compiled = async {
            // The thread keeps its permit for as long as it runs, waited for or not.
            let permit = Arc::clone(&self.compiling).acquire_owned().await.ok();
            let thread = std::thread::Builder::new().name("grammar-compile".to_owned()).stack_size(COMPILE_STACK_BYTES);
            let work = move || {
                let _permit = permit;
                let compiled = catch_unwind(AssertUnwindSafe(|| {
                    own.workers.faults().hit(Place::CompileThread);
                    own.compile(&copy)
                }));
                let _ = done.send(compiled);
            };
            let spawned = thread.spawn(work).map_err(|error| refused(format!("cannot be compiled now: {error}")))?;
            drop(spawned);
            match result.await {
                Ok(compiled) => compiled.unwrap_or_else(|panic| resume_unwind(panic)),
                Err(_) => Err(refused("cannot be compiled".to_owned())),
            }
        };
        self.workers.faults().pass(Place::Compile).await;
        tokio::time::timeout(COMPILE_TIME_MAX, compiled).await.unwrap_or_else(|_| Err(slow()))
    }

    /// Compiles a constraint. Takes up to `COMPILE_TIME_MAX` and much stack: run it on a thread of its own.
    ///
    /// # Errors
    /// If it cannot be enforced as written, is too large, or nothing satisfies it.
    pub fn compile(&self, constraint: &Constraint) -> Result<Compiled, GrammarError> {
        let refused = |reason: String| GrammarError { param: constraint.param.clone(), reason };
        let (grammar, bounds) = grammar_of(&constraint.kind, &self.tokenizer).map_err(refused)?;
        let prepared = self.prepared().map_err(refused)?;
        let mut parser = prepared.factory.create_parser(grammar).map_err(|error| refused(explain(&error, &constraint.kind)))?;
        parser.start_without_prompt();
        let known = Known::new(&parser, &prepared.vocabulary, hints(&constraint.kind)).map_err(refused)?;
        let limits = limits(&bounds, &known).ok_or_else(|| refused(TANGLED.to_owned()))?;
        let closing = Closing::start(&mut parser, &prepared.vocabulary, Arc::new(known.adding(limits.committed)))
            .ok_or_else(|| refused(unclosed()))?;
        Ok(Compiled {
            parser,
            closing: Some(closing),
            limits,
            vocabulary: Arc::clone(&prepared.vocabulary),
            workers: Arc::clone(&self.workers),
            around: Around::of(&constraint.kind, &self.tokenizer),
        })
    }
}

impl Compiled {
    /// Tokens of the shortest complete output that is known; `None` if none was found, or none is needed.
    pub fn shortest(&self) -> Option<u64> {
        self.bound().filter(|_| self.around.is_none())
    }

    /// Tokens that suffice for what the grammar itself describes.
    pub(super) fn bound(&self) -> Option<u64> {
        self.closing.as_ref().map(Closing::bound)
    }

    /// The mask of a part that began with `rest` and may draw `budget` tokens; `None` if no part begins so.
    pub(super) fn part_mask(&self, rest: &[u8], budget: u32) -> Option<GrammarMask> {
        let Self { parser, closing, limits, vocabulary, workers, around: _ } = self;
        let mut parser = parser.deep_clone();
        let mut closing = closing.clone().filter(|closing| closing.bound() <= u64::from(budget));
        for byte in rest {
            let id = vocabulary.byte(*byte)?;
            parser.consume_token(id).ok()?;
            if let Some(closing) = &mut closing {
                closing.advance(id, vocabulary, limits);
            }
        }
        Some(GrammarMask::new(parser, closing, *limits, Arc::clone(vocabulary), Arc::clone(workers)))
    }

    /// Makes the masks of a request that may draw `max_tokens`. If that is too little for any complete
    /// output, the masks only keep to the grammar.
    pub fn masks(mut self, max_tokens: u32) -> MaskFactory {
        if let Some(around) = self.around.take() {
            let (vocabulary, part) = (Arc::clone(&self.vocabulary), Arc::new(self));
            return Arc::new(move || Box::new(MarkedMask::new(around.clone(), Arc::clone(&part), Arc::clone(&vocabulary))));
        }
        let Self { parser, closing, limits, vocabulary, workers, around: _ } = self;
        let closing = closing.filter(|closing| closing.bound() <= u64::from(max_tokens));
        Arc::new(move || {
            // Sequences share nothing that one could wait for.
            let parser = parser.deep_clone();
            Box::new(GrammarMask::new(parser, closing.clone(), limits, Arc::clone(&vocabulary), Arc::clone(&workers)))
        })
    }
}

/// Every limit of the library, so that none changes with its version.
fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// The limits of a grammar that was compiled; `None` if its automata are too large.
fn limits(bounds: &Bounds, known: &Known) -> Option<Limits> {
    let counted = if bounds.committed == Committed::Grammar { Counted::Bytes } else { Counted::Structure };
    Some(Limits { committed: known.committed(bounds.committed)?, counted, absolute: bounds.absolute })
}

fn grammar_of(kind: &ConstraintKind, tokenizer: &Tokenizer) -> Result<(TopLevelGrammar, Bounds), String> {
    match kind {
        ConstraintKind::Schema(schema) => {
            let (schema, committed, _) = enforced(schema)?;
            Ok((TopLevelGrammar::from_json_schema(schema), Bounds { committed, absolute: None }))
        }
        ConstraintKind::Regex(pattern) => {
            let pattern = &ascii_classes(pattern);
            let growth = regex_growth(pattern, Spelling::Plain)?;
            let absolute = Some(growth.remaining.max(growth.shortest));
            Ok((TopLevelGrammar::from_regex(pattern), Bounds { committed: Committed::Schema(growth.remaining), absolute }))
        }
        ConstraintKind::Choice(texts) => {
            let longest = texts.iter().map(String::len).max().unwrap_or(0) as u64;
            let options: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            let grammar = format!("start: {}", options.join(" | "));
            Ok((TopLevelGrammar::from_lark(grammar), Bounds { committed: Committed::Schema(longest), absolute: Some(longest) }))
        }
        ConstraintKind::Lark(text) => {
            check_lark(text)?;
            check_finite(text)?;
            let grammar = TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(text.clone()));
            Ok((grammar, Bounds { committed: Committed::Grammar, absolute: None }))
        }
        ConstraintKind::Marked(marked) => marked_grammar(marked, tokenizer),
    }
}

/// The schema with the options of its compilation, none left to a default.
pub(super) fn strictly(schema: &Value) -> Value {
    let options = json!({
        "item_separator": ",", "key_separator": ":", "whitespace_flexible": true, "whitespace_pattern": WHITESPACE,
        "coerce_one_of": false, "lenient": false,
    });
    match schema {
        Value::Object(map) => {
            let mut map = map.clone();
            map.insert("x-guidance".to_owned(), options);
            Value::Object(map)
        }
        other => json!({"allOf": [other], "x-guidance": options}),
    }
}

/// What is said of a constraint of which no complete output is known.
fn unclosed() -> String {
    format!(
        "has no complete output of at most {OUTPUT_BYTES_MAX} bytes that could be found, so that no limit would be enough for it; make it simpler"
    )
}

/// The library's reason in our words, where it speaks of its own options.
fn explain(error: &anyhow::Error, kind: &ConstraintKind) -> String {
    let message = format!("{error:#}");
    let message = message.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('<')).collect::<Vec<_>>().join("; ");
    if message.contains("oneOf constraints are not supported") {
        return "uses `oneOf` with alternatives that may overlap, which is not supported; use `anyOf`".to_owned();
    }
    if let Some(keys) = message.split("Unimplemented keys: ").nth(1) {
        return format!("uses unsupported keywords: {keys}");
    }
    let message: String = message.chars().take(300).collect();
    let of_regex = ["regex", "anchor", "look-around", "lookaround"].iter().any(|word| message.to_lowercase().contains(word));
    if of_regex && matches!(kind, ConstraintKind::Schema(_) | ConstraintKind::Marked(_)) {
        return format!("has a `pattern` that cannot be compiled: {message}");
    }
    format!("cannot be compiled: {message}")
}
