//! `replay`: draws the tokens of journaled requests again and names the first difference.

use super::error::CliError;
use super::output;
use crate::grammar::{Constraint, Grammars};
use crate::journal::{Entry, Finish, journal_files};
use crate::model::{LoadOptions, LoadedModel};
use clap::Args as ClapArgs;
use oxide_runtime::engine::{EngineEvent, EngineRequest, EventStream, FinishReason, MaskFactory};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Requests under way together, for each sequence that the bundle runs.
const AHEAD: usize = 2;

/// Options of `replay`.
#[derive(Clone, Debug, ClapArgs)]
pub(super) struct ReplayArgs {
    /// Journal file, or a folder of them
    #[arg(value_name = "FILE")]
    pub(super) path: PathBuf,
    /// Also replay entries that another bundle wrote
    #[arg(long)]
    pub(super) any_seal: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// What was replayed and how it compares.
#[derive(Debug, Default)]
struct Report {
    entries: u64,
    choices: u64,
    tokens: u64,
    /// Of the entries, those under a constraint.
    constrained: u64,
    /// Choices that differ.
    differences: u64,
    first: Option<Difference>,
    warnings: Vec<String>,
}

/// Where a choice first differs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Difference {
    place: String,
    id: String,
    choice: usize,
    token: usize,
    journaled: String,
    replayed: String,
}

/// An entry whose tokens are being drawn again.
struct Pending {
    place: String,
    entry: Entry,
    stream: EventStream,
    drawn: Vec<Drawn>,
}

/// What the replay drew for one choice.
#[derive(Clone, Debug, Default)]
struct Drawn {
    ids: Vec<u32>,
    end: Option<FinishReason>,
}

pub(super) fn run(args: &ReplayArgs, load: &LoadOptions) -> Result<(), CliError> {
    let files = files(&args.path)?;
    let model = LoadedModel::load(load)?;
    let report = replay(&model, &files, args.any_seal)?;
    output::report(args.json, &report.to_json(), || report.text())?;
    match &report.first {
        None => Ok(()),
        Some(first) => {
            Err(CliError::Replay(format!("{} of {} choices differ; first {}", report.differences, report.choices, first.text())))
        }
    }
}

fn files(path: &Path) -> Result<Vec<PathBuf>, CliError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let files = journal_files(path).map_err(|error| input(path, &error))?;
    if files.is_empty() { Err(input(path, &"holds no journal-*.jsonl file")) } else { Ok(files) }
}

fn input(path: &Path, reason: &dyn std::fmt::Display) -> CliError {
    CliError::Input { path: path.display().to_string(), reason: reason.to_string() }
}

fn replay(model: &LoadedModel, files: &[PathBuf], any_seal: bool) -> Result<Report, CliError> {
    let mut report = Report::default();
    let mut pending = VecDeque::new();
    let masks = Masks::new(model)?;
    let ahead = AHEAD * model.engine.limits().seqs_max.max(1) as usize;
    for file in files {
        let mut lines = BufReader::new(File::open(file).map_err(|error| input(file, &error))?).lines().enumerate().peekable();
        while let Some((number, line)) = lines.next() {
            let line = line.map_err(|error| input(file, &error))?;
            let place = format!("{}:{}", file.display(), number + 1);
            let entry = match Entry::parse(&line) {
                Ok(entry) => entry,
                // A server that was killed leaves its last line torn.
                Err(reason) if lines.peek().is_none() && number > 0 => {
                    report.warnings.push(format!("{place}: the last line is left out: {reason}"));
                    continue;
                }
                Err(reason) => return Err(CliError::Input { path: place, reason }),
            };
            check_seal(model, &place, &entry, any_seal)?;
            pending.push_back(Pending::submit(model, &masks, place, entry)?);
            if pending.len() >= ahead {
                report.settle(pending.pop_front())?;
            }
        }
    }
    while !pending.is_empty() {
        report.settle(pending.pop_front())?;
    }
    match files.first() {
        Some(file) if report.entries == 0 => Err(input(file, &"holds no entry: nothing was compared")),
        _ => Ok(report),
    }
}

