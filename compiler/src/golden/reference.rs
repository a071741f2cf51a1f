//! Prompts of the golden step: the profile's reference file, or a few of our own.

use super::GoldenError;
use crate::checkpoint::Checkpoint;
use crate::compile::Request;
use crate::profile::{Profile, builtin};
use crate::seal::Hashes;
use oxide_text::{ChatInput, ChatTemplate, TemplateTokens, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};

/// Multiply-adds that the golden step may take, about: some seconds on two cores.
const WORK_MAX: u64 = 400_000_000_000;
/// The same without a reference, when the portable instructions are used.
const PORTABLE_WORK_MAX: u64 = 120_000_000_000;
/// Completion ids of a prompt at most.
const IDS_MAX: usize = 32;
/// Texts completed when the profile ships no reference.
const TEXTS: [(&str, &str); 3] =
    [("capital", "What is the capital of France?"), ("count", "Count from 1 to 10."), ("code", "Write a function that adds two numbers.")];

/// A prompt, with what the reference implementation makes of it.
pub(super) struct Prompt {
    pub(super) name: String,
    pub(super) ids: Vec<u32>,
    /// Completion ids to make.
    pub(super) count: usize,
    pub(super) reference: Option<Reference>,
}

/// What a reference implementation says of a prompt.
pub(super) struct Reference {
    /// `{"messages": …, "tools": …}`, if it was a conversation.
    pub(super) input: Option<Value>,
    pub(super) text: String,
    pub(super) greedy: Vec<u32>,
    pub(super) gaps: Vec<f32>,
}

#[derive(Deserialize)]
struct File {
    prompts: Vec<Entry>,
}

/// An entry of a reference file; further keys are notes.
#[derive(Deserialize)]
struct Entry {
    name: String,
    messages: Option<Value>,
    tools: Option<Value>,
    prompt: String,
    prompt_ids: Vec<u32>,
    greedy_f32: Vec<u32>,
    gap_f32: Vec<f32>,
}

/// The prompts whose work fits the budget, in order, each with as many ids as the context holds. A context
/// shorter than every prompt gets the beginnings of our own.
pub(super) fn prompts(request: &Request, checkpoint: &Checkpoint, inputs: &Hashes) -> Result<Vec<Prompt>, GoldenError> {
    let profile = &request.profile;
    let context = request.context_max.unwrap_or(profile.context_max) as usize;
    let weights = inputs.get("model.safetensors");
    let in_scope = profile.reference.as_ref().is_none_or(|scope| weights == Some(&scope.weights_sha256));
    let shipped = builtin(&profile.name).filter(|found| found.toml == profile.toml && in_scope).and_then(|found| found.reference);
    let (all, work_max) = match shipped {
        Some(text) => (referenced(text)?, WORK_MAX),
        None => (own(checkpoint)?, PORTABLE_WORK_MAX),
    };
    let chosen = fitting(all, context, work_max / parameters(profile).max(1));
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let mut beginnings = own(checkpoint)?;
    for prompt in &mut beginnings {
        prompt.ids.truncate(context.div_ceil(2));
    }
    Ok(fitting(beginnings, context, PORTABLE_WORK_MAX / parameters(profile).max(1)))
}

/// The prompts that leave room for an id in `context` and together take at most `budget` tokens.
fn fitting(prompts: Vec<Prompt>, context: usize, budget: u64) -> Vec<Prompt> {
    let mut left = budget;
    let mut chosen = Vec::new();
    for mut prompt in prompts {
        prompt.count = prompt.count.min(context.saturating_sub(prompt.ids.len()));
        let tokens = (prompt.ids.len() + prompt.count) as u64;
        if prompt.count > 0 && tokens <= left {
            left -= tokens;
            chosen.push(prompt);
        }
    }
    chosen
}

fn referenced(text: &str) -> Result<Vec<Prompt>, GoldenError> {
    let file: File = serde_json::from_str(text).map_err(|error| GoldenError::Reference(error.to_string()))?;
    let prompt = |entry: Entry| {
        let input = entry.messages.map(|messages| match entry.tools {
            Some(tools) => json!({ "messages": messages, "tools": tools }),
            None => json!({ "messages": messages }),
        });
        let count = entry.greedy_f32.len().min(entry.gap_f32.len()).min(IDS_MAX);
        let reference = Reference { input, text: entry.prompt, greedy: entry.greedy_f32, gaps: entry.gap_f32 };
        Prompt { name: entry.name, ids: entry.prompt_ids, count, reference: Some(reference) }
    };
    Ok(file.prompts.into_iter().map(prompt).collect())
}

fn own(checkpoint: &Checkpoint) -> Result<Vec<Prompt>, GoldenError> {
    let tokenizer = super::text::tokenizer(checkpoint)?;
    let template = template(checkpoint, &tokenizer)?;
    let mut prompts = Vec::new();
    for (name, text) in TEXTS {
        let failed = |problem: String| GoldenError::Text { what: format!("prompt `{name}`"), problem };
        let ids = match &template {
            Some(template) => {
                let input = ChatInput::new(json!([{ "role": "user", "content": text }]));
                let rendered = template.render(&input).map_err(|error| failed(error.to_string()))?;
                rendered.encode(&tokenizer).map_err(|error| failed(error.to_string()))?
            }
            None => tokenizer.encode_prompt(text).map_err(|error| failed(error.to_string()))?,
        };
        prompts.push(Prompt { name: name.to_owned(), ids, count: IDS_MAX / 4, reference: None });
    }
    Ok(prompts)
}

pub(super) fn template(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, GoldenError> {
    let text = &checkpoint.text;
    let Some(source) = &text.chat_template else { return Ok(None) };
    let tokens = TemplateTokens { bos: text.bos_token.clone(), eos: text.eos_token.clone() };
    let made = ChatTemplate::new(source, tokens, tokenizer);
    made.map(Some).map_err(|error| GoldenError::Text { what: "chat template".to_owned(), problem: error.to_string() })
}

/// Weights that every token is multiplied with, about.
fn parameters(profile: &Profile) -> u64 {
    let dims = profile.dims;
    let (hidden, layers) = (u64::from(dims.hidden), u64::from(dims.layers));
    let attention = 2 * u64::from(dims.q_width() + dims.kv_width());
    layers * hidden * (attention + 3 * u64::from(dims.intermediate))
}
