//! `chat`: a conversation in the terminal, or from a pipe (one message a line).
//!
//! Each turn renders the whole conversation; the engine finds the earlier turns in its prefix cache.
//! Ctrl-C stops an answer (what was said so far stays), and leaves at the prompt. Lines are edited by the
//! terminal itself; a line that ends in `\` continues, and `"""` opens and closes a message of several lines.

use super::args::ChatArgs;
use super::complete::{Completion, Follower, Progress};
use super::error::CliError;
use super::generate::chat_ids;
use super::output;
use super::sampling::{request, sampling};
use crate::model::{LoadOptions, LoadedModel};
use oxide_runtime::engine::SamplingParams;
use oxide_text::DecodeOptions;
use serde_json::{Value, json};
use std::io::BufRead;
use tokio::sync::mpsc;

const HELP: &str =
    "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer; end a line with \\ to continue it, or use \"\"\"";

/// The conversation so far.
struct Session<'a> {
    model: &'a LoadedModel,
    args: &'a ChatArgs,
    params: SamplingParams,
    messages: Vec<Value>,
    turn: usize,
}

pub(super) fn run(args: &ChatArgs, load: &LoadOptions) -> Result<(), CliError> {
    let model = LoadedModel::load(load)?;
    let params = sampling(&args.sampling, &model.manifest().generation)?;
    chat_ids(&model, json!([{"role": "user", "content": "hi"}]))?;
    let mut session = Session { model: &model, args, params, messages: Vec::new(), turn: 0 };
    session.reset();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(talk(&mut session));
    // The thread that reads standard input may be blocked in a read; it ends with the process.
    runtime.shutdown_background();
    model.engine.stop();
    model.engine.join();
    result
}

async fn talk(session: &mut Session<'_>) -> Result<(), CliError> {
    let interactive = output::input_is_terminal();
    if interactive {
        let manifest = session.model.manifest();
        output::note(&format!("{} on {}. {HELP}", manifest.name, session.model.device.name));
    }
    let mut lines = read_lines();
    loop {
        if interactive {
            output::text("> ")?;
        }
        let message = tokio::select! {
            message = read_message(&mut lines, interactive) => message?,
            _ = tokio::signal::ctrl_c() => None,
        };
        match message.as_deref().map(str::trim) {
            None | Some("/exit" | "/quit") => return Ok(()),
            Some("") => {}
            Some("/reset") => session.reset(),
            Some("/help") => output::note(HELP),
            Some(command) if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                output::note(&format!("unknown command {command}. {HELP}"));
            }
            Some(text) => session.answer(text).await?,
        }
    }
}

impl Session<'_> {
    fn reset(&mut self) {
        self.messages = self.args.system.iter().map(|system| json!({"role": "system", "content": system})).collect();
    }

    /// Adds a user message and prints the answer. A refused message is taken back and reported; the conversation goes on.
    async fn answer(&mut self, text: &str) -> Result<(), CliError> {
        self.messages.push(json!({"role": "user", "content": text}));
        match self.generate().await {
            Ok(done) => {
                output::line("")?;
                self.messages.push(json!({"role": "assistant", "content": done.text}));
                Ok(())
            }
            Err(error @ (CliError::Request(_) | CliError::Rejected(_))) => {
                self.messages.pop();
                output::note(&format!("{error} (/reset starts over)"));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn generate(&mut self) -> Result<Completion, CliError> {
        let prompt = chat_ids(self.model, Value::Array(self.messages.clone()))?;
        self.turn += 1;
        let args = &self.args.sampling;
        let mut params = self.params.clone();
        params.seed = params.seed.wrapping_add(self.turn as u64 - 1);
        let request = request(self.model, format!("chat-{}", self.turn), prompt, args, params, args.max_tokens)?;
        let options = DecodeOptions { stop: args.stop.clone(), include_stop: false, skip_special: true };
        let mut follower = Follower::new(self.model, request.prompt.len(), options, &request.stop_ids);
        let mut stream = self.model.engine.submit(request)?;
        loop {
            let event = tokio::select! {
                event = stream.recv() => event,
                _ = tokio::signal::ctrl_c() => {
                    stream.cancel();
                    continue;
                }
            };
            let Some(event) = event else { break };
            match follower.take(event)? {
                Progress::Text(text) => output::text(&text)?,
                Progress::End(text) => {
                    output::text(&text)?;
                    break;
                }
            }
        }
        Ok(follower.into_completion())
    }
}

/// Lines of standard input from a thread of their own: reading must not stop Ctrl-C or an answer.
fn read_lines() -> mpsc::Receiver<std::io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// One message: a line, continued lines, or a block between `"""`. `None` at the end of input.
async fn read_message(lines: &mut mpsc::Receiver<std::io::Result<String>>, interactive: bool) -> Result<Option<String>, CliError> {
    let mut message = String::new();
    let mut in_block = false;
    loop {
        let Some(line) = lines.recv().await.transpose()? else {
            return Ok((!message.is_empty()).then_some(message));
        };
        let fence = line.trim() == "\"\"\"";
        match (in_block, fence, line.strip_suffix('\\')) {
            (true, true, _) => return Ok(Some(message)),
            (false, true, _) => in_block = true,
            (true, false, _) => message += &(line + "\n"),
            (false, false, Some(start)) => message += &(start.to_owned() + "\n"),
            (false, false, None) => return Ok(Some(message + &line)),
        }
        if interactive {
            output::text("… ")?;
        }
    }
}
