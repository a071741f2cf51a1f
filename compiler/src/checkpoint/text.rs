//! What the text edge needs from a checkpoint: tokenizer, chat template, special tokens, sampling defaults.

use super::config::Config;
use super::{CheckpointError, Files};
use crate::profile::Profile;
use oxide_bundle::dtype::F32Bits;
use oxide_bundle::manifest::{GenerationDefaults, SpecialTokens, TemplateSection};
use oxide_text::{ChatTemplate, TemplateTokens, Tokenizer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Largest `tokenizer.json` read.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Largest other text file read.
const TEXT_BYTES_MAX: u64 = 16 << 20;

/// Text files of a checkpoint, decoded.
#[derive(Debug)]
pub struct TextFiles {
    /// `tokenizer.json`, byte for byte.
    pub tokenizer_json: Vec<u8>,
    /// Chat template and what it needs; the tool dialect comes from the profile.
    pub chat_template: Option<String>,
    /// Text of the BOS token.
    pub bos_token: Option<String>,
    /// Text of the EOS token.
    pub eos_token: Option<String>,
    /// Tokens with a meaning.
    pub tokens: SpecialTokens,
    /// Sampling defaults.
    pub generation: GenerationDefaults,
    /// Names of the files read.
    pub files: Vec<String>,
    vocab_known: u32,
    template_problem: Option<String>,
}

impl TextFiles {
    /// Reads tokenizer, template and generation config.
    ///
    /// # Errors
    /// If a mandatory file is missing, or one does not parse.
    pub fn read(files: &Files, config: &Config) -> Result<Self, CheckpointError> {
        let tokenizer_json = files.require("tokenizer.json", TOKENIZER_BYTES_MAX)?;
        let malformed = |file: &str, problem: String| CheckpointError::Malformed { file: file.to_owned(), problem };
        let tokenizer = Tokenizer::from_json(&tokenizer_json).map_err(|error| malformed("tokenizer.json", error.to_string()))?;
        let tokenizer_config = object(files, "tokenizer_config.json")?;
        let generation_config = object(files, "generation_config.json")?;
        let jinja = files.read("chat_template.jinja", TEXT_BYTES_MAX)?;
        let mut names = vec!["tokenizer.json".to_owned()];
        let read = [
            ("tokenizer_config.json", tokenizer_config.is_some()),
            ("generation_config.json", generation_config.is_some()),
            ("chat_template.jinja", jinja.is_some()),
        ];
        names.extend(read.into_iter().filter(|(_, found)| *found).map(|(name, _)| name.to_owned()));
        let (tokenizer_config, generation_config) = (tokenizer_config.unwrap_or_default(), generation_config.unwrap_or_default());
        let jinja = jinja.map(String::from_utf8).transpose().map_err(|error| malformed("chat_template.jinja", error.to_string()))?;
        let chat_template = jinja.or_else(|| template(&tokenizer_config));
        let (bos_token, eos_token) = (token_text(&tokenizer_config, "bos_token"), token_text(&tokenizer_config, "eos_token"));
        let tokens = special_tokens(&tokenizer, &tokenizer_config, &[&generation_config, config]);
        let template_tokens = TemplateTokens { bos: bos_token.clone(), eos: eos_token.clone() };
        let compiled = chat_template.as_deref().map(|source| ChatTemplate::new(source, template_tokens, &tokenizer));
        let template_problem = compiled.and_then(|made| made.and_then(|template| template.dry_run()).err()).map(|error| error.to_string());
        Ok(Self {
            vocab_known: tokenizer.vocab_known(),
            template_problem,
            tokenizer_json,
            chat_template,
            bos_token,
            eos_token,
            tokens,
            generation: generation_defaults(&generation_config),
            files: names,
        })
    }

    /// Ids that the tokenizer knows.
    pub fn vocab_known(&self) -> u32 {
        self.vocab_known
    }

    /// The template section for a profile.
    pub fn template_section(&self, profile: &Profile) -> TemplateSection {
        TemplateSection {
            chat_template: self.chat_template.clone(),
            bos_token: self.bos_token.clone(),
            eos_token: self.eos_token.clone(),
            tool_dialect: profile.tokenizer.tool_dialect,
        }
    }

    /// Every way in which tokenizer and template are not what the profile says.
    pub fn problems(&self, profile: &Profile) -> Vec<String> {
        let expected = &profile.tokenizer;
        let mut problems = Vec::new();
        if self.vocab_known != expected.vocab_known {
            problems.push(format!("tokenizer.json knows {} ids, the profile says {}", self.vocab_known, expected.vocab_known));
        }
        let absent = expected.control.iter().filter(|text| !self.tokens.control.contains_key(*text));
        problems.extend(absent.map(|text| format!("tokenizer.json has no control token {text}")));
        if expected.chat_template && self.chat_template.is_none() {
            problems.push("there is no chat template (tokenizer_config.json: chat_template, or chat_template.jinja)".to_owned());
        }
        problems.extend(self.template_problem.iter().map(|problem| format!("chat template: {problem}")));
        if self.tokens.eos.is_empty() {
            problems.push("no end-of-sequence id (eos_token_id in generation_config.json or config.json)".to_owned());
        }
        problems
    }
}

fn object(files: &Files, name: &str) -> Result<Option<Map<String, Value>>, CheckpointError> {
    let Some(bytes) = files.read(name, TEXT_BYTES_MAX)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| CheckpointError::Malformed { file: name.to_owned(), problem: error.to_string() })
}

/// A template in `tokenizer_config.json`: text, or a list of named ones of which `default` is taken.
fn template(config: &Map<String, Value>) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|entry| entry.get("name").is_some_and(|name| name == "default"));
            default?.get("template")?.as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// A token's text, given plainly or as an object with `content`.
fn token_text(config: &Map<String, Value>, key: &str) -> Option<String> {
    let value = config.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

fn special_tokens(tokenizer: &Tokenizer, tokenizer_config: &Map<String, Value>, configs: &[&Map<String, Value>]) -> SpecialTokens {
    let id_of = |key: &str| token_text(tokenizer_config, key).and_then(|text| tokenizer.token_id(&text));
    let listed = |key: &str| configs.iter().map(|config| ids(config.get(key))).find(|ids| !ids.is_empty()).unwrap_or_default();
    let mut eos = listed("eos_token_id");
    eos.extend(id_of("eos_token"));
    eos.sort_unstable();
    eos.dedup();
    let prepended = tokenizer.bos();
    let bos = prepended.or_else(|| id_of("bos_token")).or_else(|| listed("bos_token_id").first().copied());
    let add_bos = tokenizer_config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(prepended.is_some()) && bos.is_some();
    let pad = id_of("pad_token").or_else(|| listed("pad_token_id").first().copied());
    let control: BTreeMap<String, u32> = tokenizer.control().iter().map(|token| (token.content.clone(), token.id)).collect();
    SpecialTokens { bos, eos, pad, add_bos, control }
}

/// One id or a list of ids.
fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}

fn generation_defaults(config: &Map<String, Value>) -> GenerationDefaults {
    let number = |key: &str, default: f64| F32Bits::new(config.get(key).and_then(Value::as_f64).unwrap_or(default) as f32);
    let greedy = config.get("do_sample").is_some_and(|value| *value == false);
    GenerationDefaults {
        temperature: if greedy { F32Bits::new(0.0) } else { number("temperature", 1.0) },
        top_p: number("top_p", 1.0),
        top_k: config.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok()).unwrap_or(0),
        min_p: number("min_p", 0.0),
        repetition_penalty: number("repetition_penalty", 1.0),
    }
}
