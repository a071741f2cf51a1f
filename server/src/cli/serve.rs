//! `serve`: hands the loader and the options to the HTTP server.

use super::args::ServeArgs;
use super::error::CliError;
use super::golden::run_golden;
use super::paths::refuse_overwriting;
use super::policy::Policy;
use super::tools;
use crate::http::{ServeError, ServeOptions, serve};
use crate::journal::JournalOptions;
use crate::model::{LoadError, LoadOptions, LoadedModel};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) fn run(args: &ServeArgs, load: LoadOptions) -> Result<(), CliError> {
    start_logging(args.log_json);
    let options = serve_options(args)?;
    if let Some(path) = &args.port_file {
        let named = args.require_key.iter().chain(&args.policy).chain(&args.api_key_file).chain([&load.path]);
        refuse_overwriting(path, named.map(PathBuf::as_path))?;
    }
    let self_test = args.self_test;
    let trusted = tools::public_keys(&args.require_key)?;
    let policy = args.policy.as_deref().map(Policy::read).transpose()?;
    let loader = move || -> anyhow::Result<LoadedModel> {
        let load = if trusted.is_empty() { load } else { tools::require_signer(load, &trusted)? };
        let load = policy.map_or(Ok(load.clone()), |policy| policy.enforce(load))?;
        let model = LoadedModel::load(&load)?;
        if self_test {
            run_golden(&model)?.into_result()?;
        }
        Ok(model)
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(options, loader)).map_err(serve_error)
}

/// A loader's error keeps its own exit code.
fn serve_error(error: ServeError) -> CliError {
    match error {
        ServeError::Load(error) => match error.downcast::<LoadError>() {
            Ok(error) => CliError::Load(error),
            Err(error) => error.downcast::<CliError>().unwrap_or_else(|error| CliError::Serve(format!("{error:#}"))),
        },
        ServeError::Engine(message) => CliError::Engine(message),
        other => CliError::Serve(other.to_string()),
    }
}

fn start_logging(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    // A log that nobody reads any more costs the log, not the server: reporting its failure would panic.
    let builder = tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    if json { builder.json().init() } else { builder.init() }
}

fn serve_options(args: &ServeArgs) -> Result<ServeOptions, CliError> {
    let mut api_keys = args.api_key.clone();
    // What is sent is read without the spaces around it.
    if api_keys.iter().any(|key| key.is_empty() || key.trim_ascii() != key) {
        return Err(CliError::Usage("--api-key is empty or has spaces around it: no client could send it".into()));
    }
    if let Some(path) = &args.api_key_file {
        api_keys.extend(read_keys(path)?);
    }
    let mut options = ServeOptions {
        host: args.host,
        port: args.port,
        port_file: args.port_file.clone(),
        model_name: args.model_name.clone(),
        api_keys,
        requests_per_key_max: args.requests_per_key,
        strict: args.strict,
        neutral_sampling: args.openai_defaults,
        clamp_max_tokens: args.clamp_max_tokens,
        body_bytes_max: usize::try_from(args.body_limit).unwrap_or(usize::MAX),
        connections_max: args.connections,
        keep_alive: seconds("--keep-alive-seconds", args.keep_alive_seconds)?,
        drain: seconds("--drain-seconds", args.drain_seconds)?,
        choices_max: args.max_choices,
        prompts_max: args.max_prompts,
        stops_max: args.max_stops,
        deadline_default: args.deadline_seconds.map(|s| seconds("--deadline-seconds", s)).transpose()?,
        queue_time_max: args.max_queue_seconds.map(|s| seconds("--max-queue-seconds", s)).transpose()?,
        journal: args.journal.clone().map(|folder| JournalOptions {
            folder,
            file_bytes_max: args.journal_file_size,
            files_max: args.journal_files as usize,
        }),
        ..ServeOptions::default()
    };
    if !args.cors_origin.is_empty() {
        options.cors_origins.clone_from(&args.cors_origin);
    }
    Ok(options)
}

fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let input = |reason: String| CliError::Input { path: path.display().to_string(), reason };
    let text = std::fs::read_to_string(path).map_err(|e| input(e.to_string()))?;
    let keys: Vec<String> = text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect();
    if keys.is_empty() { Err(input("has no key: write one a line".into())) } else { Ok(keys) }
}

fn seconds(flag: &str, value: f64) -> Result<Duration, CliError> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| CliError::Usage(format!("{flag} {value}: give a number of seconds that is not negative")))
}