fn check_seal(model: &LoadedModel, place: &str, entry: &Entry, any_seal: bool) -> Result<(), CliError> {
    let seal = model.bundle.seal().to_string();
    if any_seal || entry.seal == seal {
        return Ok(());
    }
    Err(CliError::Request(format!(
        "{place}: the entry is of bundle {}, this is {seal}: replay it with its own bundle, or give --any-seal to compare the two",
        entry.seal
    )))
}

impl Pending {
    fn submit(model: &LoadedModel, masks: &Masks, place: String, entry: Entry) -> Result<Self, CliError> {
        let refused = |reason: &dyn std::fmt::Display| CliError::Request(format!("{place}: {reason}"));
        let mask = entry.constraint.as_ref().map(|constraint| masks.of(constraint, entry.max_tokens)).transpose();
        let mask = mask.map_err(|reason| refused(&reason))?;
        let request = EngineRequest { mask, ..entry.request() };
        let stream = model.engine.submit(request).map_err(|reason| refused(&reason))?;
        Ok(Self { drawn: vec![Drawn::default(); entry.choices.len()], place, entry, stream })
    }

    /// Draws until every choice is as long as it was, and has ended if it shall; no further.
    fn draw(&mut self) -> Result<(), CliError> {
        while !self.is_complete() {
            match self.stream.blocking_recv() {
                None => return Ok(()),
                Some(EngineEvent::Token { choice, id, .. }) => self.drawn(choice).into_iter().for_each(|drawn| drawn.ids.push(id)),
                Some(EngineEvent::Finished { choice, reason, .. }) => {
                    self.drawn(choice).into_iter().for_each(|drawn| drawn.end = Some(reason))
                }
                Some(EngineEvent::Failed { message, .. }) => return Err(CliError::Engine(format!("{}: {message}", self.place))),
                Some(EngineEvent::Rejected(reason)) => return Err(CliError::Request(format!("{}: {reason}", self.place))),
                Some(EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. }) => {}
            }
        }
        Ok(())
    }

    fn drawn(&mut self, choice: u32) -> Option<&mut Drawn> {
        self.drawn.get_mut(choice as usize)
    }

    fn is_complete(&self) -> bool {
        self.entry
            .choices
            .iter()
            .zip(&self.drawn)
            .all(|(choice, drawn)| drawn.end.is_some() || (!choice.finish.is_determined() && drawn.ids.len() >= choice.ids.len()))
    }

    /// The first difference of each choice that has one.
    fn differences(&self) -> impl Iterator<Item = Difference> {
        self.drawn.iter().enumerate().filter_map(|(index, drawn)| {
            let choice = self.entry.choices.get(index)?;
            let (token, journaled, replayed) = compare(&choice.ids, choice.finish, drawn)?;
            Some(Difference { place: self.place.clone(), id: self.entry.id.clone(), choice: index, token, journaled, replayed })
        })
    }
}

/// Makes the masks of journaled constraints.
struct Masks {
    grammars: Arc<Grammars>,
    runtime: tokio::runtime::Runtime,
}

impl Masks {
    fn new(model: &LoadedModel) -> Result<Self, CliError> {
        let grammars = Grammars::new(Arc::clone(&model.text.tokenizer), model.eos());
        Ok(Self { grammars, runtime: tokio::runtime::Builder::new_current_thread().enable_time().build()? })
    }

    fn of(&self, constraint: &Constraint, max_tokens: u32) -> Result<MaskFactory, String> {
        let compiled = self.runtime.block_on(self.grammars.compile_apart(constraint.clone()));
        compiled.map(|compiled| compiled.masks(max_tokens)).map_err(|error| error.to_string())
    }
}

