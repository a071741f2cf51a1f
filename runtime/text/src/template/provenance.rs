//! Who wrote a control token in a prompt: the template, or a message?
//!
//! Templates trim, cut, join and search the strings they are given, so the origin of a character is
//! not visible in the output. It is found by rendering twice:
//!
//! 1. `plain`: the conversation as it is. Its text is the prompt.
//! 2. `shaded`: every string of the conversation has the characters that control tokens are made of
//!    replaced, one to one, by private-use characters that occur nowhere in the template or the
//!    conversation (they are chosen after looking, so no input can contain them).
//!
//! If undoing the replacement in `shaded` gives `plain`, then shading changed nothing but characters, and
//! whatever still spells a control token in `shaded` was written by the template. A message can
//! therefore forge nothing, neither whole nor in pieces that the template joins.
//!
//! Templates also look for markup such as `</think>` *in* messages. Markup that the template mentions and that is not
//! marked special is therefore left as it is (`Sparing`) in assistant turns, which the model wrote, and, if the two
//! renderings differ, in those other strings that make the difference; there, and only there, a message may write it.
//! If they still differ, the template is shown the shaded text, and `shaded`, undone, is the prompt: safe, though not what
//! an unprotected rendering would give.
//!
//! Roles and `type` fields are closed sets that a template compares and prints (`<|role|>`); their letters stay.

use super::conversation::Conversation;
use super::environment::Engine;
use super::{Piece, Rendered};
use crate::control::ControlTokens;
use crate::error::TemplateError;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::collections::BTreeSet;

/// Strings that are tried one by one before all are treated alike.
const CANDIDATES_MAX: usize = 32;

/// How a string is shaded.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Mode {
    /// Not at all.
    Off,
    /// Every character of markup.
    Full,
    /// As `Full`, but for the control tokens that the template reads.
    Sparing,
}

/// Renders with every control token's origin known.
pub(super) fn render(
    engine: &Engine,
    conversation: &Conversation,
    control: &ControlTokens,
    spared: &ControlTokens,
) -> Result<Rendered, TemplateError> {
    let plain = engine.render(conversation)?;
    let mut shades = Shades::new(engine.source(), conversation, control, spared)?;
    shades.learn_escapes(&plain);
    if shades.touched.is_empty() {
        return Ok(split(&plain, control, &shades));
    }
    let attempt = |modes: &dyn Fn(usize) -> Mode| engine.render(&shades.shade(conversation, modes)).ok();
    let faithful = |shaded: &Option<String>| shaded.as_ref().is_some_and(|text| shades.undo(text) == plain);

    let full = attempt(&|_| Mode::Full);
    if faithful(&full) {
        return Ok(split(&full.unwrap_or_default(), control, &shades));
    }
    let readers = shades.readers(&|index| faithful(&attempt(&|i| if i == index { Mode::Full } else { Mode::Off })));
    let some = attempt(&|index| if readers.contains(&index) { Mode::Sparing } else { Mode::Full });
    if faithful(&some) {
        return Ok(split(&some.unwrap_or_default(), control, &shades));
    }
    let all = engine.render(&shades.shade(conversation, &|_| Mode::Sparing))?;
    Ok(split(&all, control, &shades))
}

/// The replacement, and the strings that it concerns.
struct Shades<'a> {
    /// Private-use character by original.
    forward: BTreeMap<char, char>,
    backward: BTreeMap<char, char>,
    /// The shades as `tojson(ensure_ascii=True)` writes them, with their originals.
    escapes: Vec<(String, char)>,
    /// Characters shaded in every string.
    markup: BTreeSet<char>,
    /// Insides of control tokens made of letters only: a string that is exactly one is shaded whole.
    insides: BTreeSet<&'a str>,
    spared: &'a ControlTokens,
    /// Strings (by order of visit) that shading changes.
    touched: Vec<usize>,
    /// Of those, the ones in which sparing makes a difference.
    candidates: Vec<usize>,
}

