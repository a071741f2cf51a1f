//! The model as the HTTP server sees it: text in, text out, and what may be asked of it.

use super::options::ServeOptions;
use crate::grammar::Grammars;
use crate::model::{LoadedModel, TextEdge};
use crate::openai::error::ApiError;
use crate::openai::rules::{CHOICES_MAX, Rules};
use oxide_bundle::manifest::{GenerationDefaults, Manifest, ToolDialect};
use oxide_runtime::engine::{EngineHandle, SamplingParams};
use oxide_text::{ChatInput, ChatTemplate, Rendered, TemplateError, TokenizerError, UtcTime};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What the server needs of a loaded bundle. Tests build it over an engine of their own.
#[derive(Clone)]
pub struct ServedModel {
    /// Name, limits, defaults, special tokens.
    pub manifest: Manifest,
    /// Seal of the bundle, in hexadecimal.
    pub seal: Option<String>,
    /// Hardware that runs it.
    pub device: String,
    /// How it writes tool calls.
    pub tool_dialect: ToolDialect,
    /// Tokenizer and chat template.
    pub text: TextEdge,
    /// The engine.
    pub engine: EngineHandle,
}

impl From<LoadedModel> for ServedModel {
    fn from(model: LoadedModel) -> Self {
        let LoadedModel { bundle, text, engine, device, times: _ } = model;
        let tool_dialect = bundle.template().tool_dialect;
        Self { tool_dialect, manifest: bundle.manifest().clone(), seal: Some(bundle.seal().to_string()), device: device.name, text, engine }
    }
}

/// A served model with everything that follows from the options.
pub(crate) struct Served {
    pub(crate) model: ServedModel,
    pub(crate) rules: Rules,
    pub(crate) fingerprint: Option<String>,
    pub(crate) grammars: Arc<Grammars>,
    created: u64,
}

impl Served {
    pub(crate) fn new(model: ServedModel, options: &ServeOptions, created: u64) -> Self {
        let rules = rules(&model, options);
        let fingerprint = model.seal.as_deref().and_then(|seal| seal.get(..12)).map(|short| format!("fp_{short}"));
        let grammars = Grammars::with_faults(Arc::clone(&model.text.tokenizer), &model.manifest.tokens.eos, options.faults.clone());
        grammars.prepare_in_background();
        Self { model, rules, fingerprint, grammars, created }
    }

