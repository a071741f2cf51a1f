//! The fields that completions and chat completions share: sampling, stops, streaming, scheduling.

use super::error::ApiError;
use super::fields::{self, Fields};
use super::rules::{CHOICES_MAX, DEADLINE_MS_MAX, ID_LIST_MAX, Rules, SALT_BYTES_MAX, STOP_BYTES_MAX};
use crate::grammar::{Constraint, take_constraint};
use oxide_runtime::engine::SamplingParams;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// Shared fields of a request, checked.
#[derive(Clone, Debug)]
pub struct Common {
    /// Choices wanted of each prompt.
    pub n: u32,
    /// Sampling; the endpoint fills in `logprobs`.
    pub sampling: SamplingParams,
    /// Whether the request named its seed.
    pub seeded: bool,
    /// When to stop.
    pub stop: Stop,
    /// Completion tokens before which no stop id is sampled.
    pub min_tokens: u32,
    /// What the text must be.
    pub constraint: Option<Constraint>,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// How to stream; `None` answers at the end.
    pub stream: Option<StreamOptions>,
    /// Separates prefix-cache entries.
    pub cache_salt: Vec<u8>,
    /// Time that the request may take.
    pub deadline: Option<Duration>,
    /// Time that it may wait for admission.
    pub queue_time_max: Option<Duration>,
    /// Whether the response carries a trace.
    pub trace: bool,
    /// Keeps only this many last prompt tokens.
    pub truncate_prompt_tokens: Option<u32>,
    /// Lowers a `max_tokens` that does not fit.
    pub clamp_max_tokens: bool,
}

/// When a choice stops by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stop {
    /// Strings that end the text.
    pub strings: Vec<String>,
    /// Ids that end it, beside the model's own.
    pub ids: Vec<u32>,
    /// Whether the model's own end ids are ignored.
    pub ignore_eos: bool,
    /// Whether the text keeps what stopped it.
    pub include_in_output: bool,
}

/// `stream_options`.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// One more chunk with the usage at the end.
    pub include_usage: bool,
    /// The usage so far in every chunk.
    pub continuous_usage: bool,
}

/// Fields of the public API, and of servers like this one, that would change the answer and are not implemented.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("suffix", "insertion is not supported"),
    ("audio", "audio is not supported"),
    ("prediction", "predicted outputs are not supported"),
    ("web_search_options", "web search is not supported"),
    ("reasoning_effort", "this model has no reasoning effort"),
    ("verbosity", "this model has no verbosity setting"),
    ("length_penalty", "beam search is not supported"),
    ("early_stopping", "beam search is not supported"),
    ("logits_processors", "logits processors are not supported"),
    ("prompt_logprobs", "send `echo` with `logprobs` to /v1/completions instead"),
    ("chat_template", "templates of requests are not run; the bundle's own is used"),
    ("documents", "documents are not supported; put them into a message"),
    ("prompt_embeds", "prompt embeddings are not supported"),
    ("allowed_token_ids", "use `logit_bias` instead"),
    ("bad_words", "use `logit_bias` instead"),
];

/// Fields that change nothing in the answer; they are accepted as they are.
const WITHOUT_EFFECT: &[&str] = &["user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention"];

/// Takes the shared fields.
///
/// # Errors
/// 400 that names the first field at fault.
pub fn take_common(fields: &mut Fields, rules: &Rules) -> Result<Common, ApiError> {
    refuse_unsupported(fields)?;
    super::tools::refuse_constraints(fields)?;
    let n = fields.integer("n", 1..=i64::from(rules.choices_max.min(CHOICES_MAX)))?.unwrap_or(1) as u32;
    refuse_best_of(fields, n)?;
    let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(Common {
        n,
        seeded: seed.is_some(),
        sampling: take_sampling(fields, rules, seed)?,
        stop: take_stop(fields, rules)?,
        min_tokens: fields.integer("min_tokens", 0..=i64::from(rules.context_max))?.unwrap_or(0) as u32,
        constraint: take_constraint(fields)?,
        skip_special_tokens: fields.boolean("skip_special_tokens")?.unwrap_or(true),
        stream: take_stream(fields)?,
        cache_salt: take_salt(fields)?,
        deadline: take_millis(fields, "deadline_ms", 1)?,
        queue_time_max: take_millis(fields, "max_queue_ms", 0)?,
        trace: fields.boolean("trace")?.unwrap_or(false),
        truncate_prompt_tokens: fields.integer("truncate_prompt_tokens", 1..=i64::from(rules.context_max))?.map(|count| count as u32),
        clamp_max_tokens: fields.boolean("clamp_max_tokens")?.unwrap_or(false),
    })
}

fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    for (name, reason) in UNSUPPORTED {
        match fields.take(name) {
            None => {}
            Some(Value::String(text)) if *name == "suffix" && text.is_empty() => {}
            Some(_) => return Err(ApiError::unsupported(*name, format!("`{name}`: {reason}"))),
        }
    }
    for name in WITHOUT_EFFECT {
        fields.take(name);
    }
    refuse_unless(fields, "store", &[Value::Bool(false)], "responses are not stored; send false or leave it out")?;
    refuse_unless(fields, "use_beam_search", &[Value::Bool(false)], "beam search is not supported")?;
    refuse_unless(fields, "service_tier", &["auto".into(), "default".into()], "there is one tier; send \"auto\" or leave it out")?;
    refuse_unless(fields, "modalities", &[serde_json::json!(["text"])], "this model answers in text only")
}

/// Refuses a field unless it holds one of the values that ask for nothing special.
fn refuse_unless(fields: &mut Fields, name: &str, neutral: &[Value], reason: &str) -> Result<(), ApiError> {
    match fields.take(name) {
        Some(value) if !neutral.contains(&value) => Err(ApiError::unsupported(name, format!("`{name}`: {reason}"))),
        _ => Ok(()),
    }
}

fn refuse_best_of(fields: &mut Fields, n: u32) -> Result<(), ApiError> {
    match fields.integer("best_of", 1..=i64::from(CHOICES_MAX))? {
        Some(best_of) if best_of != i64::from(n) => Err(ApiError::unsupported(
            "best_of",
            "`best_of` is not supported beyond `n`: every generated choice is returned; ask for more choices with `n`",
        )),
        _ => Ok(()),
    }
}

fn take_sampling(fields: &mut Fields, rules: &Rules, seed: Option<i64>) -> Result<SamplingParams, ApiError> {
    let base = &rules.defaults;
    let number = |fields: &mut Fields, name: &str, low: f64, high: f64, default: f32| {
        fields.number(name, low..=high).map(|found| found.map_or(default, |value| value as f32))
    };
    let (temperature, top_p) = (number(fields, "temperature", 0.0, 2.0, base.temperature)?, number(fields, "top_p", 0.0, 1.0, base.top_p)?);
    Ok(SamplingParams {
        // A nucleus of no mass is the likeliest token alone.
        temperature: if top_p == 0.0 { 0.0 } else { temperature },
        top_p,
        top_k: fields.integer("top_k", -1..=i64::from(u32::MAX))?.map_or(base.top_k, |k| k.max(0) as u32),
        min_p: number(fields, "min_p", 0.0, 1.0, base.min_p)?,
        repetition_penalty: number(fields, "repetition_penalty", 0.01, 100.0, base.repetition_penalty)?,
        presence_penalty: number(fields, "presence_penalty", -2.0, 2.0, base.presence_penalty)?,
        frequency_penalty: number(fields, "frequency_penalty", -2.0, 2.0, base.frequency_penalty)?,
        logit_bias: take_bias(fields, rules)?,
        seed: seed.map_or_else(crate::openai::id::random_u64, |seed| seed as u64),
        logprobs: None,
    })
}

fn take_bias(fields: &mut Fields, rules: &Rules) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if map.len() > ID_LIST_MAX {
        return Err(ApiError::invalid("logit_bias", format!("`logit_bias` has {} entries, at most {ID_LIST_MAX} are allowed", map.len())));
    }
    let bias = map.iter().map(|(key, value)| one_bias(key, value, rules)).collect::<Result<BTreeMap<_, _>, _>>()?;
    Ok(bias.into_iter().collect())
}

