//! `generate`: completes one prompt, or a file of them batched together.

use super::args::{GenerateArgs, SamplingArgs};
use super::complete::{Completion, Follower, follow};
use super::error::CliError;
use super::output;
use super::sampling::{request, sampling};
use crate::model::{LoadOptions, LoadedModel};
use crate::openai::chat_request::take_messages;
use crate::openai::fields::Fields;
use oxide_runtime::engine::EngineRequest;
use oxide_text::{ChatInput, DecodeOptions, UtcTime};
use serde_json::{Map, Value, json};
use std::collections::{BTreeSet, VecDeque};
use std::io::Read;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Completion tokens when none are asked for.
const MAX_TOKENS_DEFAULT: u32 = 128;

/// Fields of a line of a file of prompts.
const FIELDS: [&str; 15] = [
    "messages",
    "prompt",
    "prompt_ids",
    "ids",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
];

/// A prompt, and what its line says differently from the flags.
struct Job {
    prompt: Prompt,
    sampling: SamplingArgs,
}

enum Prompt {
    Text(String),
    Ids(Vec<i64>),
    Messages(Value),
}

pub(super) fn run(args: &GenerateArgs, load: &LoadOptions) -> Result<(), CliError> {
    let jobs = jobs(args)?;
    let model = LoadedModel::load(load)?;
    let requests: Vec<EngineRequest> =
        jobs.iter().enumerate().map(|(index, job)| engine_request(&model, args, job, index)).collect::<Result<_, _>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        tokio::select! {
            done = complete_all(&model, args, requests) => done,
            _ = tokio::signal::ctrl_c() => Err(CliError::Interrupted),
        }
    });
    // However it ended: the device is given back before the process ends.
    model.engine.stop();
    model.engine.join();
    done
}

/// Submits everything at once, then reports in order.
async fn complete_all(model: &LoadedModel, args: &GenerateArgs, requests: Vec<EngineRequest>) -> Result<(), CliError> {
    let many = args.prompts_file.is_some();
    let mut running = VecDeque::new();
    for request in requests {
        let follower = Follower::new(model, request.prompt.len(), decode_options(args), &request.stop_ids);
        running.push_back((model.engine.submit(request)?, follower));
    }
    let mut index = 0;
    while let Some((stream, follower)) = running.pop_front() {
        let live = !args.json && !many;
        let done = follow(stream, follower, |text| if live && !text.is_empty() { output::text(text) } else { Ok(()) }).await?;
        match (live, many) {
            (true, _) => output::line("")?,
            (false, true) => report_line(args, index, &done)?,
            (false, false) => output::json(&done.to_json())?,
        }
        index += 1;
    }
    Ok(())
}

fn report_line(args: &GenerateArgs, index: usize, done: &Completion) -> Result<(), CliError> {
    match args.json {
        true => {
            let mut value = done.to_json();
            value["index"] = json!(index);
            output::json(&value)
        }
        false => output::line(&format!("[{index}] {}", done.text)),
    }
}

fn decode_options(args: &GenerateArgs) -> DecodeOptions {
    DecodeOptions { stop: args.sampling.stop.clone(), include_stop: false, skip_special: !args.keep_special }
}

fn engine_request(model: &LoadedModel, args: &GenerateArgs, job: &Job, index: usize) -> Result<EngineRequest, CliError> {
    let named = |error: CliError| match (error, args.prompts_file.is_some()) {
        (CliError::Request(message), true) => CliError::Request(format!("line {}: {message}", index + 1)),
        (error, _) => error,
    };
    let prompt = prompt_ids(model, args, &job.prompt).map_err(named)?;
    let params = sampling(&job.sampling, &model.manifest().generation).map_err(named)?;
    let max_tokens = job.sampling.max_tokens.or_else(|| default_max_tokens(model, prompt.len()));
    request(model, format!("cli-{index}"), prompt, &job.sampling, params, max_tokens).map_err(named)
}

fn default_max_tokens(model: &LoadedModel, prompt_tokens: usize) -> Option<u32> {
    let room = (model.engine.limits().context_max as usize).saturating_sub(prompt_tokens);
    (room > MAX_TOKENS_DEFAULT as usize).then_some(MAX_TOKENS_DEFAULT)
}

fn prompt_ids(model: &LoadedModel, args: &GenerateArgs, prompt: &Prompt) -> Result<Vec<u32>, CliError> {
    let known = model.engine.limits().vocab_known;
    let refused = |error: &dyn std::fmt::Display| CliError::Request(error.to_string());
    match prompt {
        Prompt::Ids(ids) => ids
            .iter()
            .map(|&id| match u32::try_from(id) {
                Ok(id) if id < known => Ok(id),
                _ => Err(CliError::Request(format!("token id {id} is outside the vocabulary: ids are 0 to {}", known.saturating_sub(1)))),
            })
            .collect(),
        Prompt::Text(text) if args.chat => chat_ids(model, json!([{"role": "user", "content": text}])),
        Prompt::Text(text) => model.text.tokenizer.encode_prompt(text).map_err(|e| refused(&e)),
        Prompt::Messages(messages) => chat_ids(model, messages.clone()),
    }
}

/// Ids of a conversation, ready for the assistant's answer.
pub(super) fn chat_ids(model: &LoadedModel, messages: Value) -> Result<Vec<u32>, CliError> {
    let Some(template) = &model.text.template else {
        return Err(CliError::Request("this bundle has no chat template: it is a base model, use `generate` with a plain prompt".into()));
    };
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() as i64);
    let input = ChatInput { now: UtcTime::from_unix_seconds(seconds), ..ChatInput::new(messages) };
    let rendered = template.render(&input).map_err(|e| CliError::Request(e.to_string()))?;
    rendered.encode(&model.text.tokenizer).map_err(|e| CliError::Request(e.to_string()))
}