    /// The entry of `/v1/models`.
    pub(crate) fn card(&self) -> Value {
        let Rules { model, context_max, defaults, .. } = &self.rules;
        let manifest = &self.model.manifest;
        json!({
            "id": model, "object": "model", "created": self.created, "owned_by": "oxide", "max_model_len": context_max,
            "default_sampling": {
                "temperature": rounded(defaults.temperature), "top_p": rounded(defaults.top_p), "top_k": defaults.top_k,
                "min_p": rounded(defaults.min_p), "repetition_penalty": rounded(defaults.repetition_penalty),
            },
            "bundle": {
                "seal": self.model.seal, "profile": manifest.profile, "target": manifest.target.to_string(), "device": self.model.device,
                "family": manifest.model.family, "parameters": manifest.model.parameters,
                "weight_dtype": manifest.model.weight_dtype.to_string(), "kv_dtype": manifest.model.kv_dtype.to_string(),
                "seqs_max": self.model.engine.limits().seqs_max, "page_tokens": self.model.engine.limits().page_tokens,
                "kv_pages": self.model.engine.limits().kv_pages,
            },
        })
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// 400 if the model has no template, or its template refuses the conversation.
    pub(crate) fn render(
        &self,
        messages: Vec<Value>,
        tools: Option<Value>,
        add_generation_prompt: bool,
        variables: Map<String, Value>,
    ) -> Result<Rendered, ApiError> {
        let template = self.template()?;
        let input = ChatInput {
            messages: Value::Array(messages),
            tools,
            documents: None,
            add_generation_prompt,
            variables,
            now: UtcTime::from_unix_seconds(super::state::unix_seconds() as i64),
        };
        template.render(&input).map_err(template_error)
    }

    fn template(&self) -> Result<&Arc<ChatTemplate>, ApiError> {
        self.model
            .text
            .template
            .as_ref()
            .ok_or_else(|| ApiError::unsupported("messages", "this model has no chat template; send its prompt to /v1/completions"))
    }

    /// Ids of a rendered prompt.
    ///
    /// # Errors
    /// 400 if the tokenizer refuses the text.
    pub(crate) fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>, ApiError> {
        self.refuse_oversized(&rendered.text(), "messages")?;
        rendered.encode(&self.model.text.tokenizer).map_err(|error| tokenizer_error("messages", &error))
    }

    /// Ids of a raw prompt.
    ///
    /// # Errors
    /// 400 if the tokenizer refuses the text.
    pub(crate) fn encode_prompt(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ApiError> {
        self.refuse_oversized(text, "prompt")?;
        let tokenizer = &self.model.text.tokenizer;
        let ids = if add_special_tokens { tokenizer.encode_prompt(text) } else { tokenizer.encode_with_control(text) };
        ids.map_err(|error| tokenizer_error("prompt", &error))
    }

    /// Refuses a text that cannot fit the context, before memory is spent on all of it.
    ///
    /// Tokenizing takes a hundred times a text's size. A text of many bytes a token is counted piece by
    /// piece first; cutting it into pieces adds a few tokens, which the slack covers.
    fn refuse_oversized(&self, text: &str, param: &str) -> Result<(), ApiError> {
        let context = self.rules.context_max as usize;
        if text.len() <= context.saturating_mul(COUNTED_BYTES_PER_TOKEN) {
            return Ok(());
        }
        let (mut rest, mut count) = (text, 0);
        while !rest.is_empty() {
            let (piece, tail) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
            count += self.model.text.tokenizer.encode_plain(piece).map_err(|error| tokenizer_error(param, &error))?.len();
            rest = tail;
            if count > context + context / 8 + 64 {
                let message =
                    format!("the prompt is {} bytes long and has more than {count} tokens; the context has {context}", text.len());
                return Err(ApiError::context_length(param, message));
            }
        }
        Ok(())
    }
}

/// Texts with more bytes than this for each token of the context are counted before they are tokenized.
const COUNTED_BYTES_PER_TOKEN: usize = 16;
/// Size of the pieces in which they are counted.
const PIECE_BYTES: usize = 64 << 10;

/// A float as its shortest decimal, not as the nearest double.
pub(super) fn rounded(value: f32) -> Value {
    value.to_string().parse::<f64>().ok().and_then(serde_json::Number::from_f64).map_or(Value::Null, Value::Number)
}

fn tokenizer_error(param: &str, error: &TokenizerError) -> ApiError {
    ApiError::invalid(param, error.to_string())
}

fn template_error(error: TemplateError) -> ApiError {
    match error {
        TemplateError::Input { path, reason } => ApiError::invalid(path.clone(), format!("`{path}` {reason}")),
        other => ApiError::invalid("messages", other.to_string()),
    }
}

fn rules(model: &ServedModel, options: &ServeOptions) -> Rules {
    let ServedModel { manifest, engine, text, tool_dialect, .. } = model;
    let limits = engine.limits();
    Rules {
        model: options.model_name.clone().unwrap_or_else(|| manifest.name.clone()),
        context_max: manifest.limits.context_max.min(limits.context_max),
        vocab_known: limits.vocab_known.min(text.tokenizer.vocab_known()),
        eos: manifest.tokens.eos.clone(),
        defaults: defaults(&manifest.generation, options.neutral_sampling),
        strict: options.strict,
        clamp_max_tokens: options.clamp_max_tokens,
        choices_max: options.choices_max.min(CHOICES_MAX).min(limits.seqs_max),
        prompts_max: options.prompts_max,
        stops_max: options.stops_max,
        tool_dialect: *tool_dialect,
    }
}

fn defaults(generation: &GenerationDefaults, neutral: bool) -> SamplingParams {
    if neutral {
        return SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    }
    let GenerationDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = generation;
    SamplingParams {
        temperature: temperature.get(),
        top_p: top_p.get(),
        top_k: *top_k,
        min_p: min_p.get(),
        repetition_penalty: repetition_penalty.get(),
        ..SamplingParams::default()
    }
}