fn one_bias(key: &str, value: &Value, rules: &Rules) -> Result<(u32, f32), ApiError> {
    let last = rules.vocab_known.saturating_sub(1);
    let id = key.parse::<u32>().ok().filter(|id| *id <= last);
    let id = id.ok_or_else(|| {
        ApiError::invalid("logit_bias", format!("`logit_bias` has the key `{key}`; keys are this model's token ids, 0 to {last}"))
    })?;
    let limit = if rules.strict { 100.0 } else { f64::MAX };
    let bias = fields::number("logit_bias", value, -limit..=limit)?;
    Ok((id, bias.clamp(-100.0, 100.0) as f32))
}

fn take_stop(fields: &mut Fields, rules: &Rules) -> Result<Stop, ApiError> {
    let ids = fields.array("stop_token_ids")?.unwrap_or_default();
    if ids.len() > ID_LIST_MAX {
        return Err(ApiError::invalid(
            "stop_token_ids",
            format!("`stop_token_ids` has {} entries, at most {ID_LIST_MAX} are allowed", ids.len()),
        ));
    }
    Ok(Stop {
        strings: take_stop_strings(fields, rules)?,
        ids: fields::token_ids("stop_token_ids", &ids, rules.vocab_known)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        include_in_output: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
    })
}

fn take_stop_strings(fields: &mut Fields, rules: &Rules) -> Result<Vec<String>, ApiError> {
    let items = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(single) => vec![single],
    };
    let allowed = rules.stops_allowed();
    if items.len() > allowed {
        return Err(ApiError::invalid("stop", format!("`stop` has {} strings, at most {allowed} are allowed", items.len())));
    }
    items.into_iter().map(stop_string).collect()
}

fn stop_string(item: Value) -> Result<String, ApiError> {
    match item {
        Value::String(text) if text.is_empty() => Err(ApiError::invalid("stop", "`stop` holds an empty string, which would stop at once")),
        Value::String(text) if text.len() > STOP_BYTES_MAX => {
            Err(ApiError::invalid("stop", format!("`stop` holds a string of {} bytes, at most {STOP_BYTES_MAX} are allowed", text.len())))
        }
        Value::String(text) => Ok(text),
        other => Err(ApiError::invalid("stop", format!("`stop` must be a string or an array of strings, not {}", fields::kind(&other)))),
    }
}

fn take_stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(options) = fields.object("stream_options")? else { return Ok(stream.then(StreamOptions::default)) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "`stream_options` is only allowed with `stream: true`"));
    }
    let mut options = Fields::of(options);
    // Errors name the field by its whole path.
    let within = |error: ApiError| {
        let name = error.param.unwrap_or_default();
        let path = format!("stream_options.{name}");
        ApiError { message: error.message.replace(&format!("`{name}`"), &format!("`{path}`")), param: Some(path), ..error }
    };
    options.boolean("include_obfuscation").map_err(within)?;
    let parsed = StreamOptions {
        include_usage: options.boolean("include_usage").map_err(within)?.unwrap_or(false),
        continuous_usage: options.boolean("continuous_usage_stats").map_err(within)?.unwrap_or(false),
    };
    match options.unread().next() {
        Some(name) => Err(ApiError::invalid(format!("stream_options.{name}"), format!("`stream_options` has no field `{name}`"))),
        None => Ok(Some(parsed)),
    }
}

fn take_salt(fields: &mut Fields) -> Result<Vec<u8>, ApiError> {
    let salt = fields.string("cache_salt")?.unwrap_or_default();
    if salt.len() > SALT_BYTES_MAX {
        return Err(ApiError::invalid(
            "cache_salt",
            format!("`cache_salt` has {} bytes, at most {SALT_BYTES_MAX} are allowed", salt.len()),
        ));
    }
    Ok(salt.into_bytes())
}

fn take_millis(fields: &mut Fields, name: &str, least: i64) -> Result<Option<Duration>, ApiError> {
    Ok(fields.integer(name, least..=DEADLINE_MS_MAX)?.map(|millis| Duration::from_millis(millis as u64)))
}