fn jobs(args: &GenerateArgs) -> Result<Vec<Job>, CliError> {
    let one = |prompt| vec![Job { prompt, sampling: args.sampling.clone() }];
    let text = args.prompt.as_ref().or(args.text.as_ref());
    match (text, &args.prompt_ids, &args.prompts_file) {
        (Some(text), _, _) => Ok(one(Prompt::Text(text.clone()))),
        (_, Some(ids), _) => Ok(one(Prompt::Ids(ids.clone()))),
        (_, _, Some(path)) => read_jobs(args, path),
        (None, None, None) if output::input_is_terminal() => {
            Err(CliError::Usage("no prompt: give one as an argument, with --prompt-ids, --prompts-file, or on standard input".into()))
        }
        (None, None, None) => Ok(one(Prompt::Text(read_input(Path::new("-"))?))),
    }
}

fn read_input(path: &Path) -> Result<String, CliError> {
    let mut text = String::new();
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().read_to_string(&mut text).map(|_| ()),
        false => std::fs::read_to_string(path).map(|content| text = content),
    };
    read.map_err(|error| CliError::Input { path: path.display().to_string(), reason: error.to_string() })?;
    Ok(text)
}

fn read_jobs(args: &GenerateArgs, path: &Path) -> Result<Vec<Job>, CliError> {
    let text = read_input(path)?;
    let mut told = BTreeSet::new();
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let jobs: Vec<Job> = lines
        .map(|(number, line)| {
            let input =
                |reason: String| CliError::Input { path: path.display().to_string(), reason: format!("line {}: {reason}", number + 1) };
            let value: Value = serde_json::from_str(line).map_err(|e| input(format!("not JSON: {e}")))?;
            note_unread(&value, number + 1, &mut told);
            read_job(args, &value).map_err(input)
        })
        .collect::<Result<_, _>>()?;
    if jobs.is_empty() { Err(CliError::Input { path: path.display().to_string(), reason: "has no prompt".into() }) } else { Ok(jobs) }
}

fn read_job(args: &GenerateArgs, value: &Value) -> Result<Job, String> {
    let mut sampling = args.sampling.clone();
    let prompt = match value {
        Value::Object(fields) => {
            read_overrides(&mut sampling, value)?;
            let given = |name: &&str| fields.get(*name).is_some_and(|value| !value.is_null());
            let sources: Vec<&str> = ["messages", "prompt", "prompt_ids", "ids"].into_iter().filter(given).collect();
            match *sources {
                ["messages"] => read_messages(fields)?,
                [name] => read_prompt(fields.get(name).unwrap_or(&Value::Null))?,
                [one, other, ..] => return Err(format!("the object has both `{one}` and `{other}`: give one")),
                [] => return Err("the object has none of `prompt`, `prompt_ids` and `messages`".into()),
            }
        }
        other => read_prompt(other)?,
    };
    Ok(Job { prompt, sampling })
}

/// Says once for each name which fields of the file are not read, so that none is ignored in silence.
fn note_unread(value: &Value, line: usize, told: &mut BTreeSet<String>) {
    let fields = value.as_object().into_iter().flat_map(|fields| fields.keys());
    for name in fields.filter(|name| !FIELDS.contains(&name.as_str())) {
        if told.insert(name.clone()) {
            output::note(&format!("line {line}: the field `{name}` is not read"));
        }
    }
}

/// A conversation, checked and put into the template's form as one of a request is.
fn read_messages(fields: &Map<String, Value>) -> Result<Prompt, String> {
    let messages = take_messages(&mut Fields::of(fields.clone())).map_err(|error| error.message)?;
    Ok(Prompt::Messages(Value::Array(messages)))
}

fn read_prompt(value: &Value) -> Result<Prompt, String> {
    match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(ids) => {
            let ids: Option<Vec<i64>> = ids.iter().map(Value::as_i64).collect();
            ids.map(Prompt::Ids).ok_or_else(|| "the list holds something else than token ids".into())
        }
        _ => Err("a prompt is a string or a list of token ids".into()),
    }
}

fn read_overrides(sampling: &mut SamplingArgs, fields: &Value) -> Result<(), String> {
    let number = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_f64().map(Some).ok_or_else(|| format!("`{name}` is not a number")),
    };
    let whole = |name: &str| match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or_else(|| format!("`{name}` is not a whole number")),
    };
    let small = |name: &str| whole(name)?.map(u32::try_from).transpose().map_err(|_| format!("`{name}` is too large"));
    sampling.max_tokens = small("max_tokens")?.or(sampling.max_tokens);
    sampling.top_k = small("top_k")?.or(sampling.top_k);
    sampling.seed = whole("seed")?.or(sampling.seed);
    sampling.temperature = number("temperature")?.map(|n| n as f32).or(sampling.temperature);
    sampling.top_p = number("top_p")?.map(|n| n as f32).or(sampling.top_p);
    sampling.min_p = number("min_p")?.map(|n| n as f32).or(sampling.min_p);
    sampling.repetition_penalty = number("repetition_penalty")?.map(|n| n as f32).or(sampling.repetition_penalty);
    sampling.presence_penalty = number("presence_penalty")?.map_or(sampling.presence_penalty, |n| n as f32);
    sampling.frequency_penalty = number("frequency_penalty")?.map_or(sampling.frequency_penalty, |n| n as f32);
    sampling.min_tokens = small("min_tokens")?.unwrap_or(sampling.min_tokens);
    sampling.ignore_eos = match fields.get("ignore_eos") {
        None | Some(Value::Null) => sampling.ignore_eos,
        Some(value) => value.as_bool().ok_or("`ignore_eos` is not true or false")?,
    };
    Ok(())
}
