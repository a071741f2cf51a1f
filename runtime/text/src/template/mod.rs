//! Chat templates: a conversation to a prompt, byte-identical with the reference (jinja2 as `transformers` sets it up),
//! and to token ids such that message text never becomes a control token.
//!
//! The pipeline of [`ChatTemplate::render`]:
//!
//! ```text
//! ChatInput ─▶ conversation ─▶ Conversation ─▶ provenance ─▶ [Piece] ─▶ ids
//!              (arguments decoded,  (environment renders,      (control tokens of the
//!               parts joined)        once or a few times)       template, text of anyone)
//! ```
//!
//! **Invariant:** a [`Piece::Control`] was written by the template; see [`provenance`](self) in the
//! source for how that is known whatever the template does with its strings.

mod conversation;
mod environment;
mod provenance;
mod python;
mod python_json;
mod time;

use crate::control::ControlTokens;
use crate::error::{TemplateError, TokenizerError};
use crate::tokenizer::Tokenizer;
use conversation::{Conversation, PartsStyle};
use environment::Engine;
use serde_json::{Map, Value};

pub use environment::FUEL_MAX;
pub use time::UtcTime;

/// Texts of special tokens, as templates see them.
#[derive(Clone, Debug, Default)]
pub struct TemplateTokens {
    /// `bos_token`; undefined in the template if `None`.
    pub bos: Option<String>,
    /// `eos_token`; undefined in the template if `None`.
    pub eos: Option<String>,
}

/// A conversation to render.
#[derive(Clone, Debug)]
pub struct ChatInput {
    /// `messages`: a list of objects as in the OpenAI API.
    pub messages: Value,
    /// `tools`: a list of objects as in the OpenAI API.
    pub tools: Option<Value>,
    /// `documents`.
    pub documents: Option<Value>,
    /// Ends the prompt with the beginning of an assistant turn.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`), for example `enable_thinking`.
    pub variables: Map<String, Value>,
    /// What `strftime_now` answers.
    pub now: UtcTime,
}

impl ChatInput {
    /// A conversation with generation prompt, no tools, at the epoch.
    pub fn new(messages: Value) -> Self {
        Self { messages, tools: None, documents: None, add_generation_prompt: true, variables: Map::new(), now: UtcTime::EPOCH }
    }
}

/// A part of a rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A control token that the template wrote.
    Control {
        /// Its id.
        id: u32,
        /// Its text.
        text: String,
    },
    /// Anything else; holds no control token, whatever it spells.
    Text(String),
}

/// A rendered prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// In order; no two texts in a row.
    pub pieces: Vec<Piece>,
}

impl Rendered {
    /// The prompt as text.
    pub fn text(&self) -> String {
        self.pieces
            .iter()
            .map(|piece| match piece {
                Piece::Control { text, .. } | Piece::Text(text) => text.as_str(),
            })
            .collect()
    }

    /// The prompt as ids. Nothing is prepended: templates write their own BOS.
    ///
    /// # Errors
    /// If the tokenizer refuses a text.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Control { id, .. } => ids.push(*id),
                Piece::Text(text) => ids.extend(tokenizer.encode_plain(text)?),
            }
        }
        Ok(ids)
    }
}

/// A compiled chat template.
pub struct ChatTemplate {
    engine: Engine,
    control: ControlTokens,
    /// Control tokens that are not special and that the template mentions: it may read them out of messages.
    spared: ControlTokens,
    parts: PartsStyle,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// If it has a syntax error.
    pub fn new(source: &str, tokens: TemplateTokens, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let engine = Engine::new(source, tokens)?;
        let control = tokenizer.control().clone();
        let spared = ControlTokens::new(control.iter().filter(|t| !t.special && source.contains(&t.content)).cloned());
        let parts = PartsStyle::probe(&engine);
        Ok(Self { engine, control, spared, parts })
    }

    /// Renders a conversation. Text parts of a message are joined by a line break unless the template reads
    /// parts itself; `tool_calls` arguments that are JSON text are decoded first.
    ///
    /// # Errors
    /// If the conversation is malformed, the template refuses it, fails or runs too long.
    pub fn render(&self, input: &ChatInput) -> Result<Rendered, TemplateError> {
        let conversation = Conversation::new(input, self.parts)?;
        match provenance::render(&self.engine, &conversation, &self.control, &self.spared) {
            Err(TemplateError::Render(first)) => match conversation.with_empty_contents() {
                Some(retry) => provenance::render(&self.engine, &retry, &self.control, &self.spared),
                None => Err(TemplateError::Render(first)),
            },
            other => other,
        }
    }

    /// Renders small conversations of every kind that must work: a seal-time check.
    ///
    /// # Errors
    /// If the simplest one fails.
    pub fn dry_run(&self) -> Result<(), TemplateError> {
        let user = serde_json::json!([{"role": "user", "content": "Hello"}]);
        let rendered = self.render(&ChatInput::new(user))?;
        match rendered.text().contains("Hello") {
            true => Ok(()),
            false => Err(TemplateError::Render("the prompt does not contain the user's message".into())),
        }
    }
}