/// Checks `min_tokens` against the completion's own limit.
///
/// # Errors
/// 400 if it is larger.
pub fn check_min_tokens(min_tokens: u32, max_tokens: u32) -> Result<(), ApiError> {
    if min_tokens > max_tokens {
        let message = format!("`min_tokens` is {min_tokens}, more than the {max_tokens} tokens that the completion may have");
        return Err(ApiError::invalid("min_tokens", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::fields::parse_body;
    use super::super::rules::test_rules;
    use super::*;

    fn check(body: &str) -> Result<Common, ApiError> {
        take_common(&mut parse_body(body.as_bytes()).expect("json"), &test_rules())
    }

    #[test]
    fn each_bad_field_is_named() {
        for (body, param) in [
            (r#"{"temperature":-0.1}"#, "temperature"),
            (r#"{"temperature":2.1}"#, "temperature"),
            (r#"{"temperature":"hot"}"#, "temperature"),
            (r#"{"top_p":1.5}"#, "top_p"),
            (r#"{"top_p":-0.1}"#, "top_p"),
            (r#"{"top_k":-2}"#, "top_k"),
            (r#"{"min_p":1.01}"#, "min_p"),
            (r#"{"repetition_penalty":0}"#, "repetition_penalty"),
            (r#"{"presence_penalty":2.5}"#, "presence_penalty"),
            (r#"{"frequency_penalty":-2.5}"#, "frequency_penalty"),
            (r#"{"n":0}"#, "n"),
            (r#"{"n":129}"#, "n"),
            (r#"{"n":100000}"#, "n"),
            (r#"{"best_of":2}"#, "best_of"),
            (r#"{"stop":[""]}"#, "stop"),
            (r#"{"stop":7}"#, "stop"),
            (r#"{"stop":["1","2","3","4","5","6","7","8","9"]}"#, "stop"),
            (r#"{"stream_options":{}}"#, "stream_options"),
            (r#"{"stream":true,"stream_options":{"include_usage":1}}"#, "stream_options.include_usage"),
            (r#"{"stream":true,"stream_options":{"include_obfuscation":"no"}}"#, "stream_options.include_obfuscation"),
            (r#"{"stream":true,"stream_options":{"usage":true}}"#, "stream_options.usage"),
            (r#"{"logit_bias":{"abc":1}}"#, "logit_bias"),
            (r#"{"logit_bias":{"-1":1}}"#, "logit_bias"),
            (r#"{"logit_bias":{"99999999":1}}"#, "logit_bias"),
            (r#"{"logit_bias":{"1":"x"}}"#, "logit_bias"),
            (r#"{"stop_token_ids":[1000000000]}"#, "stop_token_ids"),
            (r#"{"stop_token_ids":[-1]}"#, "stop_token_ids"),
            (r#"{"stop_token_ids":["a"]}"#, "stop_token_ids[0]"),
            (r#"{"suffix":"x"}"#, "suffix"),
            (r#"{"store":true}"#, "store"),
            (r#"{"modalities":["audio"]}"#, "modalities"),
            (r#"{"response_format":{"type":"json_schema"}}"#, "response_format"),
            (r#"{"guided_whitespace_pattern":" "}"#, "guided_whitespace_pattern"),
            (r#"{"deadline_ms":0}"#, "deadline_ms"),
        ] {
            let error = check(body).expect_err(body);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{body}: {error}");
        }
    }

    #[test]
    fn a_bias_outside_the_range_is_clamped() {
        assert_eq!(check(r#"{"logit_bias":{"11":1000,"3":-1e9}}"#).expect("clamped").sampling.logit_bias, [(3, -100.0), (11, 100.0)]);
    }

    #[test]
    fn neutral_values_of_unsupported_fields_are_accepted() {
        let body = r#"{"suffix":"","store":false,"service_tier":"auto","modalities":["text"],"best_of":1,"user":"u",
            "response_format":{"type":"text"},"guided_json_object":false,"top_p":0,"top_k":-1}"#;
        let common = check(body).expect("neutral");
        assert_eq!((common.sampling.top_p, common.sampling.top_k), (0.0, 0));
    }

    #[test]
    fn an_absent_seed_is_random_and_a_given_one_is_kept() {
        assert_eq!(check(r#"{"seed":-1}"#).expect("seed").sampling.seed, u64::MAX);
        assert_ne!(check("{}").expect("random").sampling.seed, check("{}").expect("random").sampling.seed);
    }
}
