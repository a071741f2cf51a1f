//! Text with parts that are JSON of a schema between marks.
//!
//! Where the text itself is constrained, one grammar says both: the text, or parts. Where it is free, it
//! stays free, and a grammar holds from the end of an opening mark to the end of the closing one:
//!
//! ```text
//! free text ──opening mark──▶ grammar of the part ──closing mark──▶ free text
//! ```

use super::bounds::check_schema;
use super::compile::{Bounds, Committed, Compiled, strictly};
use super::effective::{ascii_classes, make_effective};
use super::growth::schema_growth;
use super::mask::GrammarMask;
use super::regex_growth::{Spelling, regex_growth};
use super::request::{ConstraintKind, Marked};
use super::vocabulary::Vocabulary;
use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use oxide_runtime::engine::{LogitsMask, MaskVerdict};
use oxide_text::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

/// Whitespace around what a part holds.
const SPACE: &str = r"SPACE: /[\x20\x0A\x0D\x09]{1,8}/";

/// Where parts begin in free text.
#[derive(Clone)]
pub(super) struct Around {
    open: String,
    /// The opening mark as one control token.
    open_id: Option<u32>,
    most: u32,
}

impl Around {
    /// Of marked text that is free; `None` if it is constrained.
    pub(super) fn of(kind: &ConstraintKind, tokenizer: &Tokenizer) -> Option<Self> {
        match kind {
            ConstraintKind::Marked(Marked { text: None, open, most, .. }) => {
                Some(Self { open: open.clone(), open_id: control_id(tokenizer, open), most: *most })
            }
            _ => None,
        }
    }
}

/// The grammar of marked text, or of one part from its opening mark on if the text is free.
///
/// # Errors
/// What is wrong with it, in words that follow the field's name.
pub(super) fn marked_grammar(marked: &Marked, tokenizer: &Tokenizer) -> Result<(TopLevelGrammar, Bounds), String> {
    let Marked { text, open, close, separator, schema, most } = marked;
    if text.is_none() && (open.is_empty() || close.is_empty()) {
        return Err("has parts without marks in free text".to_owned());
    }
    let (body, committed, shortest) = enforced(schema).map_err(|reason| match text {
        None => format!("has a function whose schema {reason}"),
        Some(_) => format!("is combined with a schema of `tools` that {reason}"),
    })?;
    let body = format!("%json {body}");
    let (open_mark, close_mark) = (mark(open, tokenizer), mark(close, tokenizer));
    // A part is begun as a whole.
    let committed = committed.at_least(shortest.saturating_add((open.len() + close.len()) as u64));
    let Some(text) = text else {
        let lark = format!("start: SPACE? body SPACE? {close_mark}\nbody: {body}\n{SPACE}\n");
        return Ok((TopLevelGrammar::from_lark(lark), Bounds { committed, absolute: None }));
    };
    let (text, of_text) = alternative(text)?;
    let part = if open.is_empty() { "body".to_owned() } else { format!("{open_mark} SPACE? body SPACE? {close_mark}") };
    let further = most.saturating_sub(1);
    let separator = json!(separator).to_string();
    let lark = format!(
        "start: text | part ({separator} part){{0,{further}}}\ntext: {text}\npart: {part}\nbody: {body}\n{}\n",
        if open.is_empty() { "" } else { SPACE }
    );
    Ok((TopLevelGrammar::from_lark(lark), Bounds { committed: committed.with(of_text), absolute: None }))
}

/// A schema as it is enforced, what one commitment in it can add, and the bytes of a shortest value.
///
/// # Errors
/// What is wrong with it.
pub(super) fn enforced(schema: &Value) -> Result<(Value, Committed, u64), String> {
    check_schema(schema)?;
    let mut schema = schema.clone();
    make_effective(&mut schema)?;
    let growth = schema_growth(&schema);
    let Some(shortest) = growth.shortest else {
        return Err("describes no value that could be written: its required parts have no end, or contradict each other".to_owned());
    };
    let committed = if growth.tangled { Committed::SchemaAndAutomata(growth.committed) } else { Committed::Schema(growth.committed) };
    Ok((strictly(&schema), committed, shortest))
}