/// Where and how two outputs differ, if they do.
fn compare(ids: &[u32], finish: Finish, drawn: &Drawn) -> Option<(usize, String, String)> {
    let agree = ids.iter().zip(&drawn.ids).take_while(|(a, b)| a == b).count();
    let end = |reason: Option<FinishReason>| reason.map_or("nothing".to_owned(), |reason| format!("the end ({reason:?})").to_lowercase());
    let same_end = match finish {
        Finish::Stop => drawn.end == Some(FinishReason::Stop),
        Finish::Length => drawn.end == Some(FinishReason::Length),
        Finish::Text | Finish::Deadline | Finish::Aborted | Finish::Cut => true,
    };
    let same_length = !finish.is_determined() || drawn.ids.len() == ids.len();
    if agree == ids.len() && same_length && same_end {
        return None;
    }
    let journaled = ids.get(agree).map_or_else(|| format!("the end ({finish:?})").to_lowercase(), u32::to_string);
    let replayed = drawn.ids.get(agree).map_or_else(|| end(drawn.end), u32::to_string);
    Some((agree, journaled, replayed))
}

impl Difference {
    fn text(&self) -> String {
        let Self { place, id, choice, token, journaled, replayed } = self;
        format!("at {place} ({id}), choice {choice}, token {token}: {journaled} was journaled, {replayed} is drawn now")
    }

    fn to_json(&self) -> Value {
        let Self { place, id, choice, token, journaled, replayed } = self;
        json!({"place": place, "id": id, "choice": choice, "token": token, "journaled": journaled, "replayed": replayed})
    }
}

impl Report {
    fn settle(&mut self, pending: Option<Pending>) -> Result<(), CliError> {
        let Some(mut pending) = pending else { return Ok(()) };
        pending.draw()?;
        self.entries += 1;
        self.constrained += u64::from(pending.entry.constraint.is_some());
        self.choices += pending.entry.choices.len() as u64;
        self.tokens += pending.entry.choices.iter().map(|choice| choice.ids.len() as u64).sum::<u64>();
        for difference in pending.differences() {
            self.differences += 1;
            self.first.get_or_insert(difference);
        }
        Ok(())
    }

    fn to_json(&self) -> Value {
        json!({
            "entries": self.entries, "choices": self.choices, "tokens": self.tokens, "constrained": self.constrained,
            "differences": self.differences, "first_difference": self.first.as_ref().map(Difference::to_json), "warnings": self.warnings,
        })
    }

    fn text(&self) -> String {
        let mut text = self.warnings.iter().map(|warning| format!("warning: {warning}\n")).collect::<String>();
        text.push_str(&format!("replayed   {} entries, {} choices, {} tokens\n", self.entries, self.choices, self.tokens));
        text.push_str(&match &self.first {
            None => "result     every token is the same\n".to_owned(),
            Some(first) => format!("result     {} choices differ; first {}\n", self.differences, first.text()),
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(ids: &[u32], end: Option<FinishReason>) -> Drawn {
        Drawn { ids: ids.to_vec(), end }
    }

    #[test]
    fn the_first_difference_is_named() {
        let stop = Some(FinishReason::Stop);
        assert_eq!(compare(&[1, 2], Finish::Stop, &drawn(&[1, 2], stop)), None);
        assert_eq!(compare(&[1, 2], Finish::Text, &drawn(&[1, 2, 3], None)), None, "a stop string cut it; what follows is not compared");
        let differs = |ids: &[u32], finish, now: Drawn| compare(ids, finish, &now).expect("differs");
        assert_eq!(differs(&[1, 2], Finish::Stop, drawn(&[1, 3], stop)), (1, "2".into(), "3".into()));
        assert_eq!(differs(&[1, 2], Finish::Length, drawn(&[1], stop)), (1, "2".into(), "the end (stop)".into()));
        assert_eq!(differs(&[1], Finish::Stop, drawn(&[1, 4], None)), (1, "the end (stop)".into(), "4".into()));
        assert_eq!(differs(&[1], Finish::Stop, drawn(&[1], Some(FinishReason::Length))).0, 1);
        assert_eq!(differs(&[1, 2], Finish::Cut, drawn(&[1], stop)).2, "the end (stop)");
    }
}
