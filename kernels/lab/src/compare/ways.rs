//! The ways that a reference's prompts are run.

use super::reference::Prompt;
use anyhow::{Context, bail};
use oxide_runtime::engine::{EngineEvent, EngineHandle, EngineRequest, EventStream, SamplingParams, TokenLogprobs};

/// Alternatives asked for with log-probabilities.
const TOP: u32 = 5;

/// How prompts are run.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// One after the other, on an empty cache.
    Alone,
    /// All together, repeated until the batch is full, each on its own cache.
    Batch,
    /// All together, on the pages that the runs alone left.
    Prefix,
    /// All together beside copies that are cancelled after their first token, then again on what those left.
    Cancelled,
}

impl Way {
    /// Every way, in an order that uses the cache before a full batch evicts it.
    pub(super) const ALL: [Self; 4] = [Self::Alone, Self::Prefix, Self::Batch, Self::Cancelled];

    /// Its name in reports.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Batch => "in a full batch",
            Self::Prefix => "with prefix hits",
            Self::Cancelled => "after cancellation",
        }
    }
}

/// What the engine answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub(super) ids: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) cached_tokens: u32,
}

/// Runs prompts on an engine.
pub(super) struct Runner<'a> {
    pub(super) engine: &'a EngineHandle,
    pub(super) prompts: &'a [Prompt],
    pub(super) logprobs: bool,
}

impl Runner<'_> {
    /// Runs every prompt in one way; answers come with the prompt's index, some prompts more than once.
    ///
    /// # Errors
    /// If the engine refuses or fails a request.
    pub(super) fn run(&self, way: Way, batch: u32) -> anyhow::Result<Vec<(usize, Answer)>> {
        match way {
            Way::Alone => self.each().map(|prompt| Ok((prompt, finish(self.submit(prompt, &salt(way, 0))?)?))).collect(),
            Way::Batch => {
                let copies = (batch as usize).max(self.prompts.len());
                self.together((0..copies).map(|copy| (copy % self.prompts.len(), salt(way, copy + 1))))
            }
            Way::Prefix => self.together(self.each().map(|prompt| (prompt, salt(Way::Alone, 0)))),
            Way::Cancelled => self.beside_cancelled(),
        }
    }

    fn each(&self) -> std::ops::Range<usize> {
        0..self.prompts.len()
    }

    fn submit(&self, prompt: usize, salt: &[u8]) -> anyhow::Result<EventStream> {
        let Prompt { name, prompt_ids, greedy_f32, .. } = &self.prompts[prompt];
        let id = format!("{name}-{}", salt.iter().map(u8::to_string).collect::<Vec<_>>().join("-"));
        let request = EngineRequest {
            sampling: SamplingParams { logprobs: self.logprobs.then_some(TOP), ..SamplingParams::default() },
            cache_salt: salt.to_vec(),
            ..EngineRequest::greedy(id, prompt_ids.clone(), greedy_f32.len() as u32)
        };
        self.engine.submit(request).with_context(|| format!("the engine refused prompt `{name}`"))
    }

    /// Submits all before any runs, so that they share steps.
    fn together(&self, requests: impl Iterator<Item = (usize, Vec<u8>)>) -> anyhow::Result<Vec<(usize, Answer)>> {
        self.engine.pause();
        let streams: anyhow::Result<Vec<_>> = requests.map(|(prompt, salt)| Ok((prompt, self.submit(prompt, &salt)?))).collect();
        self.engine.resume();
        streams?.into_iter().map(|(prompt, stream)| Ok((prompt, finish(stream)?))).collect()
    }

    fn beside_cancelled(&self) -> anyhow::Result<Vec<(usize, Answer)>> {
        let way = Way::Cancelled;
        self.engine.pause();
        let submit = |copy| self.each().map(|prompt| self.submit(prompt, &salt(way, copy))).collect::<anyhow::Result<Vec<_>>>();
        let (victims, streams) = (submit(1), submit(2));
        self.engine.resume();
        for mut victim in victims? {
            first_token(&mut victim)?;
            victim.cancel();
            ended(victim)?;
        }
        let mut answers: Vec<(usize, Answer)> =
            streams?.into_iter().enumerate().map(|(prompt, stream)| Ok((prompt, finish(stream)?))).collect::<anyhow::Result<_>>()?;
        // What the cancelled requests published is used, what they held is free.
        answers.extend(self.together(self.each().map(|prompt| (prompt, salt(way, 1))))?);
        Ok(answers)
    }
}

fn salt(way: Way, copy: usize) -> Vec<u8> {
    [&[way as u8][..], &copy.to_le_bytes()].concat()
}

fn first_token(stream: &mut EventStream) -> anyhow::Result<()> {
    loop {
        match stream.blocking_recv() {
            Some(EngineEvent::Token { .. }) => return Ok(()),
            Some(EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. }) => {}
            other => bail!("no token came: {other:?}"),
        }
    }
}

/// Waits for the end of a cancelled request, which may have come to its own end before.
fn ended(mut stream: EventStream) -> anyhow::Result<()> {
    loop {
        match stream.blocking_recv() {
            Some(EngineEvent::Finished { .. }) | None => return Ok(()),
            Some(EngineEvent::Token { .. } | EngineEvent::Admitted { .. } | EngineEvent::PromptLogprobs { .. }) => {}
            Some(other) => bail!("a cancelled request did not end: {other:?}"),
        }
    }
}

fn finish(mut stream: EventStream) -> anyhow::Result<Answer> {
    let mut answer = Answer::default();
    loop {
        match stream.blocking_recv() {
            Some(EngineEvent::Admitted { cached_tokens }) => answer.cached_tokens = cached_tokens,
            Some(EngineEvent::PromptLogprobs { .. }) => {}
            Some(EngineEvent::Token { id, logprobs, .. }) => {
                answer.ids.push(id);
                answer.logprobs.extend(logprobs);
            }
            Some(EngineEvent::Finished { .. }) => return Ok(answer),
            other => bail!("the request did not finish: {other:?}"),
        }
    }
}