/// Constrained text as the body of a rule, and what one commitment in it can add.
fn alternative(kind: &ConstraintKind) -> Result<(String, Committed), String> {
    match kind {
        ConstraintKind::Schema(schema) => enforced(schema).map(|(schema, committed, _)| (format!("%json {schema}"), committed)),
        ConstraintKind::Regex(pattern) => {
            let pattern = ascii_classes(pattern);
            let growth = regex_growth(&pattern, Spelling::Plain)?;
            Ok((format!("/{}/", regex_to_lark(&pattern, "")), Committed::Schema(growth.remaining.max(growth.shortest))))
        }
        ConstraintKind::Choice(texts) => {
            let longest = texts.iter().map(String::len).max().unwrap_or(0) as u64;
            Ok((texts.iter().map(|text| json!(text).to_string()).collect::<Vec<_>>().join(" | "), Committed::Schema(longest)))
        }
        ConstraintKind::Lark(_) | ConstraintKind::Marked(_) => {
            Err("cannot be combined with tools that may or may not be called; send `tool_choice`".to_owned())
        }
    }
}

/// A mark in a grammar: its control token, or its text spelled by other tokens.
fn mark(text: &str, tokenizer: &Tokenizer) -> String {
    let spelled = json!(text).to_string();
    control_id(tokenizer, text).map_or_else(|| spelled.clone(), |id| format!("(<[{id}]> | {spelled})"))
}

fn control_id(tokenizer: &Tokenizer, text: &str) -> Option<u32> {
    tokenizer.control().by_text(text).map(|token| token.id)
}

/// Masks of free text with marked parts.
pub(super) struct MarkedMask {
    around: Around,
    /// The grammar of a part, from its opening mark on.
    part: Arc<Compiled>,
    vocabulary: Arc<Vocabulary>,
    /// The mask of the part under way.
    inner: Option<GrammarMask>,
    /// What the opening mark may have begun with.
    held: Vec<u8>,
    parts: u32,
    budget: u32,
}

impl MarkedMask {
    pub(super) fn new(around: Around, part: Arc<Compiled>, vocabulary: Arc<Vocabulary>) -> Self {
        Self { around, part, vocabulary, inner: None, held: Vec::new(), parts: 0, budget: u32::MAX }
    }

    /// Follows free text; begins a part where the opening mark ends. Text after the mark in the same token
    /// that no part can begin with makes no part.
    fn follow(&mut self, id: u32) {
        let mark = self.around.open.as_bytes();
        let rest = if self.around.open_id == Some(id) {
            Some(Vec::new())
        } else {
            self.held.extend_from_slice(self.vocabulary.token(id));
            let found = self.held.windows(mark.len()).position(|window| window == mark);
            found.and_then(|start| self.held.get(start + mark.len()..)).map(<[u8]>::to_vec)
        };
        match rest {
            Some(rest) => {
                self.held.clear();
                if self.parts < self.around.most {
                    self.parts += 1;
                    self.inner = self.part.part_mask(&rest, self.budget.saturating_sub(1));
                }
            }
            None => {
                let cut = self.held.len().saturating_sub(mark.len().saturating_sub(1));
                self.held.drain(..cut);
            }
        }
    }

    /// Everything but a mark whose part could not be closed any more.
    fn fill_free(&self, words: &mut [u32]) {
        self.vocabulary.fill_known(words);
        let short = self.part.bound().is_some_and(|bound| bound >= u64::from(self.budget));
        if let (true, Some(id)) = (short && self.parts < self.around.most, self.around.open_id)
            && let Some(word) = words.get_mut((id / 32) as usize)
        {
            *word &= !(1 << (id % 32));
        }
    }
}

impl LogitsMask for MarkedMask {
    fn begin(&mut self, budget: u32) {
        self.budget = budget;
        if let Some(inner) = &mut self.inner {
            inner.begin(budget);
        }
    }

    fn fill(&mut self, words: &mut [u32]) -> MaskVerdict {
        match &mut self.inner {
            Some(inner) => inner.fill(words),
            None => {
                self.fill_free(words);
                MaskVerdict::Continue
            }
        }
    }

    fn accept(&mut self, id: u32) -> MaskVerdict {
        match self.inner.as_mut().map(|inner| inner.accept(id)) {
            None => self.follow(id),
            Some(MaskVerdict::Complete) => self.inner = None,
            Some(MaskVerdict::Continue) => {}
            Some(MaskVerdict::Failed) => return MaskVerdict::Failed,
        }
        MaskVerdict::Continue
    }
}