impl<'a> Shades<'a> {
    fn new(
        source: &str,
        conversation: &Conversation,
        control: &'a ControlTokens,
        spared: &'a ControlTokens,
    ) -> Result<Self, TemplateError> {
        let markup = markup_characters(control);
        let insides: BTreeSet<&str> = control.iter().filter_map(|t| inside(&t.content)).collect();
        let (forward, backward) = (BTreeMap::new(), BTreeMap::new());
        let mut shades = Self { forward, backward, escapes: vec![], markup, insides, spared, touched: vec![], candidates: vec![] };
        let mut taken: BTreeSet<char> = source.chars().filter(is_private).collect();
        let mut wanted = BTreeSet::new();
        let mut index = 0;
        visit(conversation, &mut |text, kind| {
            taken.extend(text.chars().filter(is_private));
            if shades.is_touched(text, kind) {
                shades.touched.push(index);
                wanted.extend(text.chars());
                if kind != Kind::Model && !shades.spared.find(text).is_empty() {
                    shades.candidates.push(index);
                }
            }
            index += 1;
        });
        shades.assign(wanted, &taken)?;
        Ok(shades)
    }

    fn is_touched(&self, text: &str, kind: Kind) -> bool {
        text.contains(|c| self.markup.contains(&c)) || self.is_whole_inside(text, kind)
    }

    fn is_whole_inside(&self, text: &str, kind: Kind) -> bool {
        kind == Kind::Free && self.insides.contains(text)
    }

    fn assign(&mut self, wanted: BTreeSet<char>, taken: &BTreeSet<char>) -> Result<(), TemplateError> {
        let mut free = ('\u{F0000}'..='\u{FFFFD}').chain('\u{100000}'..='\u{10FFFD}').filter(|c| !taken.contains(c));
        // Characters outside markup are needed only for whole insides, which are short and ASCII.
        for original in wanted.into_iter().filter(|c| self.markup.contains(c) || c.is_ascii()) {
            let Some(shade) = free.next() else {
                return Err(TemplateError::Input { path: "messages".into(), reason: "uses up the private-use characters".into() });
            };
            self.forward.insert(original, shade);
            self.backward.insert(shade, original);
        }
        Ok(())
    }

    /// Escapes that the conversation spells itself are left alone.
    fn learn_escapes(&mut self, plain: &str) {
        let escape = |shade: char| -> String { shade.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect() };
        let escapes = self.backward.iter().map(|(&shade, &original)| (escape(shade), original));
        self.escapes = escapes.filter(|(escape, _)| !plain.contains(escape.as_str())).collect();
    }

    /// Candidates that are not rendered faithfully when fully shaded: the template reads their markup.
    fn readers(&self, is_faithful: &dyn Fn(usize) -> bool) -> BTreeSet<usize> {
        match self.candidates.len() <= CANDIDATES_MAX {
            true => self.candidates.iter().copied().filter(|&index| !is_faithful(index)).collect(),
            false => self.candidates.iter().copied().collect(),
        }
    }

    fn shade(&self, conversation: &Conversation, modes: &dyn Fn(usize) -> Mode) -> Conversation {
        let mut index = 0;
        transform(conversation, &mut |text, kind| {
            let mode = modes(index);
            index += 1;
            self.shade_text(text, kind, mode)
        })
    }

    fn shade_text(&self, text: &str, kind: Kind, mode: Mode) -> String {
        let shade = |c: char| *self.forward.get(&c).unwrap_or(&c);
        let shade_markup = |part: &str| -> String { part.chars().map(|c| if self.markup.contains(&c) { shade(c) } else { c }).collect() };
        match mode {
            Mode::Off => text.to_owned(),
            Mode::Full | Mode::Sparing if self.is_whole_inside(text, kind) => text.chars().map(shade).collect(),
            Mode::Full if kind != Kind::Model => shade_markup(text),
            Mode::Full | Mode::Sparing => {
                let mut out = String::new();
                let mut from = 0;
                for found in self.spared.find(text) {
                    out.push_str(&shade_markup(&text[from..found.range.start]));
                    out.push_str(&text[found.range.clone()]);
                    from = found.range.end;
                }
                out + &shade_markup(&text[from..])
            }
        }
    }

    fn undo(&self, text: &str) -> String {
        let mut text: String = text.chars().map(|c| *self.backward.get(&c).unwrap_or(&c)).collect();
        if text.contains("\\udb") {
            for (escape, original) in &self.escapes {
                text = text.replace(escape, original.encode_utf8(&mut [0; 4]));
            }
        }
        text
    }
}

/// Cuts a shaded prompt at the control tokens that still show, and undoes the shading elsewhere.
fn split(shaded: &str, control: &ControlTokens, shades: &Shades<'_>) -> Rendered {
    let mut pieces = Vec::new();
    let mut from = 0;
    let push_text = |pieces: &mut Vec<Piece>, text: &str| {
        if !text.is_empty() {
            pieces.push(Piece::Text(shades.undo(text)));
        }
    };
    for found in control.find(shaded) {
        push_text(&mut pieces, &shaded[from..found.range.start]);
        pieces.push(Piece::Control { id: found.id, text: shades.undo(&shaded[found.range.clone()]) });
        from = found.range.end;
    }
    push_text(&mut pieces, &shaded[from..]);
    Rendered { pieces }
}

fn is_private(c: &char) -> bool {
    matches!(c, '\u{F0000}'..='\u{10FFFF}')
}

/// First and last characters of control tokens, and other signs in them that words do not use.
fn markup_characters(control: &ControlTokens) -> BTreeSet<char> {
    let is_sign = |c: &char| !c.is_alphanumeric() && !c.is_whitespace() && !matches!(c, '_' | '-' | '/' | '.' | ',' | ' ');
    let ends = control.iter().flat_map(|t| t.content.chars().next().into_iter().chain(t.content.chars().next_back()));
    ends.filter(|c| !c.is_alphanumeric()).chain(control.iter().flat_map(|t| t.content.chars().filter(is_sign))).collect()
}

/// What a template could put between signs of its own to spell this token: `think` of `<think>` and of `</think>`.
fn inside(token: &str) -> Option<&str> {
    let inner = token.trim_matches(|c: char| !c.is_alphanumeric() && c != '_');
    (!inner.is_empty() && inner.len() < token.len() && inner.is_ascii()).then_some(inner)
}

/// What a string is to the template.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// A role, a `type`, or the name of a field that templates know.
    Closed,
    /// What the model wrote in an earlier turn.
    Model,
    /// Anything that a user may choose.
    Free,
}

type Rewrite<'a> = dyn FnMut(&str, Kind) -> String + 'a;

/// Calls `see` for every string of the conversation, keys included, in the order of [`transform`].
fn visit(conversation: &Conversation, see: &mut dyn FnMut(&str, Kind)) {
    transform(conversation, &mut |text, kind| {
        see(text, kind);
        text.to_owned()
    });
}

/// Rewrites every string of the conversation.
fn transform(conversation: &Conversation, rewrite: &mut Rewrite<'_>) -> Conversation {
    let variables = conversation.variables.iter().map(|(name, value)| (name.clone(), transform_value(value, Kind::Free, 0, rewrite)));
    let variables: Map<String, Value> = variables.collect();
    let messages = conversation.messages.as_array().into_iter().flatten();
    Conversation {
        messages: messages.map(|message| transform_message(message, rewrite)).collect(),
        tools: transform_value(&conversation.tools, Kind::Free, 0, rewrite),
        documents: transform_value(&conversation.documents, Kind::Free, 0, rewrite),
        variables,
        ..conversation.clone()
    }
}

fn transform_message(message: &Value, rewrite: &mut Rewrite<'_>) -> Value {
    let Value::Object(fields) = message else { return transform_value(message, Kind::Free, 1, rewrite) };
    let by_model = fields.get("role").is_some_and(|role| role == "assistant");
    let fields = fields.iter().map(|(key, value)| {
        let kind = match key.as_str() {
            "role" | "type" => Kind::Closed,
            "content" | "reasoning_content" if by_model => Kind::Model,
            _ => Kind::Free,
        };
        (rewrite(key, Kind::Closed), transform_value(value, kind, 2, rewrite))
    });
    Value::Object(fields.collect())
}

fn transform_value(value: &Value, kind: Kind, depth: usize, rewrite: &mut Rewrite<'_>) -> Value {
    match value {
        Value::String(text) => Value::String(rewrite(text, kind)),
        Value::Array(items) => items.iter().map(|item| transform_value(item, kind, depth + 1, rewrite)).collect(),
        Value::Object(map) => {
            let entries = map.iter().map(|(key, value)| {
                let inner = if matches!(key.as_str(), "role" | "type") { Kind::Closed } else { kind };
                // Fields of a tool are the template's words; deeper keys are the user's.
                let key_kind = if depth <= 1 { Kind::Closed } else { Kind::Free };
                (rewrite(key, key_kind), transform_value(value, inner, depth + 1, rewrite))
            });
            Value::Object(entries.collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}
